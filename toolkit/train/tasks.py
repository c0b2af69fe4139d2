"""Which task a config asks for."""

from toolkit.config.schema import PreferenceLoss, RunConfig, TaskKind
from toolkit.train.distill_task import DistillTask
from toolkit.train.language_task import LanguageTask
from toolkit.train.preference_task import KtoTask, PreferenceTask, RewardTask


def task_of(cfg: RunConfig) -> LanguageTask:
    """Return the task of a config: `task.kind`, and of language models `preference.loss`."""
    if cfg.task.kind is TaskKind.distill:
        return DistillTask()
    if cfg.task.kind is TaskKind.reward:
        return RewardTask()
    if cfg.preference.loss is PreferenceLoss.kto:
        return KtoTask()
    return PreferenceTask() if cfg.preference.is_on else LanguageTask()
