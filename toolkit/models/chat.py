"""Tokenizers and chat encoders: trained on the data, or loaded from a model directory."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from toolkit.config import schema
from toolkit.distributed.file_lock import built_once
from toolkit.messages import ModelError, reading, tr
from toolkit.models import directory
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
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


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
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    target = folder / "tokenizers" / digest.hexdigest()[:32]
    with built_once(target, lambda built: (built / "tokenizer.json").is_file()) as building:
        if building is not None:
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


def load_tokenizer(
    path: str | Path, *, family: schema.Family | str = schema.Family.auto, chat_template: str = ""
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a local directory. Nothing is downloaded, and no code in the directory is executed.
    `path` is an official ChatGLM directory, or one in transformers' layout; `family` auto is found in the files. With a
    `chat_template` (a name or a Jinja file) special tokens in the texts of an official tokenizer are parsed.
    """
    families = [member.value for member in schema.Family]
    if family not in families:
        raise ModelError("unknown model.family '{family}'. Known: {known}.", family=family, known=", ".join(families))
    folder, family = Path(path), schema.Family(family)
    if not str(path) or not folder.is_dir():
        raise ModelError(
            "There is no tokenizer directory '{folder}'. Point model.tokenizer to a local directory "
            "with the tokenizer's files.",
            folder=path,
        )
    vocabulary = directory.official_vocabulary(folder)
    if vocabulary is None and family is not schema.Family.auto:
        raise ModelError(
            "model.family = {family} has no effect: the tokenizer in '{folder}' is not an official ChatGLM one. "
            "Remove it.",
            family=family.value,
            folder=folder,
        )
    if vocabulary is None:
        tokenizer = _load_by_transformers(folder)
    else:
        from toolkit.models.chatglm import formats

        with reading(vocabulary, ModelError, tr("Download it again.")):
            tokenizer = _load_official(vocabulary, family)
        # An export of training with model.chat_template has another template than the family's, which is kept. Exports
        # of earlier versions have the family's template without `SERVED_TURNS`.
        bare = (text.removeprefix(formats.SERVED_TURNS.get(kind, "")) for kind, text in formats.TEMPLATES.items())
        default_templates = (*formats.TEMPLATES.values(), *bare, tokenizer.own_template, None)
        is_saved = vocabulary.parent != folder or tokenizer.family is schema.Family.chatglm
        if is_saved and (saved := directory.saved_template(folder)) not in default_templates:
            tokenizer.chat_template, tokenizer.split_special_tokens = saved, False
    if chat_template:
        from toolkit.models.named_templates import use_template

        use_template(tokenizer, chat_template)
    return tokenizer


def _load_official(vocabulary: Path, family: schema.Family) -> PreTrainedTokenizerBase:
    """Return the tokenizer of an official ChatGLM vocabulary; ModelError if it is not of the `family` that is set."""
    if directory.is_lfs_pointer(vocabulary):
        raise ModelError(
            "{file} is a git-lfs pointer, not the vocabulary: run `git lfs pull` in {folder}.",
            file=vocabulary,
            folder=vocabulary.parent,
        )
    from toolkit.models.chatglm import tokenizers

    detected = tokenizers.family_of(vocabulary)
    shared = {schema.Family.chatglm2, schema.Family.chatglm3, schema.Family.auto}
    if family not in (schema.Family.auto, detected) and not {family, detected} <= shared:
        raise ModelError(
            "model.family = {family}, but {file} is the vocabulary of {found}.",
            family=family.value,
            file=vocabulary,
            found=detected.value,
        )
    resolved = detected if family is schema.Family.auto else family
    if resolved is schema.Family.chatglm:
        return tokenizers.ChatGLMTokenizer(vocabulary, tokenizers.image_tokens(vocabulary))
    # Undecided: ChatGLM3's special tokens are ChatGLM2's and four more.
    return tokenizers.GlmTokenizer(
        schema.Family.chatglm3 if resolved is schema.Family.auto else resolved,
        vocabulary,
        has_chat_format=resolved is not schema.Family.auto,
    )


def _load_by_transformers(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory in transformers' layout; ModelError if there is none, or it needs code."""
    config = directory.read_json_or_empty(path / "tokenizer_config.json")
    if "AutoTokenizer" in str(config.get("auto_map", "")) and not (path / "tokenizer.json").is_file():
        raise ModelError(
            "The tokenizer in '{folder}' needs Python code from that directory (auto_map), which is "
            "never executed. Point model.tokenizer to one in transformers' own layout (tokenizer.json).",
            folder=path,
        )
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            "The directory '{folder}' holds no tokenizer (tokenizer.json or tokenizer.model). Point "
            "model.tokenizer to a directory that does.",
            folder=path,
        )
    if (path / "tokenizer.json").is_file():
        directory.check_tokenizer_growth(path / "tokenizer.json")
    with reading(path, ModelError, tr("Point model.tokenizer to another directory, or fetch the files again.")):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        tokenizer("a 1", verbose=False)  # settings of a wrong type fail when they are used
    return tokenizer


AnyChatEncoder = Union["FamilyChatEncoder", TemplateChatEncoder]  # | does not take a string
"""Turns conversations into ids, for training and for generation."""


def load_chat_encoder(
    path: str | Path,
    *,
    family: schema.Family | str = schema.Family.auto,
    chat_template: str = "",
    original_labels: bool = True,
) -> AnyChatEncoder:
    """Return the encoder of a model directory, which turns conversations into ids and the mask of trained tokens."""
    return chat_encoder(load_tokenizer(path, family=family, chat_template=chat_template), original_labels)


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory holds the files of a tokenizer."""
    has_files = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    return has_files or directory.official_vocabulary(folder) is not None


def local_encoder(model: schema.ModelConfig, train_thinking: bool = True) -> AnyChatEncoder | None:
    """Return the chat encoder of a model's tokenizer, None if its files are not here; see `load_chat_encoder`."""
    folder = Path(model.tokenizer or model.path)
    if not (model.tokenizer or model.path) or not folder.is_dir():
        return None
    if not has_tokenizer(folder):
        return None
    tokenizer = load_tokenizer(folder, family=model.family, chat_template=model.chat_template)
    return chat_encoder(tokenizer, model.original_labels, train_thinking)


def chat_encoder(tokenizer: Any, original_labels: bool = True, train_thinking: bool = True) -> AnyChatEncoder:
    """Return the chat encoder of a loaded tokenizer; see `load_chat_encoder`."""
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
