"""Checks a recipe without training: config, data, model directory, DeepSpeed config; and the GPUs to plan it for."""

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from toolkit.arguments import check_parsed, parse
from toolkit.command_line import positive_int
from toolkit.config import context_length, devices, files, hub, load, mesh, native_ops, requirements, rules, schema
from toolkit.config.other_model import warn_of_another_model
from toolkit.data.first_rows import are_read_whole, check_sources, estimated_samples, tokenize_first_rows
from toolkit.data.sources import check_distinct, local_files, locate_all
from toolkit.messages import ConfigError, DataError, Problems, say, tr, warn
from toolkit.models import quantized
from toolkit.models.directory import read_config, trust_code
from toolkit.plan import kernels
from toolkit.plan.lookup import cached_outline
from toolkit.plan.machine import GIB, Machine
from toolkit.plan.outline import Outline, rank_part
from toolkit.plan.planned_machine import check_precision, parse_bytes, parse_machine, this_machine
from toolkit.plan.summary import active_parameters_line
from toolkit.train.schedule import FEWEST_STEPS, Epoch, make_schedule, warn_of_short_run

if TYPE_CHECKING:  # tokenizers take seconds to import
    from transformers import PreTrainedModel

    from toolkit.data.tokenize import PrepareReport
    from toolkit.models.chat import AnyChatEncoder

    # (config with the model's directory, encoder if there is a tokenizer here, model without weights)
    _Tried = tuple[schema.RunConfig, AnyChatEncoder | None, PreTrainedModel | None]

_USUAL = "8x80GB"


def check_recipe(words: Sequence[str], *, fetch: bool = True) -> None:
    """Say what a recipe trains, or raise everything that is wrong with it as one error. Without `fetch` no URL is read,
    nor a model on Hugging Face looked up: its size is not told then.
    """
    problems = Problems()
    arguments = parse(words, names=("world_size", "gpus"), problems=problems)
    cfg, values = arguments.loaded.cfg, arguments.values
    machine = problems.attempt(_machine, values, cfg)
    world_size = arguments.world_size or (machine.world_size if machine and "gpus" in values else None)
    is_for_others = "gpus" in values and not (machine and machine.on_cpu)  # not for the GPUs of this machine
    check_parsed(arguments.loaded, world_size, problems, devices=not is_for_others)
    problems.attempt(rules.check_time_left, arguments.loaded)
    problems.attempt(requirements.check_tracker_packages, arguments.loaded)
    problems.attempt(native_ops.check_compiler, arguments.loaded)
    wrong_keys = {key for error in problems.errors for key in error.keys}
    unread = check_sources(cfg.data, wrong_keys, problems)
    if not any(key.startswith("data.") for key in wrong_keys):
        problems.attempt(lambda: check_distinct(cfg.data, local_files(cfg.data)))
    problems.settle()
    is_here, asks_hub = not files.is_hub_name(cfg.model.path), fetch and not problems.errors  # once the config is right
    # Model and outlines are examined where nothing that was found so far explains their errors.
    may_read = not wrong_keys & {"model", "model.path"} and (is_here or asks_hub)
    tried = problems.attempt(_try_model, arguments.loaded, problems) if may_read else None
    outlines = problems.attempt(_outlines, arguments.loaded) if may_read and not problems.errors else None
    if asks_hub:
        _check_hub_datasets(cfg.data, problems)
    problems.raise_all()
    if not is_for_others:
        requirements.warn_without_gpu(cfg.model)
    for note in [*arguments.notes, *arguments.loaded.notices, *([unread] if unread else [])]:
        say(note)
    for ranks in sorted({*cfg.batch.world_sizes, *([world_size] if world_size else [])}):
        say(_batch_sentence(cfg, ranks))
    if world_size and cfg.parallel.tensor > 1:
        groups, size = world_size // cfg.parallel.tensor, cfg.parallel.tensor
        say(tr("{groups} groups of {size} neighbouring ranks, which split the layers.", groups=groups, size=size))
    resolved, encoder, model = tried or (cfg, None, None)
    _report_rows(cfg, encoder, fetch)
    if tried:
        _report_model(resolved, model)
    if may_read and _may_be_unmergeable(cfg):
        from toolkit.export import merge

        loaded = hub.resolve_model_path(arguments.loaded, config_only=True)
        merge.tell_unmergeable(merge.part_of_recipe(loaded.cfg))
    if outlines:
        _say_parameters(*outlines)
    name = cfg.tuning.method.value
    say(tr("Learning rate: {rate:g} at its peak (tuning.method = {method}).", rate=cfg.optim.lr, method=name))
    _check_steps(cfg, world_size or 1)
    say(tr("{recipe}: config and files are in order.", recipe=cfg.recipe))
    if line := files.example_data_notice(cfg.data):
        say(line)


