"""Under ZeRO-3 no rank ever holds the whole model: measured on a 400 MB one."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from ranks import REPOSITORY, deepspeed, run

WORKER = str(REPOSITORY / "tests" / "distributed" / "load_memory_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM of 400 MB in fp32, in several files."""
    path = tmp_path_factory.mktemp("model")
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
    return path


def test_each_rank_grows_by_half_the_model_at_most(folder: Path, tmp_path: Path) -> None:
    model_mb = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
    assert model_mb > 390
    largest_mb = 8000 * 768 * 4 / 1e6
    finished = run(deepspeed(2, WORKER, str(folder)), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    # The ranks' lines may run into each other.
    reports = [json.loads(found) for found in re.findall(r"MEMORY (\{.*?\})", finished.output)]
    assert sorted(report["rank"] for report in reports) == [0, 1]
    print(f"model {model_mb:.0f} MB", reports)
    for report in reports:
        assert report["partitioned"] * 4 / 1e6 == pytest.approx(model_mb / 2, rel=0.01)
        assert report["grown"] <= model_mb / 2 + largest_mb + 200, report
        assert report["peak"] <= model_mb / 2 + largest_mb + 200, report
