"""Tiny random models of every type that transformers calls causal, one of each kind of layer, weights that matter."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every `model_type` in the causal mapping of the installed transformers."""
END, LARGEST = 4, 50_000_000
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("model_types.yaml").read_text(encoding="utf-8"))
    table["sizes"] = {key: size for size, keys in table["sizes"].items() for key in keys}
    return table


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """Return what replaces the values of a config: small sizes, nothing random, each kind of layer at least once."""
    sizes, changed = _table()["sizes"], {}
    for key, value in values.items():
        if key in sizes and isinstance(value, int) and not isinstance(value, bool):
            changed[key] = sizes[key]
        elif re.search(r"drop|jitter", key) and isinstance(value, float):
            changed[key] = 0.0
    lists = {key: list(dict.fromkeys(values[key])) for key in _LAYER_LISTS if isinstance(values.get(key), list)}
    if lists := {key: kinds for key, kinds in lists.items() if kinds}:
        number = max(2, *map(len, lists.values()))
        for key, kinds in lists.items():  # the first feed-forward layers are dense, attention alternates
            is_prefix = key == "mlp_layer_types"
            changed[key] = [kinds[min(i, len(kinds) - 1) if is_prefix else i % len(kinds)] for i in range(number)]
        changed |= {key: number for key in ("num_hidden_layers", "n_layer", "num_layers") if key in changed}
    return changed


def config_of(kind: str) -> Any:
    """Return the config of a tiny model of a type."""
    make, table = CONFIG_MAPPING[kind], _table()
    try:
        values = make().to_dict()
    except Exception:  # a config without defaults
        values = {}
    changed = _shrunk(values) | {"eos_token_id": END, "pad_token_id": 0, "bos_token_id": 1}
    for key, value in values.items():
        if key.endswith("_config") and isinstance(value, dict) and value.get("model_type"):
            changed[key] = _shrunk(value)
    for kinds, more in table["changes"]:
        changed |= more if kind in kinds else {}
    return make(**{key: value for key, value in changed.items() if key not in table["computed"].get(kind, ())})


def built(kind: str) -> Any:
    """Return a random model of a type, with weights so large that each part changes the logits."""
    config = config_of(kind)
    with torch.device("meta"):
        size = sum(tensor.numel() for tensor in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters: tests/model_types.yaml does not make it small")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    draw, done = torch.Generator().manual_seed(7), set()
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear | torch.nn.Embedding | transformers.pytorch_utils.Conv1D):
            for parameter in part.parameters(recurse=False):
                if parameter not in done:
                    done.add(parameter)
                    is_matrix = parameter.ndim >= 2
                    if is_matrix or "dt_proj" not in name:
                        parameter.data.normal_(0, 0.1 if is_matrix else 0.05, generator=draw)
    for name, parameter in model.named_parameters():
        if parameter in done:
            continue
        if (parameter.ndim == 3 and "expert" in name) or (parameter.ndim == 2 and re.search("bias|router|gate", name)):
            parameter.data.normal_(0, 0.1, generator=draw)
        elif parameter.ndim == 1 and re.search("norm|ln_", name.lower()):
            parameter.data.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
    return model.eval()
