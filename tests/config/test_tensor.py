"""Split layers: what is refused and why, what DeepSpeed is told, and what the plan makes of it."""

import json
import re
from pathlib import Path

import deepspeed.comm
import pytest
import torch
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType
from deepspeed.runtime.config import DeepSpeedConfig

from toolkit.config.load import LoadedConfig, load
from toolkit.config.mesh import accumulation
from toolkit.config.rules import check_rules
from toolkit.config.schema import Init, RunConfig, TuningConfig, TuningMethod
from toolkit.config.tensor_split import (
    FAMILIES,
    Split,
    check_split,
    part_shape,
    partition_config,
    split_of,
)
from toolkit.distributed.process_group import join_parts
from toolkit.engine.ds_config import build_ds_config
from toolkit.engine.ds_import import import_json
from toolkit.extras.cli.export_config import explain
from toolkit.messages import ConfigError
from toolkit.plan.division import tensor_parallel_bytes, tensor_part
from toolkit.plan.memory import plan_rank
from toolkit.plan.model_config import shapes_of_config
from toolkit.plan.outline import with_tuning

WORDS = "recipe=zero1 model=glm_tiny parallel=tensor"
REFUSED = {
    "optim=adafactor zero=stage0": "optim.name = adafactor keeps a row and a column for each whole matrix,",
    "train.activation_checkpointing.enabled=true train.activation_checkpointing.partition_activations=true": (
        "parallel.tensor = 2 cannot be: train.activation_checkpointing.partition_activations = true has no effect"
    ),
    "zero=stage2_offload zero.zenflow.enabled=true": "zero.zenflow.enabled = true is not supported with it.",
    "parallel.tensor=3": "parallel.tensor = 3 does not divide the model's 4 attention heads. Use a number that does.",
    "parallel.tensor=4": "parallel.tensor = 4 does not divide the model's 2 heads of keys and values.",
    "model.shape.intermediate_size=33": "parallel.tensor = 2 does not divide the model's 33 numbers in the middle",
}
GLM = {
    "model_type": "glm",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together(words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(REFUSED[words])):
        check_rules(load([*WORDS.split(), *words.split()]), files=False)


def test_models_that_nobody_has_compared_are_refused() -> None:
    given = {"heads": 4, "key_heads": 4, "inner": 8}
    for kind in FAMILIES:
        check_split({**given, "model_type": kind}, 2)
    with pytest.raises(ConfigError, match="how the layers of 'mixtral' are split is not known here"):
        check_split({**given, "model_type": "mixtral"}, 2)


def test_the_batch_is_divided_by_the_groups() -> None:
    loaded = load([*WORDS.split(), "batch.global_size=12", "batch.micro_per_gpu=1"])
    assert accumulation(loaded.cfg, 8) == 3
    with pytest.raises(ConfigError, match="7 ranks cannot be divided into groups of 2"):
        check_rules(loaded, 7, files=False)


def test_deepspeed_reads_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load([*WORDS.split(), "batch.global_size=12"]).cfg
    ds = build_ds_config(cfg, 8)
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    monkeypatch.setattr(deepspeed.comm, "get_world_size", lambda: 4)  # as with the groups at hand
    read = DeepSpeedConfig(json.loads(json.dumps(ds.values))).tensor_parallel_config
    assert read.autotp_size == 2
    specs = AutoTPConfig.from_dict(read.partition_config)
    expected = {Split.rows: PartitionType.COLUMN, Split.pairs: PartitionType.COLUMN, Split.columns: PartitionType.ROW}
    names = shapes_of_config(GLM)[0]
    for name in [one for one in names if one.endswith(".weight")]:
        spec, split = specs.find_matching_spec(name), split_of(name)
        assert (spec and spec.partition_type) == (split and expected[split]), name
        assert bool(spec and spec.shape) == (split is Split.pairs)
    assert "parallel.tensor" in explain(ds, LoadedConfig(cfg=cfg))
    assert "tensor_parallel" not in build_ds_config(RunConfig(), 8).values


def test_a_json_of_deepspeed_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    loaded = load([*WORDS.split(), "batch.global_size=12"])
    file.write_text(json.dumps(build_ds_config(loaded.cfg, 8).values))
    plain = load([*WORDS.split()[:2], "batch.global_size=12"])
    back, _ = import_json(str(file), plain, 8)
    assert back.cfg.parallel.tensor == 2
    file.write_text(json.dumps({"tensor_parallel": {"autotp_size": 0}}))
    assert import_json(str(file), plain, None)[0].cfg.parallel.tensor == 1
    file.write_text(json.dumps({"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": []}}}))
    with pytest.raises(ConfigError, match="how parameters are split is fixed here, by their names"):
        import_json(str(file), plain, None)


