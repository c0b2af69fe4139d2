"""Official ChatGLM vocabularies: whether a directory has one, whose, and as a tokenizer.

Files become backends of the tokenizers library, and ChatGLM-6B's through sentencepiece.

Every recipe here gives the ids of the original on any text (tests compare with sentencepiece and tiktoken themselves).
Files are read as text; nothing is executed.
"""

import base64
import binascii
import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.config.schema import Family
from toolkit.errors import ModelError
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
# The words that glm-4's official tokenizer splits into before it looks for pairs, as tiktoken's cl100k_base does.
_GLM4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def is_tiktoken(file: Path) -> bool:
    """Return whether a vocabulary file is glm-4's (text, "base64 rank" per line) rather than sentencepiece's."""
    with file.open("rb") as handle:
        return re.match(rb"[A-Za-z0-9+/=]+ \d+\r?\n", handle.read(1024)) is not None


def load_pieces(file: Path) -> "SentencePieceProcessor":
    """Return a sentencepiece model."""
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise _unreadable(file, error) from error


def sentencepiece_bpe(file: Path, roles: bool) -> "Tokenizer":
    """Return ChatGLM2's and 3's tokenizer.

    `roles`: with ChatGLM3's role tokens.
    """
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

    ranks = _read_ranks(file)
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


def _read_ranks(file: Path) -> dict[str, int]:
    """Return token -> rank, tokens written in the 256 printable characters that stand for bytes."""
    letters = _byte_letters()
    ranks = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks["".join(letters[byte] for byte in base64.b64decode(token, validate=True))] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise _unreadable(file, error) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise _unreadable(file, ValueError("ranks are missing"))
    return ranks


def _byte_letters() -> list[str]:
    """Return the character that stands for each byte in byte-level BPE (GPT-2's table): itself where it is printable
    Latin-1, else the next free one from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(shifted)) for byte in range(256)]


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """Return every way to join two tokens to a third, in the order in which the original joins them.

    The original joins the neighbours whose union has the lowest rank; the tokenizers library wants pairs by priority.
    """
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


class IceText:
    """ChatGLM-6B's vocabulary, ice_text.model: sentencepiece with its own spelling of white space.

    The fast Unigram of the tokenizers library differs on decomposed accents and on ties, so sentencepiece itself is
    used. `offset`: ids before the first piece: 0, or 20,000 in the repository's first months (150,528 rows).
    """

    def __init__(self, file: Path, offset: int = 0) -> None:
        self.pieces: Any = load_pieces(file)
        self.offset = offset
        if self.pieces.piece_to_id("<sop>") == self.pieces.unk_id():
            raise ModelError("{file} is not ChatGLM-6B's vocabulary: it has no <sop>.", file=file)

    def encode(self, texts: list[str], num_threads: int = -1) -> list[list[int]]:
        """Return the ids of each text; special tokens in it are text like any other."""
        with no_cycles():
            ids: list[list[int]] = self.pieces.encode([_spell(text) for text in texts], num_threads=num_threads)
            if self.offset:
                ids = [[index + self.offset for index in row] for row in ids]
        return ids

    def tokens(self, text: str) -> list[str]:
        """Return the pieces of a text."""
        tokens: list[str] = self.pieces.encode(_spell(text), out_type=str)
        return tokens

    def join(self, tokens: list[str]) -> str:
        """Return the text of pieces."""
        return _unspell(self.pieces.decode_pieces(tokens))

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Return piece -> id."""
        size = self.pieces.get_piece_size()
        return {self.pieces.id_to_piece(index): index + self.offset for index in range(size)}

    @cached_property
    def names(self) -> dict[int, str]:
        """Return id -> piece."""
        return {index: piece for piece, index in self.vocab.items()}


@contextmanager
def no_cycles() -> Iterator[None]:
    """Make many lists without Python's search for cycles: there are none, and it takes up to a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_BLANKS = re.compile(" {2,80}")
_SPELLED = re.compile(r"<n>|<\|tab\|>|<\|blank_(\d+)\|>")


def _spell(text: str) -> str:
    """Write white space as ChatGLM-6B's vocabulary names it; runs of more than 80 blanks in several names."""
    text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
    return _BLANKS.sub(lambda run: f"<|blank_{len(run[0])}|>", text) if "  " in text else text


def _unspell(text: str) -> str:
    def white_space(name: re.Match[str]) -> str:
        if name[1]:
            return " " * int(name[1]) if 2 <= int(name[1]) <= 80 else name[0]
        return "\n" if name[0] == "<n>" else "\t"

    return _SPELLED.sub(white_space, text)


def official_vocabulary(folder: Path) -> Path | None:
    """Return the official vocabulary file that a folder's tokenizer is made from; None if it is another tokenizer.

    A model saved in transformers' layout keeps the files it came with in `official/`; those are preferred, because in
    memory they give a tokenizer that never parses control strings.
    """
    if (folder / "official" / "layout.json").is_file():
        return official_vocabulary(folder / "official")
    for name in ("ice_text.model", "tokenizer.model"):
        if (folder / name).is_file() and (name == "ice_text.model" or _is_official(folder)):
            return folder / name
    if "chatglm" in _classes(folder) and not (folder / "tokenizer.json").is_file():
        raise ModelError(
            "'{folder}' has an official ChatGLM tokenizer, but not its vocabulary (ice_text.model or "
            "tokenizer.model): download it again.",
            folder=folder,
        )
    return None


def _is_official(folder: Path) -> bool:
    if (folder / TOKENIZER_CODE).is_file() or "chatglm" in _classes(folder):
        return True
    if architecture_of(read_json(folder / "config.json")) is not None:
        return True
    # Nothing but the vocabulary: other families' folders have at least a tokenizer_config.json.
    return not any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json", "config.json"))


def _classes(folder: Path) -> str:
    config = read_json(folder / "tokenizer_config.json")
    return f"{config.get('auto_map', '')} {config.get('tokenizer_class', '')}".lower()


def family_of(vocabulary: Path) -> Family:
    """Return whose tokenizer an official vocabulary is; `auto` where ChatGLM2 and ChatGLM3 cannot be told apart.

    Their vocabulary is the same file. What tells them apart are ChatGLM3's role tokens and their names in the files
    beside it.
    """
    if vocabulary.name == "ice_text.model":
        return Family.chatglm
    if is_tiktoken(vocabulary):
        return Family.glm4
    return named_family(vocabulary.parent)


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
            "{file} is of another revision than the model beside it: <sop> is {sop} there, and {first} in "
            "config.json (bos_token_id). Download tokenizer and model from the same revision.",
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
