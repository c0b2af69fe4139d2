"""The tokenizer that is trained on the data, and the chat encoder of any tokenizer."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from toolkit.distributed.file_lock import built_once
from toolkit.messages import ModelError
from toolkit.models.chat_template import TemplateChatEncoder

if TYPE_CHECKING:
    from toolkit.models.chatglm.formats import FamilyChatEncoder

FIT_VERSION = 1
"""Part of a fitted tokenizer's fingerprint; increase it when fitting gives another tokenizer."""

END, PAD = "<|endoftext|>", "<|pad|>"
SPECIAL_TOKENS = [END, PAD, "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]

# Similar to GLM-4's. Every answer ends with the end token, in earlier turns too, so that all answers look alike. A tool
# call is a message of the assistant with the tool's name, then its arguments.
_CHAT_TEMPLATE = (
    "{{ '[gMASK]<sop>' }}"
    "{% if tools %}{{ '<|system|>\\n' + tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + ('observation' if message['role'] == 'tool' else message['role']) + '|>' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n' + call['function']['name'] + '\\n' + call['function']['arguments'] | tojson }}"
    "{% else %}{{ '\\n' + message['content'] }}{% endfor %}"
    "{% if message['role'] == 'assistant' %}{{ '<|endoftext|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)

TOKENIZER = "tokenizer: "
"""Prefix of the keys of `tokenizer_identity`."""


def fit_tokenizer(texts: Callable[[], Iterable[str]], vocab_size: int, folder: Path) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer trained on the texts, with GLM's special tokens and chat template, cached in
    `folder`/tokenizers/FINGERPRINT. `texts` is called twice; `vocab_size` counts the special tokens.
    """
    least = 256 + len(SPECIAL_TOKENS)
    if vocab_size < least:
        raise ModelError(
            "model.shape.vocab_size = {size} is too small for a fitted tokenizer: all bytes and the special tokens "
            "need {least}.",
            size=vocab_size,
            least=least,
        )
    digest = hashlib.sha256(f"{FIT_VERSION} {vocab_size} {SPECIAL_TOKENS} {_CHAT_TEMPLATE}".encode())
    for encoded in map(str.encode, texts()):
        digest.update(len(encoded).to_bytes(8, "little"))  # so that texts divided otherwise have another digest
        digest.update(encoded)
    target = folder / "tokenizers" / digest.hexdigest()[:32]
    with built_once(target, lambda built: (built / "tokenizer.json").is_file()) as building:
        if building is not None:  # None: it is in the cache
            # Byte-level BPE needs no unknown token: any text can be written in bytes.
            backend = Tokenizer(models.BPE())
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            backend.decoder = decoders.ByteLevel()
            trainer = trainers.BpeTrainer(
                vocab_size=vocab_size,
                special_tokens=SPECIAL_TOKENS,
                initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                show_progress=False,
            )
            backend.train_from_iterator(texts(), trainer)
            PreTrainedTokenizerFast(
                tokenizer_object=backend,
                eos_token=END,
                pad_token=PAD,
                additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in (END, PAD)],
                chat_template=_CHAT_TEMPLATE,
                clean_up_tokenization_spaces=False,
            ).save_pretrained(building)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(target, local_files_only=True)
    return tokenizer


AnyChatEncoder = Union["FamilyChatEncoder", TemplateChatEncoder]  # | does not take a string
"""Turns conversations into ids, for training and for generation."""


def chat_encoder(tokenizer: Any, original_labels: bool = True, train_thinking: bool = True) -> AnyChatEncoder:
    """Return the encoder of a tokenizer, which turns conversations into ids and the mask of trained tokens.
    `original_labels`: as in `FamilyChatEncoder`; `train_thinking`: as in `TemplateChatEncoder`. ModelError if one is
    False and the tokenizer has the other kind of encoder, or if none can be chosen.
    """
    if getattr(tokenizer, "has_own_template", False):  # only ChatGLM's tokenizers have it
        from toolkit.models.chatglm import formats

        if not train_thinking:
            raise ModelError(
                "data.train_thinking = false has no effect: the tokenizer '{name}' uses a ChatGLM's own chat format, "
                "which knows no reasoning. Remove it.",
                name=tokenizer.name_or_path,
            )
        if tokenizer.has_chat_format:
            return formats.FORMATS[tokenizer.family](tokenizer, original_labels)
        raise ModelError(
            "nothing in {folder} tells whether its tokenizer is ChatGLM2's or ChatGLM3's, whose vocabulary is "
            "the same. Say model.family=chatglm2 or model.family=chatglm3.",
            folder=tokenizer.name_or_path,
        )
    if not original_labels:
        raise ModelError(
            "model.original_labels = false has no effect: the tokenizer '{name}' does not use a ChatGLM's own chat "
            "format. Remove it.",
            name=tokenizer.name_or_path,
        )
    return TemplateChatEncoder(tokenizer, train_thinking)


def tokenizer_identity(tokenizer: Any) -> dict[str, str]:
    """Return a digest of each part of a tokenizer that a run trains with and exports; keys begin with `TOKENIZER`.
    A ChatGLM's own chat format is identified by its family, as its template may change with a version of the toolkit.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings = json.loads(backend.to_str()) if backend is not None else {}
    model = settings.get("model", {})
    # Versions of tokenizers write a merge as "a b" or as ["a", "b"].
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    is_own = getattr(tokenizer, "has_own_template", False)
    parts = {
        "vocabulary": [tokenizer.get_vocab(), merges],
        "division of text": [
            settings.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")
        ],
        "special tokens": [
            # transformers 4 lists here what is among the added tokens, too.
            {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)},
            [[index, str(token), token.special] for index, token in sorted(tokenizer.added_tokens_decoder.items())],
        ],
        "chat template": tokenizer.family.value if is_own else tokenizer.chat_template,
    }
    return {
        TOKENIZER + name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:32]
        for name, part in parts.items()
    }
