"""Copies of a run's newest states in the memory of its nodes: a checkpoint's files in /dev/shm, which outlive the ranks
that wrote them, but not their node. So each rank's files are on the next node, too; one node alone sends nothing.

A *generation* is written while the one before is whole on all nodes: whoever dies when, one is left. One counts if each
of its files is intact on some node; one copy of each is read for that. To resume, a node is sent what it lacks: the
small files, and of fragments the headers, which say where everything is; then those that its ranks read.
"""

import hashlib
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from toolkit.checkpoint import directory
from toolkit.distributed import process_group
from toolkit.messages import CheckpointError, ConfigError, reason_of, say, tr, warn

SHM = Path("/dev/shm")  # noqa: S108 -- memory that outlives a process; the folder in it is this user's alone
GENERATIONS = 2
_RESUME, _BLOCK_BYTES = "resume", 1 << 24


def folder_name(run: Path, identity: str) -> str:
    """Return the name of a run's folder; `identity` tells it from earlier runs in the same directory, and the inode
    from those of other file systems' directories of that name: containers may share /dev/shm.
    """
    where, which = (hashlib.sha256(text.encode()).hexdigest()[:10] for text in (f"{run} {run.stat().st_ino}", identity))
    return f"toolkit-{os.getuid()}-{where}-{which}"


