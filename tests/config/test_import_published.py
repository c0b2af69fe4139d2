"""toolkit import-config: what the ChatGLM3, GLM-4, Qwen, Firefly and alignment-handbook repositories publish."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import imports
from tests.config.test_import_config import here, imported, put, refused  # noqa: F401  # a fixture, used by its name
from toolkit.config.dotted_keys import get_value
from toolkit.config.schema import RunConfig

DEMO: dict[str, Any] = {
    "data_config": {"train_file": "train.json", "val_file": "dev.json", "test_file": "dev.json", "num_proc": 3},
    "max_input_length": 100,
    "max_output_length": 60,
    "training_args": {
        "output_dir": "./out",
        "max_steps": 40,
        "learning_rate": 7e-5,
        "per_device_train_batch_size": 2,
        "save_steps": 20,
        "logging_steps": 5,
        "evaluation_strategy": "steps",
        "eval_steps": 10,
        "predict_with_generate": True,
        "generation_config": {"max_new_tokens": 60},
        "use_cpu": False,
    },
}
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 24, "lora_dropout": 0.1}
PREFIX = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 16}
STAGE_3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3},
}


def demo(**changes: Any) -> str:
    """Write a config of ChatGLM3's demo with other keys; return its name. `training_args` are added to the demo's."""
    arguments = DEMO["training_args"] | changes.pop("training_args", {})
    return put("configs/demo.yaml", yaml.safe_dump(DEMO | {"training_args": arguments} | changes))


def of(cfg: RunConfig, *keys: str) -> list[Any]:
    """Return values of dotted keys, of an enum its text."""
    values = [get_value(cfg, key) for key in keys]
    return [getattr(value, "value", value) for value in values]


METHOD = ("tuning.method", "precision.dtype", "zero.stage")


def test_lora_of_chatglm3(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, said = imported(capsys, demo(peft_config=LORA), "world_size=2")
    assert of(cfg, *METHOD) == ["lora", "fp16", 2]
    assert of(cfg, "tuning.rank", "tuning.alpha", "tuning.dropout", "tuning.target_modules") == [4, 24.0, 0.1, []]
    assert of(cfg, "batch.global_size", "batch.micro_per_gpu", "optim.lr", "train.max_steps") == [4, 2, 7e-5, 40]
    assert of(cfg, "data.max_length", "data.train_on", "data.too_long") == [161, "all", "truncate"]
    assert of(cfg, "train.activation_checkpointing.enabled", "schedule.name", "optim.weight_decay") == [
        True,
        "linear",
        0.0,
    ]
    assert of(cfg, "evaluate.every", "evaluate.at_start", "checkpoint.every", "prepare.num_workers") == [
        10,
        False,
        20,
        3,
    ]
    [source], [validation] = cfg.data.sources, cfg.data.validation
    assert (source.path, validation.path) == ("train.json", "dev.json")
    assert (source.format.value, source.columns) == ("messages", {"messages": "conversations"})
    assert cfg.model.hub_id == "zai-org/chatglm3-6b"
    assert "peft_config.peft_type: there the model's weights are float16" in said and "set model.path=DIR" in said
    assert "a mean of the micro-batches' means" in said and "Unknown" not in said


def test_other_methods_of_chatglm3(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _ = imported(capsys, demo(peft_config=PREFIX), "world_size=1")
    assert of(cfg, *METHOD, "tuning.num_tokens", "tuning.dropout") == ["ptuning_v2", "fp16", 2, 16, 0.1]
    put("configs/ds_zero_3.json", STAGE_3)
    full = demo(training_args={"deepspeed": "ds_zero_3.json", "evaluation_strategy": "no"})
    cfg, said = imported(capsys, full, "world_size=4")
    assert of(cfg, *METHOD, "batch.global_size") == ["full", "fp32", 3, 8]
    assert cfg.data.validation == [] and cfg.data.validation_fraction == 0 and "is not here" not in said
    assert of(imported(capsys, demo(training_args={"bf16": True}), "world_size=1")[0], *METHOD) == ["full", "bf16", 2]
    message = refused(demo(peft_config={"peft_type": "ADALORA"}), "world_size=1")
    assert "demo.yaml:9: peft_config.peft_type = ADALORA has no counterpart: LORA, PREFIX_TUNING have." in message
    assert "train_file is not given" in refused(demo(data_config={"val_file": "x"}), "world_size=1")


def test_glm4(capsys: pytest.CaptureFixture[str]) -> None:
    """Its DeepSpeed JSON is named from the directory above; it trains the last answer where `combine` is true."""
    put("configs/ds_zero_3.json", STAGE_3)
    more = {"freezeV": True, "training_args": {"deepspeed": "configs/ds_zero_3.json"}}
    targets = {"target_modules": ["query_key_value", "dense"]}
    cfg, said = imported(capsys, demo(combine=True, peft_config=LORA | targets, **more), "world_size=1")
    assert of(cfg, *METHOD, "data.train_on") == ["lora", "bf16", 3, "last"]
    assert cfg.tuning.target_modules == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert cfg.data.sources[0].columns == {} and cfg.model.hub_id == "zai-org/glm-4-9b-chat"
    assert cfg.train.activation_checkpointing.enabled is False and "Unknown" not in said
    cfg, _ = imported(capsys, demo(combine=False, **more), "world_size=1")
    assert of(cfg, *METHOD, "data.train_on") == ["full", "bf16", 3, "all"]


def test_command_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    demo(peft_config=LORA)
    line = "torchrun --nnodes=1 --nproc_per_node=8 finetune_hf.py data/adgen/ /m/chatglm3-6b configs/demo.yaml\n"
    cfg, said = imported(capsys, put("run.sh", line))
    assert of(cfg, "model.path", "batch.global_size") == ["/m/chatglm3-6b", 16]
    assert [cfg.data.sources[0].path, cfg.data.validation[0].path] == ["data/adgen/train.json", "data/adgen/dev.json"]
    assert "The command names the model" not in said
    message = refused(put("gone.sh", line.replace("demo.yaml", "gone.yaml")))
    assert message.startswith("gone.sh:1: this command takes its arguments from configs/gone.yaml")


QWEN = r"""#!/bin/bash
GPUS_PER_NODE=$(python -c 'import torch; print(torch.cuda.device_count())')
NNODES=${NNODES:-1}
MODEL="Qwen/Qwen-7B-Chat" # set the path
DATA="chat.json"
# it's a comment
function usage() {
    echo '
Usage: finetune.sh [-m MODEL_PATH] [--data DATA_PATH]
'
}
while [[ "$1" != "" ]]; do
    case $1 in
        -m | --model )
            shift
            MODEL=$1
            ;;
        --data )
            shift
            DATA=$1
            ;;
        * )
            echo "Unknown argument ${1}"
            exit 1
    esac
    shift
