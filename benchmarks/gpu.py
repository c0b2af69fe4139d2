"""One GPU and a ChatGLM3-6B of random weights: speed in full and with LoRA, memory, and Hugging Face's Trainer beside.

Nothing is read or downloaded: model and rows are made from a seed. Each measurement runs in a process of its own. The
same with a tiny model serves to try it out without a GPU.
"""

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from deepspeed.accelerator import get_accelerator

from benchmarks.processes import measure
from toolkit.config.load import load
from toolkit.config.schema import RunConfig
from toolkit.data.loader import collate
from toolkit.data.packing import pack
from toolkit.data.store import Sample
from toolkit.distributed import process_group
from toolkit.engine.build import initialize_engine
from toolkit.engine.ds_config import build_ds_config
from toolkit.launch import environment
from toolkit.models.adapters import apply_tuning
from toolkit.models.attention import choose_attention
from toolkit.models.load import TORCH_DTYPES, random_config
from toolkit.plan.memory import plan_rank
from toolkit.plan.outline import outline_of
from toolkit.train.language_data import Batch
from toolkit.train.language_task import LanguageTask
from toolkit.train.schedule import Schedule
from toolkit.train.step import StepGuard, train_step
from toolkit.train.tracking import ThroughputMeter, measure_baseline, memory_peaks

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
    accumulation: int = 8
    """Micro-batches of a step."""
    steps: int = 5
    """That are measured."""


CHATGLM3_6B = Size()
TINY = Size(vocab=512, hidden=64, inner=128, layers=2, heads=4, tokens=256, rows=1, accumulation=2, steps=2)


def compare(size: Size, words: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all.

    Args:
        size: of model and work.
        words: overrides of the recipe chatglm, such as `zero=stage3`.
        say: hears what comes next.

    Returns:
        `full`, `lora`: the rows of metrics.jsonl; `trainer`: speed and memory of Hugging Face's on the same work;
        `mfu_matmul` (goal 0.6, first mark 0.5), `lora_to_full` and `full_to_trainer` in tokens/s (goals 1.3 and 1),
        `memory_to_trainer` (goal below 1), `plan_to_peak` of memory; without a GPU the peak is that of the process.
    """
    found: dict[str, Any] = {"size": asdict(size), "overrides": list(words)}
    for name, call, more in (
        ("full", ours, ["tuning=full"]),
        ("lora", ours, ["tuning=lora"]),
        ("trainer", hugging_face, ["tuning=full"]),
    ):
        say(name)
        found[name] = measure(call, size, [*words, *more]).result
    key = "device_memory_peak_bytes" if "device_memory_peak_bytes" in found["full"] else "host_memory_peak_bytes"
    found["plan_to_peak"] = found["full"]["planned_memory_bytes"] / found["full"][key]
    found["mfu_matmul"] = found["full"]["mfu_matmul"]
    found["lora_to_full"] = found["lora"]["tokens_per_s"] / found["full"]["tokens_per_s"]
    found["full_to_trainer"] = found["full"]["tokens_per_s"] / found["trainer"]["tokens_per_s"]
    found["memory_to_trainer"] = found["full"][key] / found["trainer"][key]
    return found


def ours(size: Size, words: Sequence[str]) -> dict[str, float]:
    """Train with our step for some steps; return what metrics.jsonl would say of them."""
    cfg, values = _begin(size, words)
    model = _model(cfg)
    choose_attention(model, cfg.model.attention, True, TORCH_DTYPES[cfg.precision.dtype])
    apply_tuning(model, cfg.tuning, Path(), None, cfg.run.seed, values)

    def schedule(optimizer: torch.optim.Optimizer) -> Schedule:
        return Schedule(optimizer, cfg.schedule, cfg.optim.lr, _ENDLESS, 0)

    engine = initialize_engine(model, values, cfg.train.activation_checkpointing, schedule, optim=cfg.optim)
    engine.train()
    guard = StepGuard(engine, cfg.train)
    on_cpu = get_accelerator().device_name() == "cpu"
    planned = plan_rank(outline_of(cfg), cfg, 1, on_cpu).peak("step")
    account = measure_baseline(engine, cfg.tuning, cfg.train.activation_checkpointing.enabled, planned)
    batches = _batches(size)
    for place in range(WARM_UP + size.steps):
        if place in (0, WARM_UP):
            get_accelerator().synchronize()
            meter = ThroughputMeter(engine, account)
        meter.add(train_step(engine, LanguageTask(), [next(batches) for _ in range(size.accumulation)], 1, guard))
        guard.check()
    get_accelerator().synchronize()
    row = meter.row(size.steps, 0.0, cfg.optim.lr, meter.pace())
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


def _begin(size: Size, words: Sequence[str]) -> tuple[RunConfig, dict[str, Any]]:
    """Compose the recipe and join a process group of one; return the config and the DeepSpeed dict."""
    environment.apply(environment.detect({}), os.environ)
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
    own += ["model.init=random", f"data.max_length={size.tokens}", "zero=stage2", "optim.torch=true"]
    own += [f"model.shape.{name}={value}" for name, value in shape.items()]
    cfg = load(["recipe=chatglm", *own, *words]).cfg
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
        numbers = pack(lengths, size.tokens)
        # The rows filled last are those that stay half empty, which a whole data set has few of.
        for first in range(0, max(size.rows, numbers.max() - size.rows), size.rows):
            members = [np.flatnonzero(numbers == number) for number in range(first, first + size.rows)]
            yield collate([[_sample(random, size, lengths[one]) for one in row] for row in members], 0, packed=True)


def _sample(random: np.random.Generator, size: Size, length: int) -> Sample:
    trained = np.arange(length) >= PROMPT_SHARE * length
    return random.integers(1, size.vocab, length).astype(np.uint32), trained
