"""How ranks meet, and what must be equal on them: compared in a store, without tensors that could hang.

The process group then takes the same store. torchrun's agent keeps one store for all starts (torch 2.13, rendezvous.py,
_create_c10d_store), with old addresses, and agents may count restarts differently: so the ranks of one start agree on a
new part of it.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from toolkit import messages, secrets
from toolkit.config import schema
from toolkit.messages import LaunchError, shortened_alike, tr, warn

_comparisons = count()
"""Each has a place of its own in the store; all ranks compare the same in the same order."""


def check_alike(
    config: schema.DistributedConfig, values: Mapping[str, str], error: type[messages.ToolkitError]
) -> None:
    """Raise `error` on every rank unless `values`, by name, are the same on all: else collectives hang or train
    something else. A collective, before or after the process group exists.
    """
    try:
        store, rank, size = meet(timedelta(seconds=config.timeout_s))
    except (RuntimeError, ValueError) as problem:
        raise not_together(config, problem) from problem
    message = differences(store, rank, size, f"alike/{next(_comparisons)}", values, timedelta(seconds=config.timeout_s))
    if message:
        raise error(message)


def not_together(config: schema.DistributedConfig, error: Exception) -> LaunchError:
    """Return the error for ranks that did not meet: `error` says why."""
    return LaunchError(
        "the ranks did not come together (backend {backend}, {address}:{port}): {reason}. Check that "
        "the address is reachable from every node and the port is free, and distributed.backend.",
        backend=config.backend.value,
        address=os.environ.get("MASTER_ADDR", "?"),
        port=os.environ.get("MASTER_PORT", "?"),
        reason=str(error).splitlines()[0],
    )


_ADDRESS_S = 60.0
"""How long the first node's name may be unknown: a cluster's DNS may learn it as its nodes start."""


def _check_address(seconds: float) -> None:
    """Raise a LaunchError if nobody knows MASTER_ADDR: torch would repeat the system's error until its own timeout."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    until, is_told = time.monotonic() + seconds, False
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            if time.monotonic() >= until:
                raise LaunchError(
                    "rank {rank} on {host} does not know the first node, MASTER_ADDR = {address} (port {port}): "
                    "{reason}. Write a name or an IP address that resolves on every node (getent hosts {address}), in "
                    "--master_addr or the hostfile.",
                    rank=os.environ.get("RANK", "0"),
                    host=socket.gethostname(),
                    address=address,
                    port=port,
                    reason=reason,
                ) from error
            if not is_told:
                warn("MASTER_ADDR = {address} is not known here ({reason}): waiting.", address=address, reason=reason)
            is_told = True
            time.sleep(min(1.0, seconds / 10))


_SCHEME = "met"
_POLL_S = 0.05
_met: tuple[Store, int, int] | None = None


def meet(timeout: timedelta) -> tuple[Store, int, int]:
    """Return store, rank, world size by the launcher's variables; RuntimeError if a rank has not come in `timeout`."""
    global _met
    if _met is None:
        met: list[tuple[Store, int, int]] = []
        problems: list[Exception] = []

        def wait() -> None:
            try:
                _check_address(min(_ADDRESS_S, timeout.total_seconds()))
                store, rank, size = next(rendezvous("env://", timeout=timeout))
                is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun's agent, for restarts
                if is_kept and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
                    store = PrefixStore(agree_on_store(store, rank, size, timeout), store)
                met.append((store, rank, size))
            except Exception as error:  # handed on to the thread that waits
                problems.append(error)

        # While C++ waits, the main thread would run no Python, and with it no handler of a SIGTERM.
        thread = threading.Thread(target=wait, name="meeting", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL_S)
        if problems:
            raise problems[0]
        _met = met[0]
    return _met


def init_method(timeout: timedelta) -> str:
    """Return what `init_process_group` is to be told so that it takes the ranks' store."""
    meet(timeout)
    return f"{_SCHEME}://"


def leave() -> None:
    """Forget the ranks' rendezvous store, so that the next process group makes a new one."""
    global _met
    _met = None


register_rendezvous_handler(_SCHEME, lambda url, timeout, **unused: iter([meet(timeout)]))


