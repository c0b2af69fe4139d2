"""QLoRA's frozen weights in 4 bits (NF4, double quantisation), through bitsandbytes.

Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from toolkit.models.tuning.layers import decoder_layers


def quantize(model: PreTrainedModel) -> None:
    """Put the linear layers of a model's decoder on the GPU in 4 bits, one after another; embedding and head stay.

    Args:
        model: whole, on the CPU; `config.checks_tuning` has seen to it that bitsandbytes and a GPU are there.
    """
    import bitsandbytes

    device = torch.device("cuda", torch.cuda.current_device())
    for layer in decoder_layers(model):
        for name, linear in list(layer.named_modules()):
            if not isinstance(linear, nn.Linear):
                continue
            small = bitsandbytes.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                compute_dtype=model.dtype,
                compress_statistics=True,
                quant_type="nf4",
            )
            small.load_state_dict(linear.state_dict())
            owner, _, leaf = name.rpartition(".")
            setattr(layer.get_submodule(owner), leaf, small.to(device))
    model.is_loaded_in_4bit = True  # asked for by peft 0.21