def _check_hub_datasets(data: schema.DataConfig, problems: Problems) -> None:
    """Add to `problems` the datasets on Hugging Face that training could not read."""
    for source in (*data.sources, *data.validation):
        if source.hub:
            from toolkit.data.hub_datasets import check_reachable

            problems.attempt(check_reachable, source, data.streaming and source in data.sources)


def _say_parameters(model_outline: Outline, rank_outline: Outline) -> None:
    """Say how many parameters a model has, trains and computes a token with, and how many of them a rank has."""
    trained, total = f"{model_outline.num_trained:,}", f"{model_outline.num_parameters:,}"
    say(tr("{trained} of {total} parameters are trained.", trained=trained, total=total))
    for line in active_parameters_line(model_outline):
        say(line)
    if rank_outline is not model_outline:
        say(tr("{count} of all parameters are on each rank.", count=f"{rank_outline.num_parameters:,}"))


def _check_steps(cfg: schema.RunConfig, world_size: int) -> None:
    """Warn of what is wrong with the number of steps, as far as files show it; ConfigError for too long a warm-up.

    Without train.max_steps they are estimated from the data, unless there is so much that no warning can apply.
    """
    size, steps = cfg.batch.global_size, cfg.train.max_steps
    needed = max(FEWEST_STEPS, cfg.schedule.warmup_steps + cfg.schedule.decay_steps)
    enough = size * math.ceil(needed / cfg.train.epochs)  # with so many samples nothing is wrong
    epoch = None
    if not steps and not cfg.data.streaming:
        samples, sequences = estimated_samples(cfg.data, enough) or (0, 0)  # zeros: more than enough, or unknown
        epoch = Epoch(samples=samples, sequences=sequences, per_step=size) if sequences else None
    steps = cfg.train.over_epochs(epoch.steps) if epoch else steps
    cfg = mesh.with_micro_batch(cfg)
    if steps:
        try:
            make_schedule(cfg, steps)
        except ConfigError as error:
            if cfg.data.packing is schema.Packing.none or cfg.train.max_steps:  # else the steps are estimated
                raise
            warn(str(error))
    warn_of_short_run(cfg, epoch, steps, world_size)


def _try_model(loaded: load.LoadedConfig, problems: Problems) -> "_Tried | None":
    """Raise what training would raise of model and tokenizer before it tokenizes the data. Return the config with the
    model's directory, the chat encoder (None where no tokenizer is on this disk) and the model without weights; None in
    place of all three where other errors were found, or a tokenizer is made of the data.
    """
    is_here = not files.is_hub_name(loaded.cfg.model.path)
    if is_here and loaded.cfg.model.add_tokens:
        read_config(loaded.cfg.model.path)  # for its errors
        is_here = False  # the copy with more tokens, which has no weights yet, takes its place
    loaded = hub.resolve_model_path(loaded, config_only=True)
    problems.attempt(context_length.check_positions, loaded)
    cfg, model = loaded.cfg, loaded.cfg.model
    warn_of_another_model(model)
    if model.init is schema.Init.pretrained:
        if model.trust_remote_code:
            trust_code(model.path)
        read_config(model.path, with_weights=is_here)
        quantized.check_readable(model.path)
    if problems.errors or not (model.tokenizer or model.path):
        return None
    from toolkit.models.tokenizer_files import load_tokenizer, local_encoder
    from toolkit.tasks.registry import task_of

    encoder = local_encoder(model, cfg.data.train_thinking)
    if encoder is None and is_here:
        load_tokenizer(model.tokenizer or model.path)  # says what is missing
    return cfg, encoder, task_of(cfg).check(cfg, encoder and encoder.tokenizer)


