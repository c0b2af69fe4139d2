"""`toolkit import-config`: realistic files of three programs, their tables, and every way to get it wrong."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from translation_tables import fill_tables

from toolkit.config.dotted_keys import get_value
from toolkit.config.load import load
from toolkit.config.program_keys import keys_of, names_of, sentence
from toolkit.config.schema import (
    TRACKERS,
    Decay,
    DecayOf,
    Dtype,
    Fp8,
    LoraInit,
    OptimizerName,
    Packing,
    RowFormat,
    RunConfig,
    ScheduleName,
    TooLong,
    TrainOn,
    TuningMethod,
)
from toolkit.config.validate import field_type
from toolkit.extras.cli import import_config
from toolkit.messages import ConfigError, read_table

ROOT = Path(__file__).parents[2]

PTUNING = r"""PRE_SEQ_LEN=128
LR=2e-2
NUM_GPUS=1

torchrun --standalone --nnodes=1 --nproc-per-node=$NUM_GPUS main.py \
    --do_train \
    --train_file AdvertiseGen/train.json \
    --validation_file AdvertiseGen/dev.json \
    --preprocessing_num_workers 10 \
    --prompt_column content \
    --response_column summary \
    --overwrite_cache \
    --model_name_or_path THUDM/chatglm2-6b \
    --output_dir output/adgen-chatglm2-6b-pt-$PRE_SEQ_LEN-${LR} \
    --max_source_length 64 \
    --max_target_length 128 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --predict_with_generate \
    --max_steps 3000 \
    --logging_steps 10 \
    --save_steps 1000 \
    --learning_rate $LR \
    --pre_seq_len $PRE_SEQ_LEN \
    --quantization_bit 4

"""
FULL = r"""
LR=1e-4

MASTER_PORT=$(shuf -n 1 -i 10000-65535)

deepspeed --num_gpus=4 --master_port $MASTER_PORT main.py \
    --deepspeed deepspeed.json \
    --do_train \
    --train_file chat/train.json \
    --prompt_column prompt \
    --response_column response \
    --history_column history \
    --model_name_or_path /models/chatglm-6b \
    --output_dir ./output/adgen-chatglm-6b-ft-$LR \
    --max_source_length 64 \
    --max_target_length 64 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 1 \
    --max_steps 5000 \
    --learning_rate $LR \
    --fp16 > log.txt 2>&1
"""
DS_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": "auto"},
}
FACTORY_YAML = """### model
model_name_or_path: Qwen/Qwen3-4B-Instruct-2507
trust_remote_code: true
### method
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj
deepspeed: ds_z3_config.json  # choices: [ds_z0_config.json, ds_z2_config.json]
### dataset
dataset: identity,adgen,tools
template: qwen3_nothink
cutoff_len: 2048
preprocessing_num_workers: 16
### output
output_dir: saves/qwen3-4b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
report_to: tensorboard
### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
neat_packing: true
neftune_noise_alpha: 5
learnin_rate: 3
### eval
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""
INFO = {
    "identity": {"file_name": "identity.json"},
    "adgen": {"hf_hub_url": "o/adgen", "columns": {"prompt": "content", "response": "summary"}},
    "tools": {
        "file_name": "tools.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "tools": "functions"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
    "pictures": {"file_name": "p.json", "formatting": "sharegpt", "columns": {"messages": "m", "images": "images"}},
    "texts": {"file_name": "t.jsonl", "columns": {"prompt": "text"}},
}


COSINE = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}}
STABLE = {"num_decay_steps": 20, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}
GLM_LORA = {"model_name_or_path": "/m/chatglm3-6b", "lora_target": "query_key_value"}
OTHER_STAGE = {"stage": "ppo", "do_train": True, "per_device_train_batch_size": 1, "dataset": "x"}


def ptuning(old: str, new: str) -> str:
    assert old in PTUNING
    return PTUNING.replace(old, new)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def put(name: str, content: Any) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1), encoding="utf-8")
    return name


