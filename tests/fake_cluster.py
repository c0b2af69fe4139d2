"""Several machines on one, for tests: each a network namespace with its own address, name, processes, mounts and sshd.

See scripts/fake_cluster. The machines share this one's files; a mount on one is seen there alone. Their network leads
nowhere else. Standard library only: it is started as root, by whatever Python.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"
MAY_NOT = 3

SSHD = """\
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin yes
AcceptEnv LANG LC_*
MaxStartups 100
"""
SSH = """\
Host *
  IdentityFile {folder}/key
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
  SendEnv LANG LC_*
  LogLevel ERROR
"""
# What is mounted is mounted for this machine alone.
INIT = """\
set -e
hostname {host}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/ssh_config /etc/ssh/ssh_config
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
exec {sshd} -D -E {folder}/{host}.log -f {folder}/{host}.sshd_config
"""


def main(words: list[str]) -> int:
    """Do what is asked for; see scripts/fake_cluster.

    Returns:
        The exit code: 2 for words that make no sense, 3 where there can be no machines.
    """
    if len(words) < 2 or words[0] not in ("up", "exec", "off", "on", "down"):
        return 2
    verb, folder = words[0], Path(words[1]).absolute()
    if verb == "up":
        return up(folder, int(words[2]) if len(words) > 2 else 2)
    state = json.loads((folder / "cluster.json").read_text())
    if verb == "exec":
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *words[3:]]
        command = ["nsenter", "--target", str(state["init"][words[2]]), "--net", "--uts", "--mount", "--pid", *inside]
        os.execvp(command[0], command)
    if verb == "on":
        run("ip", "-n", f"{state['name']}-{words[2]}", "link", "set", "eth0", "up")
        state["init"][words[2]] = start(folder, state["name"], words[2])
        save(folder, state)
        return 0
    for host in [words[2]] if verb == "off" else state["init"]:
        if verb == "off":  # no goodbye reaches the others
            run("ip", "-n", f"{state['name']}-{host}", "link", "set", "eth0", "down")
        if is_first_process(state, host):
            end(state["init"][host])
    if verb == "down":
        remove(state)
        shutil.rmtree(folder)
    return 0


def up(folder: Path, count: int) -> int:
    """Make the machines."""
    lacking = [name for name in ("ip", "sshd", "ssh-keygen", "nsenter", "unshare") if not which(name)]
    if os.geteuid() or lacking:
        sys.stderr.write(f"no fake cluster here: {'not root' if os.geteuid() else 'no ' + ', '.join(lacking)}\n")
        return MAY_NOT
    folder.mkdir(parents=True)
    hosts = [f"node{number}" for number in range(1, count + 1)]
    state: dict[str, Any] = {"name": f"fc{uuid.uuid4().hex[:6]}", "init": {}, "hosts": hosts}
    save(folder, state)
    try:
        write_files(folder, hosts)
        make_network(state["name"], hosts)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"no fake cluster here: {shlex.join(error.cmd)}: {error.stderr.strip()}\n")
        remove(state)
        shutil.rmtree(folder)
        return MAY_NOT
    for host in hosts:
        state["init"][host] = start(folder, state["name"], host)
        save(folder, state)
    return 0


def write_files(folder: Path, hosts: list[str]) -> None:
    """Write keys and settings, which all machines share."""
    for name in ("key", "host_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    public = (folder / "host_key.pub").read_text()
    lines = [f"{address(number)} {host}\n" for number, host in enumerate(hosts, 1)]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
    (folder / "known_hosts").write_text("".join(f"{line.split()[1]},{line.split()[0]} {public}" for line in lines))
    (folder / "ssh_config").write_text(SSH.format(folder=folder))
    for number, host in enumerate(hosts, 1):
        (folder / f"{host}.sshd_config").write_text(SSHD.format(folder=folder, address=address(number)))


def make_network(name: str, hosts: list[str]) -> None:
    """Make a namespace with a bridge, and one for each machine with a cable to it."""
    run("ip", "netns", "add", f"{name}-switch")
    run("ip", "-n", f"{name}-switch", "link", "add", "br0", "type", "bridge")
    run("ip", "-n", f"{name}-switch", "link", "set", "br0", "up")
    for number, host in enumerate(hosts, 1):
        here, switch = f"{name}-{host}", f"{name}-switch"
        run("ip", "netns", "add", here)
        run("ip", "-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", here)
        run("ip", "-n", switch, "link", "set", f"port{number}", "master", "br0")
        run("ip", "-n", switch, "link", "set", f"port{number}", "up")
        run("ip", "-n", here, "address", "add", f"{address(number)}/24", "dev", "eth0")
        run("ip", "-n", here, "link", "set", "eth0", "up")
        run("ip", "-n", here, "link", "set", "lo", "up")


def start(folder: Path, name: str, host: str) -> int:
    """Start a machine's first process, its sshd, and return its pid here."""
    script = INIT.format(host=host, folder=folder, sshd=which("sshd"))
    new = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", script]
    log = open(folder / f"{host}.init.log", "wb")
    outer = subprocess.Popen(
        ["ip", "netns", "exec", f"{name}-{host}", *new],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    until = time.monotonic() + 20
    while time.monotonic() < until and outer.poll() is None:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "sshd":
            return int(children[0])
        time.sleep(0.02)
    raise SystemExit(f"{host} did not start: {(folder / f'{host}.init.log').read_text()}")


def is_first_process(state: dict[str, Any], host: str) -> bool:
    """Whether a machine's first process is still that: its number may be somebody else's by now."""
    try:
        here = os.stat(f"/proc/{state['init'][host]}/ns/net").st_ino
        return here == os.stat(f"/run/netns/{state['name']}-{host}").st_ino
    except OSError:
        return False


def end(init: int) -> None:
    """Kill a machine's first process, and with it all others there."""
    try:
        os.kill(init, signal.SIGKILL)
    except ProcessLookupError:
        return
    while Path(f"/proc/{init}").exists():
        time.sleep(0.02)


def remove(state: dict[str, Any]) -> None:
    """Remove the namespaces; interfaces go with them."""
    for host in [*state["hosts"], "switch"]:
        subprocess.run(["ip", "netns", "delete", f"{state['name']}-{host}"], check=False, capture_output=True)


def address(number: int) -> str:
    """Return a machine's address."""
    return f"{NETWORK}.{number}"


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write down what there is."""
    (folder / "cluster.json").write_text(json.dumps(state))


def which(name: str) -> str | None:
    """Return where a program is; administrators' folders are not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def run(*command: str) -> None:
    """Run a command that has to succeed."""
    subprocess.run([which(command[0]) or command[0], *command[1:]], check=True, capture_output=True, text=True)
