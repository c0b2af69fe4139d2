"""Copies in the memory of made-up nodes, without a model: one argument, the folder that holds each node's /dev/shm.

Five ranks on three nodes of two, one and two. What the files hold is made up, too.
"""

import hashlib
import os
import shutil
import socket
import sys
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from unittest import mock

from toolkit.checkpoint import directory, node_memory
from toolkit.config.schema import DistributedConfig
from toolkit.distributed import process_group
from toolkit.launch import environment

NODES = {"a": (0, 1), "b": (2,), "c": (3, 4)}
WORDS: list[str] = []
HASHED: list[Path] = []
SHA256 = directory.sha256
node_memory.warn = lambda template, **values: WORDS.append(template.format(**values))
node_memory._BLOCK_BYTES = 1000  # several for each file
RANKS = environment.detect(os.environ)
NODE = next(name for name, ranks in NODES.items() if RANKS.rank in ranks)
ROOT = Path(sys.argv[-1])


def content_of(rank: int, step: int) -> bytes:
    """Return the bytes of a rank's fragments: a header, and numbers."""
    return (8).to_bytes(8, "little") + b'{"a": 1}' + bytes([rank, step]) * (700 + 400 * rank)


def write(copies: node_memory.Copies, step: int) -> None:
    """Write a generation, as ranks that save do."""
    folder, reason = copies.begin(step, 10_000)
    assert not reason, reason
    mine = {f"fragments-{RANKS.rank:05d}.safetensors": content_of(RANKS.rank, step)}
    mine |= {"model/card.json": b"{}", "state.json": b"1" * 2500} if RANKS.rank == 0 else {}
    for name, content in mine.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    copies.exchange(folder, [folder / name for name in mine])
    records = {
        name: directory.FileRecord(len(content), hashlib.sha256(content).hexdigest()) for name, content in mine.items()
    }
    everybody = {name: one for part in process_group.gather(records) for name, one in part.items()}
    assert not copies.commit(step, everybody)


def held(copies: node_memory.Copies, step: int) -> set[str]:
    """Return which ranks' fragments this node has of a generation."""
    return {path.name[14:15] for path in (copies.folder / f"step-{step}").glob(f"{directory.FRAGMENTS}*")}


def hashed() -> str:
    """Return what nodes have hashed since the last call: of fragments the digit of their rank, + for each other."""
    found = [path.name for part in process_group.gather([*HASHED]) for path in part]
    HASHED.clear()
    return "".join(sorted(name[14] if name.startswith(directory.FRAGMENTS) else "+" for name in found))


def noted(path: Path) -> str:
    """Return a file's hash, and note that it was read."""
    HASHED.append(path)
    return SHA256(path)


def wipe(copies: node_memory.Copies, nodes: Collection[str]) -> None:
    """Let nodes lose their memory."""
    if NODE in nodes:
        shutil.rmtree(copies.folder, ignore_errors=True)
    process_group.barrier()


def spoil(copies: node_memory.Copies, step: int, nodes: Collection[str]) -> None:
    """Flip a bit of rank 1's fragments on some nodes."""
    path = copies.folder / f"step-{step}" / "fragments-00001.safetensors"
    if NODE in nodes and copies.is_first:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    process_group.barrier()


def read(copies: node_memory.Copies, found: Path | None, step: int, needed: Collection[int]) -> None:
    """Get what this rank needs, and compare it."""
    assert found is not None
    for rank in range(5):  # readers of headers find all of them
        with open(found / f"fragments-{rank:05d}.safetensors", "rb") as file:
            assert file.read(16) == content_of(rank, step)[:16]
    process_group.barrier()
    assert not copies.complete(found, {f"fragments-{rank:05d}.safetensors" for rank in needed})
    assert (found / "state.json").read_bytes() == b"1" * 2500
    assert (found / "model/card.json").read_bytes() == b"{}"
    there = {path.name: path.read_bytes() for path in found.glob(f"{directory.FRAGMENTS}*")}
    assert {f"fragments-{rank:05d}.safetensors" for rank in needed} <= set(there)
    for name, content in there.items():
        assert content == content_of(int(name[10:15]), step), "nothing is there but what is whole"
    process_group.barrier()


