"""Attention over rows that hold several samples (packed sequences), or of whose tokens each rank has a part.

Packed, no sample sees another. `varlen` treats each sample for itself, on GPUs with PyTorch's kernel for variable
lengths. `sdpa` and `eager` take a block-diagonal mask instead: right everywhere, but they compute all pairs of a row.

Samples of one conversation may share what they begin with: a tree, in a row each token once, branch after branch. A
token sees those before it whose branch it is in (`seen_until`). `varlen` gathers the keys and values of each branch's
path (`keys`), so that it computes exactly the pairs that see each other; the mask is that of the tree otherwise.

Sequence parallelism is Ulysses: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509; for transformers' models as in
ALST, Bekman et al. 2025, https://arxiv.org/abs/2506.13996. For attention, parts of rows with all heads become whole
rows with a part of the heads, and back. DeepSpeed 0.19.8's ulysses_sp.py takes one batch size per run, and packed rows
by flash attention alone. B rows, S tokens of a whole row, P ranks of a group, H heads, D width of a head.
"""

import functools
import inspect
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from toolkit.config.schema import Attention, Dtype, RunConfig
from toolkit.distributed.process_group import exchange_rows, sum_over_ranks
from toolkit.messages import ModelError, tr
from toolkit.models.probe import evaluating

VARLEN = "varlen"
SEQUENCE = "sequence"
"""Rows whose tokens are divided over ranks."""
UNTRAINED = -100
Batch = dict[str, torch.Tensor]
_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
_SHORT = 512
"""Tokens up to which PyTorch 2.13's kernel for CPUs takes longer in bf16 than in float32: forward and backward of five
heads of 64 columns, one core of an EPYC without AMX, 2.0 times as long for 128 tokens, 1.3 for 300, 0.8 for 1,024."""
MOST_CHANGE = 0.06
"""Root mean square over the vocabulary by which the logits of a token may change, of the logits' spread (0.06 = 6 %).

Measured with random GLMs of 12 and 28 layers in bf16: 0.025 where one attention output in a thousand differs by an ulp
and 0.048 where all do, though single logits change by up to 0.16; 0.09 and more where a sample's first token sees one
token of another sample in one layer. Nothing smaller than rounding can be found so."""


def trains_on_gpu() -> bool:
    """Whether the device of a run is an NVIDIA GPU; a run on CPUs leaves a GPU that is there alone."""
    from deepspeed.accelerator import get_accelerator  # speaks on stdout where it has to find out, so not before

    return bool(get_accelerator().device_name() == "cuda")


@torch.compiler.assume_constant_result
def _has_kernel() -> bool:
    """Whether a GPU has PyTorch's kernel for variable lengths, as from Ampere on (torch 2.13, flash_api.cpp).

    2.10's function takes no scale (nn/attention/varlen.py), so there GPUs do without the kernel, as older ones do.
    """
    is_older = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return not is_older and _kernel_takes("scale")


@torch.compiler.assume_constant_result
def _kernel_takes(name: str) -> bool:
    """Whether the function for variable lengths of this PyTorch has an argument."""
    from torch.nn.attention.varlen import varlen_attn

    return name in _arguments(varlen_attn)


