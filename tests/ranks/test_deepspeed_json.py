"""The DeepSpeed JSON, out and in: a plain program trains with ours, and we train with somebody's."""

import json
import re
from pathlib import Path

import transformers
from ranks import REPOSITORY, forked, run
from shared import losses, tiny

from toolkit.models.chat import fit_tokenizer

WORKER = str(REPOSITORY / "tests" / "ranks" / "plain_deepspeed_worker.py")


def test_a_plain_program_trains_with_the_exported_file(tmp_path: Path) -> None:
    exported = run(
        [
            *forked(0, "--module", "toolkit", "export-config"),
            "recipe=quickstart",
            "world_size=2",
            "total_steps=6",
            "schedule.warmup_steps=2",
            "optim.lr=0.01",
            "output=ds_config.json",
        ],
        cwd=tmp_path,
    )
    assert exported.code == 0, exported.output
    assert '"auto"' not in (tmp_path / "ds_config.json").read_text()
    finished = run(forked(2, WORKER, "ds_config.json"), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    found = re.search(r"TRAINED (\S+) (\S+) (\w+) (\[.*\])", finished.output)
    assert found
    assert float(found[2]) < float(found[1]) - 0.1
    assert found[3] == "WarmupCosineLR"

    # Its learning rates are those that our own loop would use.
    from toolkit.config.schema import ScheduleConfig
    from toolkit.train.schedule import learning_rate

    schedule = ScheduleConfig(warmup_steps=2)
    first, *rates = json.loads(found[4])
    assert rates == [learning_rate(schedule, 0.01, done, 6, 2) for done in range(1, 6)]
    assert first == 0.0 < learning_rate(schedule, 0.01, 0, 6, 2)
    assert "WarmupCosineLR takes the first step at a learning rate of 0" in exported.output, "what differs is said"


def test_somebodys_json_trains(rows_file: Path, tmp_path: Path) -> None:
    theirs = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.999], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}},
    }
    (tmp_path / "theirs.json").write_text(json.dumps(theirs, indent=2))
    words = [
        word for word in tiny(rows_file, tmp_path, "theirs", "train.max_steps=3") if not word.startswith("schedule")
    ]
    command = [str(REPOSITORY / "run.py"), *words, "deepspeed_json=theirs.json"]
    finished = run(forked(2, *command), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    assert "theirs.json takes the place of: schedule.warmup_ratio = 0.037 (recipes/quickstart.yaml:" in finished.output
    assert "auto" in finished.output, "each resolved value is shown"
    assert len(losses(tmp_path / "runs" / "theirs")) == 3
    used = json.loads((tmp_path / "runs" / "theirs" / "ds_config.json").read_text())
    assert used["zero_optimization"]["stage"] == 3
    assert used["gradient_clipping"] == 0.5
    assert used["optimizer"]["params"]["betas"] == [0.8, 0.999]
    assert used["scheduler"]["type"] == "WarmupLR"
    assert used["zero_optimization"]["reduce_bucket_size"] < 1_000_000, (
        "as many as are trained, which the engine was given"
    )


def test_the_exported_file_is_what_the_engine_is_given(rows_file: Path, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    fit_tokenizer(lambda: ["a question", "an answer"], 300, tmp_path).save_pretrained(tmp_path / "model")
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    words = tiny(rows_file, tmp_path, "lora", "model=hf", f"model.path={tmp_path}/model", "tuning=lora", "zero=stage2")
    words = [word for word in words if not word.startswith("model.shape")] + ["train.max_steps=2"]
    command = ["toolkit", "export-config", *words, "world_size=2", "output=ds.json"]
    exported = run(forked(0, "--module", *command), cwd=tmp_path)
    assert exported.code == 0, exported.output
    finished = run(forked(2, str(REPOSITORY / "run.py"), *words), cwd=tmp_path)
    assert finished.code == 0, finished.output[-4000:]
    found, expected = (json.loads(Path(tmp_path, one).read_text()) for one in ("runs/lora/ds_config.json", "ds.json"))
    assert found == expected
    assert 0 < found["zero_optimization"]["reduce_bucket_size"] < 20_000, "LoRA's parameters"
