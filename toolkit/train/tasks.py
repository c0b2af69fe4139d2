"""Which task a config asks for."""

from toolkit.config.schema import PreferenceLoss, RunConfig, TaskKind
from toolkit.train import classify_task, distill_task, embed_task, language_task, preference_task

_OF_KIND: dict[TaskKind, type[language_task.LanguageTask]] = {
    TaskKind.distill: distill_task.DistillTask,
    TaskKind.reward: preference_task.RewardTask,
    TaskKind.classify: classify_task.ClassifyTask,
    TaskKind.embed: embed_task.EmbedTask,
}


def task_of(cfg: RunConfig) -> language_task.LanguageTask:
    """Return the task of a config: `task.kind`, and of language models `preference.loss`."""
    if kind := _OF_KIND.get(cfg.task.kind):
        return kind()
    if cfg.preference.loss is PreferenceLoss.kto:
        return preference_task.KtoTask()
    return preference_task.PreferenceTask() if cfg.preference.is_on else language_task.LanguageTask()
