"""What the autotuner seeks, what it tries, and what it found. No torch."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.cli.sweep import LAUNCH, quoted
from toolkit.config.schema import RunConfig
from toolkit.distributed.orphans import end_with_parent
from toolkit.engine.ds_config import SAME, leaves
from toolkit.launch.resources import Resources
from toolkit.messages import tr
from toolkit.plan.memory import plan_rank
from toolkit.plan.parameters import Outline
from toolkit.secrets import hide

DS_CONFIG, METRIC, LOG = "ds_config.json", "metrics.json", "stdout.log"
"""Files of an experiment: its settings, what DeepSpeed measured, and what the run printed."""
_QUIET = (
    "train.rehearse=false",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "checkpoint.export=false",
    "evaluate.at_start=false",
    "report.enabled=false",
    "track=jsonl",
    "run.max_restarts=0",
)
"""An experiment leaves nothing and looks at nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What is sought."""

    cfg: RunConfig
    """The recipe."""
    launcher: list[str]
    """Words of the launcher."""
    recipe: list[str]
    """The recipe's words."""
    hosts: Resources
    """Which GPUs take part."""
    stages: list[int]
    """ZeRO stages among which."""
    micro: list[int]
    """Micro-batches among which; each divides a rank's rows of a step."""
    is_fast: bool
    """Whether stages and micro-batches are all that is varied."""
    folder: Path
    """Where everything goes."""
    outline: Outline
    """The model."""

    @property
    def world_size(self) -> int:
        """Ranks over all machines."""
        return sum(map(len, self.hosts.values()))

    @property
    def rows(self) -> int:
        """Of a rank in one optimizer step."""
        return self.cfg.batch.global_size // self.world_size

    def peak_bytes(self, stage: int, micro: int) -> int:
        """Return the planned peak of a rank's device memory."""
        cfg = replace(
            self.cfg,
            zero=replace(self.cfg.zero, stage=stage),
            batch=replace(self.cfg.batch, micro_per_gpu=micro),
        )
        memory = plan_rank(self.outline, cfg, self.world_size)
        return memory.peak(memory.worst)


@dataclass(frozen=True, slots=True)
class Found:
    """What an experiment came to."""

    words: list[str]
    """Its settings, as overrides."""
    samples_per_s: float
    """Of all ranks together; 0: it failed."""
    log: Path
    """What it printed."""

    def told(self) -> str:
        """Return its speed, or why it has none, in a line."""
        if self.samples_per_s:
            return tr("{speed} samples/s", speed=f"{self.samples_per_s:.2f}")
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n") if self.log.exists() else []
        last = next((line for line in reversed(lines) if line.strip()), "")
        return tr("failed: {reason} ({file})", reason=hide(last), file=self.log)


def read(folder: Path) -> Found:
    """Return what the experiment of a folder came to."""
    metric, log = folder / METRIC, folder / LOG
    words = overrides(json.loads((folder / DS_CONFIG).read_text(encoding="utf-8")))
    speed = json.loads(metric.read_text(encoding="utf-8"))["throughput"] if metric.exists() else 0.0
    return Found(words, float(speed), log)


def overrides(ds_config: Mapping[str, Any]) -> list[str]:
    """Return the overrides for what the autotuner has put into a JSON: ZeRO's settings and the micro-batch."""
    words = [f"zero=stage{ds_config['zero_optimization']['stage']}"]
    for key, value in leaves({"zero_optimization": ds_config["zero_optimization"]}):
        if key != "zero_optimization.stage":
            number = int(value) if isinstance(value, float) and value.is_integer() else value
            words.append(f"{SAME[key]}={json.dumps(number)}")
    return [*words, f"batch.micro_per_gpu={ds_config['train_micro_batch_size_per_gpu']}"]


def start(search: Search, words: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    """Start an experiment.

    Args:
        search: what it is part of.
        words: its own overrides.
        folder: where its files go.
    """
    runs, metric = quoted(folder / "runs"), quoted(folder / METRIC)
    own = [*words, *_QUIET, f"run.dir={runs}", "run.name=run", "resume=never", f"profile.autotuning={metric}"]
    with (folder / LOG).open("wb") as log:
        # A session of its own: Ctrl-C reaches it through us alone, once.
        return subprocess.Popen(  # noqa: S603
            [*LAUNCH, *search.launcher, *search.recipe, *own],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
