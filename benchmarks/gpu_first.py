"""What a machine with a GPU has, whether it computes right and how fast it trains: the stages of scripts/gpu_first.

Each stage is a process of its own with a limit of its own, and what it found is in the file before the next begins. On
a CPU the same stages run with tiny models, to try them out: what they find there says nothing of GPUs.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from toolkit import children
from toolkit.command_line import one_of, positive_int
from toolkit.disk import json_lines
from toolkit.messages import ConfigError

ROOT = Path(__file__).absolute().parents[1]

OWN = ("stages", "parts", "seconds", "device", "output", "since", "packed")
LIMIT_S = 430
"""Of all stages together on a GPU."""
ON_CPU = 8
"""How many times longer everything may take on a CPU."""
LEAST_S = 15.0
"""A stage that has less is not begun."""
_GRACE_S = 10.0
_OUTCOME = re.compile(r"^(tests/\S+) (PASSED|FAILED|ERROR|SKIPPED)", re.MULTILINE)


class Stage(NamedTuple):
    """One thing that is found out."""

    limit_s: int
    command: tuple[str, ...]
    """With {python}, {device} (cuda or cpu), {bench} (gpu or cpu) and {output}, the directory of all files."""
    read: Callable[[Path, str], dict[str, Any]]
    """Returns the figures, from that directory and the log, also of a stage that was ended; `failed` names what did."""
    is_for_cpus: bool = True


def _facts_of(output: Path, log: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((output / "facts.json").read_text(encoding="utf-8"))
    return facts


def _outcomes_of(output: Path, log: str) -> dict[str, Any]:
    """Return which tests passed, were skipped and failed, of pytest's lines: no file is there before its end."""
    outcomes = _OUTCOME.findall(log)
    kinds = {"passed": ["PASSED"], "skipped": ["SKIPPED"], "failed": ["FAILED", "ERROR"]}
    return {name: [test for test, outcome in outcomes if outcome in kind] for name, kind in kinds.items()}


def _bench_of(output: Path, log: str) -> dict[str, Any]:
    *_, last = json.loads((output / "bench.json").read_text(encoding="utf-8"))
    failed = [name for name, row in last["parts"].items() if "skipped" in row]
    return {"parts": last["parts"], "marks": last["marks"], "failed": failed}


def _run_of(name: str) -> Callable[[Path, str], dict[str, Any]]:
    def read(output: Path, log: str) -> dict[str, Any]:
        rows = [row for row in json_lines(output / "runs" / name / "metrics.jsonl") if row and "loss" in row]
        keys = ("tokens_per_s", "device_memory_peak_bytes", "skipped_steps")
        last = {key: rows[-1][key] for key in keys if key in rows[-1]}
        return {"steps": len(rows), "first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"], **last}

    return read


def _proof_of(output: Path, log: str) -> dict[str, Any]:
    proof = json.loads((output / "prove.json").read_text(encoding="utf-8"))
    return {key: proof[key] for key in ("is_right", "findings", "resumed", "suspects")}


def _quickstart(name: str, *words: str) -> Stage:
    brief = ("train.max_steps=40", "schedule.warmup_steps=5", "train.log_every=1", "evaluate.every=0")
    command = ("{python}", "-m", "toolkit", "launch", "--num_gpus", "1", "recipe=quickstart", *brief)
    directory = ("run.dir={output}/runs", f"run.name={name}")
    return Stage(100, (*command, *directory, *words), _run_of(name), is_for_cpus="precision=fp16" not in words)


_PYTEST = ("{python}", "-m", "pytest", "-v", "--tier=all", "--device={device}")
_KERNELS = "tests/gpu/test_gpu_kernels.py"
_PARTS = "parts=6b-full-zero1,6b-lora"
_PROVE = ("{python}", "-m", "toolkit", "prove", "--num_gpus=1", "recipe=quickstart", "run.dir={output}/prove")
STAGES = {
    "facts": Stage(60, ("{python}", "-m", "benchmarks.gpu_first", "{output}/facts.json"), _facts_of),
    "kernels": Stage(100, (*_PYTEST, _KERNELS), _outcomes_of),
    "bench": Stage(
        240, ("{python}", "scripts/bench_gpu", "device={bench}", _PARTS, "output={output}/bench.json"), _bench_of
    ),
    "bf16-packed": _quickstart("bf16-packed", "precision=bf16", "data.packing=packed"),
    "fp16": _quickstart("fp16", "precision=fp16"),
    "prove": Stage(
        170,
        (*_PROVE, "zero=stage2", "precision=bf16", "data.packing=packed", "steps=4", "output={output}/prove.json"),
        _proof_of,
    ),
    "tests": Stage(600, ("scripts/test", "--no-install", "gpu", "-v", f"--deselect={_KERNELS}"), _outcomes_of),
}
"""In the order of their importance: time may run out."""


def facts() -> dict[str, Any]:
    """Return what this machine has: GPUs and driver, libraries, and what is missing to build DeepSpeed's ops."""
    import torch

    from toolkit.config import native_ops
    from toolkit.extras.doctor.facts import of_machine

    machine = of_machine({})
    described = {key: machine[key] for key in ("gpus", "nccl", "cores", "memory", "limits")}
    described["cuda"] = torch.version.cuda
    described["lacking_tools"] = native_ops.lacking_tools(["fused_adam", "cpu_adam", "async_io"])
    cards = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    described["cards"] = [
        {"name": card.name, "capability": [card.major, card.minor], "bytes": card.total_memory} for card in cards
    ]
    return described


