"""Parameters of which each rank of a tensor group has a part: which they are, and how the parts become whole."""

from collections.abc import Sequence

import torch

from toolkit.config.mesh import Split, split_of, unsplit_shape


def is_tensor_part(parameter: torch.Tensor) -> bool:
    """Whether this rank has a part of a parameter, as DeepSpeed's AutoTP marks it."""
    return getattr(parameter, "tensor_model_parallel", False)


def tensor_group() -> torch.distributed.ProcessGroup:
    """Return the ranks that share each split parameter; only where the model is split."""
    from deepspeed.utils import groups  # takes seconds, which those who have whole models need not wait

    return groups.get_tensor_model_parallel_group()


def tensor_group_size() -> int:
    """Return how many they are."""
    return torch.distributed.get_world_size(tensor_group())


def full_shape(name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole parameter, however it is divided over ranks."""
    shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return unsplit_shape(name, shape, tensor_group_size()) if is_tensor_part(parameter) else shape


def gather_parts(name: str, part: torch.Tensor) -> torch.Tensor:
    """Return the whole of a parameter; a collective of the tensor group."""
    parts = [torch.empty_like(part) for _ in range(tensor_group_size())]
    torch.distributed.all_gather(parts, part.contiguous(), tensor_group())
    return join_parts(name, parts)


def join_parts(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a parameter, or a stored buffer, from what the ranks of a tensor group have of it, in their order."""
    split = split_of(name)
    if split is None or len(parts) == 1:  # one part is not copied: it may be a view of a mapped file
        return parts[0]
    if split is Split.columns:
        return torch.cat(list(parts), dim=1)
    if split is Split.pairs:
        above, below = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*above, *below])
    return torch.cat(list(parts))
