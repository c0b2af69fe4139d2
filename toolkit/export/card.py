"""The model card (README.md) of a run's model or adapter."""

import json
import math
from collections.abc import Mapping
from typing import Any

from toolkit import secrets
from toolkit.checkpoint import directory
from toolkit.config.schema import TuningMethod
from toolkit.messages import tr

CARD_FILE = "README.md"
_PACKAGES = ("torch", "deepspeed", "transformers", "peft")
_MOST_EVALUATIONS = 20
"""Rows of the table of evaluations: the last ones."""


def card(state: directory.RunState, is_adapter: bool) -> bytes:
    """Return the content of the model card: front matter, what was trained on what data, losses, versions, settings."""
    config: Mapping[str, Any] = secrets.hide_all(state.config)
    model, (task_kind, _) = config["model"], _task_and_loss(config)
    base = model["name"] or model["path"] or "?"
    sections = ["task", "tuning", "data", "preference", "distill", "batch", "optim", "schedule", "precision"]
    if task_kind == "language":  # the usual one
        sections.remove("task")
    if task_kind != "distill":
        sections.remove("distill")
    shown = {name: config[name] for name in sections if name in config}
    front_matter = _front_matter(config, is_adapter)
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front_matter), "---", ""]
    lines += [f"# {tr('{base}, fine-tuned', base=base)}", "", *(f"- {fact}" for fact in _facts(state, config)), ""]
    lines += [f"## {tr('Losses')}", "", *_losses(state, config), ""]
    lines += [f"## {tr('Versions')}", "", *(f"- {version}" for version in _versions(state)), ""]
    settings = json.dumps(shown, indent=1, ensure_ascii=False, default=str)
    lines += [f"## {tr('Settings')}", "", "```json", settings, "```", ""]
    return "\n".join(lines).encode()


def _front_matter(config: Mapping[str, Any], is_adapter: bool) -> list[tuple[str, Any]]:
    """Return (key, value) of the card's YAML front matter, which the Hugging Face Hub reads."""
    method, (kind, _) = config["tuning"]["method"], _task_and_loss(config)
    pipeline = "text-generation" if kind in ("language", "distill") else "text-classification"
    front: list[tuple[str, Any]] = [("pipeline_tag", pipeline), ("tags", ["deepspeed", f"tuning-{method}"])]
    if not (is_adapter and method == TuningMethod.ptuning_v2.value):  # which no library loads
        front.append(("library_name", "peft" if is_adapter else "transformers"))
    if config["model"]["hub_id"]:
        front.append(("base_model", config["model"]["hub_id"]))
    return front


def _facts(state: directory.RunState, config: Mapping[str, Any]) -> list[str]:
    """Return the card's first list: recipe, base model, method, data, steps and tokens."""
    model = config["model"]
    sources = [str(source["hub"] or source["path"] or source["format"]) for source in config["data"]["sources"]]
    return [
        tr("recipe: {recipe}", recipe=config["recipe"]),
        tr("base model: {path}", path=model["path"] or model["name"]),
        tr("what was trained: tuning={method}", method=config["tuning"]["method"]),
        tr("data: {sources} (store {store})", sources=", ".join(sources), store=state.data.get("store", "?")),
        tr(
            "{steps} steps, {trained} trained tokens of {total}, {ranks} ranks",
            steps=f"{state.step:,}",
            trained=f"{state.trained_tokens:,}",
            total=f"{state.total_tokens:,}",
            ranks=state.world_size,
        ),
    ]


def _versions(state: directory.RunState) -> list[str]:
    """Return the versions of the packages that the run used, and the commit of this toolkit."""
    packages, commit = state.versions.get("packages", {}), state.versions.get("commit")
    versions = [f"{name} {packages[name]}" for name in _PACKAGES if name in packages]
    return versions + ([tr("toolkit commit {commit}", commit=commit)] if commit else [])


def _task_and_loss(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return task.kind and preference.loss of a config, with defaults for configs that are older than these keys."""
    return config.get("task", {}).get("kind", "language"), config.get("preference", {}).get("loss", "none")


def _losses(state: directory.RunState, config: Mapping[str, Any]) -> list[str]:
    """Return Markdown lines: the first and the last training loss, and a table of the last evaluations."""
    lines = []
    if not math.isnan(state.first_loss):
        kind, preference = _task_and_loss(config)
        is_of_samples = kind in ("reward", "classify", "embed") or preference != "none"
        first = f"{state.first_loss:.4f} -> " if state.step > 1 else ""
        losses = f"{first}{state.last_loss:.4f}" + ("" if is_of_samples else " nats/token")
        lines += [tr("training: {losses}", losses=losses), ""]
    if state.evaluations:
        names = [name for name in state.evaluations[-1] if name != "step" and "/" not in name]  # no eval_loss/SOURCE
        lines += [f"| step | {' | '.join(names)} |", "|" + " --- |" * (len(names) + 1)]
        for row in state.evaluations[-_MOST_EVALUATIONS:]:
            cells = [f"{row[name]:.4g}" if name in row else "" for name in names]
            lines.append(f"| {int(row['step'])} | {' | '.join(cells)} |")
    return lines or [tr("none were logged")]
