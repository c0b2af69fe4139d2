"""Loading under ZeRO-3 is exact, recomputation really happens, wrong weights are refused: asserted on real ranks."""

from pathlib import Path

import torch
import transformers
from ranks import REPOSITORY, forked, run

WORKER = str(REPOSITORY / "tests" / "ranks" / "engine_worker.py")


def test_engine_on_two_ranks(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.GlmConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attention_bias=True,
        pad_token_id=None,
        eos_token_id=1,
    )
    transformers.GlmForCausalLM(config).save_pretrained(tmp_path / "model")
    finished = run(forked(2, WORKER, str(tmp_path / "model")), cwd=tmp_path)
    assert finished.code == 0, finished.output[-5000:]
    assert finished.output.count("ALL CHECKED") == 2
