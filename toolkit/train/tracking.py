"""What a run measures of its speed and memory, and hands to its trackers and to its report.

Speed is compared with the model's FLOPs, the plan and this machine's matrix products (not every datasheet is known, or
true).
"""

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger, timers

from toolkit import children, disk
from toolkit.config.load import to_dict, to_plain
from toolkit.config.schema import RunConfig, TuningConfig, TuningMethod, data_unit, leaves
from toolkit.distributed.process_group import full_shape, gather, rank, sum_over_ranks, world_size
from toolkit.engine.memory import is_out_of_memory
from toolkit.messages import Stopped, current_language, say, tr, warn
from toolkit.models import load, stages
from toolkit.models.router_loss import Routers, load_metrics
from toolkit.plan import machine, outline
from toolkit.plan.speed import Formula, Work, formula, is_countable
from toolkit.report.run import EXPERTS, PAGE
from toolkit.track import backends, metrics, queue
from toolkit.train import run_dir, task
from toolkit.train.step import RankTimes, StepResult

_GPU_SIZES = (8192, 4096, 2048)
"""Of the matrices; the later ones where memory is too little for the first."""
_CPU_SIZES = (96, 192, 384, 768)
"""The first that takes long enough to be timed: one of 768 in bf16 takes 2.8 s where the processor has no such unit."""
_LONG_ENOUGH_S = 0.005
_GPU_S, _CPU_S = 0.3, 0.1
_AT_ONCE = 5


def median_of_ranks(device: torch.device, dtype: torch.dtype) -> float:
    """Return the median rank's FLOP/s in large matrix products, 0 without memory for one. A collective. All measure at
    once, under a second; a GPU needs 0.4 GiB, in fp32 0.8 GiB, a 16th of it at least.
    """
    mine = 0.0
    for size in _sizes(device, dtype):
        try:
            mine = _measured(size, device, dtype)
            break
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        get_accelerator().empty_cache()
    speeds = [speed for speed in gather(mine) if speed]
    get_accelerator().empty_cache()
    return float(statistics.median_low(speeds)) if speeds else 0.0


def _sizes(device: torch.device, dtype: torch.dtype) -> tuple[int, ...]:
    """Return what to try: on a GPU one after another where memory is too little, on a CPU what takes long enough."""
    if device.type != "cpu":
        return _GPU_SIZES
    for size in _CPU_SIZES:
        square = torch.ones(size, size, dtype=dtype)
        seconds = []
        for _ in range(2):  # the first loads libraries
            started = time.perf_counter()
            square @ square
            seconds.append(time.perf_counter() - started)
        if min(seconds) > _LONG_ENOUGH_S:
            break
    return (size,)


def _measured(size: int, device: torch.device, dtype: torch.dtype) -> float:
    seconds, times = (_CPU_S, 1) if device.type == "cpu" else (_GPU_S, _AT_ONCE)
    # Equal numbers would take less power, so a GPU would be faster. A generator of its own: the run's stays as it is.
    random = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=random, device=device, dtype=dtype) for _ in range(2))
    out = left @ right  # warms up: libraries are loaded, kernels are chosen
    fastest, begun = float("inf"), time.perf_counter()
    while time.perf_counter() - begun < seconds or fastest == float("inf"):
        get_accelerator().synchronize()
        started = time.perf_counter()
        for _ in range(times):
            torch.mm(left, right, out=out)
        get_accelerator().synchronize()
        fastest = min(fastest, (time.perf_counter() - started) / times)
    return 2.0 * size**3 / fastest


