"""From a config with a curriculum or changing weights to the samples of each step."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.unit.data_tools import ByteEncoder, run_config, write_rows
from toolkit.config.schema import Packing, RunConfig, WeightPoint
from toolkit.data.plans import PackingPlan
from toolkit.data.sampler import BEGINNING, next_position
from toolkit.messages import ConfigError
from toolkit.tasks.language_batches import changing_order, epoch_rows, epoch_steps, rows_per_step, step_samples
from toolkit.tasks.language_data import LanguageData, load_data_with


def given(tmp_path: Path, packing: Packing) -> tuple[RunConfig, LanguageData]:
    """Return a config of two files, 60 and 40 samples of 4 to 63 tokens, and what it is prepared to."""
    draw = np.random.default_rng(4)
    files = [
        write_rows(
            tmp_path / f"{name}.jsonl",
            [{"prompt": f"{row}", "response": name * int(draw.integers(1, 60))} for row in range(count)],
        )
        for name, count in (("a", 60), ("b", 40))
    ]
    cfg = run_config(tmp_path, *files)
    cfg.data.max_length, cfg.data.packing = 64, packing
    cfg.batch.global_size, cfg.batch.micro_per_gpu = 4, 1
    return cfg, with_encoder(cfg)


def with_encoder(cfg: RunConfig) -> LanguageData:
    with mock.patch("toolkit.models.packable.reason_not_to_pack", return_value=""):
        return load_data_with(cfg, ByteEncoder())  # type: ignore[arg-type]


def steps_of(cfg: RunConfig, prepared: LanguageData, world_size: int, count: int) -> list[list[int]]:
    """Return the samples of the first steps over all ranks."""
    place, found, num_rows = BEGINNING, [], epoch_rows(cfg, prepared)
    for _ in range(count):
        parts = step_samples(cfg, prepared, world_size, place)
        found.append(sorted(sample for rank in parts for batch in rank for sample in batch))
        place = next_position(place, num_rows, rows_per_step(cfg, prepared.packing)[0])
    return found


@pytest.mark.parametrize("packing", list(Packing))
def test_a_curriculum_of_any_rows(tmp_path: Path, packing: Packing) -> None:
    cfg, shuffled = given(tmp_path, packing)
    cfg.data.curriculum.steps, cfg.data.curriculum.start_length = 5, 16
    prepared = with_encoder(cfg)
    if packing is not Packing.packed:  # whose rows are made of other samples
        assert prepared.train_plan.folder == shuffled.train_plan.folder
    per_epoch, order = epoch_steps(cfg, prepared), changing_order(cfg, prepared)
    assert order is not None
    steps = steps_of(cfg, prepared, 2, per_epoch)
    assert sorted(sample for step in steps for sample in step) == list(range(100))
    assert steps_of(cfg, prepared, 1, per_epoch) == steps_of(cfg, prepared, 4, per_epoch) == steps
    lengths = prepared.train.lengths()
    longest = [int(lengths[step].max()) for step in steps]
    assert longest[0] <= order.figures(BEGINNING)["curriculum_length"] <= 32
    assert longest[0] < longest[1] < longest[4] < max(longest)
    cfg.data.curriculum.steps = per_epoch + 1
    with pytest.raises(ConfigError) as caught:
        epoch_steps(cfg, prepared)
    assert str(caught.value) == (
        f"data.curriculum.steps = {per_epoch + 1} is more than the {per_epoch} steps of an epoch, in which each sample "
        f"comes once. Use at most {per_epoch}."
    )


@pytest.mark.parametrize("packing", list(Packing))
def test_weights_that_change(tmp_path: Path, packing: Packing) -> None:
    cfg, shuffled = given(tmp_path, packing)
    first, second = cfg.data.sources
    first.weights = [WeightPoint(at=0, weight=2), WeightPoint(at=1, weight=0)]
    prepared = with_encoder(cfg)
    bounds = prepared.train_plan.bounds
    assert {sample < 60 for row in range(bounds[1]) for sample in prepared.train_plan[row]} == {True}
    assert {sample < 60 for row in range(bounds[1], bounds[2]) for sample in prepared.train_plan[row]} == {False}
    assert epoch_rows(cfg, prepared) == bounds[2] == len(prepared.train_plan)
    per_epoch, order = epoch_steps(cfg, prepared), changing_order(cfg, prepared)
    assert order is not None
    steps = steps_of(cfg, prepared, 2, per_epoch)
    assert steps_of(cfg, prepared, 1, per_epoch) == steps_of(cfg, prepared, 4, per_epoch) == steps
    halves = steps[: per_epoch // 2], steps[-(per_epoch // 2) :]
    before, after = (np.mean([sample < 60 for step in half for sample in step]) for half in halves)
    assert before > 0.6 > 0.5 > after
    assert set(order.figures(BEGINNING)) == {f"mixture_share/{tmp_path}/{name}.jsonl" for name in "ab"}
    # What a run goes on with is told by the plan's name.
    second.weights = [WeightPoint(at=0.5, weight=1)]
    other = with_encoder(cfg)
    second.weights, second.weight = [], 0.5
    third = with_encoder(cfg)
    names = {one.train_plan.folder for one in (shuffled, prepared, other, third)}
    assert len(names) == 4


def test_ranks_compute_packed_rows_of_like_attention_at_the_same_time(tmp_path: Path) -> None:
    cfg, prepared = given(tmp_path, Packing.packed)
    cfg.batch.global_size, lengths = 8, prepared.train.lengths()
    place, differences = BEGINNING, []
    while place.row + 8 <= epoch_rows(cfg, prepared) and place.epoch == 0:
        ranks = step_samples(cfg, prepared, 4, place)  # two micro-batches of one row each
        pairs = np.array([[np.square(lengths[samples]).sum() for samples in share] for share in ranks])
        assert pairs[:, 0].min() >= pairs[:, 1].max()
        differences.append(np.ptp(pairs))
        place = next_position(place, epoch_rows(cfg, prepared), 8)
    assert min(differences) > 0, "else any order would do"


def test_pairs_of_tokens_that_attention_computes(tmp_path: Path) -> None:
    _, prepared = given(tmp_path, Packing.packed)
    members, offsets = np.array([7, 3, 9, 1, 4], np.uint32), np.array([0, 2, 3, 5])
    shared = np.array([0, 2, 0, 0, 3], np.uint32)
    a, b, _, c, d = prepared.train.lengths(members).tolist()
    plan = PackingPlan(3, members, offsets, shared=shared)
    assert plan.attention_pairs(prepared.train, np.array([2, 0])).tolist() == [c**2 + d**2 - 9, a**2 + b**2 - 4]
