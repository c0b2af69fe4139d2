"""The family's tokenizers, from the official vocabulary files, with the original's ids; also whose a directory's is.

In memory, special tokens in a text are text, so that no user ends a turn; programs that load what `save_pretrained`
writes do parse them.
"""

import base64
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from toolkit.config.schema import Family
from toolkit.messages import ModelError
from toolkit.models import directory, old_names
from toolkit.models.chatglm import formats
from toolkit.models.chatglm.official_files import named_family

_COMMANDS = ["[MASK]", "[gMASK]", "[sMASK]", formats.SOP, formats.EOP]
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


def load_pieces(file: Path) -> SentencePieceProcessor:
    """Return a sentencepiece model."""
    return SentencePieceProcessor(model_file=str(file))


def sentencepiece_bpe(file: Path, roles: bool) -> Tokenizer:
    """Return the tokenizer of an official vocabulary: ChatGLM2's, or with `roles`, the tokens of roles, ChatGLM3's."""
    pieces = load_pieces(file)
    size = pieces.get_piece_size()
    vocab = {pieces.id_to_piece(index): index for index in range(size)}
    ranks = {  # of the pieces that texts are made of
        piece: index
        for piece, index in vocab.items()
        if not (pieces.is_control(index) or pieces.is_byte(index) or pieces.is_unknown(index))
    }
    specials = [*_COMMANDS, *(_ROLES if roles else [])]
    vocab |= {token: size + offset for offset, token in enumerate(specials)}
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(ranks), unk_token="<unk>", byte_fallback=True, fuse_unk=False)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # `<|eop|>` has an id, but these formats never write it.
    added = ["<unk>", "<s>", "</s>", *(token for token in specials if token != formats.EOP)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in added])
    backend.post_processor = processors.TemplateProcessing(
        single=f"[gMASK] {formats.SOP} $A", special_tokens=[(token, vocab[token]) for token in ("[gMASK]", formats.SOP)]
    )
    return backend


def tiktoken_bpe(file: Path) -> Tokenizer:
    """Return glm-4's tokenizer from the official tokenizer.model; ValueError if tokens are missing in it."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters: dict[int, str] = bytes_to_unicode()  # the letter that stands for each byte
    ranks = {}
    for token, rank in (line.split() for line in file.read_bytes().splitlines() if line):
        ranks["".join(letters[byte] for byte in base64.b64decode(token, validate=True))] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("ranks are missing")
    specials = {token: len(ranks) + offset for offset, token in enumerate(_GLM4_SPECIALS)}
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
    """Return the pairs of tokens that join to a token, ordered by `ranks` of the joined token, then of the two."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        joinable = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(joinable, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


_BLANKS = re.compile(" {2,80}")
_SPELLED = re.compile(r"<n>|<\|tab\|>|<\|blank_(\d+)\|>")


def spell(text: str) -> str:
    """Write white space as ChatGLM-6B's vocabulary names it; runs of more than 80 blanks in several names."""
    text = text.replace("\n", "<n>").replace("\t", "<|tab|>")
    return _BLANKS.sub(lambda run: f"<|blank_{len(run[0])}|>", text) if "  " in text else text


def unspell(text: str) -> str:
    """Undo `spell`: replace the vocabulary's names of white space, of which those of 2 to 80 blanks exist, by it."""

    def white_space(name: re.Match[str]) -> str:
        if name[1]:
            return " " * int(name[1]) if 2 <= int(name[1]) <= 80 else name[0]
        return "\n" if name[0] == "<n>" else "\t"

    return _SPELLED.sub(white_space, text)


def family_of(vocabulary: Path) -> Family:
    """Return whose an official vocabulary is; `auto` where no role tokens or names tell ChatGLM2 from ChatGLM3."""
    if vocabulary.name == "ice_text.model":
        return Family.chatglm
    with vocabulary.open("rb") as file:  # glm-4's is text, "base64 rank" per line; the others' sentencepiece's
        is_tiktoken = re.match(rb"[A-Za-z0-9+/=]+ \d+\r?\n", file.read(1024)) is not None
    return Family.glm4 if is_tiktoken else named_family(vocabulary.parent)


def image_tokens(vocabulary: Path) -> int:
    """Return the number of ids before ChatGLM-6B's first piece: 0, or 20,000 in the repository's first months. It
    follows from the id of <sop> in the model's config.json; ModelError if the tokenizer's files say another number.
    """
    folder = vocabulary.parent
    model_sop = directory.read_json_or_empty(folder / "config.json").get("bos_token_id")
    configured = directory.read_json_or_empty(folder / "tokenizer_config.json").get("num_image_tokens")
    if model_sop is None:
        return int(configured or 0)
    sop = int(load_pieces(vocabulary).piece_to_id("<sop>"))
    offset = int(model_sop) - sop
    if offset not in (0, 20000) or (configured is not None and offset != configured):
        raise ModelError(
            "{file} is of another revision than the model next to it: <sop> is {sop} there, and "
            "{first} in config.json (bos_token_id). Download tokenizer and model from the same "
            "revision.",
            file=vocabulary,
            sop=sop + int(configured or 0),  # by the tokenizer's own files
            first=model_sop,
        )
    return offset


