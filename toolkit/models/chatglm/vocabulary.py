"""Official ChatGLM vocabularies: whether a directory has one, whose, and as a backend with the original's ids."""

import base64
import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import Family
from toolkit.messages import ModelError
from toolkit.models.chatglm.family import TOKENIZER_CODE, architecture_of, named_family, read_text
from toolkit.models.directory import is_lfs_pointer

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer


SOP, EOP = "<|sop|>", "<|eop|>"
"""Names, in ChatGLM2's and 3's tokenizers, of what the original calls `sop` and `eop`. As added tokens, those would be
found inside words (philosophy, people operations)."""
_COMMANDS = ["[MASK]", "[gMASK]", "[sMASK]", SOP, EOP]
_ROLES = ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
_GLM4_SPECIALS = [
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *_ROLES,
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
]
# How glm-4's official tokenizer splits a text before it looks for pairs, as tiktoken's cl100k_base does.
_GLM4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def load_pieces(file: Path) -> "SentencePieceProcessor":
    """Return a sentencepiece model."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise _unreadable(file, error) from error


def sentencepiece_bpe(file: Path, roles: bool) -> "Tokenizer":
    """Return ChatGLM2's and 3's tokenizer, the latter with role tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    pieces = load_pieces(file)
    size = pieces.get_piece_size()
    vocab = {pieces.id_to_piece(index): index for index in range(size)}
    ranks = {
        piece: index
        for piece, index in vocab.items()
        if not (pieces.is_control(index) or pieces.is_byte(index) or pieces.is_unknown(index))
    }
    specials = [*_COMMANDS, *(_ROLES if roles else [])]
    vocab |= {token: size + place for place, token in enumerate(specials)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(ranks), unk_token="<unk>", byte_fallback=True, fuse_unk=False)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    added = ["<unk>", "<s>", "</s>", *(token for token in specials if token != EOP)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in added])
    backend.post_processor = processors.TemplateProcessing(
        single=f"[gMASK] {SOP} $A", special_tokens=[(token, vocab[token]) for token in ("[gMASK]", SOP)]
    )
    return backend


def tiktoken_bpe(file: Path) -> "Tokenizer":
    """Return glm-4's tokenizer from the official tokenizer.model."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters: dict[int, str] = bytes_to_unicode()
    ranks = {}
    try:
        for token, rank in (line.split() for line in file.read_bytes().splitlines() if line):
            ranks["".join(letters[byte] for byte in base64.b64decode(token, validate=True))] = int(rank)
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError("ranks are missing")
    except ValueError as error:
        raise _unreadable(file, error) from error
    specials = {token: len(ranks) + place for place, token in enumerate(_GLM4_SPECIALS)}
    backend = Tokenizer(models.BPE(vocab=ranks | specials, merges=_merges(ranks), fuse_unk=False, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_GLM4_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in specials])
    backend.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", special_tokens=[(token, specials[token]) for token in ("[gMASK]", "<sop>")]
    )
    return backend


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """Return every way to join two tokens, in the original's order: by the rank of their union."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def _unreadable(file: Path, error: Exception) -> ModelError:
    if is_lfs_pointer(file):
        return ModelError(
            "{file} is a git-lfs pointer, not the vocabulary: run `git lfs pull` in {folder}.",
            file=file,
            folder=file.parent,
        )
    return ModelError(
        "the vocabulary {file} cannot be read ({reason}): download it again.",
        file=file,
        reason=str(error).splitlines()[0] if str(error) else type(error).__name__,
    )


@contextmanager
def no_cycles() -> Iterator[None]:
    """Switch Python's search for reference cycles off, which takes up to a third of the time of making many lists."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_BLANKS = re.compile(" {2,80}")
_SPELLED = re.compile(r"<n>|<\|tab\|>|<\|blank_(\d+)\|>")


def spell(text: str) -> str:
    """Write white space as ChatGLM-6B's vocabulary names it; runs of more than 80 blanks in several names."""
    text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
    return _BLANKS.sub(lambda run: f"<|blank_{len(run[0])}|>", text) if "  " in text else text


def unspell(text: str) -> str:
    """Undo `spell`."""

    def white_space(name: re.Match[str]) -> str:
        if name[1]:
            return " " * int(name[1]) if 2 <= int(name[1]) <= 80 else name[0]
        return "\n" if name[0] == "<n>" else "\t"

    return _SPELLED.sub(white_space, text)


def official_vocabulary(folder: Path) -> Path | None:
    """Return the official vocabulary file of a directory's tokenizer, None if it has another; `official/` of a saved
    model first, because that tokenizer never parses control strings.
    """
    if (folder / "official" / "layout.json").is_file():
        return official_vocabulary(folder / "official")
    config = read_json(folder / "tokenizer_config.json")
    is_named = "chatglm" in f"{config.get('auto_map', '')} {config.get('tokenizer_class', '')}".lower()
    if (folder / "ice_text.model").is_file():
        return folder / "ice_text.model"
    if (folder / "tokenizer.model").is_file():
        others = ("tokenizer_config.json", "tokenizer.json", "config.json")
        if (
            is_named
            or (folder / TOKENIZER_CODE).is_file()
            or architecture_of(read_json(folder / "config.json")) is not None
            # Nothing but the vocabulary: other families' directories have at least a tokenizer_config.json.
            or not any((folder / name).is_file() for name in others)
        ):
            return folder / "tokenizer.model"
    if is_named and not (folder / "tokenizer.json").is_file():
        raise ModelError(
            "'{folder}' has an official ChatGLM tokenizer, but not its vocabulary (ice_text.model or "
            "tokenizer.model): download it again.",
            folder=folder,
        )
    return None


def family_of(vocabulary: Path) -> Family:
    """Return whose an official vocabulary is; `auto` where no role tokens or names tell ChatGLM2 from ChatGLM3."""
    if vocabulary.name == "ice_text.model":
        return Family.chatglm
    with vocabulary.open("rb") as file:  # glm-4's is text, "base64 rank" per line; the others' sentencepiece's
        is_tiktoken = re.match(rb"[A-Za-z0-9+/=]+ \d+\r?\n", file.read(1024)) is not None
    return Family.glm4 if is_tiktoken else named_family(vocabulary.parent)


def image_tokens(vocabulary: Path) -> int:
    """Return the number of ids before ChatGLM-6B's first piece: 0, or 20,000 in the repository's first months."""
    folder = vocabulary.parent
    first = read_json(folder / "config.json").get("bos_token_id")
    named = read_json(folder / "tokenizer_config.json").get("num_image_tokens")
    if first is None:
        return int(named or 0)
    sop = int(load_pieces(vocabulary).piece_to_id("<sop>"))
    offset = int(first) - sop
    if offset not in (0, 20000) or (named is not None and offset != named):
        raise ModelError(
            "{file} is of another revision than the model next to it: <sop> is {sop} there, and "
            "{first} in config.json (bos_token_id). Download tokenizer and model from the same "
            "revision.",
            file=vocabulary,
            sop=sop + int(named or 0),
            first=first,
        )
    return offset


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object, {} if there is none; a damaged one is reported by whoever needs it."""
    try:
        value = json.loads(read_text(file))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
