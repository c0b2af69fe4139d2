"""One GPU and GLMs of random weights: speed and memory of our runs, and of Hugging Face's Trainer on the same work.

Nothing is read or downloaded: models and rows are made from a seed, on the GPU. `PARTS` says what is measured and what
it should reach; each part runs in a process of its own (gpu_parts.py), so that one that fails or takes too long
costs no other. Tiny twins of the models try it all out without a GPU.
"""

import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from deepspeed.accelerator import get_accelerator

from toolkit.config.load import load
from toolkit.config.mesh import Mesh
from toolkit.config.schema import RunConfig
from toolkit.data.loader import collate
from toolkit.data.packing import pack
from toolkit.data.store import Sample
from toolkit.distributed import process_group
from toolkit.engine.build import initialize_engine
from toolkit.engine.ds_config import build_ds_config
from toolkit.launch import environment
from toolkit.models.attention import choose_attention
from toolkit.models.load import TORCH_DTYPES, random_config
from toolkit.plan.lookup import outline_of
from toolkit.plan.memory import plan_rank
from toolkit.sample_types import Batch
from toolkit.tasks.language import LanguageTask
from toolkit.tasks.language_model import adapt, apply_liger
from toolkit.train.baseline import measure_baseline
from toolkit.train.schedule import Schedule
from toolkit.train.step import StepGuard, train_step
from toolkit.train.throughput import ThroughputMeter, memory_peaks

MEDIAN_TOKENS, SIGMA = 300, 0.8
"""Of the log-normal lengths of samples."""
PROMPT_SHARE = 0.4
WARM_UP = 2
_ENDLESS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is trained, and how much at once."""

    vocab: int = 65024
    hidden: int = 4096
    inner: int = 13696
    layers: int = 28
    heads: int = 32
    groups: int = 2
    tokens: int = 4096
    """Of a packed row."""
    rows: int = 2
    """Of a micro-batch."""
    accumulation: int = 4
    """Micro-batches of a step."""
    steps: int = 4
    """That are measured."""
    packed: bool = True


CHATGLM3_6B = Size()
GLM4_9B = Size(vocab=151552, layers=40, tokens=8192, rows=1)
PADDED = Size(rows=4, packed=False)
SHORTER = Size(rows=1, accumulation=8)
"""The same rows in smaller micro-batches: transformers' Trainer keeps all logits."""
_TWIN: dict[str, Any] = {"vocab": 512, "hidden": 64, "inner": 128, "layers": 2, "heads": 4, "tokens": 256, "steps": 1}
_SPARE = 0.95
"""Of a GPU's free memory, for what is planned: CUDA's own and fragments take the rest."""


class Part(NamedTuple):
    """One measurement."""

    size: Size
    call: str
    """ours or hugging_face: functions of this module."""
    words: tuple[str, ...]
    """Overrides of the recipe chatglm."""
    mark: str = ""
    """Figure of `marks` that says how good it is, and what it should be."""
    goal: float = 0.0


FP8 = ("precision=fp8", "compile=inductor")
KEPT = "train.activation_checkpointing.enabled=false"
FULL, LORA, BASE, COMPILED = "tuning=full", "tuning=lora", "6b-full-zero1", "6b-full-compiled"
PARTS = {
    BASE: Part(CHATGLM3_6B, "ours", (FULL, "zero=stage1"), "mfu", 0.45),
    "6b-lora": Part(CHATGLM3_6B, "ours", (LORA, "zero=stage0"), "to_full", 1.3),
    "6b-lora-kept": Part(CHATGLM3_6B, "ours", (LORA, "zero=stage0", KEPT), "to_full", 1.3),
    "6b-full-liger": Part(CHATGLM3_6B, "ours", (FULL, "zero=stage1", "kernels.liger=always"), "to_full", 1.1),
    "6b-trainer": Part(SHORTER, "hugging_face", (FULL, "zero=stage1"), "ours_to_it", 1.0),
    "6b-full-zero3": Part(CHATGLM3_6B, "ours", (FULL, "zero=stage3"), "mfu", 0.45),
    "9b-lora": Part(GLM4_9B, "ours", (LORA, "zero=stage0"), "mfu", 0.45),
    COMPILED: Part(CHATGLM3_6B, "ours", (FULL, "zero=stage1", "compile=inductor"), "to_full", 1.0),
    "6b-full-fp8": Part(CHATGLM3_6B, "ours", (FULL, "zero=stage1", *FP8), "to_compiled", 1.1),
    "6b-full-padded": Part(PADDED, "ours", (FULL, "zero=stage1"), "ours_to_it", 1.0),
    "9b-full-zero1": Part(GLM4_9B, "ours", (FULL, "zero=stage1"), "mfu", 0.45),
    "9b-full-fp8": Part(GLM4_9B, "ours", (FULL, "zero=stage1", *FP8), "mfu", 0.5),
}
"""In the order of their importance: time may run out."""


