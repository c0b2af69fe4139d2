"""toolkit import-config: axolotl's YAML and ms-swift's commands."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.test_import_config import here, imported, put, refused  # noqa: F401  # a fixture, used by its name
from toolkit.config.dotted_keys import get_value
from toolkit.config.schema import (
    Dtype,
    Init,
    LoraInit,
    OptimizerName,
    Packing,
    RowFormat,
    TooLong,
    TrainOn,
    TuningMethod,
)

AXOLOTL: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B",
    "model_type": "LlamaForCausalLM",
    "load_in_4bit": True,
    "adapter": "qlora",
    "datasets": [
        {"path": "o/alpaca", "type": "alpaca"},
        {
            "path": "o/chats",
            "type": "chat_template",
            "split": "train[:20%]",
            "field_messages": "conversations",
            "message_property_mappings": {"role": "from", "content": "value"},
            "roles_to_train": ["assistant"],
            "train_on_eos": "all",
        },
        {
            "path": "json",
            "ds_type": "json",
            "data_files": ["a.jsonl", "b.jsonl"],
            "type": {"field_instruction": "q", "field_output": "a", "format": "x"},
        },
        {"path": "data/odd.jsonl", "type": "sharegpt"},
        {"path": "o/odd", "type": "stepwise_supervised"},
    ],
    "val_set_size": 0.05,
    "sequence_len": 4096,
    "sample_packing": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "wandb_project": "mine",
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 4,
    "optimizer": "paged_adamw_8bit",
    "lr_scheduler": "cosine",
    "cosine_min_lr_ratio": 0.1,
    "learning_rate": 0.0002,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": "offload",
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
    "micro_batch_sise": 2,
    "deepspeed": None,
}
PAIRS = {"path": "o/pairs", "type": "chat_template.default", "field_messages": "conversation", "field_chosen": "good"}
DPO = {
    "rl": "dpo",
    "rl_beta": 0.3,
    "sample_packing": False,
    "datasets": [PAIRS, {"path": "o/intel", "type": "chatml.intel"}],
}
FSDP = {"adapter": None, "load_in_4bit": None}
SWIFT = """nproc_per_node=2

CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen2.5-7B-Instruct \\
    --tuner_type lora \\
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' chat.jsonl HF::o/other \\
    --columns '{"q": "query"}' \\
    --torch_dtype bfloat16 \\
    --per_device_train_batch_size 1 \\
    --learning_rate 1e-4 \\
    --lora_rank 8 --lora_alpha 32 \\
    --target_modules all-linear \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --split_dataset_ratio 0.01 \\
    --eval_steps 100 --save_steps 50 --save_total_limit 2 \\
    --max_length 2048 \\
    --truncation_strategy left \\
    --loss_scale last_round \\
    --system 'You are helpful.' \\
    --warmup_ratio 0.05 \\
    --model_author swift \\
    --deepspeed zero3_offload
