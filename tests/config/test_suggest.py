"""What an error suggests for a wrong key: names of other programs, of DeepSpeed's JSON, and misspelt ones."""

import pytest

from toolkit.arguments import parse
from toolkit.cli import COMMANDS
from toolkit.cli.key_help import help_of_keys
from toolkit.config.load import load
from toolkit.config.program_keys import sentence
from toolkit.config.suggest import foreign_names, keys_meant
from toolkit.config.validate import field_type
from toolkit.engine import ds_config, ds_keys
from toolkit.messages import ConfigError, read_table, shortlist

GUESSES = {
    # Misspelt: the last part decides, not the section.
    "train.learning_rat": "optim.lr",
    "optim.lerning_rate": "optim.lr",
    "optm.learning_rate": "optim.lr",
    "trian.epochs": "train.epochs",
    "train.epoch": "train.epochs",
    "train.max_epochs": "train.epochs",
    "train.learningRate": "optim.lr",
    "optim.typ": "optim.name",
    "optim.lrr": "optim.lr",
    "batch.size": "batch.micro_per_gpu batch.global_size",
    "batch.micro_per_gup": "batch.micro_per_gpu",
    "batch.micro": "batch.micro_per_gpu",
    "batch.grad_accum": "batch.global_size batch.micro_per_gpu",
    "data.max_lenght": "data.max_length",
    "data.maxlength": "data.max_length",
    "data.source": "data.sources",
    "model.max_length": "data.max_length",
    "model.pth": "model.path",
    "tune.rank": "tuning.rank",
    "tuning.r": "tuning.rank",
    "tuning.dropuot": "tuning.dropout",
    "kernel.loss": "kernels.loss",
    "checkpoints.every": "checkpoint.every",
    "checkpoint.save_every": "checkpoint.every",
    "checkpoint.interval": "checkpoint.every",
    "checkpoint.keep_last": "checkpoint.keep",
    "eval.every": "evaluate.every",
    "evaluate.steps": "evaluate.every",
    "preference.betta": "preference.beta",
    "preference.type": "preference.loss",
    "schedule.warmup": "schedule.warmup_steps schedule.warmup_ratio",
    "distributed.time_out": "distributed.timeout_s",
    "run.nam": "run.name",
    "train.resume": "resume",
    "train.clip": "train.gradient_clipping",
    "track.wandb.enable": "track.wandb.enabled",
    "zero.cpu_offload": "zero.offload_optimizer zero.offload_param",
    "zero.offload_optimizer.pin": "zero.offload_optimizer.pin_memory",
    "num_workers": "data.num_workers prepare.num_workers",
    # transformers' TrainingArguments and models.
    "per_device_train_batch_size": "batch.micro_per_gpu batch.global_size",
    "gradient_accumulation_steps": "batch.global_size",
    "num_train_epochs": "train.epochs",
    "lr_scheduler_type": "schedule.name",
    "max_grad_norm": "train.gradient_clipping",
    "logging_steps": "train.log_every",
    "save_total_limit": "checkpoint.keep",
    "bf16": "precision.dtype",
    "torch_dtype": "precision.dtype",
    "output_dir": "run.dir",
    "resume_from_checkpoint": "resume",
    "load_best_model_at_end": "evaluate.keep_best",
    "attn_implementation": "model.attention",
    "gradient_checkpointing": "train.activation_checkpointing.enabled",
    "ddp_timeout": "distributed.timeout_s",
    # LLaMA-Factory, axolotl and ms-swift.
    "cutoff_len": "data.max_length",
    "finetuning_type": "tuning.method",
    "lora_target": "tuning.target_modules",
    "quantization_bit": "tuning.method",
    "pref_beta": "preference.beta",
    "base_model": "model.path",
    "sequence_len": "data.max_length",
    "sample_packing": "data.packing",
    "val_set_size": "data.validation",
    "micro_batch_size": "batch.micro_per_gpu batch.global_size",
    "tensor_parallel_size": "parallel.tensor",
    "pp": "parallel.pipeline",
    # DeepSpeed's JSON.
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_per_gpu",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.offload_optimizer.device": "zero.offload_optimizer.device",
    "optimizer.type": "optim.name",
    "optimizer.params.lr": "optim.lr",
    "optimizer.params.weight_decay": "optim.weight_decay",
    "scheduler.params.warmup_num_steps": "schedule.warmup_steps",
    "bf16.enabled": "precision.dtype",
    "stage3_param_persistence_threshold": "zero.stage3_param_persistence_threshold",
    "torch_autocast": "precision.dtype",
    "zero.compute_grad_norm": "ds_extra.zero_optimization.compute_grad_norm",
    "zero_optimization.cpu_offload_param": "zero.offload_param",
    # Nothing is like it: common words and shapes of names do not count.
    "banana": "",
    "foo.bar": "",
    "distributed.port": "",
    "auto_ratio_x": "",
    "use_ray": "",
    "num_beams": "",
    "max_out_token": "",
    "oft_rank": "",
    "trainer_cls": "",
    "sparse_attention": "",
    "group_by_length": "",
}


@pytest.mark.parametrize("name", GUESSES)
def test_what_a_wrong_key_means(name: str) -> None:
    assert " ".join(keys_meant(name)) == GUESSES[name]


