"""Several trackers at once in a real run, whose first rank is killed and which goes on."""

import json
import time
from pathlib import Path

import pytest
from ranks import Finished, alive, forked, run
from shared import FAULTY, tiny

from tests import series
from toolkit.checkpoint.directory import LATEST, step_of
from toolkit.track.metrics import hf_name, tracked_name

NAMES = ("csv", "tensorboard", "wandb", "mlflow")
SAVED, KILLED_IN, LAST = 4, 11, 14
"""A checkpoint every so many steps: the first is published before the second, of step 8, begins."""
EXACT = ("loss", "lr", "grad_norm", "epoch", "trained_tokens", "total_tokens", "eval_loss", "eval_perplexity")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, rows_file: Path) -> tuple[Path, int, Finished]:
    """The run folder, the step of the newest checkpoint when it was killed, and the session that finished."""
    for name in NAMES[1:]:
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("trackers")
    words = tiny(
        rows_file,
        folder,
        "run",
        f"track=[{','.join(NAMES)}]",
        "track.wandb.mode=offline",
        "evaluate.every=2",
        "evaluate.prompts=[red]",
        "evaluate.max_new_tokens=4",
        f"checkpoint.every={SAVED}",
        f"train.max_steps={LAST}",
        "train.rehearse=true",
        "checkpoint.export=false",
        "zero=stage2",
    )
    fault = {"at": "step", "step": KILLED_IN, "rank": 0, "do": "kill", "note": str(folder / "note")}
    died = run(forked(2, FAULTY, *words), cwd=folder, FAULT=json.dumps(fault), WANDB_API_KEY="0" * 40)
    assert (folder / "note").exists() and died.code != 0
    until = time.monotonic() + 20
    while alive(str(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not alive(str(folder)), "the trackers' process outlives its run for a few seconds only"
    runs = folder / "runs" / "run"
    saved = step_of(runs / "checkpoints" / (runs / "checkpoints" / LATEST).read_text().strip())
    finished = run(forked(2, str(Path(FAULTY).parents[2] / "run.py"), *words), cwd=folder)
    assert finished.code == 0, finished.output[-4000:]
    return runs, saved, finished


@pytest.mark.filterwarnings("ignore")
def test_every_series_is_metrics_jsonl(tracked: tuple[Path, int, Finished], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, saved, finished = tracked
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert "WARNING: " not in finished.output
    assert f"Resuming after step {saved} " in finished.output
    truth = series.metrics_jsonl(folder / "metrics.jsonl")
    assert [step for step, _ in truth["loss"]] == list(range(1, LAST + 1))
    assert [step for step, _ in truth["eval_loss"]] == list(range(0, LAST + 1, 2))
    lost = (folder / "logs" / "metrics-lost.jsonl").read_text()
    assert f'"step": {saved + 1},' in lost, "steps were done again"
    mlflow_run, by_mlflow = series.mlflow(str(folder.parent / "mlruns"))
    found = {
        "csv": (series.csv_file(folder / "metrics.csv"), str),
        "tensorboard": (series.tensorboard(folder / "tensorboard"), tracked_name),
        "wandb": (series.wandb(folder / "wandb"), tracked_name),
        "mlflow": (by_mlflow, hf_name),
    }
    for name, (values, named) in found.items():
        for metric in truth if name in ("csv", "tensorboard") else EXACT:  # times of a step differ when it is redone
            assert series.same(values[named(metric)], truth[metric]), (name, metric)
    assert mlflow_run.data.params["optim.lr"] == "0.003"
    assert int(mlflow_run.data.params["data_summary.train.samples"]) > 20
    assert mlflow_run.info.status == "FINISHED"
    assert {"train_loss", "train_runtime", "train_steps_per_second"} <= set(mlflow_run.data.metrics)


def test_the_first_rank_alone_speaks(tracked: tuple[Path, int, Finished]) -> None:
    folder, _, _ = tracked
    assert len(list((folder / "tensorboard").iterdir())) == 2, "one file of each session"
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 2
    assert (folder / "ds_config.json").read_text().count("monitor") == 0