def imported(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[RunConfig, str]:
    """Import to a file; return what the recipe composes to, and what was said."""
    import_config.run([*words, "output=made.yaml"])
    said = capsys.readouterr().out
    cfg = load(["recipe=made.yaml"]).cfg
    Path("made.yaml").rename("last.yaml")
    return cfg, said


def test_limits_of_rows_go_to_each_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    info = {
        "one": {"file_name": "a.json"},
        "two": {"file_name": "b.json", "num_samples": 7},
        "held": {"file_name": "c.json"},
    }
    put("data/dataset_info.json", info)
    keys = {"model_name_or_path": "/m", "stage": "sft", "do_train": True, "dataset": "one,two", "bf16": True}
    cfg, said = imported(capsys, put("one.yaml", yaml.safe_dump(keys)), "world_size=1")
    assert [source.max_samples for source in cfg.data.sources] == [0, 7]
    assert "the dataset two: its first 7 rows are used" in said
    limited = keys | {"max_samples": 50, "eval_dataset": "held", "num_train_epochs": 2.5}
    cfg, said = imported(capsys, put("one.yaml", yaml.safe_dump(limited)), "world_size=1")
    assert [source.max_samples for source in (*cfg.data.sources, *cfg.data.validation)] == [50, 50, 50]
    assert "max_samples" not in said and cfg.train.epochs == 2.5


@pytest.mark.parametrize(
    "command",
    [
        "cd /work && python expand.py && COMMAND",
        "COMMAND && echo 'done && python other.py --x 1'",
        'export A=1; COMMAND > "a;b.log" 2>&1 &',
        "COMMAND 2>&1 | tee log; python -c 'print(1)'",
        "case $1 in --model) M=$2; shift 2 ;; esac; COMMAND; exit",
    ],
)
def test_what_stands_next_to_a_command_is_none_of_its_arguments(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    training = (
        "torchrun --nproc_per_node 1 finetune.py --model_name_or_path m --data_path a.json --output_dir o "
        "--learning_rate 3e-5 --per_device_train_batch_size 2 --num_train_epochs 2"
    )
    cfg, said = imported(capsys, put("train.sh", command.replace("COMMAND", training) + "\n"))
    assert (cfg.optim.lr, cfg.batch.global_size, cfg.train.epochs) == (3e-5, 2, 2.0)
    assert "Unknown" not in said


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        import_config.run([*words, "output=made.yaml"])
    assert not Path("made.yaml").exists()
    return str(caught.value)


def test_ptuning_command(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, said = imported(capsys, put("train.sh", PTUNING))
    assert (cfg.tuning.method, cfg.tuning.num_tokens, cfg.tuning.dropout) == (TuningMethod.ptuning_v2, 128, 0.1)
    assert (cfg.batch.global_size, cfg.batch.micro_per_gpu) == (16, 1)
    assert (cfg.optim.lr, cfg.optim.betas, cfg.schedule.name) == (2e-2, [0.9, 0.999], ScheduleName.linear)
    assert (cfg.train.max_steps, cfg.train.log_every, cfg.checkpoint.every) == (3000, 10, 1000)
    assert cfg.data.max_length == 64 + 128 + 1
    assert cfg.precision.dtype is Dtype.fp16
    assert cfg.train.activation_checkpointing.enabled
    assert cfg.model.path == cfg.model.hub_id == "zai-org/chatglm2-6b"
    [source] = cfg.data.sources
    assert (source.path, source.columns) == ("AdvertiseGen/train.json", {"prompt": "content", "response": "summary"})
    assert [source.path for source in cfg.data.validation] == ["AdvertiseGen/dev.json"]
    assert "quantization_bit = 4: with P-Tuning v2 the base weights stay in 16 bits" in said
    assert "output_dir = output/adgen-chatglm2-6b-pt-128-2e-2" in said
    header = Path("last.yaml").read_text()
    assert "quantization_bit = 4" in header.partition("defaults:")[0]
    assert "lr: 0.02  # learning_rate" in header


def test_full_command_with_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    put(
        "deepspeed.json",
        {"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}},
    )
    cfg, said = imported(capsys, put("ds.sh", FULL))
    assert (cfg.zero.stage, cfg.precision.dtype, cfg.tuning.method) == (3, Dtype.fp16, TuningMethod.full)
    assert (cfg.batch.global_size, cfg.batch.micro_per_gpu, cfg.data.max_length) == (16, 4, 128)
    assert (cfg.model.name, cfg.model.path) == ("ChatGLM-6B", "/models/chatglm-6b")
    assert cfg.data.validation_fraction == 0 and cfg.data.sources[0].columns == {}
    assert "train_micro_batch_size_per_gpu: auto -> 4" in said
    assert "gradient_clipping is not given" in said


def test_factory(capsys: pytest.CaptureFixture[str]) -> None:
    put("data/dataset_info.json", INFO)
    put("ds_z3_config.json", DS_AUTO)
    cfg, said = imported(capsys, put("sft.yaml", FACTORY_YAML), "world_size=4")
    tuning = cfg.tuning
    assert (tuning.method, tuning.rank, tuning.alpha) == (TuningMethod.lora, 16, 32.0)
    assert tuning.target_modules == ["q_proj", "v_proj"]
    assert (cfg.batch.global_size, cfg.zero.stage, cfg.precision.dtype) == (32, 3, Dtype.bf16)
    assert (cfg.schedule.name, cfg.schedule.warmup_ratio, cfg.train.epochs) == (ScheduleName.cosine, 0.1, 3)
    assert (cfg.data.packing, cfg.data.train_on, cfg.data.max_length) == (Packing.packed, TrainOn.all, 2048)
    assert (cfg.data.validation_fraction, cfg.evaluate.every) == (0.1, 500)
    assert cfg.track.tensorboard.enabled and cfg.train.activation_checkpointing.enabled
    first, second, third = cfg.data.sources
    assert (first.path, first.format) == ("data/identity.json", RowFormat.instruction)
    assert (second.hub, second.format) == ("o/adgen", RowFormat.prompt_response)
    assert second.columns == {"prompt": "content", "response": "summary"}
    assert third.format is RowFormat.sharegpt
    assert third.columns == {"conversations": "messages", "from": "role", "value": "content", "tools": "functions"}
    assert cfg.ds_extra == {"zero_allow_untested_optimizer": True}
    assert "sft.yaml:34: learnin_rate. Did you mean 'learning_rate'?" in said
    assert cfg.train.neftune_alpha == 5
    assert "ddp_timeout = 180000000: use distributed.timeout_s" in said
    differs = said.partition("Not quite the same here:")[2].partition("\n\n")[0]
    assert "\n  cutoff_len: longer conversations lose" in differs
    assert "\n  template: the last trained token is the one that ends an answer; there" in differs
    assert "\n  warmup_ratio: the first step has the rate peak / steps" in differs
    assert "bf16 and fp16 are not set" not in said
    assert "model_name_or_path:" not in said and "packed samples" not in said  # neat_packing is the same
    assert "is not a directory here" not in said  # a name on Hugging Face
    assert cfg.model.path == "Qwen/Qwen3-4B-Instruct-2507"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"finetuning_type": "full", "mask_history": True, "val_size": 50, "max_steps": 7, "save_total_limit": 3},
            {
                "tuning.method": TuningMethod.full,
                "data.train_on": TrainOn.last,
                "data.validation_rows": 50,
                "train.max_steps": 7,
                "checkpoint.keep": 3,
            },
        ),
        (
            {
                "finetuning_type": "freeze",
                "freeze_trainable_layers": 3,
                "freeze_extra_modules": "lm_head",
                "bf16": False,
            },
            {"tuning.last_layers": 3, "tuning.patterns": ["*lm_head*"], "precision.dtype": Dtype.fp32},
        ),
        (
            {"quantization_bit": 4, "lora_target": "all", "warmup_steps": 0.05, "flash_attn": "sdpa"},
            {
                "tuning.method": TuningMethod.qlora,
                "tuning.target_modules": ["all-linear"],
                "schedule.warmup_ratio": 0.05,
                "model.attention": "sdpa",
            },
        ),
        (
            {"use_dora": True, "lora_alpha": 5, "disable_gradient_checkpointing": True, **COSINE},
            {
                "tuning.dora": True,
                "tuning.alpha": 5.0,
                "train.activation_checkpointing.enabled": False,
                "schedule.min_lr_ratio": 0.1,
            },
        ),
        (
            {"pissa_init": True, "pissa_iter": -1, "pissa_convert": True, "loraplus_lr_ratio": 8.0},
            {"tuning.init": LoraInit.pissa, "tuning.init_iterations": 0, "optim.lora_plus_ratio": 8.0},
        ),
        (
            {"adapter_name_or_path": "out/adapter", "fp16": True, "bf16": False, "num_train_epochs": 1.5},
            {"tuning.adapter": "out/adapter", "precision.dtype": Dtype.fp16, "train.epochs": 1.5},
        ),
        (
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 5, "enable_liger_kernel": True, **GLM_LORA},
            {
                "schedule.warmup_steps": 5,
                "kernels.liger": "always",
                "tuning.target_modules": ["q_proj", "k_proj", "v_proj"],
                "model.name": "ChatGLM3-6B",
            },
        ),
        (
            {"model_name_or_path": "THUDM/chatglm3-6b", "model_revision": "v1", "template": "chatglm3"},
            {"model.path": "THUDM/chatglm3-6b", "model.revision": "v1", "model.name": "ChatGLM3-6B"},
        ),
        ({"model_name_or_path": "me/m", "model_revision": "main"}, {"model.path": "me/m", "model.revision": ""}),
        (
            {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2, "lr_end": 1e-5}},
            {"schedule.name": ScheduleName.polynomial, "schedule.power": 2.0, "schedule.min_lr_ratio": 0.1},
        ),
        (
            {"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": '{"timescale": 50}', "warmup_steps": 5},
            {"schedule.name": ScheduleName.inverse_sqrt, "schedule.timescale": 50, "schedule.warmup_steps": 5},
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": STABLE, "warmup_steps": 5},
            {
                "schedule.name": ScheduleName.wsd,
                "schedule.decay_steps": 20,
                "schedule.decay_type": Decay.sqrt,
                "schedule.min_lr_ratio": 0.1,
                "schedule.warmup_min_ratio": 0.1,
            },
        ),
        (
            {"stage": "pt", "dataset": "texts", "torch_compile": True, "torch_compile_mode": "reduce-overhead"},
            {
                "data.packing": Packing.packed,
                "data.too_long": TooLong.split,
                "compile.mode": "reduce-overhead",
                "compile.enabled": True,
            },
        ),
        (
            {"stage": "pt", "dataset": "texts", "packing": False},
            {"data.packing": Packing.none, "data.too_long": TooLong.truncate},
        ),
        (
            {"use_muon": True, "learning_rate": 0.001, "weight_decay": 0.1},
            {
                "optim.name": OptimizerName.muon,
                "optim.lr": 0.001,
                "optim.adam_lr": 0.001,
                "optim.momentum": 0.95,
                "train.gradient_clipping": 0.0,
            },
        ),
        ({"fp8": True}, {"precision.dtype": Dtype.bf16, "precision.fp8": Fp8.rowwise}),
        ({"optim": "muon"}, {"optim.name": OptimizerName.muon, "train.gradient_clipping": 0.0}),
        ({"packing": True}, {"data.packing": Packing.packed, "data.too_long": TooLong.truncate}),
        (
            {
                "load_best_model_at_end": True,
                "save_total_limit": 2,
                "val_size": 0.2,
                "eval_strategy": "steps",
                "eval_steps": 500,
            },
            {"evaluate.keep_best": "eval_loss", "evaluate.every": 500, "data.validation_fraction": 0.2},
        ),
    ],
    ids=lambda part: ",".join(part),
)
def test_single_keys(capsys: pytest.CaptureFixture[str], change: dict[str, Any], expected: dict[str, object]) -> None:
    put("data/dataset_info.json", INFO)
    small = {
        "model_name_or_path": "/m/any",
        "stage": "sft",
        "do_train": True,
        "dataset": "identity",
        "template": "default",
        "learning_rate": 1e-4,
        "bf16": True,
        "save_steps": 100,
        "logging_steps": 10,
    }
    cfg, _ = imported(capsys, put("one.yaml", yaml.safe_dump(small | change)), "world_size=2")
    for key, value in expected.items():
        found = get_value(cfg, key)
        assert (found == pytest.approx(value)) if isinstance(value, float) else found == value, key


