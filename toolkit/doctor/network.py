"""Whether machines reach each other on the addresses that collectives use, with packets of full size, and how fast."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

LIMIT_S = 3.0
_SIZE = struct.Struct("!Q")
_ENOUGH_S = 0.15
_FIRST, _MOST = 1 << 16, 1 << 28
# Linux' numbers, which Python's socket module does not name: never split a packet on its way.
_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3
_IP_AND_UDP_HEADERS = 28
_BRIDGES = ("lo", "docker", "virbr")


class Listener:
    """Answers other nodes until it is closed: as many bytes as they ask for, and datagrams as they came.

    `port`: where the ranks are to meet, on the first node; 0 elsewhere. An OSError if the address is not this node's,
    or the port is taken.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        self._stop = threading.Event()
        self._sockets: list[socket.socket] = []
        try:
            self.tcp = self._listen(address, 0)
            if port:
                self._listen("", port)  # as PyTorch's store does
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._sockets.append(udp)
            udp.bind((address, 0))
            udp.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
            udp.settimeout(0.2)
            self.udp = int(udp.getsockname()[1])
            threading.Thread(target=self._echo, args=(udp,), daemon=True).start()
        except OSError:
            self.close()
            raise

    def _listen(self, address: str, port: int) -> int:
        server = socket.create_server((address, port), backlog=1024)
        server.settimeout(0.2)
        self._sockets.append(server)
        threading.Thread(target=self._accept, args=(server,), daemon=True).start()
        return int(server.getsockname()[1])

    def _accept(self, server: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=_serve, args=(connection,), daemon=True).start()

    def _echo(self, udp: socket.socket) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError, OSError):
                data, sender = udp.recvfrom(1 << 16)
                udp.sendto(data, sender)

    def close(self) -> None:
        """Stop answering."""
        self._stop.set()
        for one in self._sockets:
            one.close()


def _serve(connection: socket.socket) -> None:
    block = bytes(1 << 18)
    with connection, contextlib.suppress(OSError):
        connection.settimeout(60)
        while request := _receive(connection, _SIZE.size):
            (left,) = _SIZE.unpack(request)
            if not left:
                connection.sendall(request)
            while left:
                left -= connection.send(block[: min(left, len(block))])


def _receive(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes, b"" at the end of the connection."""
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            return b""
        found += more
    return found


def can_connect(address: str, mtu: int, peers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Try all `peers` at once: host -> `address`, `tcp` and `udp` port, and of the first [address, port] to `meet`.

    Return of each host the `error` of the connection, the `meet` error of the meeting place, "" where it works, and
    `mtu`, whether a packet of full size came back; None where it could not be tried.
    """
    with ThreadPoolExecutor(max_workers=64) as pool:
        found = {host: pool.submit(_try, address, mtu, peer) for host, peer in peers.items()}
        return {host: future.result() for host, future in found.items()}


def _try(address: str, mtu: int, peer: Mapping[str, Any]) -> dict[str, Any]:
    error = _hello(address, peer["address"], peer["tcp"])
    meet = _hello("", *peer["meet"]) if "meet" in peer else ""  # PyTorch's store takes whichever card leads there
    return {"error": error, "meet": meet, "mtu": None if error else _full_size(address, mtu, peer)}


def _hello(address: str, other: str, port: int) -> str:
    source = (address, 0) if address else None
    try:
        with socket.create_connection((other, port), timeout=LIMIT_S, source_address=source) as connection:
            connection.sendall(_SIZE.pack(0))
            return "" if _receive(connection, _SIZE.size) else "somebody else answers"
    except OSError as error:
        return error.strerror or str(error)


def _full_size(address: str, mtu: int, peer: Mapping[str, Any]) -> bool | None:
    """Whether a packet as large as the card takes comes back unsplit; None where not even a small one does.

    These are datagrams, which a firewall may drop that lets the collectives' connections pass.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind((address, 0))
        udp.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        udp.settimeout(LIMIT_S / 6)

        def comes_back(size: int) -> bool:
            for _ in range(3):
                with contextlib.suppress(OSError):
                    udp.sendto(bytes(size), (peer["address"], peer["udp"]))
                    if len(udp.recv(1 << 16)) == size:
                        return True
            return False

        return comes_back(min(mtu, 65535) - _IP_AND_UDP_HEADERS) if comes_back(64) else None


def speed(address: str, peer: Mapping[str, Any]) -> float | str:
    """Return how fast a node sends to this one in 10^6 bytes per second, or the error."""
    try:
        with socket.create_connection(
            (peer["address"], peer["tcp"]), timeout=LIMIT_S, source_address=(address, 0)
        ) as connection:
            connection.settimeout(10 * LIMIT_S)
            into, size = bytearray(1 << 20), _FIRST
            while True:
                started, left = time.perf_counter(), size
                connection.sendall(_SIZE.pack(size))
                while left:
                    got = connection.recv_into(into, min(left, len(into)))
                    if not got:
                        raise ConnectionResetError("the connection broke off")
                    left -= got
                seconds = time.perf_counter() - started
                if seconds > _ENOUGH_S or size >= _MOST:
                    return size / 1e6 / seconds
                size *= 4
    except OSError as error:
        return error.strerror or str(error)


def chosen(network: Mapping[str, Any], interface: str, backend: str) -> tuple[str, dict[str, Any]]:
    """Return the network card that a backend would take on a machine, and its facts; ("", {}) where there is none.

    gloo takes the one with the address of the machine's own name, NCCL an InfiniBand card, else the first that is no
    loopback and no bridge (NCCL 2.27, socket.cc, ncclFindInterfaces; torch 2.13, ProcessGroupGloo).
    """
    cards: Mapping[str, dict[str, Any]] = network["cards"]
    asked = interface or network["asked"][backend]
    if asked:
        names = [name for name in cards if _matches(name, asked, backend)]
    elif backend == "gloo":
        names = [name for name, card in cards.items() if card["address"] == network["own_name"]]
        if not names and network["own_name"].startswith("127."):  # all of 127/8 is loopback: Debian's 127.0.1.1
            names = [name for name, card in cards.items() if card["address"].startswith("127.")]
    else:
        up = [name for name, card in cards.items() if card["up"]]
        names = [name for name in up if name.startswith("ib")]
        names = names or [name for name in up if not name.startswith(_BRIDGES)] or up
    return (names[0], cards[names[0]]) if names else ("", {})


def _matches(name: str, asked: str, backend: str) -> bool:
    """NCCL takes beginnings of names, separated by commas, = before whole names and ^ before what is left out."""
    if backend == "gloo":
        return name == asked.split(",")[0]
    exact, inverse = asked.startswith("="), asked.startswith("^")
    listed: Sequence[str] = asked.lstrip("=^").split(",")
    return any(name == one if exact else name.startswith(one) for one in listed) != inverse