@functools.cache
def _arguments(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def computes_segments(cfg: RunConfig) -> bool:
    """Whether a run's attention, where a model has PyTorch's, computes only pairs of tokens that see each other."""
    has_kernel = not trains_on_gpu() or (cfg.precision.dtype is not Dtype.fp32 and _has_kernel())
    return cfg.model.attention is Attention.varlen or (cfg.model.attention is Attention.auto and has_kernel)


def choose_attention(model: PreTrainedModel, attention: Attention, packed: bool, dtype: torch.dtype | None) -> None:
    """Set how a model computes attention; see `model.attention` in the schema. `packed`: rows hold several samples."""
    name = attention.value
    if attention is Attention.auto:
        if not packed:
            return
        # PyTorch's kernel for variable lengths knows half precision only.
        has_kernel = not trains_on_gpu() or (dtype in _KERNEL_DTYPES and _has_kernel())
        name = VARLEN if has_kernel else Attention.sdpa.value
        # Where attention is more than PyTorch's function (Gemma 2 bends its scores, gpt-oss has sinks).
        name = name if model._supports_sdpa else Attention.eager.value
    try:
        if name == VARLEN and not model._supports_sdpa:
            raise ValueError(tr("its attention is more than PyTorch's function computes"))
        model.set_attn_implementation(name)
    except (ValueError, ImportError, KeyError) as error:
        raise ModelError(
            "model.attention = {name} is not supported by {model} ({reason}). Use auto.",
            name=name,
            model=type(model).__name__,
            reason=str(error).splitlines()[0],
        ) from error


def check_isolation(
    engine: torch.nn.Module,
    vocab_size: int,
    device: torch.device,
    name: str,
    forward: Callable[[Batch], torch.Tensor] | None = None,
    shared: bool = False,
    remedy: str = "data.packing=grouped",
) -> None:
    """Check that the logits of sample b are the same in the rows [a b], [c b] and [b], and where both samples of a row
    begin with the same tokens, which are there once (`shared`). A collective under ZeRO-3. `forward` returns logits of
    a batch where the engine cannot simply be called, such as a pipeline's. `remedy`: what to do where they are not.
    """
    for trunk in (0, 8) if shared else (0,):
        batch, first, own = isolation_rows(vocab_size, trunk=trunk), 12 + trunk, 20 + trunk
        remedy = "data.share_prefixes=false" if trunk else remedy
        try:
            logits = forward(batch) if forward is not None else evaluate_logits(engine, batch, device)
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            if forward is not None:
                raise
            raise ModelError(
                "{name} cannot be trained on packed rows: it rejects the arguments that keep their samples apart "
                "({reason}). Use {remedy}.",
                remedy=remedy,
                name=name,
                reason=str(error).split("\n")[0],
            ) from error
        after_other, after_third, alone = logits[0, first:], logits[1, first:], logits[2, trunk:own]
        changes = torch.stack([(after_other - other).square().mean(-1).sqrt().max() for other in (after_third, alone)])
        change = float(changes.max() / after_other.std())
        if not change <= MOST_CHANGE:  # nan too
            raise ModelError(
                "{name} cannot be trained on packed rows: the samples of a row influence each other (logits of a token "
                "change by {change} of their spread, rounding changes them by less than {most}). Use {remedy}.",
                remedy=remedy,
                name=name,
                change=f"{change:.3g}",
                most=MOST_CHANGE,
            )


def evaluate_logits(engine: torch.nn.Module, batch: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the logits of rows in evaluation mode, float32 [B, S, V]. A collective under ZeRO-3."""
    given = {key: tensor.to(device) for key, tensor in batch.items()}
    module = getattr(engine, "module", engine)
    with evaluating(engine), torch.compiler.set_stance("force_eager"):  # as in `probe.capture`
        logits: torch.Tensor = engine(
            input_ids=given["input_ids"],
            use_cache=False,
            **{"position_ids": given["position_ids"], **attention_arguments(module, given)},
        ).logits
    return logits.float()


def isolation_rows(vocab_size: int, times: int = 1, trunk: int = 0) -> Batch:
    """Return three packed rows: [a b], [c b] and [b], of `times` x 12 tokens of a and c and `times` x 20 of b. Each
    begins with `times` x `trunk` more, the same for all and once in a row.
    """
    trunk, first, second = trunk * times, (12 + trunk) * times, 20 * times
    width, own = first + second, trunk + second
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (3, width), generator=generator)
    ids[:, :trunk] = ids[0, :trunk]
    ids[1, first:] = ids[2, trunk:own] = ids[0, first:]
    segments = torch.ones_like(ids)
    segments[:2, first:] = 2
    segments[2, own:] = 0
    positions = torch.cat((torch.arange(first), torch.arange(trunk, own))).repeat(3, 1)
    positions[2] = torch.arange(width)
    bounds = [0, first, width, width + first, 2 * width, 2 * width + own, 3 * width]
    batch = {
        "input_ids": ids,
        "segment_ids": segments,
        "position_ids": positions,
        "cu_seq_lens": torch.tensor(bounds, dtype=torch.int32),
    }
    if trunk:
        batch["seen_until"] = segments.clone()
        batch["seen_until"][:2, :trunk] = 2
        path = torch.cat((torch.arange(first), torch.arange(trunk), torch.arange(first, width)))
        batch["keys"] = torch.cat((path, width + path, torch.arange(2 * width, 3 * width)))
        seen = torch.tensor([0, first, own, first, own, own, first - trunk])
        batch["cu_seq_lens_k"] = seen.cumsum(0).int()
    return batch


def with_label_positions(batch: Batch) -> Batch:
    """Return a batch with `places`, int64 [T]: indices of its trained tokens in the flattened rows; `targets`: these.
    They give the shapes of the loss, so they are counted before the batch goes to a device.
    """
    if "places" in batch:
        return batch
    is_trained = batch["labels"] != UNTRAINED
    is_trained[:, 0] = False  # nothing stands before it that could predict it
    places = is_trained.flatten().nonzero().flatten()
    return {**batch, "places": places, "targets": batch["labels"].flatten()[places]}


def attention_arguments(module: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return forward's arguments that hide padding and other samples, of packed batches and of parts of rows; with
    `position_ids` for a model that has its own.
    """
    segments, bounds = batch["segment_ids"], batch.get("cu_seq_lens")
    implementation = module.config._attn_implementation
    if "part" in batch and implementation != SEQUENCE:
        raise RuntimeError("a model that does not attend over parts of rows got one")
    if getattr(module, "builds_positions", False):
        if "part" not in batch:
            return {"attention_mask": segments > 0, "position_ids": None}
        # Padding is on the right, where no token of a sample looks.
        mask, positions = module.base_model.complete(batch["row_ids"], None, None)
        mine = positions.chunk(dist.get_world_size(_group), dim=-1)[dist.get_rank(_group)]
        return {"attention_mask": mask, "position_ids": mine, "in_parts": True}
    if "part" in batch or (bounds is not None and implementation == VARLEN):
        # It knows by itself what a token sees. transformers passes masks of four dimensions on as they are; this one is
        # never looked at.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=segments.device)
        arguments = {"attention_mask": mask, **({"in_parts": True} if "part" in batch else {})}
        if bounds is None:
            return arguments
        paths = {"cu_seq_lens_k": batch["cu_seq_lens_k"], "keys": batch["keys"]} if "keys" in batch else {}
        return arguments | _segment_arguments(bounds, segments.size(1)) | paths
    if bounds is None:
        mask = segments > 0
        mask.is_right_padded = True  # type: ignore[attr-defined]
        return {"attention_mask": mask}
    size = segments.size(1)
    causal = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    first, last, own = segments[:, None, :], batch.get("seen_until", segments)[:, None, :], segments[:, :, None]
    blocks = ((first <= own) & (own <= last) & causal)[:, None]  # [B, 1, S, S]
    if implementation == "eager":
        dtype = next(module.parameters()).dtype
        return {"attention_mask": torch.zeros_like(blocks, dtype=dtype).masked_fill(~blocks, torch.finfo(dtype).min)}
    return {"attention_mask": blocks}


def _segment_arguments(bounds: torch.Tensor, longest: int) -> dict[str, Any]:
    """Return transformers' arguments for segments; see `attend_to_segments`."""
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def sample_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    in_parts: bool = False,
    keys: torch.Tensor | None = None,
    learned: int = 0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention within the segments of `cu_seq_lens_q`, int32 [segments + 1], [B, S, H, D]; `in_parts`
    over whole rows, of which this rank has S / P tokens, in segments or not; with neither `sdpa`'s. With `keys`, int64
    [K], each segment attends to its tokens at these places, of `cu_seq_lens_k`: its own are the last of them. A module
    that is not causal attends by the mask, of whole rows. `in_parts`, keys before those of the tokens are learned ones;
    the first `learned` of the tokens are, too. These see themselves alone, so each rank computes them all: their
    gradients on each rank are those through its heads, or its tokens, and add up over the group.

    `query`: [B, H, S, D], `in_parts` [B, H, S / P, D]; `key`, `value`: the same with as many heads as keys have.
    """
    bounds = options.get("cu_seq_lens_q")
    if bounds is None and not in_parts:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **options)
    if learned:
        first = [states[:, :, :learned] for states in (query, key, value)]
        own, _ = sdpa_attention_forward(module, *first, None, dropout, scaling)
        query = query[:, :, learned:]
        others, _ = sample_attention(module, query, key, value, attention_mask, dropout, scaling, in_parts)
        return torch.cat((own, others), dim=1), None
    if in_parts:
        ranks = dist.get_world_size(_group)
        # Fewer heads of keys than ranks: each is sent to all ranks whose heads of queries need it.
        copies = ranks // math.gcd(key.size(1), ranks)
        if copies > 1:
            key, value = (states.repeat_interleave(copies, dim=1) for states in (key, value))
        before = key.size(2) - query.size(2)
        key, value = (_exchange(states, before) for states in (key, value))  # [B, heads / P, before + S, D]
        query = _exchange(query)
    if bounds is not None:
        paths = None if keys is None else (keys, options["cu_seq_lens_k"])
        mixed = attend_to_segments(query, key, value, bounds, query.size(2), dropout, scaling, paths)
    else:
        grouped, is_causal = key.size(1) != query.size(1), getattr(module, "is_causal", True)
        mask = None if is_causal else attention_mask
        before = key.size(2) - query.size(2) if is_causal else 0
        # Queries for the learned ones too, whose results are dropped: it takes no mask, nor PyTorch's class of biases,
        # which cannot be compiled.
        query = functional.pad(query, (0, 0, before, 0)) if before else query
        mixed = functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal, scale=scaling, enable_gqa=grouped
        )[:, :, before:].transpose(1, 2)
    return (_exchange(mixed) if in_parts else mixed), None


def attend_to_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    paths: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return causal attention within segments, [B, S, H, D]: B rows, S tokens, H heads, D width of a head.

    `query`: [B, H, S, D]; `key`, `value`: [B, heads of keys, S, D]; `bounds`: int32 [segments + 1] over the B x S
    tokens; `longest`: most tokens that one sees; `scaling`: of the scores, None is 1 / sqrt(D); `paths`: places of the
    tokens that each segment sees, int64 [K], its own the last of them, and bounds over these.
    """
    rows, heads, size, width = query.shape
    groups = heads // key.size(1)
    query, key, value = (one.transpose(1, 2).reshape(rows * size, -1, width) for one in (query, key, value))
    key_bounds = bounds
    if paths is not None:
        # Not index_select, whose gradient is added up in another order each time on a GPU.
        key, value, key_bounds = key[paths[0]], value[paths[0]], paths[1]
    if query.is_cuda and not dropout and query.dtype in _KERNEL_DTYPES and _has_kernel():
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.13 wants to be told of fewer heads of keys, and tells its kernel nothing; 2.11 compares no heads and
        # calls the same kernel (nn/attention/varlen.py), which takes any number that divides the queries' and sums the
        # gradients of each group (flash_attn/flash_api.cpp: mha_varlen_fwd, mha_varlen_bwd).
        grouped: dict[str, Any] = {"enable_gqa": groups != 1} if _kernel_takes("enable_gqa") else {}
        mixed = varlen_attn(
            query,
            key,
            value,
            bounds,
            key_bounds,
            longest,
            longest,
            scale=scaling,
            window_size=(-1, 0),  # causal, the last query at the last key; `check_isolation` measures it
            **grouped,
        )
        assert isinstance(mixed, torch.Tensor)
        return mixed.view(rows, size, -1, width)
    parts = []
    for (begin, end), (first, last) in zip(pairwise(bounds.tolist()), pairwise(key_bounds.tolist()), strict=True):
        if begin == end:  # all tokens of the segment were dropped
            continue
        q = query[begin:end].transpose(0, 1)[None]
        k, v = (repeat_kv(one[first:last].transpose(0, 1)[None], groups) for one in (key, value))
        shared = last - first - (end - begin)
        mask = torch.ones(end - begin, last - first, dtype=torch.bool, device=q.device).tril(shared) if shared else None
        if last - first <= _SHORT and q.device.type == "cpu" and q.dtype in _KERNEL_DTYPES:
            q, k, v = q.float(), k.float(), v.float()
        part = functional.scaled_dot_product_attention(q, k, v, mask, dropout, mask is None, scale=scaling)
        parts.append(part[0].transpose(0, 1).to(query.dtype))
    return torch.cat(parts).view(rows, size, -1, width)


def training_mask(*arguments: Any, attention_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor | None:
    """Return transformers' mask without looking at padding on the right, which causal attention hides anyway: PyTorch
    takes its fastest kernel, and the host does not wait for the device to learn whether there is any.
    """
    is_right_padded = getattr(attention_mask, "is_right_padded", False)
    return sdpa_mask(*arguments, attention_mask=None if is_right_padded else attention_mask, **options)


_MOST_CHANGE_OF_PARTS = 0.1
"""Root mean square by which logits of parts may differ, of their spread: rounding in bf16 makes up to 0.02 over twelve
layers, a wrong layout 0.6 and more."""
_group: dist.ProcessGroup | None = None


def split_sequences(model: PreTrainedModel, ranks: int, tensor: int = 1) -> None:
    """Let a model take parts of rows (`local_part`) as well as whole ones. A collective of P `ranks`, which are
    neighbours but for the `tensor` ranks that share each part.
    """
    global _group  # attention is called by transformers, with nothing of ours
    check_splits(model, ranks, tensor)
    model.set_attn_implementation(SEQUENCE)
    members = torch.arange(dist.get_world_size()).view(-1, ranks, tensor).transpose(1, 2).reshape(-1, ranks)
    _group, _ = dist.new_subgroups_by_enumeration(members.tolist())


def check_splits(model: PreTrainedModel, ranks: int, tensor: int = 1) -> None:
    """Reject a model whose attention cannot be divided so; a ModelError."""
    config = model.config.get_text_config()
    reason = ""
    if config._attn_implementation != Attention.sdpa.value or getattr(config, "attn_logit_softcapping", None):
        reason = tr("its attention is more than PyTorch's (sdpa)")
    elif config.num_attention_heads % (ranks * tensor):
        heads, divisor = config.num_attention_heads, ranks * tensor
        reason = tr("its {heads} attention heads cannot be divided by {ranks}", heads=heads, ranks=divisor)
    if reason:
        raise ModelError(
            "parallel.sequence = {ranks} is incompatible with {model}: {reason}.",
            ranks=ranks,
            model=type(model).__name__,
            reason=reason,
        )


def local_part(batch: Batch, part: int, parts: int) -> Batch:
    """Return the part of each row (S a multiple of P) of rank `part` of P `parts`; with one part the batch as it is.

    There remain `input_ids`, `position_ids`, `segment_ids`, `seen_until` [B, S / P]; `places`, `targets`, and what else
    is known of trained tokens, of those whose loss is this rank's, as a loss stands at the token before; what tells of
    segments and of whole samples; `part`, int64 [2]; and of whole rows [B, S] `row_segments` and `row_ids`, in which
    ChatGLM-6B finds positions and mask.
    """
    if parts == 1:
        return batch
    length = batch["input_ids"].size(1) // parts
    given = {**with_label_positions(batch), "part": torch.tensor([part, parts]), "row_ids": batch["input_ids"]}
    given["row_segments"] = given["segment_ids"]
    mine, before = own_places(given, given["places"] - 1)
    if "taught" in batch:
        of_taught = mine[batch["taught"]]
        given |= {name: batch[name][of_taught] for name in ("teacher_ids", "teacher_logs") if name in batch}
    for name in ("input_ids", "position_ids", "segment_ids", "seen_until"):
        if name in batch:
            given[name] = batch[name].narrow(1, part * length, length).contiguous()
    of_tokens: Batch = {name: given[name][mine] for name in ("targets", "sources", "taught") if name in given}
    given.pop("labels", None)
    return {**given, **of_tokens, "places": before + 1}


def whole_segments(batch: Batch) -> torch.Tensor:
    """Return the segments of a batch's rows, [B, S], also where a rank has a part of each."""
    return batch.get("row_segments", batch["segment_ids"])


def own_places(batch: Batch, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of some places in the B x S tokens of whole rows are in a rank's part, bool, and where these are in
    the part's B x S / P.
    """
    if "part" not in batch:
        return torch.ones_like(places, dtype=torch.bool), places
    size, (part, parts) = whole_segments(batch).size(1), batch["part"].tolist()
    length = size // parts
    column = places % size - part * length
    mine = (column >= 0) & (column < length)
    return mine, (places // size * length + column)[mine]


def _exchange(states: torch.Tensor, learned: int = 0) -> torch.Tensor:
    """Give each rank a piece of dimension 1, and join what comes along dimension 2. Of the `learned` in front, keys or
    values that each rank has with all heads, [B, heads, learned + S / P, D], there remain those of its heads.
    """
    assert _group is not None
    ranks = dist.get_world_size(_group)
    if learned:
        mine = states[:, :, :learned].chunk(ranks, dim=1)[dist.get_rank(_group)]
        return torch.cat((mine, _exchange(states[:, :, learned:])), dim=2)
    pieces = torch.stack(states.chunk(ranks, dim=1))
    return torch.cat(exchange_rows(pieces, _group).unbind(), dim=2)


def sum_over_parts(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of what the ranks of a group found in their parts of rows; its gradient is that of each summand. A
    collective.
    """
    others = values.detach().clone()
    dist.all_reduce(others, group=_group)
    return values + (others - values.detach())


def of_whole_rows(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return what is known of samples, of what each rank found in its part of their rows: the sum. A collective where
    there are parts. Each rank makes the same loss of it, P of them in all, of which each has gradients for its part.
    """
    if "part" not in batch:
        return values
    scaled = values * int(batch["part"][1])
    return scaled + (sum_over_parts(values.detach()) - scaled.detach())


def check_sequence_parallel(
    engine: torch.nn.Module,
    vocab_size: int,
    device: torch.device,
    name: str,
    forward: Callable[[Batch], torch.Tensor] | None,
    packed: bool,
    shared: bool = False,
) -> None:
    """Measure on the loaded model that parts of rows give the logits of whole ones, else raise. A collective. `forward`
    is that of `check_isolation`.
    """
    assert _group is not None
    part, parts = dist.get_rank(_group), dist.get_world_size(_group)
    batch = isolation_rows(vocab_size, parts, 8 if shared else 0)
    if not packed:
        batch = {"input_ids": batch["input_ids"], "segment_ids": torch.ones_like(batch["input_ids"])}
        batch["position_ids"] = torch.arange(batch["input_ids"].size(1)).expand_as(batch["input_ids"])
    module: Any = getattr(engine, "module", engine)
    if getattr(module, "builds_positions", False):
        # Contexts that end in the first part, in the middle and in the last part.
        size = batch["input_ids"].size(1)
        batch["input_ids"][torch.arange(3), torch.tensor([4, size // 2, size - 4])] = module.config.bos_token_id
    given = local_part({**batch, "labels": batch["input_ids"]}, part, parts)
    whole, mine = (evaluate_logits(engine, one, device) if forward is None else forward(one) for one in (batch, given))
    length = mine.size(1)
    other = (mine - whole[:, part * length :][:, :length]).square().mean()
    # The mean, as single logits in bf16 differ by several per cent between kernels; of all ranks, to act alike.
    sums = sum_over_ranks(torch.stack((other, whole.var())), device)
    change = float((sums[0] / sums[1]).sqrt())
    if not change <= _MOST_CHANGE_OF_PARTS:
        raise ModelError(
            "{name} cannot be trained with parallel.sequence = {ranks}: parts of rows give other logits than whole "
            "rows (by {change} of their spread).",
            name=name,
            ranks=parts,
            change=f"{change:.3g}",
        )


for _name in (VARLEN, SEQUENCE):
    AttentionInterface.register(_name, sample_attention)
    AttentionMaskInterface.register(_name, training_mask)
AttentionMaskInterface.register(Attention.sdpa.value, training_mask)
