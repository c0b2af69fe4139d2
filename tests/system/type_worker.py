"""What `type_runs` has done by forks of one process: a tiny model is built, a plain loop is taken, exports are loaded.

type_worker.py build KIND FOLDER        writes a model, its tokenizer, and the same with windows longer than all samples
type_worker.py compare JSON             {"plain": {NAME: [OVERRIDE, …]}, "base": FOLDER, "runs": {NAME: RUN},
                                        "output": FILE}: gets, by name, first loss and gradient norm of a plain
                                        loop, and how far the logits of exports are apart
"""

import copy
import json
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.model_types import built
from toolkit.config.load import load
from toolkit.extras.reference import _batches
from toolkit.models import probe
from toolkit.tasks import language_data

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WINDOWS = ("sliding_window", "attention_window_size", "window_size", "attention_chunk_size")


def build(kind: str, folder: Path) -> None:
    """Write the model of a type, and one with wide windows beside it, `FOLDER-wide`."""
    built(kind).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    shutil.copytree(folder, wide := folder.with_name(f"{folder.name}-wide"))
    config = json.loads((wide / "config.json").read_text())
    for section in (config, config.get("text_config") or {}):
        section.update({key: 512 for key in WINDOWS if isinstance(section.get(key), int) and section[key] < 512})
    (wide / "config.json").write_text(json.dumps(config))


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of 300 tokens with a chat template."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        ["red green blue apple pear plum runs walks sleeps quickly slowly today"] * 9,
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "<|im_end|>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, chat_template=TEMPLATE, **names)


def plain(words: list[str]) -> dict[str, float]:
    """Return first loss and gradient norm in transformers alone: one sample at a time, no padding. What a model's class
    creates without gradient has none, though transformers (5.24) gives it one as it loads it: sinusoidal positions.
    """
    cfg = load(words).cfg
    model = transformers.AutoModelForCausalLM.from_pretrained(cfg.model.path, dtype=torch.float32).train()
    created = dict(type(model)(copy.deepcopy(model.config)).named_parameters())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(created[name].requires_grad)
    model.get_input_embeddings().padding_idx = None  # that token is trained, too, as it is in the output layer
    samples = next(_batches(cfg, language_data.load_data(cfg), 1, 1))
    total, result = sum(int(trained[1:].sum()) for _, trained in samples), 0.0
    for sample in samples:
        ids, trained = (torch.as_tensor(part.tolist()) for part in sample)
        labels = torch.where(trained.bool(), ids, -100)[1:]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / total
        loss.backward()
        result += float(loss.detach())
    squares = (parameter.grad.double().square().sum() for parameter in model.parameters() if parameter.grad is not None)
    return {"loss": result, "norm": float(sum(squares)) ** 0.5}


@torch.no_grad()
def logits_apart(base: Path, export: Path) -> float:
    """Return how far the logits of an export in transformers, or peft, are from those at the end of training, of their
    spread.
    """
    saved, automatic = probe.read(export), transformers.AutoModelForCausalLM
    assert saved is not None
    if (export / "adapter_config.json").exists():
        from peft import PeftModel

        model = PeftModel.from_pretrained(automatic.from_pretrained(base, dtype=torch.float32), export)
    else:
        model, report = automatic.from_pretrained(export, dtype=torch.float32, output_loading_info=True)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    logits = model.eval()(input_ids=saved.ids, use_cache=False).logits[:, -1]
    return float((logits - saved.logits).abs().max() / saved.logits.std())


def attempt(work: Callable[[], Any]) -> Any:
    """Return a result, or what went wrong."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    step, *arguments = sys.argv[1:]
    if step == "build":
        build(arguments[0], Path(arguments[1]))
    else:
        task = json.loads(Path(arguments[0]).read_text())
        base, runs = Path(task["base"]), {name: Path(run) for name, run in task["runs"].items()}
        answer = {
            "plain": {name: attempt(partial(plain, words)) for name, words in task["plain"].items()},
            "logits": {name: attempt(partial(logits_apart, base, run / "export")) for name, run in runs.items()},
        }
        Path(task["output"]).write_text(json.dumps(answer))
