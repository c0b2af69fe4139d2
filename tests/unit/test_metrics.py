"""metrics.jsonl on a disk that is full."""

import errno
import json
import math
from pathlib import Path
from typing import Any

import pytest

from toolkit.messages import CheckpointError
from toolkit.track.metrics import MetricsLog


class Disk:
    """A file whose disk takes so many bytes more."""

    def __init__(self, path: Path) -> None:
        self.path, self.room = path, 10**6

    def open(self, *arguments: Any, **options: Any) -> Any:
        """Open the file; its write method is ours."""
        handle, disk = self.path.open(*arguments, **options), self

        class Handle:
            def __enter__(self) -> "Handle":
                return self

            def __exit__(self, *_: object) -> None:
                handle.close()

            def fileno(self) -> int:
                return int(handle.fileno())

            def write(self, content: bytes) -> int:
                if not disk.room:
                    raise OSError(errno.ENOSPC, "No space left on device")
                taken = content[: disk.room]
                disk.room -= len(taken)
                return int(handle.write(taken))

        return Handle()

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)


@pytest.mark.fault("E1")
def test_rows_wait_for_room_and_none_is_half_written(tmp_path: Path, said: list[str]) -> None:
    disk = Disk(tmp_path / "metrics.jsonl")
    log = MetricsLog(disk)  # type: ignore[arg-type]
    log.append({"step": 1, "loss": math.nan})
    disk.room = 7
    log.append({"step": 2, "loss": 1.0})
    log.append({"step": 3, "loss": 1.0})
    assert disk.path.read_text() == '{"step": 1, "loss": "nan"}\n'
    assert len(said) == 1
    assert "cannot be written: No space left on device. Training continues" in said[0]
    with pytest.raises(CheckpointError, match="The last 2 rows are lost"):
        log.finish()
    disk.room = 10**6
    log.append({"step": 4})
    assert [json.loads(line)["step"] for line in disk.path.read_text().splitlines()] == [1, 2, 3, 4]
    disk.room = 0
    log.append({"step": 5})
    log.forget()
    log.finish()
    assert len(said) == 2