def test_template_of_llama_factory_for_a_model_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    put("data/dataset_info.json", INFO)
    text = FACTORY_YAML.replace("qwen3_nothink", "glm4").replace("identity,adgen,tools", "identity")
    cfg, said = imported(capsys, put("glm4.yaml", text), "world_size=2")
    assert get_value(cfg, "model.chat_template") == ""
    assert "template = glm4: the model's own chat template is used; if it has none, set model.chat_template=glm4." in (
        " ".join(said.split())
    )


PREFERENCES = {
    "pairs": {"file_name": "pairs.json", "ranking": True, "formatting": "sharegpt"},
    "asked": {
        "file_name": "asked.json",
        "ranking": True,
        "columns": {"prompt": "question", "query": "context", "chosen": "good", "rejected": "bad"},
    },
    "marked": {
        "file_name": "marked.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "label"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
}


def test_what_llama_factory_trains_otherwise_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Alpaca's template, no type of the weights, and a warmup that only DeepSpeed's schedules begin otherwise."""
    changes = {
        "template": "alpaca",
        "dataset_dir": "ONLINE",
        "deepspeed": None,
        "bf16": None,
        "lr_scheduler_type": "polynomial",
    }
    values = {**yaml.safe_load(FACTORY_YAML), **changes}
    cfg, said = imported(capsys, put("alpaca.yaml", yaml.safe_dump(values)), "world_size=1")
    assert (cfg.model.chat_template, cfg.precision.dtype) == ("alpaca", Dtype.fp32)
    assert "template: rows without a system message get none; there they begin with Alpaca's" in said
    assert "bf16 and fp16 are not set: there frozen weights have the type" in said
    assert "warmup_ratio:" not in said


@pytest.mark.parametrize(
    ("given", "loss", "expected"),
    [
        ({"stage": "dpo"}, "sigmoid", {"beta": 0.1, "sft_weight": 0.0}),
        (
            {"stage": "dpo", "pref_beta": 0.3, "dpo_label_smoothing": 0.1, "pref_ftx": 0.5},
            "sigmoid",
            {"beta": 0.3, "label_smoothing": 0.1, "sft_weight": 0.5},
        ),
        ({"stage": "dpo", "pref_loss": "orpo"}, "orpo", {"sft_weight": 1.0, "beta": 0.1}),
        (
            {"stage": "dpo", "pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 1.2},
            "simpo",
            {"beta": 2.0, "gamma": 1.2},
        ),
        ({"stage": "kto", "kto_rejected_weight": 0.7}, "kto", {"desirable_weight": 1.0, "undesirable_weight": 0.7}),
    ],
)
def test_preferences_of_llama_factory(
    capsys: pytest.CaptureFixture[str], given: dict[str, Any], loss: str, expected: dict[str, float]
) -> None:
    put("data/dataset_info.json", PREFERENCES)
    base = {"do_train": True, "per_device_train_batch_size": 1, "model_name_or_path": "m", "learning_rate": 5e-6}
    names = "marked,pairs" if loss == "kto" else "pairs,asked,marked"
    cfg, told = imported(capsys, put("a.json", {**base, "dataset": names, **given}), "world_size=2")
    assert cfg.preference.loss.value == loss and cfg.optim.lr == 5e-6
    assert {name: getattr(cfg.preference, name) for name in expected} == expected
    sources = {Path(source.path).name: (source.format.value, source.columns) for source in cfg.data.sources}
    renamed = {"instruction": "question", "input": "context", "chosen": "good", "rejected": "bad"}
    if loss == "kto":
        columns = {"conversations": "messages", "from": "role", "value": "content", "kto_tag": "label"}
        assert sources == {"marked.json": ("labeled", columns)}
        assert "the dataset pairs is skipped: it holds preferences, which stage = dpo trains on" in told
    else:
        assert sources == {"pairs.json": ("preference", {}), "asked.json": ("preference", renamed)}
        assert "the dataset marked is skipped: it holds no pairs" in told


def test_added_tokens_of_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """LLaMA-Factory's are texts with commas, ms-swift's and axolotl's lists."""
    put("data/dataset_info.json", {"d": {"file_name": "d.json"}})
    put("data/d.json", [{"instruction": "a", "output": "b"}])
    given = {"stage": "sft", "do_train": True, "per_device_train_batch_size": 1, "model_name_or_path": "m"}
    given |= {"dataset": "d", "add_tokens": "<A>, <B>", "add_special_tokens": "<|x|>,<A>", "resize_vocab": True}
    cfg, told = imported(capsys, put("a.json", given), "world_size=2")
    assert cfg.model.add_tokens == ["<A>", "<B>", "<|x|>"]
    assert "resize_vocab" not in told or "harmless" not in told
    rows = put("rows.jsonl", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    base = {"base_model": "m", "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1}
    axolotl = {**base, "datasets": [{"path": rows, "type": "chat_template"}], "tokens": ["<A>", "<B>"]}
    assert imported(capsys, put("b.yaml", axolotl), "world_size=2")[0].model.add_tokens == ["<A>", "<B>"]


def test_reward_models_of_llama_factory(capsys: pytest.CaptureFixture[str]) -> None:
    put("data/dataset_info.json", PREFERENCES)
    given = {"stage": "rm", "do_train": True, "per_device_train_batch_size": 1, "model_name_or_path": "m"}
    cfg, told = imported(capsys, put("a.json", {**given, "dataset": "pairs,marked"}), "world_size=2")
    assert cfg.task.kind.value == "reward" and not cfg.preference.is_on
    assert [(Path(one.path).name, one.format.value) for one in cfg.data.sources] == [("pairs.json", "reward")]
    assert "the dataset marked is skipped: it holds no pairs" in told


@pytest.mark.parametrize(
    ("given", "loss", "expected"),
    [
        ({"beta": 0.2}, "sigmoid", {"beta": 0.2}),
        ({"loss_type": ["robust"], "label_smoothing": 0.2}, "robust", {"label_smoothing": 0.2}),
        ({"loss_type": "ipo", "rpo_alpha": 0.4}, "ipo", {"sft_weight": 0.4}),
        ({"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.1}, "simpo", {"gamma": 1.1, "sft_weight": 0.0}),
        ({"cpo_alpha": 0.9}, "cpo", {"sft_weight": 0.9}),
        ({"beta": 0.3, "desirable_weight": 1.2}, "kto", {"beta": 0.3, "desirable_weight": 1.2}),
    ],
)
def test_preferences_of_trl(
    capsys: pytest.CaptureFixture[str], given: dict[str, Any], loss: str, expected: dict[str, float]
) -> None:
    base = {"model_name_or_path": "m", "per_device_train_batch_size": 2, "max_length": 512}
    cfg, told = imported(capsys, put("a.json", {**base, **given, "precompute_ref_log_probs": True}), "world_size=2")
    assert (cfg.preference.loss.value, cfg.data.max_length) == (loss, 512)
    assert {name: getattr(cfg.preference, name) for name in expected} == expected
    assert "precompute_ref_log_probs" in told
    assert "loss_type = ['aot'] has no counterpart" in refused(
        put("b.json", {**base, "loss_type": ["aot"]}), "world_size=2"
    )


REWARD = {"per_device_train_batch_size": 2, "model_name_or_path": "m"}


@pytest.mark.parametrize(
    ("name", "text", "center"),
    [
        ("a.json", json.dumps({**REWARD, "center_rewards_coefficient": None, "disable_dropout": True}), 0.0),
        ("a.yaml", json.dumps({**REWARD, "center_rewards_coefficient": 0.01, "pad_to_multiple_of": None}), 0.01),
        ("a.sh", "trl reward --model_name_or_path m --per_device_train_batch_size 2 --eos_token x\n", 0.0),
        ("b.sh", "accelerate launch examples/scripts/reward_modeling.py --per_device_train_batch_size 2\n", 0.0),
    ],
)
def test_reward_models_of_trl(capsys: pytest.CaptureFixture[str], name: str, text: str, center: float) -> None:
    """With RewardConfig's own defaults for what is not given."""
    cfg, told = imported(capsys, put(name, text), "world_size=2")
    assert (cfg.task.kind.value, cfg.task.center, cfg.preference.is_on) == ("reward", center, False)
    assert (cfg.optim.lr, cfg.data.max_length, cfg.precision.dtype) == (1e-4, 1024, Dtype.bf16)
    assert cfg.train.activation_checkpointing.enabled
    assert "Unknown" not in told and ("eos_token" in told) is ("eos_token" in text)


@pytest.mark.parametrize(
    ("script", "loss"), [("trl dpo", "sigmoid"), ("python kto.py", "kto"), ("python cpo.py", "cpo")]
)
def test_scripts_of_trl_say_which_loss(capsys: pytest.CaptureFixture[str], script: str, loss: str) -> None:
    line = f"{script} --model_name_or_path m --per_device_train_batch_size 2 --fp16 --max_length 256\n"
    cfg, _ = imported(capsys, put("a.sh", line), "world_size=2")
    assert (cfg.preference.loss.value, cfg.optim.lr, cfg.data.max_length) == (loss, 1e-6, 256)
    assert cfg.precision.dtype is Dtype.fp16


@pytest.mark.parametrize(
    ("options", "expected", "note"),
    [
        ("", {"method": "full"}, ""),
        ("--lora_r 4", {"method": "full"}, "lora_r = 4: has no effect there"),
        ("--use_peft", {"method": "lora", "rank": 16, "alpha": 32.0, "dropout": 0.05}, "lora_target_modules: names"),
        (
            "--use_peft --lora_r 4 --lora_alpha 6 --lora_dropout 0 --lora_target_modules q_proj v_proj --use_rslora",
            {"rank": 4, "alpha": 6.0, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"], "rslora": True},
            "",
        ),
        ("--use_peft true --lora_target_modules all-linear", {"target_modules": ["all-linear"]}, ""),
        ("--use_peft --lora_modules_to_save lm_head --use_dora", {"save_modules": ["lm_head"], "dora": True}, ""),
        ("--use_peft --load_in_4bit", {"method": "qlora", "rank": 16}, ""),
        ("--use_peft --load_in_8bit", {"method": "lora"}, "load_in_8bit = True: 4 bits with LoRA"),
    ],
)
def test_lora_of_trl(capsys: pytest.CaptureFixture[str], options: str, expected: dict[str, object], note: str) -> None:
    """In a command of any of its scripts, supervised ones too."""
    for script in ("trl dpo", "python trl/scripts/sft.py"):
        line = f"{script} --model_name_or_path m --per_device_train_batch_size 2 {options}\n"
        cfg, told = imported(capsys, put("a.sh", line), "world_size=1")
        assert {name: getattr(cfg.tuning, name) for name in expected} == expected
        assert note in told and "Unknown" not in told


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("trl sft", (2e-5, "bf16", 1024, True)),
        ("python trl/scripts/sft.py", (2e-5, "bf16", 1024, True)),
        ("trl sft --fp16 --learning_rate 3e-4 --max_length 64", (3e-4, "fp16", 64, True)),
        ("trl reward", (1e-4, "bf16", 1024, True)),
        ("trl dpo", (1e-6, "bf16", 1024, True)),
        ("python train.py", (5e-5, "fp32", RunConfig().data.max_length, False)),
    ],
)
def test_what_a_command_of_trl_does_not_give_is_trl_s(
    capsys: pytest.CaptureFixture[str], command: str, expected: tuple[object, ...]
) -> None:
    line = f"{command} --model_name_or_path m --per_device_train_batch_size 2\n"
    cfg, _ = imported(capsys, put("a.sh", line), "world_size=1")
    recomputes = cfg.train.activation_checkpointing.enabled
    assert (cfg.optim.lr, cfg.precision.dtype.value, cfg.data.max_length, recomputes) == expected


@pytest.mark.parametrize(
    ("options", "train", "validation"),
    [
        ("--dataset_name a/b", {"hub": "a/b", "split": "train"}, None),
        ("--dataset_name a/b --dataset_config c", {"hub": "a/b", "subset": "c"}, None),
        ("--dataset_name ./pairs --dataset_train_split s", {"path": "./pairs", "split": "s"}, None),
        (
            "--dataset_name a/b --eval_strategy steps --eval_steps 5",
            {"split": "train"},
            {"hub": "a/b", "split": "test"},
        ),
    ],
)
def test_datasets_of_trl(
    capsys: pytest.CaptureFixture[str], options: str, train: dict[str, str], validation: dict[str, str] | None
) -> None:
    """These names are ChatGLM's, too, whose scripts have others besides."""
    for script, row_format in (("dpo", "preference"), ("kto", "labeled"), ("reward", "reward")):
        line = f"trl {script} --model_name_or_path m --per_device_train_batch_size 2 {options}\n"
        cfg, told = imported(capsys, put("a.sh", line), "world_size=1")
        found = [cfg.data.sources, cfg.data.validation]
        for sources, expected in zip(found, (train, validation), strict=True):
            assert [one.format.value for one in sources] == ([row_format] if expected else [])
            assert [{name: getattr(one, name) for name in expected} for one in sources] == (
                [expected] if expected else []
            )
        assert cfg.evaluate.every == (5 if validation else 0) and "write data.sources" not in told


def test_training_arguments_as_transformers_writes_them(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Seq2SeqTrainingArguments

    arguments = Seq2SeqTrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=3e-5,
        weight_decay=0.1,
        warmup_steps=10,
        max_steps=100,
        save_steps=50,
        eval_strategy="steps",
        num_train_epochs=2,
        label_smoothing_factor=0.1,
        use_cpu=True,
        hub_token="hf_abcdefghijklmnopqrst",
    )
    put("args.json", arguments.to_json_string())
    put("ds.json", DS_AUTO | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}})
    cfg, said = imported(capsys, "args.json", "ds.json", "world_size=8")
    assert (cfg.batch.global_size, cfg.batch.micro_per_gpu, cfg.optim.lr) == (64, 2, 3e-5)
    assert (cfg.zero.stage, cfg.zero.offload_optimizer.device.value) == (2, "cpu")
    assert (cfg.optim.weight_decay, cfg.schedule.warmup_steps, cfg.train.max_steps) == (0.1, 10, 100)
    assert (cfg.precision.dtype, cfg.schedule.name) == (Dtype.fp32, ScheduleName.linear)
    assert "label_smoothing_factor = 0.1: the loss is plain cross-entropy" in said
    assert cfg.optim.decay is DecayOf.matrices
    assert "write data.sources" in said
    assert "eval_strategy = steps, eval_steps = 500: no validation data are named" in said
    assert "num_train_epochs = 2: has no effect there" in said.replace("2.0", "2")
    assert "Unknown" not in said and "hf_abc" not in said
    assert "zero: stage2_offload" in Path("last.yaml").read_text()


def test_what_a_json_names_without_effect_is_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    section = {"stage": 2, "stage3_prefetch_bucket_size": 7, "allgather_partitions": False}
    put("ds.json", {"zero_optimization": section, "activation_checkpointing": {"partition_activations": True}})
    cfg, said = imported(capsys, put("args.json", {"per_device_train_batch_size": 2}), "ds.json", "world_size=2")
    assert cfg.train.activation_checkpointing.enabled
    assert not cfg.train.activation_checkpointing.partition_activations and cfg.zero.allgather_partitions
    assert "no effect with the other settings: zero_optimization.stage3_prefetch_bucket_size." in said
    assert "partition_activations has no effect" in said and "allgather_partitions has no effect" in said


@pytest.mark.parametrize(("section", "decay"), [(None, "matrices"), ({"type": "AdamW", "params": {}}, "all")])
def test_an_optimizer_of_the_json_decays_every_parameter(
    capsys: pytest.CaptureFixture[str], section: dict[str, Any] | None, decay: str
) -> None:
    put("ds.json", {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "optimizer": section})
    args = {"per_device_train_batch_size": 2, "weight_decay": 0.1, "bf16": True}
    cfg, _ = imported(capsys, put("args.json", args), "ds.json", "world_size=2")
    assert cfg.optim.decay.value == decay


@pytest.mark.parametrize("name", ["adafactor", "adagrad"])
@pytest.mark.parametrize("named", [None, "elsewhere.json"])
def test_optimizers_without_zero(capsys: pytest.CaptureFixture[str], name: str, named: str | None) -> None:
    args = {"per_device_train_batch_size": 2, "optim": name, "bf16": True, "deepspeed": named}
    cfg, said = imported(capsys, put("args.json", args), "world_size=2")
    assert (cfg.optim.name.value, cfg.zero.stage) == (name, 0)
    assert ("elsewhere.json is not here" if named else "the recipe has zero=stage0") in said


@pytest.mark.parametrize(
    ("given", "every", "lost"),
    [
        ({}, 500, False),
        ({"save_steps": 7}, 7, False),
        ({"save_strategy": "no"}, 0, False),
        ({"save_strategy": "epoch"}, 0, True),
    ],
)
def test_only_the_trainers_strategy_saves(
    capsys: pytest.CaptureFixture[str], given: dict[str, Any], every: int, lost: bool
) -> None:
    """Not every quarter of an hour, too: without save_total_limit all checkpoints are kept."""
    args = {"per_device_train_batch_size": 2, **given}
    cfg, said = imported(capsys, put("args.json", args), "world_size=2")
    assert (cfg.checkpoint.every, cfg.checkpoint.minutes, cfg.checkpoint.keep) == (every, 0, 0)
    assert ("the recipe saves at the end only" in said) is lost and "has no effect there" not in said


MIN_LR = {"min_lr": 1e-5, "num_cycles": 1.5}


@pytest.mark.parametrize(
    ("name", "kwargs", "lost"),
    [
        ("cosine", {"num_cycles": 0.25}, "num_cycles has no counterpart"),
        ("cosine", {"num_cycles": 0.5}, ""),
        ("cosine_with_min_lr", MIN_LR, "num_cycles has no counterpart"),
        ("cosine_with_min_lr", {"min_lr": 1e-5}, ""),
        ("polynomial", '{"power": 2.0, "cycle": 1, "x": 2}', "cycle, x has no counterpart"),
    ],
)
def test_arguments_of_schedules(capsys: pytest.CaptureFixture[str], name: str, kwargs: object, lost: str) -> None:
    args = {"per_device_train_batch_size": 2, "lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs}
    _, said = imported(capsys, put("args.json", args), "world_size=2")
    assert ("has no counterpart" in said) is bool(lost) and lost in said
    assert not lost or lost in Path("last.yaml").read_text().replace("\n#  ", "")


@pytest.mark.parametrize(("given", "expected"), [({}, True), ({"bf16": True}, False), ({"tf32": False}, False)])
def test_tf32(capsys: pytest.CaptureFixture[str], given: dict[str, bool], expected: bool) -> None:
    args = {"per_device_train_batch_size": 2, "tf32": True, **given}
    cfg, said = imported(capsys, put("args.json", args), "world_size=2")
    assert cfg.precision.tf32 is expected and ("tf32 = True: has no effect" in said) is ("bf16" in given)


def test_command_of_any_script(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "CUDA_VISIBLE_DEVICES=0,1 python run_clm.py --per-device-train-batch-size=2 --no_dataloader_pin_memory --bf16 "
    )
    line += "--adam_beta2 0.98 --blck_size 512\n"
    cfg, said = imported(capsys, put("run.sh", line))
    assert (cfg.batch.global_size, cfg.optim.betas, cfg.precision.dtype) == (4, [0.9, 0.98], Dtype.bf16)
    assert "run.sh:1: blck_size. Did you mean 'block_size'?" in said
    assert "dataloader_pin_memory = False: see data.num_workers" in said


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("accelerate launch --num_processes 16 --num_machines 2", 16),
        ("accelerate launch --num_processes=4 --num_machines=$NODES", 4),
        ("torchrun --nproc_per_node 8 --nnodes 2", 16),
        ("deepspeed --num_gpus 8 --num_nodes 2", 16),
    ],
)
def test_ranks_of_launchers(capsys: pytest.CaptureFixture[str], launcher: str, ranks: int) -> None:
    """accelerate's number is that of all nodes."""
    cfg, _ = imported(capsys, put("a.sh", f"{launcher} train.py --per_device_train_batch_size 4\n"))
    assert cfg.batch.global_size == 4 * ranks


@pytest.mark.parametrize(
    ("options", "script", "expected", "said"),
    [
        ("--mixed_precision bf16", "train.py", ("bf16", 2), "No DeepSpeed JSON is named"),
        ("--mixed_precision fp8", "train.py", ("bf16", 2), "No DeepSpeed JSON is named"),
        ("--mixed_precision=fp16 --use_deepspeed", "train.py", ("fp16", 2), ""),
        ("--mixed_precision bf16 --use_deepspeed --zero_stage 3", "train.py --fp16", ("fp16", 3), ""),
        ("--use_deepspeed --deepspeed_config_file ds.json", "train.py", ("fp32", 1), ""),
        ("--mixed_precision fp16", "trl/scripts/sft.py", ("bf16", 2), "No DeepSpeed JSON is named"),
        ("--main_process_port $PORT --zero3_init_flag true", "train.py", ("fp32", 2), "No DeepSpeed JSON is named"),
        ("--config_file z3.yaml", "train.py", ("fp32", 2), "--config_file: accelerate's file is not read"),
        (
            "--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --gradient_clipping 2",
            "train.py",
            ("fp32", 3),
            "",
        ),
        (
            "--use_deepspeed --zero_stage 2 --offload_param_device nvme",
            "train.py",
            ("fp32", 2),
            "--offload_param_device: of the options of accelerate",
        ),
        ("--use_fsdp --fsdp_sharding_strategy FULL_SHARD", "train.py", ("fp32", 3), ""),
        ("--use_fsdp --fsdp_sharding_strategy 2", "train.py", ("fp32", 2), ""),
        ("--config_file fsdp.yaml", "train.py", ("bf16", 2), ""),
        ("--config_file zero.yaml", "train.py", ("fp32", 3), ""),
        ("--config_file plain.yaml", "train.py", ("fp16", 2), "No DeepSpeed JSON is named"),
    ],
)
def test_options_of_accelerate(
    capsys: pytest.CaptureFixture[str], options: str, script: str, expected: tuple[str, int], said: str
) -> None:
    put("ds.json", {"train_batch_size": "auto", "zero_optimization": {"stage": 1}})
    fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": False}
    put("fsdp.yaml", yaml.safe_dump({"distributed_type": "FSDP", "mixed_precision": "bf16", "fsdp_config": fsdp}))
    put("zero.yaml", yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}))
    put("plain.yaml", yaml.safe_dump({"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"}))
    line = f"accelerate launch --num_processes 8 {options} {script} --per_device_train_batch_size 4\n"
    cfg, told = imported(capsys, put("a.sh", line))
    assert (cfg.precision.dtype.value, cfg.zero.stage) == expected
    assert said in told and ("No DeepSpeed JSON is named" in told) is ("No DeepSpeed JSON" in said)
    assert ("accelerate" in told) is ("accelerate" in said)


