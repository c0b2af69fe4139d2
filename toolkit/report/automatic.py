"""The report that a run makes of itself: in another process, at a low priority, never to the run's harm."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from toolkit import children
from toolkit.messages import current_language, tr

PAGE = "report.html"
PATIENCE_S = 60.0
"""Seconds that the end of a run waits for its report."""
_LONGEST_S = 600
"""Seconds after which a report ends itself, whoever started it, and whether that is still there or not."""
_LOG = "report.log"
_CODE = (
    "import os, signal, sys; os.nice(10); signal.alarm(int(sys.argv[1]))\n"
    "from toolkit.cli import main; sys.exit(main(sys.argv[2:]))"
)


class AutomaticReport:
    """Makes RUN/report.html while a run goes on and at its end. For rank 0 only."""

    def __init__(
        self, folder: Path, environ: Mapping[str, str], say: Callable[[str], None], patience_s: float = PATIENCE_S
    ) -> None:
        self.folder, self.environ, self.say, self.patience_s = folder, environ, say, patience_s
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Begin to make it, unless the one before is not ready yet."""
        if self._process is None or self._process.poll() is not None:
            with suppress(OSError):  # told at the end, if it is so then too
                self._process = self._start()

    def finish(self) -> None:
        """Make it a last time, and say where it is; or that it could not be made, and how to make it."""
        try:
            self._end()
            self._process = self._start()
            code = self._process.wait(self.patience_s)
            reason = "" if code == 0 else self._last_line() or tr("exit code {code}", code=code)
        except subprocess.TimeoutExpired:
            reason = tr("it is not ready after {seconds} s", seconds=f"{self.patience_s:g}")
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            self._end()
        if not reason:
            self.say(tr("The report: {file}", file=self.folder / PAGE))
            return
        self.say(
            tr(
                "WARNING: no report was made: {reason}. The run is whole; to make it:  toolkit report {folder}",
                reason=reason.rstrip("."),
                folder=self.folder,
            )
        )

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, (package, self.environ.get("PYTHONPATH", ""))))
        words = ["report", str(self.folder), f"language={current_language()}"]
        with open(self.folder / "logs" / _LOG, "wb") as log:
            return children.start(
                [sys.executable, "-c", _CODE, str(_LONGEST_S), *words],
                env={**self.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _end(self) -> None:
        """End the one that is not ready."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _last_line(self) -> str:
        with suppress(OSError):
            text = (self.folder / "logs" / _LOG).read_text(encoding="utf-8", errors="replace")
            return next((line for line in reversed(text.splitlines()) if line.strip()), "")
        return ""
