"""`toolkit plan trace=true`: a step traced on a fake GPU, in a child process, and compared with the plan."""

import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from toolkit import children, terminal
from toolkit.config import rule_tables, schema
from toolkit.messages import ConfigError, current_language, say, tr
from toolkit.plan import layouts
from toolkit.plan.machine import GIB, Machine
from toolkit.tables import text_table

_LIMIT_S = 3600.0
_TRACEABLE_METHODS = (schema.TuningMethod.full, schema.TuningMethod.freeze, schema.TuningMethod.lora)
TOLERANCE = 0.05
"""Share of the traced peak by which the plan may differ without a note."""


def check_traceable(cfg: schema.RunConfig, machine: Machine | None) -> None:
    """Raise ConfigError for a setting that the trace does not support, or for CPU ranks."""
    zero = cfg.zero
    untraceable = {
        **{f"parallel.{name}": getattr(cfg.parallel, name) > 1 for name in ("tensor", "sequence", "pipeline")},
        "zero.offload_optimizer": zero.offload_optimizer.device is not schema.Device.none,
        "zero.offload_param": zero.offload_param.device is not schema.Device.none,
        "tuning.method": cfg.tuning.method not in _TRACEABLE_METHODS or bool(cfg.tuning.adapter),
        "preference.loss": cfg.preference.is_on,
        "compile.enabled": cfg.compile.enabled,
        "model.trust_remote_code": cfg.model.trust_remote_code,
        "precision.dtype": cfg.precision.dtype is schema.Dtype.fp16,
        "precision.optimizer_states": rule_tables.has_bf16_states(cfg),  # its random numbers need a device
    }
    if used := [key for key, is_used in untraceable.items() if is_used]:
        raise ConfigError("trace=true does not follow {key}. Leave trace= out, or plan without it.", key=used[0])
    if machine and machine.on_cpu:
        raise ConfigError(tr("trace=true traces GPUs: give gpus=8x80GB or the like."))


def trace(words: Sequence[str], machine: Machine) -> list[dict[str, Any]]:
    """Trace a step of the first and the last rank in a child process; return what `toolkit.extras.traced_steps.trace`
    returns, for each rank. `words`: recipe and overrides. ConfigError if an operation of the step fails.
    """
    ranks = sorted({0, machine.world_size - 1})
    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder, "given.json"), Path(folder, "answer.json")
        spec = {"words": [*words], "ranks": ranks, "world_size": machine.world_size}
        spec |= {"language": current_language(), "output": str(answer)}
        request.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "toolkit.extras.traced_steps", str(request)]
        with terminal.phase(tr("Tracing a step")):
            ran = children.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        if ran.returncode:
            reason = (ran.stderr.strip().splitlines() or [str(ran.returncode)])[-1]
            raise ConfigError("the step cannot be traced: {reason}", reason=reason)
        results: list[dict[str, Any]] = json.loads(answer.read_text(encoding="utf-8"))
    if failed := next((result for result in results if "error" in result), None):
        rank, reason = failed["rank"], failed["error"]
        raise ConfigError("the step cannot be traced on rank {rank}: {reason}", rank=rank, reason=reason)
    return results


def difference(ranks: Sequence[dict[str, Any]]) -> str:
    """Return the first collective that differs between ranks, where a run would hang, as a sentence; "" for none.
    `ranks`: as `trace` returns them.
    """
    first = ranks[0]
    for other in ranks[1:]:
        pairs = zip_longest(first["collectives"], other["collectives"])  # None where a rank has no more
        for number, pair in enumerate(pairs, start=1):
            of_first, of_other = (tr("none") if collective is None else shown(collective) for collective in pair)
            if of_first != of_other:
                return tr(
                    "collective {place} of a step is {mine} on rank {first}, {theirs} on rank {rank}",
                    place=number,
                    mine=of_first,
                    first=first["rank"],
                    theirs=of_other,
                    rank=other["rank"],
                )
    return ""


def shown(collective: Sequence[Any]) -> str:
    """Return a traced collective as text: all_reduce(1,024 bfloat16, 8) is of 1,024 numbers in a group of 8 ranks."""
    name, ranks, numbers, dtype = collective
    return f"{name}({numbers:,} {dtype}, {ranks})"


def report(results: Sequence[dict[str, Any]], layout: layouts.Layout) -> dict[str, Any]:
    """Print the traced memory, waits and collectives next to the plan; return them as a dict for `output=`. `results`:
    as `trace` returns them; those of the rank with the highest peak are shown.
    """
    planned, memory = layout.memory.peak("step"), layout.memory.device
    # Between two steps there is what a save finds, but for the parameters that it gathers.
    at_rest = sum(size for kind, size in memory["save"].items() if kind != "gathered")
    worst = max(results, key=lambda result: result["peak_bytes"])
    ratio = planned / worst["peak_bytes"]
    say("")
    rows = [
        [title, *(f"{size / GIB:.3f}" for size in sizes), f"{sizes[0] / sizes[1]:.3f}"]
        for title, sizes in (
            (tr("between two steps"), (at_rest, worst["at_rest_bytes"])),
            (tr("highest in a step"), (planned, worst["peak_bytes"])),
        )
    ]
    head = [tr("GiB per rank"), tr("planned"), tr("traced"), tr("planned / traced")]
    for line in text_table(head, rows, indent=""):
        say(line)
    if abs(ratio - 1) > TOLERANCE:
        say("The plan differs by more than {percent} %: trust the trace.", percent=f"{100 * TOLERANCE:.0f}")
    say("The largest tensors then:")
    for what, count, size in worst["largest"]:
        say(f"  {size / GIB:8.3f} GiB  {count} x {what}")
    say(
        "All tensors were on the right device. The host waits for the device in {count} places of a step:",
        count=len(worst["waits"]),
    )
    for location, times in worst["waits"].items():
        say(f"  {times} x {location}")
    if differs := difference(results):
        say("Ranks would wait for each other for ever: {difference}.", difference=differs)
    else:
        say(
            "{count} collectives per step, the same in order and size on the traced ranks ({ranks}).",
            count=len(worst["collectives"]),
            ranks=", ".join(str(result["rank"]) for result in results),
        )
    return {"planned_bytes": planned, "ratio": ratio, "difference": differs, "ranks": [*results]}
