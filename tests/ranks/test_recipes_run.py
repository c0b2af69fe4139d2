"""Every shipped recipe trains two steps on two CPU ranks with model=glm_tiny, as far as DeepSpeed can on a CPU."""

import json
from pathlib import Path

import pytest
import yaml
from ranks import REPOSITORY, forked, run
from shared import WORKER, by_tier, can_do_async_io, losses, of_tier

from toolkit.config.requirements import _has_fp16

# Needs fp16 arithmetic, which DeepSpeed 0.19.8's CPU accelerator has on few processors; the last test shows it.
# QLoRA's weights in 4 bits are bitsandbytes' kernels for NVIDIA GPUs.
NEEDS_GPU = {"fp16", "chatglm3_qlora", "glm45_air_qlora"}
# glm_tiny has no experts to divide.
DIVIDED = {"glm45_air_lora", "glm47_flash", "qwen3_30b_a3b"}
# They learn from pairs of answers.
PAIRS = {"chatglm3_dpo_lora", "qwen3_dpo", "qwen3_reward_lora"}
# It learns labels.
LABELLED = {"qwen3_classify_lora"}
# It learns from pairs of texts.
TEXTS = {"qwen3_embed_lora"}
# It has no teacher of the tiny tokenizer: the model before training is its own, on rows that are marked as general.
TAUGHT = {"qwen3_distill"}
# Their samples are longer than the positions of glm_tiny.
LONG = {"deepseek_r1_distill_qwen_7b_lora", "long_context"}
ADAM = dict.fromkeys(("glm4_0414_32b", "zero2_offload", "zero3_offload", "zero3_nvme"), "DeepSpeedCPUAdam")


def recipes() -> list[str]:
    """Return the shipped recipes that a CPU allows."""
    found = sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.yaml"))
    return [name for name in found if name not in NEEDS_GPU]


def choices(recipe: str) -> dict[str, str]:
    """Return the groups that a recipe and those it is made of choose."""
    found: dict[str, str] = {}
    for entry in yaml.safe_load((REPOSITORY / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))["defaults"]:
        if isinstance(entry, dict):
            found |= {group.removeprefix("override /"): name for group, name in entry.items()}
        elif entry != "_self_":
            found |= choices(entry)
    return found


def late() -> list[str]:
    """Return the recipes of the nightly tier: all but the first of each way of tuning under each stage of ZeRO."""
    found: dict[tuple[str | None, str | None], str] = {}
    for name in recipes():
        found.setdefault((choices(name).get("zero"), choices(name).get("tuning")), name)
    return [name for name in recipes() if name not in found.values()]


def overrides(recipe: str, rows_file: Path, folder: Path) -> list[str]:
    """Return what makes a recipe small; everything that the recipe is about stays."""
    words = [
        f"recipe={recipe}",
        "model=glm_tiny",
        f"data.sources=[{{path: {rows_file}}}]",
        "data.validation=[]",
        f"prepare.dir={folder}/cache",
        f"run.dir={folder}/runs",
        f"run.name={recipe}",
        "batch.global_size=4",
        "batch.micro_per_gpu=1",
        "train.max_steps=2",
        "train.log_every=1",
        "schedule=constant",
        "schedule.warmup_ratio=0",
        "schedule.warmup_steps=0",
        "optim.lr=0.001",
        "evaluate.prompts=[]",
        "report.enabled=false",
        "evaluate.ngram_baselines=false",
    ]
    if recipe in DIVIDED:
        words.append("parallel.expert=1")
    if recipe in TAUGHT:
        general = folder / "general.jsonl"
        general.write_text(rows_file.read_text(encoding="utf-8").replace("red", "general"), encoding="utf-8")
        sources = f"data.sources=[{{path: {rows_file}}}, {{path: {general}, general: true}}]"
        words += [sources, "distill.teacher=''", "distill.top_k=4"]
    if recipe in TEXTS:
        words.append(f"data.sources=[{{path: {rows_file}, columns: {{query: prompt, positive: chosen}}}}]")
        words.append("embed.temperature=1")  # 0.05 makes a loss that changes by 1 from batch to batch of 4 pairs
    if recipe in LABELLED:
        labelled = [json.loads(line) for line in rows_file.read_text(encoding="utf-8").splitlines()]
        labels = [{**row, "label": ("odd", "even")[number % 2]} for number, row in enumerate(labelled)]
        file = folder / "labels.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in labels), encoding="utf-8")
        words.append(f"data.sources=[{{path: {file}}}]")
    if recipe in LONG:
        words.append("data.max_length=2048")
    if recipe == "zero3_nvme":
        nvme = folder / "nvme"
        nvme.mkdir(exist_ok=True)
        words += [f"zero.offload_optimizer.nvme_path={nvme}", "zero.offload_param.buffer_size=2000000"]
    return words


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rows_file: Path, pairs_file: Path
) -> Path:
    """Run the recipes of the tier in one launch."""
    folder = tmp_path_factory.mktemp("recipes")
    wanted = of_tier(request, dict.fromkeys(recipes()), late=late())
    names = [name for name in wanted if name != "zero3_nvme" or can_do_async_io()]
    listing = folder / "cases.json"
    data = {name: pairs_file if name in PAIRS | TEXTS else rows_file for name in names}
    listing.write_text(json.dumps([{"overrides": overrides(name, data[name], folder)} for name in names]))
    finished = run(forked(2, WORKER, str(listing)), cwd=folder, timeout_s=500)
    assert finished.code == 0, finished.output[-6000:]
    assert "CPU Virtual Memory" not in finished.output, "DeepSpeed's lines about memory are left out"
    return folder / "runs"


@pytest.mark.parametrize("recipe", by_tier(recipes(), late=late()))
def test_two_steps(recipe: str, runs: Path) -> None:
    if recipe == "zero3_nvme" and not can_do_async_io():
        pytest.skip("DeepSpeed's aio op cannot be built here: libaio's headers are missing (Debian: libaio-dev)")
    folder = runs / recipe
    first, second = losses(folder)
    assert second < first + 0.5
    assert (folder / "DONE").is_file()
    part = ("adapter_model" if "lora" in recipe or "ptuning" in recipe else "model") + ".safetensors"
    assert (folder / "export" / part).is_file()
    log = (folder / "logs" / "rank_0.log").read_text()
    if recipe in ADAM:
        assert f"DeepSpeed Basic Optimizer = {ADAM[recipe]}" in log


def test_nvme_is_really_used(runs: Path) -> None:
    """DeepSpeed deletes its swap files at the end, but not the folders that it made for each rank."""
    if not can_do_async_io():
        pytest.skip("DeepSpeed's aio op cannot be built here: libaio's headers are missing (Debian: libaio-dev)")
    made = runs.parent / "nvme" / "zero_stage_3"
    assert (made / "optimizer" / "rank0").is_dir()
    assert (made / "optimizer" / "rank1").is_dir()
    assert len(list(made.glob("*params/rank*"))) == 2


def test_fp16_is_rejected_on_a_cpu_that_does_not_compute_in_it(rows_file: Path, tmp_path: Path) -> None:
    finished = run(forked(2, str(REPOSITORY / "run.py"), *overrides("fp16", rows_file, tmp_path)), cwd=tmp_path)
    if _has_fp16(Path("/proc/cpuinfo")):  # as Xeons do from Sapphire Rapids on
        assert finished.code == 0, finished.output[-3000:]
        return
    assert finished.code == 2, finished.output[-3000:]
    assert "precision.dtype = fp16 needs a GPU" in finished.output
    assert "Traceback" not in finished.output