class Collectives:
    """Adds up this rank's collectives: seconds from DeepSpeed's timers, calls and bytes from its log, as its own
    summary never resets timers (0.19.8, comm.timed_op).
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def take(self, counts: bool = True) -> float:
        """Take what is new in DeepSpeed's log, add it if it `counts`; return its seconds (0: no `profile.comms`)."""
        log = comms_logger.get_raw_data()
        comms_logger.reset_data()
        spent = {name: timer.elapsed() / 1000 for name, timer in timers.timers.items()}
        if counts:
            for name, sizes in log.items():
                self.calls[name] += sum(entry[0] for entry in sizes.values())
                self.bytes[name] += sum(size * entry[0] for size, entry in sizes.items())
                self.seconds[name] += spent.get(name, 0.0)
        return sum(spent.values())

    def write(self, folder: Path) -> None:
        """Write the sums into a run directory, where the report finds them."""
        rows = [
            {"operation": name, "calls": calls, "bytes": self.bytes[name], "seconds": round(self.seconds[name], 6)}
            for name, calls in sorted(self.calls.items())
        ]
        disk.write_atomically(folder / "collectives.json", json.dumps({"operations": rows}, indent=1).encode() + b"\n")

    @property
    def is_on(self) -> bool:
        """Whether DeepSpeed counts anything."""
        return bool(comms_logger.enabled)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What one rank's speed and memory are compared with."""

    formula: Formula | None
    """FLOPs of the model; None if they are not known."""
    recomputes: bool
    dtype: str
    matmul_flops: float
    """FLOP/s of a large matrix product, measured; 0 where there was no memory for it."""
    device: str
    """What the driver calls the card; "" is a processor."""
    card: machine.Gpu | None
    planned_bytes: int | None

    def speed(self, needed: Work, computed: Work, rank_seconds: float) -> dict[str, float]:
        """Return a rank's FLOP/s and MFU, {} without FLOPs; `needed` (no padding) and `rank_seconds`: all ranks'."""
        if self.formula is None:
            return {}
        hardware = self.formula.hardware_flops if self.recomputes else self.formula.model_flops
        model_speed, hardware_speed = self.formula.model_flops(needed) / rank_seconds, hardware(computed) / rank_seconds
        row = {"model_flops_per_s": model_speed, "hardware_flops_per_s": hardware_speed}
        if self.matmul_flops:
            row |= {"mfu_matmul": model_speed / self.matmul_flops, "hfu_matmul": hardware_speed / self.matmul_flops}
        if peak := self.card and self.card.flops(self.dtype):
            row |= {"mfu": model_speed / peak, "hfu": hardware_speed / peak}
        return row

    def describe(self) -> str:
        """Return a line on what the shares are of, on GPUs."""
        values = {"dtype": self.dtype, "measured": f"{self.matmul_flops / 1e12:.3g}" if self.matmul_flops else "?"}
        if not (self.card and self.card.flops(self.dtype)):
            return tr(
                "A matrix product ({dtype}) runs at {measured} TFLOP/s per rank. What the datasheet of '{device}' says "
                "of that is not known here: the FLOPs of training are compared with the matrix product alone.",
                device=self.device,
                **values,
            )
        return tr(
            "A matrix product ({dtype}) runs at {measured} TFLOP/s per rank; the datasheet of the {card} says {peak}.",
            card=self.card.name,
            peak=f"{self.card.flops(self.dtype) / 1e12:.4g}",
            **values,
        )


def measure_baseline(
    engine: DeepSpeedEngine, tuning: TuningConfig, recomputes: bool, planned_bytes: int | None = None
) -> Baseline:
    """Return what runs are compared with. A collective; `planned_bytes` per rank: of its GPU, on CPUs its process."""
    model, device = stages.unwrap_model(engine.module), engine.device
    shapes: outline.Shapes = {}  # of all parameters as they are before they are partitioned or quantised
    trained: set[str] = set()
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, torch.nn.Linear) and name.endswith(".weight"):
            shapes[name] = (owner.out_features, owner.in_features)
        else:
            shapes[name] = full_shape(name, parameter)
        if parameter.requires_grad:
            trained.add(name)
    config = getattr(model, "config", None)
    sizes = outline.flop_sizes(lambda name: getattr(config, name, None))
    flops = None
    if sizes and is_countable(shapes, sizes):
        prefix = tuning.num_tokens if tuning.method is TuningMethod.ptuning_v2 else 0
        flops = formula(shapes, sizes, trained, prefix)
    dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Baseline(
        formula=flops,
        recomputes=recomputes,
        dtype=next(known.value for known, torch_dtype in load.TORCH_DTYPES.items() if torch_dtype == dtype),
        matmul_flops=median_of_ranks(device, dtype),
        device=device_name,
        card=machine.find_gpu(device_name),
        planned_bytes=planned_bytes,
    )


