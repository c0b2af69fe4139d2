"""The comparison of docs/proving.md with a tiny model: two packed ranks next to transformers' Trainer, which pads."""

import re
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from ranks import BIN, run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MOST_DIFFERENCE = 1e-4
"""Of losses and gradient norms in fp32, whose sums are in another order."""


def save_model(folder: Path, texts: list[str]) -> None:
    """Write a Llama of two layers and a byte-level tokenizer of 400 tokens."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokens.train_from_iterator(texts, trainer)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=TEMPLATE, **names).save_pretrained(
        folder
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, vocab_size=400, max_position_embeddings=512, bos_token_id=0, eos_token_id=1
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)


def test_two_ranks_packed_give_the_losses_of_a_trainer_that_pads(tmp_path: Path) -> None:
    lines = (ROOT / "examples/data/library.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:32]
    (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    save_model(tmp_path / "model", lines)
    words = ["recipe=smollm2_135m", "model.path=model", "data=rows.jsonl", "tuning=full", "optim.lr=1e-3"]
    words += ["schedule=constant", "schedule.warmup_ratio=0", "data.validation_fraction=0", "evaluate.every=0"]
    words += ["evaluate.prompts=[]", "batch.global_size=32", "batch.micro_per_gpu=8", "train.max_steps=3"]
    words += ["train.log_every=1", "report.enabled=false", "run.name=two", "zero=stage3", "data.packing=packed"]
    trained = run([str(BIN / "toolkit"), "launch", "--num_gpus", "2", *words], cwd=tmp_path)
    assert trained.code == 0, trained.output[-3000:]
    script = [sys.executable, str(ROOT / "examples/beside_trainer.py"), "model", "runs/two"]
    compared = run(script, cwd=tmp_path)
    assert compared.code == 0, compared.output[-3000:]
    [difference] = re.findall(r"The largest difference is (\S+) of the number\.", compared.output)
    assert float(difference) < MOST_DIFFERENCE, compared.output
