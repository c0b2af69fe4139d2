"""Start programs that find everything imported: forks of one process that outlives a test.

Of the 31 s of processor time that DeepSpeed's launcher and two ranks of it take until they begin, 29 go into imports,
by the launcher's two processes and by each rank. Here a server imports once; what asks it is a client that stands for
the launcher: it passes signals on, ends with the ranks' exit code, and takes the ranks with it when it is killed. For
tests of what ranks do; those of how they are started, stopped and started again use the real launchers.

python fork_ranks.py SOCKET RANKS PORT [--module] PROGRAM [WORD ...]   asks; 0 ranks: the program, under no launcher
python fork_ranks.py SOCKET                                            serves
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path

GRACE_S = 30.0  # DeepSpeed's
PIDS = ".pids"
"""Folder beside the socket: a file for each process that was forked, with its words, as /proc has those of others."""


def ask(path: str, words: list[str]) -> int:
    """Be the client; return the exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        asked = json.dumps({"words": words, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
        socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(asked)
        launcher = int.from_bytes(server.recv(4, socket.MSG_WAITALL), "big")
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda number, frame: os.kill(launcher, number))
        code = server.recv(4, socket.MSG_WAITALL)
        return int.from_bytes(code, "big", signed=True) if code else 128 + signal.SIGKILL


def serve(path: str) -> None:
    """Be the server."""
    import cpuinfo
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # imported late otherwise, and Inductor with it
    import setuptools  # noqa: F401  # by DeepSpeed's builders of ops
    from transformers import conversion_mapping

    import toolkit.tasks.language
    import toolkit.train.trainer  # noqa: F401
    from toolkit.config.load import load

    cpuinfo.get_cpu_info()  # cached by toolkit.engine.deepspeed_patches
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # all types' at once: 0.4 s
    for stage in range(4):  # Hydra's order of the files of most tests' runs, which the ranks find in a cache
        load(["recipe=quickstart", "model=glm_tiny", "schedule=linear", f"zero=stage{stage}"])
    gc.collect()
    gc.freeze()  # what was imported stays: no rank looks through it again, or copies its pages to do so
    Path(path + PIDS).mkdir()
    signal.signal(signal.SIGCHLD, lambda number, frame: reap())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                launch(client, path)
                return
            client.close()


def reap() -> None:
    """Take note of processes that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def launch(client: socket.socket, path: str) -> None:
    """Become what the client asks for: start ranks and end as they do, or be the program."""
    os.setsid()
    length, files, _, _ = socket.recv_fds(client, 4, 3)
    asked = json.loads(client.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    count, port, *program = asked["words"]
    register(path, program)
    client.sendall(os.getpid().to_bytes(4, "big"))
    pids: set[int] = set()

    def told(number: int, frame: object) -> None:
        stop(pids)
        client.sendall((1).to_bytes(4, "big", signed=True))
        sys.exit(1)

    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, told)
    for number in range(int(count) or 1):
        pid = os.fork()
        if pid == 0:
            client.close()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for name in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(name, signal.SIG_DFL)
            register(path, program)
            become(program, number, int(count), port)
            return
        pids.add(pid)
    threading.Thread(target=end_with, args=(client,), daemon=True).start()
    code = 0
    while pids and not code:
        pid, status = os.wait()
        pids.discard(pid)
        code = os.waitstatus_to_exitcode(status)
    stop(pids)
    client.sendall(code.to_bytes(4, "big", signed=True))


def register(path: str, program: list[str]) -> None:
    """Let `ranks.alive` find this process by its words."""
    (Path(path + PIDS) / str(os.getpid())).write_text(" ".join(program))


def end_with(client: socket.socket) -> None:
    """End this session when the client is gone, as `ranks.kill_session` ends the client's."""
    if not client.recv(1):
        os.killpg(0, signal.SIGKILL)


def become(program: list[str], number: int, count: int, port: str) -> None:
    """Run a program as Python runs one from the command line, as one of so many ranks; as none of 0."""
    if modules := os.environ.get("HF_MODULES_CACHE"):  # read as transformers is imported
        for holder in ("transformers.utils", "transformers.utils.hub", "transformers.dynamic_module_utils"):
            importlib.import_module(holder).HF_MODULES_CACHE = modules  # type: ignore[attr-defined]
    is_module = program[0] == "--module"
    path, *words = program[is_module:]
    sys.argv = [path, *words]
    if count:
        sys.argv.insert(1, f"--local_rank={number}")
        numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_SIZE": count}
        os.environ.update({key: str(value) for key, value in numbers.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CROSS_RANK": "0", "CROSS_SIZE": "1"})
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(path, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(path))
        runpy.run_path(path, run_name="__main__")
    if count:
        # As toolkit's own ranks end (cli/failures.py): Python, when it ends, may abort over a thread that is in C++.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


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


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
