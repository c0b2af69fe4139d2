"""Notices a step that does not end, says which rank holds it up, and ends the job, so that it can restart.

The process group's timeout does not reach ZeRO's groups (deepspeed 0.19.8, utils/groups.py), and stopped processes or
lost nodes report nothing. So threads of every rank count into a file and watch the counts and the clock: a rank whose
count stands still hangs. Waiting for data is no hang, and has its own limit.
"""

import faulthandler
import json
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit import terminal
from toolkit.distributed import failure
from toolkit.messages import tr

EXIT_CODE = 124
_EVERY_S = 1.0
_LEAST_S, _TIMES = 60.0, 5.0
_LOOK_S = 4.0
_LOST_BEATS, _LOOK_EVERY = 40, 5
"""A machine is lost when its ranks do not count while this one does so often, counts and not seconds, because a file
server that stands still for a minute stops everybody's."""
_WRITING_S = 30.0
STEP, DATA = "step", "data"
"""A step's two phases: its data, which no other rank can hurry, and the rest."""


_NODE = failure.node_id()


def heartbeat_file(rank: int | str) -> str:
    """Return the name of a rank's file in logs/."""
    return f"heartbeat-rank-{rank}.json"


class Watchdog:
    """One rank's; `hang_after_s` below 0 watches nothing. `patience_s`: for evaluations, checkpoints and first steps;
    half of it for data, so that the reason is logged before the other ranks' collectives give up.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, hang_after_s: float, patience_s: float) -> None:
        self.folder, self.rank, self.world_size = folder / "logs", rank, world_size
        self.hang_after_s, self.patience_s = hang_after_s, patience_s
        self.phase, self.step, self.detail = "", 0, ""
        self.since = time.monotonic()
        self.taken: deque[float] = deque(maxlen=100)
        self.beats = 0
        self._is_excused = False
        """Whether this step has taken long because another rank waited for its data."""
        self._over = threading.Event()
        if hang_after_s >= 0:
            self._beat()
            for target in (self._count, self._watch):
                threading.Thread(target=target, name=f"watchdog{target.__name__}", daemon=True).start()

    def enter(self, phase: str, step: int, detail: str = "") -> None:
        """Note what this rank does: STEP, DATA or another name, "" is not watched; `detail` (shapes) helps find the
        cause.
        """
        now = time.monotonic()
        if self.phase == STEP and not self._is_excused:
            self.taken.append(now - self.since)
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
        if self.phase == DATA:
            return max(self.hang_after_s, self.patience_s / 2)
        if self.hang_after_s > 0:
            return self.hang_after_s
        if self.phase != STEP or len(self.taken) < 3:
            return self.patience_s
        return max(_LEAST_S, _TIMES * statistics.quantiles(self.taken, n=100, method="inclusive")[98])

    def _count(self) -> None:
        """Count, and look after the other machines: the first rank after all, the others after the first."""
        counts: dict[int, tuple[int, int]] = {}
        times = 0
        others = range(1, self.world_size) if self.rank == 0 else (0,)
        while not self._over.wait(_EVERY_S):
            times += self._beat()  # where this one cannot write, others may not be able to either
            if times % _LOOK_EVERY:
                continue
            found = self._read(others)
            for rank, one in found.items():
                if one.get("machine") != _NODE and counts.get(rank, (-1, 0))[0] != one["beats"]:
                    counts[rank] = one["beats"], times
            lost = [rank for rank, (_, when) in counts.items() if times - when >= _LOST_BEATS]
            # Whoever goes on needs no judge: a file server may show old files.
            if lost and self.phase and time.monotonic() - self.since > _LOST_BEATS * _EVERY_S:
                self._tell(
                    tr(
                        "{who} Its machine, or the network to it, is gone ({phase} {step}).",
                        who=self._accuse(lost, [], found),
                        phase=self.phase,
                        step=self.step,
                    ),
                    (),
                )

    def _watch(self) -> None:
        """Look at the clock; touches no file, as a file server may be what hangs."""
        while not self._over.wait(_EVERY_S):
            waited = time.monotonic() - self.since
            if not self.phase or waited <= self.limit():
                continue
            judge = threading.Thread(target=self._end, args=(waited,), daemon=True)
            judge.start()
            judge.join(_LOOK_S + _WRITING_S)
            if judge.is_alive() and not self._over.is_set():
                terminal.show_cursor()
                os._exit(EXIT_CODE)

    def _path(self, rank: int) -> Path:
        return self.folder / heartbeat_file(rank)

    def _beat(self) -> bool:
        """Count, and return whether that could be written."""
        self.beats += 1
        me: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "machine": _NODE}
        me |= {"beats": self.beats, "phase": self.phase, "step": self.step}
        path = self._path(self.rank)
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
                found[rank] = json.loads(self._path(rank).read_text(encoding="utf-8"))
        return found

    def _end(self, waited: float) -> None:
        """Find out who hangs, write down where this rank is, say so once, and end; unless a rank waits for its data."""
        everybody = range(self.world_size)
        since, phase, limit = self.since, self.phase, self.limit()
        before = self._read(everybody)
        if self._over.wait(_LOOK_S) or self.since != since:
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
        if failure.announce_failure(self.rank, text, EXIT_CODE):
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
