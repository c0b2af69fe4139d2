"""Ranks that fail, are killed or get a signal: one error is reported once, and all ranks end together.

The first to create the marker FAILED in the run directory reports. Others notice it when their collective breaks, or in
a thread (a rank inside a collective runs no Python), which also reports for a killed rank: Linux wakes the ranks of its
node (pidfd), those of others see its notes in logs/rank-N.json stand still.

Signals (SIGINT, SIGTERM, Slurm's SIGUSR1, SIGHUP) are acted on by all ranks at the next step boundary, by a flag in the
sum that each step needs: launchers signal ranks up to 30 s apart, and peers would wait in a collective.

The watchdog notices a step that does not end, says which rank holds it up, and ends the job, so that it can restart.
The process group's timeout does not reach ZeRO's groups (deepspeed 0.19.8, utils/groups.py), and stopped processes or
lost nodes report nothing. So threads of every rank count into a file and watch the counts and the clock: a rank whose
count stands still hangs. Waiting for data is no hang, and has its own limit.
"""

import errno
import faulthandler
import io
import json
import math
import multiprocessing
import os
import select
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from toolkit import secrets, terminal
from toolkit.distributed.ended import exit_status, kernel_line, out_of_memory_kills
from toolkit.launch import environment, processes
from toolkit.messages import LaunchError, Stopped, ToolkitError, is_failure, joined, system_text, tr

_marker: Path | None = None
_is_mine = False
_known: Collection[int] = ()
_is_watching = False
_over = threading.Event()
_peers: "Peers | None" = None
_reported_peer = threading.Event()

CHECK_EVERY_S = 0.5
GRACE_S = 2.0
_UNHURRIED_RANKS = 64
"""From so many ranks on each looks and writes less often: all of them burden the run directory's server together."""
_PEER_S = 1.5
"""How long a rank whose collective breaks looks for one that was killed, before it takes the error for its own."""


def watch_failures(
    folder: Path | None, rank: int = 0, everybody: "Sequence[Peer]" = (), known: Collection[int] = ()
) -> None:
    """From now on this process ends itself soon after another rank has failed or was killed. `folder`: the run
    directory, None until it is chosen; `known`: inodes of markers of earlier starts, which may seem to be there.
    """
    global _marker, _peers, _known, _is_watching
    _marker, _known = folder / "FAILED" if folder else None, known
    if everybody:
        _peers = Peers(folder, rank, everybody)
    elif _peers is not None and folder is not None:
        _peers.folder = folder / "logs"
        _peers.note()
    if not _is_watching:
        _is_watching = True
        threading.Thread(target=_wait_for_failure, name="failure-watch", daemon=True).start()


def another_has_failed() -> bool:
    """Return whether another rank has put its error into the marker."""
    if _marker is not None and not _is_mine:
        with suppress(OSError):
            return _marker.stat().st_ino not in _known
    return False


def announce_failure(rank: int, text: str, code: int, of_peer: bool = False) -> bool:
    """Claim the failure with the marker's `text` and exit `code`; return whether this rank was first, to report it.
    `of_peer`: the text is of another rank, which was killed.
    """
    global _is_mine
    try:
        file = open(_marker, "x", encoding="utf-8") if _marker else None
    except FileExistsError:
        return _is_mine
    except OSError:
        file = None  # the folder is gone or full: better told twice than not at all
    environment.report_status(code=code, died=time.time())
    if file:
        _is_mine = True
        with suppress(OSError), file:  # a full disk leaves it empty, which still ends the others
            me = f"rank {rank} on {socket.gethostname()} (pid {os.getpid()})"
            file.write(f"{text}\nnoticed by {me}\n" if of_peer else f"{me}, exit code {code}\n{text}\n")
    return True


def end_watch() -> None:
    """This process ends in good order, or has told why not: no more looking."""
    _over.set()
    if _peers is not None:
        _peers.note(left=True)


