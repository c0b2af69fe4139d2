#!/usr/bin/env python3
"""Write docs/gpus.md and docs/gpus_zh.md from benchmarks/*.json: of each part the newest result on a GPU, or none."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GIB = 2**30

# part of benchmarks/gpu.py -> what is trained, in English and Chinese
PARTS = {
    "6b-full-zero1": ("ChatGLM3-6B, full, ZeRO-1, packed", "ChatGLM3-6B，全参数，ZeRO-1，packing"),
    "6b-full-zero3": ("the same, ZeRO-3", "同上，ZeRO-3"),
    "6b-full-compiled": ("the same, ZeRO-1, compile=inductor", "同上，ZeRO-1，compile=inductor"),
    "6b-full-fp8": (
        "the same, ZeRO-1, precision=fp8, compile=inductor",
        "同上，ZeRO-1，precision=fp8，compile=inductor",
    ),
    "6b-full-padded": ("the same, ZeRO-1, padded, 4 samples", "同上，ZeRO-1，填充，4 个样本"),
    "6b-trainer": ("the same, transformers' Trainer, ZeRO-1", "同上，transformers 的 Trainer，ZeRO-1"),
    "6b-lora": ("ChatGLM3-6B, LoRA, packed", "ChatGLM3-6B，LoRA，packing"),
    "9b-full-zero1": ("GLM-4-9B, full, ZeRO-1, packed", "GLM-4-9B，全参数，ZeRO-1，packing"),
    "9b-full-fp8": ("the same, precision=fp8, compile=inductor", "同上，precision=fp8，compile=inductor"),
    "9b-lora": ("GLM-4-9B, LoRA, packed", "GLM-4-9B，LoRA，packing"),
}
MARKS = {
    "mfu": ("MFU", "MFU"),
    "to_full": ("of full's tokens/s", "相对全参数的 tokens/s"),
    "to_compiled": ("of compiled bf16's tokens/s", "相对编译后 bf16 的 tokens/s"),
    "ours_to_it": ("ours, packed, to it", "本工具（packing）相对它"),
}
TEXTS = {
    "page": (
        """# Measured on GPUs

[中文](gpus_zh.md)

One GPU, random weights of full size, bf16, activation checkpointing, rows of 4,096 tokens (6B) or 8,192 (9B); samples
of log-normal length, median 300. `scripts/bench_gpu` measures all of it in one call of ten minutes, and
`python scripts/gpu_page.py` writes this page from `benchmarks/*.json`; what no such file holds is not measured. Where a
model did not fit, it had fewer layers, which the table says.

{table}

MFU is the model FLOPs as a share of the GPU's datasheet peak ([FLOPs](bench.md#flops)), where that is known, of the
measured matrix product otherwise; with precision=fp8 the peak is that of bf16. Goals: 45 % MFU (later 60 %), LoRA at
least 1.3 times as fast as full fine-tuning in bf16, FP8 1.1 times as fast as compiled bf16, packed at least as fast
as the others.
`scripts/test gpu` is the other half: what is computed on a GPU against the CPU and float64.
""",
        "# GPU 实测\n\n[English](gpus.md)\n\n"
        "单张 GPU，全尺寸随机权重，bf16，激活重计算，序列长 4,096（6B）或 8,192（9B）token；"
        "样本长度为对数正态分布，中位数 300。`scripts/bench_gpu` 用一条十分钟的命令测完全部，"
        "`python scripts/gpu_page.py` 根据 `benchmarks/*.json` 写出本页；"
        "没有这样的文件就是未测。放不下的模型会减少层数，表中会写明。\n\n{table}\n\n"
        "MFU 是模型 FLOPs 占 GPU 标称峰值的比例（[FLOPs](bench_zh.md#flops)）；峰值未知时以实测矩阵乘法为准；"
        "precision=fp8 时仍以 bf16 的峰值为准。"
        "目标：MFU 45 %（以后 60 %），LoRA 至少是 bf16 全参数的 1.3 倍，"
        "FP8 至少是编译后 bf16 的 1.1 倍，packing 不慢于其他方式。"
        "`scripts/test gpu` 是另一半：GPU 上的计算结果与 CPU 及 float64 对照。\n",
    ),
    "head": (
        "| trained | tokens/s | figure | goal | peak memory | planned | GPU, commit |",
        "| 训练内容 | tokens/s | 指标 | 目标 | 峰值显存 | 估算 | GPU，提交 |",
    ),
    "none": ("not measured", "未测"),
    "layers": ("{layers} layers", "{layers} 层"),
}


def newest(files: list[Path]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return of each part the last result on a GPU that the files hold, and the whole that it belongs to."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for file in sorted(files):
        results = json.loads(file.read_text(encoding="utf-8"))
        for whole in results if isinstance(results, list) else []:
            if isinstance(whole, dict) and whole.get("measured") == "gpu" and whole.get("device") == "gpu":
                found |= {name: (row, whole) for name, row in whole["parts"].items() if "tokens_per_s" in row}
    return found


def page(files: list[Path], language: int) -> str:
    """Return the page; `language`: 0 English, 1 Chinese."""
    lines, found = [TEXTS["head"][language], "| --- | --- | --- | --- | --- | --- | --- |"], newest(files)
    for name, texts in PARTS.items():
        cells = [texts[language], *_figures(name, *found[name], language)] if name in found else None
        lines.append("| " + " | ".join(cells or [texts[language], TEXTS["none"][language], *[""] * 5]) + " |")
    return TEXTS["page"][language].format(table="\n".join(lines))


def _figures(name: str, row: dict[str, Any], whole: dict[str, Any], language: int) -> list[str]:
    mark = whole["marks"].get(name)
    [(key, value), (_, goal)] = mark.items() if mark else [("", 0.0), ("", 0.0)]
    memory = [row.get("device_memory_peak_bytes"), row.get("planned_memory_bytes")]
    known = whole["environment"]
    gpu = ", ".join(known["machine"]["gpus"])
    layers = TEXTS["layers"][language].format(layers=row["size"]["layers"])
    return [
        f"{row['tokens_per_s']:,.0f}",
        f"{MARKS[key][language]} {value:.2f}" if mark else "",
        f"{goal:g}" if mark else "",
        *(f"{one / GIB:.1f} GiB" if one else "" for one in memory),
        f"{gpu}; {layers}; {str(known['commit'])[:7]}",
    ]


def main() -> None:
    """Write both pages."""
    files = list((ROOT / "benchmarks").glob("*.json"))
    for language, name in enumerate(("gpus.md", "gpus_zh.md")):
        (ROOT / "docs" / name).write_text(page(files, language), encoding="utf-8")


if __name__ == "__main__":
    main()
