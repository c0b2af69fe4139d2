"""Tasks other than language modelling learn the same however ranks share one model: as where each has a whole one."""

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from ranks import forked, run
from shared import ALL, LORA, RECOMPUTE, STEADY, TIMED, WORDS, WORKER, rows_of, tiny

pytestmark = pytest.mark.timeout(2400)  # the runs that its tests share
TOLERANCE = 1e-5
STEPS = 4
FULL = ["optim.lr=0.003"]
PAIRS = ["preference.beta=0.5"]
TAUGHT = ["task=distill", "model.tokenizer=TEACHER", "distill.teacher=TEACHER"]
# name -> kind of rows, overrides
TASKS: dict[str, tuple[str, list[str]]] = {
    "dpo": ("pairs", ["preference=dpo", *PAIRS, *FULL]),
    "dpo-apart": ("pairs", ["preference=dpo", "data.share_prefixes=false", "preference.sft_weight=0.2", *PAIRS, *FULL]),
    "dpo-lora": ("pairs", ["preference=dpo", *PAIRS, *LORA]),
    "simpo": ("pairs", ["preference=simpo", *FULL]),
    "kto": ("labeled", ["preference=kto", *PAIRS, *FULL]),
    "kto-lora": ("labeled", ["preference=kto", *PAIRS, *LORA]),
    "reward": ("pairs", ["task=reward", "task.center=0.01", *FULL]),
    "reward-lora": ("pairs", ["task=reward", *LORA]),
    "reward-read": ("pairs", ["task=reward", "model=hf", "model.path=TEACHER", *FULL]),
    "classify": ("labels", ["task=classify", *FULL]),
    "classify-packed": ("labels", ["task=classify", "data.packing=packed", "data.max_length=64", *FULL]),
    "embed": ("texts", ["task=embed", "embed.temperature=0.2", "embed.negatives=1", *FULL]),
    "embed-mean": ("texts", ["task=embed", "embed.pooling=mean", "optim.lr=0.001"]),
    "distill": ("rows", ["task=distill", "model.tokenizer=TEACHER", "distill.teacher=TEACHER", *FULL]),
    "stored": (
        "rows",
        ["task=distill", "model.tokenizer=TEACHER", "distill.teacher=TEACHER", "distill.top_k=8", *FULL],
    ),
    "general": ("rows", ["task=distill", "GENERAL", *LORA]),
    "general-stored": ("rows", ["task=distill", "GENERAL", "distill.top_k=16", *FULL]),
}
# name -> ranks, overrides
WHOLE = (2, ["zero=stage0"])
TOGETHER = "two ranks"
"""Launch of all that two ranks train; last what tensor parallelism splits: DeepSpeed 0.19.8 makes no other engine then.
"""
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tensor": (2, ["parallel.tensor=2", "zero=stage1"]),
    "sequence": (2, ["parallel.sequence=2", "zero=stage2"]),
    "pipeline": (2, ["parallel.pipeline=2", "zero=stage0"]),
    "tensor-zero3": (4, ["parallel.tensor=2", "zero=stage3", ALL]),
    "sequence-zero3": (4, ["parallel.sequence=2", "zero=stage3", ALL, RECOMPUTE]),
    "tensor-sequence": (4, ["parallel.tensor=2", "parallel.sequence=2", "zero=stage0"]),
    "pipelines": (4, ["parallel.pipeline=2", "zero=stage1", RECOMPUTE]),
    "tensor-pipeline": (4, ["parallel.tensor=2", "parallel.pipeline=2", "zero=stage1"]),
}
SHORT = ("dpo-lora", "simpo", "kto", "classify-packed", "embed-mean", "general-stored")
LATE = {
    *(("dpo-lora", "tensor"), ("dpo-lora", "pipeline"), ("classify-packed", "tensor"), ("kto", "pipeline")),
    *(("simpo", "tensor"), ("simpo", "sequence")),
}
"""Tried with the first three layouts in the tier of ranks, but for pairs of which others show the same."""
CELLS = [
    pytest.param(task, layout, id=f"{task}-{layout}", marks=[] if is_short else pytest.mark.nightly)
    for layout in LAYOUTS
    for task in TASKS
    for is_short in [task in SHORT and layout in ("tensor", "sequence", "pipeline") and (task, layout) not in LATE]
    if (task, layout) not in {("general", "pipeline"), ("general", "pipelines"), ("general", "tensor-pipeline")}
]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the cells of the tests that are run, and each task once with a whole model on each rank."""
    folder, draw = tmp_path_factory.mktemp("task_layouts"), random.Random(5)
    for kind in ("pairs", "labeled", "labels", "texts", "rows", "general"):
        lines = [json.dumps(row(kind, number, draw)) + "\n" for number in range(37)]
        (folder / f"{kind}.jsonl").write_text("".join(lines))
    mine = [one for one in request.session.items if one.path == request.path]
    wanted = [tuple(one.callspec.params[key] for key in ("task", "layout")) for one in mine]  # type: ignore[attr-defined]
    starts: dict[str, list[list[str]]] = defaultdict(list)
    if any("TEACHER" in word for task, _ in wanted for word in TASKS[task][1]):
        teacher = ["train.max_steps=8", "run.seed=5", "checkpoint.export=true"]
        starts[TOGETHER].append(tiny(folder / "rows.jsonl", folder, "teacher", *teacher))
    starts[TOGETHER] += [words(folder, task, "whole") for task in dict.fromkeys(task for task, _ in wanted)]
    for task, layout in sorted(wanted, key=lambda pair: pair[1] == "tensor"):
        starts[TOGETHER if LAYOUTS[layout][0] == 2 else layout].append(words(folder, task, layout))
    for layout, cases in starts.items():
        (folder / "cases.json").write_text(json.dumps([{"overrides": case} for case in cases]))
        ranks = LAYOUTS.get(layout, WHOLE)[0]
        finished = run([*forked(ranks, WORKER), str(folder / "cases.json")], cwd=folder, timeout_s=1200)
        assert finished.code == 0, finished.output[-6000:]
    return folder / "runs"


def row(kind: str, number: int, draw: random.Random) -> dict[str, Any]:
    """Return a row of a kind; what is to be learned is in the words of the answers."""
    prompt, good, bad = (" ".join(draw.choices(some, k=draw.randint(1, 8))) for some in (WORDS, WORDS[:8], WORDS[7:]))
    answer = good if number % 2 else bad
    return {
        "pairs": {"prompt": prompt, "chosen": good, "rejected": bad},
        "labeled": {"prompt": prompt, "completion": answer, "label": answer is good},
        "labels": {"text": f"{prompt} {answer}", "label": ("bad", "good")[number % 2]},
        "texts": {"query": f"{prompt} {good}", "positive": f"{bad} {good}", "negatives": [f"{good} {prompt}"]},
        "rows": {"prompt": prompt, "response": good},
        "general": {"prompt": prompt, "response": bad},
    }[kind]


def words(folder: Path, task: str, layout: str) -> list[str]:
    """Return all overrides of a run."""
    kind, own = TASKS[task]
    rows, general = (f"path: {folder}/{name}.jsonl" for name in (kind, "general"))
    given = {"GENERAL": f"data.sources=[{{{rows}}}, {{{general}, general: true}}]"}
    own = [given.get(word, word.replace("TEACHER", f"{folder}/runs/teacher/export")) for word in own]
    how = [f"train.max_steps={STEPS}", STEADY, "evaluate.at_start=true", *LAYOUTS.get(layout, WHOLE)[1]]
    how += [f"{key}={str(layout in LAYOUTS).lower()}" for key in ("checkpoint.export", "train.rehearse")]
    return tiny(folder / f"{kind}.jsonl", folder, f"{task}-{layout}", *how, *own)


@pytest.mark.parametrize(("task", "layout"), CELLS)
def test_it_is_learned_as_by_whole_models(task: str, layout: str, runs: Path) -> None:
    mine, whole = (rows_of(runs / f"{task}-{one}") for one in (layout, "whole"))
    assert len(mine) == len(whole) == STEPS + 2
    for one, other in zip(mine, whole, strict=True):
        counts = {key for key in other if isinstance(other[key], int) and key not in TIMED}
        assert {key: one.get(key) for key in counts} == {key: other[key] for key in counts}
        for key in {"loss", "eval_loss", "grad_norm", "rewards/margins", "recall_at_1", "distill/kl"} & other.keys():
            near = 2e-4 if key == "grad_norm" else TOLERANCE  # Adam's steps make more of what rounding leaves there
            assert one[key] == pytest.approx(other[key], rel=near, abs=near), (key, one)
    losses = [one["loss"] for one in whole if "loss" in one]
    assert max(losses) - min(losses) > 0.01, "losses that do not move prove nothing"
    assert (runs / f"{task}-{layout}" / "export").is_dir()
