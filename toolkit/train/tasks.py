"""Which task a config asks for."""

from toolkit.config.schema import PreferenceLoss, RunConfig, TaskKind
from toolkit.train import classify_task, distill_task, embed_task, language_task, preference_task


def task_of(cfg: RunConfig) -> language_task.LanguageTask:
    """Return the task of a config: `task.kind`, and of language models `preference.loss`."""
    if cfg.task.kind is TaskKind.distill:
        return distill_task.DistillTask()
    if cfg.task.kind is TaskKind.classify:
        return classify_task.ClassifyTask()
    if cfg.task.kind is TaskKind.embed:
        return embed_task.EmbedTask()
    if cfg.task.kind is TaskKind.reward:
        return preference_task.RewardTask()
    if cfg.preference.loss is PreferenceLoss.kto:
        return preference_task.KtoTask()
    return preference_task.PreferenceTask() if cfg.preference.is_on else language_task.LanguageTask()
