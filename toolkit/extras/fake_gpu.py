"""A fake GPU: DeepSpeed's engine and a model run on it, and their tensors have shapes but no numbers.

PyTorch's fake tensors do it, on a device of a backend that nobody has implemented: each operation on them is only its
shapes. A FakeTensor of a CUDA device would do without a GPU as well, but not without PyTorch's CUDA build, as its
backward pass asks CUDA how many devices there are (torch 2.13). Process groups are PyTorch's fake ones, whose
collectives return at once. What tensors weigh, what is sent, and where the host reads a number of the device is noted.

For a process of its own: the device, the accelerator and the patches stay.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.adam import fused_adam
from deepspeed.ops.lion import fused_lion
from deepspeed.runtime.zero import utils as zero_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from toolkit.config.devices import CUDA
from toolkit.distributed import accelerator
from toolkit.engine.memory import LiveBytes

NAME = "gpu"
DEVICE = f"{NAME}:0"
_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class _Backend:
    """The module that PyTorch asks of a device backend; it is not `is_available`, so that no number is made on it."""

    is_initialized = staticmethod(lambda: True)
    is_available = _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: list(_HALF))


class _Stream:
    """A CUDA stream or event stub on which nothing happens."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *_, **__: 0.0


class _Accelerator(CPU_Accelerator):
    """DeepSpeed's accelerator for the fake GPU: work is queued on streams, as on a real one."""

    Stream = Event = _Stream

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = NAME, "fake"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(DEVICE)

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return DEVICE

    def device_count(self) -> int:
        return 1

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == NAME

    @property
    def IntTensor(self) -> Any:  # noqa: N802  # the old constructors write numbers where none are
        return partial(torch.tensor, dtype=torch.int32, device=DEVICE)

    @property
    def ByteTensor(self) -> Any:  # noqa: N802
        return partial(torch.tensor, dtype=torch.uint8, device=DEVICE)

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> _Stream:
        return _Stream()

    default_stream = current_stream

    def get_op_builder(self, class_name: str) -> Any:
        """Return the stub for every op: DeepSpeed's FusedAdam and FusedLion run, their kernels do nothing."""
        return _Builder

    def create_op_builder(self, op_name: str) -> Any:
        return _Builder()


