"""Export of adapters, and of models of which a part was trained: from an engine, a checkpoint or a directory; written
alone, or merged into the weights of their base.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel

from toolkit.checkpoint import fragment_reader
from toolkit.config.schema import TuningMethod
from toolkit.distributed.process_group import full_shape, gather, on_rank0
from toolkit.engine.parameters import gathered_parameters
from toolkit.export import assemble, write
from toolkit.export.merge import TunedPart, merge_adapter
from toolkit.export.verify import aside_if_wrong
from toolkit.messages import CheckpointError, ConfigError, say, tr
from toolkit.models import adapters, base_model, classifier, extra_tensors, lora_init, probe, stored_form, weights
from toolkit.models.directory import BASE_FILE, is_trusted, read_object
from toolkit.models.load import load_empty
from toolkit.models.load_weights import load_model
from toolkit.models.record import tuning_state
from toolkit.models.save import MAX_SHARD_SIZE, MODEL_DIR, ORIGIN_DIR
from toolkit.models.stages import stage_model, unwrap_model

# Out of the engine


def check_adapter_exportable(model: PreTrainedModel, files: Mapping[str, bytes], folder: Path) -> None:
    """Raise ModelError unless names and shapes that `export_adapter` will write can be read. For rank 0 only."""
    tensors = {name: value for name, value in model.state_dict(keep_vars=True).items() if torch.is_tensor(value)}
    shapes = {name: full_shape(name, value) for name, value in tensors.items()}
    with write.trial_directory(folder) as described:
        write.write_files(files, described, None)
        if is_trusted(described):  # code of a directory may build what cannot be built empty
            return
        shell = load_empty(described)  # what a reader of the adapter makes, on the meta device
        tuned = tuning_state(model)
        adapters.attach_adapter(shell, tuned.settings, tuned.base)
        shell_state = shell.state_dict(keep_vars=True)
        written = {(name, shapes[name]) for name in adapters.stored_names(model)}
        read = {(name, tuple(shell_state[name].shape)) for name in adapters.stored_names(shell)}
        if wrong := sorted(written ^ read):
            raise write.not_as_trained(folder, [name for name, _ in wrong])


def export_adapter(engine: DeepSpeedEngine, files: Mapping[str, bytes], probe_ids: torch.Tensor, folder: Path) -> None:
    """Write the adapter of a tuned model (`ModelRecord.tuned`) to `folder`, without its base. A collective."""
    probed = probe.capture_probe(engine, probe_ids)
    state, tuned = _adapter_state(engine), tuning_state(engine)
    files = {**files, **tuned.exported.describe()}
    on_rank0(lambda: write_adapter(state, files, folder, probed))


def _adapter_state(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Return an engine's adapter, full on rank 0 and empty elsewhere, by the names in its file. A collective."""
    model = unwrap_model(engine.module)
    names, shared = adapters.stored_names(model), adapters.second_names(model)
    # A parameter that two modules share is gathered once, and stored under both names.
    state = {
        names[name]: adapters.in_stored_shape(name, value) for name, value in gathered_parameters(engine.module, names)
    }
    state |= {names[second]: state[names[first]].clone() for second, first in shared.items() if second in names}
    return lora_init.as_plain_state(state)


def prove_adapter(engine: DeepSpeedEngine, folder: Path) -> None:
    """Compare an exported adapter, its settings and its base with those in memory; rename the directory and raise
    CheckpointError on every rank if they differ (see `aside_if_wrong`). A collective. No model is loaded: where these
    are equal, its logits would be those of the directory's probe.
    """
    state, tuned = _adapter_state(engine), tuning_state(engine)
    fingerprints_by_rank = gather(base_model.base_numbers(stage_model(engine.module)))  # a stage's own in a pipeline

    def compare_on_rank0() -> None:
        with aside_if_wrong(folder):
            base = _check_as_in_memory(folder, state, tuned)
            for fingerprints in fingerprints_by_rank:
                for name, numbers in fingerprints.items():
                    base_model.check_numbers(base, name, numbers, base.path, folder)

    on_rank0(compare_on_rank0)


