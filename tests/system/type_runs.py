"""One type of model through every way of training; each step in a process of its own, which has a limit."""

import json
import re
import shutil
from pathlib import Path
from random import Random
from subprocess import TimeoutExpired
from typing import Any

from ranks import REPOSITORY, Finished, forked, run
from shared import WORDS, rows_of

VARIANTS: dict[str, tuple[int, list[str]]] = {
    "full": (1, ["zero=stage2"]),
    "lora": (1, ["zero=stage2", "tuning=lora", "tuning.rank=4", "optim.lr=0.001"]),
    "packed": (1, ["zero=stage2", "data.packing=packed", "batch.global_size=2"]),
    "zero3": (1, ["zero=stage3", "zero.stage3_param_persistence_threshold=0"]),
    "recomputed": (1, ["zero=stage2", "train.activation_checkpointing.enabled=true"]),
    "tensor": (2, ["zero=stage1", "parallel.tensor=2"]),
    "sequence": (2, ["zero=stage1", "parallel.sequence=2"]),
}
"""Ranks and overrides of each way: a column of the page. What takes several ranks is asked of `toolkit check` first."""
ASKED = ("sequence",)
"""Ways of which `toolkit check` alone is asked: training measures on the loaded model whether parts are right."""
IN_WIDE_WINDOWS = ("packed", "sequence")
"""Those that a window shorter than a sequence excludes: here it is longer."""
WORKER = str(Path(__file__).with_name("type_worker.py"))
LIMIT_S = 240
Row = dict[str, Any]


def common(folder: Path) -> list[str]:
    """Return what all runs below a folder have in common; writes their data."""
    data, draw = folder / "rows.jsonl", Random(0)
    if not data.exists():
        with data.open("w", encoding="utf-8") as file:
            for _ in range(32):
                texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, most))) for most in (5, 7)]
                turns = zip(("user", "assistant"), texts, strict=True)
                file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return [
        *("recipe=zero1", "model=hf", f"data={data}", "data.max_length=128", "data.validation_fraction=0"),
        *("train.max_steps=3", "train.log_every=1", "train.rehearse=false", "train.gradient_clipping=0"),
        *("batch.global_size=8", "batch.micro_per_gpu=2", "precision=fp32", "optim=adamw", "optim.lr=0.001"),
        *("optim.weight_decay=0", "schedule=constant", "schedule.warmup_steps=0", "schedule.warmup_ratio=0"),
        *("evaluate.every=0", "checkpoint.minutes=0", "checkpoint.keep=0", "checkpoint.export=true"),
        *("report.enabled=false", f"run.dir={folder}/runs", f"prepare.dir={folder}/cache"),
    ]


def try_type(kind: str, folder: Path) -> Row:
    """Return what became of each way of training a type: {way: {"state": ok, grouped, refused or failed, …}}; or the
    reason why no tiny model of it could be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    made = _worker(folder, "build", kind, str(model))
    if made.code:
        return {"not built": _last_line(made.output)}
    words = common(folder)
    config = json.loads((model / "config.json").read_text())
    words += ["model.router_loss=0"] if config.get("router_aux_loss_coef") else []  # a plain loop has none
    row: Row = {}
    for way, (ranks, more) in VARIANTS.items():
        path = f"{model}-wide" if way in IN_WIDE_WINDOWS else model
        row[way] = _try_way(folder, way, ranks, [*words, f"model.path={path}", *more])
    _compare(folder, words, row)
    shutil.rmtree(folder)
    return row


def _try_way(folder: Path, way: str, ranks: int, overrides: list[str]) -> Row:
    """Train; if that is refused, ask `toolkit check`, which must give the same reason."""
    directory = folder / "runs" / way
    overrides = [*overrides, f"run.name={directory.name}"]
    check = forked(0, "--module", "toolkit", "check", f"world_size={ranks}", *overrides)
    if ranks > 1:
        checked = _run(check, folder)
        if checked.code or way in ASKED:
            state = {0: "accepted", 2: "refused"}.get(checked.code, "failed")
            return {"state": state} | ({"reason": _short(refusal(checked.output), folder)} if checked.code else {})
    launch = forked(ranks if ranks > 1 else 0, str(REPOSITORY / "run.py"), *overrides)
    finished = _run(launch, folder)
    steps = [step for step in rows_of(directory) if "loss" in step] if (directory / "metrics.jsonl").exists() else []
    if finished.code == 2:
        reason = refusal(finished.output)
        checked = refusal(_run(check, folder).output)
        late = "after a step" if steps else "" if checked == reason else f"check says: {checked}"
        return {"state": "failed" if late else "refused", "reason": _short(f"{reason} {late}".strip(), folder)}
    if finished.code:
        return {"state": "failed", "reason": _short(_last_line(finished.output), folder)}
    grouped = re.search(r"cannot be trained on packed rows: (.*?)\. Samples of like", finished.output)
    cell: Row = {"state": "grouped", "reason": grouped[1]} if grouped else {"state": "ok"}
    return cell | {"loss": steps[0]["loss"], "norm": steps[0]["grad_norm"]}


def _compare(folder: Path, words: list[str], row: Row) -> None:
    """Replace what runs measured by its relative difference to a plain loop, and add that of their exports' logits."""
    plain = {
        "full": [*words, f"model.path={folder}/model"],
        "packed": [*words, f"model.path={folder}/model-wide", *VARIANTS["packed"][1]],
    }
    trained = {way: cell for way, cell in row.items() if "loss" in cell}
    runs = {way: f"{folder}/runs/{way}" for way in trained}
    task = {"plain": plain, "base": f"{folder}/model", "runs": runs, "output": f"{folder}/compared.json"}
    (folder / "task.json").write_text(json.dumps(task))
    finished = _worker(folder, "compare", str(folder / "task.json"))
    compared = {} if finished.code else json.loads((folder / "compared.json").read_text())
    for way, cell in trained.items():
        expected = compared.get("plain", {}).get(way if way in plain else "full", finished.output)
        if isinstance(expected, str):
            cell.update(state="failed", reason=_short(f"plain loop: {_last_line(expected)}", folder))
            continue
        cell["loss"] = abs(cell["loss"] / expected["loss"] - 1)
        cell["norm"] = abs(cell["norm"] / expected["norm"] - 1)
        if way == "lora":
            del cell["norm"]  # of other parameters
        logits = compared["logits"][way]
        cell.update({"logits": logits} if isinstance(logits, float) else {"state": "failed", "reason": logits})


def _worker(folder: Path, *words: str) -> Finished:
    return _run(forked(0, WORKER, *words), folder)


def _run(command: list[str], folder: Path) -> Finished:
    """Run a command; one that takes too long has failed."""
    try:
        return run(command, cwd=folder, timeout_s=LIMIT_S)
    except TimeoutExpired:
        return Finished(124, f"not done after {LIMIT_S} s")


def refusal(output: str) -> str:
    """Return the last error of ours in an output, without its type; "" if there is none."""
    errors = re.findall(r"^(?:\w+Error|NotStreamable): (.*)", output, re.MULTILINE)
    return errors[-1] if errors else ""


def _short(text: str, folder: Path) -> str:
    return text.replace(f"{folder}/model-wide", "DIR").replace(f"{folder}/model", "DIR")[:400]


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else ""
