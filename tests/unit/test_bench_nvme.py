"""The measurement of NVMe settings, on a small file in a real folder."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder

from benchmarks import nvme
from benchmarks.run import run as bench
from toolkit.config.load import load
from toolkit.config.rules import check_rules
from toolkit.config.schema import AioConfig
from toolkit.messages import ConfigError

# Asked once, before anything is loaded: afterwards the builder says no (0.19.8).
needs_aio = pytest.mark.skipif(not AsyncIOBuilder().is_compatible(verbose=False), reason="no libaio here")
OTHER = AioConfig(block_size=8 << 20, queue_depth=32, intra_op_parallelism=4)


@needs_aio
def test_settings_are_measured_and_the_best_is_named(tmp_path: Path) -> None:
    heard: list[str] = []
    found = nvme.measure(tmp_path, nvme.PIECE, 1, heard.append, [AioConfig(), OTHER])
    assert [one["setting"] for one in found["results"]] == [asdict(AioConfig()), asdict(OTHER)]
    assert found["default"] == found["results"][0]
    assert found["best"]["seconds"] == min(one["seconds"] for one in found["results"])
    assert all(one[name] > 0 for one in found["results"] for name in ("read_gb_per_s", "write_gb_per_s"))
    assert found["overrides"] == nvme.overrides(AioConfig(**found["best"]["setting"]))
    assert len(heard) == 2
    assert list(tmp_path.iterdir()) == []


def test_overrides_are_those_of_a_run(tmp_path: Path) -> None:
    assert nvme.overrides(AioConfig()) == []
    words = nvme.overrides(nvme.variants(OTHER)[1])
    assert words == [
        "zero.aio.block_size=8388608",
        "zero.aio.queue_depth=32",
        "zero.aio.intra_op_parallelism=4",
        "zero.aio.overlap_events=false",
    ]
    path = f"zero.offload_optimizer.nvme_path={tmp_path}"
    loaded = load(["recipe=zero3_nvme", "model=glm_tiny", path, f"run.dir={tmp_path}", *words])
    check_rules(loaded, 1)
    assert loaded.cfg.zero.aio == nvme.variants(OTHER)[1]


def test_everything_is_tried_once() -> None:
    tried = nvme.settings()
    assert tried[0] == AioConfig() and len(tried) == 36
    assert len({json.dumps(asdict(one)) for one in tried}) == 36
    assert all(nvme.PIECE % (one.block_size * one.intra_op_parallelism) == 0 for one in tried)


@pytest.mark.parametrize(("gib", "size"), [("1", 2**30), ("0.01", nvme.PIECE), ("0.1", 2 * nvme.PIECE)])
def test_size_of_the_file(gib: str, size: int) -> None:
    assert nvme.pieces(gib) == size


@needs_aio
def test_what_cannot_be_measured_is_an_error(tmp_path: Path) -> None:
    for gib in ("0", "much", "nan"):
        with pytest.raises(ConfigError, match=f"gib = {gib} must be a number above 0"):
            nvme.pieces(gib)
    with pytest.raises(ConfigError, match="does not take asynchronous, direct input/output: the write failed"):
        nvme.measure(tmp_path / "nowhere", nvme.PIECE, 1, lambda line: None, [AioConfig()])
    with pytest.raises(ConfigError, match="Give one on the disk to be measured: directory=/nvme"):
        bench(["nvme", "recipe=quickstart", f"directory={tmp_path}/nowhere"])