done
cat <<EOF
it's python train.py --learning_rate 1
EOF
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES
"
torchrun $DISTRIBUTED_ARGS finetune.py \
    --model_name_or_path $MODEL \
    --data_path $DATA \
    --bf16 True \
    --output_dir output_qwen#1 \
    --num_train_epochs 5 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --learning_rate 3e-4 \
    --lr_scheduler_type "cosine" \
    --warmup_ratio 0.01 \
    --model_max_length 512 \
    --lazy_preprocess True \
    --use_lora \
    --gradient_checkpointing \
    --deepspeed ds.json
"""
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}


def qwen(*changes: tuple[str, str]) -> str:
    text = QWEN
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return put("finetune.sh", text)


def test_script_of_qwen(capsys: pytest.CaptureFixture[str]) -> None:
    """Quotes over lines, the script's own options, comments and here-documents are what they are to a shell."""
    put("ds.json", {"train_batch_size": "auto", "zero_optimization": {"stage": 2}, "scheduler": WARMUP})
    cfg, said = imported(capsys, qwen(), "world_size=2")
    assert of(cfg, *METHOD, "model.path") == ["lora", "bf16", 2, "Qwen/Qwen-7B-Chat"]
    assert of(cfg, "tuning.rank", "tuning.alpha", "tuning.target_modules", "tuning.save_modules") == [
        *(64, 16.0, ["c_attn", "c_proj", "w1", "w2"], []),
    ]
    assert of(cfg, "batch.global_size", "data.max_length", "data.train_on") == [32, 512, "all"]
    # transformers takes the scheduler of the JSON.
    assert of(cfg, "schedule.name", "schedule.warmup_ratio") == ["constant", 0.01]
    assert "lr_scheduler_type = cosine: has no effect there with the other settings" in said
    assert [(source.path, source.format.value) for source in cfg.data.sources] == [("chat.json", "sharegpt")]
    assert "output_dir = output_qwen#1: each run" in said and "Unknown" not in said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([("--use_lora", "--use_lora --q_lora")], {"tuning.method": "qlora"}),
        ([("Qwen-7B-Chat", "Qwen-7B")], {"tuning.save_modules": ["wte", "lm_head"]}),
        ([("    --use_lora \\\n", "")], {"tuning.method": "full"}),
        ([("    --model_max_length 512 \\\n", "")], {"data.max_length": 8192}),
        ([("finetune.py", "train_lora.py"), ("    --use_lora \\\n", "")], {"tuning.rank": 8, "tuning.method": "lora"}),
        ([("finetune.py", "fine-tune.py")], {"tuning.rank": 1, "tuning.target_modules": ["W_pack"]}),
        (
            [("--use_lora", "--use_lora --eval_data_path dev.json --evaluation_strategy steps --eval_steps 9")],
            {"evaluate.every": 9},
        ),
    ],
    ids=lambda part: str(part)[:40],
)
def test_scripts_of_fastchats_family(
    capsys: pytest.CaptureFixture[str], changes: list[tuple[str, str]], expected: dict[str, object]
) -> None:
    cfg, _ = imported(capsys, qwen(*changes, (" \\\n    --deepspeed ds.json", "")), "world_size=1")
    assert dict(zip(expected, of(cfg, *expected), strict=True)) == expected


