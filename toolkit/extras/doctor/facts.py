"""What one machine is like: versions, code, recipe, GPUs, disks, network interfaces, limits. `findings` compares.

Disks are measured past the memory that the system lends them. Also whether machines reach each other on the addresses
that collectives use, with packets of full size, and how fast.
"""

import contextlib
import hashlib
import mmap
import os
import platform
import resource
import shutil
import socket
import socketserver
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from toolkit import children
from toolkit.config import devices, dotted_keys, files, load, native_ops, schema
from toolkit.launch.variables import EXPORTED_PREFIXES
from toolkit.messages import ConfigError, ToolkitError
from toolkit.plan import kernels
from toolkit.plan.model_config import config_of

_DISK_BLOCK = 1 << 22
_DISK_BLOCKS = 64


def disk_speed(folder: Path) -> dict[str, float | str]:
    """Write and read 256 MiB, around the page cache where that is possible. Return `write_mb_s` and `read_mb_s`, in
    10^6 bytes/s, or `error`.
    """
    block = mmap.mmap(-1, _DISK_BLOCK)  # direct access needs memory that begins with a page
    block.write(os.urandom(_DISK_BLOCK))  # a disk that compresses would write zeros too fast
    try:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".doctor-")
        os.close(handle)
        try:
            return {
                "write_mb_s": _measure_pass(name, os.O_WRONLY, block),
                "read_mb_s": _measure_pass(name, os.O_RDONLY, block),
            }
        finally:
            os.unlink(name)
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _measure_pass(name: str, mode: int, block: mmap.mmap) -> float:
    """Write or read a file block by block, by `mode`, around the page cache if possible; return 10^6 bytes/s."""
    try:
        handle = os.open(name, mode | os.O_DIRECT)
    except OSError:  # tmpfs and some network file systems have no direct access
        handle = os.open(name, mode)
    try:
        started = time.perf_counter()
        for _ in range(_DISK_BLOCKS):
            if mode == os.O_WRONLY:
                os.write(handle, block)
            else:
                os.readv(handle, [block])
        if mode == os.O_WRONLY:
            os.fsync(handle)
        return _DISK_BLOCK * _DISK_BLOCKS / 1e6 / (time.perf_counter() - started)
    finally:
        os.close(handle)


PACKAGES = (
    *("torch", "deepspeed", "transformers", "datasets", "hydra-core", "numpy", "tokenizers", "safetensors"),
    *("flash-linear-attention", "causal-conv1d", "mamba-ssm"),  # transformers computes linear attention with them
)
FORWARDED = (*EXPORTED_PREFIXES, "NCCL", "ASCEND", "HCCL")
"""Beginnings of the variables that DeepSpeed 0.19.8 hands on to other machines with GPUs or with Ascend NPUs."""
MATTERING = (
    *("CUDA_", "DS_", "GLOO_", "HF_", "LD_", "MODELSCOPE_", "NCCL_", "OMP_", "TOKENIZERS_", "TORCH_", "TRANSFORMERS_"),
    *("ASCEND_", "HCCL_", "HIP_", "HSA_", "RCCL_", "ROCM_"),
    *("WANDB_", "XDG_CACHE_HOME", "http_proxy", "https_proxy"),
)
"""Beginnings of the variables by which runs differ."""
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
}
ROOT = Path(__file__).parents[3]
_COMMAND_S = 20.0
_BLOCK, _BLOCKS, _BLOCKS_OF_ALL = 1 << 16, 16, 4096