_IN_SAMPLES = {"tokens_per_s": "samples_per_s", "rank_tokens_per_s": "rank_samples_per_s", "total_tokens": "samples"}
_OF_TOKENS = ("trained_tokens_per_s", "trained_tokens", "padding_fraction")


class ThroughputMeter:
    """Adds up steps; tokens (or samples, by `unit`) and collectives given are those of the run so far."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        baseline: Baseline,
        trained_tokens: int = 0,
        total_tokens: int = 0,
        unit: str = task.TOKENS,
        collectives: Collectives | None = None,
        counted_in: str = "",
    ) -> None:
        self.engine, self.baseline, self.unit, self.counted_in = engine, baseline, unit, counted_in
        self.collectives = collectives or Collectives()
        self.collectives.take(counts=False)  # what came before the first step
        self.trained_tokens_so_far, self.total_tokens_so_far = trained_tokens, total_tokens
        self.paused = 0.0
        self.on_its_own_since = time.perf_counter()
        """When ranks last waited for one another."""
        self._reset()

    def _reset(self) -> None:
        self.results: list[StepResult] = []
        self.step_seconds: list[float] = []
        self.expert_loads: torch.Tensor | None = None
        self.own_s = self.data_wait_s = self.communication_s = 0.0
        self.started = self.step_began = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Count one step."""
        self.results.append(result)
        if result.expert_loads is not None:
            more = 0 if self.expert_loads is None else self.expert_loads
            self.expert_loads, result.expert_loads = result.expert_loads + more, None
        self.trained_tokens_so_far += result.trained_tokens
        self.total_tokens_so_far += result.total_tokens
        self.own_s += result.arrived - self.on_its_own_since + result.forward_s
        now = self.on_its_own_since = time.perf_counter()
        self.step_seconds.append(now - self.step_began)
        self.step_began = now

    def pace(self) -> RankTimes:
        """Return how fast each rank was since the last row. A collective."""
        seconds, device = time.perf_counter() - self.started, self.engine.device
        self.communication_s += self.collectives.take()
        rank_tokens = sum(result.rank_tokens for result in self.results)
        mine = [self.own_s, self.data_wait_s, rank_tokens, self.communication_s, *memory_peaks(device)]
        values = torch.zeros(len(mine), world_size(), dtype=torch.float64)  # sums of tokens are too large for float32
        values[:, rank()] = torch.tensor(mine, dtype=torch.float64)
        of_ranks = sum_over_ranks(values.flatten(), device).view(len(mine), -1).tolist()
        own_s, data_wait_s, tokens, self.communication_of, *self.peaks = of_ranks
        return RankTimes(len(self.results), seconds, own_s, data_wait_s, tokens)

    def row(self, step: int, epoch: float, lr: float, pace: RankTimes) -> dict[str, float]:
        """Return a row of metrics.jsonl and reset the sums. `loss` is exact: sum of losses / their number (of trained
        tokens) over all ranks since the last row, without steps that are not finite; so are the task's figures. `lr` is
        what this step used, `pace` that of the call just before.
        """
        results, seconds, ranks = self.results, pace.seconds, world_size()
        trained, total, computed, pairs = (
            sum(getattr(result, name) for result in results)
            for name in ("trained_tokens", "total_tokens", "computed_tokens", "pairs")
        )
        finite = [result for result in results if math.isfinite(result.loss)]
        counted = sum(result.count for result in finite)
        loss_sum = sum(result.loss * result.count for result in finite)
        router_losses = [result.router_loss for result in results if result.router_loss is not None]
        host_bytes, device_bytes = (int(max(peaks)) for peaks in self.peaks)
        row = {
            "step": step,
            "epoch": round(epoch, 6),
            "loss": loss_sum / counted if finite else results[-1].loss,
            "lr": lr,
            "grad_norm": results[-1].grad_norm,
            "tokens_per_s": total / seconds,
            "trained_tokens_per_s": trained / seconds,
            "rank_tokens_per_s": total / seconds / ranks,
            "step_s": seconds / len(results),
            "step_median_s": statistics.median(self.step_seconds),
            "step_p95_s": sorted(self.step_seconds)[math.ceil(0.95 * len(results)) - 1],
            "trained_tokens": self.trained_tokens_so_far,
            "total_tokens": self.total_tokens_so_far,
            "padding_fraction": 1 - total / computed,
            "skipped_steps": self.engine.skipped_steps,
            "time": round(time.time(), 3),
            **pace.row(),
            **self.baseline.speed(
                Work(total, pairs, trained),
                Work(computed, pairs, trained),
                seconds * ranks,
            ),
            "host_memory_peak_bytes": host_bytes,
        }
        if device_bytes:
            row["device_memory_peak_bytes"] = device_bytes
        if self.baseline.planned_bytes is not None:
            row["planned_memory_bytes"] = self.baseline.planned_bytes
        if self.collectives.is_on:
            row["communication_fraction"] = min(self.communication_of) / seconds
        if self.counted_in:
            row[self.counted_in] = counted
        for name in results[-1].figures:
            total, number = (sum(result.figures[name][place] for result in finite) for place in (0, 1))
            if number:
                row[name] = total / number
        if router_losses:
            row["router_loss"] = statistics.fmean(router_losses)
        if self.engine.fp16_enabled():
            row["loss_scale"] = float(self.engine.optimizer.loss_scale)
        self._reset()
        if self.unit == task.SAMPLES:
            return {_IN_SAMPLES.get(name, name): row[name] for name in row if name not in _OF_TOKENS}
        return row

    def pause(self) -> None:
        """Leave out what happens before `resume`: evaluation, saving."""
        self.communication_s += self.collectives.take()
        self.paused = time.perf_counter()

    def resume(self) -> None:
        """Count time again."""
        gone = time.perf_counter() - self.paused
        self.started += gone
        self.step_began += gone
        self.collectives.take(counts=False)
        self.on_its_own_since += gone