def size_of(name: str, is_tiny: bool) -> Size:
    """Return what a part trains: as many layers as fit, the same of all that are compared, or the twin for anywhere."""
    part = PARTS[name]
    if is_tiny:
        return replace(part.size, **_TWIN, rows=min(part.size.rows, 4), accumulation=2)
    free, _ = torch.cuda.mem_get_info()
    compared = {one for one in PARTS if one == BASE or PARTS[one].mark != "mfu"}
    alike = compared if name in compared else {name}
    return replace(part.size, layers=min(_layers_that_fit(PARTS[one], _SPARE * free) for one in alike))


def _layers_that_fit(part: Part, room: float) -> int:
    size = part.size
    if part.call == "hugging_face":  # all logits and their gradients
        room -= 8 * size.rows * size.tokens * size.vocab
    composed = _config(size, part.words)  # once: it takes half a second
    for layers in range(size.layers, 1, -1):
        shape = replace(composed.model.shape, num_layers=layers)
        cfg = replace(composed, model=replace(composed.model, shape=shape))
        if plan_rank(outline_of(cfg), cfg, 1).peak("step") < room:
            return layers
    return 1


def measure_part(name: str, is_tiny: bool, words: Sequence[str], profiles: bool = False) -> dict[str, Any]:
    """Return the figures of one part: of the row of metrics.jsonl, and the size of what was trained; with `profiles`
    also where the time of one more step goes, if we train.
    """
    size, part = size_of(name, is_tiny), PARTS[name]
    overrides = [*part.words, *words]
    if is_tiny and "compile=inductor" in overrides:
        overrides.append("compile.backend=aot_eager")  # Inductor's C++ takes minutes
    if is_tiny:  # it needs a GPU
        overrides = ["kernels=torch" if word == "kernels.liger=always" else word for word in overrides]
    row = ours(size, overrides, profiles) if part.call == "ours" else hugging_face(size, overrides)
    return {"size": asdict(size), "overrides": overrides, **row}


_KINDS = {
    "matrix products": "nvjet|gemm|cutlass",
    "attention": "flash|fmha|attention",
    "optimizer": "Adam|multi_tensor",
}
"""Of kernels -> pattern of their names, the first that fits counts; those that none fits are others."""


def kernel_seconds(step: Callable[[], Any]) -> dict[str, Any]:
    """Return where the time of a step goes: seconds of the GPU's kernels, by kind, their number, and the 40 longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        get_accelerator().synchronize()
    # Ranges that PyTorch names, such as Optimizer.step#AdamW.step, are on the GPU's time line too.
    on_gpu = (event for event in profile.key_averages() if str(event.device_type).endswith("CUDA"))
    kernels = [event for event in on_gpu if "#" not in event.key]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    kinds = dict.fromkeys((*_KINDS, "others"), 0.0)
    for event in kernels:
        kind = next((kind for kind, pattern in _KINDS.items() if re.search(pattern, event.key)), "others")
        kinds[kind] += event.self_device_time_total / 1e6
    longest = [[event.key[:150], event.count, event.self_device_time_total / 1e6] for event in kernels[:40]]
    return {"kernels_s": kinds, "kernels": sum(event.count for event in kernels), "longest": longest}


def marks(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return of each part that was measured its figure and its goal, where the parts that it refers to were too."""
    speed = {name: row["tokens_per_s"] for name, row in found.items() if "tokens_per_s" in row}
    result = {}
    for name, own in speed.items():
        part, row = PARTS[name], found[name]
        figure = row.get("mfu", row.get("mfu_matmul")) if part.mark == "mfu" else None
        base = COMPILED if part.mark == "to_compiled" else BASE
        if part.mark != "mfu" and base in speed and row["size"]["layers"] == found[base]["size"]["layers"]:
            figure = speed[base] / own if part.mark == "ours_to_it" else own / speed[base]
        if figure is not None:
            result[name] = {part.mark: figure, "goal": part.goal}
    return result


def ours(size: Size, words: Sequence[str], profiles: bool = False) -> dict[str, Any]:
    """Train with our step for some steps; return what metrics.jsonl would say of them, and the profile of one more."""
    cfg, values = _begin(size, words)
    model = _model(cfg)
    choose_attention(model, cfg.model.attention, size.packed, TORCH_DTYPES[cfg.precision.dtype])
    apply_liger(model, cfg.kernels)
    adapt(model, cfg, None, Path(), values)

    def schedule(optimizer: torch.optim.Optimizer) -> Schedule:
        return Schedule(optimizer, cfg.schedule, cfg.optim.lr, _ENDLESS, 0)

    recomputing = cfg.train.activation_checkpointing
    engine = initialize_engine(model, values, recomputing, schedule, cfg.compile, cfg.optim)
    engine.train()
    guard = StepGuard(engine, cfg.train)
    on_cpu = get_accelerator().device_name() == "cpu"
    planned = plan_rank(outline_of(cfg), cfg, 1, on_cpu).peak("step")
    account = measure_baseline(engine, cfg.tuning, recomputing.enabled, planned)
    batches, task, mesh = _batches(size), LanguageTask(), Mesh(world_size=1)

    def step() -> Any:
        return train_step(engine, task, [next(batches) for _ in range(size.accumulation)], mesh, guard)

    for place in range(WARM_UP + size.steps):
        if place in (0, WARM_UP):
            get_accelerator().synchronize()
            meter = ThroughputMeter(engine, account)
        meter.add(step())
        guard.check()
    get_accelerator().synchronize()
    row = meter.row(size.steps, 0.0, cfg.optim.lr, meter.pace())
    if profiles:
        row |= kernel_seconds(step)
    process_group.stop()
    return row


