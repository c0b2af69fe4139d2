"""What the system knows of processes that have ended: their exit status, and whether memory ran out. No torch."""

import os
import re
from contextlib import suppress
from pathlib import Path


def exit_status(pid: int) -> int | None:
    """Return the wait status of a zombie process (ended, not yet waited for by its parent); None of any other."""
    try:
        # "PID (NAME) STATE … STATUS", and the name may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[-1]) if fields[0] in "ZX" else None
    except (OSError, ValueError, IndexError):
        return None


def out_of_memory_kills() -> int:
    """Return how many processes the kernel has ended for lack of memory in this process's control group; 0 unknown."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        of_version_2 = (line for line in groups.splitlines() if line.startswith("0::"))  # as "0::/user.slice"
        group = next(of_version_2, "").removeprefix("0::").strip("/")
        root = Path("/sys/fs/cgroup")
        # This group's file, that of a container's root, and that of cgroups of version 1.
        for file in (root / group / "memory.events", root / "memory.events", root / "memory" / "memory.oom_control"):
            if file.is_file():
                return sum(map(int, re.findall(r"^oom_kill (\d+)$", file.read_text(encoding="utf-8"), re.MULTILINE)))
    except (OSError, ValueError):
        pass
    return 0


def kernel_line(pid: int, log: str = "/dev/kmsg") -> str:
    """Return the kernel's own line about a process that it ended for lack of memory; "" if there is none to be read."""
    last_match = ""
    with suppress(OSError):
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with suppress(BlockingIOError):
                while record := os.read(handle, 1 << 13):
                    for line in record.decode(errors="replace").splitlines():
                        if re.search(rf"Killed process {pid}\b", line):
                            last_match = line.rpartition(";")[2].strip()  # behind priority, number and time
        finally:
            os.close(handle)
    return last_match