TRL_YAML = """model_name_or_path: m
dataset_name: a/b
per_device_train_batch_size: 2
learning_rate: 3.0e-4
packing: true
use_peft: true
lora_r: 8
"""


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", TRL_YAML, ("lora", 8, 3e-4, "packed", "none")),
        ("a.sh", "trl sft --config c.yaml\n", ("lora", 8, 3e-4, "packed", "none")),
        ("a.sh", "trl sft --config c.yaml --lora_r 4 --learning_rate 1e-4\n", ("lora", 4, 1e-4, "packed", "none")),
        ("a.sh", "python trl/scripts/dpo.py --config c.yaml --packing false\n", ("lora", 8, 3e-4, "none", "sigmoid")),
        (
            "a.sh",
            "trl sft --model_name_or_path m --dataset_name a/b --per_device_train_batch_size 2 --packing true\n",
            ("full", 64, 2e-5, "packed", "none"),
        ),
    ],
)
def test_configs_of_trl(capsys: pytest.CaptureFixture[str], name: str, text: str, expected: tuple[object, ...]) -> None:
    """LLaMA-Factory has some of these names, too; a command's own arguments beat its file."""
    put("c.yaml", TRL_YAML)
    cfg, said = imported(capsys, put(name, text), "world_size=2")
    tuning, found = cfg.tuning, (cfg.optim.lr, cfg.data.packing.value, cfg.preference.loss.value)
    assert (tuning.method.value, tuning.rank if tuning.method.value == "lora" else 64, *found) == expected
    assert [source.hub for source in cfg.data.sources] == ["a/b"] and "Unknown" not in said
    Path("c.yaml").unlink()
    if "--config" in text:
        assert "cannot read c.yaml" in refused(name, "world_size=2")


