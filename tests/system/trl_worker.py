"""Losses and gradient norms of TRL's trainers on given batches: run with TRL's directory in PYTHONPATH.

python trl_worker.py SPEC: a JSON file with `cases`, `pairs`, `answers`, and directories of models; writes `output`.
"""

import dataclasses
import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments
from trl import RewardConfig

TRAINERS = {"DPO": "trl", "KTO": "trl", "Reward": "trl", "CPO": "trl.experimental.cpo", "ORPO": "trl.experimental.orpo"}
TEXTS = {"prompt": ["ab"] * 4, "chosen": ["c"] * 4, "rejected": ["d"] * 4}
"""What a trainer is made with; it is not trained on."""


def trainer_of(kind: str, spec: dict, settings: dict):
    """Return a trainer of TRL, with the model that was trained on, and the one before."""
    module = importlib.import_module(TRAINERS[kind])
    config = getattr(module, f"{kind}Config")(
        output_dir=str(Path(spec["output"]).with_name("trl")),
        per_device_train_batch_size=4,
        report_to=[],
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        max_length=64,
        disable_dropout=True,
        **settings,
    )
    auto = AutoModelForSequenceClassification if kind == "Reward" else AutoModelForCausalLM
    model = auto.from_pretrained(spec["scorer" if kind == "Reward" else "model"], dtype=torch.float32)
    rows = TEXTS if kind != "KTO" else {"prompt": ["ab"] * 4, "completion": list("cdef"), "label": [True, False] * 2}
    given = {"args": config, "train_dataset": Dataset.from_dict(rows)}
    given["processing_class"] = AutoTokenizer.from_pretrained(spec["model"])
    if kind in ("DPO", "KTO"):
        given["ref_model"] = AutoModelForCausalLM.from_pretrained(spec["reference"], dtype=torch.float32)
    return getattr(module, f"{kind}Trainer")(model=model, **given)


def separate(pairs: list[dict]) -> dict[str, torch.Tensor]:
    """Return the batch of pairs that CPO's and ORPO's trainers take."""
    batch = {}
    for side in ("chosen", "rejected"):
        rows = [pair["prompt_ids"] + pair[f"{side}_ids"] for pair in pairs]
        size = max(map(len, rows))
        ids = torch.tensor([row + [0] * (size - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (size - len(row)) for row in rows])
        begins = torch.tensor([len(pair["prompt_ids"]) for pair in pairs])[:, None]
        labels = torch.where((torch.arange(size) >= begins) & (mask == 1), ids, -100)
        batch |= {f"{side}_input_ids": ids, f"{side}_attention_mask": mask, f"{side}_labels": labels}
    return batch


def loss_of(kind: str, trainer, pairs: list[dict], answers: list[dict]) -> torch.Tensor:
    """Return the loss of a batch; of ORPO the odds ratio term, as the other is of the whole text."""
    if kind == "ORPO":
        chosen, rejected, *_ = trainer.concatenated_forward(trainer.model, separate(pairs))
        return -trainer.odds_ratio_loss(chosen, rejected)[0].mean()
    if kind == "CPO":
        return trainer.compute_loss(trainer.model, separate(pairs))
    if kind == "Reward":
        pairs = [
            {f"{side}_ids": pair["prompt_ids"] + pair[f"{side}_ids"] for side in ("chosen", "rejected")}
            | {"margin": pair["margin"]}
            for pair in pairs
        ]
    return trainer.compute_loss(trainer.model, trainer.data_collator(answers if kind == "KTO" else pairs))


def main(spec: dict) -> dict:
    """Return each case's loss, gradient norm and KL, the versions, and RewardConfig's own arguments."""
    found: dict = {"versions": {name: version(name) for name in ("trl", "torch", "transformers", "accelerate")}}
    plain = {field.name for field in dataclasses.fields(TrainingArguments)}
    found["arguments"] = {
        field.name: field.default for field in dataclasses.fields(RewardConfig) if field.name not in plain
    }
    for name, (kind, settings, most) in spec["cases"].items():
        trainer = trainer_of(kind, spec, settings)
        trainer.model.train()
        loss = loss_of(kind, trainer, spec["pairs"][:most], spec["answers"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), float("inf"))
        found[name] = {"loss": float(loss), "norm": float(norm)}
        if kind == "KTO":
            found[name]["kl"] = trainer._metrics["train"]["kl"][-1]
    return found


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(given["output"]).write_text(json.dumps(main(given)))
