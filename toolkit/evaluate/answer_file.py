"""A file of answers: written beside its place, whole when it has its name, continued by the same command."""

import json
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from toolkit.disk import try_lock
from toolkit.errors import CheckpointError, ConfigError
from toolkit.messages import say, tr


class AnswerFile:
    """JSON lines that go to OUTPUT.part until all are there; OUTPUT.part.json says which command writes them.

    Args:
        output: must not exist.
        settings: all that decides about the answers; lines that were written with others are not continued.
        window: lines that are written together; a last part of a window is written again.

    Raises:
        ConfigError: OUTPUT exists, OUTPUT.part belongs to another command, or another process is writing it.
        CheckpointError: nothing can be written there.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], window: int) -> None:
        self.output = output
        self.part, self.record = (output.with_name(f"{output.name}{suffix}") for suffix in (".part", ".part.json"))
        if output.exists():
            raise ConfigError(tr("{file} exists already: nothing was written. Name another file.", file=output))
        try:
            self.file = self.part.open("a+b")
        except OSError as error:
            raise self._failed(error) from error
        try:
            self.done = self._claim(json.loads(json.dumps(settings)), window)
        except OSError as error:
            self.file.close()
            raise self._failed(error) from error
        except ConfigError:
            self.file.close()
            raise
        if self.done:
            say(tr("Going on after the {count} lines in {file}.", count=f"{self.done:,}", file=self.part))

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.file:
            if kind is None or not self.part.exists():
                return
            if self.part.stat().st_size:
                say(tr("What is there so far is in {file}; the same command goes on from it.", file=self.part))
            else:
                self.part.unlink()
                self.record.unlink(missing_ok=True)

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a window of lines, and make sure that they are on the disk."""
        try:
            # A lone surrogate has no UTF-8.
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            self.file.write(lines.encode("utf-8", "backslashreplace"))
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Give the file its name."""
        try:
            if self.output.exists():
                raise ConfigError(
                    tr("{file} was made by somebody else meanwhile; the answers are in {part}.", file=self.output,
                       part=self.part)
                )  # fmt: skip
            self.part.rename(self.output)
            self.record.unlink()
        except OSError as error:
            raise self._failed(error) from error

    def _claim(self, settings: dict[str, Any], window: int) -> int:
        """Lock the file, cut it after its last whole window, and return how many lines it holds."""
        granted, is_trusted = try_lock(self.file)
        if not granted:
            raise ConfigError(tr("another process is writing {file}.", file=self.part))
        if not is_trusted:
            say(tr("WARNING: the disk of {file} has no locks: see to it that nobody else writes it.", file=self.part))
        self.file.seek(0)
        count = sum(line.endswith(b"\n") for line in self.file) // window * window
        if count:
            self._compare(settings)
        else:
            self.record.write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        self.file.seek(0)
        self.file.truncate(sum(map(len, islice(self.file, count))))
        return count

    def _compare(self, settings: dict[str, Any]) -> None:
        try:
            known = json.loads(self.record.read_text(encoding="utf-8"))
            changed = sorted(name for name in known.keys() | settings if known.get(name) != settings.get(name))
        except (FileNotFoundError, ValueError, AttributeError):
            changed = [self.record.name]
        if changed:
            raise ConfigError(
                tr(
                    "{file} was begun with something else ({names}), so it cannot be continued. Move it away, or name "
                    "another output.",
                    file=self.part,
                    names=", ".join(changed),
                )
            )

    def _failed(self, error: OSError) -> CheckpointError:
        return CheckpointError(tr("cannot write {file}: {reason}.", file=self.part, reason=error.strerror or error))
