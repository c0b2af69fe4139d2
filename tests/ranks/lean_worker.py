"""Run on every rank: that a training step waits for nothing, reduces no more often than it must, and may be compiled.

Each finding is asserted here, on every rank; a failing assertion fails the launch.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import transformers
from deepspeed import DeepSpeedEngine
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.mesh import Mesh
from toolkit.config.schema import ActivationCheckpointingConfig, CompileConfig, DistributedConfig, TrainConfig, When
from toolkit.distributed import process_group
from toolkit.engine.build import initialize_engine
from toolkit.messages import ConfigError
from toolkit.models.loss import LossPath, loss_head
from toolkit.sample_types import with_targets
from toolkit.tasks import language
from toolkit.tasks.language import LanguageTask
from toolkit.train import step
from toolkit.train.step import StepGuard

ACCUMULATION = 4
# A host that asks one of these of a device waits for all that the device has been told to do.
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim", "allclose")
REDUCTIONS = ("allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_")


class Watch(TorchDispatchMode):
    """Counts what would make a host wait for its GPU, here of all tensors as the ranks' device is the CPU; and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.reductions = 0
        self.sent: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITS:
            self.waits[name] += 1
        if function.namespace == "c10d" and name in REDUCTIONS:
            self.reductions += 1
            self.sent |= {one.dtype for one in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(one)}
        return function(*args, **(kwargs or {}))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Watch, also for what no dispatcher sees on the CPU."""
        with pytest.MonkeyPatch.context() as patch, self:
            for name in ("tolist", "numpy", "cpu"):
                real = getattr(torch.Tensor, name)

                def call(*arguments: Any, _name: str = name, _real: Any = real, **options: Any) -> Any:
                    self.waits[_name] += 1
                    return _real(*arguments, **options)

                patch.setattr(torch.Tensor, name, call)
            yield


MESH = Mesh(world_size=2)


def build(stage: int, dtype: str, compiling: CompileConfig | None = None, **extra: Any) -> DeepSpeedEngine:
    """Return an engine of a tiny model, the same each time."""
    torch.manual_seed(0)
    config = transformers.GlmConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attention_bias=True,
        pad_token_id=None,
        eos_token_id=1,
    )
    ds_config: dict[str, Any] = {
        **extra,
        "train_batch_size": 2 * ACCUMULATION,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True, "fused": True}},
    }
    model = transformers.GlmForCausalLM(config)
    engine = initialize_engine(
        model,
        ds_config,
        ActivationCheckpointingConfig(),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        compiling,
    )
    engine.train()
    return engine


def window(number: int) -> list[dict[str, torch.Tensor]]:
    """Return a step's micro-batches; the third of rank 1 is trained nowhere, and rows end in padding."""
    rank, batches = torch.distributed.get_rank(), []
    for place in range(ACCUMULATION):
        generator = torch.Generator().manual_seed(100 * number + 10 * place + rank)
        ids = torch.randint(64, (1, 16), generator=generator)
        labels, segments = ids.clone(), torch.ones_like(ids)
        labels[:, 12:], segments[:, 12:] = -100, 0
        if rank and place == 2:
            labels[:] = -100
        positions = torch.arange(16)[None]
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions, "segment_ids": segments}
        batches.append(with_targets(batch))
    return batches


def check_step(stage: int, dtype: str) -> None:
    """Nothing waits between the first forward pass and the last backward pass; gradients are reduced as often as told.

    Stages 0 and 1 reduce once per step, 2 and 3 in every micro-batch, as each rank keeps only its part of them.
    """
    engine = build(stage, dtype)
    assert loss_head(engine).path(engine) is LossPath.losses
    guard = StepGuard(engine, TrainConfig())
    step.train_step(engine, LanguageTask(), window(0), MESH, guard)
    watched: list[Watch] = []
    forward_pass, backward = language.token_loss_sum, engine.backward

    def watched_loss(*arguments: Any) -> torch.Tensor:
        watched.append(Watch())
        with watched[-1].whole():
            return forward_pass(*arguments)

    def watched_backward(*arguments: Any, **options: Any) -> None:
        with watched[-1].whole():
            backward(*arguments, **options)

    language.token_loss_sum, engine.backward = watched_loss, watched_backward
    try:
        step.train_step(engine, LanguageTask(), window(1), MESH, guard)
    finally:
        language.token_loss_sum, engine.backward = forward_pass, backward
    reductions = [one.reductions for one in watched]
    assert not any(one.waits for one in watched), (stage, dtype, [one.waits for one in watched])
    assert len(reductions) == ACCUMULATION
    assert all(reductions) if stage > 1 else not any(reductions[:-1]), (stage, dtype, reductions)
    with watched[0].whole():  # that waits are seen at all
        float(torch.ones(1, device=engine.device))
    assert watched[0].waits == {"_local_scalar_dense": 1}