def test_each_key_of_deepspeeds_json_is_answered_with_ours_or_as_an_extra() -> None:
    """The help of a key, and the error for one in a config; DeepSpeed's own sections may have another name here."""
    for key in (*ds_keys.json_keys(), *ds_keys.RENAMED, *ds_keys.REMOVED):
        if field_type(key) is not None:  # such as checkpoint and compile
            continue
        meant = keys_meant(key)
        try:
            said = help_of_keys([key])
        except ConfigError as error:
            said = str(error)
        if not meant:
            assert key in ds_keys.REMOVED and said.endswith("belongs to a feature that was removed from DeepSpeed.")
        elif meant[0].startswith("ds_extra."):
            today = ds_keys.RENAMED.get(key, key)
            assert meant == (f"ds_extra.{today}",) and f"write it as ds_extra.{today}" in said
            value: object = {} if today in SECTIONS else 1
            for name in reversed(today.split(".")):
                value = {name: value}
            assert isinstance(value, dict)
            ds_keys.check_extra(value, ds_config.OWNED)
        else:
            assert key not in ds_config.OWNED or meant == (ds_config.OWNED[key],)
            assert f"toolkit help {meant[0]}" in said or meant[0] in said.splitlines() or "is a choice of" in said


SECTIONS = {key for key in ds_keys.json_keys() if any(other.startswith(f"{key}.") for other in ds_keys.json_keys())}


def test_a_command_that_is_merely_similar_is_not_suggested() -> None:
    words = {
        "chek": "check",
        "import": "import-config",
        "exportmodel": "export-model",
        "report_to": "track.tensorboard",
    }
    for word, meant in words.items():
        with pytest.raises(ConfigError, match=rf"Did you mean '(toolkit help )?{meant}"):
            help_of_keys([word])
    for word in ("activation_checkpointing", "elastic_checkpoint", "comet_online", "dataset"):
        with pytest.raises(ConfigError) as caught:
            help_of_keys([word])
        assert not any(f"'{command}'" in str(caught.value) for command in COMMANDS)


OPTIONS = {
    "--deepspeed ds.json": "Write deepspeed_json=ds.json",
    "--report_to wandb": "Write track=wandb",
    "--report-to=none": "Leave it out.",
    "--gradient_accumulation_steps 4": "Write batch.global_size=N: per-device batch x accumulation x ranks = ",
    "--per_device_train_batch_size 4": "Write batch.micro_per_gpu=4",
    "--stage sft": "Leave it out: supervised tuning is what",
    "--stage dpo": "Write preference=dpo",
    "--stage 3": "Write zero.stage=3 or ",
    "--do_train": "Leave it out: toolkit train trains",
    "--overwrite_output_dir": "Leave it out: each run has a directory",
    "--dataset alpaca": "Write data=FILE.jsonl",
    "--dataset mine.jsonl": "Write data=mine.jsonl",
    "--finetuning_type lora": "Write tuning=lora",
    "--load_in_4bit": "Write tuning=qlora",
    "--load_in_4bit false": "Leave it out.",
    "--quantization_bit 4": "Write tuning=qlora",
    "--fp16": "Write precision=fp16",
    "--bf16 True": "Write precision=bf16",
    "--torch_dtype bfloat16": "Write precision=bf16",
    "--gradient_checkpointing": "Write train.activation_checkpointing.enabled=true",
    "--lora_target q_proj,v_proj": "Write 'tuning.target_modules=[q_proj,v_proj]'",
    "--lora_target all": "Write 'tuning.target_modules=[all-linear]'",
    "--flash_attn fa2": "Leave it out: model.attention=auto takes",
    "--config foo.yaml": "Write recipe=foo.yaml",
}


@pytest.mark.parametrize("words", OPTIONS)
def test_what_an_option_of_another_program_is_here(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["recipe=quickstart", *words.split()])
    assert str(caught.value).startswith(f"unknown option {words.split()[0]}. {OPTIONS[words]}")
    assert "VALUE" not in str(caught.value)


def test_a_whole_command_of_another_program_is_imported() -> None:
    command = "--learning_rate 1e-4 --bf16 --stage sft"
    with pytest.raises(ConfigError, match=r"4\. These are arguments .*:? .*import-config FILE\.sh"):
        parse(["recipe=quickstart", *command.split()])
    with pytest.raises(ConfigError) as caught:
        parse(["recipe=quickstart", *command.split()[:3]])
    assert "FILE.sh" not in str(caught.value)


def test_what_options_become_can_be_written() -> None:
    rows = [row for table in read_table("config/other_options.yaml").values() for row in table.values()]
    written = [words for words in (row if isinstance(row, str) else row[0] for row in rows) if "=" in words]
    keys = {words.strip("'").partition("=")[0] for words in written}
    assert all(key in ("recipe", "data.format") or field_type(key) is not None for key in keys)
    assert all(sentence(name) for row in rows if not isinstance(row, str) for name in row[1:])
    whole = [words for words in written if "{" not in words and not words.endswith(("=N", "=NAME", ".jsonl"))]
    for words in whole:
        load(["recipe=quickstart", words.strip("'")])


def test_what_is_suggested_exists() -> None:
    for keys in foreign_names().values():
        assert all(key == "ds_extra" or field_type(key) is not None for key in keys)
    assert all(field_type(key) is not None for keys in GUESSES.values() for key in keys.split())


def test_a_key_that_has_no_counterpart_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"'group_by_length'\. There is none here: .*data\.packing=grouped groups"):
        load(["recipe=quickstart", "group_by_length=true"])


def test_a_message_lists_few_of_many_names() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["recipe=quickstart", "banana=1"])
    assert str(caught.value).endswith("data and 25 more: docs/config.md.")
    with pytest.raises(ConfigError) as caught:
        load(["recipe=quickstart", "model=qwen"])
    assert str(caught.value).count("qwen3") >= 6 and "more: toolkit models" in str(caught.value)
    names = [f"name{number}" for number in range(10)]
    assert shortlist(names, "elsewhere") == ", ".join(names)
    assert shortlist([*names, "other"], "elsewhere", like="othr").startswith("other, name0, ")
