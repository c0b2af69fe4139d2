"""Layers split over ranks: every family trains as one process would; a whole run goes on, evaluates and exports."""

import json
from pathlib import Path

import pytest
import torch
from ranks import REPOSITORY, forked, run
from shared import (
    LORA,
    SHORT_FIRST,
    STEADY,
    WORKER,
    by_tier,
    check_short_first,
    launcher,
    of_tier,
    rows_of,
    tiny,
    trained,
)

from tests.probes import compare
from toolkit.checkpoint import intact
from toolkit.export.checkpoint import load_checkpoint
from toolkit.export.load import load_any
from toolkit.models import probe

STEPS, SAVED = 6, 4
ADAPTER = [*LORA, "tuning.rank=4"]
PREFIX = ["tuning=ptuning_v2", "tuning.num_tokens=4", "tuning.dropout=0", "tuning.projection=true", "optim.lr=0.01"]
PROMPT = ["tuning=prompt", "tuning.num_tokens=4", "optim.lr=0.01"]
WITH_SEQUENCE = ["parallel.tensor=2", "parallel.sequence=2"]
WITHOUT = {
    "split": "data",
    "split3": "data",
    "lora": "lora-data",
    "lora3": "lora-data",
    "dora": "dora-data",
    "ptuning": "ptuning-data",
    "prompt": "prompt-data",
    "sequence3": "data",
    "sequence-lora": "lora-data",
}
"""Runs with split layers, the last two on four ranks -> the same without."""
LATE = ("lora-data", "lora", "lora3", "sequence-lora")
"""Those of the nightly tier: DoRA is more than LoRA, and tensor_worker.py has LoRA under each stage."""


@pytest.mark.parametrize("cells", by_tier(["few", "others"], late=["others"]))
def test_every_family_trains_as_one_process_would(cells: str) -> None:
    """Four ranks: two models of two ranks each."""
    worker = str(REPOSITORY / "tests" / "ranks" / "tensor_worker.py")
    finished = run(forked(4, worker, cells), cwd=REPOSITORY, timeout_s=480)
    assert finished.code == 0, finished.output[-5000:]
    assert finished.output.count("ALL CHECKED") == 4


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs on two ranks, data-parallel and with split layers, and what became of them after a death."""
    folder = tmp_path_factory.mktemp("tensor")
    own = ["zero=stage1", f"train.max_steps={STEPS}", f"checkpoint.every={SAVED}", "checkpoint.keep=0", STEADY]
    own += ["checkpoint.export=true"]
    asks = ["evaluate.metrics=[bleu]", "evaluate.max_new_tokens=3", "evaluate.batch_size=2", "evaluate.every=3"]
    asks += ["data.packing=packed"]
    cells = {
        # First: an engine that splits nothing cannot follow one that does in the same process.
        "data": asks,
        "lora-data": ADAPTER,
        "dora-data": [*ADAPTER, "tuning.dora=true"],
        "ptuning-data": PREFIX,
        "prompt-data": [*PROMPT, *SHORT_FIRST],
        "split": [*asks, "parallel=tensor", "train.rehearse=true"],
        "split3": [*asks, "parallel=tensor", "zero=stage3", "kernels.mlp_pieces=2"],
        "lora": [*ADAPTER, "parallel=tensor", "zero=stage2"],
        "lora3": [*ADAPTER, "parallel=tensor", "zero=stage3"],
        "dora": [*ADAPTER, "tuning.dora=true", "parallel=tensor", "zero=stage2"],
        "ptuning": [*PREFIX, "parallel=tensor", "zero=stage3"],
        "prompt": [*PROMPT, *SHORT_FIRST, "parallel=tensor"],
        "frozen": ["parallel=tensor", "tuning=freeze", "tuning.last_layers=1"],
    }
    of_four = {
        "sequence3": ["zero=stage3", *asks, *WITH_SEQUENCE],
        "sequence-lora": [*ADAPTER, *WITH_SEQUENCE],
    }
    for ranks, some in ((2, cells), (4, of_four)):
        cases: list[dict[str, object]] = []
        for name, overrides in of_tier(request, some, late=LATE).items():
            cases.append({"overrides": tiny(rows_file, folder, name, *own, *overrides)})
            if name in ("split", "lora"):
                died = {"of": f"{folder}/runs/{name}", "step": SAVED, "as": f"{folder}/runs/{name}-again"}
                cases.append({"overrides": tiny(rows_file, folder, f"{name}-again", *own, *overrides), "died": died})
        (folder / "cases.json").write_text(json.dumps(cases))
        finished = run([*launcher(request)(ranks, WORKER), str(folder / "cases.json")], cwd=folder, timeout_s=580)
        assert finished.code == 0, finished.output[-5000:]
    return folder / "runs"


@pytest.mark.parametrize("name", by_tier(WITHOUT, late=LATE))
def test_a_run_is_the_same_as_without(name: str, runs: Path) -> None:
    """Losses, gradient norms, token counts, validation losses and answers. `split3` computes its rows in pieces."""
    plain, split = rows_of(runs / WITHOUT[name]), rows_of(runs / name)
    assert len(plain) == len(split) > STEPS
    for before, after in zip(plain, split, strict=True):
        for key in ("step", "trained_tokens", "total_tokens", "eval_tokens", "eval_answers"):
            assert after.get(key) == before.get(key), key
        for key in ("loss", "grad_norm", "eval_loss", "eval_bleu"):
            assert after.get(key, 0.0) == pytest.approx(before.get(key, 0.0), rel=1e-5), key
    for step in (3, STEPS) if WITHOUT[name] == "data" else ():
        file = Path("evaluations") / f"step-{step}.jsonl"
        before, after = ((runs / one / file).read_text() for one in (WITHOUT[name], name))
        assert before and before == after


def test_the_same_samples_first_as_without(runs: Path) -> None:
    check_short_first(runs / "prompt", runs / "prompt-data", rel=1e-5)


@pytest.mark.parametrize("name", by_tier(["split", "lora"], late=LATE))
def test_it_goes_on_bit_for_bit(name: str, runs: Path) -> None:
    assert trained(runs / f"{name}-again") == trained(runs / name)


@pytest.mark.parametrize(
    "name", by_tier(["split", "split3", "frozen", "lora", "dora", "ptuning", "sequence3"], late=LATE)
)
def test_checkpoints_and_exports_are_whole(name: str, runs: Path) -> None:
    """The same logits by the run, by its export, and by its last checkpoint without ranks."""
    export, checkpoint = runs / name / "export", runs / name / "checkpoints" / f"step-{STEPS}"
    assert not intact.manifest_problems(checkpoint)
    for model in (load_any(str(export)).model, load_checkpoint(checkpoint)):
        taken = probe.read(export)
        assert taken is not None
        difference, tolerance = compare(model, taken)
        assert difference <= tolerance
    mine, kept = load_any(str(export)).model.state_dict(), load_checkpoint(checkpoint).state_dict()
    assert all((mine[key] == kept[key]).all() for key in mine)
    if name in WITHOUT:
        plain = load_any(str(runs / WITHOUT[name] / "export")).model.state_dict()
        assert all(torch.allclose(mine[key], plain[key], atol=1e-4) for key in plain)
