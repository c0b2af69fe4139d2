"""Start ranks as DeepSpeed's launcher does on one machine, but import what all of them need once, and fork.

That launcher is two processes that import torch and DeepSpeed before each rank does: of the 31 s of processor time that
a launch of two ranks takes until they begin, 23 s. For tests of what ranks do; those of how they are started, stopped
and started again use the real launchers.

Usage: python fork_ranks.py RANKS PORT [--module] PROGRAM [WORD ...]
"""

import functools
import os
import runpy
import signal
import sys
import time

GRACE_S = 30.0  # DeepSpeed's


def rank(number: int, size: int, port: str, program: list[str]) -> None:
    """Be one rank; its program ends this process."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
    numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_SIZE": size, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    is_module = program[0] == "--module"
    path, *words = program[is_module:]
    sys.argv = [path, f"--local_rank={number}", *words]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(path, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(path))
        runpy.run_path(path, run_name="__main__")


def stop(pids: set[int]) -> None:
    """Ask ranks to end; kill those that do not."""
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + GRACE_S
    while pids and time.monotonic() < until:
        pids -= {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Start the ranks and end as they do."""
    size, port, *program = sys.argv[1:]

    import cpuinfo
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # imported later, and Inductor with it

    import toolkit.cli.session  # noqa: F401

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    pids: set[int] = set()

    def told(number: int, frame: object) -> None:
        stop(pids)
        sys.exit(1)

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, told)
    for number in range(int(size)):
        pid = os.fork()
        if pid == 0:
            rank(number, int(size), port, program)
            return
        pids.add(pid)
    while pids:
        pid, status = os.wait()
        pids.discard(pid)
        if code := os.waitstatus_to_exitcode(status):
            stop(pids)
            sys.exit(code)


if __name__ == "__main__":
    main()
