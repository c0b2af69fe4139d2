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
# stage of benchmarks/gpu_first.py -> what is run; its stage `bench` is in the table of parts
STAGES = {
    "kernels": (
        "functions against float64 (tests/gpu/test_gpu_kernels.py)",
        "函数对照 float64（tests/gpu/test_gpu_kernels.py）",
    ),
    "bf16-packed": ("quickstart, 40 steps, bf16, packed", "quickstart，40 步，bf16，packing"),
    "fp16": ("quickstart, 40 steps, fp16", "quickstart，40 步，fp16"),
    "prove": (
        "`toolkit prove`, quickstart, ZeRO-2, bf16, packed",
        "`toolkit prove`，quickstart，ZeRO-2，bf16，packing",
    ),
    "tests": ("runs and commands (the rest of tests/gpu)", "训练与命令（tests/gpu 的其余部分）"),
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

**What these two tables do not show has not run on a GPU**, and other pages compute or describe it: several GPUs and
NCCL among it. `scripts/gpu_first` fills the tables' first rows in one call of seven minutes ([how](bench.md#on-a-gpu)).

{table}

MFU is the model FLOPs as a share of the GPU's datasheet peak ([FLOPs](bench.md#flops)), where that is known, of the
measured matrix product otherwise; with precision=fp8 the peak is that of bf16. Goals: 45 % MFU (later 60 %), LoRA at
least 1.3 times as fast as full fine-tuning in bf16, FP8 1.1 times as fast as compiled bf16, packed at least as fast
as the others.

## Whether it computes right

What is computed on a GPU against the CPU and float64, by `scripts/gpu_first`; `scripts/test gpu` runs all of tests/gpu.

{first}
""",
        "# GPU 实测\n\n[English](gpus.md)\n\n"
        "单张 GPU，全尺寸随机权重，bf16，激活重计算，序列长 4,096（6B）或 8,192（9B）token；"
        "样本长度为对数正态分布，中位数 300。`scripts/bench_gpu` 用一条十分钟的命令测完全部，"
        "`python scripts/gpu_page.py` 根据 `benchmarks/*.json` 写出本页；"
        "没有这样的文件就是未测。放不下的模型会减少层数，表中会写明。\n\n"
        "**这两张表里没有的，就没有在 GPU 上运行过**，其他页面上是计算或描述；多 GPU 与 NCCL 也在其中。"
        "`scripts/gpu_first` 用一条七分钟的命令填写两张表的前几行（[用法](bench_zh.md#在-gpu-上)）。\n\n{table}\n\n"
        "MFU 是模型 FLOPs 占 GPU 标称峰值的比例（[FLOPs](bench_zh.md#flops)）；峰值未知时以实测矩阵乘法为准；"
        "precision=fp8 时仍以 bf16 的峰值为准。"
        "目标：MFU 45 %（以后 60 %），LoRA 至少是 bf16 全参数的 1.3 倍，"
        "FP8 至少是编译后 bf16 的 1.1 倍，packing 不慢于其他方式。"
        "\n\n## 计算是否正确\n\n"
        "由 `scripts/gpu_first` 把 GPU 上的计算结果与 CPU 及 float64 对照；"
        "`scripts/test gpu` 运行 tests/gpu 的全部测试。\n\n"
        "{first}\n",
    ),
    "head": (
        "| trained | tokens/s | figure | goal | peak memory | planned | GPU, commit |",
        "| 训练内容 | tokens/s | 指标 | 目标 | 峰值显存 | 估算 | GPU，提交 |",
    ),
    "first head": ("| run | found | s | GPU, commit |", "| 运行内容 | 结果 | 秒 | GPU，提交 |"),
    "tests": ("{passed} passed, {skipped} skipped, {failed} failed", "{passed} 通过，{skipped} 跳过，{failed} 失败"),
    "run": (
        "loss {first:.3f} to {last:.3f}, {speed:,.0f} tokens/s",
        "loss {first:.3f} 到 {last:.3f}，{speed:,.0f} tokens/s",
    ),
    "right": ("right", "正确"),
    "wrong": ("deviates", "有偏差"),
    "failed": ("failed", "失败"),
    "none": ("not measured", "未测"),
    "layers": ("{layers} layers", "{layers} 层"),
}


def newest(files: list[Path]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return of each part and stage the last result on a GPU that the files hold, and the whole that it belongs to."""
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for file in sorted(files):
        results = json.loads(file.read_text(encoding="utf-8"))
        for whole in results if isinstance(results, list) else []:
            if not isinstance(whole, dict) or whole.get("device") != "gpu":
                continue
            bench = whole
            if whole.get("measured") == "gpu_first":
                found |= {name: (row, whole) for name, row in whole["stages"].items() if "skipped" not in row}
                bench = whole | (whole["stages"].get("bench", {}).get("figures", {}))
            rows = bench.get("parts", {}) if whole.get("measured") in ("gpu", "gpu_first") else {}
            found |= {name: (row, bench) for name, row in rows.items() if "tokens_per_s" in row}
    return found


def page(files: list[Path], language: int) -> str:
    """Return the page; `language`: 0 English, 1 Chinese."""
    found, none = newest(files), TEXTS["none"][language]
    lines = [TEXTS["head"][language], "| --- | --- | --- | --- | --- | --- | --- |"]
    for name, texts in PARTS.items():
        cells = _figures(name, *found[name], language) if name in found else [none, *[""] * 5]
        lines.append("| " + " | ".join([texts[language], *cells]) + " |")
    first = [TEXTS["first head"][language], "| --- | --- | --- | --- |"]
    for name, texts in STAGES.items():
        cells = _outcome(*found[name], language) if name in found else [none, "", ""]
        first.append("| " + " | ".join([texts[language], *cells]) + " |")
    return TEXTS["page"][language].format(table="\n".join(lines), first="\n".join(first))


def _source(whole: dict[str, Any]) -> tuple[str, str]:
    """Return the GPU and the commit; a copy that is no repository has that of its wheels."""
    known = whole["environment"]
    commit = known["commit"] or whole.get("packed", {}).get("commit", "")
    return ", ".join(known["machine"]["gpus"]), str(commit)[:7]


def _figures(name: str, row: dict[str, Any], whole: dict[str, Any], language: int) -> list[str]:
    mark = whole["marks"].get(name)
    [(key, value), (_, goal)] = mark.items() if mark else [("", 0.0), ("", 0.0)]
    memory = [row.get("device_memory_peak_bytes"), row.get("planned_memory_bytes")]
    gpu, commit = _source(whole)
    layers = TEXTS["layers"][language].format(layers=row["size"]["layers"])
    return [
        f"{row['tokens_per_s']:,.0f}",
        f"{MARKS[key][language]} {value:.2f}" if mark else "",
        f"{goal:g}" if mark else "",
        *(f"{one / GIB:.1f} GiB" if one else "" for one in memory),
        f"{gpu}; {layers}; {commit}",
    ]


def _outcome(row: dict[str, Any], whole: dict[str, Any], language: int) -> list[str]:
    """Return what a stage found; of tests that were ended also what had passed."""
    figures, told = row["figures"], []
    if "passed" in figures:
        told.append(TEXTS["tests"][language].format(**figures | {"failed": len(figures["failed"])}))
    elif "first_loss" in figures:
        values = {"first": figures["first_loss"], "last": figures["last_loss"], "speed": figures["tokens_per_s"]}
        told.append(TEXTS["run"][language].format(**values))
    elif "is_right" in figures:
        told.append(TEXTS["right" if figures["is_right"] else "wrong"][language])
    if not row["is_right"]:
        told.append(f"{TEXTS['failed'][language]}: {row['failed']}")
    return ["; ".join(told).replace("|", "/"), str(row["seconds"]), "; ".join(_source(whole))]


def main() -> None:
    """Write both pages."""
    files = list((ROOT / "benchmarks").glob("*.json"))
    for language, name in enumerate(("gpus.md", "gpus_zh.md")):
        (ROOT / "docs" / name).write_text(page(files, language), encoding="utf-8")


if __name__ == "__main__":
    main()