_OFFICIAL_NAMES = {"sop": formats.SOP, "eop": formats.EOP, "<bos>": "<s>", "<eos>": "</s>", "<pad>": "<unk>"}
_SETTINGS: dict[str, Any] = {
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}


class _Chats:
    """Conversations to ids without rendering them as text, so that control strings in messages stay text."""

    family: Family
    has_chat_format: bool
    vocabulary: Path
    own_template: str | None

    @property
    def format(self) -> formats.FamilyChatEncoder:
        """Return the family's chat format over this tokenizer."""
        return formats.FORMATS[self.family](self)

    @property
    def has_own_template(self) -> bool:
        """Return whether the chat template is still the family's."""
        return bool(self.chat_template == self.own_template)  # type: ignore[attr-defined]

    def _set_later(self) -> dict[str, Any]:
        """Return the attributes that `load_tokenizer` may set after the constructor, for pickles."""
        return {name: getattr(self, name) for name in ("chat_template", "split_special_tokens")}

    def apply_chat_template(self, conversation: Any, *args: Any, **options: Any) -> Any:
        """Return a conversation's ids exactly as the original builds them. As text (`tokenize=False`), and with rarer
        options, it goes transformers' way, which parses control strings in messages.
        """
        supported = {"add_generation_prompt", "tokenize", "tools", "return_dict", "return_tensors"}
        supported |= {"padding", "padding_side"}
        asks_for_ids = options.get("tokenize", True) and not args and set(options) <= supported
        if not (asks_for_ids and self.has_chat_format and self.has_own_template):
            tokenizer_options = {"split_special_tokens": False, **(options.pop("tokenizer_kwargs", None) or {})}
            return super().apply_chat_template(  # type: ignore[misc]
                conversation, *args, **options, tokenizer_kwargs=tokenizer_options
            )
        is_batch = bool(conversation) and not isinstance(conversation[0], dict)
        encoder = self.format
        to_pieces = encoder.question if options.get("add_generation_prompt") else encoder.conversation
        chats = conversation if is_batch else [conversation]
        encoded = encoder.encode_pieces(to_pieces(formats.with_tools(chat, options.get("tools"))) for chat in chats)
        ids = [token_ids for token_ids, _ in encoded]
        tensor_type = options.get("return_tensors")  # tensors have a row for a single conversation too
        out = self.pad(  # type: ignore[attr-defined]
            {"input_ids": ids if is_batch or tensor_type else ids[0]},
            padding=options.get("padding", False),
            padding_side=options.get("padding_side"),
            return_tensors=tensor_type,
        )
        return out if options.get("return_dict", True) else out["input_ids"]


class GlmTokenizer(_Chats, PreTrainedTokenizerFast):
    """ChatGLM2, ChatGLM3 and glm-4; `has_chat_format` is False where ChatGLM2 and ChatGLM3 cannot be told apart."""

    def __init__(self, family: Family, vocab_file: Path, has_chat_format: bool = True) -> None:
        self.family, self.vocabulary = family, vocab_file
        self.has_chat_format = has_chat_format
        self.own_template = formats.TEMPLATES[family] if has_chat_format else None
        if family is Family.glm4:
            # The official one writes the same, and describes tools. ChatGLM3's would write `sop` as text.
            official = directory.read_json_or_empty(vocab_file.parent / "tokenizer_config.json").get("chat_template")
            if isinstance(official, str):
                self.own_template = formats.SERVED_TURNS[family] + official
            backend = tiktoken_bpe(vocab_file)
            named = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
        else:
            backend = sentencepiece_bpe(vocab_file, roles=family is Family.chatglm3)
            named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
        super().__init__(
            tokenizer_object=backend,
            **named,
            chat_template=self.own_template,
            additional_special_tokens=_unnamed(backend, named),
            split_special_tokens=True,
            name_or_path=str(vocab_file.parent),
            **_SETTINGS,
        )

    def __reduce__(self) -> Any:
        return type(self), (self.family, self.vocabulary, self.has_chat_format), self._set_later()

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text as the bare vocabulary gives them: no special tokens, none parsed."""
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        with formats.no_cycles():
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def describe_tools(self, tools: Sequence[Any]) -> str | None:
        """Return the text of a system message about tools, None if the chat template has no words for them."""
        before = "[gMASK]<sop><|system|>"
        message = {"role": "system", "content": "", "tools": list(tools)}
        text = PreTrainedTokenizerFast.apply_chat_template(self, [message], tokenize=False)
        assert isinstance(text, str)
        return text.removeprefix(before) if text.startswith(before) and len(text) > len(before) else None

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Return the ids of tokens; ChatGLM2's and 3's special tokens by their original names too (`sop`, `<eos>`)."""
        names = {} if self.family is Family.glm4 else _OFFICIAL_NAMES
        if isinstance(tokens, str):
            return super().convert_tokens_to_ids(names.get(tokens, tokens))
        return super().convert_tokens_to_ids([names.get(token, token) for token in tokens])

    def save_pretrained(self, save_directory: Any, **options: Any) -> Any:
        """Save for programs without this package: tokenizer.json and tokenizer_config.json with a chat template."""
        named = {name: str(token) for name, token in self.special_tokens_map.items() if isinstance(token, str)}
        plain = PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer,
            **named,
            additional_special_tokens=_unnamed(self._tokenizer, named),
            chat_template=self.chat_template,
            **_SETTINGS | {"padding_side": self.padding_side},
        )
        written = plain.save_pretrained(save_directory, **options)
        old_names.add_to_tokenizer(Path(save_directory))
        return written


