"""Resuming, and what must be equal on all ranks and in a resumed run; compared under names that no language changes."""

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import toolkit
from toolkit.checkpoint import directory, engine_files, random_state
from toolkit.checkpoint.directory import RunState
from toolkit.config.load import to_dict
from toolkit.config.rule_tables import OPTIMIZERS
from toolkit.config.schema import Influence, RunConfig, influence_of, leaves
from toolkit.distributed import process_group
from toolkit.distributed.process_group import on_rank0
from toolkit.launch.environment import Ranks
from toolkit.messages import CheckpointError, ConfigError, say, tr
from toolkit.secrets import are_same, hide_all
from toolkit.train.checkpointer import Checkpointer
from toolkit.train.run_dir import RunSource, describe_environment, versions
from toolkit.train.task import RunContext


def trim_metrics(folder: Path, length: int) -> None:
    """Move rows beyond `length` bytes of metrics.jsonl, of steps that are done again, to a file. For rank 0 only."""
    path = folder / "metrics.jsonl"
    if not path.exists() or path.stat().st_size <= length:
        return
    content = path.read_bytes()
    with open(folder / "logs" / "metrics-lost.jsonl", "ab") as lost:
        lost.write(content[length:])
    os.truncate(path, length)


def starting_state(cfg: RunConfig, data: dict[str, str], ranks: Ranks, source: RunSource) -> RunState:
    """Return where the run begins; put aside what is done again. For rank 0 only; `data` is the `identity` of its data.
    ConfigError if the run computes something else than the saved one, CheckpointError if it cannot be read here.
    """
    config = json.loads(json.dumps(to_dict(cfg)))
    same: dict[str, Any] = {
        "world_size": ranks.world_size,
        "data": data,
        "config": config,
        "versions": describe_environment(ranks.world_size),
    }
    if source.checkpoint is None:
        trim_metrics(source.folder, 0)
        return RunState(**same)
    state = directory.read_run_state(source.checkpoint)
    _check_layout(state, config, ranks.world_size)
    if _is_converted(state, cfg.zero.stage, ranks) and not OPTIMIZERS[cfg.optim.name].is_adam:
        raise CheckpointError(
            "the checkpoint was saved by {before} ranks under ZeRO-{stage}, and DeepSpeed can bring Adam's states "
            "alone to others, not those of optim.name = {name}. Start with {before} ranks and zero.stage={stage}.",
            before=state.world_size,
            stage=_stage(state.config),
            name=cfg.optim.name.value,
        )
    changed = check_changes(hide_all(state.config), config, state.data, data, cfg.checkpoint.allow_changes)
    if source.checkpoint.parent.parent == source.folder:
        trim_metrics(source.folder, state.metrics_bytes)
    say("Resuming after step {step} from {checkpoint}.", step=f"{state.step:,}", checkpoint=source.checkpoint)
    if changed:
        say(tr("Changed since then:") + "\n" + "\n".join(changed))
    return replace(state, **same)


def _stage(config: Mapping[str, Any]) -> int:
    return int(config["zero"]["stage"])


def _is_converted(saved: RunState, stage: int, ranks: Ranks) -> bool:
    """Whether a checkpoint is resumed through DeepSpeed's universal form: other ranks, or another stage."""
    return _stage(saved.config) != stage or (saved.world_size != ranks.world_size and stage != 0)