def agree_on_store(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that only the ranks of this start have, though the store may hold keys of earlier starts. Each rank
    publishes a random name of its own; rank 0 answers under each with its own, which all then use. RuntimeError if a
    rank has not come within `timeout`.
    """
    own_name = uuid.uuid4().hex
    if rank:
        store.set(f"name/{rank}", own_name)
        agreed = str(store.get(f"answer/{own_name}").decode())
        store.set(f"heard/{agreed}/{rank}", "")
        return agreed
    missing, deadline = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"heard/{own_name}/{other}"]):
                missing.discard(other)
            elif store.check([f"name/{other}"]):
                store.set(f"answer/{store.get(f'name/{other}').decode()}", own_name)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"no sign of rank {sorted(missing)} in {timeout.total_seconds():.0f} s")
        time.sleep(_POLL_S)
    return own_name


_HEARD_S = 10.0
_MOST = 8
_LONGEST = 120


def differences(store: Store, rank: int, size: int, key: str, values: Mapping[str, str], timeout: timedelta) -> str:
    """Return a message on the values that differ between ranks, the same on all, or ""; `key`: new in the store.

    Rank 0 publishes its values, each other rank what differs from them, then rank 0 the message (`verdict`).
    """
    until = time.monotonic() + timeout.total_seconds()
    if rank:
        _wait_for_keys(store, {0: f"{key}/first"}, until)
        first = json.loads(store.get(f"{key}/first"))
        names = dict.fromkeys([*first["values"], *values])
        pairs = {name: (first["values"].get(name), values.get(name)) for name in names}
        differing = {name: pair for name, pair in pairs.items() if None in pair or not secrets.are_same(*pair)}
        store.set(f"{key}/{rank}", json.dumps({"host": socket.gethostname(), "differ": differing}))
        _wait_for_keys(store, {0: f"{key}/verdict"}, until)
        message = str(store.get(f"{key}/verdict").decode())
        store.set(f"{key}/heard/{rank}", "")
        return message
    host = socket.gethostname()
    store.set(f"{key}/first", json.dumps({"values": dict(values)}))
    _wait_for_keys(store, {other: f"{key}/{other}" for other in range(1, size)}, until)
    answers = {other: json.loads(store.get(f"{key}/{other}")) for other in range(1, size)}
    message = _differences_text(host, answers)
    store.set(f"{key}/verdict", message)
    if message:  # the store ends with this process
        with suppress(LaunchError):
            heard = {other: f"{key}/heard/{other}" for other in range(1, size)}
            _wait_for_keys(store, heard, time.monotonic() + _HEARD_S)
    return message


_ENDS = "ends"


@contextmanager
def tell_failure() -> Iterator[None]:
    """Let ranks that wait in the store know that this one fails: it may end with this process, and PyTorch would print
    a page of C++ frames below the message on each rank that asks it then.
    """
    try:
        yield
    except BaseException:
        if _met is not None:
            with suppress(RuntimeError):  # it has ended with another one
                _met[0].set(_ENDS, "")
                time.sleep(3 * _POLL_S)
        raise


def _wait_for_keys(store: Store, keys: Mapping[int, str], until: float) -> None:
    """Wait until ranks have set their `keys` (rank -> key) in the store; LaunchError at `until`, of time.monotonic().
    Polls, as signals are not handled while the store waits.
    """
    missing, may_ask = dict(keys), True
    while missing:
        if may_ask:
            missing = {rank: key for rank, key in missing.items() if not store.check([key])}
            if missing and store.check([_ENDS]):  # the store may end with a rank that failed; launchers end this one
                may_ask, until = False, time.monotonic() + _HEARD_S
        if missing and time.monotonic() > until:
            raise LaunchError(
                "no answer from rank {ranks} when the ranks compared their settings. Its own log says why, if it "
                "has ended; distributed.timeout_s is how long ranks wait for each other.",
                ranks=", ".join(map(str, missing)),
            )
        if missing:
            time.sleep(_POLL_S)


def _differences_text(host: str, answers: Mapping[int, dict[str, dict[str, tuple[str | None, str | None]]]]) -> str:
    """Return one message about all differences: of each thing, the first rank that has another value; "" if there is
    none. `host`: rank 0's; `answers`: what the other ranks have published, by rank.
    """
    ranks_by_name: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        for name in answer["differ"]:
            ranks_by_name.setdefault(name, []).append(rank)
    lines = []
    for name, ranks in list(ranks_by_name.items())[:_MOST]:
        values = [tr("missing") if value is None else value for value in answers[ranks[0]]["differ"][name]]
        first, other = shortened_alike(values[0], values[1], _LONGEST)
        line = tr(
            "  {name}: {first} on rank 0 ({host}), {other} on rank {rank} ({other_host})",
            name=name,
            first=first,
            host=host,
            other=other,
            rank=ranks[0],
            other_host=answers[ranks[0]]["host"],
        )
        lines.append(line + (tr(" and {count} more ranks", count=len(ranks) - 1) if len(ranks) > 1 else ""))
    if not lines:
        return ""
    if len(ranks_by_name) > _MOST:
        lines.append(tr("  and {count} more", count=len(ranks_by_name) - _MOST))
    return tr(
        "the ranks do not have the same settings, data or code:\n{lines}\nStart every rank with the same command, "
        "on the same data, code and package versions.",
        lines="\n".join(lines),
    )
