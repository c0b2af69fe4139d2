"""What pipeline stages cannot be together with is refused by name."""

import pytest

from toolkit.config.load import load
from toolkit.config.rules import check_rules
from toolkit.engine.ds_config import build_ds_config
from toolkit.messages import ConfigError

ANSWERS = "the layers that an answer needs are on several ranks. Ask the model after the run: toolkit generate."
LEARNED = (
    "what it learns stands before the tokens of every stage, and a stage trains its own layers alone. Use tuning=lora."
)
ONE, OFF = "it was not tried. Set it to 1.", "it was not tried. Set it to false."
# Words after `recipe=zero1 model=glm_tiny parallel=pipeline` -> key, value and reason.
REFUSED = {
    "zero=stage2": (
        "zero.stage = 2",
        "DeepSpeed's pipelines know stages 0 and 1 (DeepSpeed issue 1629). Use zero=stage1, or zero=stage3 without "
        "parallel=pipeline.",
    ),
    "zero.offload_optimizer.device=cpu optim.torch=false": (
        "zero.offload_optimizer.device = cpu",
        "it was not tried. Use none, or zero=stage2_offload without parallel=pipeline.",
    ),
    "precision=fp16": (
        "precision.dtype = fp16",
        "an overflow on one stage would have to be known to all. Use precision=bf16 or precision=fp32.",
    ),
    "precision=bf16 zero=stage0": (
        "zero.stage = 0",
        "in bf16 gradients would be added up in bf16. Use zero=stage1, which adds them up in fp32.",
    ),
    "tuning=ptuning_v2": ("tuning.method = ptuning_v2", LEARNED),
    "tuning=prompt": ("tuning.method = prompt", LEARNED),
    "evaluate.metrics=[bleu]": ("evaluate.metrics = [bleu]", ANSWERS),
    "evaluate.prompts=[Hello]": ("evaluate.prompts = [Hello]", ANSWERS),
    "parallel.sequence=2": ("parallel.sequence = 2", ONE),
    "batch.micro_per_gpu=auto": (
        "batch.micro_per_gpu = auto",
        "how much of a model a rank holds depends on its stage. Give a number.",
    ),
    "profile.flops.enabled=true": ("profile.flops.enabled = true", OFF),
    "train.activation_checkpointing.enabled=true train.activation_checkpointing.partition_activations=true": (
        "train.activation_checkpointing.partition_activations = true",
        OFF,
    ),
}
WORDS = ["recipe=zero1", "model=glm_tiny", "parallel=pipeline", "evaluate.prompts=[]"]


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words: str) -> None:
    loaded = load([*WORDS, *words.split()])
    what, reason = REFUSED[words]
    with pytest.raises(ConfigError) as caught:
        check_rules(loaded, 4, files=False)
    place = loaded.position(what.split(" = ")[0])
    first, *_ = caught.value.parts or [caught.value]
    assert str(first) == f"{place}{what} cannot be together with parallel.pipeline = 2: {reason}"


def test_ranks_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 ranks cannot be divided into groups of 2 .*parallel\.pipeline 2"):
        check_rules(load(WORDS), 3, files=False)


def test_pipelines_share_the_global_batch() -> None:
    """Four ranks in two stages are two pipelines: each takes half of the rows."""
    loaded = load([*WORDS, "batch.global_size=8", "batch.micro_per_gpu=1"])
    check_rules(loaded, 4, files=False)
    assert build_ds_config(loaded.cfg, 4, 10).values["gradient_accumulation_steps"] == 4
