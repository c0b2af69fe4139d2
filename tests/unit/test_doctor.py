"""What is made of machines' facts, and how machines are asked, with a stand-in for ssh that runs the command here."""

import copy
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from toolkit.cli import main
from toolkit.config.load import load
from toolkit.config.schema import Init, ModelConfig, RunConfig
from toolkit.extras.doctor import examine, facts, findings as findings_module
from toolkit.extras.doctor.findings import ERROR, NOTE, WARNING

CARD = {"index": "0", "name": "H200", "mib": 141000, "free_mib": 140000, "used_by": 0}
ONE: dict[str, Any] = {
    "python": "3.11.7",
    "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0", "numpy": "2.0"},
    "nccl": "2.27",
    "code": {"commit": "abc", "files": {"run.py": "1", "toolkit/x.py": "2"}},
    "accelerator": "cuda",
    "is_cpu_by_default": False,
    "gpus": {"driver": "570", "cards": [CARD, CARD], "late": False},
    "takes_secrets": True,
    "cores": 8,
    "memory": 1 << 35,
    "network": {
        "cards": {
            "lo": {"address": "127.0.0.1", "up": True, "mtu": 65536},
            "docker0": {"address": "172.17.0.1", "up": True, "mtu": 1500},
            "eth0": {"address": "10.0.0.1", "up": True, "mtu": 1500},
        },
        "own_name": "10.0.0.1",
        "first": "10.0.0.1",
        "asked": {"gloo": "", "nccl": ""},
    },
    "limits": {"open files": 65536, "locked memory": -1, "processes": -1},
    "locks": [],
    "environment": {"HF_HOME": "h"},
    "recipe": {"optim.lr": "1", "run.name": "x"},
    "files": {"model.path": {"path": "/m", "hash": "1", "bytes": 1 << 33}},
    "stores": ["f00d"],
    "disks": {"run.dir": {"path": "/r", "free": 1 << 40, "error": ""}},
    "nvme": {},
    "ops": {"needed": [], "built": [], "lacking": []},
}
PATHS: dict[str, tuple[str, Any, str, str, str]] = {
    "code": (
        "code.files",
        {"run.py": "9", "toolkit/x.py": "2"},
        "code",
        ERROR,
        "b has other code than a (commit abc, not abc): run.py.",
    ),
    "recipe": (
        "recipe",
        {"optim.lr": "2", "run.name": "x"},
        "recipe",
        ERROR,
        "something else on b than on a: optim.lr = 2 (1).",
    ),
    "wrong": ("wrong", "no such key", "recipe", ERROR, "b: no such key"),
    "torch": ("packages.torch", "2.12.0", "versions", ERROR, "b has torch 2.12.0, a has 2.13.0."),
    "no transformers": ("packages.transformers", "", "versions", ERROR, "b has transformers not at all, a has 5.23.0."),
    "python": ("python", "3.12.1", "versions", ERROR, "b has python 3.12.1, a has 3.11.7."),
    "a later Python": ("python", "3.11.9", "versions", WARNING, "b has python 3.11.9, a has 3.11.7."),
    "late": ("gpus", {"driver": "570", "cards": [], "late": True}, "GPUs", WARNING, "b: nvidia-smi gave no answer."),
    "memory unknown": (
        "gpus.cards",
        [CARD, {**CARD, "mib": 0, "free_mib": 0, "used_by": 1}],
        "GPUs",
        WARNING,
        "1 other",
    ),
    "cache": (
        "disks",
        {"prepare.dir": {"path": "/c", "free": 0, "error": "Read-only"}},
        "disks",
        WARNING,
        "b: prepare.dir /c: Read-only.",
    ),
    "numpy": ("packages.numpy", "1.9", "versions", WARNING, "b has numpy 1.9, a has 2.0."),
    "nccl": ("nccl", "2.20", "versions", ERROR, "b has nccl 2.20, a has 2.27."),
    "driver": ("gpus.driver", "560", "versions", WARNING, "b has driver 560, a has 570."),
    "few GPUs": (
        "gpus.cards",
        [CARD],
        "GPUs",
        ERROR,
        "b: the hostfile gives it 2 slots, nvidia-smi shows 1 GPU there.",
    ),
    "no GPU": ("gpus.cards", [], "GPUs", ERROR, "b: the hostfile gives it 2 slots, nvidia-smi shows 0 GPUs there."),
    "taken": (
        "gpus.cards",
        [CARD, {**CARD, "free_mib": 900, "used_by": 1}],
        "GPUs",
        ERROR,
        "b: GPU 0 has 900 of 141000 MiB free; 1 other",
    ),
    "used": ("gpus.cards", [CARD, {**CARD, "used_by": 2}], "GPUs", WARNING, "2 other processes use it"),
    "mixed": ("gpus.cards", [CARD, {**CARD, "name": "A100"}], "GPUs", WARNING, "different GPUs take part: "),
    "lock": ("locks", ["/e/cpu_adam/lock"], "ops", ERROR, "On b:  rm /e/cpu_adam/lock"),
    "compiler": (
        "ops",
        {"needed": ["cpu_adam"], "built": [], "lacking": ["g++"]},
        "ops",
        ERROR,
        "b has to build DeepSpeed's cpu_adam and lacks g++. Install that there, or set optim.torch=true.",
    ),
    "to build": (
        "ops",
        {"needed": ["cpu_adam"], "built": [], "lacking": []},
        "ops",
        NOTE,
        "b will build DeepSpeed's cpu_adam",
    ),
    "no file": ("files.model.path", {"path": "/m", "error": "gone"}, "files", ERROR, "b: model.path /m: gone"),
    "other file": ("files.model.path.hash", "2", "files", ERROR, "b: model.path /m holds something else than on a."),
    "stores": ("stores", [], "files", NOTE, "not all prepared data of prepare.dir is on b:"),
    "read-only": ("disks.run.dir.error", "Read-only", "disks", ERROR, "b: run.dir /r: Read-only."),
    "full": ("disks.run.dir.free", 1 << 29, "disks", ERROR, "b: run.dir /r has 0.5 GiB free."),
    "small": ("disks.run.dir.free", 1 << 34, "disks", WARNING, "has 16.0 GiB free; a checkpoint may take 48.0."),
    "slow NVMe": (
        "nvme",
        {"/n": {"write_mb_s": 90.0, "read_mb_s": 3000.0}},
        "disks",
        WARNING,
        "b: /n writes 90 and reads 3000 MB/s",
    ),
    "no NVMe": ("nvme", {"/n": {"error": "gone"}}, "disks", ERROR, "b: nvme /n: gone."),
    "files": ("limits.open files", 1024, "limits", WARNING, "b: the limit of open files is 1024."),
    "variable": ("environment", {}, "environment", WARNING, "HF_HOME (b)"),
}


