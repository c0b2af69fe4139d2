"""`launch.env`: what may be set, how it reaches the ranks, and that no secret is seen on the way."""

import json
import os
import re
import shlex
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from toolkit import secrets
from toolkit.config.load import LoadedConfig, load, replace, to_yaml
from toolkit.config.rules import check_rules
from toolkit.launch import variables
from toolkit.launch.environment import VARIABLES, Ranks
from toolkit.messages import ConfigError, LaunchError

STRANGE = " {a} ${HOME} 'b' \"c\" 中文 * \\ \\${d} $e `f`"
"""What shells, YAML, Hydra and OmegaConf each read something into."""
ESCAPED = " {a} \\${HOME} 'b' \"c\" 中文 * \\ \\\\\\${d} $e `f`"
"""As a recipe has it."""
RECIPE = """
defaults: [quickstart]
launch:
  env:
    STRANGE: 'ESCAPED'
    OFF: off
    OCTAL: 012
    FLOAT: 1e3
    TIME: 12:30:00
    TRUE: True
    NO: ""
    NAME: ${run.name}
    SEED: ${run.seed}
    SOME_TOKEN:
""".replace("ESCAPED", ESCAPED.replace("'", "''"))
ONE = Ranks(0, 0, 1, 1, "single")


def composed(tmp_path: Path, *words: str) -> LoadedConfig:
    """Return the config of the recipe above."""
    file = tmp_path / "mine.yaml"
    file.write_text(RECIPE)
    return load([f"recipe={file}", "run.name=mine", *words])


def test_values_are_as_they_were_typed(tmp_path: Path) -> None:
    words = ["launch.env.A=1e3", "launch.env.B=012", "launch.env.C=True", "launch.env.D=", "launch.env.E=null"]
    words += ["launch.env.F='\\${x} y'", "launch.env={G: off, H: 7}", "launch.env.TIME='  '"]
    loaded = composed(tmp_path, *words)
    check_rules(loaded, files=False)
    given = loaded.cfg.launch
    assert given.forwarded == ["SOME_TOKEN", "E"]
    assert given.values == {
        "STRANGE": STRANGE,
        "OFF": "off",
        "OCTAL": "012",
        "FLOAT": "1e3",
        "TIME": "  ",
        "TRUE": "True",
        "NO": "",
        "NAME": "mine",
        "SEED": "42",
        "A": "1e3",
        "B": "012",
        "C": "True",
        "D": "",
        "F": "${x} y",
        "G": "off",
        "H": "7",
    }
    saved = tmp_path / "saved.yaml"
    saved.write_text(to_yaml(loaded.cfg))
    again = [load([f"recipe={saved}"]), replace(loaded, {"run.seed": (1, "here")})]
    for other in again:
        assert other.cfg.launch.values == given.values
        assert other.cfg.launch.forwarded == given.forwarded


