"""Read back what trackers wrote, each through its own library: metric -> [(step, value), …] in their order."""

import csv
import json
import math
import sqlite3
from pathlib import Path
from typing import Any

Series = dict[str, list[tuple[int, float]]]


def tensorboard(folder: Path) -> Series:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]}


def csv_file(file: Path) -> Series:
    found: Series = {}
    with file.open(newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            for name, value in row.items():
                if value and name != "step":
                    found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def wandb(folder: Path) -> Series:
    """Several files of one run are one series, in the order of their beginnings, as `wandb sync` takes them."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    found: Series = {}
    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(file)
            while (content := reader.scan()) is not None:
                record = Record()
                record.ParseFromString(content)
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    if name.startswith(("train/", "eval/")):
                        value = float(json.loads(item.value_json))
                        found.setdefault(name, []).append((record.history.step.num, value))
    return found


def mlflow(uri: str) -> tuple[Any, Series]:
    """Return the only run too."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    [run] = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return run, {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def swanlab(folder: Path) -> Series:
    """As `swanlab sync` takes them: of a metric, a step that is not after the last one is left out."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found: Series = {}
    for file in sorted(folder.glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for content in reader:
            record = Record()
            record.ParseFromString(content)
            if record.HasField("scalar"):
                found.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
        reader.close()
    return found


def trackio(folder: Path) -> Series:
    found: Series = {}
    [file] = folder.glob("*.db")
    with sqlite3.connect(file) as database:
        for step, metrics in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
            for name, value in json.loads(metrics).items():
                if isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity"):
                    found.setdefault(name, []).append((step, float(value)))
    return found


def metrics_jsonl(file: Path) -> Series:
    """Return the truth, under the names in metrics.jsonl."""
    found: Series = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name != "step":
                found.setdefault(name, []).append((row["step"], float(value)))
    return found


def same(left: list[tuple[int, float]], right: list[tuple[int, float]], relative: float = 1e-6) -> bool:
    """Whether two series are equal, nan being equal to itself."""
    return len(left) == len(right) and all(
        one[0] == other[0]
        and (
            one[1] == other[1] or (math.isnan(one[1]) and math.isnan(other[1])) or math.isclose(*pair, rel_tol=relative)
        )
        for one, other in zip(left, right, strict=True)
        for pair in [(one[1], other[1])]
    )