def facts_with(path: str, value: Any) -> dict[str, dict[str, Any]]:
    """Return three machines of which b is different; names of parts may have dots."""
    machines = {host: copy.deepcopy(ONE) for host in "abc"}
    place, rest = machines["b"], path
    while rest not in place and "." in rest:
        name = next(name for name in place if rest.startswith(name + "."))
        place, rest = place[name], rest.removeprefix(name + ".")
    place[rest] = value
    return machines


RESOURCES = {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
HERE = {"HF_HOME": "h", "NCCL_DEBUG": "forwarded anyway"}


def test_nothing_is_found_where_nothing_is() -> None:
    assert findings_module.findings({host: ONE for host in "abc"}, RESOURCES, HERE) == []


@pytest.mark.parametrize("case", PATHS)
def test_what_is_different_is_found(case: str) -> None:
    path, value, check, level, text = PATHS[case]
    findings = findings_module.findings(facts_with(path, value), RESOURCES, HERE)
    assert [(one.check, one.level) for one in findings] == [(check, level)], findings
    assert text in findings[0].text


def test_of_two_machines_the_first_is_the_usual_one() -> None:
    machines = facts_with("packages.torch", "2.12.0")
    del machines["a"]
    assert findings_module.findings(machines, RESOURCES, {})[0].text.startswith("c has torch 2.13.0, b has 2.12.0.")


def test_cpu_ranks_need_cores() -> None:
    machines = {
        host: {**ONE, "gpus": {"driver": "", "cards": [], "late": False}, "accelerator": "cpu", "cores": 1}
        for host in "ab"
    }
    found = findings_module.findings(machines, RESOURCES, {})
    assert [one.level for one in found] == [WARNING, WARNING]
    assert found[1].text.startswith("b: 2 slots on 1 CPU cores, and no GPU")


def test_secrets_that_would_not_arrive() -> None:
    machines = facts_with("takes_secrets", False)
    assert findings_module.secrets(machines, []) == []
    assert findings_module.secrets({"a": ONE}, ["HF_TOKEN"]) == []
    (found,) = findings_module.secrets(machines, ["HF_TOKEN"])
    assert found.level == ERROR
    assert found.text.startswith("the sshd of b does not take LC_TOOLKIT_ENV, so HF_TOKEN would not arrive.")


def test_the_example_of_a_hostfile_is_no_hostfile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("socket.getaddrinfo", Mock(side_effect=OSError))
    assert main(["doctor", f"hostfile={Path(__file__).parents[2] / 'hostfile.example'}"]) == 2
    assert "node1 is a name in hostfile.example, and no node here has it" in capsys.readouterr().err


def test_what_is_hidden_is_no_part_of_a_model(tmp_path: Path) -> None:
    shape = RunConfig().model.shape
    found = []
    for number in range(3):
        folder = tmp_path / str(number) / "model"
        (folder / ".cache" / "huggingface").mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(100_000) + (b"x" if number == 2 else b"y"))
        (folder / ".cache" / "huggingface" / "weights.metadata").write_text(str(number))
        cfg = RunConfig(model=ModelConfig(path=str(folder), init=Init.pretrained, shape=shape))
        found.append(facts.of_recipe(cfg, {})["files"]["model.path"])
    assert found[0]["hash"] == found[1]["hash"] != found[2]["hash"]
    assert found[0]["bytes"] == 100_001
    gone = RunConfig(model=ModelConfig(path="/nowhere", init=Init.pretrained, shape=shape))
    assert "error" in facts.of_recipe(gone, {})["files"]["model.path"]