def _report_peer(peers: "Peers", text: str) -> None:
    if _marker is None and not peers.is_first_alive():  # without a marker to claim, one rank of a node speaks
        _reported_peer.set()
        return
    if announce_failure(peers.rank, text, 1, of_peer=True):
        _reported_peer.set()
        with suppress(OSError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


def stretch(num_ranks: int) -> float:
    """Return by what to multiply the time between two accesses to the run directory."""
    return max(1.0, num_ranks / _UNHURRIED_RANKS)


def _wait_for_failure() -> None:
    while not _over.is_set():
        if _peers is None:
            _over.wait(CHECK_EVERY_S)
        else:
            text = _peers.wait(CHECK_EVERY_S * stretch(len(_peers.everybody)))
            if text and not _over.is_set() and not another_has_failed():
                _report_peer(_peers, text)
            _peers.note()
        if another_has_failed() or _reported_peer.is_set():
            time.sleep(GRACE_S)  # let this rank's own unwinding finish if it can
            if not _over.is_set():
                terminal.show_cursor()
                os._exit(1)


NOTE_EVERY_S = 2.0
SILENT_S = 6.0
"""A note that stands still for so long is that of a process that is gone."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank's process."""

    host: str
    machine: str
    pid: int


def node_id() -> str:
    """Return what tells nodes apart; containers on several may all have one name."""
    boot = ""
    with suppress(OSError):  # Linux alone has it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}"


def me() -> Peer:
    """Return this process."""
    # Containers on one machine do not see each other's processes.
    space = ""
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return Peer(socket.gethostname(), f"{node_id()} {space}", os.getpid())


class Peers:
    """All ranks of a run, as one of them sees them. `folder`: the run directory, None until it is chosen: they write no
    notes then, and those of other nodes cannot be judged.
    """

    def __init__(self, folder: Path | None, rank: int, everybody: Sequence[Peer]) -> None:
        self.folder, self.rank, self.everybody = folder / "logs" if folder else None, rank, list(everybody)
        self.ended = ""
        """What to say of a rank that has ended nobody knows how, where a collective breaks afterwards; "" of none."""
        self._noted = 0.0
        self._has_left = False
        self._noting = threading.Lock()
        self._kills = out_of_memory_kills()
        self._poll = select.poll()
        self._files: dict[int, int] = {}
        """Descriptor -> rank, of those of this machine."""
        for number, peer in enumerate(everybody):
            if number != rank and peer.machine == everybody[rank].machine:
                with suppress(OSError, AttributeError):  # an old kernel: its launcher alone notices
                    handle = os.pidfd_open(peer.pid)
                    self._files[handle] = number
                    self._poll.register(handle, select.POLLIN)
        self.note()

    def is_first_alive(self) -> bool:
        """Whether no rank of this node with a lower number is left."""
        return all(rank > self.rank for rank in self._files.values())

    def note(self, left: bool = False) -> None:
        """Write down that this rank is there, or that it has left in good order, which is its last note."""
        is_early = time.monotonic() - self._noted < NOTE_EVERY_S * stretch(len(self.everybody))
        if self.folder is None or (is_early and not left):
            return
        path = self.folder / f"rank-{self.rank}.json"
        new = path.with_name(f".{path.name}")
        with self._noting, suppress(OSError, psutil.Error):  # the watching thread notes too
            if self._has_left:
                return
            self._noted, self._has_left = time.monotonic(), left
            known = {"rss": psutil.Process().memory_info().rss, "time": time.time(), "left": left}
            new.write_text(json.dumps({**asdict(self.everybody[self.rank]), **known}), encoding="utf-8")
            os.replace(new, path)

    def wait(self, seconds: float) -> str:
        """Wait until a rank on this node ends out of order; return what to report, "" if it reported itself."""
        for handle, _ in self._poll.poll(1000 * seconds):
            rank = self._files.pop(handle)
            status = exit_status(self.everybody[rank].pid)  # at once: its launcher takes it away
            self._poll.unregister(handle)
            os.close(handle)
            known = self._read(rank)
            if status is None and self.folder is None:  # without notes it may have ended in good order
                self.ended = tr(
                    "rank {rank} on {host} (pid {pid}) has ended, and its launcher has its exit status: if it has "
                    "printed no error, it was killed; see dmesg, or ask the scheduler.",
                    rank=rank,
                    host=self.everybody[rank].host,
                    pid=self.everybody[rank].pid,
                )
            is_killed = self.folder is not None if status is None else os.WIFSIGNALED(status)
            if is_killed and not known.get("left"):
                return self._killed(rank, status, known)
        return ""

    def silent(self, seconds: float = SILENT_S) -> str:
        """Return what to say of ranks on other machines that do not write any more, after looking for so long."""
        mine = self.everybody[self.rank].machine
        others = [rank for rank, peer in enumerate(self.everybody) if peer.machine != mine]
        if not others or self.folder is None:
            return ""
        before = {rank: self._read(rank) for rank in others}
        time.sleep(seconds * stretch(len(self.everybody)))
        gone = [rank for rank in others if before[rank] == self._read(rank) and not before[rank].get("left")]
        if not gone or len(gone) == len(others) > 1:  # of all the others it is rather this machine that is cut off
            return ""
        return tr(
            "rank {ranks} gives no sign of life any more: killed, or the node or the network to it is gone.",
            ranks=", ".join(f"{rank} ({self.everybody[rank].host})" for rank in gone),
        )

    def _killed(self, rank: int, status: int | None, known: Mapping[str, Any]) -> str:
        peer = self.everybody[rank]
        if status is None:
            text = tr(
                "rank {rank} on {host} (pid {pid}) was killed: it has ended without an error of its own, and its "
                "launcher has its exit status.",
                rank=rank,
                host=peer.host,
                pid=peer.pid,
            )
        else:
            number = os.WTERMSIG(status)
            text = tr(
                "rank {rank} on {host} (pid {pid}) was killed by signal {number} ({name}).",
                rank=rank,
                host=peer.host,
                pid=peer.pid,
                number=number,
                name=next((one.name for one in signal.Signals if one == number), "?"),
            )
        memory = reason = ""
        if "rss" in known:
            memory = tr(
                "It used {used} GiB of memory {seconds} s before.",
                used=f"{known['rss'] / _GIB:.2f}",
                seconds=f"{max(0.0, time.time() - known['time']):.0f}",
            )
        kernel = kernel_line(peer.pid)
        if kernel or out_of_memory_kills() > self._kills:
            reason = tr(
                "The system ran out of memory and ended it. Use less: a smaller batch.micro_per_gpu, no or less "
                "offloading, fewer ranks on this node; `toolkit plan` counts host memory."
            )
        elif status is None or os.WTERMSIG(status) == signal.SIGKILL:
            reason = tr("If it was not killed on purpose, memory may have run out: see dmesg, or ask the scheduler.")
        return joined(text, memory, reason, kernel)

    def _read(self, rank: int) -> dict[str, Any]:
        if self.folder is None:
            return {}
        with suppress(OSError, ValueError):
            return dict(json.loads((self.folder / f"rank-{rank}.json").read_text(encoding="utf-8")))
        return {}


_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_received = ""
_deferred = False


def install_signals() -> None:
    """Catch them. Before `defer` they end this process; afterwards they only raise the flag."""
    act_on_signals_at_once()
    for number in _CAUGHT:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _handle)


