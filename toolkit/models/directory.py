"""Checks of a model directory, without torch and without running any of its Python files.

The keys of a config.json show which official ChatGLM architecture it is of; `models/chatglm/official_files.py` checks
the rest of such a directory.
"""

import fcntl
import hashlib
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from safetensors import safe_open

from toolkit.messages import (
    LARGEST_JSON_BYTES,
    CodeNotTrusted,
    ModelError,
    file_bytes,
    json_object,
    parsed_json,
    reading,
    tr,
)


class Architecture(str, Enum):
    """The two architectures behind `model_type: chatglm`."""

    v1 = "v1"
    """ChatGLM-6B: prefix attention, two-dimensional rotary positions; `toolkit.models.chatglm.modeling`."""
    glm = "glm"
    """ChatGLM2-6B, ChatGLM3-6B, CodeGeeX2-6B, glm-4-9b: what transformers calls GlmForCausalLM."""


BASE_FILE = "base.json"
"""In an adapter's directory or a checkpoint without frozen weights: what identifies the base model."""
MODELOPT_FILE = "hf_quant_config.json"
"""Where NVIDIA ModelOpt's exports say how they are quantized; config.json need not say it."""
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
"""Keys of config.json, or of a section of it, that say how weights are quantized."""
ADDED_TOKENS = "toolkit_tokens.json"
"""In the directory that `model.add_tokens` makes: its base, and token -> id."""


def architecture_of(config: dict[str, Any]) -> Architecture | None:
    """Return which official architecture a parsed config.json describes, None for any other model."""
    if "position_encoding_2d" in config or "inner_hidden_size" in config:
        return Architecture.v1
    if "padded_vocab_size" in config or "multi_query_group_num" in config:
        return Architecture.glm
    return None


_trusted: set[str] = set()
"""SHA-256 of the Python files that this process may run; by content, so that copies in exports are trusted too."""


def read_config(path: str, *, with_weights: bool = True) -> dict[str, Any]:
    """Return the config.json of a model directory, an official ChatGLM's too; ModelError if the directory cannot be
    used. `with_weights`: check the weight files too.
    """
    folder = Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelError("model.path = {path} holds no config.json: it is not a model directory.", path=path)
    config = read_object(config_file)
    check_sizes(config, config_file)
    architecture = architecture_of(config)
    _check_code_is_inside(folder, config, is_run=architecture is None)
    if architecture is not None:
        from toolkit.models.chatglm import official_files

        official_files.check_supported(config, architecture, folder)
    elif config.get("model_type") == "chatglm":
        raise ModelError(
            "{folder}/config.json has model_type chatglm, but the keys of no known ChatGLM: neither "
            "position_encoding_2d (ChatGLM-6B) nor padded_vocab_size (ChatGLM2, ChatGLM3, glm-4-9b).",
            folder=folder,
        )
    elif ("auto_map" in config or "_attn_implementation_internal" in config) and not is_trusted(folder):
        raise CodeNotTrusted(
            "{folder}/config.json names Python code to run (auto_map), which is rejected; there are "
            "{files}. Read them, then train with model.trust_remote_code=true, or use a directory "
            "whose architecture is part of transformers.",
            folder=folder,
            files=[str(file.relative_to(folder)) for file in code_files(folder)],
        )
    elif not isinstance(config.get("model_type"), str):
        raise ModelError("{folder}/config.json has no model_type: it describes no model.", folder=folder)
    if with_weights:
        check_weight_files(folder, architecture)
    return config


def added_tokens(folder: Path) -> dict[str, int]:
    """Return token -> id of those that `model.add_tokens` gave to the model in a directory, {} in any other."""
    return dict(read_json_or_empty(folder / ADDED_TOKENS).get("tokens", {}))


def sections_of(config: Mapping[str, Any]) -> list[Any]:
    """Return a config.json, and those of its values that are sections of it, such as text_config."""
    return [config, *(value for value in config.values() if isinstance(value, Mapping))]


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization_config of a config.json or of its text model's section, {} if there is none."""
    values = (section[key] for section in sections_of(config) for key in QUANTIZATION_KEYS if section.get(key))
    settings: Any = next(values, {})
    return settings if isinstance(settings, Mapping) else {"quant_method": settings}  # the method's name alone


