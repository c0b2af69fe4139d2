"""Which nodes of a hostfile a launch with `launch.min_nodes` takes, and when it asks a run to resume on others."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.cli import main
from toolkit.config.schema import RunConfig
from toolkit.jobs import nodes
from toolkit.jobs.nodes import Nodes, fitting
from toolkit.launch import hostfile
from toolkit.launch.deepspeed import without_options
from toolkit.messages import LaunchError

# global size, micro-batch, tensor, GPUs of each node that is there, fewest, most -> nodes taken, the override
FITTING: dict[str, tuple[int, int | str, int, list[int], int, int, int, list[str]]] = {
    "all": (24, 2, 1, [4, 4, 4], 1, 0, 3, []),
    "no more than asked for": (24, 3, 1, [4, 4, 4], 1, 2, 2, []),
    "as the global batch divides over": (32, 1, 1, [8, 8, 8], 1, 0, 2, []),
    "with a smaller micro-batch": (24, 4, 1, [4, 4], 1, 0, 2, ["batch.micro_per_gpu=3"]),
    "with one that is found later": (24, "auto", 1, [4, 4, 4], 1, 0, 3, []),
    "as groups that share a model divide": (24, 1, 4, [4, 2, 2], 1, 0, 3, []),
    "not half a group": (24, 1, 4, [4, 2], 1, 0, 1, []),
    "different numbers of GPUs": (24, 1, 1, [8, 4, 2], 1, 0, 2, []),
}


@pytest.mark.parametrize("name", FITTING)
def test_the_most_nodes_that_fit(name: str) -> None:
    size, micro, tensor, gpus, least, most, taken, words = FITTING[name]
    cfg = config(size, least, most)
    cfg.batch.micro_per_gpu, cfg.parallel.tensor = micro, tensor
    hosts = {f"node{number}": list(range(count)) for number, count in enumerate(gpus)}
    assert fitting(cfg, hosts) == (dict(list(hosts.items())[:taken]), words)


def test_none_that_fit() -> None:
    with pytest.raises(LaunchError, match="cannot be divided over 2 to 3 of these nodes"):
        fitting(config(16, least=2), {f"node{number}": [0, 1, 2, 3, 4] for number in range(3)})


def config(size: int, least: int = 1, most: int = 0) -> RunConfig:
    """Return a config of a global batch."""
    cfg = RunConfig()
    cfg.batch.global_size, cfg.launch.min_nodes, cfg.launch.max_nodes = size, least, most
    return cfg


def test_options_without_some() -> None:
    typed = ["--hostfile", "h", "--include", "a@b", "--num_nodes=2", "--no_ssh_check", "-i", "a"]
    assert without_options(typed, hostfile.SELECTION_OPTIONS) == ["--hostfile", "h", "--no_ssh_check"]


class Fleet:
    """Nodes that answer, and those that would break a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self.there, self.broken, self.file = {"node1", "node2", "node3"}, set[str](), file
        self.examined: list[set[str]] = []
        self.list("node1", "node2", "node3")
        monkeypatch.setattr(nodes, "LOOK_EVERY_S", 0.01)
        monkeypatch.setattr(Nodes, "_answering", lambda _, hosts: [host for host in hosts if host in self.there])
        monkeypatch.setattr(Nodes, "_hosts_with_errors", lambda _, hosts: self._unfit(set(hosts)))
        monkeypatch.setattr(Nodes, "_check", lambda _: None)

    def list(self, *hosts: str) -> None:
        """Write the hostfile."""
        self.file.write_text("".join(f"{host} slots=2\n" for host in hosts))

    def _unfit(self, hosts: set[str]) -> set[str]:
        self.examined.append(hosts)
        return hosts & self.broken

    def launched(self, size: int = 12, most: int = 0, least: int = 1) -> Nodes:
        """Return the nodes of a launch that begins now."""
        return Nodes(["--hostfile", str(self.file)], ["recipe=x"], config(size, least, most))


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fleet:
    """Three nodes that are there."""
    return Fleet(monkeypatch, tmp_path / "hostfile")


def never() -> bool:
    return False