def _unnamed(backend: Any, named: dict[str, str]) -> list[str]:
    """Return the special tokens that have no name such as eos_token."""
    added = [token.content for _, token in sorted(backend.get_added_tokens_decoder().items())]
    return [token for token in added if token not in named.values()]


class ChatGLMTokenizer(_Chats, PreTrainedTokenizer):
    """ChatGLM-6B's ice_text.model, by sentencepiece: the fast Unigram differs on decomposed accents and on ties.
    A token's id is that of its sentencepiece piece plus `offset`: 0; in the repository's first months, when the
    vocabulary had 150,528 rows, 20,000, as ids of image tokens stood before those of text.
    """

    vocab_files_names: ClassVar = {"vocab_file": "ice_text.model"}
    family = Family.chatglm
    has_chat_format = True

    def __init__(self, vocab_file: Path, offset: int = 0) -> None:
        self.vocabulary, self.offset = vocab_file, offset
        self.pieces: Any = load_pieces(vocab_file)
        if self.pieces.piece_to_id("<sop>") == self.pieces.unk_id():
            raise ModelError("{file} is not ChatGLM-6B's vocabulary: it has no <sop>.", file=vocab_file)
        size = self.pieces.get_piece_size()
        self.ids = {self.pieces.id_to_piece(index): index + offset for index in range(size)}
        self.own_template = formats.TEMPLATES[Family.chatglm]
        super().__init__(
            bos_token="<sop>",
            eos_token="<eop>",
            unk_token="<unk>",
            pad_token="<pad>",
            mask_token="[MASK]",
            additional_special_tokens=["[gMASK]", "[sMASK]"],
            chat_template=self.own_template,
            split_special_tokens=True,
            name_or_path=str(vocab_file.parent),
            **_SETTINGS,
        )

    def __reduce__(self) -> Any:
        return type(self), (self.vocabulary, self.offset), self._set_later()

    @property
    def vocab_size(self) -> int:
        """Return one more than the highest id."""
        return int(self.pieces.get_piece_size()) + self.offset

    def __len__(self) -> int:
        return self.vocab_size

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        return dict(self.ids)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text as the bare vocabulary gives them: no special tokens, none parsed."""
        with formats.no_cycles():
            ids: list[list[int]] = self.pieces.encode([spell(text) for text in texts], num_threads=-1)
            return [[index + self.offset for index in row] for row in ids] if self.offset else ids

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Return `context [gMASK] <sop>`, and `answer <eop>` after it if a second text is given."""
        ids = [*token_ids_0, self.ids["[gMASK]"], self.ids["<sop>"]]
        return ids if token_ids_1 is None else [*ids, *token_ids_1, self.ids["<eop>"]]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Copy ice_text.model."""
        prefix = f"{filename_prefix}-" if filename_prefix else ""
        return (shutil.copyfile(self.vocabulary, f"{save_directory}/{prefix}ice_text.model"),)

    def save_pretrained(self, save_directory: Any, **options: Any) -> Any:
        """Save in the official layout: no other program reads this vocabulary correctly."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        files = self.save_vocabulary(str(folder))
        config = {
            "tokenizer_class": "ChatGLMTokenizer",
            "name_or_path": "chatglm-6b",
            "num_image_tokens": self.offset,
            "chat_template": self.chat_template,
            **{name: str(token) for name, token in self.special_tokens_map.items() if isinstance(token, str)},
        }
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        return (*files, str(path))

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens; padding is none."""
        return unspell(self.pieces.decode_pieces([token for token in tokens if token != "<pad>"]))

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        tokens: list[str] = self.pieces.encode(spell(text), out_type=str)
        return tokens

    def _convert_token_to_id(self, token: str) -> int:
        return self.ids.get(token, self.offset)  # that of the first piece, <unk>

    def _convert_id_to_token(self, index: int) -> str:
        inside = self.offset <= index < self.vocab_size
        return str(self.pieces.id_to_piece(index - self.offset)) if inside else "<unk>"
