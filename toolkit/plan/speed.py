"""How long a step takes, estimated from FLOPs and bytes. No torch.

What is not measured is assumed, and the assumptions are shown beside the estimate. A calibration (`calibrate=true`)
measures it on this machine by a program per rank; its rates are kept next to the tokenized data.

FLOPs come from the shapes of a model's parameters. Counted are matrix products, 2 FLOPs for each multiplication and
addition, and nothing else: of a decoder they are nearly everything. What is counted is what the result needs,
whoever computes more:

- Linear layers, for each token that is not padding. Looking up an embedding is no FLOP. Of routed experts those that
  are chosen for a token, K of E, and the router's choice among all; in a first trained layer what runs side by side
  (router, shared and routed experts) counts as if one followed the other.
- Attention, for each pair of a token and one that it sees: L (L + 1) / 2 of a sample of L tokens, also for samples that
  share a row. A kernel that knows no causality computes L x L, one that knows no samples the square of the row: that is
  no one's need. ChatGLM-6B's prompts see all of themselves; they are counted as if they did not, as elsewhere.
- The output layer, for trained tokens only: no other token's logits are needed.
- Backward, as much again for the gradients of trained weights, and as much again for those of activations as far down
  as something is trained; twice for the pairs of attention. Of the first layer that is trained, attention's gradients
  count whole, also where LoRA leaves out the queries, keys or values: kernels compute them together.
- `recomputed` is what activation checkpointing adds, and belongs to no model FLOPs: hardware FLOPs are both.

Not counted: DoRA's norms, P-Tuning's projection, the tokens of a soft prompt. Mixtures of experts are known by
`outline.MIXTURES`.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from toolkit import children
from toolkit.config import load, mesh, rule_tables, schema
from toolkit.launch.environment import free_port
from toolkit.messages import ConfigError, tr
from toolkit.plan import outline as outlines
from toolkit.plan.machine import Machine, this_machine
from toolkit.plan.memory import WIDTHS, longest_rows
from toolkit.plan.outline import Outline, Shapes, is_routed, layer_of, met_by_token

_UNKNOWN_FLOPS = 100e12
_CPU_FLOPS = 20e9
"""Of one core, without a calibration."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does per second; measured, or assumed."""

    flops: float
    """Of a rank, in training."""
    link: float
    """Bytes per second that a rank sends to the next one while it receives as much from the one before it."""
    memory: float
    """Bytes per second of a rank's memory, for the update of the weights."""
    host: float = 20e9
    """Bytes per second of host memory per rank, for an offloaded update."""
    pcie: float = 20e9
    """Bytes per second between a GPU and the host."""
    gather: float = 0.0
    """Bytes per second of ZeRO 3's weights and gradients, with DeepSpeed's own work for them; 0: as `link`."""
    micro_s: float = 0.0
    """Seconds of a micro-batch that do not grow with it."""
    latency_s: float = 0.0
    """Seconds of a collective that do not grow with it."""
    node_link: float = 0.0
    """As `link`, between ranks of one node, where there are several nodes and `link` is between them."""
    is_measured: bool = False