def defer_signals() -> None:
    """From now on a signal only raises the flag, which the training loop looks at; after a failure nobody does."""
    global _deferred
    _deferred = True


def act_on_signals_at_once() -> None:
    """From now on (after the loop) a signal ends this process again."""
    global _deferred, _received
    _deferred, _received = False, ""


def _release_signals() -> None:
    """Let a signal end this process without a word again: all is done, and Python is about to end it."""
    for number in _CAUGHT:
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL)


def received_signal() -> str:
    """Return the name of the signal that has come, or ""."""
    return _received


def _handle(number: int, frame: FrameType | None) -> None:
    global _received
    again = bool(_received)
    _received = signal.Signals(number).name
    if not _deferred:
        if again:
            # The first one is already unwinding; the launcher's SIGTERM after a Ctrl-C must not disturb that.
            return
        if _marker and _marker.with_name("DONE").exists():
            done = Stopped(
                "{signal} came after the run had finished: {folder} is complete. Only its report may be missing:  "
                "toolkit report {folder}",
                signal=_received,
                folder=_marker.parent,
            )
            done.exit_code = 0
            raise done
        raise Stopped(
            "stopped by {signal} outside of training steps (pid {pid}). Without a file DONE in its "
            "directory the run is unfinished.",
            signal=_received,
            pid=os.getpid(),
        )


