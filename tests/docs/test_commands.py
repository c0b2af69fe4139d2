"""Every command on a page means something to this toolkit: its config is composed and checked, up to DeepSpeed's JSON.

The README's are run one after another by tests/test_readme.py. Here those are run that load nothing.
"""

import itertools
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

import pytest
from pages import PAIRED, ROOT, blocks, chinese, commands
from torch.distributed.run import get_args_parser

from toolkit import arguments, command_line
from toolkit.cli import COMMANDS, _dispatch, main as toolkit_main
from toolkit.config import files
from toolkit.config.load import load
from toolkit.config.mesh import with_micro_batch
from toolkit.config.rules import check_rules
from toolkit.config.schema import Init, PrepareConfig
from toolkit.engine.ds_config import build_ds_config
from toolkit.launch import deepspeed
from toolkit.messages import ConfigError, read_table

ELSEWHERE = {
    "scripts/": "makes environments and trains; CI runs scripts/test, and its parts one by one",
    "git clone": "needs the network",
    "source ": "the shell's",
    "export ": "the shell's",
    "cd ": "the shell's",
    "cp ": "the shell's; tests/test_readme.py runs the one of the README",
    "curl ": "asks a server; tests/unit and tests/parity ask them",
    "pip ": "needs the network; tests/unit/test_installation.py builds and installs a wheel",
    "python3 -m venv": "makes an environment",
    "python scripts/smollm2": "needs the network; tests/docs/test_tutorial.py runs it every night",
    "head ": "the shell's; tests/docs/test_tutorial.py",
    "python examples/beside_trainer.py": "a real model and minutes; tests/docs/test_tutorial.py runs it every night",
    "accelerate merge-weights": "another program's; tests/unit/test_convert.py calls what it calls",
    "hf ": "needs the network",
    "modelscope ": "needs the network",
    "ssh": "another machine",
    "rm ": "the shell's",
    "toolkit export-config script=": "prepares data; tests/ranks/test_plain_script.py runs it",
    "deepspeed --num_gpus 8 plain/": "what that has written",
    "docker ": "needs a container engine; tests/docs/test_cluster_files.py",
    "sbatch ": "needs Slurm; tests/docs/test_cluster_files.py",
    "kubectl ": "needs Kubernetes; tests/docs/test_cluster_files.py",
    "sky ": "needs SkyPilot; tests/docs/test_cluster_files.py",
    "dstack ": "needs dstack; tests/docs/test_cluster_files.py",
}
PATHS = {"verify": ("forward=",), "report": ("runs/", "output=", "language=")}
"""Commands that take paths at once, and what stands behind the first."""
SHOWN = sorted(
    {
        *(line for page in PAIRED for _, line in commands(page)),
        *chain.from_iterable(read_table("cli/examples.yaml").values()),
    }
)
OURS = [line for line in SHOWN if not line.startswith(tuple(ELSEWHERE))]
OWN = ROOT / "toolkit" / "custom.yaml"
QUICK = [
    line
    for line in OURS
    if (line.startswith(("toolkit plan ", "toolkit export-config ")) and "…" not in line)
    or "--cfg job" in line
    or (line.startswith("toolkit check ") and "model=glm_tiny" in line)
]
"""Commands that answer in about a second and load nothing: they are run."""


class Stop(Exception):
    """A command has understood its words."""


def inner(words: list[str]) -> tuple[str, list[str], int]:
    """Return the command of ours in a line, its words, and the number of ranks that the launcher is told."""
    while "=" in words[0]:  # NAME=value in front of a command
        del words[0]
    program, rest = words[0], words[1:]
    if program == "toolkit":
        return rest[0], rest[1:], 1
    if program == "deepspeed":
        options, rest = deepspeed.split_words(rest)
        ranks = int(options.get("--num_gpus", 16 if "--hostfile" in options else 1))
    elif program == "torchrun":
        given = get_args_parser().parse_args(rest)
        rest = [*(["--module"] if given.module else []), given.training_script, *given.training_script_args]
        ranks = int(given.nproc_per_node) * int(given.nnodes.rpartition(":")[2])
    elif program.startswith(("mpirun", "srun")):
        ranks = int(next((rest[i + 1] for i, word in enumerate(rest) if word in ("-n", "--ntasks")), 16))
        rest = rest[rest.index("python") + 1 :]
    else:
        assert program == "python", f"neither known nor in ELSEWHERE: {shlex.join(words)}"
        ranks = 1
    rest = rest[1:] if rest[0] in ("--module", "-m") else rest
    if rest[0] == "toolkit":
        return rest[1], rest[2:], ranks
    if rest[0].startswith(("my_train.py", "examples/")):
        return "own", [word for word in rest[1:] if not word.startswith("images=")], ranks
    assert rest[0] == "run.py", rest
    return "train", rest[1:], ranks


def words_of(line: str) -> list[str]:
    """Return what is typed: ellipses stand for more of the same, N for a number; pipes bring text."""
    return ["0" if word == "N" else word for word in shlex.split(line.rpartition("| ")[2]) if word != "…"]


