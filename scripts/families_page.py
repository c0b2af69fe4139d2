#!/usr/bin/env python3
"""Write docs/families.md and its Chinese: conf/model by family, with planned memory, download and command.

`scripts/families_page.py plan` plans every model first and records the figures in benchmarks/, which takes minutes.
"""

import argparse
import json
import re
import subprocess
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from page_tables import ROOT, newest, row, write

from toolkit.cli import main as toolkit_main
from toolkit.config.files import known_recipes
from toolkit.config.load import load

RECORD = ROOT / "benchmarks" / "2026-11-28-families.json"
GIB = 2**30
PLANS = {
    "lora": ["gpus=1x80GB"],
    "qlora": ["tuning=qlora", "gpus=1x80GB"],
    "full": ["tuning=full", "zero=stage3", "gpus=8x80GB"],
}
"""What is planned of each model, with recipe=lora."""
FAMILIES = yaml.safe_load((ROOT / "docs" / "families.yaml").read_text(encoding="utf-8"))
EXAMPLES = ("chatglm3_6b", "glm4_0414_9b", "qwen3_8b", "qwen35_4b", "glm5")
"""Models that a family's commands name; else its first one."""
TEXTS: dict[str, dict[str, Any]] = {
    "en": {
        "columns": ["model", "parameters", "LoRA, 1 GPU", "QLoRA, 1 GPU", "full, each of 8 GPUs"],
        "recipes": "Recipes: {}.",
        "comma": ", ",
        "other": "For another model, change `model=` and the paths.",
    },
    "zh": {
        "columns": ["模型", "参数量", "LoRA，单卡", "QLoRA，单卡", "全参数，8 卡每卡"],
        "recipes": "现成配方：{}。",
        "comma": "、",
        "other": "换成其他模型时，修改 `model=` 和路径。",
    },
}


@cache
def models() -> dict[str, dict[str, str]]:
    """Return the published models of conf/model: their name and where they are."""
    found = {}
    for path in sorted((ROOT / "conf" / "model").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        if "published:" in text:
            found[path.stem] = dict(re.findall(r"^(name|hub_id|modelscope_id): (\S+)$", text, re.MULTILINE))
    return found


@cache
def recipes() -> dict[str, list[str]]:
    """Return the recipes of each model by the model's name."""
    found: dict[str, list[str]] = {}
    for recipe in sorted(known_recipes()):
        found.setdefault(load([f"recipe={recipe}"]).cfg.model.name, []).append(recipe)
    return found


def plan(model: str) -> dict[str, Any]:
    """Return a model's parameters and the GiB of a GPU for each of PLANS; None where that cannot be planned."""
    figures: dict[str, Any] = {}
    for method, words in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plan.json"
            command = ["plan", "recipe=lora", f"model={model}", "host_memory=1TB", f"output={file}", *words]
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                toolkit_main(command)
            figures[method] = None
            if file.exists():
                planned = json.loads(file.read_text(encoding="utf-8"))
                peak = max(sum(kinds.values()) for kinds in planned["recipe"]["device_bytes"].values())
                figures["parameters"] = planned["parameters"]
                figures[method] = float(f"{peak / GIB:.3g}")
    return figures


def filled(page: str, language: str) -> str:
    """Return the page with a section for each family below its head."""
    figures = json.loads(newest("families").read_text(encoding="utf-8"))["models"]
    head, mark, _ = page.partition("<!-- families -->\n")
    return head + mark + "\n" + "\n".join(section(family, figures, language) for family in FAMILIES)


def section(family: str, figures: dict[str, Any], language: str) -> str:
    """Return the section of a family."""
    say, facts = TEXTS[language], FAMILIES[family]
    members = {name: at for name, at in models().items() if re.match(facts["models"], name)}
    lines = [f"## {family}\n", facts[language] + "\n", row(say["columns"]), row(["---"] * 5)]
    for name, at in members.items():
        size = figures[name]["parameters"] / 1e9
        cells = ["–" if figures[name][method] is None else f"{figures[name][method]:g} GiB" for method in PLANS]
        lines.append(row([f"{at['name']}: `{name}`", f"{size:.3g}B", *cells]))
    name = next((example for example in EXAMPLES if example in members), next(iter(members)))
    at = members[name]
    lines += ["", "```bash", f"hf download {at['hub_id']} --local-dir /models/{name}"]
    if "modelscope_id" in at:
        lines.append(f"modelscope download --model {at['modelscope_id']} --local_dir /models/{name}")
    # 141 GB is the largest GPU that most have.
    one, several = ("--num_gpus 1", ""), ("--hostfile hostfile", " zero=stage3")
    launch, zero = several if (figures[name]["lora"] or 0) > 141 else one
    lines.append(f"toolkit launch {launch} recipe=lora model={name} model.path=/models/{name}{zero} data=chat.jsonl")
    named = [
        f"`{recipe}`" for member in members.values() for recipe in recipes().get(member["name"], []) if recipe != "lora"
    ]
    lines += ["```", ""]
    if len(members) > 1:
        lines += [say["other"], ""]
    if named:
        lines += [say["recipes"].format(say["comma"].join(named)), ""]
    return "\n".join(lines)


def main(plans: bool) -> None:
    """Plan if asked to, and write both pages."""
    if plans:
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
        planned = {"commit": commit, "plans": PLANS, "models": {name: plan(name) for name in models()}}
        RECORD.write_text(json.dumps(planned, indent=1) + "\n", encoding="utf-8")
    write("families", filled)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["plan"], help="plan every model first")
    main(parser.parse_args().what == "plan")