# A launcher ends every rank as soon as one has failed, so a rank that fails a moment before rank 0 must not deprive it
# of its word. After this long without having been ended, the error is this rank's own and it speaks.
OTHER_RANKS_WAIT_S = 5.0
_MACHINE, _READER_GONE = 74, 141
"""Exit codes: a disk or stream that fails; a reader of our output that has ended, as shells report SIGPIPE."""
_OF_DISKS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG),
    errno.EPIPE,
)


def run_guarded(function: Callable[[], int]) -> int:
    """Run a command; report whatever it raises, once over all ranks, and return the exit code."""
    _prepare_process()
    if lost := _lost():
        _say(lost)
        return 1
    try:
        try:
            code = function()
        except BaseException:
            # A signal must not keep the failure from being told: launchers end the ranks that are left at once.
            defer_signals()
            raise
        sys.stdout.flush()  # here, where a full disk behind it can still be told
        end_watch()  # the exit status does not tell other ranks: its launcher may have taken it already
        _release_signals()
        return code
    except ToolkitError as error:
        code = error.exit_code
        _report(f"{type(error).__name__}: {error}", code, agreed=isinstance(error, Stopped))
    except KeyboardInterrupt:
        code = 130
        _report(tr("interrupted."), code)
    except BaseException as error:  # the last resort: whatever it is, it is reported once, with its traceback
        told = _of_the_machine(error) if isinstance(error, OSError) else None
        if told is not None:
            code = _MACHINE if told else _READER_GONE
            if told:
                _report(told, code)
        elif is_failure(error):
            code = 1
            where = tr("rank {rank} on {host}", rank=os.environ.get("RANK", "0"), host=socket.gethostname())
            _report(f"{type(error).__name__} ({where}): {error}", code, trace=traceback.format_exc())
        else:
            raise
    end_watch()
    if _number("WORLD_SIZE", 1) > 1 and "torch" in sys.modules:
        # The other ranks may be gone, and leaving the process group in order would wait for them.
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


def _local_rank() -> int:
    return environment.local_rank or _number("LOCAL_RANK", 0)


