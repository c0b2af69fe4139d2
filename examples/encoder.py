"""A classifier on top of a transformers encoder: a head of one's own, batches of texts of any length.

deepspeed --num_gpus 2 examples/encoder.py                      # a tiny random encoder, sentences that are generated
deepspeed --num_gpus 2 examples/encoder.py encoder=/models/bert-base-chinese zero=stage2 precision=bf16

The task, to be replaced by one's own: which of two kinds of words a sentence has more of.
"""

import random
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModel, BertConfig, BertModel

from toolkit.custom import train

WORDS = 100


class Classifier(nn.Module):
    """An encoder, the mean of its states, and a linear layer."""

    def __init__(self, encoder: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, num_classes)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, classes] of ids [B, S]; mask [B, S] is 1 where there is a token."""
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].to(states.dtype)
        return self.head((states * weights).sum(1) / weights.sum(1))


def tiny() -> nn.Module:
    """Return an encoder of 20 thousand parameters with random weights."""
    config = BertConfig(
        vocab_size=WORDS + 1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return BertModel(config, add_pooling_layer=False)


def sentences(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Return ids, 0 is padding, and whether most of them are even."""
    draw = random.Random(seed)
    made = [draw.choices(range(1, WORDS + 1), k=draw.choice((5, 7, 9, 11))) for _ in range(count)]
    return [(ids, int(sum(one % 2 == 0 for one in ids) > len(ids) / 2)) for ids in made]


def collate(samples):
    """Return ids and mask [B, S], padded to the longest, and labels [B]."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(one) for one, _ in samples], batch_first=True)
    return {"ids": ids, "mask": (ids > 0).long(), "labels": torch.tensor([label for _, label in samples])}


def losses(model, batch):
    """Return the loss of each sentence."""
    logits = model(batch["ids"], batch["mask"])
    return functional.cross_entropy(logits.float(), batch["labels"], reduction="none")


def predictions(model, batch):
    """Return what is scored once all ranks' sentences are together."""
    return {"found": model(batch["ids"], batch["mask"]).argmax(1), "wanted": batch["labels"]}


def scores(values):
    """Return accuracy and F1, which is no mean of the sentences' values."""
    found, wanted = values["found"].bool(), values["wanted"].bool()
    both, either = (found & wanted).sum().item(), (found.sum() + wanted.sum()).item()
    return {"accuracy": (found == wanted).float().mean().item(), "f1": 2 * both / either if either else 0.0}


def main(arguments: list[str]) -> Path:
    """Train; return the run folder."""
    words = [word for word in arguments if not word.startswith("encoder=")]
    folders = [word.removeprefix("encoder=") for word in arguments if word.startswith("encoder=")]
    return train(
        lambda: Classifier(AutoModel.from_pretrained(folders[-1]) if folders else tiny(), 2),
        sentences(1000, 0),
        losses,
        validation=sentences(200, 1),
        metrics=predictions,
        score=scores,
        collate=collate,
        recipe=Path(__file__).with_suffix(".yaml"),
        words=words,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