@pytest.mark.parametrize(
    ("options", "expected", "note"),
    [
        ("", {"data.train_on": TrainOn.auto, "model.attention": "auto"}, "assistant_only_loss: prompts are never"),
        ("--assistant_only_loss true --completion_only_loss true", {"data.train_on": TrainOn.all}, ""),
        ("--completion_only_loss false", {}, "completion_only_loss = false: prompts are never trained"),
        ("--attn_implementation sdpa --max_seq_length 99", {"model.attention": "sdpa", "data.max_length": 99}, ""),
        (
            "--attn_implementation flash_attention_2",
            {"model.attention": "auto"},
            "attn_implementation = flash_attention_2: sdpa; otherwise",
        ),
        ("--dtype auto", {"precision.dtype": Dtype.bf16}, "dtype = auto: has no effect there"),
        ("--dtype bfloat16", {"precision.dtype": Dtype.bf16}, "dtype: bf16 with float32 master weights"),
    ],
)
def test_supervised_training_of_trl(
    capsys: pytest.CaptureFixture[str], options: str, expected: dict[str, object], note: str
) -> None:
    line = f"trl sft --model_name_or_path m --dataset_name a/b --per_device_train_batch_size 2 {options}\n"
    cfg, said = imported(capsys, put("a.sh", line), "world_size=1")
    assert {key: get_value(cfg, key) for key in expected} == expected
    assert note in said and "Unknown" not in said
    assert ("assistant_only_loss:" in said) is ("assistant_only_loss" not in options)


