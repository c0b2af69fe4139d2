"""Run on every rank: DeepSpeed's inference engine over two ranks answers as one process does.

Arguments: those of `toolkit generate` for a file, which is asked in the end.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

from toolkit.cli import main
from toolkit.config.schema import DistributedConfig
from toolkit.distributed import process_group
from toolkit.evaluate.inference_engine import FAMILIES, split_inference
from toolkit.launch.environment import strip_launcher_arguments
from toolkit.messages import ModelError
from toolkit.models.record import record_of

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def model(family: str, **changes: object) -> transformers.PreTrainedModel:
    """Return a random model of a family, the same on every rank."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **{**SHAPE, **changes})
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.eval()


def check_family(family: str) -> None:
    """The same tokens, nearly the same logits, and really only a part of the weights."""
    whole, ids = model(family), torch.arange(2, 22)[None]
    weights = sum(value.numel() for value in whole.parameters())
    with torch.no_grad():
        logits = whole(input_ids=ids).logits
        tokens = whole.generate(ids, max_new_tokens=12, do_sample=False)
        part = split_inference(whole)
        assert float((part(input_ids=ids).logits - logits).abs().max()) < 1e-4, family
        assert torch.equal(part.generate(ids, max_new_tokens=12, do_sample=False), tokens), family
    # DeepSpeed keeps its part of each layer beside it.
    layers = part.get_submodule("model.layers")
    assert sum(value.numel() for value in layers.parameters()) < 0.75 * weights, family


def check_precision() -> None:
    """Rotary frequencies stay in float32."""
    half = model("glm").to(torch.bfloat16)
    half.model.rotary_emb.inv_freq = model("glm").model.rotary_emb.inv_freq
    wanted = half.model.rotary_emb.inv_freq.clone()
    part = split_inference(half)
    assert part.dtype is torch.bfloat16
    assert part.model.rotary_emb.inv_freq.dtype is torch.float32
    assert torch.equal(part.model.rotary_emb.inv_freq, wanted)


def check_refusals() -> None:
    """What would fail later, or answer wrongly."""
    with pytest.raises(ModelError, match="GPT2LMHeadModel"):
        split_inference(model("gpt2"))
    with pytest.raises(ModelError, match="1 heads of keys and values cannot be split over 2 ranks"):
        split_inference(model("glm", num_key_value_heads=1))
    adapted = model("glm")
    record_of(adapted).tuned = SimpleNamespace(settings={"peft_type": "LORA"})
    with pytest.raises(ModelError, match="Merge the adapter first"):
        split_inference(adapted)


process_group.start(DistributedConfig())
for name in FAMILIES:
    check_family(name)
check_precision()
check_refusals()
assert main(["generate", *strip_launcher_arguments(sys.argv[1:]), "engine=deepspeed"]) == 0
print("ALL CHECKED", flush=True)
