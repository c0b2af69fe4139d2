"""On-policy distillation on ranks: a plain PyTorch loop on the same answers of the student; resumed bit by bit."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import forked, run
from shared import (
    ALL,
    LORA,
    RECOMPUTE,
    WORKER,
    by_tier,
    global_batches,
    losses,
    of_tier,
    plain_run,
    rows_of,
    tiny,
    train_cells,
    trained,
)
from test_distill import apart, teacher  # noqa: F401  a fixture

from tests.unit.test_completions import StandIn
from toolkit.tasks.on_policy import draw_of, read_rollouts

TOLERANCE = 1e-5
STEPS = 6
FULL = ["optim.lr=0.003"]
SHORT = ["distill.rollouts.max_new_tokens=9", "distill.rollouts.batch_size=2"]
SAVED = ["checkpoint.every=3", "checkpoint.keep=0"]
REVERSE = ["distill.loss=reverse_kl", "distill.rollouts.temperature=0.8", "distill.rollouts.top_p=0.9"]
JSD = ["distill.loss=jsd", "distill.beta=0.3", "distill.temperature=2"]

# name -> overrides; two ranks.
CELLS: dict[str, list[str]] = {
    "own-stage0": ["zero=stage0", "distill.on_policy=1", *SAVED, *FULL],
    "half-stage2-micro2": [
        "zero=stage2",
        "distill.on_policy=0.5",
        "batch.micro_per_gpu=2",
        RECOMPUTE,
        *REVERSE,
        *SAVED,
        *FULL,
    ],
    "own-stage3": ["zero=stage3", ALL, "distill.on_policy=1", *JSD, *SAVED, *FULL],
    "half-lora-stage2": ["zero=stage2", "distill.on_policy=0.6", "distill.weight=1", *LORA],
}
ONE_RANK = {"own-one-rank-4x1": ["zero=stage1", "distill.on_policy=1", "batch.micro_per_gpu=4", "train.rehearse=true"]}
LEARNED = {
    "taught-on-own": ["zero=stage0", "distill.on_policy=1", "train.max_steps=60", "distill.loss=reverse_kl", *FULL]
}
RESUMED = ("own-stage0", "half-stage2-micro2", "own-stage3")


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    rows_file: Path,
    teacher: Path,  # noqa: F811
) -> Path:
    """Train all cells; resume some from the middle."""
    folder = tmp_path_factory.mktemp("on-policy")
    cells = of_tier(request, CELLS), of_tier(request, {**ONE_RANK, **LEARNED})
    return train_cells(folder, cells, partial(words, rows_file, teacher, folder), dict.fromkeys(RESUMED, 3))


def words(rows: Path, teacher: Path, folder: Path, name: str, overrides: list[str]) -> list[str]:  # noqa: F811
    """Return the overrides of a run."""
    own = [f"model.tokenizer={teacher}", f"distill.teacher={teacher}", f"train.max_steps={STEPS}", *SHORT]
    return tiny(rows, folder, name, "task=distill", *own, *overrides)


def sampled(cfg: Any, model: Any, encoder: Any, prompt: list[int], seed: int) -> list[int]:
    """Return an answer, written token by token without a cache or a batch."""
    config, draw = cfg.distill.rollouts, torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(config.max_new_tokens):
        scores = model(torch.tensor([ids])).logits[0, -1].detach()
        scores[len(encoder.tokenizer) :] = -torch.inf
        p = torch.softmax(scores / config.temperature, 0)
        order = p.argsort(descending=True)
        before = p[order].cumsum(0) - p[order]
        p = torch.zeros_like(p).scatter(0, order[before < config.top_p], p[order[before < config.top_p]])
        noise = torch.empty_like(p).exponential_(generator=draw)
        ids.append(int((p / noise).argmax()))
        if ids[-1] in encoder.stop_ids:
            break
    return ids[len(prompt) :][: cfg.data.max_length - len(prompt)]


def plain_loop(
    overrides: list[str], rollouts: dict[int, dict[int, Any]], is_own: bool = True
) -> dict[str, list[float]]:
    """Train in a plain loop on fixed answers; return losses, gradient norms and divergences by step. `is_own`: whether
    the answers must be those of the plain loop's model.
    """
    from toolkit.evaluate.questions import split_sample
    from toolkit.models.load_weights import load_model

    run = plain_run(overrides, STEPS)
    cfg, data, model, _, optimizer = run
    other: Any = load_model(cfg.distill.teacher).eval()
    answers = {
        step: {sample: answer for sample, answer in of_step.items() if isinstance(answer, list)}
        for step, of_step in rollouts.items()
    }
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "own_kl": [], "share": []}
    for step, rows in enumerate(global_batches(cfg, data, STEPS), start=1):
        samples = [sample for row in rows for sample in row]
        taken, own = [], []
        for sample in samples:
            ids, mask = data.train[sample]
            if sample in answers[step]:
                parts = split_sample(ids.tolist(), mask.tolist(), data.encoder)
                assert parts is not None
                prompt, answer = parts[0], answers[step][sample]
                if is_own:
                    expected = sampled(cfg, model.eval(), data.encoder, prompt, draw_of(cfg.run.seed, step, sample))
                    assert answer == expected, (step, sample)
                    model.train()
                ids = torch.tensor(prompt + answer).numpy()
                mask = torch.arange(len(ids)).numpy() >= len(prompt)
            own.append(sample in answers[step])
            taken.append((ids, mask))
        logits, labels = run.forward(model, taken)
        with torch.no_grad():
            others = run.forward(other, taken)[0][:, :-1]
        logits, labels = logits[:, :-1], labels[:, 1:]
        labelled = -logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        by_student, trains = torch.tensor(own)[:, None].expand_as(labelled), (labels >= 0).float()
        weights, distance = torch.where(by_student, 1.0, cfg.distill.weight), apart(cfg, logits, others)
        each = (1 - weights) * labelled + weights * cfg.distill.temperature**2 * distance
        loss = (each * trains).sum() / trains.sum()
        found["loss"].append(float(loss.detach()))
        of_student = trains * by_student
        found["own_kl"].append(float((distance.detach() * of_student).sum() / of_student.sum()))
        found["share"].append(sum(own) / len(own))
        found["grad_norm"].append(optimizer.step(loss))
    return found


@pytest.mark.parametrize("name", by_tier([*CELLS, *ONE_RANK]))
def test_every_layout_follows_the_plain_loop(
    name: str,
    runs: Path,
    rows_file: Path,
    teacher: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """On the answers that were written down, each of which is what the plain loop's model says, too."""
    overrides = words(rows_file, teacher, tmp_path, f"plain-{name}", ({**CELLS, **ONE_RANK})[name])
    expected = plain_loop(overrides, read_rollouts([runs / name / "rollouts.jsonl"], 1))
    rows = [row for row in rows_of(runs / name) if "loss" in row]
    assert losses(runs / name) == pytest.approx(expected["loss"], abs=TOLERANCE)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert [row["distill/own_kl"] for row in rows] == pytest.approx(expected["own_kl"], abs=TOLERANCE)
    assert all(row["rollouts_failed"] == 0 and 0 < row["rollout_share"] < 1 for row in rows)
    share = 1.0 if "own" in name else sum(expected["share"]) / STEPS
    assert expected["share"] == pytest.approx([share] * STEPS, abs=0.26)


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_bit_by_bit(name: str, runs: Path) -> None:
    def after(run: str) -> list[dict[str, float]]:
        rows = [row for row in trained(runs / run) if row["step"] > 3]
        return [{key: row[key] for key in row if key not in ("rollout_s", "rollout_share")} for row in rows]

    assert len(after(name)) >= 3 and after(name) == after(f"{name}-resumed")
    assert not (runs / f"{name}-resumed" / "rollouts.jsonl").exists(), "all are taken from the first run's"