def is_quantized(folder: Path) -> bool:
    """Whether a directory's weights are quantized."""
    settings = quantization_settings(read_json_or_empty(folder / "config.json"))
    return bool(settings) or (folder / MODELOPT_FILE).is_file()


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file."""
    return json_object(file, ModelError)


def trust_code(path: str) -> None:
    """Trust the Python files of a directory, as they are, to run in this process; ModelError if none of them would."""
    if not has_runnable_code(path):
        raise ModelError(
            "model.trust_remote_code = true has no effect: {folder} brings no code that would run (the "
            "official ChatGLM directories' is ignored). Remove it.",
            folder=path,
        )
    _trusted.update(_code_digests(Path(path)))


def has_runnable_code(path: str) -> bool:
    """Whether a directory's code would run if it were trusted; True for a directory without a config.json."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return True
    config = read_object(file)
    return architecture_of(config) is None and "auto_map" in config  # official ChatGLMs' code is never run


def _check_code_is_inside(folder: Path, config: dict[str, Any], *, is_run: bool) -> None:
    """Raise ModelError if a config names code that is not in the directory's own Python files, which alone are hashed.
    transformers (5.23) knows SUB/MODULE.CLASS, OWNER/NAME--MODULE.CLASS, and kernels OWNER/NAME for attention or
    experts. `is_run`: whether transformers would run the classes in `auto_map`.
    """
    modules = {file.stem for file in code_files(folder) if file.parent == folder}
    names = []
    for keys, text in _strings(config):
        if is_run and "auto_map" in keys:
            match = re.fullmatch(r"(\w+)\.\w+", text)
            if match is None or match[1] not in modules:
                names.append(text)
        elif "/" in text and any("_implementation" in key for key in keys):
            names.append(text)
    if names:
        raise ModelError(
            "{folder}/config.json names code outside of its Python files ({names}): rejected, trusted or not.",
            folder=folder,
            names=", ".join(names),
        )


