"""Whether all ranks have the same, asked through their store: no tensor is sent, so no shape can differ and hang.

Rank 0 publishes what it has, the others answer with what differs, rank 0 puts the answers into one message, and all
ranks end with that one.
"""

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from toolkit.errors import LaunchError
from toolkit.messages import tr
from toolkit.secrets import are_same

_POLL_S = 0.05
_HEARD_S = 10.0
_MOST = 8
"""Differences that are shown."""
_LONGEST = 120
"""Characters of a value that are shown."""


def differences(store: Store, rank: int, size: int, key: str, mine: Mapping[str, str], timeout: timedelta) -> str:
    """Return what the ranks have that is not the same, as a message, the same on all ranks; "" if all is the same.

    Args:
        store: of all ranks.
        rank: this rank.
        size: number of ranks.
        key: where in the store; it has not been used yet.
        mine: what this rank has, by name.
        timeout: after which a rank that does not answer is given up.

    Raises:
        LaunchError: a rank has not answered.
    """
    until = time.monotonic() + timeout.total_seconds()
    if rank:
        _wait(store, {0: f"{key}/first"}, until)
        first = json.loads(store.get(f"{key}/first"))
        found = _compared(first["values"], mine)
        store.set(f"{key}/{rank}", json.dumps({"host": socket.gethostname(), "differ": found}))
        _wait(store, {0: f"{key}/verdict"}, until)
        told = str(store.get(f"{key}/verdict").decode())
        store.set(f"{key}/heard/{rank}", "")
        return told
    host = socket.gethostname()
    store.set(f"{key}/first", json.dumps({"values": dict(mine)}))
    _wait(store, {other: f"{key}/{other}" for other in range(1, size)}, until)
    answers = {other: json.loads(store.get(f"{key}/{other}")) for other in range(1, size)}
    told = _message(host, answers)
    store.set(f"{key}/verdict", told)
    if told:  # the store ends with this process
        with suppress(LaunchError):
            heard = {other: f"{key}/heard/{other}" for other in range(1, size)}
            _wait(store, heard, time.monotonic() + _HEARD_S)
    return told


def _wait(store: Store, keys: Mapping[int, str], until: float) -> None:
    """Wait for what ranks publish; by asking again and again, as a signal is not noticed while the store waits."""
    missing = dict(keys)
    while missing:
        missing = {rank: key for rank, key in missing.items() if not store.check([key])}
        if missing and time.monotonic() > until:
            raise LaunchError(
                tr(
                    "no answer from rank {ranks} when the ranks compared their settings. Its own log says why, if it "
                    "has ended; distributed.timeout_s is how long ranks wait for each other.",
                    ranks=", ".join(map(str, missing)),
                )
            )
        if missing:
            time.sleep(_POLL_S)


def _compared(first: Mapping[str, str], mine: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Return rank 0's value and this rank's where they differ; None where there is none."""
    names = [*first, *(name for name in mine if name not in first)]
    pairs = {name: (first.get(name), mine.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if None in pair or not are_same(*pair)}


def _message(host: str, answers: Mapping[int, dict[str, dict[str, tuple[str | None, str | None]]]]) -> str:
    """Return one message about all differences: of each thing, the first rank that has another value."""
    found: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        for name in answer["differ"]:
            found.setdefault(name, []).append(rank)
    lines = []
    for name, ranks in list(found.items())[:_MOST]:
        first, other = answers[ranks[0]]["differ"][name]
        line = tr(
            "  {name}: {first} on rank 0 ({host}), {other} on rank {rank} ({other_host})",
            name=name,
            first=_shown(first),
            host=host,
            other=_shown(other),
            rank=ranks[0],
            other_host=answers[ranks[0]]["host"],
        )
        lines.append(line + (tr(" and {count} more ranks", count=len(ranks) - 1) if len(ranks) > 1 else ""))
    if len(found) > _MOST:
        lines.append(tr("  and {count} more", count=len(found) - _MOST))
    if not lines:
        return ""
    return tr(
        "the ranks do not have the same settings, data or code:\n{lines}\nStart every rank with the same command, "
        "on the same data, code and package versions.",
        lines="\n".join(lines),
    )


def _shown(value: str | None) -> str:
    if value is None:
        return tr("missing")
    return value if len(value) <= _LONGEST else value[: _LONGEST - 3] + "..."