def test_one_goes_and_comes(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    launched = fleet.launched()
    assert launched.typed[-2:] == ["--include", "node1:0,1@node2:0,1@node3:0,1"]
    assert not launched.would_change()
    fleet.there.remove("node2")
    launched.choose_again(never)
    assert launched.typed == ["--hostfile", str(fleet.file), "--include", "node1:0,1@node3:0,1"]
    assert not launched.would_change()
    fleet.there.add("node2")
    assert launched.would_change()
    assert fleet.examined[-1] == {"node2"}
    launched.choose_again(never)
    assert list(launched.hosts) == ["node1", "node2", "node3"]
    shown = capsys.readouterr().out
    assert "No answer through ssh, left out: node2" in shown
    assert shown.count("node3  GPUs 0-1  ranks 4-5") == 2 and shown.count("node3  GPUs 0-1  ranks 2-3") == 1


def test_a_single_node_that_is_left_needs_pdsh_too(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's launcher reaches it by --force_multi."""
    fleet.there = {"node1"}
    monkeypatch.undo()
    monkeypatch.setattr(Nodes, "_answering", lambda _, hosts: [host for host in hosts if host in fleet.there])
    monkeypatch.setattr("toolkit.launch.deepspeed.shutil.which", lambda _: None)
    monkeypatch.chdir(fleet.file.parent)
    with pytest.raises(LaunchError, match="several nodes need pdsh, which is not installed here"):
        fleet.launched()


def test_one_that_would_break_the_run_stays_out_until_it_is_mended(fleet: Fleet) -> None:
    fleet.there.remove("node3")
    launched = fleet.launched()
    fleet.there.add("node3")
    fleet.broken.add("node3")
    assert not launched.would_change()
    launched.choose_again(never)
    assert list(launched.hosts) == ["node1", "node2"]
    fleet.broken.clear()
    assert launched.would_change()


def test_the_hostfile_is_read_again(fleet: Fleet) -> None:
    launched = fleet.launched()
    fleet.there.add("node4")
    fleet.list("node1", "node2", "node3", "node4")
    assert not launched.would_change()  # 12 do not divide over 8 ranks
    fleet.list("node1", "node2")
    assert launched.would_change()
    launched.choose_again(never)
    assert list(launched.hosts) == ["node1", "node2"]
    fleet.file.write_text("half a li")
    with pytest.raises(LaunchError):
        launched.would_change()


def test_a_node_is_lost_without_heartbeat_and_answer(
    fleet: Fleet, tmp_path: Path, clock: Callable[[float], None]
) -> None:
    def beat(number: int, *ranks: int) -> None:
        for rank in ranks:
            (tmp_path / f"heartbeat-rank-{rank}.json").write_text(json.dumps({"beats": number}))

    launched = fleet.launched()
    assert launched.lost(tmp_path) == {}  # nothing has begun
    beat(1, 0, 2, 4)
    assert launched.lost(tmp_path) == {}
    clock(10)
    fleet.there.remove("node2")
    assert launched.lost(tmp_path) == {}  # the file server stands still
    beat(2, 0, 4)
    assert launched.lost(tmp_path) == {"node2": 10}
    fleet.there.add("node2")
    assert launched.lost(tmp_path) == {}  # it swaps, perhaps, but is there
    beat(2, 2)
    fleet.there.remove("node2")
    assert launched.lost(tmp_path) == {}
    clock(5)
    beat(3, 0)
    assert launched.lost(tmp_path) == {}
    clock(2)
    beat(4, 0, 4)
    assert launched.lost(tmp_path) == {"node2": 7}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that is set forward by hand."""
    now = [100.0]
    monkeypatch.setattr(nodes.time, "monotonic", lambda: now[0])

    def pass_(seconds: float) -> None:
        now[0] += seconds

    return pass_


def test_spares_are_no_reason_to_stop(fleet: Fleet) -> None:
    fleet.there.remove("node1")
    launched = fleet.launched(most=2)
    assert list(launched.hosts) == ["node2", "node3"]
    fleet.there.add("node1")
    assert not launched.would_change()


def test_a_smaller_micro_batch_for_some_of_them(fleet: Fleet) -> None:
    cfg = config(12)
    cfg.batch.micro_per_gpu = 2
    fleet.there.remove("node3")
    launched = Nodes(["--hostfile", str(fleet.file)], ["recipe=x"], cfg)
    assert launched.words == ["recipe=x", "batch.micro_per_gpu=1"]
    fleet.there.add("node3")
    launched.choose_again(never)
    assert launched.words == ["recipe=x"]


def test_too_few_are_an_error_first_and_waited_for_later(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    launched = fleet.launched(least=3)
    fleet.there -= {"node2", "node3"}
    with pytest.raises(LaunchError, match=r"is 3, but 1 of 3 nodes answer\. No answer through ssh: node2, node3\."):
        fleet.launched(least=3)
    looks: list[int] = []

    def come_back() -> bool:
        looks.append(0)
        fleet.there |= {"node2", "node3"} if len(looks) > 5 else set()
        return False

    launched.choose_again(come_back)
    assert len(launched.hosts) == 3
    assert capsys.readouterr().out.count("Waiting for nodes: launch.min_nodes is 3") == 1
    fleet.there.clear()
    launched.choose_again(lambda: True)


@pytest.mark.parametrize("typed", [[], ["--hostfile", "h", "--launcher", "mpich"], ["--hostfile", "h", "--no_ssh"]])
def test_what_has_no_nodes_to_choose_from(typed: list[str]) -> None:
    with pytest.raises(LaunchError, match="needs a hostfile, and DeepSpeed's launcher with pdsh"):
        Nodes(typed, [], config(12))


def test_the_number_of_ranks_is_not_checked_before_nodes_are_chosen(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three nodes with two GPUs each, 32 divide over the GPUs of two."""
    monkeypatch.setattr("toolkit.cli.launch.launch", lambda typed, words, cfg: 10 * len(Nodes(typed, words, cfg).hosts))
    words = ["launch", f"hostfile={fleet.file}", "recipe=quickstart", "run.name=x", f"run.dir={tmp_path}/runs"]
    words += ["batch.global_size=32", "checkpoint.every=5"]
    assert main([*words, "run.max_restarts=1", "launch.min_nodes=1"]) == 20
    assert "batch.global_size" not in capsys.readouterr().err
    assert main(words) == 2
    assert "batch.global_size = 32 is not a multiple" in capsys.readouterr().err