def test_a_comment_ends_a_command() -> None:
    """As in a shell, where what follows is lost."""
    message = refused(qwen(("    --use_lora \\", "    # --use_lora \\")), "world_size=1")
    assert ": the line begins with the option --gradient_checkpointing" in message


FIREFLY: dict[str, Any] = {
    "output_dir": "out",
    "model_name_or_path": "/m/chatglm3-6b",
    "train_file": "data/rows.jsonl",
    "template_name": "chatglm3",
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 16,
    "learning_rate": 2e-4,
    "max_seq_length": 512,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 100,
    "lora_rank": 32,
    "optim": "paged_adamw_32bit",
    "fp16": True,
    "max_grad_norm": 0.3,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            {
                "tuning.method": "qlora",
                "tuning.rank": 32,
                "tuning.alpha": 16.0,
                "tuning.target_modules": ["all-linear"],
            },
        ),
        ({"train_mode": "full"}, {"tuning.method": "full", "optim.name": "adamw", "train.gradient_clipping": 0.3}),
        (
            {"task_type": "pretrain", "train_mode": "lora"},
            {"data.packing": "packed", "data.too_long": "split", "data.max_length": 512},
        ),
        (
            {"task_type": "dpo", "train_mode": "lora", "beta": 0.2},
            {"preference.loss": "sigmoid", "preference.beta": 0.2, "batch.global_size": 32},
        ),
    ],
    ids=lambda part: ",".join(part),
)
def test_firefly(capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: dict[str, object]) -> None:
    cfg, said = imported(capsys, put("sft.json", FIREFLY | changes), "world_size=2")
    assert dict(zip(expected, of(cfg, *expected), strict=True)) == expected
    formats = {"pretrain": "text", "dpo": "preference"}
    [source] = cfg.data.sources
    assert (source.path, source.format.value) == (
        "data/rows.jsonl",
        formats.get(changes.get("task_type", ""), "conversation"),
    )
    assert of(cfg, "schedule.name", "schedule.warmup_steps", "precision.dtype") == ["constant", 100, "fp16"]
    assert "Unknown" not in said and "optim = " not in said
    line = "deepspeed --num_gpus=2 train.py --train_args_file sft.json\n"
    assert imported(capsys, put("run.sh", line))[0] == cfg
    for key in ("task_type", "train_mode"):
        assert f"{key} = x has no counterpart" in refused(put("sft.json", FIREFLY | {key: "x"}), "world_size=2")