def _report_model(cfg: schema.RunConfig, model: "PreTrainedModel | None") -> None:
    """Report what training will report of the model, as far as its config.json shows it."""
    from toolkit.models import load as models_load, packable, trainable

    if model is not None:
        models_load.report_extra_tensors(model, copied=not cfg.task.has_head)
        trainable.report_frozen_parts(model)
    reason = packable.reason_not_to_pack(cfg.model, cfg.data.max_length, cfg.tuning.method)
    if reason and cfg.data.packing is schema.Packing.packed:
        packable.report_grouped(reason)
    if model is not None and (sentence := kernels.describe_missing(model.config.to_dict())):
        say(sentence)
    if model is not None and not trainable.is_tested(model.config.model_type):
        import_module("toolkit.extras.type_trial").tell(cfg)  # by name: extras are no part of a plain run's imports


def _outlines(loaded: load.LoadedConfig) -> tuple[Outline, Outline] | None:
    """Return the outlines of the model and of a rank's part, None if they are only known when training starts."""
    cfg = hub.resolve_model_path(loaded, config_only=True).cfg
    if cfg.model.init is not schema.Init.pretrained:
        return None  # the vocabulary of a random model is known once its tokenizer has been fitted
    # As for a language model: a default TaskConfig has no teacher, and no head that another task adds.
    outline = cached_outline(replace(cfg, task=schema.TaskConfig()))
    if not outline or cfg.tuning.adapter:
        return None
    return outline, rank_part(outline, cfg)


def _may_be_unmergeable(cfg: schema.RunConfig) -> bool:
    """Whether merging may have no place for what a LoRA trains, so that it is worth slow imports to find that out."""
    is_lora = cfg.tuning.method in (schema.TuningMethod.lora, schema.TuningMethod.qlora)
    is_plain = not (cfg.tuning.adapter or cfg.tuning.save_modules)
    is_pretrained = cfg.model.init is schema.Init.pretrained
    return is_lora and is_pretrained and not (is_plain or cfg.task.has_head or cfg.model.trust_remote_code)


def _report_rows(cfg: schema.RunConfig, encoder: "AnyChatEncoder | None", fetch: bool) -> None:
    """Say what some rows become; a DataError if training would reject one. `fetch`: whether to read URLs."""
    encoder = _fitted_encoder(cfg) if encoder is None else encoder
    if encoder is None:
        return
    if cfg.data.streaming:
        from toolkit.data.stream import Stream

        sources = cfg.data.sources
        if fetch or not any(source.hub or files.is_remote(source.path) for source in sources):
            data_files = locate_all(replace(cfg.data, validation=[]), Path(cfg.prepare.dir))
            Stream(cfg, encoder, data_files).say_estimate()
        return
    report, lengths = tokenize_first_rows(cfg, encoder)
    _check_what_is_left(cfg.data, report, lengths)
    if not lengths:
        return
    say(
        tr(
            "The first {rows} rows, tokenized: {median} tokens in the median, {longest} at most.",
            rows=f"{report.rows_read:,}",
            median=f"{lengths[len(lengths) // 2]:,}",
            longest=f"{lengths[-1]:,}",
        )
    )
    report.print_dropped()
    report.print_longer(cfg.data)


def _fitted_encoder(cfg: schema.RunConfig) -> "AnyChatEncoder | None":
    """Return an encoder with a tokenizer that is trained on the data, as training would. None if the recipe names a
    model or tokenizer instead, if data are streamed or not in files here, or too large for a check, which is said.
    """
    if cfg.model.tokenizer or cfg.model.path or cfg.data.streaming or not local_files(cfg.data):
        return None
    if not are_read_whole(cfg.data):
        say(
            tr(
                "The rows' lengths were not checked: this recipe makes its tokenizer of all rows. To check them: "
                "toolkit prepare, with the same arguments."
            )
        )
        return None
    from toolkit.tasks.language_data import build_encoder

    with TemporaryDirectory() as folder:  # a check leaves no tokenizer in prepare.dir
        return build_encoder(replace(cfg, prepare=replace(cfg.prepare, dir=folder)))