def hugging_face(size: Size, words: Sequence[str]) -> dict[str, float]:
    """Train the same with transformers' Trainer and its DeepSpeed integration, as its documentation shows it."""
    cfg, _ = _begin(size, words)
    made = list(islice(_batches(size), size.accumulation * (WARM_UP + size.steps)))
    rows = [
        {name: batch[name][row].tolist() for name in ("input_ids", "labels", "position_ids")}
        for batch in made
        for row in range(size.rows)
    ]
    ended: list[float] = []

    class Clock(transformers.TrainerCallback):
        """Notes when steps end."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Note it."""
            get_accelerator().synchronize()
            ended.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=size.rows,
            gradient_accumulation_steps=size.accumulation,
            max_steps=WARM_UP + size.steps,
            learning_rate=cfg.optim.lr,
            bf16=True,
            use_cpu=get_accelerator().device_name() == "cpu",
            gradient_checkpointing=True,
            deepspeed={
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": cfg.zero.stage},
                "zero_allow_untested_optimizer": True,
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
            },
            logging_steps=_ENDLESS,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=_model(cfg),
            args=arguments,
            train_dataset=rows,
            data_collator=transformers.default_data_collator,
            callbacks=[Clock()],
        )
        trainer.train()
    seconds = ended[-1] - ended[WARM_UP - 1]
    tokens = sum(int((batch["segment_ids"] > 0).sum()) for batch in made) * size.steps / (WARM_UP + size.steps)
    host, device = memory_peaks(torch.device(get_accelerator().current_device_name()))
    found = {"tokens_per_s": tokens / seconds, "step_s": seconds / size.steps, "host_memory_peak_bytes": host}
    return {**found, "device_memory_peak_bytes": device} if device else found


def _config(size: Size, words: Sequence[str]) -> RunConfig:
    """Compose the recipe."""
    shape = {
        "vocab_size": size.vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "num_kv_heads": size.groups,
        "max_positions": size.tokens,
    }
    own = [f"batch.micro_per_gpu={size.rows}", f"batch.global_size={size.rows * size.accumulation}"]
    own += ["model.init=random", f"data.max_length={size.tokens}", "optim.torch=true", "kernels=torch"]
    own += [f"data.packing={'packed' if size.packed else 'none'}"]
    own += [f"model.shape.{name}={value}" for name, value in shape.items()]
    return load(["recipe=chatglm", *own, *words]).cfg


def _begin(size: Size, words: Sequence[str]) -> tuple[RunConfig, dict[str, Any]]:
    """Join a process group of one; return the config and the DeepSpeed dict."""
    environment.set_rank_variables(environment.detect({}), os.environ)
    cfg = _config(size, words)
    process_group.start(cfg.distributed)
    return cfg, build_ds_config(cfg, 1, _ENDLESS).values


def _model(cfg: RunConfig) -> transformers.PreTrainedModel:
    """Return a random model, made where it stays."""
    config = random_config(cfg.model.shape, cfg.model.shape.vocab_size)
    config.use_cache = False
    torch.manual_seed(cfg.run.seed)
    with torch.device(get_accelerator().current_device_name()):
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, dtype=TORCH_DTYPES[cfg.precision.dtype]
        )
    return model


def _batches(size: Size) -> Iterator[Batch]:
    """Yield micro-batches of packed rows, as many as are wanted."""
    random = np.random.default_rng(1)
    while True:
        count = 4 * size.rows * max(1, size.tokens // MEDIAN_TOKENS)
        lengths = np.clip(random.lognormal(math.log(MEDIAN_TOKENS), SIGMA, count), 16, size.tokens).astype(int)
        numbers = pack(lengths, size.tokens) if size.packed else np.arange(count)
        # The rows filled last are those that stay half empty, which a whole data set has few of.
        for first in range(0, max(size.rows, numbers.max() - size.rows), size.rows):
            members = [np.flatnonzero(numbers == number) for number in range(first, first + size.rows)]
            rows = [[_sample(random, size, lengths[one]) for one in row] for row in members]
            yield collate(rows, 0, packed=size.packed)


def _sample(random: np.random.Generator, size: Size, length: int) -> Sample:
    trained = np.arange(length) >= PROMPT_SHARE * length
    return random.integers(1, size.vocab, length).astype(np.uint32), trained