HANDBOOK: dict[str, Any] = {
    "model_name_or_path": "o/m",
    "torch_dtype": "bfloat16",
    "chat_template": "{{ messages }}",
    "dataset_mixture": {
        "datasets": [
            {"id": "o/a", "config": "all", "split": "train_sft", "columns": ["messages"], "weight": 0.5},
            {"id": "o/b", "weight": 1.0},
        ],
        "test_split_size": 100,
        "seed": 0,
    },
    "bf16": True,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "per_device_train_batch_size": 2,
    "max_length": 2048,
}
MIXER = {
    "dataset_mixture": None,
    "dataset_mixer": {"o/a": 1.0, "o/b": 0.2},
    "dataset_splits": ["train_prefs", "test_prefs"],
    "beta": 0.05,
    "max_prompt_length": 512,
}


def test_mixtures_of_alignment_handbook(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, said = imported(capsys, put("sft/config.yaml", yaml.safe_dump(HANDBOOK)), "world_size=8")
    sources = [(source.hub, source.subset, source.split, source.weight) for source in cfg.data.sources]
    assert sources == [("o/a", "all", "train_sft", 0.5), ("o/b", "", "train", 1.0)]
    assert of(cfg, "data.validation_rows", "evaluate.every", "precision.dtype", "optim.lr") == [100, 50, "bf16", 2e-5]
    assert "chat_template = {{ messages }}: write it to a file" in said and "torch_dtype: bf16 with float32" in said
    assert "Unknown" not in said
    for folder, loss in {"dpo": "sigmoid", "orpo": "orpo"}.items():
        name = put(f"{folder}/config.yaml", yaml.safe_dump(HANDBOOK | MIXER))
        cfg, said = imported(capsys, name, "world_size=8")
        assert of(cfg, "preference.loss", "preference.beta") == [loss, 0.05]
        pairs = [(source.hub, source.split, source.weight, source.format.value) for source in cfg.data.sources]
        assert pairs == [("o/a", "train_prefs", 1.0, "preference"), ("o/b", "train_prefs", 0.2, "preference")]
        assert [(source.hub, source.split) for source in cfg.data.validation] == [
            ("o/a", "test_prefs"),
            ("o/b", "test_prefs"),
        ]
        assert "beta:" not in said and f"{folder}/config.yaml: read as a config of TRL's {folder}" in said
    name = put("other/config.yaml", yaml.safe_dump(HANDBOOK | MIXER))
    assert "beta: arguments of DPOConfig, CPOConfig or KTOConfig" in imported(capsys, name, "world_size=8")[1]


def test_counts_of_a_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`benchmarks.imports`: what is converted, by program, and why the rest is not."""
    put("other/sft/mine.yaml", yaml.safe_dump(HANDBOOK | {"nonsense": 1}))
    put("other/train_args/sft.json", FIREFLY)
    put("other/docker-compose.yml", "version: 3\nservices: {}\n")
    put("other/.github/hidden.yml", "x: 1\n")
    put("other/data/rows.json", "[" + "1," * 20_000 + "1]")
    words = ["imports", "other", "--recipes", "recipes", "--output", "counts.json"]
    monkeypatch.setattr("sys.argv", words)
    imports.main()
    counts = json.loads(Path("counts.json").read_text())["other"]
    assert (counts["files"], counts["converted"]) == (3, {"TrainingArguments": 1, "Firefly": 1})
    [(reason, refusal)] = counts["refused"].items()
    assert reason.startswith("this is no training config of") and refusal == {"files": 1, "first": "docker-compose.yml"}
    assert counts["unknown_keys"] == {"nonsense": 1}
    assert capsys.readouterr().out.startswith("other: 3 files, 2 converted")
    assert "override /tuning: qlora" in Path("recipes/other/train_args/sft.json.txt").read_text()
    assert Path.cwd() == tmp_path