def _check_what_is_left(data: schema.DataConfig, report: "PrepareReport", lengths: Sequence[int]) -> None:
    """Raise a DataError where training would find nothing to train on, or warn where the first rows let expect it."""
    usable, is_whole = report.rows_read - sum(report.dropped.values()), are_read_whole(data)  # all rows were read
    if report.rows_read and not lengths:
        error = report.no_trained_tokens("data.sources")
        if is_whole:
            raise error
        warn(str(error))
    if is_whole and lengths and data.validation_rows >= usable:
        raise DataError(
            "data.validation = {count} rows: there are {all} rows, and none would be left to train. Take fewer, or a "
            "fraction: data.validation=0.05.",
            count=f"{data.validation_rows:,}",
            all=f"{usable:,}",
        )


def _batch_sentence(cfg: schema.RunConfig, world_size: int) -> str:
    """Return a sentence on how the global batch is divided over so many ranks."""
    size = cfg.batch.global_size
    if cfg.batch.micro_per_gpu == schema.AUTO:
        return tr(
            "{size} sequences per step on {world_size} ranks; the micro-batch size is measured at startup.",
            size=size,
            world_size=world_size,
        )
    return tr(
        "{size} sequences per step = {micro} x {times} x {data_ranks} (micro-batch x accumulation x data-parallel "
        "ranks).",
        size=size,
        micro=cfg.batch.micro_per_gpu,
        times=mesh.accumulation(cfg, world_size),
        data_ranks=mesh.mesh_of(cfg, world_size).data_ranks,
    )


def _machine(values: dict[str, str], cfg: schema.RunConfig) -> Machine | None:
    """Return the GPUs of the argument, else those here on which ranks would run (None: no NVIDIA GPU is here);
    ConfigError if they cannot run it.
    """
    if "gpus" in values:
        machine: Machine | None = parse_machine(values["gpus"], 1, "")
    else:
        machine = this_machine() if devices.on_nvidia() else None
    check_precision(machine.card if machine else None, cfg.precision)
    return machine


def machine_for(values: dict[str, str], cfg: schema.RunConfig) -> Machine:
    """Return the nodes that `toolkit plan` plans for, by its arguments gpus, nodes and host_memory (`values`). Without
    gpus they are like this machine, or have the usual GPUs if it has no NVIDIA GPU, which is printed. They use no more
    GPU memory than plan.max_gpu_gib. ConfigError if their GPUs do not have the config's precision.
    """
    nodes = positive_int(values, "nodes") or 1
    host_memory = values.get("host_memory", "")
    if "gpus" in values:
        machine = parse_machine(values["gpus"], nodes, host_memory)
    elif here := this_machine(nodes):
        machine = replace(here, host_bytes=parse_bytes(host_memory, "host_memory")) if host_memory else here
    else:
        _say_usual_is_planned()
        machine = parse_machine(_USUAL, nodes, host_memory)
    check_precision(machine.card, cfg.precision)
    most_bytes = int(cfg.plan.max_gpu_gib * GIB)  # for tensors; 0: no limit of the config
    if most_bytes and most_bytes < machine.usable_bytes:
        machine = replace(machine, memory_bytes=most_bytes, context_bytes=0)
    return machine


def _say_usual_is_planned() -> None:
    """Say that a plan is for the usual GPUs, as this machine has none, or others than NVIDIA's."""
    kind = devices.device_here()
    if kind == "cpu" or devices.on_nvidia():
        say("No GPU here and no gpus=: planned for {gpus}.", gpus=_USUAL)
        return
    say(
        "What the accelerators of this machine ({kind}) have is not known, and no gpus=: planned for {gpus}.",
        kind=kind,
        gpus=_USUAL,
    )