def _check_as_in_memory(
    folder: Path, state: Mapping[str, torch.Tensor], tuned: adapters.AdapterState
) -> base_model.BaseModel:
    """Return the base that an exported adapter names; CheckpointError if it does not hold `state` and `tuned`."""
    values, base = adapters.read_adapter_weights(folder), base_model.read_base(folder)
    wrong = sorted({*values} ^ {*state})
    wrong += [name for name, value in state.items() if name in values and not write.is_same(value, values[name])]
    if adapters.read_settings(folder) != tuned.exported.settings:
        wrong.append(adapters.CONFIG)
    if base != tuned.base:
        wrong.append(BASE_FILE)
    if wrong or base is None:
        raise write.not_as_trained(folder, wrong)
    return base


# Out of a checkpoint or a directory


def part_of_checkpoint(checkpoint: Path, base: str = "") -> TunedPart:
    """Return what was trained (adapter, part of a model) in a verified checkpoint; `base` "" finds the base model."""
    described = checkpoint / MODEL_DIR
    recorded_base = base_model.read_base(described)
    assert recorded_base is not None  # what is not a full model names its base
    settings = read_object(described / adapters.CONFIG) if (described / adapters.CONFIG).is_file() else {}
    values = dict(fragment_reader.iter_weights(checkpoint))
    if settings:  # an adapter: as in its file, where PiSSA and OLoRA are plain LoRA
        shell = load_empty(described)
        adapters.attach_adapter(shell, settings, recorded_base)
        values = lora_init.as_plain_state(_stored_values(shell, values, checkpoint))
        settings = lora_init.as_plain_settings(settings)
    config = read_object(described / "config.json")
    head = (
        classifier.Head(tuple(config["id2label"].values()), config["pad_token_id"])
        if probe.describes_classifier(config)
        else None
    )
    return TunedPart(checkpoint, settings, recorded_base, base_model.find_base(described, base), values, head)


def _stored_values(
    shell: PreTrainedModel, values: dict[str, torch.Tensor], checkpoint: Path
) -> dict[str, torch.Tensor]:
    """Return a checkpoint's weights of an adapter, under the names and in the shapes that its file has."""
    stored = adapters.stored_names(shell)
    # Checkpoints also hold buffers of the base and second names of its tied weights, which DeepSpeed takes for trained.
    of_base = {*shell.state_dict()} - {*stored}
    values = {name: value for name, value in values.items() if name not in of_base}
    shared = adapters.second_names(shell).items()
    values |= {second: values[first].clone() for second, first in shared if second in stored and first in values}
    if wrong := sorted({*values} ^ {*stored}):
        raise CheckpointError("{folder} does not hold its model: {reason}.", folder=checkpoint, reason=wrong[:5])
    return {stored[name]: adapters.in_stored_shape(name, value) for name, value in values.items()}


def part_of_adapter(folder: Path, base: str = "") -> TunedPart:
    """Return an adapter's directory as a TunedPart; `base` "" finds the base model's directory."""
    base_folder = adapters.base_of_adapter(folder, base)
    settings, values = adapters.read_settings(folder), adapters.read_adapter_weights(folder)
    return TunedPart(folder, settings, base_model.read_base(folder), base_folder, values, classifier.read_head(folder))


def load_part(part: TunedPart) -> PreTrainedModel:
    """Return the base model on the CPU with the adapter attached, or with the weights that were trained in it."""
    dtype = next(iter(part.values.values())).dtype
    model = part.shaped(load_model(part.base, dtype=dtype))
    base = base_model.base_of(model, part.base)
    if part.identity is not None:
        base_model.check_base(part.identity, base, part.source)
    if not part.settings:
        model.load_state_dict(part.values, strict=False)
        return model
    adapters.attach_adapter(model, part.settings, base)
    adapters.load_values(model, part.values, part.source)
    return model.eval()


# Onto the disk


def export_part(
    source: Path,
    part: TunedPart,
    folder: Path,
    options: write.ExportOptions,
    files: Mapping[str, bytes],
    dtype: torch.dtype | None,
) -> None:
    """Write an adapter alone, its base with the adapter merged in, or a model of which a part was trained. An adapter's
    official layout is that of ChatGLM's P-Tuning v2: the prefix's weights, without our files and probe.

    Args:
        source: the checkpoint or the adapter that `part` is of.
        part: what was trained.
        folder: must not exist.
        options: how it is written.
        files: those of `toolkit.models.save.non_weight_files`, and the card.
        dtype: precision of a whole model's weights; None: that of the training.
    """
    if not part.settings:
        options.check_whole_model()
    if options.merge or not part.settings:
        _write_merged(source, part, folder, options, files, dtype)
        return
    _check_written_alone(part, options)
    if options.format == "official":
        _write_original_prefix(part.values, part.settings, part.base, folder)
    else:
        write_adapter(part.values, {**files, **part.describe()}, folder, probe.read(source))


