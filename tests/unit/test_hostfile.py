"""The hostfile, read strictly."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from toolkit.launch.hostfile import check_visible_devices_here, parse_hostfile, read_hostfile
from toolkit.messages import LaunchError

WRONG = {
    "node1 slots=8\nnode1 slots=8\n": "h:2: node1 is listed twice: give all its slots in one line.",
    "node1\n": "h:1: 'node1': write `HOST slots=N`, for example `node1 slots=8`.",
    "node1:8\n": "h:1: 'node1:8': write `HOST slots=N`, for example `node1 slots=8`.",
    "node1 slots: 8\n": "h:1: 'node1 slots: 8': write `HOST slots=N`, for example `node1 slots=8`.",
    "node1 slots=8 max=9\n": "h:1: 'node1 slots=8 max=9': write `HOST slots=N`, for example `node1 slots=8`.",
    "\nnode1 slots=8O\n": "h:2: slots=8O is no number of GPUs from 1 to 9999.",
    "node1 slots=0\n": "h:1: slots=0 is no number of GPUs from 1 to 9999.",
    "node1 slots=99999999\n": "h:1: slots=99999999 is no number of GPUs from 1 to 9999.",
    f"node1 slots={'9' * 5000}\n": f"h:1: slots={'9' * 80}… is no number of GPUs from 1 to 9999.",
    f"{'n' * 100_000} slots=8\n": (
        f"h:1: '{'n' * 80}…' is no host name: up to 253 letters, digits, '.', '_' and '-', and no '-' in front."
    ),
    "x" * 100_000: f"h:1: '{'x' * 80}…': write `HOST slots=N`, for example `node1 slots=8`.",
    "-oProxyCommand=x slots=8\n": (
        "h:1: '-oProxyCommand=x' is no host name: up to 253 letters, digits, '.', '_' and '-', and no '-' in front."
    ),
    "h;id slots=8\n": "h:1: 'h;id' is no host name: up to 253 letters, digits, '.', '_' and '-', and no '-' in front.",
    "node1 slots=8\r\n": "h:1: Windows line end: convert the file with `dos2unix h`.",
    "\ufeffnode1 slots=8\n": "h:1: begins with a byte-order mark: save it as plain UTF-8.",
    "# only a comment\n\n": "h lists no host: write lines like `node1 slots=8`.",
    "": "h lists no host: write lines like `node1 slots=8`.",
}


@pytest.mark.parametrize("text", WRONG)
def test_each_mistake_has_its_line_and_mend(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile(text, "h")
    assert str(caught.value) == WRONG[text]


def test_what_deepspeed_reads() -> None:
    """The same file gives the same hosts in DeepSpeed's own parser."""
    text = "# cluster\nnode1 slots=8\n\n  node-2.x   slots=4  # half\nnode_3 slots=16"
    assert parse_hostfile(text, "h") == {"node1": 8, "node-2.x": 4, "node_3": 16}
    from deepspeed.launcher.runner import _parse_hostfile

    assert dict(_parse_hostfile(text.splitlines())) == parse_hostfile(text, "h")


def test_the_example_is_right() -> None:
    assert read_hostfile(Path(__file__).parents[2] / "hostfile.example") == {"node1": 8, "node2": 8}


@pytest.mark.parametrize("content", [None, b"node\xff slots=8"])
def test_unreadable(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(LaunchError, match=r"hosts cannot be read: .* DeepSpeed alone would train on this machine only"):
        read_hostfile(file)


@pytest.mark.parametrize(
    ("chosen", "options", "told"),
    [
        ("GPU-8a5f,GPU-17c2", {}, "torchrun --nproc-per-node 2 run.py"),
        ("MIG-8a5f", {}, "takes numbers of GPUs alone"),
        ("4,5", {"--num_gpus": "2"}, "--include localhost:4,5"),
        ("0,1,2", {"--num_gpus": "2"}, ""),
        ("4,5", {}, ""),
        ("4,5", {"--include": "localhost:4,5"}, ""),
        ("", {"--num_gpus": "2"}, ""),
        ("1, 0", {"--num_gpus": "2"}, ""),
        ("-1", {"--num_gpus": "2"}, ""),
        ("GPU-8a5f", {"--num_gpus": "1"}, "torchrun --nproc-per-node 1 run.py"),
        ("GPU-8a5f", {"--include": "localhost:0"}, ""),
    ],
)
def test_gpus_that_are_visible_are_those_that_are_taken(
    chosen: str, options: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's launcher drops the variable beside --num_gpus, and would train on others' GPUs."""
    monkeypatch.setattr("toolkit.config.requirements.shutil.which", lambda name: f"/usr/bin/{name}")  # nvidia-smi
    environ = {"CUDA_VISIBLE_DEVICES": chosen}
    with pytest.raises(LaunchError, match=told) if told else nullcontext():
        check_visible_devices_here(options, environ)
    check_visible_devices_here(options, environ | {"DS_ACCELERATOR": "cpu"})