def test_text_column_of_trl(capsys: pytest.CaptureFixture[str]) -> None:
    line = "trl sft --dataset_name a/b --per_device_train_batch_size 2 --dataset_text_field body\n"
    [source] = imported(capsys, put("a.sh", line), "world_size=1")[0].data.sources
    assert (source.hub, source.format, source.columns) == ("a/b", RowFormat.text, {"text": "body"})


def test_files_of_transformers_own_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """They share --train_file and more with ChatGLM's main.py, which descends from one of them."""
    files = "--train_file t.json --validation_file v.json --do_train --preprocessing_num_workers 4 --overwrite_cache"
    shared = f"{files} --max_train_samples 9 --max_eval_samples 5 --model_name_or_path m --bf16"
    for block, length in (("--block_size 2048", 2048), ("", 1024)):
        line = f"torchrun --nproc_per_node 8 run_clm.py {shared} --per_device_train_batch_size 1 {block}\n"
        cfg, said = imported(capsys, put("a.sh", line))
        [source], [validation] = cfg.data.sources, cfg.data.validation
        assert (source.path, source.format, validation.path) == ("t.json", RowFormat.text, "v.json")
        assert validation.format is RowFormat.text and "Unknown" not in said
        data = cfg.data
        assert (data.max_length, data.packing, data.too_long.value) == (length, Packing.packed, "split")
        assert (data.max_samples, cfg.evaluate.max_samples, cfg.prepare.num_workers) == (9, 5, 4)
    cfg, _ = imported(capsys, put("a.sh", line.replace("run_clm", "mine")))
    assert [source.format for source in cfg.data.sources] == [RowFormat.auto]
    assert cfg.data.packing is Packing.none


def test_printed_without_output(capsys: pytest.CaptureFixture[str]) -> None:
    import_config.run([put("train.sh", PTUNING)])
    printed = capsys.readouterr()
    put("again.yaml", printed.out)
    assert load(["recipe=again.yaml"]).cfg.optim.lr == 2e-2
    assert "Without counterpart" in printed.err


def test_secrets_stay_out(capsys: pytest.CaptureFixture[str]) -> None:
    put("data/dataset_info.json", INFO)
    text = FACTORY_YAML + "swanlab_api_key: verysecretvalue\nuse_swanlab: true\n"
    put("ds_z3_config.json", DS_AUTO)
    _, said = imported(capsys, put("s.yaml", text), "world_size=4")
    assert "swanlab_api_key = ***" in said
    assert "verysecretvalue" not in said + Path("last.yaml").read_text()


