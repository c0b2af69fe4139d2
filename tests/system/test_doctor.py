"""`toolkit doctor` on three machines: nothing to say of healthy ones; each planted fault found, named, with a mend."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from cluster import HOSTS, Cluster
from ranks import REPOSITORY, Finished
from shared import tiny

FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
RUN = REPOSITORY / "run.py"
# A stand-in: two GPUs everywhere, one on node2.
NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *compute-apps*) exit 0 ;;
esac
echo "0, GPU-a, NVIDIA X, 570.1, 81559, 81000"
[ "$(hostname)" = node2 ] || echo "1, GPU-b, NVIDIA X, 570.1, 81559, 81000"
"""


@dataclass(frozen=True)
class Place:
    """What the tests here share."""

    cluster: Cluster
    folder: Path
    """Where `toolkit doctor` is typed."""
    words: list[str]
    """Recipe and overrides."""

    def doctor(self, *words: str) -> Finished:
        """Examine the three machines."""
        hostfile = f"hostfile={self.folder / 'hostfile'}"
        return self.cluster.toolkit("doctor", *words, hostfile, *self.words, cwd=self.folder)


@pytest.fixture(scope="module")
def place(cluster: Cluster, rows_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("outer") / "typed here"
    for name in ("runs", "cache", "ops"):
        (folder / name).mkdir(parents=True)
    (folder / "hostfile").write_text("".join(f"{host} slots=2\n" for host in HOSTS))
    shutil.copy(rows_file, folder / "rows.jsonl")
    return Place(cluster, folder, [*tiny(folder / "rows.jsonl", folder, "one"), "launch.env.DS_ACCELERATOR=cpu"])


def test_a_healthy_cluster_has_nothing(place: Place) -> None:
    found = place.doctor()
    assert found.code == 0, found.output
    assert "Nodes: 3, errors: 0, warnings: 0 (" in found.output
    lines = {line.split()[0]: line for line in found.output.splitlines() if line}
    for check in ("ssh", "clocks", "code", "recipe", "versions", "files", "disks", "limits", "environment", "network"):
        assert lines[check].split()[1] == "ok", found.output
    assert "eth0 10.77.0.1, MTU 1500, at least " in lines["network"]
    assert "6 ranks, " in lines["all-reduce"]
    assert not list(place.folder.rglob(".doctor-*"))


def test_this_machine_alone(tmp_path: Path, cluster: Cluster) -> None:
    found = cluster.toolkit("doctor", cwd=tmp_path, DS_ACCELERATOR="cpu")
    assert found.code == 0, found.output
    assert "Nodes: 1, errors: 0, warnings: 0 (" in found.output
    assert "ssh" not in found.output


@contextmanager
def mounted(place: Place, host: str, source: str, target: Path | str, options: str = "--bind") -> Iterator[None]:
    """Let a machine alone see something else at a path."""
    place.cluster.do(host, f"mount {options} '{source}' '{target}'")
    try:
        yield
    finally:
        place.cluster.do(host, f"umount '{target}'")


@contextmanager
def done(place: Place, host: str, script: str, undo: str) -> Iterator[None]:
    place.cluster.do(host, script)
    try:
        yield
    finally:
        place.cluster.do(host, undo)


@contextmanager
def configured(place: Place, host: str, *lines: str) -> Iterator[None]:
    before = place.cluster.configure(host, *lines)
    try:
        yield
    finally:
        place.cluster.restore(host, before)


def changed(place: Place, file: Path, old: str, new: str) -> str:
    """Return the path of a copy of a file with another text in it."""
    text = file.read_text(encoding="utf-8")
    assert old in text
    copy = place.folder / f"changed-{file.name}"
    copy.write_text(text.replace(old, new), encoding="utf-8")
    return str(copy)


@contextmanager
def other_version(place: Place) -> Iterator[None]:
    version = metadata.version("transformers")
    file = Path(str(metadata.distribution("transformers").locate_file(f"transformers-{version}.dist-info/METADATA")))
    copy = changed(place, file, f"Version: {version}", "Version: 4.40.0")
    with mounted(place, "node3", copy, file):
        yield


@contextmanager
def gpus(place: Place) -> Iterator[None]:
    tools = place.folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "nvidia-smi").write_text(NVIDIA_SMI)
    (tools / "nvidia-smi").chmod(0o755)
    with ExitStack() as stack:
        for host in HOSTS:
            path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
            stack.enter_context(configured(place, host, f'SetEnv "PATH={tools}:{path}"'))
        yield


@contextmanager
def stale_lock(place: Place) -> Iterator[None]:
    lock = place.folder / "ops" / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    for path in (lock, lock.parent):
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    with configured(place, "node2", f'SetEnv "TORCH_EXTENSIONS_DIR={place.folder / "ops"}"'):
        yield
    shutil.rmtree(lock.parent)


@contextmanager
def full_disk(place: Place) -> Iterator[None]:
    runs = place.folder / "runs"
    with mounted(place, "node2", "tmpfs", runs, "-t tmpfs -o size=64k"):
        place.cluster.do("node2", f"head -c 65536 /dev/zero > '{runs}/ballast' || true")
        yield


