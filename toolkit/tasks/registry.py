"""Chooses a config's task, and imports its module alone."""

from importlib import import_module
from typing import TYPE_CHECKING

from toolkit.config.schema import PreferenceLoss, RunConfig, TaskKind

if TYPE_CHECKING:
    from toolkit.tasks.language import LanguageTask

_OF_KIND = {
    TaskKind.language: "language.LanguageTask",
    TaskKind.distill: "distill.DistillTask",
    TaskKind.reward: "reward.RewardTask",
    TaskKind.classify: "classify.ClassifyTask",
    TaskKind.embed: "embed.EmbedTask",
}


def task_of(cfg: RunConfig) -> "LanguageTask":
    """Return the task of a config, by `task.kind` and for language models `preference.loss`."""
    module, _, class_name = _path_of(cfg).partition(".")
    task: LanguageTask = getattr(import_module(f"toolkit.tasks.{module}"), class_name)()
    return task


def _path_of(cfg: RunConfig) -> str:
    """Return MODULE.CLASS of a config's task in toolkit/tasks/."""
    if cfg.task.kind is TaskKind.distill and cfg.distill.on_policy:
        return "on_policy.OnPolicyTask"
    if cfg.data.streaming:
        return "preference_stream.PreferenceStreamTask" if cfg.preference.is_on else "stream.StreamTask"
    if cfg.task.kind is TaskKind.language and cfg.preference.is_on:
        is_single = cfg.preference.loss is PreferenceLoss.kto
        return "preference.KtoTask" if is_single else "preference.PreferenceTask"
    return _OF_KIND[cfg.task.kind]
