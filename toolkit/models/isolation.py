"""Packed rows tried on a loaded model: no sample of a row may see another."""

from collections.abc import Callable

import torch

from toolkit.distributed import accelerator
from toolkit.messages import ModelError, reason_of
from toolkit.models.attention import attention_arguments
from toolkit.models.probe import evaluating
from toolkit.sample_types import Batch

_MOST_CHANGE, _MOST_IN_FLOAT32 = 0.06, 3e-4
"""Root mean square over the vocabulary by which the logits of a token may change, of the logits' spread (0.06 = 6 %).

Measured with random GLMs of 12 and 28 layers in bf16: 0.025 where one attention output in a thousand differs by an ulp
and 0.048 where all do, though single logits change by up to 0.16; 0.09 and more where a sample's first token sees one
token of another sample in one layer. Nothing smaller than rounding can be found so. In float32, on CPUs, tiny models of
107 architectures of transformers changed by 6e-7 at most, and those with a state that runs on by 0.002 and more."""


def check_isolation(
    engine: torch.nn.Module,
    vocab_size: int,
    device: torch.device,
    name: str,
    forward: Callable[[Batch], torch.Tensor] | None = None,
    shared: bool = False,
    remedy: str = "data.packing=grouped",
) -> None:
    """Raise ModelError unless the logits of sample b are the same in the rows [a b], [c b] and [b]. A collective under
    ZeRO-3. `name`: of the model, for messages. `forward`: returns the logits of a batch, in place of calling the
    engine, as for a pipeline. `shared`: check rows whose samples share a prefix too. `remedy`: setting to suggest.
    """
    dtypes = {parameter.dtype for parameter in engine.parameters()}
    is_tf32 = accelerator.uses_tf32(device)
    allowed = _MOST_IN_FLOAT32 if dtypes == {torch.float32} and not is_tf32 else _MOST_CHANGE
    for trunk in (0, 8) if shared else (0,):  # tokens of the prefix that samples share
        batch = isolation_rows(vocab_size, trunk=trunk)
        begin, stop_alone = 12 + trunk, 20 + trunk  # b is at `begin` in [a b] and [c b], at `trunk`:`stop_alone` in [b]
        remedy = "data.share_prefixes=false" if trunk else remedy
        try:
            logits = forward(batch) if forward is not None else evaluate_logits(engine, batch, device)
        except (AssertionError, ValueError, TypeError, IndexError, RuntimeError) as error:
            if forward is not None:
                raise
            raise ModelError(
                "{name} cannot be trained on packed rows: it rejects the arguments that keep their samples apart "
                "({reason}). Use {remedy}.",
                remedy=remedy,
                name=name,
                reason=reason_of(error),
            ) from error
        after_a, after_c, by_itself = logits[0, begin:], logits[1, begin:], logits[2, trunk:stop_alone]
        changes = torch.stack([(after_a - other).square().mean(-1).sqrt().max() for other in (after_c, by_itself)])
        change = float(changes.max() / after_a.std())
        if not change <= allowed:  # nan too
            raise ModelError(
                "{name} cannot be trained on packed rows: the samples of a row influence each other (logits of a token "
                "change by {change} of their spread, rounding changes them by less than {most}). Use {remedy}.",
                remedy=remedy,
                name=name,
                change=f"{change:.3g}",
                most=allowed,
            )


def evaluate_logits(engine: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return an engine's or a model's logits of rows in evaluation mode, float32 [B, S, V]. A collective (ZeRO-3)."""
    inputs = {key: tensor.to(device) for key, tensor in batch.items()}
    arguments = {"input_ids": inputs["input_ids"], "position_ids": inputs["position_ids"]}
    # With other `position_ids` for a model that makes its own, or whose first is not 0.
    arguments |= attention_arguments(getattr(engine, "module", engine), inputs)
    # Eagerly, as torch.compile would specialize graphs on these sizes, which training does not have.
    with evaluating(engine), torch.compiler.set_stance("force_eager"):
        logits: torch.Tensor = engine(**arguments, use_cache=False).logits
    return logits.float()


def isolation_rows(vocab_size: int, times: int = 1, trunk: int = 0) -> Batch:
    """Return three packed rows [a b], [c b] and [b]: a and c have `times` x 12 tokens, b has `times` x 20. Each row
    begins with `times` x `trunk` more, a prefix that its samples share.
    """
    # Rows [trunk a | b], [trunk c | b] and [trunk b | padding]. b is at `begin`:`width` in the first two, and at
    # `trunk`:`stop_alone` in the third.
    trunk, length = trunk * times, 20 * times
    begin, stop_alone = trunk + 12 * times, trunk + length
    width = begin + length
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (3, width), generator=generator)
    ids[:, :trunk] = ids[0, :trunk]
    ids[1, begin:] = ids[2, trunk:stop_alone] = ids[0, begin:]
    segments = torch.ones_like(ids)  # the trunk is of its row's first sample
    segments[:2, begin:] = 2
    segments[2, stop_alone:] = 0
    # b's positions follow the trunk's in all rows.
    positions = torch.cat((torch.arange(begin), torch.arange(trunk, stop_alone))).repeat(3, 1)
    positions[2] = torch.arange(width)
    bounds = [0, begin, width, width + begin, 2 * width, 2 * width + stop_alone, 3 * width]
    batch = {
        "input_ids": ids,
        "segment_ids": segments,
        "position_ids": positions,
        "cu_seq_lens": torch.tensor(bounds, dtype=torch.int32),
    }
    if trunk:
        batch["seen_until"] = segments.clone()
        batch["seen_until"][:2, :trunk] = 2
        # Trunk and a see themselves, b sees the trunk and itself.
        path = torch.cat((torch.arange(begin), torch.arange(trunk), torch.arange(begin, width)))
        batch["keys"] = torch.cat((path, width + path, torch.arange(2 * width, 3 * width)))
        num_seen = torch.tensor([0, begin, stop_alone, begin, stop_alone, stop_alone, begin - trunk])
        batch["cu_seq_lens_k"] = num_seen.cumsum(0).int()
    return batch