def _check_written_alone(part: TunedPart, options: write.ExportOptions) -> None:
    """Raise ConfigError for options of a whole model's files; only a prefix has an official layout of its own."""
    is_prefix = adapters.method_of(part.settings) is TuningMethod.ptuning_v2
    is_format_of_model = options.format != "hf" and not is_prefix
    is_of_model = options.dtype or options.max_shard_size != MAX_SHARD_SIZE or is_format_of_model
    if not is_of_model:
        return
    if part.can_merge:
        raise ConfigError(tr("format=official, dtype= and max_shard_size= are for whole models: add merge=true."))
    raise ConfigError(
        "format=official, dtype= and max_shard_size= are for whole models, and what {folder} holds cannot be "
        "merged into one: leave them out.",
        folder=part.source,
    )


def write_adapter(
    state: dict[str, torch.Tensor], files: Mapping[str, bytes], folder: Path, probed: probe.Probe | None
) -> None:
    """Write an adapter's directory atomically and read it back. `state`: tensors by the names in the adapter's file;
    `probed`: logits to prove it with later. CheckpointError if it cannot be written, or something else is read back.
    """
    without_values = [name for name, value in state.items() if not value.numel()]
    if without_values or not state:
        raise write.not_as_trained(folder, without_values)
    # With one of these the directory would be taken for a model's.
    model_files = ("config.json", extra_tensors.FILE, stored_form.FILE, f"{ORIGIN_DIR}/")
    files = {name: content for name, content in files.items() if not name.startswith(model_files)}
    with write.atomic_directory(folder) as temporary:
        temporary.mkdir()
        write.write_files(files, temporary, probed)
        write.save_checked(state, temporary / adapters.WEIGHTS, folder)


def _write_original_prefix(
    state: dict[str, torch.Tensor], settings: Mapping[str, Any], base: Path, folder: Path
) -> None:
    """Write a P-Tuning v2 prefix in the layout of the ChatGLM repositories (pytorch_model.bin), for their programs."""
    with write.atomic_directory(folder) as temporary:
        temporary.mkdir()
        torch.save({name: value.clone() for name, value in state.items()}, temporary / "pytorch_model.bin")
        sizes = {key: settings[key] for key in ("pre_seq_len", "prefix_projection")}
        config = json.dumps(read_object(base / "config.json") | sizes, indent=2, ensure_ascii=False)
        (temporary / "config.json").write_text(config + "\n", encoding="utf-8")


def _write_merged(
    source: Path,
    part: TunedPart,
    folder: Path,
    options: write.ExportOptions,
    files: Mapping[str, bytes],
    dtype: torch.dtype | None,
) -> None:
    """Write a whole model to `folder`: the base with an adapter merged into its weights, or with some of them trained.

    Args:
        source: the checkpoint or export that holds the trained part, with its probe.
        part: the adapter, or the weights that were trained.
        options: layout and size of the files.
        files: the other files of the export, by name.
        dtype: of the weights; None takes that of the checkpoint's config.json.
    """
    probed = probe.read(source)
    with write.scratch_directory(folder) as scratch:
        plan, values = merge_adapter(part)
        # The weights get the names and shapes that the base's files have.
        stored_form.record(plan.model, weights.files_of(part.base).shapes)
        dtype = dtype or getattr(torch, read_object(source / MODEL_DIR / "config.json")["dtype"])
        state = assemble.assemble_state(source, plan.model, values, scratch, dtype)
        keys = ", ".join(f"{key}={json.dumps(value)}" for key, value in plan.config.items())  # see `plan_merge`
        if keys and options.format == "official":
            raise ConfigError(
                "format=official has no place for what merging adds to the model ({keys}): use format=hf.", keys=keys
            )
        if keys:
            say("The merged model has weights that its base lacks: config.json says {keys}.", keys=keys)
        # A whole model has no base.
        files = {name: files[name] for name in files if name not in (BASE_FILE, adapters.CONFIG)}
        files["config.json"] = assemble.with_config_keys(files["config.json"], plan.config, options.dtype)
        if extra_tensors.FILE in files:
            from toolkit.export.extra_tensors import as_tensors_of

            files = as_tensors_of(part.base, files)
        write.write_folder(plan.model, files, folder, options.format, probed, state, options.max_shard_size)