def understand(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command's own code read its words, and stop it where it would begin to work."""
    command, rest, ranks = inner(words_of(line))
    if command == "own":
        check_rules(load([f"recipe={OWN}", *rest]), ranks, files=False, custom=True)
        return
    any_recipe = "chatglm_lora_adgen" if any(word.startswith("tuning.") for word in rest) else "zero1"
    rest = [f"recipe={any_recipe}" if word == "recipe=NAME" else word for word in rest]
    module = import_module("benchmarks.run" if command == "bench" else COMMANDS[command])
    import_module(COMMANDS["sweep"])  # what --multirun hands its words to

    parse, named_arguments = arguments.parse, command_line.named_arguments

    def parsed(words: Sequence[str], **how: Any) -> NoReturn:
        how = {name: value for name, value in how.items() if name in ("names", "flags")}
        found = parse(words, **how, world_size=ranks)
        world = int(found.values.get("world_size") or found.values.get("ranks") or ranks)
        if "gpus" not in found.values and command != "eval":
            check_rules(found.loaded, world, files=False)
            cfg = with_micro_batch(found.loaded.cfg)
            build_ds_config(cfg, world, cfg.train.max_steps or 100)
        raise Stop

    def named(words: Sequence[str], **how: Any) -> NoReturn:
        named_arguments(words, **how)
        raise Stop

    modules = {arguments.__name__, command_line.__name__}
    stand_ins = {"parse": parsed, "parse_checked": parsed, "named_arguments": named}
    for place, one in list(sys.modules.items()):  # a command may hand its words to another one
        if place.startswith(("toolkit.", "benchmarks.")):
            for name, value in list(vars(one).items()):
                if isinstance(value, FunctionType) and value.__module__ in modules:
                    monkeypatch.setattr(one, name, stand_ins.get(value.__name__, value))
    if command == "eval":
        monkeypatch.setattr(module, "_with_base", lambda words: words)  # reads the adapter's folder
    if command in PATHS:
        assert not rest[0].startswith("-") and all(word.startswith(PATHS[command]) for word in rest[1:])
        return
    with pytest.raises(Stop):
        module.run(rest) if command == "bench" else _dispatch([command, *rest])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `toolkit plan` remembers of models that it has built to measure them."""
    return tmp_path_factory.mktemp("measured")


@pytest.fixture
def folder(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with what a reader has made there: a copied recipe, a hostfile."""
    (tmp_path / PrepareConfig().dir).parent.mkdir()
    (tmp_path / PrepareConfig().dir).symlink_to(measured)
    shutil.copy(ROOT / "recipes" / "zero1.yaml", tmp_path / "mine.yaml")
    (tmp_path / "hostfile").write_text("node1 slots=8\nnode2 slots=8\n")
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    (tmp_path / "my_ds_config.json").write_text('{"train_batch_size": "auto"}')
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def shown_outputs() -> list[tuple[str, str, str]]:
    """Return each quick command that is alone in its block, with the output below it and its language."""
    found = []
    for page in (one for pair in PAIRED for one in (pair, chinese(pair))):
        shown = blocks(page)
        for block, output in itertools.pairwise(shown):
            line = block.body.strip()
            below = output.line == block.line + block.body.count("\n") + 3
            if block.language == "bash" and output.language == "text" and below and line in QUICK:
                found.append((line, output.body, "zh" if page.stem.endswith("_zh") else "en"))
    return found


@pytest.mark.parametrize(("line", "output", "language"), shown_outputs())
def test_the_output_below_a_command_is_what_it_prints(
    line: str, output: str, language: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)[1:]
    assert toolkit_main([*words, f"language={language}"]) == 0
    printed = [" ".join(one.split()) for one in capsys.readouterr().out.splitlines()]
    shown = [" ".join(one.split()) for one in output.splitlines() if one != "…"]
    assert [one for one in shown if not any(one in real for real in printed)] == []


# A trace computes a full-size model's step on fake tensors: forty seconds. tests/unit/test_trace.py has small ones.
TIERED = [
    pytest.param(line, marks=pytest.mark.nightly) if "trace=true" in line else line
    for line in QUICK
    if line not in {shown for shown, _, _ in shown_outputs()}  # those run above
]


@pytest.mark.parametrize("line", TIERED)
def test_what_loads_nothing_runs(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(line)
    words[:2] = ["train"] if words[0] == "python" else words[1:2]
    assert toolkit_main(words) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


TRAINING = ("train", "launch", "sweep")
PLACES = ("/models/", "/data/", "DIR")
"""What a reader has to have before a command can be typed."""


@pytest.mark.parametrize("line", OURS)
def test_each_command_is_understood(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that trains names data and a model, or is complete as it is typed."""
    for command in TRAINING:  # one that is imported later would keep what is put in the place of `parse`
        import_module(COMMANDS[command])
    found: list[arguments.Arguments] = []
    parse = arguments.parse

    def watched(words: Sequence[str], **how: Any) -> arguments.Arguments:
        found.append(parse(words, **how))
        return found[-1]

    if inner(words_of(line))[0] in TRAINING:
        monkeypatch.setattr(arguments, "parse", watched)
    understand(line, monkeypatch)
    for cfg in (one.loaded.cfg for one in found):
        assert cfg.data.sources, "it names no data"
        assert cfg.model.init is Init.random or cfg.model.path, "it names no model"
        theirs = [place for place in PLACES if place in line]
        assert not (theirs and files.example_data_notice(cfg.data)), f"with {theirs} it should name data, too"


def test_a_command_that_is_wrong_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in (
        "toolkit check recipe=zero1 zero.stag=3",
        "deepspeed run.py recipe=zero1 zero=stage0 zero.overlap_comm=true",
    ):
        with pytest.raises(ConfigError):
            understand(line, monkeypatch)


@pytest.mark.parametrize("page", PAIRED, ids=lambda page: page.name)
def test_both_languages_show_the_same_commands(page: Path) -> None:
    def plain(one: Path) -> list[str]:
        lines = (re.sub(r"evaluate\.prompts=\[.*?\]", "evaluate.prompts=[…]", line) for _, line in commands(one))
        return [re.sub(r"[\u4e00-\u9fff]+", "…", line) for line in lines]  # questions and names are translated

    assert plain(page) == plain(chinese(page))


def test_nothing_is_listed_in_vain() -> None:
    assert [start for start in ELSEWHERE if not any(line.startswith(start) for line in SHOWN)] == []