def test_a_reference_to_nothing_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'HOME' not found .* Where \$\{ is meant as it stands, write \\\$\{\.$"):
        composed(tmp_path, "launch.env.A='${HOME}'")


REFUSED: dict[str, tuple[str, str]] = {
    "{A-B: x}": ("A-B", "this is no name of a variable: letters, digits and _ only, and no digit in front."),
    "{1A: x}": ("1A", "this is no name of a variable"),
    **{
        f"{{{name}: '1'}}": (name, "the launcher sets this variable for each rank. Remove it.")
        for name in (
            *("LOCAL_SIZE", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
            *("ASCEND_RT_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID", "PYTHON_TOOLKIT_REPORT", "LC_TOOLKIT_ENV"),
            *(name for names in VARIABLES.values() for name in names),
        )
    },
    "{RANK: null}": ("RANK", "the launcher sets this variable"),
    "{NCCL_SOCKET_IFNAME: lo}": ("NCCL_SOCKET_IFNAME", "distributed.interface = lo sets this variable."),
    "{A: [b]}": ("A", "write a text, a number, true or false, or nothing behind the name."),
    "{A: {b: c}}": ("A", "write a text"),
    "{HF_TOKEN: hunter2}": (
        "HF_TOKEN",
        "a secret has no place in a recipe. Write `HF_TOKEN:` without a value (null), and set the variable where you "
        "type the command.",
    ),
    "{db_password: 1234567}": ("db_password", "a secret has no place in a recipe."),
    "{A: 'b\tc'}": ("A", "the value holds control characters, such as a line break or a tab."),
}


@pytest.mark.parametrize("env", REFUSED)
def test_refused(env: str) -> None:
    name, reason = REFUSED[env]
    loaded = load(["recipe=quickstart", "distributed.interface=lo", f"launch.env={env}"])
    with pytest.raises(ConfigError) as caught:
        check_rules(loaded, files=False)
    assert f"launch.env.{name}: {reason}" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_what_only_looks_like_a_secret_is_taken(tmp_path: Path) -> None:
    env = f"{{TOKENIZERS_PARALLELISM: false, SSL_KEY_FILE: {tmp_path}, NCCL_SOCKET_IFNAME: lo, HF_TOKEN: ''}}"
    check_rules(load(["recipe=quickstart", f"launch.env={env}"]), files=False)


class Replaced(Exception):
    """The process would be another one now."""


def replaced(program: str, words: list[str], environ: dict[str, str]) -> None:
    """Stand in for os.execve."""
    raise Replaced(program, words, environ)


def test_a_process_starts_anew_once_for_what_is_read_at_its_start() -> None:
    env = {"PYTHONHASHSEED": "7", "OMP_PLACES": STRANGE, "SOME_TOKEN": None}
    inherited = {"PATH": "/bin", "SOME_TOKEN": "of-no-form-12"}
    environ = {**inherited, "RANK": "0"}
    with pytest.raises(Replaced) as caught:
        variables.apply_env(env, ONE, environ, inherited, replaced)
    program, words, given = caught.value.args
    assert program == sys.executable
    assert words == [sys.executable, *sys.orig_argv[1:]]
    assert "RANK" not in given, "who it is has to be told by the launcher again"
    assert {name: given[name] for name in env} == {**env, "SOME_TOKEN": "of-no-form-12"}
    environ = {**given, "RANK": "0"}
    variables.apply_env(env, ONE, environ, given, replaced)
    assert environ == {**inherited, "RANK": "0", "PYTHONHASHSEED": "7", "OMP_PLACES": STRANGE}
    variables.apply_env(
        env, ONE, {**given, "PYTHONHASHSEED": "8"}, given, replaced
    )  # something sets it again: no endless loop


def test_the_rest_is_set_without_that() -> None:
    environ = {"OMP_PLACES": "cores", "PYTHONHASHSEED": "7"}
    variables.apply_env({"OMP_PLACES": "{0}", "PYTHONHASHSEED": "7", "NCCL_X": "1"}, ONE, environ, {}, replaced)
    assert environ == {"OMP_PLACES": "{0}", "PYTHONHASHSEED": "7", "NCCL_X": "1"}


def test_what_was_sent_is_unpacked() -> None:
    sent = json.dumps({"A": STRANGE, "B": "sent", "LD_PRELOAD": "x"})
    environ = {variables.PACKED: sent, "B": "of this machine"}
    variables.apply_env({"A": None, "B": None}, ONE, environ, environ, replaced)
    assert environ == {"A": STRANGE, "B": "of this machine"}, "and nothing that was not asked for"
    environ = {variables.PACKED: sent}
    with pytest.raises(Replaced) as caught:
        variables.apply_env({"LD_PRELOAD": None}, ONE, environ, dict(environ), replaced)
    assert caught.value.args[2].keys() == {"LD_PRELOAD", "PYTHON_TOOLKIT_STARTED_ANEW"}


MENDS = {
    ("deepspeed", "2"): "if sshd_config there has the line `AcceptEnv LC_*`",
    ("deepspeed", "1"): "Set it where you type the command:  export NAME=value",
    ("openmpi", ""): "add `-x NAME` to mpirun",
    ("slurm", ""): "where you type srun or sbatch",
    ("torchrun", ""): "on each node where you type torchrun",
    ("mpich", ""): "export NAME=value",
}


@pytest.mark.parametrize(("launcher", "machines"), MENDS)
def test_a_secret_that_is_missing(launcher: str, machines: str) -> None:
    ranks = Ranks(1, 1, 2, 2, launcher)
    environ = {"CROSS_SIZE": machines} if machines else {}
    with pytest.raises(LaunchError) as caught:
        variables.apply_env(
            {"A": None, "B": "x", "C": None, "D": None}, ranks, {**environ, "A": "", "D": "d"}, {}, replaced
        )
    host = os.uname().nodename
    assert str(caught.value).startswith(
        f"launch.env: A, C: no value in the recipe, and none in the environment on {host}. "
    )
    assert MENDS[launcher, machines] in str(caught.value)


def test_secrets_are_hidden_whatever_their_names(tmp_path: Path) -> None:
    environ = {"PLAIN": "seen-by-nobody", "SHORT": "1", "PLACE": str(tmp_path)}
    variables.apply_env(dict.fromkeys(environ), ONE, environ, {}, replaced)
    assert secrets.hide(f"seen-by-nobody 1 {tmp_path}") == f"*** 1 {tmp_path}"


SECRETS = {"SOME_TOKEN": "one-secret", "MLFLOW_TRACKING_PASSWORD": "another secret"}
LAUNCHERS: dict[str, tuple[set[str], list[str]]] = {
    "pdsh": ({"SOME_TOKEN", "MLFLOW_TRACKING_PASSWORD"}, []),
    "openmpi": ({"MLFLOW_TRACKING_PASSWORD"}, ["-x", "SOME_TOKEN", "-x", "LC_TOOLKIT_ENV"]),
    "mpich": ({"MLFLOW_TRACKING_PASSWORD"}, []),
    "slurm": ({"MLFLOW_TRACKING_PASSWORD"}, []),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_no_command_of_deepspeed_holds_a_secret(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own runners, with all that its front end exports (0.19.8)."""
    from deepspeed.launcher import multinode_runner, runner

    packed, words = LAUNCHERS[launcher]
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-p 2222")
    environ, exported = variables.launcher_environment(list(SECRETS), launcher, {**os.environ, **SECRETS})
    assert exported == words
    assert json.loads(environ["LC_TOOLKIT_ENV"]) == {name: SECRETS[name] for name in packed}
    wanted = "-p 2222 -o SendEnv=LC_TOOLKIT_ENV" if launcher == "pdsh" else "-p 2222"
    assert environ["PDSH_SSH_ARGS_APPEND"] == wanted
    options = ["--launcher", launcher, "--launcher_args", shlex.join(exported), "--master_addr", "a", "x.py", "b=c"]
    arguments: Namespace = runner.parse_args(options)
    pool: dict[str, Any] = {"a": 2, "b": 2}
    kinds: dict[str, Any] = {
        "pdsh": lambda: multinode_runner.PDSHRunner(arguments, "w"),
        "openmpi": lambda: multinode_runner.OpenMPIRunner(arguments, "w", pool),
        "mpich": lambda: multinode_runner.MPICHRunner(arguments, "w", pool),
        "slurm": lambda: multinode_runner.SlurmRunner(arguments, "w", pool),
    }
    backend = kinds[launcher]()
    for name, value in environ.items():
        if name.startswith(tuple(runner.EXPORT_ENVS)):
            backend.add_export(name, value)
    made = backend.get_cmd(dict(environ), {"a": [0, 1], "b": [0, 1]})
    command, given = (made[0] + made[1], made[2]) if launcher == "pdsh" else (made, environ)
    assert not [word for word in command for secret in SECRETS.values() if secret in word]
    assert set(words) <= set(command)
    assert "LC_TOOLKIT_ENV" in given


def test_nobody_knows_how_others_hand_variables_on() -> None:
    with pytest.raises(LaunchError, match=r"launch\.env: A: how --launcher mvapich hands on variables is not tested"):
        variables.launcher_environment(["A"], "mvapich", {"A": "b"})
    assert variables.launcher_environment([], "mvapich", {"A": "b"}) == ({"A": "b"}, [])


def test_no_export_of_deepspeed_is_forgotten() -> None:
    """Whatever the accelerator, of this version."""
    import deepspeed
    from deepspeed.launcher.runner import EXPORT_ENVS

    found = set(EXPORT_ENVS)
    for file in (Path(deepspeed.__file__).parent / "accelerator").glob("*_accelerator.py"):
        for listed in re.findall(r"def export_envs\(self\):\s+return \[(.*)\]", file.read_text()):
            found |= set(re.findall(r"['\"](\w+)['\"]", listed))
    assert len(found) > 10
    assert {name for name in found if not name.startswith(variables._ON_COMMAND_LINES)} == set()
