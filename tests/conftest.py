"""Shared by all tests: English messages, no network, and a way to launch real ranks."""

import os
from collections.abc import Iterator

import pytest

from toolkit.messages import set_language

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    """Pin the language of messages."""
    set_language("en")
    yield
    set_language("en")
