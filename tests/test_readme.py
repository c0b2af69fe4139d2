"""The commands of the README are run as they stand there, with a tiny model where they would take long."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

from ranks import BIN, free_port, run  # noqa: E402

from toolkit.config.load import load  # noqa: E402
from toolkit.config.rules import check_rules  # noqa: E402
from toolkit.launch.deepspeed import split_words  # noqa: E402

DOCUMENTS = ("README.md", "README_zh.md")
# Not run here: they are this very suite's environment, a cluster's, or need weights that are not there.
ELSEWHERE = (
    "git clone",
    "export PIP_EXTRA_INDEX_URL=",
    "scripts/",
    "source ",
    "python3 -m venv",
    "pip install",
    "deepspeed --hostfile",
    "toolkit launch ",  # composed below
    "torchrun --nproc-per-node 8",
)
SMALL = ["model=glm_tiny", "data.max_samples=40", "train.max_steps=1", "schedule.warmup_ratio=0", "evaluate.prompts=[]"]
SMALL += ["report.enabled=false"]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def commands(document: str) -> list[str]:
    """Return the shell lines of a document, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_links_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_anchors_exist() -> None:
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        text = FENCE.sub("", document.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\(((?!http)[^)#\s]*\.md)?#([^)\s]+)\)", text):
            page = document.parent / target if target else document
            assert anchor in anchors(page), f"{document.name}: {target}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_is_launched_composes(document: str) -> None:
    launched = [line for line in commands(document) if line.startswith("toolkit launch ")]
    assert launched
    for line in launched:
        _, words = split_words(shlex.split(line)[2:])
        check_rules(load([word for word in words if not word.startswith("hostfile=")]), files=False)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_first_screen_is_short(document: str) -> None:
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    assert next(number for number, line in enumerate(lines) if line.startswith("## ")) <= 45
    assert len(lines) <= 130


@pytest.mark.parametrize("document", DOCUMENTS)
def test_memory_that_is_planned_is_that_of_the_recipe(document: str) -> None:
    """tests/docs/test_recipes_page.py compares the recipe's header with the plan."""
    text = (ROOT / document).read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^toolkit launch --num_gpus 1 recipe=(\w+) ", text, re.MULTILINE)
    header = (ROOT / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8")
    (gib,) = re.findall(r"1xRTX 4090: ([\d.]+) GiB per GPU", header)
    (line,) = re.findall(r"^\*\*.*Qwen3-8B.* GiB.*$", text, re.MULTILINE)
    assert f" {gib} GiB" in line


@pytest.mark.ranks
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
