"""The watchdog notices a step that does not end, says which rank holds it up, and ends the job, so that it can restart.

The process group's timeout does not reach ZeRO's groups (deepspeed 0.19.8, utils/groups.py), and stopped processes or
lost nodes report nothing. So threads of every rank count into a file and watch the counts and the clock: a rank whose
count stands still hangs. Waiting for data is no hang, and has its own limit.
"""

import faulthandler
import json
import math
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
from toolkit.distributed.presence import UNHURRIED_RANKS, node_id, stretch
from toolkit.messages import tr

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
    """Return the name of a rank's heartbeat file in logs/."""
    return f"heartbeat-rank-{rank}.json"


class Watchdog:
    """Ends this rank when a phase takes too long, or other ranks show no sign of life; says why. `hang_after_s`: the
    limit of a step; 0: learned from the steps, below 0: nothing is watched. `patience_s`: the limit of all else, and of
    steps that may compile (the first, those after another phase, all if `recompiles`); data have half of it, so that
    the reason is logged before the other ranks' collectives time out.
    """

    def __init__(
        self, folder: Path, rank: int, world_size: int, hang_after_s: float, patience_s: float, recompiles: bool = False
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
        if self.phase == STEP and not self._is_excused:  # the limit is learned from steps without an excuse
            self.taken.append(now - self.since)
        self._is_steady = phase in (STEP, DATA) and (self._is_steady or self.phase == STEP)
        # Not twice per step: the thread counts every second.
        is_new = phase != self.phase and {phase, self.phase} != {STEP, DATA}
        self.phase, self._is_excused = phase, False
        self.step, self.detail, self.since = step, detail, now
        if is_new and self.hang_after_s >= 0:  # at once: the run may die before the thread's next beat
            self._beat()

    def stop(self) -> None:
        """Stop the watchdog: the run has ended."""
        self._over.set()

    def limit(self) -> float:
        """Return the seconds after which the current phase of this rank counts as hanging."""
        if self.phase in (START, END):
            return math.inf
        if self.phase == DATA:
            return max(self.hang_after_s, self.patience_s / 2)  # not less than a step may take
        if self.hang_after_s > 0:
            return self.hang_after_s
        # What is used again, or for the first time, may compile, tune itself, allocate or connect.
        if not self._is_steady or self.recompiles or len(self.taken) < 3:
            return self.patience_s
        percentile_99 = statistics.quantiles(self.taken, n=100, method="inclusive")[98]
        return max(_LEAST_S, _TIMES * percentile_99)

    def _count(self) -> None:
        """Write heartbeats, and end this rank if others write none any more: rank 0 watches all, the others rank 0."""
        last_changes: dict[int, tuple[int, int]] = {}  # rank -> its last count of beats, and `written` when it was new
        written = 0  # beats of this rank
        watched = range(1, self.world_size) if self.rank == 0 else (0,)
        most_beats, every_s = max(_LOST_BEATS / self.stretch, _FEWEST_BEATS), _EVERY_S * self.stretch
        while not self._over.wait(every_s):
            if self._beat():  # where this one cannot write, others may not be able to either
                written += 1
            if written % _LOOK_EVERY:
                continue
            states = self._read(watched)
            for rank, state in states.items():
                if rank not in last_changes or last_changes[rank][0] != state["beats"]:
                    last_changes[rank] = state["beats"], written
            silent = [rank for rank, (_, changed_at) in last_changes.items() if written - changed_at >= most_beats]
            lost = [rank for rank in silent if not states[rank].get("left")]
            # Not while this rank makes progress: a file server may show old files.
            if lost and time.monotonic() - self.since > most_beats * every_s:
                self._tell_lost(lost, states)
        self._beat(left=True)

    def _tell_lost(self, lost: list[int], states: dict[int, dict[str, Any]]) -> None:
        """End the job, and say which ranks give no sign: stopped on this node, else their node may be gone."""
        here = [int(states[rank]["pid"]) for rank in lost if states[rank].get("machine") == _NODE]
        values = {"who": self._accuse(lost, [], states), "phase": self.phase, "step": self.step}
        if here:
            text = tr("{who} It is stopped, or in a call that lets no Python run ({phase} {step}).", **values)
        else:
            text = tr("{who} Its machine, or the network to it, is gone ({phase} {step}).", **values)
        self._write_stacks(time.monotonic() - self.since)
        self._tell(text, here)

    def _watch(self) -> None:
        """End this rank once its phase has taken longer than the limit. This thread touches no file, as a file server
        may be what hangs: another thread finds out the reason, and has a limit of its own.
        """
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
        """Write a heartbeat, and return whether that was possible; `left`: the last one, as this rank ends in order."""
        self.beats += 1
        state: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "machine": _NODE}
        state |= {"beats": self.beats, "phase": self.phase, "step": self.step, "left": left}
        path = self.folder / heartbeat_file(self.rank)
        new = path.with_name(f".{path.name}.{threading.current_thread().name}")
        try:
            new.write_text(json.dumps(state), encoding="utf-8")
            os.replace(new, path)  # ranks beat and read in lockstep: a file cut off for writing is often seen
        except OSError:  # a full disk is no hang
            return False
        return True

    def _read(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return rank -> its last heartbeat, without ranks of which none can be read."""
        states = {}
        for rank in ranks:
            with suppress(OSError, ValueError):
                states[rank] = json.loads((self.folder / heartbeat_file(rank)).read_text(encoding="utf-8"))
        return states

    def _end(self, waited: float) -> None:
        """Find out which ranks hang, by reading their heartbeats twice; write this rank's stacks, report once over all
        ranks, and end. Do nothing if the phase ends meanwhile, or another rank still waits for its data.
        """
        everybody = range(self.world_size)
        since, phase, limit = self.since, self.phase, self.limit()
        if not self._waited_for_judges(waited):
            return
        before = self._read(everybody)
        if self._over.wait(_LOOK_S * self.stretch) or self.since != since:
            return  # the phase has ended
        after = self._read(everybody)
        others = [rank for rank in everybody if rank != self.rank]
        silent = [rank for rank in others if after.get(rank) == before.get(rank)]
        fetching = [rank for rank in others if after.get(rank, {}).get("phase") == DATA and rank not in silent]
        if fetching and phase != DATA:
            self._is_excused = True  # the watchdog of the rank that waits for its data has a limit for that
            return
        self._write_stacks(waited)
        files = str(self.folder / "hang-rank-*.txt")
        values = {"step": self.step, "seconds": f"{waited:.0f}", "limit": f"{limit:.0f}", "files": files}
        if phase == DATA:
            text = tr(
                "rank {rank} on {host} has been waiting for data for {seconds} s (step {step}; limit {limit} s, half "
                "of distributed.timeout_s). Check the disk or network that {host} reads from. Python's stacks: "
                "{files}.",
                rank=self.rank,
                host=socket.gethostname(),
                **values,
            )
        else:
            newest = max((state.get("step", 0) for state in after.values()), default=0)
            behind = [rank for rank, state in after.items() if state.get("step", 0) < newest]
            text = tr(
                "{phase} {step} has taken {seconds} s (limit {limit} s). {who} Python's stacks of all ranks that can "
                "still write them: {files}.",
                phase=phase,
                who=self._accuse(silent, behind, after),
                **values,
            )
        stopped = [after[rank]["pid"] for rank in silent if after.get(rank, {}).get("machine") == _NODE]
        if not self._over.is_set():  # else the run has ended while the stacks were written
            self._tell(text, map(int, stopped))

    def _waited_for_judges(self, waited: float) -> bool:
        """Let the first ranks judge a hang where there are many, or each would read the heartbeats of all; return
        whether the phase still hangs when they have had time to. If they report it, end this rank too.
        """
        if self.world_size <= UNHURRIED_RANKS or self.rank < _JUDGES:
            return True
        since, until = self.since, time.monotonic() + 2 * _LOOK_S * self.stretch
        while time.monotonic() < until:
            if failure.another_has_failed():
                self._write_stacks(waited)
                os._exit(EXIT_CODE)
            if self._over.wait(failure.CHECK_EVERY_S) or self.since != since:
                return False
        return True

    def _tell(self, text: str, stopped: Iterable[int]) -> None:
        """Print `text` unless another rank has reported first; end this process, and the `stopped` ones (pids)."""
        if failure.announce_failure(self.rank, text, EXIT_CODE):
            sys.stderr.write(f"Hang: {text}\n")
            sys.stderr.flush()
            for pid in stopped:  # a stopped process heeds nothing else, and the launcher would wait half a minute
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        terminal.show_cursor()
        os._exit(EXIT_CODE)

    def _accuse(self, silent: list[int], behind: list[int], ranks: dict[int, dict[str, Any]]) -> str:
        """Return a sentence about the ranks that hang: silent ones, else those behind; `ranks`: their heartbeats."""

        def named(accused: list[int]) -> str:
            states = [(rank, ranks.get(rank, {})) for rank in accused]
            return ", ".join(
                f"{rank} (pid {state.get('pid', '?')}, {state.get('host', '?')})" for rank, state in states
            )

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
