"""Types that data/ and models/ exchange, which do not import each other: messages, encoded samples, micro-batches."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Message = Mapping[str, Any]
"""One turn: `role` and `content`; an assistant's may have `tool_calls` (as OpenAI writes them, arguments as an object),
`reasoning_content` and `metadata`, a tool's `tool_call_id`; `loss`, if there, says whether it is trained. Roles:
system, user, assistant, tool; and text, a plain text that is a conversation's only message."""
TEXT = "text"
Encoded = tuple[list[int], list[bool]]
"""Ids of one conversation, and for each whether the loss covers it."""
Batch = dict[str, "torch.Tensor"]
"""A micro-batch: input_ids, labels, position_ids, segment_ids, each int64 [B, S]; for packed rows also cu_seq_lens,
int32 [segments+1] over the B x S tokens, padding as segments of its own. `target_indices`, int64 [T], of the trained
tokens in the flattened rows, and `targets`, their ids [T].

Where samples share what they begin with, also `seen_until`, int64 [B, S], the last segment that sees each token, from
its own on; `keys`, int64 [K], segment after segment the places in the B x S tokens that it sees; and `cu_seq_lens_k`,
int32 [segments + 1], over these."""
UNTRAINED = -100
"""Label of a token that the loss does not cover."""


def with_targets(batch: Batch) -> Batch:
    """Return a batch with `target_indices` and `targets`, made on the CPU: the shapes of the loss depend on them."""
    if "target_indices" in batch:
        return batch
    is_trained = batch["labels"] != UNTRAINED
    is_trained[:, 0] = False  # there is no token before it that could predict it
    indices = is_trained.flatten().nonzero().flatten()
    return {**batch, "target_indices": indices, "targets": batch["labels"].flatten()[indices]}


class ChatEncoder(Protocol):
    """Messages to token ids and to the mask of what is trained: the only place where text becomes tokens for training.
    `loss` at a message says whether it is trained, else the model family does; a plain text (role `text`) is trained
    as a whole, with an end token. Implementations can be pickled: `TemplateChatEncoder` of models/chat_template.py and
    those of models/chatglm/formats.py, of which `chat_encoder` of models/chat.py chooses.
    """

    vocab_size: int
    """Every id is below it."""
    only_last: bool
    """Whether only the last message of a conversation can be trained."""
    drops_system: bool
    """Whether the format has no place for a system message and leaves it out."""
    drops_tools: bool
    """Whether it leaves out the tools that may be called."""
    can_cut: bool
    """Whether a piece from the middle of a sample's ids is a sample that the model can learn from."""
    after_text: Sequence[int]
    """What the tokenizer itself puts after a text; it stays where one is only read."""
    text_key: Sequence[int]
    """Part of the names of what is made of plain texts; () where their ids are what they always were."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever any ids or mask could change."""

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> Encoded:
        """Return ids and mask of one conversation whose last message is the assistant's. RowError if that fails."""
        ...

    def divide(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[list[Message]]:
        """Return the conversations in which the answers are trained: mostly [messages] itself; several if the template
        renders earlier answers otherwise in later turns, so that each answer is trained as it is generated. RowError if
        it cannot be rendered. Give these lists, not copies, to `encode_many`: they may carry their rendering.
        """
        ...

    def encode_many(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any] | None] | None = None
    ) -> list[Encoded]:
        """Return `encode` of each; faster where the tokenizer works on batches."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the token ids of a conversation up to where the assistant's next answer would begin."""
        ...
