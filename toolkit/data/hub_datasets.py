"""Files of what the library `datasets` has: a dataset on Hugging Face, or one that it saved to a directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.config.schema import SourceConfig
from toolkit.messages import DataError, json_object


def files_of_dataset(source: SourceConfig, streaming: bool) -> list[Path]:
    """Return the files of a dataset on Hugging Face: downloaded ones, or for `streaming` their URLs."""
    with _asking_hub(source):
        if not streaming:
            return _download(source)
        from toolkit.data import remote

        return remote.files_of_hub(source)


def check_reachable(source: SourceConfig, streaming: bool) -> None:
    """Raise the DataError of `files_of_dataset` where neither cache nor Hugging Face has a dataset; download no row."""
    import datasets

    if streaming:
        files_of_dataset(source, streaming)  # only lists them
        return
    with _asking_hub(source):
        datasets.load_dataset_builder(source.hub, source.subset or None, revision=source.revision or None)


def _download(source: SourceConfig) -> list[Path]:
    """Download a dataset of Hugging Face, none of whose code is executed; return the Arrow files `datasets` makes."""
    import datasets

    data = datasets.load_dataset(
        source.hub, source.subset or None, split=source.split, revision=source.revision or None
    )
    return [Path(file["filename"]) for file in data.cache_files]


@contextmanager
def _asking_hub(source: SourceConfig) -> Iterator[None]:
    """Turn what the body raises while it asks for a dataset into a DataError; raise one for split=train[:10%]."""
    if "[" in source.split:
        raise DataError(
            "`split` = {split} selects rows, which is not known here: the files are read whole. Name a "
            "whole split, or save the selection with `datasets` (save_to_disk) and give its directory "
            "as `path`.",
            split=source.split,
        )
    import datasets

    try:
        yield
    except DataError:
        raise
    except ConnectionError as error:
        is_offline = datasets.config.HF_HUB_OFFLINE
        raise DataError(
            "'{name}' is neither a file here nor a dataset in the cache, and Hugging Face cannot be reached{offline}.\n"
            "Copy the cache from where it was loaded (HF_HOME), set a mirror (HF_ENDPOINT), or give a copy of its "
            "files: data.path=DIR.",
            name=source.hub,
            offline=" (HF_HUB_OFFLINE=1)" if is_offline else "",
        ) from error
    except Exception as error:  # whatever the library or the network raises, the user must choose something else
        raise DataError(
            "The dataset '{name}' cannot be had from Hugging Face ({reason}). Correct `hub`, `subset`, "
            "`split` or `revision`, or download it and give its directory as `path`.",
            name=source.hub,
            reason=f"{type(error).__name__}: {error}".splitlines()[0],
        ) from error


def files_saved_by_datasets(folder: Path, split: str) -> list[Path]:
    """Return the Arrow files of a dataset that `save_to_disk` of `datasets` wrote, [] if the directory is none.
    `split`: of a dataset that has several. DataError if it has not this one, or no row, or names files elsewhere.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _json_list(folder / "dataset_dict.json", "splits", str)
        if split not in splits:
            raise DataError(
                "The dataset '{path}' has no split '{split}'; it has {splits}. Choose one with `split`.",
                path=folder,
                split=split,
                splits=", ".join(splits),
            )
        folder = folder / split
    if not (folder / "state.json").is_file():
        return []
    files = _json_list(folder / "state.json", "_data_files", dict)
    if not files:
        raise DataError("{path} holds no row.", path=folder)
    names = [str(item.get("filename", "")) for item in files]
    if any(name in ("", "..") or Path(name).name != name for name in names):
        raise DataError("{file} names files outside of its directory: rejected.", file=folder / "state.json")
    return [folder / name for name in names]


def _json_list(file: Path, key: str, item_type: type) -> list[Any]:
    """Return the list of `item_type` under a key of a JSON file of `datasets`; a DataError if it is not there."""
    value = json_object(file, DataError).get(key)
    if not isinstance(value, list) or not all(isinstance(item, item_type) for item in value):
        raise DataError("{file} has no list '{key}': save the dataset again.", file=file, key=key)
    return value
