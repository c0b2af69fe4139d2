"""The tokenizer in a model directory, of an official ChatGLM or in the layout of transformers, and its chat encoder."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from toolkit.config import schema
from toolkit.messages import ModelError, json_object, reading, tr
from toolkit.models import directory
from toolkit.models.chat import AnyChatEncoder, chat_encoder
from toolkit.models.chatglm import official_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_MAX_GROWTH = 100
"""Factor by which a tokenizer's normalizer or decoder may lengthen a text; NFKD turns some characters into 18."""


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
    vocabulary = official_files.official_vocabulary(folder)
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
        with reading(vocabulary, ModelError, tr("Download it again.")):
            tokenizer = _load_official(vocabulary, family)
        # Exports have the vocabulary in `official/`; ChatGLM-6B's tokenizer is saved in its official layout.
        if vocabulary.parent != folder or tokenizer.family is schema.Family.chatglm:
            _restore_template(tokenizer, folder)
    if chat_template:
        from toolkit.models.named_templates import use_template

        use_template(tokenizer, chat_template)
    return tokenizer


def _restore_template(tokenizer: Any, export: Path) -> None:
    """Give an official ChatGLM's tokenizer the template in an export, if `model.chat_template` gave it in training."""
    from toolkit.models.chatglm import formats

    saved = directory.saved_template(export)
    # It did unless the saved one is the family's own: its template, the same without `SERVED_TURNS` (`bare`, in exports
    # of earlier versions), the official file's, or none.
    bare = (text.removeprefix(formats.SERVED_TURNS.get(kind, "")) for kind, text in formats.TEMPLATES.items())
    if saved not in (*formats.TEMPLATES.values(), *bare, tokenizer.own_template, None):
        tokenizer.chat_template, tokenizer.split_special_tokens = saved, False


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
    # ChatGLM2 and ChatGLM3 have the same vocabulary.
    same_vocabulary = {schema.Family.chatglm2, schema.Family.chatglm3, schema.Family.auto}
    if family not in (schema.Family.auto, detected) and not {family, detected} <= same_vocabulary:
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
        if not (path / "config.json").is_file():
            raise ModelError(
                "The directory '{folder}' holds neither config.json nor a tokenizer: it is not a model directory. "
                "Correct model.path, or model.tokenizer.",
                folder=path,
            )
        raise ModelError(
            "The directory '{folder}' holds no tokenizer (tokenizer.json or tokenizer.model). Point "
            "model.tokenizer to a directory that does.",
            folder=path,
        )
    if (path / "tokenizer.json").is_file():
        _check_growth(path / "tokenizer.json")
    with reading(path, ModelError, tr("Point model.tokenizer to another directory, or fetch the files again.")):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=False, local_files_only=True
        )
        tokenizer("a 1", verbose=False)  # settings of a wrong type fail when they are used
    return tokenizer


def load_chat_encoder(
    path: str | Path,
    *,
    family: schema.Family | str = schema.Family.auto,
    chat_template: str = "",
    original_labels: bool = True,
) -> AnyChatEncoder:
    """Return the chat encoder of the tokenizer in a directory; see `load_tokenizer` and `chat.chat_encoder`."""
    return chat_encoder(load_tokenizer(path, family=family, chat_template=chat_template), original_labels)


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory holds the files of a tokenizer."""
    has_files = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    return has_files or official_files.official_vocabulary(folder) is not None


def local_encoder(model: schema.ModelConfig, train_thinking: bool = True) -> AnyChatEncoder | None:
    """Return the chat encoder of a model's tokenizer, None if its files are not here; see `load_chat_encoder`."""
    folder = Path(model.tokenizer or model.path)
    if not (model.tokenizer or model.path) or not folder.is_dir() or not has_tokenizer(folder):
        return None
    tokenizer = load_tokenizer(folder, family=model.family, chat_template=model.chat_template)
    return chat_encoder(tokenizer, model.original_labels, train_thinking)


def _check_growth(file: Path) -> None:
    """Raise ModelError for a tokenizer.json whose steps lengthen texts without bound: ten could fill any memory."""
    tokenizer = json_object(file, ModelError)
    for part in ("normalizer", "decoder"):
        growth = _growth_factor(tokenizer.get(part))
        if growth > _MAX_GROWTH:
            raise ModelError(
                "{file}: its {part} can make a text more than {times} times as long, which no tokenizer needs. Get "
                "the file from a source you trust.",
                file=file,
                part=part,
                times=_MAX_GROWTH,
            )


def _growth_factor(step: Any) -> float:
    """Return the largest factor by which a normalizer or decoder can lengthen a text, by its settings."""
    if not isinstance(step, dict):
        return 1.0
    growth = 1.0
    inner_steps = step.get("normalizers") or step.get("decoders")
    for inner in inner_steps if isinstance(inner_steps, list) else []:
        growth = min(growth * _growth_factor(inner), 1e9)  # some hundred of them would overflow
    if step.get("type") == "Replace":
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        matched = len(text.encode()) if isinstance(text, str) else 1  # an expression may match a single character
        content = len(str(step.get("content", "")).encode())
        # An empty pattern matches before each character, which stays.
        growth *= max(1.0, content / matched) if matched else content + 1.0
    elif step.get("type") == "Prepend":
        growth *= 1.0 + len(str(step.get("prepend", "")))
    return growth
