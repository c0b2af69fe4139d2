"""Train the same rows with transformers' Trainer alone, and print its losses beside those of a run of the toolkit.

    python examples/beside_trainer.py MODEL RUN
    torchrun --nproc-per-node 2 examples/beside_trainer.py MODEL RUN

MODEL is the directory that RUN trained: all parameters, and all rows in each step. RUN may have other ranks, ZeRO
stages and packing than Trainer, which pads: what is learned is the same.

Nothing of the toolkit is imported: model, chat template, loss, optimizer and loop are transformers' and PyTorch's.
"""

import json
import os
import sys
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

model_path, run = sys.argv[1], Path(sys.argv[2])
recipe = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
wanted = [(step["loss"], step["grad_norm"]) for step in steps if "loss" in step]

tokenizer = AutoTokenizer.from_pretrained(model_path)
samples = []
for line in Path(recipe["data"]["sources"][0]["path"]).read_text(encoding="utf-8").splitlines():
    *question, answer = json.loads(line)["messages"]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    trained = tokenizer(answer["content"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    samples.append({"input_ids": prompt + trained, "labels": [-100] * len(prompt) + trained})

model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
model.get_input_embeddings().padding_idx = None  # the padding token is also the one that ends answers: it is trained
micro, ranks = 8, int(os.environ.get("WORLD_SIZE", "1"))
arguments = TrainingArguments(
    output_dir="trainer",
    max_steps=len(wanted),
    per_device_train_batch_size=micro,
    gradient_accumulation_steps=len(samples) // (micro * ranks),
    learning_rate=recipe["optim"]["lr"],
    adam_beta1=recipe["optim"]["betas"][0],
    adam_beta2=recipe["optim"]["betas"][1],
    max_grad_norm=recipe["train"]["gradient_clipping"],
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=samples, data_collator=DataCollatorForSeq2Seq(tokenizer, model))
trainer.train()
if trainer.args.process_index:
    sys.exit()  # rank 0 has the log
found = [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]

print("step  loss: toolkit    Trainer     gradient norm: toolkit   Trainer")
for step, (ours, theirs) in enumerate(zip(wanted, found, strict=True), 1):
    print(f"{step:4}  {ours[0]:13.7f}  {theirs[0]:9.7f}  {ours[1]:22.5f}  {theirs[1]:8.5f}")
worst = max(
    abs(a - b) / b for ours, theirs in zip(wanted, found, strict=True) for a, b in zip(ours, theirs, strict=True)
)
print(f"The largest difference is {worst:.1e} of the number.")
