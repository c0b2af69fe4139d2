"""The model card of an export: what was trained, on what, how far, with what. Nothing in it is a claim of quality."""

import json
from collections.abc import Mapping
from typing import Any

from toolkit.checkpoint.directory import RunState
from toolkit.config.schema import TuningMethod
from toolkit.messages import tr
from toolkit.secrets import hide_all

FILE = "README.md"
_PACKAGES = ("torch", "deepspeed", "transformers", "peft")


def card(state: RunState, is_adapter: bool) -> bytes:
    """Return the card of what a run made.

    Args:
        state: of the checkpoint, or of the run's end.
        is_adapter: whether the folder holds an adapter and no model.
    """
    config: Mapping[str, Any] = hide_all(state.config)
    model, tuning = config["model"], config["tuning"]
    base = model["name"] or model["path"] or "?"
    front = {"pipeline_tag": "text-generation", "tags": ["deepspeed", f"tuning-{tuning['method']}"]}
    if not (is_adapter and tuning["method"] == TuningMethod.ptuning_v2.value):  # which no library loads
        front["library_name"] = "peft" if is_adapter else "transformers"
    if model["hub_id"]:
        front["base_model"] = model["hub_id"]
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()), "---", ""]
    lines += [f"# {tr('{base}, fine-tuned', base=base)}", "", *_facts(state, config), ""]
    lines += [f"## {tr('Losses')}", "", *_losses(state), "", f"## {tr('Versions')}", ""]
    packages = state.versions.get("packages", {})
    lines += [f"- {name} {packages[name]}" for name in _PACKAGES if name in packages]
    if commit := state.versions.get("commit"):
        lines.append(f"- {tr('toolkit commit {commit}', commit=commit)}")
    lines += ["", f"## {tr('Settings')}", "", "```json"]
    shown = {key: config[key] for key in ("tuning", "data", "batch", "optim", "schedule", "precision")}
    lines += [json.dumps(shown, indent=1, ensure_ascii=False, default=str), "```", ""]
    return "\n".join(lines).encode()


def _facts(state: RunState, config: Mapping[str, Any]) -> list[str]:
    sources = [str(one["hub"] or one["path"] or one["format"]) for one in config["data"]["sources"]]
    return [
        f"- {line}"
        for line in (
            tr("recipe: {recipe}", recipe=config["recipe"]),
            tr("base model: {path}", path=config["model"]["path"] or config["model"]["name"]),
            tr("what was trained: tuning={method}", method=config["tuning"]["method"]),
            tr("data: {sources} (store {store})", sources=", ".join(sources), store=state.data.get("store", "?")),
            tr(
                "{steps} steps, {trained} trained tokens of {total}, {ranks} ranks",
                steps=f"{state.step:,}",
                trained=f"{state.trained_tokens:,}",
                total=f"{state.total_tokens:,}",
                ranks=state.world_size,
            ),
        )
    ]


def _losses(state: RunState) -> list[str]:
    """Return a table of the validation, and the training loss at both ends; nats per trained token."""
    lines = []
    if state.first_loss is not None and state.last_loss is not None:
        line = tr(
            "training: {first} -> {last} nats/token", first=f"{state.first_loss:.4f}", last=f"{state.last_loss:.4f}"
        )
        lines += [line, ""]
    if state.evaluations:
        names = [name for name in state.evaluations[-1] if name != "step" and "/" not in name]  # not each source's
        lines += [f"| step | {' | '.join(names)} |", "|" + " --- |" * (len(names) + 1)]
        lines += [
            f"| {int(row['step'])} | {' | '.join(f'{row[name]:.4g}' if name in row else '' for name in names)} |"
            for row in (state.evaluations if len(state.evaluations) <= 20 else state.evaluations[-20:])
        ]
    return lines or [tr("none were logged")]
