"""An answer as it comes: whole characters, no special tokens, and in the end exactly the text of the whole answer."""

from collections.abc import Callable

import torch
from transformers.generation.streamers import BaseStreamer

from toolkit.evaluate.generate import text_of
from toolkit.models.chat import AnyChatEncoder


class AnswerStream(BaseStreamer):
    """For `generate(…, streamer=…)` with one prompt.

    All tokens are decoded anew with each one: what a token stands for depends on those around it (bytes of a
    character, sentencepiece's blank at a beginning), and decoding costs nothing beside the model.

    Args:
        encoder: of the model.
        write: gets each piece of text, without the blanks around the answer.
    """

    def __init__(self, encoder: AnyChatEncoder, write: Callable[[str], None]) -> None:
        self.encoder, self.write = encoder, write
        self.ids: list[int] = []
        self.text = ""
        """What has been written."""
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then a token at a time."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self.ids += [token for token in value.flatten().tolist() if token not in self.encoder.stop_ids]
        # Half a character is decoded as U+FFFD.
        self._show(text_of(self.encoder, self.ids).rstrip("\ufffd"))

    def end(self) -> None:
        """Write what is left."""
        self._show(text_of(self.encoder, self.ids))

    def _show(self, text: str) -> None:
        if len(text) > len(self.text):
            self.write(text[len(self.text) :])
            self.text = text
