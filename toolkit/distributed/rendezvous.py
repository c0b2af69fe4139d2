"""How ranks find each other that torchrun has started again: not by the addresses of those that died.

torchrun's agent keeps one store for all starts, and torch takes it as it is (torch 2.13, rendezvous.py,
_create_c10d_store): ranks of the second start would find the first ones' addresses there and wait for them. The number
of the restart is no way out, as the agents of several machines may count differently. So the ranks of one start agree
on a part of the store that is new.
"""

import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

_SCHEME = "started-again"
_POLL_S = 0.05


def init_method() -> str | None:
    """Return what `init_process_group` is to be told; None for its own way, where no agent would start ranks again."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not kept or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    register_rendezvous_handler(_SCHEME, _meet)
    return f"{_SCHEME}://"


def _meet(url: str, timeout: timedelta, **unused: Any) -> Iterator[tuple[Store, int, int]]:
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    yield PrefixStore(agree(store, rank, size, timeout), store), rank, size


def agree(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of this start have, and none of an earlier one had.

    Each rank leaves a name of its own, and rank 0 answers to every name that it finds. Some of them may be left from
    ranks that are gone; no answer to them reaches anybody.

    Args:
        store: of all ranks, with whatever earlier starts have left there.
        rank: this rank.
        size: number of ranks.
        timeout: after which ranks that do not come are given up.

    Raises:
        RuntimeError: they did not come.
    """
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"name/{rank}", mine)
        agreed = str(store.get(f"answer/{mine}").decode())
        store.set(f"heard/{agreed}/{rank}", "")
        return agreed
    missing, deadline = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"heard/{mine}/{other}"]):
                missing.discard(other)
            elif store.check([f"name/{other}"]):
                store.set(f"answer/{store.get(f'name/{other}').decode()}", mine)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"no sign of rank {sorted(missing)} in {timeout.total_seconds():.0f} s")
        time.sleep(_POLL_S)
    return mine
