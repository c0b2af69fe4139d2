"""Three machines on one, see scripts/fake_cluster, and what is done to them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from ranks import REPOSITORY, Finished

FAKE = REPOSITORY / "scripts" / "fake_cluster"
MAY_NOT = 3
HOSTS = ("node1", "node2", "node3")
# Variables by which runs differ: the machines get none of this shell's.
_OURS = ("DS_", "HF_", "OMP_", "TORCH_", "CUDA_", "LC_", "XDG_", "TOKENIZERS_", "PYTHONPATH")


class Cluster:
    """Machines that are up.

    Args:
        folder: where they keep what is theirs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, host: str, *words: str) -> list[str]:
        """Return the command that runs another on a machine."""
        return [str(FAKE), "exec", str(self.folder), host, *words]

    def run(self, host: str, *words: str, cwd: Path = REPOSITORY, timeout_s: float = 120, **extra: str) -> Finished:
        """Run a command on a machine to its end."""
        done = subprocess.run(
            self.command(host, *words),
            cwd=cwd,
            env={**_environment(), **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Finished(done.returncode, done.stdout)

    def start(self, host: str, *words: str, cwd: Path, output: IO[str], **extra: str) -> "subprocess.Popen[bytes]":
        """Start a command on a machine."""
        return subprocess.Popen(
            self.command(host, *words),
            cwd=cwd,
            env={**_environment(), **extra},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )

    def off(self, host: str) -> None:
        """Cut a machine's power."""
        subprocess.run([str(FAKE), "off", str(self.folder), host], check=True, timeout=60)

    def on(self, host: str) -> None:
        """Start it again."""
        subprocess.run([str(FAKE), "on", str(self.folder), host], check=True, timeout=60)

    def do(self, host: str, script: str) -> None:
        """Run a shell script on a machine that has to succeed."""
        done = self.run(host, "sh", "-ec", script)
        assert done.code == 0, done.output

    def toolkit(self, *words: str, cwd: Path = REPOSITORY, timeout_s: float = 120, **extra: str) -> Finished:
        """Run `toolkit …` on the first machine."""
        command = (sys.executable, "-m", "toolkit", *words)
        return self.run("node1", *command, cwd=cwd, timeout_s=timeout_s, **extra)

    def configure(self, host: str, *lines: str) -> str:
        """Put lines before a machine's sshd settings (the first of a name counts), let it read them; return the old."""
        file = self.folder / f"{host}.sshd_config"
        before = file.read_text()
        file.write_text("".join(f"{line}\n" for line in lines) + before)
        self.do(host, "kill -HUP 1")
        return before

    def restore(self, host: str, settings: str) -> None:
        """Give a machine's sshd the old settings."""
        (self.folder / f"{host}.sshd_config").write_text(settings)
        self.do(host, "kill -HUP 1")


def _environment() -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    return {**environ, "LANG": "C.UTF-8", "PYTHONPATH": str(REPOSITORY)}


def up(folder: Path, hosts: int) -> tuple[Cluster | None, str]:
    """Return nodes, or why there can be none here."""
    done = subprocess.run(
        [str(FAKE), "up", str(folder), str(hosts)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == MAY_NOT:
        return None, done.stderr.strip()
    assert done.returncode == 0, done.stderr
    return Cluster(folder), ""


def down(cluster: Cluster) -> None:
    """Remove them."""
    subprocess.run([str(FAKE), "down", str(cluster.folder)], check=True, timeout=60)
