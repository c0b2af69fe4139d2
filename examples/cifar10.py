"""An image classifier on CIFAR-10: the convolution network of the usual data-parallel tutorials.

deepspeed --num_gpus 2 examples/cifar10.py                       # images that are generated, to try
deepspeed --num_gpus 2 examples/cifar10.py images=cifar-10-batches-bin zero=stage1 train.epochs=10

`images` is the folder of CIFAR-10's binary version (data_batch_1.bin … data_batch_5.bin, test_batch.bin).
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from toolkit.custom import train

SIZE = 3 * 32 * 32


class Network(nn.Module):
    """Two convolutions and three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        )
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Dropout(0.1), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, 10] of images [B, 3, 32, 32]."""
        return self.classifier(self.convolutions(images))


def read(files: list[Path]) -> TensorDataset:
    """Return images [N, 3, 32, 32] from -1 to 1 and labels of binary files: a byte for the label, then the pixels."""
    rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 1 + SIZE) for file in files])
    images = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32) / 127.5 - 1)
    return TensorDataset(images, torch.from_numpy(rows[:, 0].astype(np.int64)))


def generated(count: int, seed: int) -> TensorDataset:
    """Return noise in which a class shows as a brighter row of pixels."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=draw)
    images = torch.randn(count, 3, 32, 32, generator=draw)
    images[torch.arange(count), :, 3 * labels + 1] += 2
    return TensorDataset(images, labels)


def losses(model, batch):
    """Return the loss of each image."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels, reduction="none")


def accuracy(model, batch):
    """Return 1 for each image whose class is found."""
    images, labels = batch
    return {"accuracy": model(images).argmax(1) == labels}


def main(arguments: list[str]) -> Path:
    """Train; return the run folder."""
    words = [word for word in arguments if not word.startswith("images=")]
    folders = [Path(word.removeprefix("images=")) for word in arguments if word.startswith("images=")]
    training, validation = generated(2000, 0), generated(500, 1)
    if folders:
        training = read(sorted(folders[-1].glob("data_batch_*.bin")))
        validation = read([folders[-1] / "test_batch.bin"])
    recipe = Path(__file__).with_suffix(".yaml")
    return train(Network, training, losses, validation=validation, metrics=accuracy, recipe=recipe, words=words)


if __name__ == "__main__":
    main(sys.argv[1:])