"""


def axolotl(**change: Any) -> str:
    return put(
        "axolotl.yaml", yaml.safe_dump({key: value for key, value in (AXOLOTL | change).items() if value is not None})
    )


def swift(*changes: tuple[str, str]) -> str:
    text = SWIFT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return put("train.sh", text)


def test_axolotl(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, said = imported(capsys, axolotl(), "world_size=2")
    assert (cfg.model.path, cfg.model.init) == ("NousResearch/Meta-Llama-3-8B", Init.pretrained)
    tuning = cfg.tuning
    assert (tuning.method, tuning.rank, tuning.alpha, tuning.target_modules) == (
        TuningMethod.qlora,
        32,
        16,
        ["all-linear"],
    )
    assert (cfg.batch.global_size, cfg.batch.micro_per_gpu, cfg.train.epochs) == (16, 2, 4)
    assert (cfg.optim.name, cfg.optim.lr, cfg.precision.dtype) == (OptimizerName.adamw_8bit, 2e-4, Dtype.bf16)
    assert (cfg.schedule.min_lr_ratio, cfg.schedule.warmup_ratio) == (0.1, 0.03)
    assert (cfg.data.max_length, cfg.data.packing, cfg.data.validation_fraction) == (4096, Packing.packed, 0.05)
    assert (cfg.data.too_long, cfg.data.train_on, cfg.checkpoint.keep) == (TooLong.drop, TrainOn.all, 4)
    assert cfg.track.wandb.enabled and cfg.track.wandb.project == "mine" and cfg.train.activation_checkpointing.enabled
    alpaca, chats, first, second, sharegpt = cfg.data.sources
    assert (sharegpt.path, sharegpt.columns["role"]) == ("data/odd.jsonl", "from")
    assert (alpaca.hub, alpaca.format) == ("o/alpaca", RowFormat.instruction)
    assert (chats.hub, chats.split, chats.format) == ("o/chats", "train", RowFormat.messages)
    assert chats.columns == {"messages": "conversations", "role": "from", "content": "value"}
    assert (first.path, second.path, second.columns) == ("a.jsonl", "b.jsonl", {"instruction": "q", "output": "a"})
    recipe = Path("last.yaml").read_text()
    assert (
        "epochs: 4  # num_epochs" in recipe
        and "global_size: 16  # micro_batch_size, gradient_accumulation_steps" in recipe
    )
    assert "the dataset o/chats: train_on_eos has no counterpart." in said
    assert "the dataset json: type.format has no counterpart." in said
    assert "the dataset o/chats: 20% of its rows are drawn; there they are the first." in said
    assert [source.weight for source in cfg.data.sources] == [1.0, 0.2, 1.0, 1.0, 1.0]
    needless = said.partition("Not needed here:")[2]
    assert "special_tokens = {'pad_token': '<|end_of_text|>'}: padding is never trained" in needless
    assert "the dataset o/odd is skipped: its type stepwise_supervised has no counterpart" in said
    assert ": micro_batch_sise. Did you mean 'micro_batch_size'?" in said
    assert "evals_per_epoch = 4, saves_per_epoch = 1: evaluate.every and checkpoint.every count steps" in said
    differs = said.partition("Not quite the same here:")[2].partition("\n\n")[0]
    assert "micro_batch_size: the loss is the mean over all trained tokens of the global batch; there" in differs
    assert "datasets: rows of type alpaca, and of types with field names, get the model's chat template" in differs
    assert "a mean of the ranks' means" in recipe.replace("\n#  ", "")
    chats_alone = axolotl(saves_per_epoch=None, datasets=[AXOLOTL["datasets"][1]])
    _, said = imported(capsys, chats_alone, "world_size=1")
    assert "save_strategy" not in said  # no key of the file
    assert "rows of type alpaca" not in said and "ranks' means" not in said


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"adapter": None, "load_in_4bit": None, "bf16": False, "fp16": True},
            {"tuning.method": TuningMethod.full, "precision.dtype": Dtype.fp16},
        ),
        (
            {"adapter": "lora", "load_in_4bit": False, "peft_use_dora": True},
            {"tuning.method": TuningMethod.lora, "tuning.dora": True},
        ),
        (
            {"adapter": "lora", "load_in_4bit": False, "peft_init_lora_weights": "pissa_niter_16"},
            {"tuning.init": LoraInit.pissa, "tuning.init_iterations": 16},
        ),
        (
            {"adapter": "lora", "load_in_4bit": False, "peft_init_lora_weights": "eva", "loraplus_lr_ratio": 16},
            {"tuning.init": LoraInit.default, "optim.lora_plus_ratio": 16.0},
        ),
        (
            {"adapter": None, "load_in_4bit": None, "optimizer": "muon"},
            {"optim.name": OptimizerName.muon, "train.gradient_clipping": 0.0},
        ),
        ({"gradient_accumulation_steps": None, "batch_size": 12}, {"batch.global_size": 24}),
        ({"save_steps": 50, "saves_per_epoch": None, "eval_steps": 20}, {"checkpoint.every": 50, "evaluate.every": 20}),
        ({"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_rope": True}, {"kernels.liger": "always"}),
        (
            {
                "pretraining_dataset": [{"path": "o/text", "text_column": "body"}],
                "datasets": None,
                "max_steps": 9,
                "val_set_size": None,
            },
            {"data.packing": Packing.packed, "data.too_long": TooLong.split, "train.max_steps": 9},
        ),
        (DPO, {"preference.loss": "sigmoid", "preference.beta": 0.3}),
        ({"chat_template": "llama3"}, {"model.chat_template": "llama3"}),
        (
            {"lora_target_linear": None, "lora_target_modules": r"model.layers.[\d]+.(mlp|self_attn).(up|q)_proj"},
            {"tuning.target_modules": ["up_proj", "q_proj"]},
        ),
        (
            {"lora_target_linear": None, "lora_target_modules": r"layers\.(3|7)\.self_attn\.(q|k)_proj"},
            {"tuning.target_modules": []},
        ),
        (
            {"lora_target_linear": None, "lora_target_modules": r"model.visual.blocks.*.(q|k)_proj"},
            {"tuning.target_modules": []},
        ),
        (
            {"lora_target_linear": None, "lora_target_modules": r"(?!.*mlp).*(q|k)_proj"},
            {"tuning.target_modules": []},
        ),
        (
            {"lora_target_linear": None, "lora_target_modules": r".*language_model.*self_attn.(q|k)_proj$"},
            {"tuning.target_modules": ["q_proj", "k_proj"]},
        ),
        (FSDP | {"fsdp": ["full_shard", "auto_wrap"]}, {"zero.stage": 3, "zero.offload_param.device": "none"}),
        (FSDP | {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": False}}, {"zero.stage": 2}),
        (FSDP | {"fsdp_config": {"fsdp_offload_params": True}}, {"zero.stage": 3, "zero.offload_param.device": "cpu"}),
        ({"fsdp": ["full_shard"]}, {"zero.stage": 2, "tuning.method": "qlora"}),
        ({"optimizer": "adamw_torch_8bit"}, {"optim.name": "adamw_8bit"}),
    ],
    ids=lambda part: ",".join(part),
)
def test_single_keys_of_axolotl(
    capsys: pytest.CaptureFixture[str], change: dict[str, Any], expected: dict[str, object]
) -> None:
    cfg, _ = imported(capsys, axolotl(**change), "world_size=2")
    found = {key: get_value(cfg, key) for key in expected}
    assert {key: getattr(value, "value", value) for key, value in found.items()} == {
        key: getattr(value, "value", value) for key, value in expected.items()
    }


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("qwen_25", "chatml_tools"), ("tokenizer_default_fallback_chatml", "chatml"), ("command_a", "FILE")],
)
def test_chat_templates_of_axolotl_that_are_not_ours(
    capsys: pytest.CaptureFixture[str], theirs: str, ours: str
) -> None:
    cfg, said = imported(capsys, axolotl(chat_template=theirs), "world_size=2")
    assert get_value(cfg, "model.chat_template") == ""
    assert f"chat_template = {theirs}: the model's own chat template is used; if it has none, set" in said
    assert f"model.chat_template={ours}." in said


def test_slices_of_datasets_of_axolotl(capsys: pytest.CaptureFixture[str]) -> None:
    """The first rows are the first here too, also of a file; what is taken otherwise is noted."""
    Path("saved").mkdir()
    files = {"ds_type": "json", "path": "json"}
    slices: list[dict[str, Any]] = [
        {"path": "o/x", "split": "test[:100]"},
        {"path": "a.jsonl", "split": "train[:50]"},
        {**files, "data_files": "b.jsonl", "split": "train[:60]"},
        {"path": "saved", "ds_type": "arrow", "split": "test[:70]"},
        {"path": "c.jsonl", "split": "train[:20%]"},
        {**files, "data_files": ["d.jsonl", "e.jsonl"], "split": "train[:80]"},
    ]
    sliced = [{"type": "alpaca", **one} for one in slices]
    held_out = [{"type": "alpaca", "path": "f.jsonl", "split": f"train[:{rows}]"} for rows in ("9", "9%")]
    config = axolotl(datasets=sliced, test_datasets=held_out, val_set_size=None)
    cfg, said = imported(capsys, config, "world_size=2")
    assert [(one.path or one.hub, one.split, one.max_samples, one.weight) for one in cfg.data.sources] == [
        ("o/x", "test", 100, 1),
        ("a.jsonl", "train", 50, 1),
        ("b.jsonl", "train", 60, 1),
        ("saved", "test", 70, 1),
        ("c.jsonl", "train", 0, 0.2),
        ("d.jsonl", "train", 0, 1),
        ("e.jsonl", "train", 0, 1),
    ]
    assert [(one.path, one.max_samples) for one in cfg.data.validation] == [("f.jsonl", 9), ("f.jsonl", 0)]
    said = " ".join(said.split())
    assert "the dataset c.jsonl: 20% of its rows are drawn; there they are the first." in said
    for name, part in (("json", "train[:80]"), ("f.jsonl", "train[:9%]")):
        assert f"the dataset {name}: {part} is read as a whole; max_samples takes a source's first rows." in said


def test_odd_datasets_of_axolotl(capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"path": "o/x", "type": "chat_template", "roles": {"user": ["asker"]}, "roles_to_train": 3, "nonsense": 1}
    _, said = imported(capsys, axolotl(datasets=[odd]), "world_size=2")
    assert "the dataset o/x: nonsense, roles_to_train, roles: asker has no counterpart." in said


def test_pairs_of_axolotl(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _ = imported(capsys, axolotl(**DPO), "world_size=2")
    pairs, intel = cfg.data.sources
    assert (pairs.format, pairs.columns) == (RowFormat.preference, {"messages": "conversation", "chosen": "good"})
    assert (intel.format, intel.columns) == (RowFormat.preference, {"prompt": "question"})


def test_no_loss_type_is_the_usual_loss(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, _ = imported(capsys, axolotl(**DPO, loss_type=[]), "world_size=2")
    assert cfg.preference.loss.value == "sigmoid"


def test_rated_answers_of_axolotl(capsys: pytest.CaptureFixture[str]) -> None:
    types = ("chatml.argilla", "llama3.intel", {"field_prompt": "q", "field_completion": "a", "field_label": "good"})
    rated = {"rl": "kto", "sample_packing": False, "datasets": [{"path": "o/x", "type": each} for each in types]}
    cfg, _ = imported(capsys, axolotl(**rated), "world_size=2")
    assert {source.format for source in cfg.data.sources} == {RowFormat.labeled} and cfg.preference.loss.value == "kto"
    columns = [source.columns for source in cfg.data.sources]
    assert columns == [{}, {"prompt": "question"}, {"prompt": "q", "completion": "a", "label": "good"}]


def test_ms_swift(capsys: pytest.CaptureFixture[str]) -> None:
    cfg, said = imported(capsys, swift())
    tuning = cfg.tuning
    assert (tuning.method, tuning.rank, tuning.alpha, tuning.target_modules) == (
        TuningMethod.lora,
        8,
        32,
        ["all-linear"],
    )
    assert (cfg.batch.global_size, cfg.zero.stage, cfg.zero.offload_param.device.value) == (16, 3, "cpu")
    assert (cfg.optim.lr, cfg.optim.weight_decay, cfg.optim.betas) == (1e-4, 0.1, [0.9, 0.95])
    assert (cfg.data.too_long, cfg.data.train_on, cfg.data.validation_fraction) == (
        TooLong.truncate,
        TrainOn.last,
        0.01,
    )
    assert (cfg.evaluate.every, cfg.checkpoint.every, cfg.checkpoint.keep) == (100, 50, 2)
    assert [(source.path, source.hub) for source in cfg.data.sources] == [("chat.jsonl", ""), ("", "o/other")]
    assert cfg.data.sources[0].columns == {"query": "q"} and cfg.track.tensorboard.enabled
    assert "`modelscope download --dataset AI-ModelScope/alpaca-gpt4-data-zh --local_dir DIR`" in said
    assert "model: models are looked up on Hugging Face" in said
    assert "system = You are helpful.: put it into the rows" in said
    assert "model_author = swift: put the names into the rows" in said
    assert "Unknown" not in said


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            [("--learning_rate 1e-4", ""), ("--tuner_type lora", "--train_type full")],
            {"optim.lr": 1e-5, "tuning.method": "full"},
        ),
        (
            [("--tuner_type lora", "--quant_method bnb --quant_bits 4"), ("zero3_offload", "zero2")],
            {"tuning.method": "qlora", "zero.stage": 2},
        ),
        (
            [("$(expr 16 / $nproc_per_node)", "$((8 / nproc_per_node))".replace("nproc", "$nproc"))],
            {"batch.global_size": 8},
        ),
        ([("$(expr 16 / $nproc_per_node)", "$((8 / nproc_per_node))")], {"batch.global_size": 8}),
        ([("--gradient_accumulation_steps $(expr 16 / $nproc_per_node)", "")], {"batch.global_size": 16}),
        ([("swift sft", "swift pt"), ("--loss_scale last_round", "--packing true")], {"data.packing": "packed"}),
        (
            [("swift sft", "swift rlhf"), ("--truncation_strategy left", "")],
            {"preference.loss": "sigmoid", "preference.beta": 0.1},
        ),
        (
            [("swift sft", "swift rlhf --rlhf_type simpo"), ("--truncation_strategy left", "")],
            {"preference.loss": "simpo", "preference.beta": 2.0, "preference.gamma": 1.0},
        ),
        (
            [("swift sft", "swift rlhf --rlhf_type gkd --teacher_model t --lmbda 0.25")],
            {
                "task.kind": "distill",
                "distill.teacher": "t",
                "distill.on_policy": 0.25,
                "distill.weight": 1.0,
                "distill.loss": "jsd",
                "distill.beta": 0.5,
                "distill.rollouts.max_new_tokens": 512,
                "distill.temperature": 0.9,
                "distill.rollouts.temperature": 0.9,
                "data.too_long": "truncate",
            },
        ),
        (
            [("swift sft", "swift rlhf --rlhf_type gkd --teacher_model t --lmbda 0 --beta 0 --temperature 1")],
            {"distill.loss": "forward_kl", "distill.on_policy": 0.0, "distill.temperature": 1.0},
        ),
        (
            [("swift sft", "swift sft --task_type seq_cls --num_labels 3"), ("--loss_scale last_round", "")],
            {"task.kind": "classify", "tuning.method": "lora"},
        ),
        ([("swift sft", "swift sft --router_aux_loss_coef 1e-3")], {"model.router_loss": 0.001}),
        ([("swift sft", "swift sft --template chatml")], {"model.chat_template": "chatml"}),
        ([("swift sft", "swift sft --template qwen3")], {"model.chat_template": ""}),
        ([("--torch_dtype bfloat16", "--torch_dtype float32")], {"precision.dtype": "fp16"}),
        ([("--torch_dtype bfloat16", "--torch_dtype float32 --fp16 false")], {"precision.dtype": "fp32"}),
    ],
    ids=lambda part: str(part)[:40],
)
def test_single_arguments_of_ms_swift(
    capsys: pytest.CaptureFixture[str], changes: list[tuple[str, str]], expected: dict[str, object]
) -> None:
    cfg, _ = imported(capsys, swift(*changes))
    found = {key: get_value(cfg, key) for key in expected}
    assert {key: getattr(value, "value", value) for key, value in found.items()} == expected


def test_what_differs_from_ms_swift_s_templates_and_types(capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("swift sft", "swift sft --template qwen2_5"), ("--torch_dtype bfloat16", "--torch_dtype float32")
    _, said = imported(capsys, swift(*changes))
    assert "template: every answer's end token is trained, and nothing after it; there chatml's line feed" in said
    assert "template = qwen2_5: the model's own chat template is used; if it has none, set " in said
    assert "model.chat_template=chatml_tools" in said
    assert "warmup_ratio: the first step has the rate peak / steps" in said
    assert "ms-swift trains in fp16 with weights in float32" in said
    changes = ("--torch_dtype bfloat16", "--torch_dtype float32 --fp16 false"), ("--warmup_ratio 0.05", "")
    _, said = imported(capsys, swift(*changes))
    assert "ms-swift trains in fp16" not in said and "warmup_ratio" not in said


def test_what_has_no_counterpart() -> None:
    assert "rl = grpo has no counterpart: dpo, ipo, orpo, simpo, kto have" in refused(
        axolotl(rl="grpo"), "world_size=2"
    )
    assert "rlhf_type = grpo has no counterpart" in refused(swift(("swift sft", "swift rlhf --rlhf_type grpo")))
    assert "task_type = seq_cls is not translated" in refused(swift(("--tuner_type lora", "--task_type seq_cls")))
    assert "not translated" in refused(
        swift(("--tuner_type lora", "--task_type seq_cls --num_labels 2 --problem_type regression"))
    )
    distilled = "swift rlhf --rlhf_type gkd --teacher_model t --seq_kd true"
    assert "GKD has a counterpart with --teacher_model" in refused(swift(("swift sft", distilled)))
    assert "there is no training command" in refused(put("infer.sh", "swift infer --model m --stream true\n"))