WAITS_OF_STEP = {0: 2, 1: 4, 2: 4, 3: 3}
"""By stage: for the loss, for the gradient's norm, and those of DeepSpeed 0.19.8, all after the last backward pass."""


def check_waits_of_step(stage: int, dtype: str) -> None:
    """From the first forward pass to the end of the update a host waits for its device no more often than this."""
    engine, task, watch = build(stage, dtype), LanguageTask(), Watch()
    guard, token_counts = StepGuard(engine, TrainConfig()), task.token_counts
    step.train_step(engine, task, window(0), MESH, guard)
    with ExitStack() as stack:

        def count_from_here(batches: list[dict[str, torch.Tensor]]) -> step.TokenCounts:
            counts = token_counts(batches)  # of batches on the host
            stack.enter_context(watch.whole())
            return counts

        task.token_counts = count_from_here  # type: ignore[method-assign]
        step.train_step(engine, task, window(1), MESH, guard)
    # With overflows of half precision stage 2 looks once more.
    expected = WAITS_OF_STEP[stage] + (stage == 2 and dtype == "bf16")
    assert sum(watch.waits.values()) == expected, (stage, dtype, watch.waits)


def check_sent_type(stage: int) -> None:
    """Gradients of a model in bf16 travel in bf16, or in the type that is asked for."""
    for asked, expected in (({}, torch.bfloat16), ({"communication_data_type": "fp32"}, torch.float32)):
        engine, watch = build(stage, "bf16", **asked), Watch()
        with watch:
            engine.backward(language.token_loss_sum(engine, window(0)[0]))
        assert watch.sent == {expected}, (stage, asked, watch.sent)


def check_compiled(stage: int) -> None:
    """A compiled model learns what the model learns."""
    losses = []
    for compiling in (None, CompileConfig(enabled=True, dynamic=When.never)):
        engine = build(stage, "fp32", compiling)
        guard = StepGuard(engine, TrainConfig())
        losses.append(
            [step.train_step(engine, LanguageTask(), window(number), MESH, guard).loss for number in range(4)]
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert losses[0][0] - losses[0][-1] > 0.01, losses
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)


def check_refusals() -> None:
    """What cannot be compiled is refused by name."""
    with pytest.raises(ConfigError, match=r"compile\.backend = indctor is not installed\. There are: .*inductor"):
        build(1, "fp32", CompileConfig(enabled=True, backend="indctor"))
    with pytest.raises(ConfigError, match=r"DeepSpeed rejects this configuration: .*turbo"):
        build(1, "fp32", CompileConfig(enabled=True, mode="turbo"))
    with pytest.raises(ConfigError, match=r"compile\.deepcompile = true needs NVIDIA GPUs"):
        build(1, "fp32", CompileConfig(enabled=True, deepcompile=True))


def main() -> None:
    """Run all checks."""
    process_group.start(DistributedConfig())
    for stage in range(4):
        check_step(stage, "fp32")
        check_waits_of_step(stage, "fp32")
    check_step(1, "bf16")  # another optimizer class of DeepSpeed's than stage 1 in fp32
    for stage in (1, 2, 3):
        check_waits_of_step(stage, "bf16")
    for stage in (2, 3):
        check_sent_type(stage)
    check_refusals()
    check_compiled(2)
    print("ALL CHECKED", flush=True)
    process_group.stop()


if __name__ == "__main__":
    main()
