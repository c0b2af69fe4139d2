"""The plan divides a model as DeepSpeed does, and tells what each stage holds."""

import math
import random

import pytest
import torch
import transformers
from deepspeed.runtime.utils import partition_balanced

from toolkit.config.load import load
from toolkit.layouts.pipeline import stage_parameters
from toolkit.messages import ModelError
from toolkit.plan.division import balance_stages, stage_outlines
from toolkit.plan.memory import plan_rank
from toolkit.plan.model_config import published_models, shapes_of_config
from toolkit.plan.outline import Outline, with_tuning

WORDS = [
    "recipe=zero1",
    "model=glm_tiny",
    "precision=bf16",
    "zero=stage1",
    "batch.global_size=64",
    "data.max_length=512",
]


def published(name: str, *words: str) -> Outline:
    """Return the outline of a published model."""
    known = shapes_of_config(published_models()[name])
    assert known is not None
    return with_tuning(*known, load([*WORDS, *words]).cfg.tuning)


def test_parts_are_those_of_deepspeed() -> None:
    draw = random.Random(3)
    for _ in range(200):
        sizes = [draw.choice([0, 1, 5, 5, 5, draw.randint(1, 60)]) for _ in range(draw.randint(3, 12))]
        stages = draw.randint(2, len(sizes) - 1)
        assert balance_stages(sizes, stages) == [int(bound) for bound in partition_balanced(sizes, stages)], (
            sizes,
            stages,
        )


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_has_the_parameters_that_it_will_hold(tied: bool) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": tied,
    }
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config))
    known = shapes_of_config(config)
    assert known is not None
    parts = stage_outlines(with_tuning(*known, load(WORDS).cfg.tuning), 3)
    for stage, part in enumerate(parts):
        names = stage_parameters(model, 3, stage)
        held = sum(one.numel() for name, one in model.named_parameters() if name in names)
        assert part.num_parameters == held
        assert part.sizes["layers"] == len({name.split(".")[2] for name in names if ".layers." in name})
        assert {name for name in part.shapes if ".layers." in name} <= {
            name for name in known[0] if ".layers." in name and int(name.split(".")[2]) < part.sizes["layers"]
        }


@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_what_lora_adds_to_their_layers(tied: bool) -> None:
    """Divided as without an adapter, as weights are read before one is added. A frozen tied head is not trained."""
    config = published_models()["glm-4-9b-chat" if not tied else "Qwen3-1.7B"]
    known = shapes_of_config(config)
    assert known is not None
    words = ["tuning=lora", "tuning.target_modules=[all-linear]", "tuning.rank=4"]
    outline = with_tuning(*known, load([*WORDS, *words]).cfg.tuning)
    parts, plain = (
        stage_outlines(one, 4) for one in (outline, with_tuning(*known, load([*WORDS, "tuning=full"]).cfg.tuning))
    )
    assert sum(part.num_trained for part in parts) == outline.num_trained
    for part, other in zip(parts, plain, strict=True):
        added = {name for name in part.trained if ".lora_" in name}
        assert part.num_parameters == other.num_parameters + sum(math.prod(part.shapes[name]) for name in added)
        assert len(part.targets) == len(added) / 2 == part.sizes["layers"] * len(outline.targets) / known[1]["layers"]
        assert not part.trains_head
        assert {f"{name}.weight" for name in part.targets} < set(other.shapes)
    assert any("hidden_states" in part.trained for part in parts[1:])


def test_a_stage_that_would_train_nothing_has_no_plan() -> None:
    outline = published("glm-4-9b-chat", "tuning=freeze", "tuning.last_layers=2")
    with pytest.raises(ModelError, match=r"pipeline = 2: stage 1, from model\.embed_tokens.* nothing to train"):
        stage_outlines(outline, 2)


@pytest.mark.parametrize("name", ["glm-4-9b-chat", "ChatGLM-6B"])
def test_memory_of_stages(name: str) -> None:
    """Two stages of two pipelines: half the weights, and the states of a half divided by two."""
    outline = published(name)
    whole = plan_rank(outline, load(WORDS).cfg, 4)
    cfg = load([*WORDS, "parallel=pipeline"]).cfg
    staged = plan_rank(outline, cfg, 4)
    assert len(staged.stages) == 2
    assert staged.peak(staged.worst) == max(staged.stages)
    assert min(staged.stages) > 0.7 * max(staged.stages)
    parts = stage_outlines(outline, 2)
    assert sum(part.num_parameters for part in parts) == sum(map(math.prod, outline.shapes.values()))
    weights = {2 * part.num_parameters for part in parts}
    assert staged.device["step"]["weights"] in weights
    assert staged.device["step"]["weights"] == pytest.approx(whole.device["step"]["weights"] / 2, rel=0.15)
    assert staged.device["step"]["optimizer"] == pytest.approx(12 / 2 * staged.device["step"]["weights"] / 2, rel=1e-6)


def test_the_first_stage_keeps_the_activations_of_several_micro_batches() -> None:
    outline = published("glm-4-9b-chat")
    words = [*WORDS, "parallel.pipeline=4", "batch.micro_per_gpu=1", "data.max_length=8192"]
    full, single = (plan_rank(outline, load([*words, f"batch.global_size={size}"]).cfg, 4) for size in (64, 1))
    assert full.stages[0] > 1.5 * single.stages[0]
    assert full.stages[1] > full.stages[2] > full.stages[3]  # the first has the embedding, and fewer layers