def of_machine(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what is known of this machine without a recipe; `environ`: the variables of the ranks. `memory` is in
    bytes; of `limits` -1 is none; `environment` has hashes, as values may be secret.
    """
    return {
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "nccl": version("nvidia-nccl-cu13") or version("nvidia-nccl-cu12"),
        "code": _code(),
        "accelerator": devices.device_here(environ),
        "is_cpu_by_default": devices.is_cpu_by_default(environ),
        "gpus": _gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": psutil.virtual_memory().available,
        "network": _network(environ),
        "limits": {name: resource.getrlimit(limit)[0] for name, limit in _LIMITS.items()},
        "locks": [str(path) for path, _ in native_ops.stale_build_locks(environ)],
        "environment": {name: hashed(value) for name, value in environ.items() if name.startswith(MATTERING)},
    }


def of_recipe(cfg: schema.RunConfig, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what is known of this machine for a recipe: its settings, files, caches, disks, ops and kernels."""
    offloading = (cfg.zero.offload_optimizer, cfg.zero.offload_param)
    nvme = {section.nvme_path for section in offloading if section.device is schema.Device.nvme}
    shm = {"/dev/shm": "shm"}  # noqa: S108 -- DataLoader workers, NCCL and DeepSpeed share memory through it
    needed = native_ops.needed_ops(cfg, environ)
    # Directory -> what it is for.
    folders = {cfg.run.dir: "run.dir", cfg.prepare.dir: "prepare.dir", **shm, **dict.fromkeys(nvme, "nvme")}
    return {
        "recipe": {key: str(value) for key, value in dotted_keys.leaves(load.to_dict(cfg))},
        "files": _files(cfg),
        "stores": sorted(path.parent.name for path in Path(cfg.prepare.dir).glob("stores/*/manifest.json")),
        "disks": {name: _disk(Path(folder)) for folder, name in folders.items()},
        "nvme": {folder: disk_speed(Path(folder)) for folder in nvme},
        "ops": {
            "needed": needed,
            "built": native_ops.built_ops(needed, environ),
            "lacking": native_ops.lacking_tools(needed, environ),
        },
        "kernels": _missing_kernels(cfg),
    }


def _missing_kernels(cfg: schema.RunConfig) -> str:
    """Return a sentence about the optional packages that the recipe's model would use and that are not installed; "" if
    there are none, for a random model, and where the model's type is not known.
    """
    if cfg.model.init is schema.Init.random:  # a GLM, which uses none of them
        return ""
    try:
        return kernels.describe_missing(config_of(cfg))
    except ConfigError:  # neither its config.json nor its group is here
        return ""


def version(name: str) -> str:
    """Return the version of an installed package, "" if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _run(*command: str) -> str | None:
    """Return what a command prints, "" if it fails or is not installed, None if it takes more than _COMMAND_S."""
    try:
        done = children.run(command, capture_output=True, text=True, timeout=_COMMAND_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return None
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _code() -> dict[str, Any]:
    """Return the commit, and a hash of each file that a run is made of: copies need not be repositories."""
    # A wheel has conf/ and recipes/ inside the package.
    tables = ("toolkit/**/*.yaml", "toolkit/**/*.json", "conf/**/*.yaml", "recipes/*.yaml")
    patterns = ("run.py", "toolkit/**/*.py", *tables)
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    files = {str(path.relative_to(ROOT)): hashed(path.read_bytes()) for path in sorted(paths)}
    return {"commit": _run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD") or "", "files": files}


def hashed(content: bytes | str) -> str:
    """Return enough of a hash to compare contents by."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def _gpus() -> dict[str, Any]:
    """Return the `driver`, and as `cards` of each NVIDIA GPU index, name, MiB (0: unknown) and number of processes;
    `late`: whether nvidia-smi gave no answer in time.
    """
    fields = "index,uuid,name,driver_version,memory.total,memory.free"
    listing = _run("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits")
    if listing is None:
        return {"driver": "", "cards": [], "late": True}
    uuids = _run("nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader") if listing else ""
    used = (uuids or "").split()  # the GPU of each process that computes
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    rows = [row for row in rows if len(row) == len(fields.split(","))]  # others are warnings
    cards = []
    for index, uuid, name, _, *sizes in rows:
        mib, free_mib = (int(size) if size.isdecimal() else 0 for size in sizes)
        cards.append({"index": index, "name": name, "mib": mib, "free_mib": free_mib, "used_by": used.count(uuid)})
    driver = rows[0][3] if rows else ""
    return {"driver": driver, "cards": cards, "late": False}


def _network(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return name -> facts of each network card with an IPv4 address as `cards`; and by what collectives choose one:
    the address of the machine's `own_name`, the `first` address of `hostname -I`, which DeepSpeed makes the meeting
    place, and as `asked` the cards that variables name, by backend.
    """
    stats = psutil.net_if_stats()
    cards = {}
    for name, addresses in psutil.net_if_addrs().items():
        ipv4_addresses = [address.address for address in addresses if address.family is socket.AF_INET]
        if ipv4_addresses and name in stats:
            state = stats[name]
            cards[name] = {"address": ipv4_addresses[0], "up": state.isup, "mtu": state.mtu}
    try:
        # gloo takes the address of the machine's own name (torch 2.13, ProcessGroupGloo::createDefaultDevice).
        own_name = socket.gethostbyname(socket.gethostname())
    except OSError:
        own_name = ""
    return {
        "cards": cards,
        "own_name": own_name,
        "first": next(iter((_run("hostname", "-I") or "").split()), ""),
        "asked": {name: environ.get(f"{name.upper()}_SOCKET_IFNAME", "") for name in ("gloo", "nccl")},
    }


def _files(cfg: schema.RunConfig) -> dict[str, Any]:
    """Return "model.path" and "data N" -> `_fingerprint` of the files that the recipe reads."""
    from toolkit.data.data_paths import files_of

    fingerprints: dict[str, Any] = {}
    if cfg.model.init is schema.Init.pretrained:
        fingerprints["model.path"] = _model_fingerprint(cfg.model)
    for number, source in enumerate([*cfg.data.sources, *cfg.data.validation]):
        if source.path:
            fingerprints[f"data {number}"] = _fingerprint(source.path, partial(files_of, source))
    return fingerprints


def _model_fingerprint(model: schema.ModelConfig) -> dict[str, Any]:
    """Return `_fingerprint` of a model's files; {"path", "is_missing"} if it is still to be downloaded."""
    from huggingface_hub import try_to_load_from_cache

    missing = {"path": model.path, "is_missing": True}
    if not model.path:  # it would be the working directory
        return missing
    if not files.is_hub_name(model.path):
        return _fingerprint(model.path, partial(_visible, Path(model.path)))
    cached_config = try_to_load_from_cache(model.path, "config.json", revision=model.revision or None)
    if not isinstance(cached_config, str):
        return missing
    snapshot = Path(cached_config).parent  # …/snapshots/COMMIT, of which the ranks download what is not there
    # Nodes may have other files of the same commit: the commit itself is compared.
    return _fingerprint(model.path, partial(_visible, snapshot)) | {"hash": snapshot.name}


def _visible(folder: Path) -> list[Path]:
    """Return all that is in a folder but what is hidden: notes of downloads and repositories differ everywhere."""
    paths = [(path, path.relative_to(folder).parts) for path in folder.rglob("*")]
    return [path for path, parts in paths if not any(part[0] == "." or part == "__pycache__" for part in parts)]


def _fingerprint(path: str, files: Callable[[], Iterable[Path]]) -> dict[str, Any]:
    """Return `path`, the `bytes` of some files, and a `hash` of their names, sizes and some blocks of each: reading
    whole weights on each machine would take minutes. If they cannot be read, `path` and `error`. `path`: as the recipe
    names the files; `files`: returns them.
    """
    digest, total = hashlib.sha256(), 0
    try:
        paths = sorted(file for file in files() if file.is_file())
        blocks = max(1, min(_BLOCKS, _BLOCKS_OF_ALL // max(1, len(paths))))  # of each file: fewer if there are many
        for file in paths:
            size = file.stat().st_size
            total += size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as handle:
                # Evenly spaced from the file's beginning; a set, as in a small file several are the same.
                for offset in sorted({size * number // blocks for number in range(blocks)}):
                    handle.seek(offset)
                    digest.update(handle.read(_BLOCK))
    except (OSError, ToolkitError) as error:
        return {"path": path, "error": str(error)}
    if not paths:
        return {"path": path, "error": "No such file or directory"}
    return {"path": path, "hash": digest.hexdigest()[:16], "bytes": total}


def _disk(folder: Path) -> dict[str, Any]:
    """Return `path`, the `free` bytes where a folder is or would be made, and the `error` of writing there, or ""."""
    existing, error = nearest(folder), ""
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as caught:
        error = caught.strerror or str(caught)
    return {"path": str(folder.absolute()), "free": shutil.disk_usage(existing).free, "error": error}


def nearest(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists: a run's directory is only made when it starts."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


LIMIT_S = 3.0
_SIZE = struct.Struct("!Q")
_ENOUGH_S = 0.15
_FIRST, _MOST = 1 << 16, 1 << 28
# Linux' numbers, which Python's socket module does not name: never split a packet on its way.
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3
_IP_AND_UDP_HEADERS = 28
_BRIDGES = ("lo", "docker", "virbr")


class _Bytes(socketserver.StreamRequestHandler):
    """Sends as many bytes as a request (_SIZE) asks for; if that is 0, the request itself, as a sign of life."""

    timeout = 60

    def handle(self) -> None:
        block = bytes(1 << 18)
        with contextlib.suppress(OSError):
            while len(request := self.rfile.read(_SIZE.size)) == _SIZE.size:
                (left,) = _SIZE.unpack(request)  # bytes that are still to be sent
                if not left:
                    self.connection.sendall(request)
                while left:
                    left -= self.connection.send(block[: min(left, len(block))])


class _Echo(socketserver.BaseRequestHandler):
    """Sends a datagram back as it came."""

    def handle(self) -> None:
        data, udp = self.request
        with contextlib.suppress(OSError):
            udp.sendto(data, self.client_address)


class _Connections(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
    request_queue_size = 1024


class _Datagrams(socketserver.UDPServer):
    max_packet_size = 1 << 16

    def server_bind(self) -> None:
        super().server_bind()
        self.socket.settimeout(0.2)
        self.socket.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)


class Listener:
    """Answers other nodes until it is closed, so that they can test their way to this one.

    Over TCP it sends as many bytes as it is asked for, over UDP each datagram back.

    Args:
        address: of the network card that the collectives will use.
        port: where the ranks are to meet, on the first node; 0 elsewhere.

    Raises:
        OSError: the address is not this node's, or the port is taken.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        """Begin to answer at `address`, of the network card that collectives will use, on free ports, `tcp` and `udp`;
        with a `port`, where ranks are to meet, also there. OSError for an address of another node, or a port in use.
        """
        self._servers: list[socketserver.TCPServer] = []
        try:
            self.tcp: int = self._start_server(_Connections((address, 0), _Bytes))
            if port:
                self._start_server(_Connections(("", port), _Bytes))  # on every card, as PyTorch's store does
            self.udp: int = self._start_server(_Datagrams((address, 0), _Echo))
        except OSError:
            self.close()  # those that have begun
            raise

    def _start_server(self, server: socketserver.TCPServer) -> int:
        """Let a server answer in a thread until `close`; return its port."""
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        return int(server.server_address[1])

    def close(self) -> None:
        """Stop answering."""
        for server in self._servers:
            server.shutdown()
            server.server_close()


def can_connect(address: str, mtu: int, peers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Try to reach all `peers` at once: host -> `address`, `tcp` and `udp` port, and of the first node `meet`,
    [address, port] where ranks meet. `address`, `mtu`: this node's, and its card's largest packet in bytes. Return host
    -> `error` of the connection and `meet`, that of the meeting place, "" where it works; and `mtu`, whether a packet
    of full size came back, None where it could not be tried.
    """
    with ThreadPoolExecutor(max_workers=64) as pool:
        attempts = {host: pool.submit(_reach, address, mtu, peer) for host, peer in peers.items()}
        return {host: future.result() for host, future in attempts.items()}


def _reach(address: str, mtu: int, peer: Mapping[str, Any]) -> dict[str, Any]:
    """Return for one peer what `can_connect` does."""
    error = _hello(address, peer["address"], peer["tcp"])
    meet = _hello("", *peer["meet"]) if "meet" in peer else ""  # PyTorch's store takes whichever card leads there
    return {"error": error, "meet": meet, "mtu": None if error else _full_size(address, mtu, peer)}


def _hello(address: str, other: str, port: int) -> str:
    """Connect to another node's `Listener`, from the card with this `address` ("": whichever leads there); return the
    error, "" if it answers as a `Listener` does.
    """
    source = (address, 0) if address else None
    try:
        with socket.create_connection((other, port), timeout=LIMIT_S, source_address=source) as connection:
            connection.sendall(_SIZE.pack(0))  # asks for a sign of life, see `_Bytes`
            answer = connection.makefile("rb").read(_SIZE.size)
            return "" if len(answer) == _SIZE.size else "somebody else answers"
    except OSError as error:
        return error.strerror or str(error)


def _full_size(address: str, mtu: int, peer: Mapping[str, Any]) -> bool | None:
    """Whether a packet as large as the card takes comes back unsplit; None where not even a small one does.
    These are datagrams, which a firewall may drop that lets the collectives' connections pass.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind((address, 0))
        udp.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        udp.settimeout(LIMIT_S / 6)  # six times at most: of two sizes three datagrams each

        def comes_back(size: int) -> bool:
            """Whether one of three datagrams of this size comes back."""
            for _ in range(3):
                with contextlib.suppress(OSError):
                    udp.sendto(bytes(size), (peer["address"], peer["udp"]))
                    if len(udp.recv(1 << 16)) == size:
                        return True
            return False

        if not comes_back(64):
            return None
        return comes_back(min(mtu, 65535) - _IP_AND_UDP_HEADERS)  # loopback's MTU is more than a packet's 65535


def link_speed(address: str, peer: Mapping[str, Any]) -> float | str:
    """Return how fast a node sends to this one in 10^6 bytes per second, or the error. More and more is asked for,
    until it takes long enough to be measured. `address`: this node's; `peer`: as of `can_connect`.
    """
    try:
        with socket.create_connection(
            (peer["address"], peer["tcp"]), timeout=LIMIT_S, source_address=(address, 0)
        ) as connection:
            connection.settimeout(10 * LIMIT_S)
            buffer, size = bytearray(1 << 20), _FIRST
            while True:
                started, left = time.perf_counter(), size
                connection.sendall(_SIZE.pack(size))
                while left:
                    received = connection.recv_into(buffer, min(left, len(buffer)))
                    if not received:
                        raise ConnectionResetError("the connection broke off")
                    left -= received
                seconds = time.perf_counter() - started
                if seconds > _ENOUGH_S or size >= _MOST:
                    return size / 1e6 / seconds
                size *= 4
    except OSError as error:
        return error.strerror or str(error)


def chosen_card(network: Mapping[str, Any], interface: str, backend: str) -> tuple[str, dict[str, Any]]:
    """Return the name of the network card that a backend would take on a machine, and its facts (`address`, `up`,
    `mtu`); ("", {}) where there is none. `network`: as of `_network`; `interface`: the card that the config names, ""
    for none.

    gloo takes the one with the address of the machine's own name, NCCL an InfiniBand card, else the first that is no
    loopback and no bridge (NCCL 2.27, socket.cc, ncclFindInterfaces; torch 2.13, ProcessGroupGloo).
    """
    cards: Mapping[str, dict[str, Any]] = network["cards"]
    asked = interface or network["asked"].get(backend, "")  # no variable of HCCL is read
    if asked:
        names = [name for name in cards if _matches(name, asked, backend)]
    elif backend == "gloo":
        names = [name for name, card in cards.items() if card["address"] == network["own_name"]]
        if not names and network["own_name"].startswith("127."):  # all of 127/8 is loopback: Debian's 127.0.1.1
            names = [name for name, card in cards.items() if card["address"].startswith("127.")]
    else:
        up = [name for name, card in cards.items() if card["up"]]
        infiniband = [name for name in up if name.startswith("ib")]
        names = infiniband or [name for name in up if not name.startswith(_BRIDGES)] or up
    return (names[0], cards[names[0]]) if names else ("", {})


def _matches(name: str, asked: str, backend: str) -> bool:
    """Whether a variable's value `asked` chooses the card `name`. gloo takes the first name of a list. NCCL takes
    beginnings of names, separated by commas, = before whole names and ^ before what is left out: "^docker,lo" is every
    card but these.
    """
    if backend == "gloo":
        return name == asked.split(",")[0]
    is_exact, is_excluding = asked.startswith("="), asked.startswith("^")
    listed: Sequence[str] = asked.lstrip("=^").split(",")
    is_listed = any(name == pattern if is_exact else name.startswith(pattern) for pattern in listed)
    return is_listed != is_excluding