@pytest.mark.parametrize("kind", FAMILIES)
def test_parts_join_to_the_whole(kind: str) -> None:
    """Cut as each rank has it, by DeepSpeed's words for it, and joined again."""
    v1 = {"hidden_size": 32, "inner_hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    known = shapes_of_config(v1 if kind == "chatglm" else {**GLM, "model_type": kind})
    assert known is not None
    num_split = 0
    for name, shape in known[0].items():
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        split = split_of(name)
        place = 1 if split is Split.columns else 0
        pieces = [whole[: len(whole) // 2], whole[len(whole) // 2 :]] if split is Split.pairs else [whole]
        parts = [torch.cat([piece.chunk(2, place)[rank] for piece in pieces]) for rank in range(2)]
        parts = parts if split else [whole, whole]
        assert torch.equal(join_parts(name, parts), whole), name
        assert tuple(parts[0].shape) == part_shape(name, shape, 2)
        assert part_shape(name, tuple(parts[0].shape), 2, back=True) == shape
        num_split += split is not None
    assert num_split >= 8 * 2 - 4


def test_the_plan_knows_the_parts() -> None:
    known = shapes_of_config(GLM)
    assert known is not None
    outline = with_tuning(*known, TuningConfig())
    part = tensor_part(outline, 2)
    assert part.vocabulary == outline.vocabulary
    assert part.sizes["heads"] == 2 and part.sizes["keys"] == outline.sizes["keys"] // 2
    whole, split = (load([*WORDS.split(), f"parallel.tensor={size}"]).cfg for size in (1, 2))
    before, after = plan_rank(outline, whole, 8).device["step"], plan_rank(outline, split, 8).device["step"]
    assert after["weights"] == before["weights"] * part.num_parameters // outline.num_parameters
    assert after["optimizer"] == 12 * -(-part.num_parameters // 4)
    assert after["mlp"] < before["mlp"] and after["attention"] < before["attention"]
    # Each of the six matrices of a layer (q, k, v, o, gate and up in one, down) is one all-reduce.
    assert tensor_parallel_bytes(outline, 2, 1000, recomputes=False) == (12 * 1000, 12)
    # The outputs of o and down are added up once more where a layer is computed again.
    assert tensor_parallel_bytes(outline, 2, 1000, recomputes=True) == (16 * 1000, 16)
    assert tensor_parallel_bytes(outline, 1, 1000, recomputes=True) == (0, 0)
    # Between LoRA's factors, of rank 4, an eighth of the 32 hidden states' width.
    lora = with_tuning(*known, TuningConfig(method=TuningMethod.lora, target_modules=["all-linear"], rank=4))
    assert tensor_parallel_bytes(lora, 2, 1000, recomputes=False) == (12 * 1000 + 12 * 125, 24)
    sizes = tensor_part(lora, 2)
    assert sizes.shapes["model.layers.0.self_attn.o_proj.lora_A.default.weight"] == (4, 16)
    assert sizes.shapes["model.layers.0.self_attn.q_proj.lora_A.default.weight"] == (4, 32)
    with pytest.raises(ConfigError, match="does not divide"):
        tensor_part(outline, 4)
    assert whole.model.init is Init.random and len(partition_config()["layer_specs"]) == 4
