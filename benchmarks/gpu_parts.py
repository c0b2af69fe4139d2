"""The parts of benchmarks/gpu.py, each in a process of its own; see scripts/bench_gpu."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from subprocess import STDOUT, TimeoutExpired

from benchmarks import results
from toolkit import children
from toolkit.command_line import one_of, positive_int
from toolkit.launch import allocator
from toolkit.messages import ConfigError

ROOT = Path(__file__).parents[1]

OWN = ("minutes", "parts", "device", "output", "profile", "part")
LIMIT_S = 200.0
"""Of a part."""
LEAST_S = 40.0
"""A part that has less is not begun."""


def run(words: list[str], started: float) -> int:
    """Measure each part in a process of its own, and say what was reached. The file has what there is after each.

    Args:
        words: the arguments.
        started: when the time that there is began (`time.monotonic`).
    """
    given = dict(word.split("=", 1) for word in words if word.partition("=")[0] in OWN)
    overrides = [word for word in words if word.partition("=")[0] not in OWN]
    is_tiny = one_of(given, "device", ("gpu", "cpu")) == "cpu"
    if is_tiny:
        os.environ["DS_ACCELERATOR"] = "cpu"
    profiles = one_of(given, "profile", ("false", "true")) == "true"
    if profiles and is_tiny:
        raise ConfigError("profile = true needs a GPU.")
    allocator.set_allocator(os.environ)  # as runs have it; before torch is there
    from benchmarks import gpu

    if "part" in given:
        found = gpu.measure_part(given["part"], is_tiny, overrides, profiles)
        Path(given["output"]).write_text(json.dumps(found), encoding="utf-8")
        return 0
    names = given["parts"].split(",") if "parts" in given else list(gpu.PARTS)
    if unknown := [name for name in names if name not in gpu.PARTS]:
        raise ConfigError(f"parts: unknown {', '.join(unknown)}. There are {', '.join(gpu.PARTS)}.")
    output = given.get("output") or f"{ROOT}/benchmarks/{time.strftime('%Y-%m-%d')}-gpu.json"
    before = results.earlier(output)
    ends = started + 60 * (positive_int(given, "minutes") or 10)
    parts: dict[str, dict[str, object]] = {}
    for name in names:
        own = [f"device={'cpu' if is_tiny else 'gpu'}", f"profile={str(profiles).lower()}"]
        parts[name] = measured(name, own, overrides, ends)
        marks = gpu.marks(parts)
        reached = {"measured": "gpu", "device": "cpu" if is_tiny else "gpu", "parts": parts, "marks": marks}
        result = results.append_result(output, before, ["scripts/bench_gpu", *words], reached, 1)
    for name, mark in marks.items():
        (figure, value), (_, goal) = mark.items()
        print(f"{name}: {figure} {value:.3f}, goal {goal}: {'reached' if value >= goal else 'missed'}")
    print(json.dumps(result))
    return 0


def measured(name: str, own: list[str], overrides: list[str], ends: float) -> dict[str, object]:
    """Return the figures of a part, or `skipped` and why."""
    left = ends - time.monotonic()
    if left < LEAST_S:
        print(f"{name}: skipped, no time is left", flush=True)
        return {"skipped": "no time was left"}
    started, limit = time.monotonic(), min(left, LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "found.json"), Path(folder, "log")
        own = [*own, f"part={name}", f"output={output}"]
        try:
            with log.open("w") as file:
                children.run(
                    [sys.executable, str(ROOT / "scripts" / "bench_gpu"), *own, *overrides],
                    stdout=file,
                    stderr=STDOUT,
                    timeout=limit,
                )
        except TimeoutExpired:
            print(f"{name}: skipped, it took more than {limit:.0f} s", flush=True)
            return {"skipped": f"it took more than {limit:.0f} s"}
        if not output.exists():
            said = log.read_text(errors="replace").splitlines() or [""]
            print("\n".join([f"{name}: failed", *said[-15:]]), flush=True)
            return {"skipped": f"it failed: {said[-1][:200]}"}
        found: dict[str, object] = json.loads(output.read_text(encoding="utf-8"))
    print(f"{name}: {found['tokens_per_s']:,.0f} tokens/s ({time.monotonic() - started:.0f} s in all)", flush=True)
    return found