def assumed(machine: Machine, dtype: str) -> Rates:
    """Return assumed rates: half of a datasheet's FLOP/s, 80 % of its memory's and links' bandwidth.

    Between nodes 25 GB/s (200 Gbit/s) per node; at least 5 ms for a micro-batch and 50 microseconds for a collective.
    """
    if machine.on_cpu:
        return Rates(_CPU_FLOPS, 1e9, 5e9, host=5e9, micro_s=0.02, latency_s=1e-3)
    card = machine.card
    flops = 0.5 * ((card and card.flops(dtype)) or _UNKNOWN_FLOPS)
    near = 0.8 * ((card and card.link_bytes_per_s) or 25e9)
    link = min(near, 25e9) if machine.nodes > 1 else near
    memory = 0.8 * ((card and card.memory_bytes_per_s) or 1e12)
    return Rates(flops, link, memory, micro_s=0.005, latency_s=5e-5, node_link=near if machine.nodes > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step."""

    compute: float
    """Matrix products."""
    communication: float
    """Gradients and weights between ranks."""
    update: float
    """Weights, and what moves to the host for it."""
    overlapped: bool
    """Whether communication hides behind the computation."""
    tokens: int
    """Tokens of the global batch, rows full."""
    waits: float = 0.0
    """Of the communication, what nothing hides: the layer that comes next, or the gradients' buffers, wait for it."""
    is_known: bool = True
    """Whether the FLOPs are: those of some mixtures of experts are not, and then nothing is computed here."""

    @property
    def seconds(self) -> float:
        """In all."""
        if not self.overlapped:
            return self.compute + self.communication + self.update
        return max(self.compute, self.communication - self.waits) + self.waits + self.update

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        return self.tokens / self.seconds


def step_time(outline: Outline, cfg: schema.RunConfig, machine: Machine, rates: Rates) -> StepTime:
    """Return an estimate for full rows, all of whose tokens are trained; ring algorithms are assumed."""
    rows, zero, part = longest_rows(outline, cfg), cfg.zero, outlines.rank_part(outline, cfg)
    weight, times = WIDTHS[cfg.precision.dtype], mesh.accumulation(cfg, machine.world_size)
    stages = cfg.parallel.pipeline
    world = machine.world_size // (stages * cfg.parallel.tensor)  # ranks with equal parameters
    work = Work(rows.tokens, causal_pairs([rows.length] * rows.rows) // rows.parts, rows.tokens)
    cost = formula(part.shapes, part.sizes, part.trained, rows.prefix)
    flops = cost.hardware_flops(work) if cfg.train.activation_checkpointing.enabled else cost.model_flops(work)
    flops += cost.forward.flops(work) * _other_passes(cfg)
    teacher = outline.teacher if schema.has_live_teacher(cfg) else None
    if teacher:
        flops += formula(teacher.shapes, teacher.sizes).forward.flops(work)
    is_known = all(is_countable(one.shapes, one.sizes) for one in (outline, teacher) if one)
    # A pipeline's last stage begins when the first has done as many micro-batches as there are stages before it.
    compute = (times + stages - 1) * ((flops / stages / rates.flops if is_known else 0) + rates.micro_s)

    own = sum(
        trained // stages / (ranks if zero.stage else 1) for _, trained, ranks in outlines.zero_groups(part, world)
    )
    states = rule_tables.OPTIMIZERS[cfg.optim.name].state_bytes  # read and written, as are weights; gradients are read
    moved = own * (4 + 8 + 2 * states + 2 * weight)
    is_offloaded = zero.offload_optimizer.device is not schema.Device.none
    communication, waits = _communication(outline, part, cfg, machine, rates)
    return StepTime(
        compute=compute,
        communication=communication,
        waits=waits,
        update=moved / rates.host + 2 * own * weight / rates.pcie if is_offloaded else moved / rates.memory,
        overlapped=not machine.on_cpu and (_prefetches(outline, zero) if zero.stage == 3 else zero.overlap_comm),
        tokens=rows.tokens * times * world,
        is_known=is_known,
    )


def _prefetches(outline: Outline, zero: schema.ZeroConfig) -> bool:
    """Whether ZeRO-3 gathers a layer behind the one before it: not while more than so many parameters are there
    (deepspeed 0.19.8, partitioned_param_coordinator.py, fetch_sub_module), as where a layer's experts are that many.
    """
    return outline.largest_layer(inside=True) <= zero.stage3_max_live_parameters


def _other_passes(cfg: schema.RunConfig) -> int:
    """Return how many passes of the model have no gradients: of the reference, for KTO as many again of questions with
    others' answers, and of the model as its own teacher.
    """
    is_kto, by_reference = cfg.preference.loss is schema.PreferenceLoss.kto, schema.has_reference_in_step(cfg)
    return by_reference + is_kto * (1 + by_reference) + schema.has_own_teacher(cfg)


def _ring(rates: Rates, machine: Machine, span: int, apart: int = 1) -> float:
    """Return the bytes per second that a rank sends in a ring of every `apart`th of `span` ranks.

    A ring passes from each node to the next once; those that lie side by side share what joins the nodes.
    """
    if not rates.node_link or span <= machine.ranks:
        return rates.node_link or rates.link
    return rates.link / min(apart, machine.ranks)


def _all_to_all(rates: Rates, machine: Machine, span: int) -> float:
    """Return the same where each of `span` neighbours sends to each: what leaves a node is of all of its ranks."""
    if not rates.node_link or span <= machine.ranks:
        return rates.node_link or rates.link
    return rates.link / machine.ranks * span / (span - machine.ranks)


def _communication(
    outline: Outline, part: Outline, cfg: schema.RunConfig, machine: Machine, rates: Rates
) -> tuple[float, float]:
    """Return the seconds of a step in which ranks send, and those of them in which they compute nothing.

    `part`: a rank's of the model. ZeRO 2 reduces the gradients of each micro-batch to all ranks (deepspeed 0.19.8,
    stage_1_and_2.py, average_tensor with `use_multi_rank_bucket_allreduce`), ZeRO 3 to the rank that keeps them.
    """
    zero, stages, tensor = cfg.zero, cfg.parallel.pipeline, cfg.parallel.tensor
    weight, times = WIDTHS[cfg.precision.dtype], mesh.accumulation(cfg, machine.world_size)
    span = machine.world_size // stages
    world, is_gathered = span // tensor, zero.stage == 3 and rates.gather > 0
    gradients = weights = 0.0  # seconds: of those of a micro-batch, in one direction, and of all weights once
    for count, trained, ranks in outlines.zero_groups(part, world):
        link = rates.gather if is_gathered else _ring(rates, machine, span, span // ranks)
        gradients += weight * trained / stages * (ranks - 1) / ranks / link
        weights += weight * count / stages * (ranks - 1) / ranks / link
    gathers = (2 + _other_passes(cfg)) * weights
    if outline.teacher and schema.has_live_teacher(cfg):
        teacher = weight * outline.teacher.num_parameters / stages
        gathers += teacher * (world - 1) / world / (rates.gather or _ring(rates, machine, span, tensor))
    copies = zero.zero_hpz_partition_size
    if rates.node_link and 1 < copies <= machine.ranks:  # ZeRO++: weights for the backward pass come from the own node
        gathers += weight * part.num_parameters / stages * (copies - 1) / copies / rates.node_link - weights
    # Updated weights are gathered once per step, as many bytes as their gradients.
    sent = (2 * gradients, 3 * gradients, (2 * times + 1) * gradients, times * (gathers + gradients))[zero.stage]
    if world > 1 and not is_gathered:
        collectives = 3 * outline.sizes["layers"] * times if zero.stage == 3 else 2 + times  # large buckets
        sent += collectives * rates.latency_s
    if zero.offload_param.device is not schema.Device.none:  # a rank's part goes to its GPU, forward and backward
        sent += times * 2 * weight * part.num_parameters / world / rates.pcie
    # Without a stream of its own, the reduction of ZeRO 3 holds up the backward pass (deepspeed 0.19.8, stage3.py).
    waits = times * gradients if zero.stage == 3 and not zero.overlap_comm else 0.0
    exchanged = _exchanged(outline, part, cfg, machine, rates) * times / stages
    return sent + exchanged, waits + exchanged


def _exchanged(outline: Outline, part: Outline, cfg: schema.RunConfig, machine: Machine, rates: Rates) -> float:
    """Return the seconds of a micro-batch in which ranks that share its rows, or experts, send activations."""
    rows, weight, tensor = longest_rows(outline, cfg), WIDTHS[cfg.precision.dtype], cfg.parallel.tensor
    states, recomputes = rows.tokens * outline.sizes["hidden"] * weight, cfg.train.activation_checkpointing.enabled
    sums, num_sums = outlines.exchanged_bytes(outline, tensor, states, recomputes)
    dispatched, num_dispatched = outlines.dispatched_bytes(part, states, recomputes)
    seconds = sums / _ring(rates, machine, tensor) + (num_sums + num_dispatched) * rates.latency_s
    seconds += dispatched / _all_to_all(rates, machine, tensor * cfg.parallel.expert)
    if rows.parts > 1:  # queries, keys, values and results, forward, backward, and in what is computed again
        size = part.sizes
        keys = size["keys"] * rows.key_copies(size["keys"] // size["head_size"])
        per_token = 2 * (size["heads"] * size["head_size"] + keys) * weight * size["layers"]
        once = rows.tokens * per_token * (rows.parts - 1) / rows.parts
        seconds += (3 if recomputes else 2) * once / _all_to_all(rates, machine, tensor * rows.parts)
    return seconds


_HEAD_NAMES = ("lm_head", "score.", "embed_out", "output_layer")
_ORDER = (
    ("input_layernorm", "ln_1"),
    (
        *("q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn", "Wqkv", "q_norm", "k_norm"),
        *("q_a_proj", "kv_a_proj"),  # of latent attention, as what follows them
    ),
    ("q_b_proj", "kv_b_proj", "q_a_layernorm", "kv_a_layernorm"),
    (),  # attention itself
    ("o_proj", "out_proj", "attention.dense", "attn.c_proj"),
    ("norm", "ln_2"),
    ("gate_proj", "up_proj", "dense_h_to_4h", "c_fc", "fc1", "experts.base_layer.lora_"),
    ("down_proj", "dense_4h_to_h", "c_proj", "fc2", "mlp.gate.", "router", "expert_gate", "experts.lora_"),
)
"""Parts of the names of a layer's parameters, in the order in which the layer uses them."""
_KEYS, _ATTENTION = 4, 6
"""Twice their place in that order: between a matrix and the next lies what LoRA adds behind its own first one."""

Place = tuple[int, int]
"""Where in the forward pass a parameter is used: its layer (-1 before, their number after), and the order there."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is computed on."""

    tokens: int
    """Tokens that go through the layers."""
    pairs: int
    """Pairs of a token and one that it sees, itself included."""
    trained_tokens: int
    """Tokens whose loss is computed."""


@dataclass(frozen=True, slots=True)
class FlopRates:
    """FLOPs for one of each."""

    per_token: int = 0
    """Of the linear layers."""
    per_pair: int = 0
    """Of attention, all layers together."""
    per_trained_token: int = 0
    """Of the output layer."""

    def flops(self, work: Work) -> int:
        """Return the FLOPs of some work."""
        return self.per_token * work.tokens + self.per_pair * work.pairs + self.per_trained_token * work.trained_tokens


@dataclass(frozen=True, slots=True)
class Formula:
    """The FLOPs of one model and way of training."""

    forward: FlopRates
    backward: FlopRates
    """Of the backward pass, without what is computed again in it."""
    recomputed: FlopRates
    """What activation checkpointing adds."""

    def model_flops(self, work: Work) -> int:
        """Return what training on some tokens needs."""
        return self.forward.flops(work) + self.backward.flops(work)

    def hardware_flops(self, work: Work) -> int:
        """Return the same with activations computed again in the backward pass."""
        return self.model_flops(work) + self.recomputed.flops(work)


def is_countable(shapes: Shapes, sizes: Mapping[str, int]) -> bool:
    """Whether `formula` knows such a model: no mixture of experts but those of `outline.MIXTURES`."""
    return "chosen" in sizes or not any("expert" in name for name in shapes)


def formula(
    shapes: Shapes, sizes: Mapping[str, int], trained: Collection[str] | None = None, prefix_tokens: int = 0
) -> Formula:
    """Return the FLOPs of a decoder.

    `shapes` include what tuning adds; `sizes` are those of `outline.flop_sizes`; `trained` None is all;
    `prefix_tokens` are learned keys and values that every token sees besides (P-Tuning v2).
    """
    layers = sizes["layers"]
    names = shapes if trained is None else trained
    first = min((_place_of(name, layers) for name in names), default=(layers + 1, 0))
    # Tokens are multiplied with matrices; LoRA's `save_modules` has trained copies, which are computed with instead.
    costs = {
        name: 2 * met_by_token(name, math.prod(shape), sizes)
        for name, shape in shapes.items()
        if len(shape) == 2 + (is_routed(name) and "lora_A" not in name)
        and not name.startswith(("prefix_encoder.", "soft_prompt."))
        and "original_module" not in name
        and ".modules_to_save.default.".join(name.rsplit(".", 1)) not in shapes
    }
    outside = [name for name in costs if layer_of(name) < 0]
    outer = [name for name in outside if any(part in name for part in _HEAD_NAMES)]
    if not outer and outside:  # the embedding serves as both, the largest that there is
        outer = [max(outside, key=costs.__getitem__)]
    matrices = [(costs[name], name in names, _place_of(name, layers)) for name in costs if name not in outside]
    heads = [(costs[name], name in names, (layers, 1)) for name in outer]
    pair = 2 * sizes["heads"] * (sizes["head_size"] + sizes.get("value_size", sizes["head_size"]))
    behind = sum((layer, _ATTENTION) > first for layer in range(layers))
    again = sum(layer >= first[0] for layer in range(layers))

    def rates(per_token: int, num_layers: int, per_trained_token: int) -> FlopRates:
        return FlopRates(per_token + prefix_tokens * num_layers * pair, num_layers * pair, per_trained_token)

    def backward(parts: list[tuple[int, bool, Place]]) -> int:
        return sum(cost * (is_trained + (place > first)) for cost, is_trained, place in parts)

    # A layer is computed again from its input, which gets a gradient whether or not something before it is trained.
    layers_again = sum(cost * (1 + (place <= first)) for cost, _, place in matrices if place[0] >= first[0])
    return Formula(
        rates(sum(cost for cost, *_ in matrices), layers, sum(cost for cost, *_ in heads)),
        rates(backward(matrices), 2 * behind, backward(heads)),
        rates(layers_again, again + 2 * (again - behind), 0),
    )


def causal_pairs(lengths: Iterable[int]) -> int:
    """Return the pairs of tokens that samples of these lengths need."""
    return sum(length * (length + 1) // 2 for length in lengths)


@cache
def _place_of(name: str, layers: int) -> Place:
    if name.startswith("prefix_encoder."):  # keys and values of the first layer, as of all others
        return 0, _KEYS
    if (layer := layer_of(name)) >= 0:
        order = next((number for number, parts in enumerate(_ORDER) if any(part in name for part in parts)), 0)
        return layer, 2 * order + ("lora_B" in name)
    if any(part in name for part in _HEAD_NAMES):
        return layers, 1
    return (layers, 0) if any(part in name for part in ("norm", "ln_f")) else (-1, 0)


_PATIENCE_S = 300
_POLL_S = 0.1


def _cache_of(cfg: schema.RunConfig, machine: Machine, outline: Outline) -> Path:
    """Return where the rates of this host are kept: they depend on its processors, on the model and on its rows."""
    gpu = machine.card.name if machine.card else ""
    inputs = [
        # Of a known GPU's memory a run sees less than nvidia-smi says.
        "cpu" if machine.on_cpu else gpu or machine.memory_bytes >> 30,
        machine.ranks,
        outline.sizes,
        outline.vocabulary,
        cfg.precision.dtype.value,
        cfg.data.max_length,
    ]
    return outlines.cache_file(cfg, f"rates-{os.uname().nodename}", inputs)


def rates_of(cfg: schema.RunConfig, machine: Machine, outline: Outline) -> Rates:
    """Return what has been measured on this machine for this model, else what is assumed."""
    file = _cache_of(cfg, machine, outline)
    if machine.nodes == 1 and file.is_file():
        with suppress(ValueError, TypeError, OSError):  # cut off, or of another version: as if it were not there
            return Rates(**json.loads(file.read_text(encoding="utf-8")))
    return assumed(machine, cfg.precision.dtype.value)


def calibrate(cfg: schema.RunConfig, machine: Machine, outline: Outline) -> None:
    """Measure this machine's rates and keep them."""
    if machine.nodes > 1:
        raise ConfigError(tr("calibrate=true measures one machine, this one: leave nodes= out."))
    if not machine.on_cpu:
        here = this_machine()
        if not here or machine.ranks > here.ranks or abs(machine.memory_bytes / here.memory_bytes - 1) >= 0.1:
            raise ConfigError(
                "calibrate=true measures this machine, which is not {machine}: it has {here}. Leave gpus= out, or "
                "write gpus=2xcpu.",
                machine=machine.name,
                here=here.name if here else tr("no NVIDIA GPU"),
            )
    with tempfile.TemporaryDirectory() as folder:
        measured = _measure(cfg, machine, Path(folder))
    # All wait for the slowest: its rates are the machine's.
    slowest = {
        name: (max if name in ("micro_s", "latency_s") else min)(rates[name] for rates in measured)
        for name in measured[0]
    }
    outlines.write_cache(_cache_of(cfg, machine, outline), slowest)


def _measure(cfg: schema.RunConfig, machine: Machine, folder: Path) -> list[dict[str, float]]:
    """Run `toolkit.extras.calibration` on every rank at the same time; return the rates that each has measured."""
    config = folder / "config.yaml"
    config.write_text(load.to_yaml(cfg), encoding="utf-8")
    environ = os.environ | {
        "WORLD_SIZE": str(machine.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu" if machine.on_cpu else "cuda",
    }
    answers = [folder / f"rank_{rank}.json" for rank in range(machine.ranks)]
    logs = [answer.with_suffix(".log") for answer in answers]
    with ExitStack() as stack:
        programs = []
        for rank, (answer, log) in enumerate(zip(answers, logs, strict=True)):
            command = [sys.executable, "-m", "toolkit.extras.calibration", str(config), str(answer)]
            ids = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            out = stack.enter_context(log.open("wb"))
            program = children.start(command, env=environ | ids, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            stack.callback(program.wait)
            stack.callback(program.kill)
            programs.append(program)
        until = time.monotonic() + _PATIENCE_S
        while None in (codes := [program.poll() for program in programs]) and not any(codes):
            if time.monotonic() > until:
                raise ConfigError("calibrate=true: no answer within {seconds} s.", seconds=_PATIENCE_S)
            time.sleep(_POLL_S)
    for log, code in zip(logs, codes, strict=True):
        if code:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"exit code {code}"
            raise ConfigError("calibrate=true: the machine could not be measured: {reason}", reason=reason)
    return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]
