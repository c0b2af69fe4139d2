"""Under ZeRO-3 no rank ever holds the whole model: measured on 400 MB, in transformers' layout and in official ones."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from official import write
from ranks import REPOSITORY, forked, run

WORKER = str(REPOSITORY / "tests" / "ranks" / "load_memory_worker.py")
SIZES = {"hidden_size": 768, "num_layers": 13, "num_attention_heads": 12, "torch_dtype": "float32", "shards": 3}


def transformers_layout(path: Path) -> None:
    """A GLM in several files."""
    config = transformers.GlmConfig(
        vocab_size=8000,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=13,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=True,
        pad_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    transformers.GlmForCausalLM(config).save_pretrained(path, max_shard_size="150MB")


def official_pickles(path: Path) -> None:
    """ChatGLM2's layout in .bin files."""
    write(path, "v2", pickled=True, ffn_hidden_size=2304, kv_channels=64, padded_vocab_size=8000, **SIZES)


def first_chatglm(path: Path) -> None:
    """ChatGLM-6B's layout in .bin files."""
    write(path, "v1", pickled=True, inner_hidden_size=3072, vocab_size=8000, **SIZES)


@pytest.mark.parametrize("make", [transformers_layout, official_pickles, first_chatglm])
def test_each_rank_grows_by_half_the_model_at_most(make: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make(folder)
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    model_mb = sum(file.stat().st_size for file in files) / 1e6
    assert model_mb > 390
    largest_mb = 8000 * 768 * 4 / 1e6
    finished = run(forked(2, WORKER, str(folder)), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    # The ranks' lines may run into each other.
    reports = [json.loads(found) for found in re.findall(r"MEMORY (\{.*?\})", finished.output)]
    assert sorted(report["rank"] for report in reports) == [0, 1]
    print(f"model {model_mb:.0f} MB", reports)
    for report in reports:
        assert report["partitioned"] * 4 / 1e6 == pytest.approx(model_mb / 2, rel=0.01)
        assert report["bytes"] == report["partitioned"] * 4, "fp32 that is not fp32"
        assert report["grown"] <= model_mb / 2 + largest_mb + 200, report
        assert report["peak"] <= model_mb / 2 + largest_mb + 200, report


REST = (2 * 1000 * 128 + 32 * (4 * 128 * 128 + 16 * 128 + 2 * 128 + 2 * 64) + 128) / 1e6
"""Millions of parameters of what in a `mixture` are no experts."""


def mixture(path: Path) -> float:
    """A mixture of 103 million parameters, nearly all of them experts, one by one in the files; returns how many
    millions the experts have.
    """
    config = transformers.Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=128,
        moe_intermediate_size=512,
        num_hidden_layers=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
    )
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(path, max_shard_size="150MB")
    return 32 * 16 * 3 * 128 * 512 / 1e6


def test_each_rank_reads_its_experts_alone(tmp_path: Path) -> None:
    """Of 412 MB a rank never has more than half in memory."""
    of_experts = mixture(tmp_path / "model")
    finished = run(forked(2, WORKER, str(tmp_path / "model"), "experts"), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    reports = [json.loads(found) for found in re.findall(r"MEMORY (\{.*?\})", finished.output)]
    print(reports)
    for report in reports:
        assert report["bytes"] / 1e6 == pytest.approx(4 * (of_experts / 2 + REST), abs=0.1)
        assert report["peak"] <= report["bytes"] / 1e6 + 60, report


def test_weights_are_quantized_as_they_are_read(tmp_path: Path) -> None:
    """QLoRA of a model that has 205 MB in 16 bits needs the 55 MB of its 4 bits, and what one matrix of experts takes
    while bitsandbytes (0.50) computes on a CPU: several times its size in fp32.
    """
    pytest.importorskip("bitsandbytes")
    of_experts = mixture(tmp_path / "model")
    finished = run(forked(1, WORKER, str(tmp_path / "model"), "4-bits"), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    [report] = [json.loads(found) for found in re.findall(r"MEMORY (\{.*?\})", finished.output)]
    print(report)
    assert of_experts / 2 < report["bytes"] / 1e6 < of_experts / 2 + 2 * REST
    assert report["peak"] <= report["bytes"] / 1e6 + 6 * 4 * of_experts * 2 / 3 / 32 + 20, report
