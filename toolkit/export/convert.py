"""Models and adapters that were exported before, or come from elsewhere, in another form."""

from pathlib import Path

from toolkit.export.card import FILE as CARD
from toolkit.export.checkpoint import Wanted, collect, export_part, nothing_to_merge
from toolkit.export.folder import write_folder
from toolkit.export.tuned import merged, part_of_adapter
from toolkit.models import probe
from toolkit.models.chat import AnyChatEncoder, load_chat_encoder
from toolkit.models.chatglm.vocabulary import official_vocabulary
from toolkit.models.load import empty, load_model
from toolkit.models.save import describe


def convert(path: Path, folder: Path, wanted: Wanted, family: str = "auto") -> None:
    """Write a model folder in another layout or precision.

    Args:
        path: official, or transformers' layout.
        folder: must not exist.
        wanted: how.
        family: see `load_chat_encoder`.

    Raises:
        ConfigError: there is nothing to be merged.
        ModelError: the model cannot be loaded, or there is no official layout to go back to.
        CheckpointError: it cannot be written.
    """
    if wanted.merge:
        raise nothing_to_merge()
    model = load_model(path, dtype=wanted.precision)
    before = probe.read(path)
    ids = probe.spread_ids(model.config) if before is None else before.ids
    files, taken = describe(model, _encoder(path, family)), probe.take(model, ids)
    write_folder(model, files, folder, wanted.format, taken, max_shard_size=wanted.max_shard_size)


def export_adapter_folder(path: Path, folder: Path, wanted: Wanted, base: str = "", family: str = "auto") -> None:
    """Put an adapter into the weights of its base, or copy it.

    Args:
        path: the adapter.
        folder: must not exist.
        wanted: how.
        base: folder of the base; "" finds it.
        family: see `load_chat_encoder`.

    Raises:
        ConfigError: it cannot be merged.
        ModelError: the base is not there, or another one.
        CheckpointError: it cannot be written.
    """
    part = part_of_adapter(path, base)
    precision = wanted.precision or next(iter(part.values.values())).dtype
    model = empty(part.base)
    model.to(precision)
    own_tokenizer = (path / "tokenizer_config.json").is_file()
    files = describe(model, _encoder(path if own_tokenizer else part.base, family))
    if (path / CARD).is_file():
        files[CARD] = (path / CARD).read_bytes()
        if wanted.merge:
            files[CARD] = files[CARD].replace(b'library_name: "peft"', b'library_name: "transformers"', 1)
    export_part(
        part,
        folder,
        wanted,
        files,
        probe.read(path),
        lambda scratch: collect(*merged(part), path, precision, scratch),
    )


def _encoder(folder: Path, family: str) -> AnyChatEncoder | None:
    """Return a folder's tokenizer, None where it has none."""
    has_one = official_vocabulary(folder) is not None or (folder / "tokenizer.json").is_file()
    return load_chat_encoder(folder, family=family) if has_one else None