def run(words: list[str], started: float) -> int:
    """Run the stages one after the other; return how many failed.

    Args:
        words: the arguments.
        started: when the time that there is began (`time.monotonic`).
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if unknown := [word for word in words if word.partition("=")[0] not in OWN or "=" not in word]:
        raise ConfigError(f"scripts/gpu_first knows no {unknown[0]}; there are {', '.join(OWN[:5])} and wheels.")
    is_cpu = one_of(given, "device", ("gpu", "cpu")) == "cpu"
    names = given["stages"].split(",") if "stages" in given else list(STAGES)
    if unknown := [name for name in names if name not in STAGES]:
        raise ConfigError(f"stages: unknown {', '.join(unknown)}. There are {', '.join(STAGES)}.")
    slower = ON_CPU if is_cpu else 1
    output = Path(given.get("output") or f"runs/gpu-first-{time.strftime('%Y-%m-%d-%H%M%S')}").absolute()
    file = output / "result.json"
    if file.exists():
        raise ConfigError(f"output = {output} holds the result of another call. Choose another directory.")
    output.mkdir(parents=True, exist_ok=True)
    ends = float(given.get("since") or started) + (positive_int(given, "seconds") or LIMIT_S * slower)
    typed = [word for word in words if not word.startswith(("since=", "packed="))]
    # A copy of the checkout may be no repository: then this alone tells the commit.
    packed = {"packed": json.loads(Path(given["packed"]).read_text(encoding="utf-8"))} if "packed" in given else {}
    outcomes: dict[str, dict[str, Any]] = {}
    parts = f"parts={given['parts']}" if "parts" in given else _PARTS
    for name in names:
        stage = STAGES[name]
        stage = stage._replace(command=tuple(parts if word == _PARTS else word for word in stage.command))
        outcomes[name] = run_stage(stage, name, output, is_cpu, min(stage.limit_s * slower, ends - time.monotonic()))
        print(f"{name}: {json.dumps(outcomes[name])}", flush=True)
        reached = {"measured": "gpu_first", "device": "cpu" if is_cpu else "gpu", **packed, "stages": outcomes}
        results.append_result(str(file), [], ["scripts/gpu_first", *typed], reached, 1)
    print(f"All of it is in {file}, the logs are beside it.")
    return sum(outcome.get("is_right") is False for outcome in outcomes.values())


def run_stage(stage: Stage, name: str, output: Path, is_cpu: bool, limit_s: float) -> dict[str, Any]:
    """Return what a stage found: `is_right` and `figures`, or why it was `skipped`; its output goes to a file.

    Args:
        stage: what is run.
        name: its name, and that of its log.
        output: directory of all files.
        is_cpu: it runs on the CPU, whatever else there is.
        limit_s: seconds that it may take.
    """
    if is_cpu and not stage.is_for_cpus:
        return {"skipped": "CPU ranks cannot do it"}
    if limit_s < LEAST_S:
        return {"skipped": "no time was left"}
    device = "cpu" if is_cpu else "cuda"
    values = {"python": sys.executable, "device": device, "bench": "cpu" if is_cpu else "gpu", "output": str(output)}
    log, began = output / f"{name}.log", time.monotonic()
    with log.open("w") as lines:
        process = children.start_tree(
            [word.format(**values) for word in stage.command],
            cwd=ROOT,
            env=_environment(is_cpu),
            stdout=lines,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # and with it all that was started below: nothing may run alongside the next stage
            process.wait(_GRACE_S)
            code = None
    text = log.read_text(encoding="utf-8", errors="replace")
    outcome: dict[str, Any] = {"is_right": code == 0, "seconds": round(time.monotonic() - began), "figures": {}}
    if code != 0:
        printed = [line for line in text.splitlines() if line.strip()] or [""]
        outcome["failed"] = f"exit code {code}: {printed[-1][:300]}" if code else f"it took more than {limit_s:.0f} s"
    try:
        outcome["figures"] = stage.read(output, text)
    except (OSError, ValueError, LookupError) as error:  # it ended before it had any
        outcome = {"failed": f"there are no figures: {error!r}", **outcome, "is_right": False}
    if outcome["figures"].get("failed"):
        outcome = {"failed": ", ".join(outcome["figures"]["failed"]), **outcome, "is_right": False}
    return outcome


def _environment(is_cpu: bool) -> Mapping[str, str]:
    """Return the variables of a stage: this Python, as it is, and the device."""
    environ = os.environ | {
        "DS_ACCELERATOR": "cpu" if is_cpu else "cuda",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TOOLKIT_VENV": sys.prefix,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
    }
    environ.setdefault("TORCH_EXTENSIONS_DIR", f"{ROOT}/.cache/torch_extensions")
    return environ | {"CUDA_VISIBLE_DEVICES": ""} if is_cpu else environ


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(facts()), encoding="utf-8")
