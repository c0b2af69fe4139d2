"""The plan's time of communication, against counts by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.config.load import load
from toolkit.config.schema import RunConfig
from toolkit.plan import speed
from toolkit.plan.layouts import layout_numbers
from toolkit.plan.lookup import outline_of
from toolkit.plan.machine import Machine
from toolkit.plan.planned_machine import parse_machine
from toolkit.plan.search import layouts
from toolkit.plan.speed import Rates, StepTime, assumed, step_time

FREE = {"latency_s": 0.0, "micro_s": 0.0}


def config(*words: str) -> RunConfig:
    own = ["recipe=chatglm", "model.path=/models/none", "train.activation_checkpointing.enabled=false"]
    return load([*own, "batch.global_size=32", *words]).cfg


def machine(nodes: int, ranks: int = 8) -> Machine:
    return parse_machine(f"{ranks}xA100-80GB", nodes, "1TB")


def time_of(cfg: RunConfig, where: Machine, rates: Rates | None = None) -> StepTime:
    return step_time(outline_of(cfg), cfg, where, replace(rates or assumed(where, "bf16"), **FREE))


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_ring_passes_from_node_to_node_once(ranks: int) -> None:
    """A node's link is not divided by its GPUs."""
    cfg = config("zero=stage0")
    found = time_of(cfg, machine(2, ranks)).communication
    size = 2 * outline_of(cfg).num_trained
    assert found == pytest.approx(2 * size * (2 * ranks - 1) / (2 * ranks) / 25e9)


def test_rings_side_by_side_share_the_link() -> None:
    """Of two ranks that split layers each is in a ring of its own, for half of the gradients."""
    whole, split = (
        time_of(config("zero=stage1", f"parallel.tensor={size}", "batch.micro_per_gpu=1"), machine(4))
        for size in (1, 2)
    )
    gradients = split.communication - split.waits
    assert 1 < gradients / whole.communication < 1.1


@pytest.mark.parametrize(
    "words",
    [
        ["zero=stage1", "parallel=tensor", "parallel.tensor=2"],
        ["zero=stage1", "parallel=sequence", "parallel.sequence=8"],
    ],
)
def test_ranks_of_one_node_exchange_within_it(words: list[str]) -> None:
    one, two = (time_of(config(*words, "batch.micro_per_gpu=1"), machine(nodes)) for nodes in (1, 2))
    # Half as many micro-batches of a rank.
    assert two.waits == pytest.approx(one.waits / 2) and one.waits > 0
    assert two.communication > one.communication


def test_all_to_all_over_nodes_shares_their_links() -> None:
    """Of what a rank sends, half leaves its node, and eight ranks send at the same time."""
    rates = Rates(1e12, 16e9, 1e12, node_link=160e9)
    assert speed._all_to_all(rates, machine(2), 16) == 16e9 / 8 / 0.5
    assert speed._all_to_all(rates, machine(2), 8) == 160e9
    assert speed._all_to_all(replace(rates, node_link=0.0), machine(1), 8) == 16e9


@pytest.mark.parametrize(("micro", "times"), [(4, 1), (1, 4)])
def test_stage_2_reduces_each_micro_batch_to_all(micro: int, times: int) -> None:
    """With one micro-batch it sends what stage 1 does."""
    first, second = (
        time_of(config(f"zero=stage{stage}", f"batch.micro_per_gpu={micro}"), machine(1)).communication
        for stage in (1, 2)
    )
    assert second == pytest.approx(first / 3 * (2 * times + 1))


def test_the_reduction_of_stage_3_holds_up_the_backward_pass() -> None:
    cfg = config("zero=stage3", "zero.overlap_comm=false")
    waiting, behind = (
        time_of(config("zero=stage3", f"zero.overlap_comm={word}"), machine(1)) for word in ("false", "true")
    )
    assert waiting.communication == behind.communication
    assert behind.waits == 0
    assert waiting.waits == pytest.approx(waiting.communication / 3)
    assert waiting.seconds == pytest.approx(waiting.compute + waiting.waits + waiting.update)
    assert behind.seconds == pytest.approx(behind.compute + behind.update)
    assert time_of(cfg, machine(1)) == waiting


def test_a_stage_of_a_pipeline_exchanges_for_its_own_layers() -> None:
    """Of the same GPUs and global batch each rank has a quarter of the layers, and four times as many micro-batches."""
    words = ["zero=stage1", "parallel.tensor=2", "evaluate.prompts=[]", "batch.micro_per_gpu=1"]
    one, four = (time_of(config(*words, f"parallel.pipeline={stages}"), machine(1)) for stages in (1, 4))
    assert four.waits == pytest.approx(one.waits) and one.waits > 0


def test_a_reference_gathers_the_weights_once_more() -> None:
    """Of a LoRA hardly anything else is sent."""
    words = ["tuning=lora", "zero=stage3", "batch.micro_per_gpu=1"]
    plain = time_of(config(*words), machine(1)).communication
    asked = time_of(config(*words, "preference.loss=sigmoid"), machine(1)).communication
    assert asked / plain == pytest.approx(1.5, rel=0.01)


def test_a_run_finds_what_was_measured_for_the_same_gpu(tmp_path: Path) -> None:
    """It sees less free memory than nvidia-smi's total."""
    cfg = config(f"prepare.dir={tmp_path}")
    outline, here = outline_of(cfg), machine(1)
    files = {
        speed.rates_file(cfg, replace(here, memory_bytes=here.memory_bytes - less), outline) for less in (0, 2 << 30)
    }
    assert len(files) == 1
    unknown = {speed.rates_file(cfg, replace(here, card=None, memory_bytes=size << 30), outline) for size in (24, 48)}
    assert len(unknown) == 2


def test_each_layout_is_told_from_the_others() -> None:
    cfg = load(["recipe=glm45_air_lora", "batch.global_size=16"]).cfg
    where = machine(2)
    found = [layout_numbers(one) for one in layouts(outline_of(cfg), cfg, where, assumed(where, "bf16"))]
    keys = [key for key in found[0] if not key.endswith("bytes") and key not in ("step_s", "tokens_per_s", "fits")]
    assert len({tuple(one[key] for key in keys) for one in found}) == len(found)
    assert len({one["expert"] for one in found}) > 1
