"""A directory of quantized weights, written in 16 bits, with layers for multi-token prediction, which no model of
transformers has.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from transformers.utils.hub import convert_file_size_to_int

from toolkit.export.shards import write_shards
from toolkit.export.write import ExportOptions, atomic_directory
from toolkit.messages import ConfigError, tr
from toolkit.models import directory
from toolkit.models.dequantize import QuantizedFiles
from toolkit.terminal import phase

_NOT_COPIED = re.compile(
    r"\..*|config\.json|hf_quant_config\.json|quant(ize)?_config\.json|manifest\.json"
    r"|.*\.(safetensors|bin|pt|pth|gguf|h5|msgpack|onnx|py|index\.json)"
)
"""Hidden files, those that are made again or say how the weights are quantized, weights in any format, and code."""


def write_dequantized(source: Path, folder: Path, options: ExportOptions) -> None:
    """Write the model of a directory of quantized weights to `folder`, which must not exist, in 16 bits.

    Raises:
        ModelError: the way of quantization is not one that can be read, or the files are damaged.
        ConfigError: another layout or part of the model is asked for.
    """
    if options.text_only or options.format != "hf":
        raise ConfigError(tr("quantized weights are written in 16 bits first: remove text_only= and format=."))
    directory.check_weight_files(source, None)
    files, config = QuantizedFiles(source, options.precision), directory.read_object(source / "config.json")
    with atomic_directory(folder) as temporary:
        temporary.mkdir()
        _write_weights(_values(files), temporary, folder, convert_file_size_to_int(options.max_shard_size))
        for file in source.iterdir():
            if file.is_file() and not _NOT_COPIED.fullmatch(file.name):
                shutil.copyfile(file, temporary / file.name)
        for section in directory.sections_of(config):
            for key in (*directory.QUANTIZATION_KEYS, "auto_map"):  # its code is not copied
                section.pop(key, None)
        config = {key: value for key, value in config.items() if key != "torch_dtype"}
        config["dtype"] = str(files.dtype).removeprefix("torch.")
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _values(files: QuantizedFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of all tensors of the copy: those of 16 bits in its precision, and others as they are."""
    with phase(tr("Writing weights in 16 bits"), len(files)) as advance:
        for name, info in files.items():
            is_rounded = info.dtype in (torch.float16, torch.bfloat16)
            with files.open(name) as value:
                yield name, value.to(files.dtype if is_rounded else value.dtype, copy=True)
            advance(1)


def _write_weights(values: Iterable[tuple[str, torch.Tensor]], folder: Path, final: Path, most: int) -> None:
    """Write tensors to files of at most `most` bytes, or of one tensor, with an index. `final`: see `write_shards`."""
    # How many files there are, which their names say, is known once all are written: they are renamed then.
    shards, total = write_shards(values, folder, final, most, "{}.safetensors")
    files = [*dict.fromkeys(shards.values())]
    names = {file: f"model-{number:05}-of-{len(files):05}.safetensors" for number, file in enumerate(files, 1)}
    for file, name in names.items():
        (folder / file).rename(folder / name)
    weight_map = {tensor: names[file] for tensor, file in sorted(shards.items())}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
