"""Run on four ranks, two of which share each model: every family and precision trains as one process would.
One argument: `few` or `others`, cells that are trained.

The other side is a plain loop over the whole batch, without DeepSpeed, that each rank runs for itself.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from peft import LoraConfig

from toolkit.config.mesh import mesh_of
from toolkit.config.schema import (
    ActivationCheckpointingConfig,
    Device,
    DistributedConfig,
    Dtype,
    RunConfig,
    TrainConfig,
)
from toolkit.distributed import process_group
from toolkit.distributed.process_group import is_tensor_part
from toolkit.engine.build import initialize_engine
from toolkit.engine.ds_config import build_ds_config
from toolkit.engine.parameters import count_parameters, gathered_parameters
from toolkit.models import probe
from toolkit.models.chatglm.modeling import ChatGLMConfig, ChatGLMForConditionalGeneration
from toolkit.models.load import TORCH_DTYPES
from toolkit.models.lora import inject_lora
from toolkit.tasks.language import LanguageTask
from toolkit.train.step import StepGuard, train_step

STEPS, ROWS, LENGTH, LR, CLIP = 3, 4, 10, 0.01, 1.0
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
V1 = {
    "hidden_size": 32,
    "inner_hidden_size": 48,
    "num_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "bos_token_id": 44,
    "eos_token_id": 45,
}
KINDS: dict[str, Any] = {
    "chatglm": lambda: ChatGLMForConditionalGeneration(ChatGLMConfig(**V1)),
    "glm": lambda: transformers.GlmForCausalLM(transformers.GlmConfig(**SIZES, attention_bias=True)),
    "glm4": lambda: transformers.Glm4ForCausalLM(transformers.Glm4Config(**SIZES, attention_bias=True)),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)  # biases that are added after the sum
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
}


def few() -> Iterator[tuple[str, int, Dtype, bool, bool]]:
    """Yield family, ZeRO stage, precision, whether the optimizer is on the CPU, and whether LoRA alone is trained: each
    family, stage and precision once.
    """
    yield from ((kind, 1, Dtype.fp32, False, False) for kind in ("chatglm", "llama"))
    yield from (("glm4", 0, Dtype.fp32, False, False), ("glm", 2, Dtype.fp32, False, False))
    yield from (("mistral", 2, Dtype.fp32, True, False), ("qwen2", 3, Dtype.fp32, True, False))
    yield "qwen3", 3, Dtype.fp32, False, False
    yield "glm", 3, Dtype.bf16, False, False
    yield from (("chatglm", 1, Dtype.fp32, False, True), ("glm", 3, Dtype.fp32, False, True))
    yield "llama", 2, Dtype.bf16, False, True


def others() -> Iterator[tuple[str, int, Dtype, bool, bool]]:
    """Yield what else there is."""
    yield from ((kind, 1, Dtype.fp32, False, False) for kind in ("glm", "glm4", "mistral", "qwen2", "qwen3"))
    yield from (("glm", stage, Dtype.bf16, False, False) for stage in (0, 1, 2))
    yield from (("glm", stage, Dtype.fp32, False, False) for stage in (0, 3))
    yield "glm", 2, Dtype.fp32, True, False
    yield from ((kind, 1, Dtype.fp32, False, True) for kind in ("glm", "qwen3"))
    yield from (("glm", stage, Dtype.fp32, False, True) for stage in (0, 2))


def built(kind: str, with_lora: bool) -> transformers.PreTrainedModel:
    """Return a model that is the same on every rank, biases and norms included."""
    torch.manual_seed(5)
    model = KINDS[kind]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in name:
                parameter.mul_(4)  # so that layers matter
    if with_lora:
        targets = [
            name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and "head" not in name
        ]
        inject_lora(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets), None)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # 0 at the beginning, behind which nothing of A is seen
                torch.nn.init.normal_(parameter, std=0.1)
    return model


def batch_of(kind: str, step: int, rows: range) -> dict[str, torch.Tensor]:
    """Return some rows of a step's global batch."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(5, 40, (ROWS, LENGTH), generator=draw)
    if kind == "chatglm":
        ids[:, 3], ids[:, 4] = 41, V1["bos_token_id"]
    labels = ids.clone()
    labels[:, :5] = -100
    labels[0, :8] = -100  # rows, and so ranks, differ in trained tokens
    every = torch.arange(LENGTH).expand(ROWS, LENGTH)
    whole = {"input_ids": ids, "labels": labels, "position_ids": every, "segment_ids": torch.ones_like(ids)}
    return {name: tensor[rows.start : rows.stop] for name, tensor in whole.items()}


