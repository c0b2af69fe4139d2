"""What a log line says of speed and memory, with a clock and an engine that are none."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.architectures import CONFIGS
from tests.unit.metric_table import documented
from toolkit.config.schema import TuningConfig, TuningMethod
from toolkit.messages import set_language
from toolkit.plan.flops import FlopRates, Formula, formula
from toolkit.plan.machine import find_gpu
from toolkit.terminal import set_display
from toolkit.track.metrics import Progress
from toolkit.train import baseline, throughput
from toolkit.train.baseline import Baseline, measure_baseline
from toolkit.train.step import StepCounts, StepResult, StepVote
from toolkit.train.throughput import ThroughputMeter

ENGINE: Any = SimpleNamespace(device=torch.device("cpu"), skipped_steps=0, fp16_enabled=lambda: False)
FORMULA = Formula(FlopRates(10, 1, 5), FlopRates(20, 2, 10), FlopRates(10, 1, 0))


def an_account(**given: Any) -> Baseline:
    """Return an account of round numbers."""
    usual: dict[str, Any] = {
        "formula": FORMULA,
        "recomputes": True,
        "dtype": "bf16",
        "matmul_flops": 1000.0,
        "device": "",
        "card": None,
        "planned_bytes": None,
    }
    return Baseline(**{**usual, **given})


def a_step(loss: float = 2.0) -> StepResult:
    """Return a step of ten tokens, two of them padding."""
    return StepResult(
        loss=loss,
        counts=StepCounts(losses=4, total_tokens=8, computed_tokens=10, pairs=20, trained_tokens=4),
        grad_norm=1.0,
        vote=StepVote(),
        micro_losses=torch.zeros(1),
        micro_counts=[4],
        rank_tokens=10,
        arrived=0.0,
        forward_s=0.1,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the clock that the meter reads."""
    found = SimpleNamespace(now=0.0)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: found.now)
    return found


def test_row_of_uneven_steps(clock: SimpleNamespace) -> None:
    counted = ThroughputMeter(ENGINE, an_account(planned_bytes=5))
    for seconds, loss in [(1.0, 2.0), (1.0, 4.0), (4.0, math.nan), (2.0, 3.0)]:
        clock.now += seconds
        counted.add(a_step(loss))
        counted.pause()
        clock.now += 100.0
        counted.resume()
    row = counted.row(4, 0.5, 0.1, counted.pace())
    assert row["loss"] == 3.0
    assert [row[f"{name}tokens_per_s"] for name in ("", "trained_", "rank_")] == [4.0, 2.0, 4.0]
    assert [row[name] for name in ("step_s", "step_median_s", "step_p95_s")] == [2.0, 1.5, 4.0]
    assert row["padding_fraction"] == pytest.approx(0.2)
    # 32 tokens, 80 pairs, 16 trained: (30 x 32 + 3 x 80 + 15 x 16) / 8 s; with padding and again 40 x 40 + 4 x 80 + ...
    assert row["model_flops_per_s"] == 180.0
    assert row["hardware_flops_per_s"] == (40 * 40 + 4 * 80 + 15 * 16) / 8
    assert row["mfu_matmul"] == 0.18
    assert row["hfu_matmul"] == 0.27
    assert 50 << 20 < row["host_memory_peak_bytes"] < 100 << 30
    assert row["planned_memory_bytes"] == 5
    assert not {"mfu", "device_memory_peak_bytes", "communication_fraction"} & set(row)
    # Every key has its line in the table of docs/tracking.md.
    assert not set(row) - set(documented())
    clock.now += 1.0
    counted.add(a_step())
    row = counted.row(5, 0.5, 0.1, counted.pace())
    assert (row["step_s"], row["trained_tokens"], row["total_tokens"]) == (1.0, 20, 40)


def test_a_card_by_its_datasheet() -> None:
    card = find_gpu("NVIDIA H20")
    assert card
    known = an_account(device="NVIDIA H20", card=card)
    assert known.speed(*2 * (baseline.Work(8, 20, 4),), 2.0)["mfu"] == 180 / card.flops("bf16")
    assert "the datasheet of the H20 says 148" in known.describe()
    assert (
        "What the datasheet of 'NVIDIA X1' says of that is not known here" in an_account(device="NVIDIA X1").describe()
    )
    assert an_account(formula=None).speed(*2 * (baseline.Work(8, 20, 4),), 2.0) == {}
    v100 = find_gpu("Tesla V100-SXM2-16GB")
    beyond = an_account(device="V100", card=v100)
    assert "mfu" not in beyond.speed(*2 * (baseline.Work(8, 20, 4),), 2.0)
    assert "What the datasheet of 'V100' says of that is not known here" in beyond.describe()