def test_a_model_of_the_hub_is_what_this_machine_has_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks download the rest: no launch over several nodes may stop for it."""
    snapshot = tmp_path / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    cfg = load(["recipe=chatglm"]).cfg
    for known, holds in ((None, False), (str(snapshot / "config.json"), True)):
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, known=known, **__: known)
        found = facts.of_recipe(cfg, {})["files"]
        assert found.get("model.path", {}).get("hash") == ("c0ffee" if holds else None)


@pytest.mark.parametrize(
    ("seen", "options", "gpus"),
    [("4,5", {}, [4, 5]), ("4,5", {"--num_gpus": "1"}, [0]), ("", {}, [0]), ("GPU-1f", {}, [0])],
)
def test_the_gpus_of_this_machine_that_deepspeed_takes(
    seen: str, options: dict[str, str], gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/dev/nvidia0")])
    assert examine._hosts(options) == {"localhost": gpus}


def test_a_warning_of_nvidia_smi_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "WARNING: infoROM is corrupted at gpu 0000:01:00.0\n0, GPU-1f, NVIDIA H100, 570.10, 81559, 80000\n"
    monkeypatch.setattr(facts, "_run", lambda *words: listing if "index" in words[1] else "GPU-1f\n")
    seen = facts._gpus()
    assert (seen["driver"], [card["mib"] for card in seen["cards"]]) == ("570.10", [81559])


def test_code_is_compared_with_its_tables() -> None:
    files = {*facts._code()["files"]}
    assert {
        "run.py",
        "toolkit/extras/doctor/facts.py",
        "toolkit/plan/gpus.yaml",
        "toolkit/engine/ds_keys.json",
    } <= files
    assert {"conf/zero/stage3.yaml", "recipes/quickstart.yaml"} <= files


def test_a_firewall_for_datagrams_is_no_small_mtu() -> None:
    listener = facts.Listener("127.0.0.1")
    peer = {"address": "127.0.0.1", "tcp": listener.tcp, "udp": listener.udp}
    try:
        assert facts.can_connect("127.0.0.1", 1500, {"a": peer}) == {"a": {"error": "", "meet": "", "mtu": True}}
        assert facts.can_connect("127.0.0.1", 1500, {"a": {**peer, "udp": 9}})["a"]["mtu"] is None
        assert facts.can_connect("127.0.0.1", 1500, {"a": {**peer, "tcp": 9}})["a"]["error"] == "Connection refused"
        assert isinstance(facts.link_speed("127.0.0.1", peer), float)
    finally:
        listener.close()


def test_clocks() -> None:
    assert findings_module.clocks({"a": 0.0, "b": 0.4, "c": -3.0}) == []
    found = findings_module.clocks({"a": -599.0, "b": 1.0, "c": 0.5, "d": 10.5})
    assert [(one.level, one.text.split(":")[0]) for one in found] == [
        (ERROR, "a's clock is -600 s off"),
        (WARNING, "d's clock is +10 s off"),
    ]


@pytest.mark.parametrize(
    ("change", "interface", "backend", "name"),
    [
        ({}, "", "gloo", "eth0"),
        ({}, "", "nccl", "eth0"),
        ({}, "", "hccl", "eth0"),
        ({}, "docker0", "gloo", "docker0"),
        ({}, "eth1", "gloo", ""),
        ({"own_name": "127.0.1.1"}, "", "gloo", "lo"),
        ({"own_name": ""}, "", "gloo", ""),
        ({"asked": {"gloo": "docker0", "nccl": "^docker,lo"}}, "", "gloo", "docker0"),
        ({"asked": {"gloo": "docker0", "nccl": "^docker,lo"}}, "", "nccl", "eth0"),
        ({"asked": {"gloo": "", "nccl": "=eth"}}, "", "nccl", ""),
        ({"asked": {"gloo": "", "nccl": "eth"}}, "", "nccl", "eth0"),
    ],
)
def test_the_card_that_a_backend_takes(change: dict[str, Any], interface: str, backend: str, name: str) -> None:
    assert facts.chosen_card({**ONE["network"], **change}, interface, backend)[0] == name


def test_cards() -> None:
    lo, eth0 = (ONE["network"]["cards"][name] for name in ("lo", "eth0"))
    machines = {host: ONE for host in "abcd"}
    found = findings_module.interfaces(
        {"a": ("eth0", eth0), "b": ("lo", lo), "c": ("", {}), "d": ("eth0", {**eth0, "up": False})},
        machines,
        "",
        "gloo",
    )
    assert [one.level for one in found] == [ERROR] * 3
    assert "Set distributed.interface to one of docker0, eth0, or" in found[0].text
    assert found[2].text.startswith("d: the network card eth0 is down.")
    found = findings_module.interfaces({"a": ("", {})}, machines, "ib0", "gloo")
    assert found[0].text.startswith("a has no network card ib0, only docker0, eth0.")


def test_a_slow_machine_is_named_and_of_two_neither() -> None:
    rates: dict[tuple[str, str], float | str] = {("a", "b"): 900.0, ("b", "c"): 100.0, ("c", "a"): 110.0}
    rates |= {("b", "a"): 910.0, ("c", "b"): 105.0, ("a", "c"): 90.0}
    assert findings_module.speeds(rates) == []
    rates = {pair: rate / 10 if "c" in pair and not isinstance(rate, str) else rate for pair, rate in rates.items()}
    (found,) = findings_module.speeds(rates)
    assert found.level == ERROR
    assert "(the fastest carries 910 MB/s). All links of c are slow, no others." in found.text
    (found,) = findings_module.speeds({("a", "b"): 1.0, ("b", "a"): 1.0})
    assert "All links" not in found.text
    (found,) = findings_module.speeds({("a", "b"): "reset", ("b", "a"): 100.0})
    assert found.text.splitlines() == ["transfers broke off:", "    a -> b: reset"]


def rank(pair_s: float, **more: Any) -> dict[str, Any]:
    return {"bytes": 1 << 20, "seconds": 1.0, "right": True, "pair_bytes": 1 << 18, "pair_s": pair_s, **more}


def test_the_all_reduce_names_the_slow_pair() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    found, told = findings_module.collective({n: rank(0.001, seconds=0.01) for n in range(4)}, hosts)
    assert (found, told) == ([], "4 ranks, 1 MiB, 157 MB/s on each link")
    found, _ = findings_module.collective({n: rank(0.5 if n == 2 else 0.001) for n in range(4)}, hosts)
    assert "\n    1 (a) -> 2 (b): 0.52 MB/s\n" in found[0].text
    found, _ = findings_module.collective({0: rank(0.1), 1: rank(0.1, right=False)}, hosts)
    assert "wrong sum on ranks 1 (a)" in found[0].text
    found, _ = findings_module.collective({0: rank(0.1), 1: {"error": "no route"}}, hosts)
    assert found[0].text.splitlines()[1] == "    1 (a): no route"


SSH = """#!/bin/sh
for last; do host=$previous; previous=$last; done
case "$host" in
  good*) printf "a greeting> "; exec sh -c "$last" ;;
  strange) echo "Host key verification failed." >&2; exit 255 ;;
  bare) exec sh -c "cd /; exec /nowhere/python -m toolkit" ;;
  *) echo "warning: x" >&2; echo "me@bad: Permission denied (publickey)." >&2; exit 255 ;;
esac
"""


def test_machines_are_asked_through_ssh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    hosts = tmp_path / "hostfile"
    hosts.write_text("".join(f"{host} slots=1\n" for host in ("good1", "good2", "strange", "bad", "bare")))
    code = main(["doctor", f"hostfile={hosts}", "quick=true"])
    said = capsys.readouterr().out
    assert code == 2
    lines = [line.strip() for line in said.splitlines() if line.startswith("  ssh: ")]
    assert lines == [
        "ssh: strange: Host key verification failed. Log in once and accept its key:  ssh strange hostname",
        "ssh: bad: me@bad: Permission denied (publickey). Give it your key:  ssh-copy-id bad",
        "ssh: bare: sh: 1: exec: /nowhere/python: not found. Install the toolkit there, in the same place.",
    ]
    assert "Nodes: 5, errors: 3, " in said


def test_the_language_alone_needs_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "quick=true", "language=zh"])
    said = capsys.readouterr()
    assert "1 个节点" in said.out and "没有选择配方" not in said.err
