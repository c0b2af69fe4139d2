#!/usr/bin/env python3
"""Write into docs/architecture.md and its Chinese what each optional feature costs: lines, and seconds of CI."""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import page_tables

ROOT = Path(__file__).resolve().parents[1]
HEADS = {
    "en": ["feature", "files", "lines", "seconds of CI"],
    "zh": ["功能", "文件数", "行数", "CI 秒数"],
}


class Feature(NamedTuple):
    """An optional feature: its modules, which no run imports without it, and the tests that exist for it alone."""

    en: str
    zh: str
    modules: str
    """Patterns of files, relative to toolkit/."""
    tests: str
    """Files of tests/, without test_ and .py."""


FEATURES = (
    Feature(
        "streaming of data that do not fit on the disk",
        "流式读取放不进磁盘的数据",
        "data/stream.py data/stream_pieces.py data/remote.py tasks/stream.py tasks/preference_stream.py",
        "ranks/stream unit/stream unit/remote",
    ),
    Feature(
        "named chat templates, added tokens",
        "按名称选用的对话模板，新增的 token",
        "models/named_templates.py models/added_tokens.py",
        "unit/named_templates unit/added_tokens ranks/added_tokens",
    ),
    Feature(
        "LoRA, PiSSA, EVA, LoftQ and the other adapters",
        "LoRA、PiSSA、EVA、LoftQ 及其他适配器",
        "models/lora.py models/lora_init.py models/prompt_tuning.py",
        "ranks/tuning parity/tuning unit/lora_targets parity/ptuning",
    ),
    Feature(
        "adapters on quantized models",
        "量化模型上的适配器",
        "models/dequantize.py export/dequantize.py",
        "unit/quantized",
    ),
    Feature("optimizer states in bf16", "bf16 优化器状态", "engine/bf16_adam.py", "unit/optimizers"),
    Feature(
        "`eval`: public tasks, own checks of answers",
        "`eval`：公开评测任务、自定义的答案检查",
        "extras/harness.py extras/scores.py evaluate/checks.py evaluate/code_run.py",
        "unit/scores unit/answer_checks unit/answer_metrics",
    ),
    Feature(
        "on-policy distillation",
        "on-policy 蒸馏",
        "tasks/on_policy.py evaluate/completions.py",
        "unit/on_policy ranks/on_policy unit/completions",
    ),
    Feature(
        "answers of `generate` and `rounds` from servers",
        "`generate` 和 `rounds` 由推理服务回答",
        "evaluate/served_model.py evaluate/server_process.py",
        "unit/served_model",
    ),
    Feature(
        "`rounds`: best of n answers",
        "`rounds`：n 个回答取最优",
        "extras/rounds.py extras/cli/rounds.py",
        "unit/rounds",
    ),
    Feature(
        "`push`, `export-gguf`, Ollama's Modelfile",
        "`push`、`export-gguf`、Ollama 的 Modelfile",
        "extras/push.py extras/cli/push.py extras/gguf.py extras/modelfile.py extras/cli/export_gguf.py",
        "unit/push unit/gguf",
    ),
    Feature(
        "`import-config`: configs of other programs",
        "`import-config`：其他程序的配置",
        "extras/translate/*.py extras/cli/import_config.py",
        "config/import_config config/import_others",
    ),
    Feature(
        "`convert-checkpoint`: checkpoints of other programs",
        "`convert-checkpoint`：其他程序的检查点",
        "extras/convert_checkpoint.py extras/trainer_checkpoint.py extras/cli/convert_checkpoint.py",
        "unit/convert unit/trainer_checkpoint",
    ),
    Feature(
        "`export-config`: a script without the toolkit",
        "`export-config`：不依赖本工具的脚本",
        "extras/plain_script.py extras/plain_transformers.py extras/cli/export_config.py",
        "ranks/plain_script",
    ),
    Feature("`finetune()` in Python", "Python 中的 `finetune()`", "jobs/finetune.py", "ranks/finetune"),
)


def modules(feature: Feature) -> list[Path]:
    """Return a feature's files that hold code."""
    found = [path for pattern in feature.modules.split() for path in (ROOT / "toolkit").glob(pattern)]
    return [path for path in found if path.stat().st_size]


def table(language: str) -> str:
    """Return the Markdown table; `language`: en or zh. KeyError if a test file has no recorded seconds."""
    seconds = json.loads((ROOT / "tests" / "durations.json").read_text(encoding="utf-8"))["default,ranks"]
    rows = [HEADS[language], ["---"] * len(HEADS[language])]
    for feature in FEATURES:
        files = modules(feature)
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
        tests = [Path(name) for name in feature.tests.split()]
        taken = sum(seconds[f"tests/{test.parent}/test_{test.name}.py"] for test in tests)
        rows.append([feature.zh if language == "zh" else feature.en, str(len(files)), f"{lines:,}", f"{taken:.0f}"])
    return "".join(f"{page_tables.row(cells)}\n" for cells in rows)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    page_tables.write("architecture", lambda page, language: page_tables.fill(page, "feature-costs", table(language)))