def test_a_token_of_the_vocabulary_is_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    command = "python sft.py --model_name_or_path m --eos_token '<|im_end|>' --hub_token verysecretvalue\n"
    _, said = imported(capsys, put("train.sh", command))
    assert "eos_token = <|im_end|>" in said and "hub_token = ***" in said


def test_deepspeeds_own_options_name_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    put("deepspeed.json", DS_AUTO)
    command = FULL.replace("--deepspeed deepspeed.json", "--deepspeed --deepspeed_config deepspeed.json")
    assert imported(capsys, put("ds.sh", command))[0].zero.stage == 3


FACTORY_V1 = """model: Qwen/Qwen3-0.6B
model_class: llm
kernel_config: {name: auto}
dist_config: {name: fsdp2}
train_dataset: data/v1_sft_demo.yaml
output_dir: outputs/x
micro_batch_size: 1
cutoff_len: 2048
learning_rate: 1.0e-4
"""


def test_llama_factory_v1_is_named() -> None:
    message = refused(put("v1.yaml", FACTORY_V1), "world_size=2")
    assert message.startswith("v1.yaml: a config of LLaMA-Factory v1")
    assert "(seen: model_class, kernel_config, dist_config" in message


def test_what_is_not_here_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, said = imported(capsys, put("sft.yaml", FACTORY_YAML), "world_size=4")
    assert said.endswith("Next:  toolkit check recipe=made.yaml data=FILE.jsonl\n")
    assert cfg.data.sources == []
    header = " ".join(re.findall("(?m)^# (.*)", Path("last.yaml").read_text(encoding="utf-8")))
    for text in (said, header):
        assert "deepspeed = ds_z3_config.json is not here: the recipe has zero=stage3, as its name says." in text
        assert "data/dataset_info.json is not here" in text
        assert "assumed" not in text
    put("data/dataset_info.json", INFO)
    _, said = imported(capsys, put("p.yaml", FACTORY_YAML.replace("adgen,", "pictures,")), "world_size=4")
    assert "the dataset pictures is skipped: it holds images" in said


@pytest.mark.parametrize(
    ("name", "zero", "more"),
    [
        ("examples/deepspeed/ds_z3_offload_config.json", (3, "cpu"), {}),
        ("examples/deepspeed/ds_z0_config.json", (0, "none"), {}),
        ("deepspeed_configs/zero1_torch_compile.json", (1, "none"), {}),
        ("finetune/ds_config_zero2.json", (2, "none"), {}),
        ("ds_z3_config.json", (2, "none"), {"quantization_bit": 4}),
        ("my_h20_config.json", (2, "none"), {}),
    ],
)
def test_the_name_of_a_missing_json_says_its_stage(
    capsys: pytest.CaptureFixture[str], name: str, zero: tuple[int, str], more: dict[str, Any]
) -> None:
    small = {"model_name_or_path": "/m", "stage": "sft", "do_train": True, "dataset": "x", "bf16": True}
    cfg, said = imported(
        capsys, put("a.json", {**small, **more, "finetuning_type": "lora", "deepspeed": name}), "world_size=2"
    )
    assert (cfg.zero.stage, cfg.zero.offload_optimizer.device.value) == zero
    assert f"deepspeed = {name} is not here: the recipe has zero=stage{zero[0]}" in said
    assert ("as its name says" in said) == ("h20" not in name)


def test_without_the_number_of_ranks_one_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, said = imported(capsys, put("sft.yaml", FACTORY_YAML))
    assert cfg.batch.global_size == 8
    told = "world_size=1 is assumed: batch.global_size = 8. For N GPUs add world_size=N."
    assert told in said and f"# - {told}" in Path("last.yaml").read_text(encoding="utf-8")
    put("ds_z3_config.json", {"train_batch_size": 64, "zero_optimization": {"stage": 3}})
    assert refused("sft.yaml").endswith(told)