def main() -> None:
    """Go through it."""
    copies = node_memory.Copies("toolkit-test-run-1", timedelta(seconds=60))
    assert [len(ranks) for ranks in copies.nodes] == [2, 1, 2]
    earlier = node_memory.SHM / "toolkit-test-run-0"
    earlier.mkdir(exist_ok=True)
    process_group.barrier()
    assert copies.open(10_000)
    assert not earlier.exists() and copies.folder.stat().st_mode & 0o777 == 0o700
    for step in (2, 4, 6):
        write(copies, step)
    assert sorted(path.name for path in copies.folder.iterdir()) == ["step-4", "step-6"]
    assert held(copies, 6) == {"a": {"0", "1", "3", "4"}, "b": {"0", "1", "2"}, "c": {"2", "3", "4"}}[NODE]
    assert copies.recover(6, 9) is None and copies.recover(0, 3) is None and not WORDS
    # One node is lost, and another has come for it.
    wipe(copies, "b")
    read(copies, copies.recover(0, 6), 6, {(RANKS.rank + 3) % 5})
    assert hashed() == "++0123344", "one copy of each, and those of 3 and 4 that a's ranks read"
    assert [path.name for path in copies.folder.glob("step-*")] == (["step-6"] if NODE != "b" else [])
    assert not WORDS
    process_group.barrier()  # the first rank of a node makes the next generation's folder
    write(copies, 8)
    assert not (copies.folder / "resume").exists()
    # A spoiled file is another node's to give.
    spoil(copies, 8, "a")
    found = copies.recover(0, 8)
    assert hashed() == "++011234"
    read(copies, found, 8, range(5))
    assert hashed() == "0234", "a takes 1 and 2 from b"
    assert len(WORDS) == 1 and "fragments-00001.safetensors: its content is not what was written" in WORDS.pop()
    # Where all of them are spoiled, an earlier generation is taken.
    write(copies, 10)
    write(copies, 12)
    spoil(copies, 12, "ab")
    read(copies, copies.recover(0, 12), 10, [RANKS.rank])
    assert len(WORDS) == 3 and "step 12 in memory is not whole: 1 of its 7 files" in WORDS[2]
    WORDS.clear()
    # Nobody may be sent more than there is room for.
    wipe(copies, "c")
    found = copies.recover(0, 12)
    assert found is not None
    with mock.patch.object(shutil, "disk_usage", return_value=mock.Mock(free=3000 if NODE == "c" else 10**9)):
        reason = copies.complete(found, [f"fragments-{RANKS.rank:05d}.safetensors"])
        assert "--shm-size" in reason, reason
        assert not copies.open(10_000) and "no copies in memory" in WORDS.pop()
        assert "--shm-size" in copies.begin(14, 10_000)[1]
    # Of two neighbours nobody has what the first wrote.
    assert copies.open(10_000)
    write(copies, 14)
    wipe(copies, "ab")
    assert copies.recover(0, 14) is None and "is not whole: 4 of its 7 files" in WORDS.pop()
    # What somebody else may have written is not read.
    wipe(copies, "abc")
    assert copies.open(10_000)
    write(copies, 2)
    copies.folder.chmod(0o755)
    process_group.barrier()
    assert copies.recover(0, 2) is None
    copies.folder.chmod(0o700)
    process_group.barrier()
    assert copies.recover(0, 2)
    copies.close()
    assert not list(node_memory.SHM.iterdir()) and not WORDS


if __name__ == "__main__":
    environment.apply(RANKS, os.environ)
    process_group.start(DistributedConfig(timeout_s=60))
    directory.sha256 = noted
    node_memory.SHM = ROOT / NODE
    node_memory.SHM.mkdir(exist_ok=True)
    socket.gethostname = lambda: f"container-{RANKS.rank}"  # of one machine, some with one /dev/shm
    main()
    process_group.stop()
