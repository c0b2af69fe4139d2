"""RUN/report.html, made by a child process during a run and at its end."""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from toolkit import children
from toolkit.config.schema import RunConfig
from toolkit.launch.environment import without_ranks
from toolkit.messages import current_language, say, tr, warn
from toolkit.report.run import PAGE, read_run, read_within
from toolkit.report.verdict import verdict_of
from toolkit.train.hooks import Hook

PATIENCE_S = 60.0
"""Seconds that the end of a run waits for its report."""
_LONGEST_S = 600
"""Seconds after which a report ends itself, whoever started it, and whether that is still there or not."""
_LOG = "report.log"
_CHILD_CODE = (
    "import os, signal, sys; os.nice(10); signal.alarm(int(sys.argv[1]))\n"
    "from toolkit.cli import main; sys.exit(main(sys.argv[2:]))"
)


def automatic_report(cfg: RunConfig, folder: Path) -> "AutomaticReport":
    """Return the hook that makes the report of the run in `folder`, as its config says."""
    patience_s = min(PATIENCE_S, cfg.distributed.timeout_s / 2)  # the other ranks wait in a collective
    return AutomaticReport(folder, without_ranks(os.environ), patience_s, cfg.report.every)


class AutomaticReport(Hook):
    """Makes RUN/report.html in a child process: every `every` steps (0: never) beside training, and at the end, which
    waits up to `patience_s` seconds. `environ`: the child's, without a rank's variables. Rank 0 only.
    """

    def __init__(
        self, folder: Path, environ: Mapping[str, str], patience_s: float = PATIENCE_S, every: int = 0
    ) -> None:
        self.folder, self.environ, self.patience_s, self.every = folder, environ, patience_s, every
        self._process: subprocess.Popen[bytes] | None = None

    def between_steps(self, step: int) -> None:
        """Start a report after every `every` steps."""
        if self.every and step % self.every == 0:
            self.begin()

    def after_done(self) -> None:
        """Say what the run's curves show, whose figures were just printed, and make the final report."""
        with suppress(Exception):  # the report fails for the same reason, and says so
            if verdict := verdict_of(read_within(self.patience_s, lambda: read_run(self.folder), self.folder)):
                say(verdict.headline or verdict.text)
        self.finish()

    def begin(self) -> None:
        """Start a report in the background, unless the previous one is still being made."""
        if self._process is None or self._process.poll() is not None:
            with suppress(OSError):  # the final report fails for the same reason, and says so
                self._process = self._start_child()

    def finish(self) -> None:
        """Make the final report and print where it is, or warn why it could not be made and how to make it."""
        reason = ""
        try:
            self._kill_child()
            self._process = self._start_child()
            if code := self._process.wait(self.patience_s):
                text = (self.folder / "logs" / _LOG).read_text(encoding="utf-8", errors="replace")
                lines = [line for line in text.splitlines() if line.strip()]
                reason = lines[-1] if lines else tr("exit code {code}", code=code)
        except subprocess.TimeoutExpired:
            reason = tr("it is not ready after {seconds} s", seconds=f"{self.patience_s:g}")
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            self._kill_child()
        if not reason:
            say("The report: {file}", file=self.folder / PAGE)
            return
        warn(
            "the report could not be made: {reason}. The run itself is complete; to make the report:  toolkit report "
            "{folder}",
            reason=reason.rstrip("."),
            folder=self.folder,
        )

    def _start_child(self) -> subprocess.Popen[bytes]:
        """Start `toolkit report RUN` with this checkout's code, its output in logs/report.log."""
        checkout = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (checkout, self.environ.get("PYTHONPATH", ""))))
        arguments = ["report", str(self.folder), f"language={current_language()}"]
        with open(self.folder / "logs" / _LOG, "wb") as log:
            return children.start(
                [sys.executable, "-c", _CHILD_CODE, str(_LONGEST_S), *arguments],
                env={**self.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _kill_child(self) -> None:
        """Kill the child process that makes a report, if one is running."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
