"""What a machine without a GPU skips here, by name: a test that nobody meant to skip is not skipped unseen."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from device import DEVICE, lacks

SKIPPED = {
    "test_a_collective_that_hangs_is_noticed": "gpus",
    "test_a_slow_gpu_is_named": "gpus",
    "test_it_rounds_as_the_cpu_does[fp32-nvme]": "libaio",
    "test_it_rounds_as_the_cpu_does[tf32-stage1]": "cuda",
    "test_liger_is_near_the_models_own_layers": "liger_kernel",
    "test_no_input_of_a_frozen_layer_stays_in_host_memory": "cuda",
    "test_offloaded_states_are_page_locked": "cuda",
    "test_packed_half_precision_takes_the_kernel_of_variable_lengths": "cuda",
    "test_products_in_fp8[rowwise]": "fp8-rows",
    "test_products_in_fp8[rowwise_with_gw_hp]": "fp8-rows",
    "test_qlora_learns": "bitsandbytes",
    "test_the_host_waits_at_most_five_times_per_step": "cuda",
    "test_the_stopwatch_measures_the_gpu_and_not_the_host": "cuda",
    "test_two_gpus_follow_one": "gpus",
    "test_vllm_gives_the_tokens_of_training": "vllm",
}


def skipped() -> Iterator[tuple[str, str]]:
    """Yield the names and reasons of the tests and cells of this folder that are skipped here."""
    for module in map(importlib.import_module, ("test_gpu_commands", "test_gpu_kernels", "test_gpu_runs")):
        for name, function in vars(module).items():
            for mark in getattr(function, "pytestmark", []) if name.startswith("test_") else []:
                cells: list[Any] = mark.args[1] if mark.name == "parametrize" else []
                marked = [(f"{name}[{cell.values[0]}]", one) for cell in cells for one in getattr(cell, "marks", ())]
                for called, one in [(name, mark), *marked]:
                    if one.name == "skipif" and one.args[0]:
                        yield called, one.kwargs["reason"]


@pytest.mark.default
@pytest.mark.skipif(DEVICE == "cuda", reason="it says what a machine without a GPU skips")
def test_none_is_skipped_unseen() -> None:
    assert dict(skipped()) == {name: lacks(need) for name, need in SKIPPED.items() if lacks(need)}
