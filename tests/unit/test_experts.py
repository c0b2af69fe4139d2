"""Experts divided over ranks: what each reads of a directory, and what cannot be divided. Training: tests/ranks."""

from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from tests.architectures import CONFIGS, write
from toolkit.messages import ModelError
from toolkit.models import experts, load_model


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_each_rank_reads_its_experts_and_the_rest(name: str, tmp_path: Path) -> None:
    """Whether a directory has experts one by one or all of a layer in one tensor; what is float32 stays so."""
    folder = write(tmp_path / name, name)
    whole = dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())
    for rank in range(2):
        keep = partial(experts.keep, rank=rank, ranks=2, group="group")
        model = load_model(folder, dtype=torch.bfloat16, own=keep)
        divided = 0
        for key, value in model.state_dict().items():
            assert not value.is_meta, key
            size, expected = value.size(0), whole[key]
            if ".experts." in key:
                divided += 1
                assert size == whole[key].size(0) // 2
                assert model.get_parameter(key).allreduce is False
                expected = expected[rank * size : (rank + 1) * size]
            is_bias = key.endswith("e_score_correction_bias")
            assert value.dtype is (torch.float32 if is_bias else torch.bfloat16), key
            assert value.equal(expected.to(value.dtype)), key
        assert divided


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("llama", 2, "parallel.expert = 2 is incompatible with LlamaForCausalLM: it has no routed experts"),
        ("glm4_moe", 3, "parallel.expert = 3 is incompatible with Glm4MoeForCausalLM: its 4 experts cannot be divided"),
    ],
)
def test_what_cannot_be_divided(name: str, ranks: int, message: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with pytest.raises(ModelError, match=message):
        experts.check_divides(model, ranks)