def _number(name: str, default: int) -> int:
    """Return a launcher's variable; the default where it is no number, which the command itself reports."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else default


def _prepare_process() -> None:
    """Make sure that nothing about its streams and warnings ends this process."""
    # What is opened next would take the number of a stream that is closed, and get what libraries print.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files need not be UTF-8, and a terminal need not know Chinese: never a reason to end a run.
        sys.stdout.reconfigure(errors="backslashreplace")
    if any(option.startswith("error") for option in sys.warnoptions):
        warnings.resetwarnings()  # PYTHONWARNINGS=error: torch and deepspeed warn as they are imported
        os.environ.pop("PYTHONWARNINGS", None)  # of the processes that this one starts


def _of_the_machine(error: OSError) -> str | None:
    """Return what to say of a disk or stream that fails; "" of a reader that has read enough; None of other errors."""
    if error.errno not in _OF_DISKS:
        return None
    if error.filename is not None:
        return system_text(error)
    try:  # whatever failed has no name: is it the output?
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as of_stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes once more as it ends
        if isinstance(of_stdout, BrokenPipeError):
            return ""
        return tr("cannot write to the standard output: {reason}.", reason=of_stdout.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        places = (str(Path.cwd()), tempfile.gettempdir(), "/dev/shm")  # noqa: S108
        full = [place for place in places if _free_mib(place) < 1]
        if full == ["/dev/shm"]:  # noqa: S108
            return tr(
                "{reason}: /dev/shm, the memory that ranks and the workers of data.num_workers share. Remove what old "
                "processes left there, or give containers more (docker run --shm-size=16g), or set data.num_workers=0.",
                reason=error.strerror,
            )
        return tr(
            "{reason}: {places}. Free some, or choose other directories (run.dir, prepare.dir, TMPDIR).",
            reason=error.strerror,
            places=", ".join(full) or "?",
        )
    return None


def _free_mib(place: str) -> float:
    with suppress(OSError):
        found = os.statvfs(place)
        return found.f_bavail * found.f_frsize / (1 << 20)
    return math.inf


def end_with_launcher() -> None:
    """End with the launcher from now on, while a program imports before `run_guarded`; SystemExit if it has ended. Not
    in processes that multiprocessing starts, which read the program too: the rank ends them.
    """
    if multiprocessing.parent_process() is None and (lost := _lost()):
        _say(lost)
        raise SystemExit(1)


def _lost() -> str:
    """End with the launcher from now on, in the seconds in which this process imports too; "" or why it must end."""
    with suppress(LaunchError):  # the command finds that out again, and reports it then
        return processes.exit_with_launcher(environment.detect(os.environ))
    return ""


def _report(message: str, code: int, trace: str = "", agreed: bool = False) -> None:
    """Report it, unless another rank has. `trace`: "" for a user's mistake; `agreed`: all ranks know, rank 0 speaks."""
    message, trace = secrets.hide(message), secrets.hide(trace)
    rank = _number("RANK", 0)
    if _reported_peer.is_set():
        return
    if agreed:
        # A launcher signals the ranks that are left when one has failed: that one has the last word.
        if not another_has_failed():
            if _local_rank() == 0:
                environment.report_status(code=code)
            if rank == 0:
                _say(message, trace)
        return
    is_unexplained = bool(trace) and not _reported_peer.wait(_PEER_S if _peers else 0.0) and not another_has_failed()
    if is_unexplained and _peers and (text := _peers.silent()):
        _report_peer(_peers, text)  # a rank that was killed breaks the collectives of the others
    if trace and _reported_peer.is_set():
        return
    if is_unexplained and _peers and _peers.ended:
        message, trace = _peers.ended, ""
    if not announce_failure(rank, message + ("\n" + trace if trace else ""), code):
        return
    if _marker is None and _local_rank() != 0:
        for number in _CAUGHT:  # end without a word: it is only waiting for whether it has to speak
            signal.signal(number, signal.SIG_DFL)
        time.sleep(OTHER_RANKS_WAIT_S)
        message = f"[rank {rank}] {message}"
    _say(message, trace)


def _say(message: str, trace: str = "") -> None:
    with suppress(OSError):  # a terminal that is gone must not keep this process from ending
        sys.stdout.flush()
    with suppress(OSError):
        if trace:
            sys.stderr.write(trace)
        sys.stderr.write(message + "\n")
        sys.stderr.flush()


EXIT_CODE = 124
_EVERY_S = 1.0
_LEAST_S, _TIMES = 60.0, 5.0
_LOOK_S = 4.0
_LOST_BEATS, _FEWEST_BEATS, _LOOK_EVERY = 40, 10, 5
"""A rank is lost when it does not count while this one does so often, counts and not seconds, because a file server
that stands still for a minute stops everybody's."""
_WRITING_S = 30.0
_JUDGES = 8
"""Ranks that judge a hang at once where there are many; the others wait for what they find."""
STEP, DATA = "step", "data"
"""A step's two phases: its data, which no other rank can hurry, and the rest."""
START, END = "start", "end"
"""Before the first step and after the last: these have no time limit, but the ranks' heartbeats count in them too."""


_NODE = node_id()


def heartbeat_file(rank: int | str) -> str:
    """Return the name of a rank's file in logs/."""
    return f"heartbeat-rank-{rank}.json"


