"""A rank's heartbeat is what the others judge it by."""

import json
import threading
from pathlib import Path

from toolkit.distributed.watchdog import Watchdog, heartbeat_file


def test_a_heartbeat_is_whole_whenever_it_is_read(tmp_path: Path) -> None:
    """Ranks beat and read in lockstep; one that read a file cut off for writing took the other for silent."""
    (tmp_path / "logs").mkdir()
    watchdog = Watchdog(tmp_path, 0, 1, hang_after_s=3600.0, patience_s=3600.0)
    path = tmp_path / "logs" / heartbeat_file(0)
    over = threading.Event()

    def beat() -> None:
        for number in range(2000):
            watchdog.enter(f"phase {number}", number)
        over.set()

    writer = threading.Thread(target=beat)
    writer.start()
    read = 0
    while not over.is_set():
        assert json.loads(path.read_text(encoding="utf-8"))["pid"]
        read += 1
    writer.join()
    watchdog.stop()
    assert read > 100