def _check_layout(saved: RunState, config: Mapping[str, Any], world_size: int) -> None:
    """Reject stages, ranks and offloads to which the files of a checkpoint cannot be converted."""
    (stage, tensor, pipeline), (now_stage, now_tensor, now_pipeline) = (
        (_stage(one), *(int(one.get("parallel", {}).get(kind, 1)) for kind in ("tensor", "pipeline")))
        for one in (saved.config, config)
    )
    if tensor != now_tensor or (now_tensor > 1 and saved.world_size != world_size):
        raise CheckpointError(
            "the checkpoint was saved by {ranks} ranks with parallel.tensor = {before}, and cannot be resumed with "
            "{now_ranks} and {now}: the parts of layers stay on as many ranks. Start as before, or train its weights "
            "in another run (toolkit export-model).",
            ranks=saved.world_size,
            before=tensor,
            now_ranks=world_size,
            now=now_tensor,
        )
    is_same = (pipeline, stage, saved.world_size) == (now_pipeline, now_stage, world_size)
    if max(pipeline, now_pipeline) > 1 and not is_same:
        raise CheckpointError(
            "the checkpoint was saved by {ranks} ranks in {before} pipeline stages under ZeRO-{zero}, and a pipeline "
            "can only be resumed in the same layout: parallel.pipeline={before} zero.stage={zero} on {ranks} ranks. To "
            "train the weights in another layout start another run with model.path=RUN/export.",
            ranks=saved.world_size,
            before=pipeline,
            zero=stage,
        )
    # The universal form leads from stage to stage: 0 has none, and 3 reads another one than 1 and 2 write (deepspeed
    # 0.19.8, measured: KeyError in load_hp_checkpoint_state_from_checkpoint_dir_stage3).
    if stage != now_stage and not {stage, now_stage} <= {1, 2}:
        raise CheckpointError(
            "the checkpoint was saved under ZeRO-{before} and cannot be resumed under ZeRO-{now}: only stages 1 and 2 "
            "convert into each other. Start with zero.stage={before}, with any number of ranks.",
            before=stage,
            now=now_stage,
        )
    for zero in (saved.config["zero"], config["zero"]):
        for section, key in (("zenflow", "enabled"), ("offload_optimizer", "super_offload")):
            if zero.get(section, {}).get(key):  # DeepSpeed 0.19.8 keeps states where its checkpoints do not look
                raise CheckpointError(
                    "a run with {key} = true cannot be resumed from a checkpoint, nor can another run from its "
                    "checkpoints: DeepSpeed does not save a part of its optimizer's states. Take the weights alone: "
                    "toolkit export-model, then model.path=EXPORT under another run.name.",
                    key=f"zero.{section}.{key}",
                )


def resume_from(checkpointer: Checkpointer, checkpoint: Path, state: RunState, ranks: Ranks, seed: int) -> None:
    """Put engine and random generators into the state of a checkpoint, of `starting_state`. A collective."""
    saved = directory.read_run_state(checkpoint)
    checkpointer.load(checkpoint, converts=_is_converted(saved, _stage(state.config), ranks))
    path = checkpoint / random_state.file_name(ranks.rank)
    if saved.world_size == ranks.world_size:
        try:
            random_state.restore(path)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise engine_files.unreadable_error(path, error) from error
    else:  # other ranks, other streams: dropout differs, the mathematics do not
        random_state.seed_all(seed + 1_000_003 * state.step + ranks.rank)


def rewind_to(run: RunContext, checkpoint: Path) -> RunState:
    """Put a running run into the state of a checkpoint that it saved or began with. A collective."""
    state = replace(directory.read_run_state(checkpoint), config=run.start.config)
    is_own = checkpoint.parent.parent == run.folder
    on_rank0(lambda: trim_metrics(run.folder, state.metrics_bytes if is_own else 0))
    resume_from(run.checkpointer, checkpoint, state, run.ranks, run.cfg.run.seed)
    return state


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return key, old and new value of what differs, in the config's order, no secrets; missing keys are defaults."""
    old, new = dict(leaves(before)), dict(leaves(now))
    defaults = leaves(to_dict(RunConfig()))
    old = {key: value for key, value in defaults if key in new and not _is_trained(key)} | old
    keys = [*new, *(key for key in old if key not in new)]
    return [(key, old.get(key), new.get(key)) for key in keys if not are_same(old.get(key), new.get(key))]


def is_allowed_change(key: str) -> bool:
    """Whether a key may change without changing what is computed."""
    return influence_of(key, RunConfig) in (Influence.free, Influence.content)


def _is_trained(key: str) -> bool:
    return influence_of(key, RunConfig) is Influence.trained