def own_name(place: Place) -> str:
    hosts = place.cluster.folder / "hosts"
    return changed(place, hosts, "10.77.0.2 node2", "127.0.1.1 node2\n10.77.0.2 other")


# Fault -> how it is planted, whether asking each machine about itself is enough, what is said.
PLANTS: dict[str, tuple[Callable[[Place], object], bool, list[str]]] = {
    "ssh refused": (
        lambda p: configured(p, "node2", "AuthorizedKeysFile none"),
        True,
        ["ssh: node2: ", "Permission denied", "ssh-copy-id node2"],
    ),
    "other version": (
        other_version,
        True,
        ["versions: node3 has transformers 4.40.0, node1 has ", "Install the same."],
    ),
    "other code": (
        lambda p: mounted(
            p, "node2", changed(p, REPOSITORY / "run.py", "sys.exit", "sys. exit"), REPOSITORY / "run.py"
        ),
        True,
        ["code: node2 has other code than node1", ": run.py. Bring it to the same commit."],
    ),
    "missing path": (
        lambda p: mounted(p, "node3", "tmpfs", p.folder.parent, "-t tmpfs"),
        True,
        ["ssh: node3: there is no directory ", "typed here"],
    ),
    "different data file": (
        lambda p: mounted(p, "node3", changed(p, p.folder / "rows.jsonl", "apple", "lemon"), p.folder / "rows.jsonl"),
        True,
        ["files: node3: data 0 ", "rows.jsonl holds something else than on node1"],
    ),
    "full disk": (full_disk, True, ["disks: node2: run.dir ", "/runs: No space left on device."]),
    "slot mismatch": (gpus, True, ["GPUs: node2: the hostfile gives it 2 slots, nvidia-smi shows 1 GPU there."]),
    "clock": (
        lambda p: configured(p, "node3", f'SetEnv "LD_PRELOAD={FAKETIME}" "FAKETIME=+10m"'),
        True,
        ["clocks: node3's clock is +600 s off"],
    ),
    "stale lock": (stale_lock, True, ["ops: node2: ", "cpu_adam/lock was left by a build that died", "rm "]),
    "wrong interface": (
        lambda p: mounted(p, "node2", own_name(p), "/etc/hosts"),
        False,
        ["network: node2: its own name means 127.0.1.1", "Set distributed.interface to one of eth0, or"],
    ),
    "blocked port": (
        lambda p: done(
            p,
            "node1",
            "nft add table inet t; nft 'add chain inet t c { type filter hook input priority 0; }';"
            " nft add rule inet t c tcp dport 29500 drop",
            "nft delete table inet t",
        ),
        False,
        ["network: port 29500, where the ranks meet, is closed.", "    node2 -> node1: timed out", "--master_port"],
    ),
    "slow link": (
        lambda p: done(
            p,
            "node3",
            "tc qdisc add dev eth0 root tbf rate 1mbit burst 32kbit latency 400ms",
            "tc qdisc del dev eth0 root",
        ),
        False,
        ["network: slow links", "All links of node3 are slow, no others.", "    node3 -> node1: 0."],
    ),
    "MTU mismatch": (
        lambda p: done(p, "node2", "ip link set eth0 mtu 9000", "ip link set eth0 mtu 1500"),
        False,
        [
            "network: packets of full size get lost",
            "(MTU) differ: node1 1500, node2 9000, node3 1500",
            "packets of full size get lost",
            "    node2 -> node1",
        ],
    ),
    "link down": (
        lambda p: done(p, "node3", "ip link set eth0 down", "ip link set eth0 up"),
        False,
        ["ssh: node3: ssh: connect to host node3 port 22: "],
    ),
    "blackhole route": (
        lambda p: done(p, "node2", "ip route add blackhole 10.77.0.3/32", "ip route del blackhole 10.77.0.3/32"),
        False,
        ["network: nodes do not reach each other", "    node2 -> node3: "],
    ),
}


@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_is_found(fault: str, place: Place) -> None:
    plant, quick, expected = PLANTS[fault]
    if fault == "clock" and FAKETIME is None:
        pytest.skip("Debian's package faketime is not installed")
    started = time.monotonic()
    with plant(place):  # type: ignore[attr-defined]
        started = time.monotonic()
        found = place.doctor(f"quick={str(quick).lower()}")
        seconds = time.monotonic() - started
    assert found.code == 2, found.output
    for text in expected:
        assert text in found.output, found.output
    errors = found.output.partition("Would break the run:\n")[2].partition("\n\n")[0]
    checks = {line.strip().split(":")[0] for line in errors.splitlines() if not line.startswith("    ")}
    assert checks == {expected[0].split(":")[0]}, errors
    if record := os.environ.get("TOOLKIT_RESULTS"):
        with open(record, "a", encoding="utf-8") as file:
            file.write(json.dumps({"fault": fault, "said": errors, "seconds": round(seconds, 1)}) + "\n")
