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
    name = _OF_KIND[cfg.task.kind]
    if cfg.task.kind is TaskKind.language and cfg.preference.is_on:
        is_single = cfg.preference.loss is PreferenceLoss.kto
        name = "preference.KtoTask" if is_single else "preference.PreferenceTask"
    if cfg.data.streaming:
        name = "preference_stream.PreferenceStreamTask" if cfg.preference.is_on else "stream.StreamTask"
    if cfg.task.kind is TaskKind.distill and cfg.distill.on_policy:
        name = "on_policy.OnPolicyTask"
    module, _, kind = name.partition(".")
    task: LanguageTask = getattr(import_module(f"toolkit.tasks.{module}"), kind)()
    return task
