"""How ranks find each other: through one store, which is there before any collective is.

Ranks meet in it as soon as they can, compare there what they were given (alike.py), and the process group that is made
later takes the same store.

torchrun's agent keeps one store for all starts, and torch takes it as it is (torch 2.13, rendezvous.py,
_create_c10d_store): ranks of the second start would find the first ones' addresses there and wait for them. The number
of the restart is no way out, as the agents of several machines may count differently. So the ranks of one start agree
on a part of the store that is new.
"""

import os
import threading
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

_SCHEME = "met"
_POLL_S = 0.05
_met: tuple[Store, int, int] | None = None


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store of all ranks, this rank and their number; the first call waits until all of them have come.

    Expects RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment.

    Raises:
        RuntimeError: they have not come within `timeout`.
    """
    global _met
    if _met is None:
        _met = _without_blocking_signals(timeout)
    return _met


def init_method(timeout: timedelta) -> str | None:
    """Return what `init_process_group` is to be told so that it takes the ranks' store; None for a single rank."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    meet(timeout)
    register_rendezvous_handler(_SCHEME, _yield_met)
    return f"{_SCHEME}://"


def leave() -> None:
    """Forget the store: the next process group begins with one of its own."""
    global _met
    _met = None


def _yield_met(url: str, timeout: timedelta, **unused: Any) -> Iterator[tuple[Store, int, int]]:
    yield meet(timeout)


def _without_blocking_signals(timeout: timedelta) -> tuple[Store, int, int]:
    """Meet in a thread: while C++ waits, the main thread runs no Python, and with it no handler of a SIGTERM."""
    found: list[tuple[Store, int, int]] = []
    errors: list[Exception] = []

    def wait() -> None:
        try:
            found.append(_first_meeting(timeout))
        except Exception as error:  # handed on to the thread that waits
            errors.append(error)

    thread = threading.Thread(target=wait, name="meeting", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
    if errors:
        raise errors[0]
    return found[0]


def _first_meeting(timeout: timedelta) -> tuple[Store, int, int]:
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if kept and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        store = PrefixStore(agree(store, rank, size, timeout), store)
    return store, rank, size


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