def expert_metrics(routers: Routers | None, loads: torch.Tensor | None, step: int, folder: Path) -> dict[str, float]:
    """Return what metrics.jsonl says of the experts' tokens since the last row; rank 0 writes each expert's into a run
    directory, where the report finds them.
    """
    if routers is None or loads is None:
        return {}
    loads = loads.cpu()
    table = routers.table(loads)
    if rank() == 0:
        with suppress(OSError):  # a full disk has been reported by what has to be saved
            disk.write_atomically(folder / EXPERTS, json.dumps({"step": step, "loads": table}).encode() + b"\n")
    return load_metrics(table.values()) | routers.dropped(loads)


def memory_peaks(device: torch.device) -> tuple[float, float]:
    """Return the most bytes so far that this process had in memory, and its tensors on a GPU (0 without one)."""
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return host, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


PATIENCE_S = 60.0
"""Seconds that the end of a run waits for its report."""
_LONGEST_S = 600
"""Seconds after which a report ends itself, whoever started it, and whether that is still there or not."""
_LOG = "report.log"
_CODE = (
    "import os, signal, sys; os.nice(10); signal.alarm(int(sys.argv[1]))\n"
    "from toolkit.cli import main; sys.exit(main(sys.argv[2:]))"
)


class AutomaticReport:
    """Makes RUN/report.html during a run and at its end, which waits for it; `environ` is no rank's. Rank 0 only."""

    def __init__(self, folder: Path, environ: Mapping[str, str], patience_s: float = PATIENCE_S) -> None:
        self.folder, self.environ, self.patience_s = folder, environ, patience_s
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Begin to make it, unless the one before is not ready yet."""
        if self._process is None or self._process.poll() is not None:
            with suppress(OSError):  # reported at the end, if it is so then too
                self._process = self._start()

    def finish(self) -> None:
        """Make it a last time, and say where it is; or that it could not be made, and how to make it."""
        reason = ""
        try:
            self._end()
            self._process = self._start()
            if code := self._process.wait(self.patience_s):
                text = (self.folder / "logs" / _LOG).read_text(encoding="utf-8", errors="replace")
                lines = [line for line in text.splitlines() if line.strip()]
                reason = lines[-1] if lines else tr("exit code {code}", code=code)
        except subprocess.TimeoutExpired:
            reason = tr("it is not ready after {seconds} s", seconds=f"{self.patience_s:g}")
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            self._end()
        if not reason:
            say("The report: {file}", file=self.folder / PAGE)
            return
        warn(
            "the report could not be made: {reason}. The run itself is complete; to make the report:  toolkit report "
            "{folder}",
            reason=reason.rstrip("."),
            folder=self.folder,
        )

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, self.environ.get("PYTHONPATH", ""))))
        words = ["report", str(self.folder), f"language={current_language()}"]
        with open(self.folder / "logs" / _LOG, "wb") as log:
            return children.start(
                [sys.executable, "-c", _CODE, str(_LONGEST_S), *words],
                env={**self.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def trackers_of(cfg: RunConfig) -> queue.Trackers:
    """Return a run's trackers, not yet begun. It waits for them, while ranks wait in a collective, for a quarter of
    `distributed.timeout_s` at most; the report may take half of it.
    """
    return queue.Trackers(min(cfg.track.patience_s, cfg.distributed.timeout_s / 4))


@contextmanager
def tracking(run: task.RunContext, data: Mapping[str, Any]) -> Iterator[None]:
    """Begin the trackers on rank 0, with config, `data`, commit and versions as hyperparameters; tell them the end."""
    trackers = run.trackers
    if run.ranks.rank == 0 and run.cfg.track.enabled:
        track, environment = to_plain(run.cfg.track), json.loads((run.folder / "environment.json").read_text("utf-8"))
        hyperparameters = {
            **dict(leaves(to_dict(run.cfg))),
            **{f"data_summary.{key}": value for key, value in leaves(dict(data))},
            **{f"environment.{key}": value for key, value in leaves(environment)},
            "commit": environment["commit"],
        }
        settings = {name: track[name] for name in run.cfg.track.enabled}
        trackers.begin(run.folder, settings, hyperparameters, run.start.step)
    try:
        yield
    except BaseException as error:
        is_done = isinstance(error, Stopped) and not error.exit_code
        ended = backends.STOPPED if isinstance(error, Stopped) else backends.FAILED
        trackers.end(backends.FINISHED if is_done else ended)
        raise
    trackers.end(backends.FINISHED)


def log_answers(run: task.RunContext, step: int) -> None:
    """Hand on what the model answered at an evaluation: the lines of a file."""
    if not run.trackers.is_on:
        return
    # The file may be cut off: a disk that is full has been reported, and is no reason to end a run.
    with (
        suppress(OSError, ValueError),
        (run.folder / "evaluations" / f"step-{step}.jsonl").open(encoding="utf-8") as lines,
    ):
        run.trackers.answers(step, backends.ANSWERS, [json.loads(line) for line in lines])


def log_summary(run: task.RunContext, result: task.FitResult, samples: list[dict[str, str]]) -> None:
    """Hand on the last answers (samples.jsonl), and figures of the whole run as transformers has them."""
    if not run.trackers.is_on:
        return
    seconds = max(result.steps_s, 1e-9)
    values = {
        "train_runtime": result.steps_s,
        "train_steps_per_second": result.steps / seconds,
        "train_samples_per_second": result.steps * run.cfg.batch.global_size / seconds,
        "train_loss": _mean_loss(run),
    }
    run.trackers.answers(result.state.step, backends.SAMPLES, samples)
    run.trackers.summary(result.state.step, values)


def _mean_loss(run: task.RunContext) -> float:
    """Return the mean over the trained tokens (samples, pairs) of the run, from metrics.jsonl."""
    counted, _ = data_unit(run.cfg)
    [begun, *_] = run_dir.read_rows(run.folder / "logs" / run_dir.STARTS, OSError) or [{"from_step": 0}]
    total = tokens = 0.0
    before = None if begun["from_step"] else 0.0
    with suppress(OSError, ValueError, KeyError), (run.folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = metrics.metric_values(json.loads(line))
            if metrics.is_evaluation(row):
                continue
            count = row["trained_tokens"] if "trained_tokens" in row else row["samples"]
            if before is None:  # another run's checkpoint brought its count along: only the steps of this row are new
                pace = row["trained_tokens_per_s" if "trained_tokens" in row else "samples_per_s"]
                before = count - pace * row["step_s"] * (row["step"] - begun["from_step"])
            since, before = row.get(counted, count - before), count  # pairs are those of a row, the others of the run
            if math.isfinite(row["loss"]):
                total += row["loss"] * since
                tokens += since
    return total / tokens if tokens else math.nan
