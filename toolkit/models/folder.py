"""What a model folder on disk holds, found out without torch and without running anything in it."""

import json
from pathlib import Path
from typing import Any

from toolkit.errors import ModelError
from toolkit.messages import tr

LFS_POINTER = b"version https://git-lfs"


def read_config(path: str) -> dict[str, Any]:
    """Return config.json of a folder that transformers can load without remote code.

    Args:
        path: local folder.

    Raises:
        ModelError: no folder, no config.json, an official ChatGLM folder, code instead of a known architecture,
            missing, half-downloaded or pickled weights.
    """
    folder = Path(path)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ModelError(
            tr(
                "model.path = {path} holds no config.json: it is not a model folder in transformers' layout.",
                path=path,
            )
        )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(tr("{file} is not JSON: {reason}", file=config_file, reason=error)) from error
    _refuse_remote_code(folder, config)
    _check_weights(folder)
    return config


def _refuse_remote_code(folder: Path, config: dict[str, Any]) -> None:
    """Official ChatGLM folders must not reach transformers: `GlmForCausalLM.from_pretrained` on one raises nothing
    and builds a random 40-layer model, `AutoConfig` asks a question on stdin (transformers 5.23).
    """
    if config.get("model_type") == "chatglm" or "padded_vocab_size" in config or "position_encoding_2d" in config:
        raise ModelError(
            tr(
                "{folder} is an official ChatGLM folder, whose weights need their own loader; this version reads "
                "transformers' layout only (model_type glm, for example zai-org/glm-4-9b-chat-hf). Nothing was loaded.",
                folder=folder,
            )
        )
    if "auto_map" in config or "_attn_implementation_internal" in config:
        raise ModelError(
            tr(
                "{folder}/config.json names Python code to run (auto_map): such models are not loaded. Use a folder "
                "whose architecture is part of transformers.",
                folder=folder,
            )
        )


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ModelError(tr("{file} names files outside of its folder: refused.", file=index))
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(
            tr(
                "{folder} lacks {files}, which its index lists: download them again.",
                folder=folder,
                files=missing,
            )
        )
    if not files:
        pickled = sorted(folder.glob("*.bin"))
        if pickled:
            raise ModelError(
                tr(
                    "{folder} has its weights in {file}, a pickle; only safetensors are read. Convert it once with "
                    "transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...).",
                    folder=folder,
                    file=pickled[0].name,
                )
            )
        raise ModelError(tr("{folder} holds no weights (*.safetensors).", folder=folder))
    for file in files:
        with file.open("rb") as handle:
            start = handle.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise ModelError(
                tr(
                    "{file} is a git-lfs pointer, not the weights: run `git lfs pull` in {folder}.",
                    file=file,
                    folder=folder,
                )
            )
        _check_complete(file)


def _check_complete(file: Path) -> None:
    """Compare a safetensors file's length with what its header says, so that half a download is told at once."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        header_bytes = int.from_bytes(handle.read(8), "little")
        if size < 8 or header_bytes > size - 8:
            raise ModelError(
                tr(
                    "{file} is cut short ({size} bytes): download it again.",
                    file=file,
                    size=size,
                )
            )
        try:
            header = json.loads(handle.read(header_bytes))
        except ValueError as error:
            raise ModelError(
                tr(
                    "{file} is not a safetensors file: {reason}",
                    file=file,
                    reason=error,
                )
            ) from error
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise ModelError(
            tr(
                "{file} has {size} bytes where its header says {expected}: download it again.",
                file=file,
                size=size,
                expected=expected,
            )
        )