def _strings(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the keys that lead to each string in a JSON value, without indices of lists, and the string."""
    if isinstance(value, str):
        yield keys, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _strings(inner, (*keys, key))
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, keys)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files: those that an index lists, or the single file; [] if there are none. If a directory has
    safetensors and pickles, the complete ones are returned; safetensors if both are complete, or neither.
    """
    listed: list[list[Path]] = []
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if not index.is_file():
            if (folder / single).is_file():
                listed.append([folder / single])
            continue
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError("{file} has no weight_map: download it again.", file=index)
        names = sorted(set(map(str, weight_map.values())))
        if any(Path(name).name != name for name in names):
            raise ModelError("{file} names files outside of its directory: rejected.", file=index)
        listed.append([folder / name for name in names])
    complete = [files for files in listed if all(file.is_file() for file in files)]
    if listed:
        return (complete or listed)[0]
    shards = sorted(file.name for file in folder.glob("*-of-*") if file.suffix in (".safetensors", ".bin"))
    if shards:
        raise ModelError(
            "{folder} holds shards ({file} …) but not the index that lists them (*.index.json): download it again.",
            folder=folder,
            file=shards[0],
        )
    return []


def check_weight_files(folder: Path, architecture: Architecture | None) -> None:
    """Raise ModelError if weight files are missing, cut short, or pickles of another model than an official ChatGLM."""
    files = weight_files(folder)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            "{folder} lacks {files}, which its index lists: download them again.", folder=folder, files=missing
        )
    if not files:
        raise ModelError(
            "{folder} holds no weights (model.safetensors or pytorch_model.bin, or shards with an index).",
            folder=folder,
        )
    for file in files:
        size = file.stat().st_size
        if is_lfs_pointer(file):
            raise ModelError(
                "{file} is a git-lfs pointer, not the weights: run `git lfs pull` in {folder}.",
                file=file,
                folder=folder,
            )
        if file.suffix == ".safetensors":
            _check_safetensors(file, size)
        elif architecture is None:
            raise ModelError(
                "{folder} has its weights in {file}, a pickle; of other models than ChatGLM only safetensors are "
                "read. Convert it once with transformers: "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...).",
                folder=folder,
                file=file.name,
            )
        # A torch file is a zip archive, with its table of contents at the end: half a download has none.
        elif size == 0 or (_starts_with(file, b"PK\x03\x04") and not zipfile.is_zipfile(file)):
            raise ModelError("{file} is cut short ({size} bytes): download it again.", file=file, size=size)


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is what git leaves in place of a large one that was not fetched."""
    return _starts_with(file, b"version https://git-lfs")


def _starts_with(file: Path, content: bytes) -> bool:
    with reading(file, ModelError), file.open("rb") as handle:
        return handle.read(len(content)) == content


def _check_safetensors(file: Path, size: int) -> None:
    """Raise ModelError if a safetensors file of `size` bytes is cut short or damaged, by its header."""
    with reading(file, ModelError), file.open("rb") as handle:
        header_bytes = int.from_bytes(handle.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, LARGEST_JSON_BYTES):
            raise ModelError("{file} is cut short ({size} bytes): download it again.", file=file, size=size)
        with reading(file, ModelError, tr("Download it again.")):
            header = parsed_json(handle.read(header_bytes))
            tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
            expected = 8 + header_bytes + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if size != expected:
        raise ModelError(
            "{file} has {size} bytes where its header says {expected}: download it again.",
            file=file,
            size=size,
            expected=expected,
        )
    with reading(file, ModelError, tr("Download it again.")), safe_open(file, framework="numpy") as opened:
        opened.keys()  # the library's own rules for a header: shapes, offsets, types
    if empty := [name for name, entry in tensors.items() if 0 in entry["shape"]]:
        raise ModelError("{file} holds tensors without content: {names}. Export it again.", file=file, names=empty[:5])


def saved_template(folder: Path) -> Any:
    """Return the chat template in a directory, None if it has none; a list if an older tokenizer has several."""
    file, settings = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if file.is_file():
        return file.read_bytes().decode(errors="replace")
    return read_object(settings).get("chat_template") if settings.is_file() else None


def code_files(folder: Path) -> list[Path]:
    """Return the Python files of a directory and its subdirectories, all of which may run if the code is trusted."""
    return sorted(folder.rglob("*.py"))


_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


def processor_files(folder: Path) -> dict[str, bytes]:
    """Return the content of the configs of image, video and sound processors in a directory, by file name."""
    with reading(folder, ModelError):
        return {name: file_bytes(folder / name) for name in _PROCESSORS if (folder / name).is_file()}


def is_trusted(folder: Path) -> bool:
    """Whether a directory has Python files, and all of them are trusted."""
    digests = _code_digests(folder)
    return bool(digests) and digests <= _trusted


def _code_digests(folder: Path) -> set[str]:
    return {hashlib.sha256(file.read_bytes()).hexdigest() for file in code_files(folder)}


@contextmanager
def lock_module_cache() -> Iterator[None]:
    """Lock transformers' module cache against this machine's other processes: transformers (5.23) copies a directory's
    code there, and imports it, without a lock.
    """
    from transformers.utils.hub import HF_MODULES_CACHE

    cache = Path(HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "toolkit.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# Key of config.json -> smallest and largest value; published models have much less than the latter.
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), (1, 4096)),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), (1, 1 << 16)),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), (0, 1 << 16)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), (0, 1 << 16)),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), (1, 1 << 26)),
    **dict.fromkeys(("hidden_size", "n_embd"), (1, 1 << 24)),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "inner_hidden_size", "head_dim", "kv_channels"), (0, 1 << 24)
    ),
    **dict.fromkeys(("pre_seq_len", "num_virtual_tokens"), (0, 1 << 20)),
    "r": (1, 1 << 16),
}
_FRACTIONS = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps"), (0, 1)),
    **dict.fromkeys(("rope_theta", "rope_ratio", "initializer_range"), (0, 1e12)),
    "partial_rotary_factor": (0, 1),
}
"""The same for floats; with values outside of these every output is NaN."""
_REQUIRED_KEYS = ("num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size")


def check_sizes(config: Mapping[str, Any], file: Path) -> None:
    """Raise ModelError if a config.json or adapter_config.json (`file`, for the message), or a section of it such as
    text_config, has a value for a key of `_SIZES` or `_FRACTIONS` that is no number, or is out of its range.
    """
    limits: dict[str, tuple[float, float]] = {**_SIZES, **_FRACTIONS}
    for section in sections_of(config):
        for key in (name for name in limits if name in section):
            value, is_size = section[key], key in _SIZES
            if value is None and key not in _REQUIRED_KEYS:  # transformers takes its default
                continue
            numbers = value if is_size and isinstance(value, list) else [value]  # a list has one for each layer
            for number in numbers:
                if not _is_number_within(number, limits[key], is_whole=is_size):
                    raise ModelError(
                        "{file}: {key} = {value} is not {kind} from {least} to {most}. Correct it, or download the "
                        "file again.",
                        file=file,
                        key=key,
                        value=repr(number)[:40],
                        kind=tr("a whole number") if is_size else tr("a number"),
                        least=limits[key][0],
                        most=f"{limits[key][1]:,.0f}",
                    )


def _is_number_within(value: Any, limits: tuple[float, float], is_whole: bool) -> bool:
    """Whether a value of a JSON file is a number, a whole one if `is_whole`, from the first limit to the second."""
    is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
    return is_number and limits[0] <= value <= limits[1]


def read_json_or_empty(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if there is none or it is damaged."""
    try:
        value = parsed_json(file_bytes(file))
    except (ValueError, OSError):
        return {}
    return value if isinstance(value, dict) else {}