BAD: dict[str, tuple[str, Any, str]] = {
    "broken YAML": ("a.yaml", "stage: sft\n  dataset: [", "a.yaml:2"),
    "empty": ("a.yaml", "", "a.yaml is empty"),
    "empty command": ("a.sh", "# nothing\n", "there is no training command"),
    "a list": ("a.yaml", "- stage\n", "must hold `key: value` lines"),
    "alias": ("a.yaml", "stage: &x sft\nseed: *x\n", "aliases"),
    "broken JSON": ("a.json", "{", "a.json is no JSON"),
    "twice": ("a.json", '{"seed": 1, "seed": 2}', "'seed' stands twice"),
    "strange file": ("a.toml", "x = 1", "files of this kind are not read"),
    "nothing known": ("a.yaml", "colour: red\n", "0 of 1 are known to one of them, and not colour."),
    "little known": (
        "a.yaml",
        "version: 3\nservices: {}\nnetworks: {}\nseed: 1\n",
        "1 of 4 are known to one of them, and not version, services, networks.",
    ),
    "nothing trained": ("a.sh", "python expand.py --model_name_or_path m --output_dir o\n", "2 of 2 are known"),
    "accelerate's": (
        "a.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nfsdp_config: {}\nuse_cpu: false\n",
        "a.yaml: a config of accelerate: give the training config",
    ),
    "Megatron's": ("a.sh", "megatron sft --model m --micro_batch_size 1\n", "a.sh:1: arguments of Megatron"),
    "Megatron's keys": (
        "a.yaml",
        "stage: sft\nlearning_rate: 1.0e-5\ntensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\n",
        "(seen: tensor_model_parallel_size, pipeline_model_parallel_size)",
    ),
    "GRPO": ("a.yaml", "learning_rate: 1.0e-6\nreward_funcs: [a]\nnum_generations: 8\n", "reinforcement learning"),
    "GRPO's script": ("a.sh", "trl grpo --model_name_or_path m --dataset_name a/b\n", "reinforcement learning"),
    "a sampler's": ("a.yaml", "sampler_engine: vllm\nnum_return_sequences: 4\n", "`swift sample`"),
    "DeepSpeed alone": ("a.json", DS_AUTO, "this is a DeepSpeed JSON alone"),
    "substitution": (
        "a.sh",
        ptuning("--learning_rate $LR", "--learning_rate $(cat lr)"),
        "the value of --learning_rate is not in the file ($(…))",
    ),
    "backticks": (
        "a.sh",
        ptuning("--learning_rate $LR", "--learning_rate `cat lr`"),
        "nothing is executed here",
    ),
    "no name": ("a.sh", ptuning("main.py ", "main.py $1 "), "the argument $1 of main.py is not in the file"),
    "no value": (
        "ds.sh",
        FULL.replace("--deepspeed deepspeed.json", "--deepspeed"),
        "ds.sh:6: --deepspeed has no value",
    ),
    "unset variable": ("a.sh", ptuning("LR=2e-2\n", ""), "($LR)"),
    "open quote": ("a.sh", "python main.py --do_train --train_file 'a\n", "a quote is not closed"),
    "missing backslash": (
        "a.sh",
        ptuning("--do_train \\", "--do_train"),
        "a.sh:7: the line begins with the option --train_file",
    ),
    "arguments in a file": ("a.sh", "llamafactory-cli train x/sft.yaml\n", "takes its arguments from x/sft.yaml"),
    "two commands": (
        "a.sh",
        PTUNING + PTUNING,
        "there are several training commands: main (a.sh:5), main (a.sh:31). Keep one.",
    ),
    **{
        f"two commands, {divided!r}": (
            "a.sh",
            divided,
            "there are several training commands: prep (a.sh:1), train (a.sh:1). Keep one.",
        )
        for divided in (
            "python prep.py --a 1 && python train.py --learning_rate 1\n",
            "python prep.py --a 1; python train.py --learning_rate 1\n",
            "python prep.py --a 1&&python train.py --learning_rate 1\n",
            "python prep.py --a 1 || python train.py --learning_rate 1\n",
            "python prep.py --a 1 &\\\npython train.py --learning_rate 1\n",
        )
    },
    "given twice": ("a.sh", ptuning("--do_train", "--do_train --max_steps 5"), "--max_steps is given twice"),
    "does not train": ("a.sh", ptuning("--do_train", "--do_predict"), "without --do_train"),
    "no number": (
        "a.sh",
        ptuning("--max_steps 3000", "--max_steps many"),
        "max_steps = many must be a whole number",
    ),
    "other stage": (
        "a.json",
        OTHER_STAGE,
        "stage = ppo has no counterpart: sft, pt, dpo, kto, rm have",
    ),
    "both precisions": ("a.yaml", FACTORY_YAML + "fp16: true\n", "fp16 and bf16 are both true"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    file, content, message = BAD[name]
    words = [put(file, content)] + (["world_size=2"] if name in ("other stage", "both precisions") else [])
    assert message in refused(*words)


def test_contradiction_with_the_json() -> None:
    put("deepspeed.json", {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 2}})
    message = refused(put("ds.sh", FULL))
    assert "deepspeed.json:2: train_micro_batch_size_per_gpu gives batch.micro_per_gpu = 8" in message
    assert "ds.sh:6 (per_device_train_batch_size) says 4" in message
    put("deepspeed.json", {"zero_optimization": {"stag": 2}})
    assert "deepspeed.json:3" in refused("ds.sh")


def test_contradiction_within(capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(put("a.sh", ptuning("--max_steps 3000", "--max_steps 30 --warmup_steps 50")))
    assert "a.sh:5 (warmup_steps): schedule.warmup_steps = 50 is more than train.max_steps = 30" in message
    put("data/dataset_info.json", INFO)
    wrong = FACTORY_YAML.replace("identity,", "identty,").replace("deepspeed:", "# deepspeed:")
    assert "has no dataset 'identty'. Did you mean 'identity'?" in refused(put("b.yaml", wrong), "world_size=4")


def test_nothing_is_overwritten() -> None:
    put("made.yaml", "mine")
    with pytest.raises(ConfigError, match="exists already"):
        import_config.run([put("train.sh", PTUNING), "output=made.yaml"])
    assert Path("made.yaml").read_text() == "mine"


def test_nothing_is_executed(tmp_path: Path) -> None:
    """As a command, without torch."""
    put("train.sh", ptuning("PRE_SEQ_LEN=128", "PRE_SEQ_LEN=128\nX=$(touch ran)\n`touch ran`"))
    code = (
        "import sys; from toolkit.cli import main; code = main(['import-config', 'train.sh'])\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules); sys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert finished.returncode == 0, finished.stderr
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("said", "enabled", "lost"),
    [
        (list(TRACKERS), list(TRACKERS), ""),
        ("tensorboard,SwanLab", ["tensorboard", "swanlab"], ""),
        (["wandb", "neptune", "comet_ml"], ["wandb"], "neptune, comet_ml: there are tensorboard, csv, wandb"),
        (["all"], [], "all is whatever is installed there"),
        (["none"], [], ""),
    ],
    ids=str,
)
def test_trackers(capsys: pytest.CaptureFixture[str], said: Any, enabled: list[str], lost: str) -> None:
    cfg, told = imported(
        capsys, put("args.json", {"per_device_train_batch_size": 2, "report_to": said}), "world_size=2"
    )
    assert cfg.track.enabled == [name for name in TRACKERS if name in enabled]
    assert (lost in told) if lost else "report_to" not in told


def test_trackio_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    args = {"per_device_train_batch_size": 2, "report_to": ["trackio"], "project": "p", "trackio_space_id": "me/space"}
    cfg, _ = imported(capsys, put("args.json", args), "world_size=2")
    assert (cfg.track.trackio.project, cfg.track.trackio.space) == ("p", "me/space")
    cfg, said = imported(capsys, put("args.json", args | {"report_to": "wandb"}), "world_size=2")
    assert cfg.track.enabled == ["wandb"] and "trackio_space_id = me/space: has no effect there" in said


def test_swanlab_of_llama_factory(capsys: pytest.CaptureFixture[str]) -> None:
    swanlab = "use_swanlab: true\nswanlab_project: mine\nswanlab_workspace: team\nswanlab_mode: local\n"
    key = "swanlab_api_key: abcdefghijkl\nswanlab_run_name: r\n"
    cfg, said = imported(
        capsys, put("sft.yaml", FACTORY_YAML.replace("deepspeed:", "# ") + swanlab + key), "world_size=4"
    )
    found = cfg.track.swanlab
    assert (found.enabled, found.project, found.workspace, found.mode.value) == (True, "mine", "team", "offline")
    assert cfg.track.enabled == ["tensorboard", "swanlab"]
    needless = said.partition("Not needed here:")[2]
    assert "swanlab_api_key = ***, swanlab_run_name = r: the API key comes from SWANLAB_API_KEY" in needless
    assert "use_swanlab" not in needless and "abcdefghijkl" not in said + Path("last.yaml").read_text()
    off = FACTORY_YAML.replace("deepspeed:", "# ") + "use_swanlab: false\nswanlab_project: mine\n"
    cfg, said = imported(capsys, put("off.yaml", off), "world_size=4")
    assert cfg.track.enabled == ["tensorboard"] and "swanlab_project = mine: has no effect there" in said


REMARKED = {"micro_means", "rank_means", "eight_bits", "demo_precision", "gkd_temperature"} | {
    *("warmup_start", "own_prompts", "line_feed", "alpaca_system", "swift_turn_ends"),
}
"""Sentences that depend on other keys than the one they are about."""


def test_tables_name_keys_of_ours() -> None:
    programs = ("factory", "chatglm", "glm_demo", "hf", "axolotl", "swift", "fastchat", "firefly")
    tables = {name: key for program in programs for name, key in keys_of(program).items()}
    for name, key in tables.items():
        assert all(field_type(part) is not None for part in key.to.split(", ") if part), name
        assert key.to or key.says, f"{name}: neither mapped nor explained"
    said = {key.says for program in programs for key in keys_of(program).values()}
    said |= {f"refused_{what}" for what in names_of("refused")} | REMARKED
    rows = [row for table in read_table("config/other_options.yaml").values() for row in table.values()]
    said |= {row[1] for row in rows if isinstance(row, list)}
    assert said == {"", *read_table("config/program_keys.yaml")["sentences"]}
    assert sentence("media") == "texts only"
    assert keys_of("hf")["report_to"].to.split(", ") == [f"track.{name}.enabled" for name in TRACKERS]


def test_trainer_keys_are_the_installed_ones() -> None:
    """Names and defaults; what is only in the table is an older name."""
    from transformers import Seq2SeqTrainingArguments

    for item in dataclasses.fields(Seq2SeqTrainingArguments):
        default = item.default_factory() if item.default is dataclasses.MISSING else item.default
        assert item.name in keys_of("trainer"), item.name
        assert keys_of("trainer")[item.name].default == getattr(default, "value", default), item.name


@pytest.mark.parametrize(("page", "language"), [("coming_from.md", "en"), ("coming_from_zh.md", "zh")])
def test_tables_of_the_docs_are_fresh(page: str, language: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text.count("\n| `") > 140
    assert fill_tables(text, language) == text, "run scripts/generate_config_docs.py"