class Watchdog:
    """One rank's; `hang_after_s` below 0 watches nothing. `patience_s`: for evaluations, checkpoints, first steps and
    those after such a phase, and all steps that may be compiled anew, `recompiles`; half of it for data, so that the
    reason is logged before the other ranks' collectives give up.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        hang_after_s: float,
        patience_s: float,
        recompiles: bool = False,
    ) -> None:
        self.folder, self.rank, self.world_size = folder / "logs", rank, world_size
        self.hang_after_s, self.patience_s, self.recompiles = hang_after_s, patience_s, recompiles
        self.phase, self.step, self.detail = START, 0, ""
        self.since = time.monotonic()
        self.taken: deque[float] = deque(maxlen=100)
        self.beats = 0
        self.stretch = stretch(world_size)
        self._is_excused = False
        """Whether this step has taken long because another rank waited for its data."""
        self._is_steady = False
        """Whether nothing but steps and data has come since the last step."""
        self._over = threading.Event()
        if hang_after_s >= 0:
            self._beat()
            for target in (self._count, self._watch):
                threading.Thread(target=target, name=f"watchdog{target.__name__}", daemon=True).start()

    def enter(self, phase: str, step: int, detail: str = "") -> None:
        """Note what this rank does: STEP, DATA, START, END or another name; `detail` (shapes) helps find the cause."""
        now = time.monotonic()
        if self.phase == STEP and not self._is_excused:
            self.taken.append(now - self.since)
        self._is_steady = phase in (STEP, DATA) and (self._is_steady or self.phase == STEP)
        # Not twice per step: the thread counts every second.
        is_new = phase != self.phase and {phase, self.phase} != {STEP, DATA}
        self.phase, self._is_excused = phase, False
        self.step, self.detail, self.since = step, detail, now
        if is_new and self.hang_after_s >= 0:  # where a run died within a second of it is known too
            self._beat()

    def stop(self) -> None:
        """The run is over."""
        self._over.set()

    def limit(self) -> float:
        """Return the seconds after which the present phase counts as hanging."""
        if self.phase in (START, END):
            return math.inf
        if self.phase == DATA:
            return max(self.hang_after_s, self.patience_s / 2)
        if self.hang_after_s > 0:
            return self.hang_after_s
        # What is used again, or for the first time, may compile, tune itself, allocate or connect.
        if not self._is_steady or self.recompiles or len(self.taken) < 3:
            return self.patience_s
        return max(_LEAST_S, _TIMES * statistics.quantiles(self.taken, n=100, method="inclusive")[98])

    def _count(self) -> None:
        """Count, and look after the others, in every phase: the first rank after all, the others after the first."""
        counts: dict[int, tuple[int, int]] = {}
        times = 0
        others = range(1, self.world_size) if self.rank == 0 else (0,)
        most, every_s = max(_LOST_BEATS / self.stretch, _FEWEST_BEATS), _EVERY_S * self.stretch
        while not self._over.wait(every_s):
            times += self._beat()  # where this one cannot write, others may not be able to either
            if times % _LOOK_EVERY:
                continue
            found = self._read(others)
            for rank, one in found.items():
                if counts.get(rank, (-1, 0))[0] != one["beats"]:
                    counts[rank] = one["beats"], times
            lost = [rank for rank, (_, when) in counts.items() if times - when >= most and not found[rank].get("left")]
            # Whoever goes on needs no judge: a file server may show old files.
            if lost and time.monotonic() - self.since > most * every_s:
                self._tell_lost(lost, found)
        self._beat(left=True)

    def _tell_lost(self, lost: list[int], found: dict[int, dict[str, Any]]) -> None:
        here = [int(found[rank]["pid"]) for rank in lost if found[rank].get("machine") == _NODE]
        values = {"who": self._accuse(lost, [], found), "phase": self.phase, "step": self.step}
        if here:
            text = tr("{who} It is stopped, or in a call that lets no Python run ({phase} {step}).", **values)
        else:
            text = tr("{who} Its machine, or the network to it, is gone ({phase} {step}).", **values)
        self._write_stacks(time.monotonic() - self.since)
        self._tell(text, here)

    def _watch(self) -> None:
        """Look at the clock; touches no file, as a file server may be what hangs."""
        while not self._over.wait(_EVERY_S):
            waited = time.monotonic() - self.since
            if waited <= self.limit():
                continue
            judge = threading.Thread(target=self._end, args=(waited,), daemon=True)
            judge.start()
            judge.join(3 * _LOOK_S * self.stretch + _WRITING_S)
            if judge.is_alive() and not self._over.is_set():
                terminal.show_cursor()
                os._exit(EXIT_CODE)

    def _beat(self, left: bool = False) -> bool:
        """Count, and return whether that could be written. `left`: for the last time."""
        self.beats += 1
        me: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "machine": _NODE}
        me |= {"beats": self.beats, "phase": self.phase, "step": self.step, "left": left}
        path = self.folder / heartbeat_file(self.rank)
        new = path.with_name(f".{path.name}.{threading.current_thread().name}")
        try:
            new.write_text(json.dumps(me), encoding="utf-8")
            os.replace(new, path)  # ranks beat and read in lockstep: a file cut off for writing is often seen
        except OSError:  # a full disk is no hang
            return False
        return True

    def _read(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in ranks:
            with suppress(OSError, ValueError):
                found[rank] = json.loads((self.folder / heartbeat_file(rank)).read_text(encoding="utf-8"))
        return found

    def _end(self, waited: float) -> None:
        """Find out who hangs, write down where this rank is, say so once, and end; unless a rank waits for its data."""
        everybody = range(self.world_size)
        since, phase, limit = self.since, self.phase, self.limit()
        if self.world_size > _UNHURRIED_RANKS and self.rank >= _JUDGES:  # or each would read the files of all
            until = time.monotonic() + 2 * _LOOK_S * self.stretch
            while time.monotonic() < until:
                if another_has_failed():
                    self._write_stacks(waited)
                    os._exit(EXIT_CODE)
                if self._over.wait(CHECK_EVERY_S) or self.since != since:
                    return
        before = self._read(everybody)
        if self._over.wait(_LOOK_S * self.stretch) or self.since != since:
            return  # it came to its end meanwhile
        after = self._read(everybody)
        others = [rank for rank in everybody if rank != self.rank]
        silent = [rank for rank in others if after.get(rank) == before.get(rank)]
        fetching = [rank for rank in others if after.get(rank, {}).get("phase") == DATA and rank not in silent]
        if fetching and phase != DATA:
            self._is_excused = True  # its own watchdog knows how long it may wait
            return
        self._write_stacks(waited)
        times = {"step": self.step, "seconds": f"{waited:.0f}", "limit": f"{limit:.0f}"}
        files = self.folder / "hang-rank-*.txt"
        if phase == DATA:
            text = tr(
                "rank {rank} on {host} has been waiting for data for {seconds} s (step {step}; limit {limit} s, half "
                "of distributed.timeout_s). Check the disk or network that {host} reads from. Python's stacks: "
                "{files}.",
                rank=self.rank,
                host=socket.gethostname(),
                files=files,
                **times,
            )
        else:
            newest = max((one.get("step", 0) for one in after.values()), default=0)
            behind = [rank for rank, one in after.items() if one.get("step", 0) < newest]
            text = tr(
                "{phase} {step} has taken {seconds} s (limit {limit} s). {who} Python's stacks of all ranks that can "
                "still write them: {files}.",
                phase=phase,
                who=self._accuse(silent, behind, after),
                files=files,
                **times,
            )
        here = [after[rank] for rank in silent if after.get(rank, {}).get("machine") == _NODE]
        if self._over.is_set():  # writing takes time too
            return
        self._tell(text, [int(one["pid"]) for one in here])

    def _tell(self, text: str, stopped: Iterable[int]) -> None:
        """Say it if no other rank has, and end."""
        if announce_failure(self.rank, text, EXIT_CODE):
            sys.stderr.write(f"Hang: {text}\n")
            sys.stderr.flush()
            for pid in stopped:  # a stopped process heeds nothing else, and the launcher would wait half a minute
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        terminal.show_cursor()
        os._exit(EXIT_CODE)

    def _accuse(self, silent: list[int], behind: list[int], ranks: dict[int, dict[str, Any]]) -> str:
        def named(found: list[int]) -> str:
            known = [(rank, ranks.get(rank, {})) for rank in found]
            return ", ".join(f"{rank} (pid {one.get('pid', '?')}, {one.get('host', '?')})" for rank, one in known)

        if silent:
            return tr("No sign of life from rank {ranks}.", ranks=named(silent))
        if behind:
            return tr("Rank {ranks} is behind the others.", ranks=named(behind))
        return tr("All ranks are alive and in the same step: one of them does not come to its end.")

    def _write_stacks(self, waited: float) -> None:
        with suppress(OSError), open(self.folder / f"hang-rank-{self.rank}.txt", "a", encoding="utf-8") as file:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            file.write(f"{stamp} {self.phase} {self.step} for {waited:.0f} s. {self.detail}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\n")