def test_no_memory_for_a_matrix_product(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, rooms = [], []

    def measured(size: int, device: torch.device, dtype: torch.dtype) -> float:
        tried.append(size)
        if size > rooms[-1]:
            raise torch.OutOfMemoryError
        return 5.0

    monkeypatch.setattr(baseline, "_matmul_flops_per_s", measured)
    monkeypatch.setattr(baseline, "_sizes", lambda device, dtype: (4, 2))
    for room, found in ((4, 5.0), (2, 5.0), (1, 0.0)):
        rooms.append(room)
        assert baseline.median_matmul_flops(torch.device("cpu"), torch.float32) == found
    assert tried == [4, 4, 2, 4, 2]
    unmeasured = an_account(matmul_flops=0.0, device="NVIDIA X1")
    assert set(unmeasured.speed(*2 * (baseline.Work(8, 20, 4),), 2.0)) == {
        "model_flops_per_s",
        "hardware_flops_per_s",
    }
    assert "runs at ? TFLOP/s" in unmeasured.describe()


def test_account_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.train.baseline._CPU_S", 0.0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8
        )
    )
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for parameter in model.parameters():  # as ZeRO-3 leaves them
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    engine: Any = SimpleNamespace(module=model, device=torch.device("cpu"))
    found = measure_baseline(engine, TuningConfig(), recomputes=False)
    assert found.formula == formula(shapes, {"layers": 2, "heads": 4, "head_size": 8})
    assert found.dtype == "fp32"
    assert found.matmul_flops > 1e6
    assert found.card is None
    prefix = measure_baseline(
        engine, TuningConfig(method=TuningMethod.ptuning_v2, num_tokens=7), recomputes=False
    ).formula
    assert prefix
    assert prefix.forward.per_token - found.formula.forward.per_token == 7 * 4 * 2 * 4 * 8
    model.config.num_attention_heads = 0
    assert measure_baseline(engine, TuningConfig(), recomputes=False).formula is None


def test_account_of_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.train.baseline._CPU_S", 0.0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS["glm4_moe_lite"]())
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    engine: Any = SimpleNamespace(module=model, device=torch.device("cpu"))
    heads = {"layers": 2, "heads": 2, "head_size": 16, "value_size": 16}
    expected = formula(shapes, {**heads, "experts": 4, "chosen": 2})
    assert measure_baseline(engine, TuningConfig(), recomputes=False).formula == expected
    assert expected.forward.per_token < formula(shapes, {**heads, "experts": 4, "chosen": 3}).forward.per_token
    monkeypatch.setattr("toolkit.plan.outline.MIXTURES", ())
    assert measure_baseline(engine, TuningConfig(), recomputes=False).formula is None


def test_lines_stay_short(capsys: pytest.CaptureFixture[str]) -> None:
    set_language("en")
    set_display("plain")  # as a training session does
    row = {"step": 20, "loss": 2.0, "lr": 1e-4, "grad_norm": 1.0, "tokens_per_s": 4200.0}
    row["device_memory_peak_bytes"] = 3e9
    progress = Progress(100, shown=True)
    progress.show({**row, "mfu_matmul": 1.31})  # the product was measured beside other work: that says nothing
    progress.show({**row, "mfu_matmul": 0.31, "padding_fraction": 0.04, "data_wait_fraction": 0.01})
    progress.show(
        {
            **row,
            "mfu": 0.41,
            "mfu_matmul": 0.5,
            "padding_fraction": 0.06,
            "data_wait_fraction": 0.1,
            "communication_fraction": 0.2,
            "device_memory_peak_bytes": 12.3 * 2**30,
            "planned_memory_bytes": 14.0 * 2**30,
        }
    )
    row["host_memory_peak_bytes"] = row.pop("device_memory_peak_bytes")
    progress.show({**row, "mfu_matmul": 0.31})
    silent, short, long, on_cpu = (
        line.partition("tokens/s")[2].partition("  ETA")[0] for line in capsys.readouterr().out.splitlines()
    )
    assert silent == "  memory 2.8 GiB"
    assert short == "  31% of matmul  memory 2.8 GiB"
    assert on_cpu == "  process memory 2.8 GiB"
    assert long == "  MFU 41%  waits 10% for data  6% padding  20% communication  memory 12.3 of 14.0 GiB planned"


@pytest.mark.parametrize(("per_s", "size"), [(1e8, 96), (2e9, 192), (1e10, 384), (1e12, 768)])
def test_a_product_that_the_processor_can_do(per_s: float, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow processor is asked for a small one: 768 in bf16 took seconds on one without a unit for it."""
    now = [0.0]

    class Square:
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def __matmul__(self, other: "Square") -> None:
            now[0] += 2 * self.rows**3 / per_s

    monkeypatch.setattr(baseline.torch, "ones", lambda rows, columns, dtype: Square(rows))
    monkeypatch.setattr(baseline.time, "perf_counter", lambda: now[0])
    assert baseline._sizes(torch.device("cpu"), torch.bfloat16) == (size,)