def _is_below(key: str, names: Sequence[str]) -> bool:
    """Whether a key is one of the names, or in a section of such a name."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def check_changes(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    data_before: Mapping[str, str],
    data_now: Mapping[str, str],
    allowed: Sequence[str],
) -> list[str]:
    """Return a line per change since the checkpoint, of configs and data; ConfigError if one is not in `allowed`, the
    keys and sections of `checkpoint.allow_changes`, and changes what is computed.
    """
    found = [
        (key, old, new, f"  {key}: {_shortened(old)} -> {_shortened(new)}")
        for key, old, new in differences(before, now)
    ]
    adams, optimizer = {"adam", "adamw"}, before.get("optim", {}).get("name")  # these two have the same states
    other_states = [
        line
        for key, old, new, line in found
        if (key == "optim.name" and not {optimizer, new} <= adams)
        or (key in ("optim.decay", "optim.layer_lr_decay") and old is not None)  # older configs know no groups
    ]
    if other_states:
        raise ConfigError(
            "the checkpoint holds the states of another optimizer, or of other parameter groups:\n{changes}\nUndo "
            "this, or start over under another run.name, from model.path=RUN/export.",
            changes="\n".join(other_states),
        )
    if others := [line for key, old, _, line in found if _is_trained(key) and old is not None]:
        raise ConfigError(
            "the checkpoint belongs to a run that trains other parameters:\n{changes}\nUndo this, or start over under "
            "another run.name; from an adapter: tuning.adapter=RUN/export.",
            changes="\n".join(others),
        )
    lines = [(key, line) for key, _, _, line in found]
    for name, fingerprint in data_now.items():
        if data_before.get(name) != fingerprint:
            lines.append(("data", tr("  the prepared data: {name} is another one", name=name)))
    # Where a part of the model is trained, base.json in the checkpoint tells whether the rest is the same.
    is_part = now.get("tuning", {}).get("method", "full") != "full"
    free = [*allowed, "model.path"] if is_part else allowed
    refused = [(key, line) for key, line in lines if not is_allowed_change(key) and not _is_below(key, free)]
    if refused:
        raise ConfigError(
            "the checkpoint belongs to a run that computes something else:\n{changes}\nUndo this, or allow it: "
            "checkpoint.allow_changes=[{keys}]; or start over under another run.name.",
            changes="\n".join(dict.fromkeys(line for _, line in refused)),
            keys=",".join(dict.fromkeys(key for key, _ in refused)),
        )
    return [line for _, line in lines]


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


MAY_DIFFER = (
    "language",
    "run.display",
    "run.dir",
    "run.name",
    "prepare.dir",
    "prepare.num_workers",
    "data.num_workers",
    "distributed.interface",
)
"""Keys that ranks may have different values of: rank 0 alone chooses the run directory, and the others say how a node
shows things, or where it keeps and how it reads what is compared by its content."""
_FOLDERS = {"model.path": "model.hub_id", "tuning.adapter": ""}
"""Keys that name a directory, compared by its content; and the key that stands for its path, if any: the cache of
Hugging Face may be elsewhere on another node."""
_MODEL_FILES = (".json", ".safetensors", ".bin", ".model", ".py")
_CODE_FILES = (".py", ".json", ".yaml")  # tables decide too: plan/gpus.yaml chooses layouts
_PART = 1 << 16
"""Bytes that are read at the beginning, in the middle and at the end of a model's file: all would take minutes."""


def check_settings(cfg: RunConfig) -> None:
    """Raise ConfigError on every rank where settings, code or model differ. Before data is prepared. A collective."""
    if process_group.world_size() > 1:
        process_group.check_alike(cfg.distributed, {**_settings(cfg), **_code()}, ConfigError)


def _settings(cfg: RunConfig) -> dict[str, str]:
    """Return the config by key, without secrets, and digests of the directories that it names."""
    values = {key: value for key, value in _leaves(to_dict(cfg), "") if not _is_below(key, MAY_DIFFER)}
    for key, path_key in _FOLDERS.items():
        folder = Path(json.loads(values.get(key, '""')))
        if folder.name and folder.is_dir():
            files = sorted(file for file in folder.iterdir() if file.suffix in _MODEL_FILES and file.is_file())
            values[f"{key}: files"] = _digest((file, _parts(file)) for file in files)
            if json.loads(values.get(path_key, '""')):
                del values[key]
    return values


def _leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each plain value, also of those in lists, and the value as JSON."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}[{number}]")
    else:
        yield key, json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def _code() -> dict[str, str]:
    """Return versions, the device, and digests of the program and of this package."""
    found = {f"version: {name}": version for name, version in versions().items()}
    found["version: python"] = sys.version.split()[0]
    files = sorted(file for file in Path(toolkit.__file__).parent.rglob("*.*") if file.suffix in _CODE_FILES)
    found["code: toolkit"] = _digest((file, file.read_bytes()) for file in files)
    program = Path(sys.argv[0])
    if program.is_file():
        found[f"code: {program.name}"] = _digest([(program, program.read_bytes())])
    from deepspeed.accelerator import get_accelerator  # which device it takes is decided when it is first asked

    found["device"] = str(get_accelerator().device_name())
    return found


def _parts(file: Path) -> bytes:
    size = file.stat().st_size
    parts = [str(size).encode()]
    with file.open("rb") as handle:
        for place in (0, size // 2, max(0, size - _PART)):
            handle.seek(place)
            parts.append(handle.read(_PART))
    return b"".join(parts)


def _digest(files: Iterable[tuple[Path, bytes]]) -> str:
    digest = hashlib.sha256()
    for file, content in files:
        digest.update(f"{file.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]