def alone(kind: str, with_lora: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return losses, gradient norms and the weights at the end of a plain loop in float32."""
    model = built(kind, with_lora).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        batch = batch_of(kind, step, range(ROWS))
        given = {} if kind == "chatglm" else {"position_ids": batch["position_ids"]}
        logits = model(input_ids=batch["input_ids"], use_cache=False, **given).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def config_of(stage: int, dtype: Dtype, offloads: bool) -> RunConfig:
    """Return the run of one case."""
    cfg = RunConfig()
    cfg.parallel.tensor = 2
    cfg.batch.global_size, cfg.batch.micro_per_gpu = ROWS, 1
    cfg.zero.stage, cfg.precision.dtype, cfg.train.gradient_clipping = stage, dtype, CLIP
    cfg.zero.overlap_comm = False
    cfg.zero.offload_optimizer.device = Device.cpu if offloads else Device.none
    cfg.optim.lr, cfg.optim.betas, cfg.optim.weight_decay, cfg.optim.torch = LR, [0.9, 0.95], 0.1, not offloads
    return cfg


def check(kind: str, stage: int, dtype: Dtype, offloads: bool, with_lora: bool) -> None:
    """Train one case and compare."""
    losses, norms, weights = alone(kind, with_lora)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    cfg = config_of(stage, dtype, offloads)
    place = mesh_of(cfg, world, rank)
    model = built(kind, with_lora)
    for parameter in model.parameters():  # not the rotary frequencies, which stay float32
        parameter.data = parameter.data.to(TORCH_DTYPES[dtype])
    sizes = {group: one.total for group, one in count_parameters(model).items()}
    ids = batch_of(kind, 0, range(2))["input_ids"][:, :5]
    expected = probe.capture(model.eval(), ids).logits
    engine = initialize_engine(
        model.train(),
        build_ds_config(cfg, world, STEPS).values,
        ActivationCheckpointingConfig(),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    )
    loose = 0.03 if dtype is Dtype.bf16 else 1e-5
    assert {group: one.total for group, one in count_parameters(engine.module).items()} == sizes
    torch.testing.assert_close(probe.capture(engine.module, ids).logits, expected, atol=loose * 10, rtol=loose)
    guard = StepGuard(engine, TrainConfig())
    seen = []
    for step in range(STEPS):
        mine = range(2 * place.data_rank, 2 * place.data_rank + 2)
        window = [batch_of(kind, step, range(row, row + 1)) for row in mine]
        result = train_step(engine, LanguageTask(), window, place, guard)
        assert result.counts.total_tokens == ROWS * LENGTH
        found, wanted = torch.tensor([result.loss, result.grad_norm]), torch.tensor([losses[step], norms[step]])
        seen.append((found, wanted))
        assert not guard.check()
    for found, wanted in seen:  # only now: a rank that raises would leave the others waiting for it
        torch.testing.assert_close(found, wanted, atol=0, rtol=0.1 if dtype is Dtype.bf16 else 2e-5)
    whole = dict(gathered_parameters(engine.module))
    everywhere = {}
    for name, parameter in engine.module.named_parameters():
        if not is_tensor_part(parameter):  # whole on every rank
            everywhere[name] = [torch.empty_like(parameter) for _ in range(world)]
            torch.distributed.all_gather(everywhere[name], parameter.detach().contiguous())
    different = [name for name, found in everywhere.items() if not all(torch.equal(one, found[0]) for one in found)]
    assert not different
    if rank == 0 and dtype is Dtype.fp32:
        assert {name: value.shape for name, value in whole.items()} == {name: w.shape for name, w in weights.items()}
        for name, value in whole.items():
            # Softmax does not see most of what is added to all keys: such gradients are rounding, which Adam enlarges.
            if not name.endswith("k_proj.bias"):
                torch.testing.assert_close(value, weights[name], atol=LR / 10, rtol=1e-3)


def main() -> None:
    """Check every case."""
    process_group.start(DistributedConfig())
    failures = []
    for case in {"few": few, "others": others}[sys.argv[-1]]():
        try:
            check(*case)
        except AssertionError as error:
            failures.append(f"{case}: {error}")
            print(failures[-1], flush=True)
        process_group.barrier()
    assert not failures, "\n".join(failures)
    print("ALL CHECKED", flush=True)
    process_group.stop()


if __name__ == "__main__":
    main()