class _Builder:
    """A DeepSpeed op builder stub, whose op does nothing."""

    name = "none"

    def load(self, *_: Any, **__: Any) -> "_Builder":
        return self

    def is_compatible(self, *_: Any, **__: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def begin(rank: int, world_size: int) -> None:
    """Make this process rank `rank` of `world_size` ranks with a fake GPU each: add the device to PyTorch, patch what
    would need a real one, and start process groups that send nothing.
    """
    _setup_privateuseone_for_python_backend(NAME, _Backend)  # the device, for PyTorch
    set_accelerator(_Accelerator())  # the same, for DeepSpeed
    _choose_kernels_of_ampere()
    # What fake tensors cannot do, or do in another way than real ones.
    FakeTensor.tolist = _tolist  # type: ignore[assignment, method-assign]
    FakeTensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    fused_adam.FusedAdamBuilder = fused_lion.FusedLionBuilder = _Builder  # compiled ops take real tensors alone
    # ZeRO-3 compares lists of parameters with rank 0's, which is not there; the ranks' collectives are compared later.
    zero_utils.get_lst_from_rank0 = list
    zero_utils.assert_lst_len_same_as_other_ranks = lambda _: None
    dist.init_process_group(f"cpu:fake,{NAME}:fake", rank=rank, world_size=world_size, store=FakeStore())
    deepspeed.init_distributed("fake", auto_mpi_discovery=False, verbose=False)


def _choose_kernels_of_ampere() -> None:
    """Let models and PyTorch, which ask for CUDA and the GPU's generation, choose kernels as on an NVIDIA A100."""
    FakeTensor.is_cuda = property(lambda self: self.device.type == NAME)  # type: ignore[assignment]
    accelerator.has_ampere_kernels = lambda: True
    torch.get_device_module(CUDA).get_device_capability = lambda *_: (8, 0)
    functional.scaled_dot_product_attention = _fused_attention


def _tolist(tensor: torch.Tensor) -> Any:
    """Return a fake tensor's `tolist`, reading one number from the device, as a real tensor's reads all at once."""
    value = tensor.flatten()[0].item()
    if tensor.dim() == 0:
        return value
    if tensor.dim() == 1:
        return [value] * len(tensor)
    return [*map(_tolist, tensor)]


def _apply(module: torch.nn.Module, function: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
    """Stand in for `torch.nn.Module._apply`, which swaps a fake parameter for the result of `function` and fails if
    something refers to it. Here, as with real tensors, a parameter that stays on its device gets new data instead.
    """
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                result = function(parameter)
            if result.device != parameter.device:
                module._parameters[name] = torch.nn.Parameter(result, parameter.requires_grad)
            elif result is not parameter:
                parameter.data = result
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return what scaled_dot_product_attention does, by the kernel that PyTorch takes on an NVIDIA GPU: flash
    attention, or the memory-efficient one in fp32 or with a mask, neither of which it would take for this device. Each
    keeps other tensors for the backward pass. States are [B, heads, S, D].
    """
    if attn_mask is None and query.dtype in _HALF:
        flash = _aten._scaled_dot_product_flash_attention
        return_debug_mask = False
        return flash(query, key, value, dropout_p, is_causal, return_debug_mask, scale=scale)[0]
    if enable_gqa and key.size(1) != query.size(1):  # this kernel takes as many heads of keys as of queries
        key, value = (states.repeat_interleave(query.size(1) // states.size(1), 1) for states in (key, value))
    efficient = _aten._scaled_dot_product_efficient_attention
    compute_log_sumexp = True  # which the backward pass needs
    return efficient(query, key, value, attn_mask, compute_log_sumexp, dropout_p, is_causal, scale=scale)[0]


class Watch(LiveBytes):
    """A dispatch mode above a FakeTensorMode that notes bytes of the device's tensors, collectives, and where the host
    waits for the device. A number that is read is 1.0, or 0 if it is an integer or a truth value (such as an overflow).
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[tuple[Any, ...]] = []
        """(name, ranks of the group, numbers sent, their type) of each collective, in order."""
        self.waits: Counter[str] = Counter()
        """Code that waits for the device -> how often."""
        self._events: list[tuple[int, int, str]] = []
        """(storage, change of its bytes, what was made or "" if it was freed) of each allocation."""
        self._function: Any = None
        """The operation being computed."""
        self._begun = 0
        """Number of events before the step."""

    def restart(self) -> None:
        """Forget collectives, waits and the peak so far: a step begins."""
        self.collectives, self.waits, self.peak, self._begun = [], Counter(), self.now, len(self._events)

    def largest(self, most: int) -> list[tuple[str, int, int]]:
        """Return (operation, type and shape; how many; bytes together) of the `most` largest kinds of tensors that were
        alive at the peak since `restart`. The events are replayed twice: to find the peak, and to see what was alive.
        """
        now = highest = sum(change for _, change, _ in self._events[: self._begun])
        num_at_peak = self._begun  # how many events had happened then
        for index in range(self._begun, len(self._events)):
            now += self._events[index][1]
            if now > highest:
                highest, num_at_peak = now, index + 1
        alive: dict[int, tuple[int, str]] = {}  # storage -> its bytes and what it holds
        for storage, change, what in self._events[:num_at_peak]:
            if what:
                alive[storage] = (alive.get(storage, (0, ""))[0] + change, what)
            else:
                alive.pop(storage, None)
        sizes: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for size, what in alive.values():
            sizes[what] += size
            counts[what] += 1
        return [(what, counts[what], size) for what, size in sizes.most_common(most)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation, and note what it makes, sends and waits for; a number that is read is made up."""
        first = next((argument for argument in args if isinstance(argument, torch.Tensor)), None)
        on_device = first is not None and first.device.type == NAME
        # `.item()`, `torch.equal` and `nonzero` depend on numbers: the host waits for those of the device. A CPU tensor
        # that was made of a number has it as `constant` (torch 2.13, FakeTensor).
        if func in (_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default):
            assert first is not None
            if on_device:
                self.waits[_waiting_code()] += 1
            elif getattr(first, "constant", None) is not None and func is _aten._local_scalar_dense.default:
                return first.constant.item()  # type: ignore[attr-defined]
            return _made_up_result(func, first)
        if func is _aten.record_stream.default:  # a hint for an allocator, which does not exist here
            return None
        if func.namespace == "c10d":
            self._note_collective(func, args)
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if on_device and func is _aten._to_copy.default and leaves[0].device.type == "cpu":  # `.cpu()` waits, too
            self.waits[_waiting_code()] += 1
        self._function = func
        for leaf in leaves:
            self.count(leaf)
        return result

    def _note_collective(self, func: Any, args: Any) -> None:
        """Note a collective's name, group size, and numbers and type of what it sends. The name is its operator's,
        such as c10d::allreduce_, without the prefix and the _ of operations in place.
        """
        sent = [tensor for tensor in _pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor)]
        groups = [group for group in _pytree.tree_leaves(args) if isinstance(group, torch.ScriptObject)]
        sizes = [dist.ProcessGroup.unbox(group).size() for group in groups if "ProcessGroup" in str(group._type())]
        kinds = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in sent)
        name = func.name().removeprefix("c10d::").rstrip("_")
        self.collectives.append(
            (name, sizes[0] if sizes else 0, sum(tensor.numel() for tensor in sent), "/".join(kinds))
        )

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the fake GPU; the storages of fake tensors are all on meta."""
        return tensor.device.type == NAME

    def _add(self, key: int, num_bytes: int, tensor: torch.Tensor | None) -> None:
        """Also record the event: what was made in the storage `key`, or that it was freed (`tensor` None)."""
        super()._add(key, num_bytes, tensor)
        what = ""
        if tensor is not None:
            name, dtype = self._function.name().removeprefix("aten::"), str(tensor.dtype).removeprefix("torch.")
            what = f"{name} {dtype} {[*tensor.shape]}"
        self._events.append((key, num_bytes, what))


def _made_up_result(func: Any, tensor: torch.Tensor) -> Any:
    """Return the result of an operation that reads a fake tensor's numbers: all are nonzero, and equal; see `Watch`."""
    if func is _aten.nonzero.default:
        return tensor.new_zeros((tensor.numel(), tensor.dim()), dtype=torch.int64)
    if func is _aten.equal.default:
        return True
    return 1.0 if tensor.is_floating_point() else 0


def _waiting_code() -> str:
    """Return file, line and function of the innermost caller outside PyTorch: the code that waits for the device."""
    for frame in reversed(traceback.extract_stack()):
        if "/torch/" not in frame.filename and not frame.filename.endswith("fake_gpu.py"):
            return f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} ({frame.name})"
    return "?"
