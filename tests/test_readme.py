"""The commands of the README are run as they stand there, with a tiny model where they would take long."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

from ranks import BIN, free_port, run  # noqa: E402

DOCUMENTS = ("README.md", "README_zh.md")
# Not run here: they are this very suite's environment, a cluster's, or need weights that are not there.
ELSEWHERE = (
    "scripts/",
    "source ",
    "python3 -m venv",
    "pip install",
    "deepspeed --hostfile",
    "toolkit launch recipe=NAME hostfile=hostfile",
    "torchrun --nproc-per-node 8",
)
SMALL = ["model=glm_tiny", "data.max_samples=40", "train.max_steps=1", "schedule.warmup_ratio=0", "evaluate.prompts=[]"]
SMALL += ["report.enabled=false"]


def commands(document: str) -> list[str]:
    """Return the shell lines of a document, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_links_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_commands_run(tmp_path: Path) -> None:
    """One after another in one folder, as a reader would."""
    for name in ("run.py", "recipes", "conf", "examples", "toolkit"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    ran = []
    for line in commands("README.md"):
        if line.startswith(ELSEWHERE):
            continue
        words = shlex.split(line)
        if "run.py" in words and "--cfg" not in words:
            words = ["recipe=zero1" if word == "recipe=NAME" else word for word in words]
            words += [*SMALL, f"prepare.dir={tmp_path}/cache", "run.name=readme-" + str(len(ran)), "optim.torch=true"]
        if words[0] == "toolkit" and words[1] in ("generate", "chat", "serve", "export-model"):
            continue  # need a model; tests/unit, tests/parity and tests/system/test_launch_and_fail.py run them
        if words[0] == "deepspeed":
            words[1:1] = ["--num_gpus", "2", "--master_port", str(free_port())]
        words[0] = {"python": sys.executable, "toolkit": str(BIN / "toolkit"), "deepspeed": str(BIN / "deepspeed")}.get(
            words[0], words[0]
        )
        finished = run(words, cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert finished.code == 0, f"{line}\n{finished.output[-3000:]}"
        ran.append(line)
    assert len(ran) >= 8, ran


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_is_run_or_listed(document: str) -> None:
    known = ("cp ", "toolkit ", "python run.py", "deepspeed run.py", *ELSEWHERE)
    assert [line for line in commands(document) if not line.startswith(known)] == []