class Copies:
    """The copies of one run. Methods are collectives, except `exchange`, for a thread of each rank, and `has`."""

    def __init__(self, name: str, timeout: timedelta) -> None:
        self.folder, self.rank = SHM / name, process_group.rank()
        places = _places_of_ranks(self.rank)
        self.hosts = [host for _, host in places]
        """Of each rank."""
        memories = [memory for memory, _ in places]
        self.nodes = [[rank for rank, one in enumerate(memories) if one == other] for other in dict.fromkeys(memories)]
        """Ranks of each node."""
        self.node = next(number for number, ranks in enumerate(self.nodes) if self.rank in ranks)
        self.is_first = self.rank == self.nodes[self.node][0]
        # Of its own, as its messages travel next to training.
        try:
            self.group = distributed.new_group(backend="gloo", timeout=timeout) if len(self.nodes) > 1 else None
        except RuntimeError as error:
            raise ConfigError(
                "checkpoint.memory_every: the ranks of different nodes cannot be connected by gloo, over which copies "
                "are sent ({reason}). Set distributed.interface to the network interface between the nodes, or "
                "checkpoint.memory_every=0.",
                reason=reason_of(error),
            ) from error
        self._held: list[set[str]] = []
        self._files: dict[str, Any] = {}
        self._read: set[str] = set()
        """Files that were compared with their hashes on this node."""

    def has(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is a copy in memory."""
        return checkpoint.is_relative_to(self.folder)

    def node_bytes(self, checkpoint_bytes: int) -> int:
        """Return the bytes of one generation on this node: what its ranks write, and those of the node before it."""
        here = self.nodes[self.node] if self.group is None else [*self.nodes[self.node - 1], *self.nodes[self.node]]
        return checkpoint_bytes * len(here) // len(self.hosts)

    def open(self, checkpoint_bytes: int) -> bool:
        """Make the folder; return whether there is room for all generations on each node, or warn why not."""
        needed = GENERATIONS * self.node_bytes(checkpoint_bytes)

        def make() -> str:
            for other in SHM.glob(f"{self.folder.name.rpartition('-')[0]}-*"):
                if other != self.folder and other.lstat().st_uid == os.getuid():
                    shutil.rmtree(other)
                    say("Removed {folder}: copies of another run, which was in the same directory.", folder=other)
            if reason := self._made():
                return reason
            there = directory.published_checkpoints(self.folder)
            return self._lacks(needed - sum(map(directory.directory_bytes, there)))

        if reason := self._on_nodes(make):
            warn(
                "checkpoint.memory_every: there will be no copies in memory, and a restart reads the checkpoint on the "
                "disk: {reason}.",
                reason=reason,
            )
            return False
        say(
            "checkpoint.memory_every: copies are kept in {folder} of each node ({size} MB at least), until the run has "
            "ended.",
            folder=self.folder,
            size=f"{needed / 1e6:,.0f}",
        )
        return True

    def begin(self, step: int, checkpoint_bytes: int) -> tuple[Path, str]:
        """Return an empty folder for a generation, and why there can be none; there is one whole one beside it."""
        temporary = self.folder / f"{directory.checkpoint_name(step)}.tmp"

        def make() -> str:
            if reason := self._made():  # another may have removed it, as systemd does at a logout
                return reason
            old = directory.published_checkpoints(self.folder)[GENERATIONS - 1 :]
            _removed(*old, *self.folder.glob("*.tmp"), *self.folder.glob(_RESUME))
            temporary.mkdir()
            return self._lacks(self.node_bytes(checkpoint_bytes))

        return temporary, self._on_nodes(make)

    def exchange(self, folder: Path, files: Sequence[Path]) -> None:
        """Send this rank's files to the next node, and write those that come from the node before."""
        if self.group is None:
            return
        mine = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
        sizes: list[dict[str, int]] = [{} for _ in self.hosts]
        distributed.all_gather_object(sizes, mine, group=self.group)
        # A node with fewer ranks takes files in turns: in each, a rank sends to one at most, and hears one at most.
        keepers = {rank: _keeper(self.nodes, rank) for rank in range(len(self.hosts))}
        turn, target = keepers[self.rank]
        for number in range(1 + max(turn for turn, _ in keepers.values())):
            source = next((rank for rank, one in keepers.items() if one == (number, self.rank)), self.rank)
            coming = sizes[source] if source != self.rank else {}
            self._swap(folder, (target, mine if number == turn else {}), (source, coming))

    def commit(self, step: int, records: Mapping[str, directory.FileRecord]) -> str:
        """Let what is written count, on each node; return why not."""

        def publish() -> str:
            target = self.folder / directory.checkpoint_name(step)
            temporary = target.with_name(f"{target.name}.tmp")
            directory.write_manifest(temporary, records, {"step": step})
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
            return ""

        if reason := self._on_nodes(publish):  # the generation before is the newest on all nodes, or on none
            self._on_nodes(lambda: _removed(*self.folder.glob(directory.checkpoint_name(step))))
        return reason

    def recover(self, after: int, until: int) -> Path | None:
        """Return this node's folder of the newest generation of these steps that is whole, None without one. What other
        nodes have of its fragments is missing: see `complete`.
        """
        mine = {}
        for folder in directory.published_checkpoints(self.folder) if self._is_private() else []:
            try:
                content = directory.read_manifest(folder)
                mine[directory.step_of(folder), hashlib.sha256(repr(content).encode()).hexdigest()] = content
            except (CheckpointError, OSError):  # of a node that died while it was written: others have it
                continue
        known = {**dict(chain.from_iterable(process_group.gather([*mine.items()])))}
        for key in sorted(known, reverse=True):
            if not after < key[0] <= until:
                continue
            self._files = known[key]["files"]
            self._held = self._intact(key[0], is_here=key in mine)
            if not (missing := self._files.keys() - set().union(*self._held)):
                return self._lay_out(key[0])
            warn(
                "the copy of step {step} in memory is not whole: {count} of its {total} files are on no node any more "
                "({file} …). An earlier one is looked for, then the checkpoint on the disk.",
                step=key[0],
                count=len(missing),
                total=len(self._files),
                file=min(missing),
            )
        return None

    def complete(self, checkpoint: Path, needed: Collection[str]) -> str:
        """Get the content of the files that this rank needs; return why not, the same on all ranks."""
        by_rank = process_group.gather({*needed})
        wanted = [set().union(*(by_rank[rank] for rank in ranks)) for ranks in self.nodes]
        kept = self.folder / checkpoint.name
        second = self._proven(kept, wanted[self.node] - self._read)

        def link() -> str:
            for name in second[self.node]:
                (checkpoint / name).unlink()
                os.link(kept / name, checkpoint / name)
            return ""

        if reason := self._on_nodes(link):
            return reason
        self._held = [held | names for held, names in zip(self._held, second, strict=True)]
        wanted = [names - held for names, held in zip(wanted, self._held, strict=True)]
        size = sum(self._files[name]["size_bytes"] for name in wanted[self.node])
        if reason := self._on_nodes(lambda: self._lacks(size)):
            return reason

        def clear() -> str:
            for name in self._files.keys() - self._held[self.node] - wanted[self.node]:
                if name.startswith(directory.FRAGMENTS):  # a header alone: nobody shall take the rest for zeros
                    (checkpoint / name).unlink()
            return ""

        return self._fetch(checkpoint, wanted) or self._on_nodes(clear)

    def forget(self) -> None:
        """Remove all generations: the run goes another way."""
        self._on_nodes(lambda: _removed(*(self.folder.glob("*") if self._is_private() else ())))

    def close(self) -> None:
        """Remove the folder."""
        self._on_nodes(lambda: _removed(*([self.folder] if self._is_private() else [])))

    def _made(self) -> str:
        """Make the folder, if it is not there; return why it cannot be used."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        return "" if self._is_private() else tr("{folder} belongs to another user", folder=self.folder)

    def _is_private(self) -> bool:
        """Whether the folder is there, and nobody else can have put anything into it."""
        try:
            status = self.folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077

    def _lacks(self, needed: int) -> str:
        free = shutil.disk_usage(self.folder).free
        if free >= needed:
            return ""
        return tr(
            "{folder} has {free} MB free and {needed} MB are needed. Enlarge it (mount -o remount,size=SIZE {folder}; "
            "of a container: docker run --shm-size=SIZE)",
            folder=SHM,
            free=f"{free / 1e6:,.0f}",
            needed=f"{needed / 1e6:,.0f}",
        )

    def _on_nodes(self, do: Callable[[], str]) -> str:
        """Do something on the first rank of each node; return the first reason why it failed."""
        reason = ""
        if self.is_first:
            try:
                reason = do()
            except (OSError, CheckpointError) as error:
                reason = f"{getattr(error, 'filename', None) or ''} {getattr(error, 'strerror', None) or error}".strip()
        found = process_group.gather(reason)
        return next((f"{host}: {reason}" for host, reason in zip(self.hosts, found, strict=True) if reason), "")

    def _intact(self, step: int, is_here: bool) -> list[set[str]]:
        """Return which files of a generation each node has a proven copy of: one node of each file, its writer's if
        that is not damaged. Whether the other copy is intact does not matter until somebody needs it.
        """
        folder = self.folder / directory.checkpoint_name(step)
        found = process_group.gather({name for name in self._files if is_here and (folder / name).exists()})
        # Of a node's ranks all see the same; rank N writes FILE-0000N.
        there = [(node, ranks, found[ranks[0]]) for node, ranks in enumerate(self.nodes)]
        left = {
            name: sorted(
                (all(f"-{rank:05d}" not in name for rank in ranks), node) for node, ranks, has in there if name in has
            )
            for name in self._files
        }
        held: list[set[str]] = [set() for _ in self.nodes]
        self._read = set()
        while turn := {name: nodes.pop(0)[1] for name, nodes in left.items() if nodes}:
            mine = {name for name, node in turn.items() if node == self.node}
            self._read |= mine
            proven = self._proven(folder, mine)
            held = [names | more for names, more in zip(held, proven, strict=True)]
            left = {name: left[name] for name in turn.keys() - set().union(*proven)}
        return held

    def _proven(self, folder: Path, names: Collection[str]) -> list[set[str]]:
        """Return those that are intact, on each node, of the files that it names and has; warn of damaged ones."""
        here = self.nodes[self.node]
        own = [name for name in sorted(names) if (folder / name).exists()][here.index(self.rank) :: len(here)]
        parts = process_group.gather(directory.file_problems(folder, {name: self._files[name] for name in own}))
        for host, part in zip(self.hosts, parts, strict=True):
            for problem in filter(None, part.values()):
                warn(
                    "the copy of step {step} in the memory of {host}: {problem}",
                    step=directory.step_of(folder),
                    host=host,
                    problem=problem,
                )
        return [{name for rank in ranks for name, wrong in parts[rank].items() if not wrong} for ranks in self.nodes]

    def _lay_out(self, step: int) -> Path | None:
        """Make a folder of links to what this node has, and of the rest but the content of fragments; None: warned."""
        kept = self.folder / directory.checkpoint_name(step)
        target = self.folder / _RESUME / kept.name
        heads: dict[str, bytes] = {}
        lacking = [self._files.keys() - held for held in self._held]

        def link() -> str:
            if reason := self._made():  # on a node that has just come
                return reason
            _removed(*(other for other in self.folder.glob("*") if other != kept))  # room for what comes
            for name in self._files:
                (target / name).parent.mkdir(parents=True, exist_ok=True)
            for name in self._held[self.node]:
                os.link(kept / name, target / name)
                if name.startswith(directory.FRAGMENTS) and any(name in names for names in lacking):
                    with open(kept / name, "rb") as file:
                        heads[name] = file.read(directory.read_header(kept / name)[1])
            return ""

        def stub() -> str:
            for name in lacking[self.node] & found.keys():
                with open(target / name, "wb") as file:
                    file.write(found[name])
                    file.truncate(self._files[name]["size_bytes"])  # takes no memory
            return ""

        reason = self._on_nodes(link)
        found = {name: head for part in process_group.gather(heads) for name, head in part.items()}
        reason = reason or self._on_nodes(stub)
        small = [{name for name in names if not name.startswith(directory.FRAGMENTS)} for names in lacking]
        if reason := reason or self._fetch(target, small):
            warn("the copy of step {step} in memory cannot be used: {reason}.", step=step, reason=reason)
            return None
        return target

    def _fetch(self, target: Path, wanted: Sequence[Collection[str]]) -> str:
        """Send each node the files that it lacks, one after another; return why not."""
        reason = ""
        for name, (node, names) in ((name, one) for name in sorted(self._files) for one in enumerate(wanted)):
            if name not in names:
                continue
            holders = [number for number, held in enumerate(self._held) if name in held]
            source, place = self.nodes[holders[node % len(holders)]][0], self.nodes[node][0]
            sends = {name: self._files[name]["size_bytes"]}
            try:
                if self.rank == source:
                    self._swap(target, (place, sends), (source, {}))
                elif self.rank == place:
                    self._swap(target, (place, {}), (source, sends))
            except (OSError, RuntimeError) as error:  # also where the other has failed
                reason = reason or reason_of(error)
        return next(filter(None, process_group.gather(reason)), "")

    def _swap(self, folder: Path, out: tuple[int, Mapping[str, int]], into: tuple[int, Mapping[str, int]]) -> None:
        """Send files to a rank, and write what another sends at the same time: at most a block of each is in memory.
        OSError, if something could not be written, once the other has sent all of it.
        """
        (target, sends), (source, comes), failed = out, into, None
        try:
            for name in comes:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(b"")
        except OSError as error:
            failed = error
        for sent, (name, count) in zip_longest(_blocks(folder, sends), _places(comes), fillvalue=("", 0)):
            found, requests = torch.empty(count, dtype=torch.uint8), []
            if isinstance(sent, torch.Tensor):
                requests.append(distributed.isend(sent, target, group=self.group))
            if count:
                requests.append(distributed.irecv(found, source, group=self.group))
            for request in filter(None, requests):
                request.wait()
            try:
                with open(folder / name if count else os.devnull, "ab") as file:
                    file.write(found.numpy().tobytes())
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed


def _places_of_ranks(rank: int) -> list[tuple[Any, str]]:
    """Return of each rank which memory it has, and its host. Neither tells the other: containers of one machine may
    share /dev/shm or have their own, whatever their names. So each rank looks whose marks it sees in its own.
    """
    mark, host = Path(), socket.gethostname()
    with suppress(OSError):  # where it cannot write nothing is kept
        mark = Path(tempfile.mkdtemp(prefix=f"toolkit-{rank}-", dir=SHM))
    marks = process_group.gather(mark.name)
    places = process_group.gather((tuple(name for name in marks if name and (SHM / name).exists()) or host, host))
    if mark.name:
        mark.rmdir()
    return places


def _removed(*folders: Path) -> str:
    """Remove folders; return "", as nothing speaks against it."""
    for folder in folders:
        shutil.rmtree(folder)
    return ""


def _keeper(nodes: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """Return which rank of the next node keeps a rank's files, and in which turn it gets them."""
    node = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    there = nodes[(node + 1) % len(nodes)]
    turn, place = divmod(nodes[node].index(rank), len(there))
    return turn, there[place]


def _blocks(folder: Path, files: Mapping[str, int]) -> Iterator[torch.Tensor]:
    """Yield the bytes of files, in blocks of those sizes that `_places` says."""
    for name in files:
        with open(folder / name, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield torch.frombuffer(bytearray(block), dtype=torch.uint8)


def _places(files: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield for each block which file it is of, and its bytes."""
    for name, size in files.items():
        for place in range(0, size, _BLOCK_BYTES):
            yield name, min(_BLOCK_BYTES, size - place)