def test_the_student_comes_nearer_on_what_it_says_itself(runs: Path) -> None:
    rows = [row for row in rows_of(runs / "taught-on-own") if "loss" in row]
    apart_by_step = [row["distill/own_kl"] for row in rows]
    assert sum(apart_by_step[-5:]) < 0.7 * sum(apart_by_step[:5])
    assert {(row["rollouts"], row["rollouts_failed"]) for row in rows} <= {(4, 0), (2, 0)}


def test_a_server_that_answers_nonsense_and_dies_costs_tries(
    rows_file: Path,
    teacher: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The run is that of a plain loop on what was written down; resumed, it takes its answers from there."""
    server, asked = StandIn(), 0

    def answer(body: dict[str, Any]) -> tuple[int, bytes] | None:
        nonlocal asked
        asked += "seed" in body
        if asked > 26 and "seed" in body:  # dead, but for the question at the start
            return None
        if body.get("seed", 1) % 4 == 0:
            return 200, b"{"
        ids = [10 + (body.get("seed", 0) + number) % 40 for number in range(5)]
        choice = {"text": "x", "token_ids": ids, "finish_reason": "length"}
        return 200, json.dumps({"model": "student", "choices": [choice]}).encode()

    server.script = [answer]
    own = [f"distill.rollouts.url={server.url}", "distill.rollouts.tries=2", "distill.rollouts.timeout_s=20"]
    own += ["distill.on_policy=1", "zero=stage2", "distill.rollouts.max_new_tokens=9", *SAVED, *FULL]

    def start(name: str, *more: str) -> tuple[int, str]:
        overrides = words(rows_file, teacher, tmp_path, name, [*own, "distill.rollouts.max_failed_steps=0", *more])
        overrides = [one for one in overrides if not one.startswith("distill.rollouts.batch_size")]
        (tmp_path / "cases.json").write_text(json.dumps([{"overrides": overrides}]))
        finished = run([*forked(2, WORKER), str(tmp_path / "cases.json")], cwd=tmp_path, timeout_s=200)
        return finished.code, finished.output

    code, output = start("served")
    assert code == 0, output[-4000:]
    assert "answers of the student failed; these samples keep the answers of the data" in output
    folder = tmp_path / "runs" / "served"
    saved = read_rollouts([folder / "rollouts.jsonl"], 1)
    rows = [row for row in rows_of(folder) if "loss" in row]
    failed = [sum(isinstance(answer, str) for answer in saved[step].values()) for step in range(1, STEPS + 1)]
    assert [row["rollouts_failed"] for row in rows] == failed and failed[-1] == 4 and failed[0] < 4
    overrides = [one for one in words(rows_file, teacher, tmp_path, "plain", own) if "batch_size" not in one]
    expected = plain_loop(overrides, saved, is_own=False)
    assert losses(folder) == pytest.approx(expected["loss"], abs=TOLERANCE)
    first = json.loads((folder / "rollouts.jsonl").read_text().splitlines()[0])
    assert (first["by"], first["url"]) == ("student", server.url)

    asked = 0
    code, output = start("again", f"resume={folder}/checkpoints/step-3")
    assert code == 0, output[-4000:]
    assert losses(tmp_path / "runs" / "again") == losses(folder)[3:] and asked == 0
    asked = 100
    code, output = start("stopped", "distill.rollouts.max_failed_steps=2")
    assert code and "gave no answer in 2 steps in a row, up to step 2" in output
    server.server.shutdown()
    server.server.server_close()
