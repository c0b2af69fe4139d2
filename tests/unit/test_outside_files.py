"""JSON of any origin is read within bounds, by one reader: what is none is one message, and takes no memory or time."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.checkpoint.directory import MANIFEST, STATE, read_header
from toolkit.checkpoint.intact import read_manifest, read_run_state
from toolkit.config import files
from toolkit.data import store
from toolkit.engine.ds_import import read_json
from toolkit.extras.translate.read import read_all
from toolkit.messages import (
    ConfigError,
    DataError,
    ModelError,
    Problems,
    ToolkitError,
    file_bytes,
    json_object,
    parsed_json,
)
from toolkit.models import directory

BAD = {
    "deep": "[" * 100_000,
    "deep object": '{"a":' * 100_000,
    "digits": '{"a": ' + "9" * 5000 + "}",
    "nan": '{"a": NaN}',
    "not utf-8": "\udcff",
    "empty": "",
}
MAY_HOLD = {"recipe": ("nan", "empty"), "state": ("nan",), "checkpoint": ("nan",)}
"""What is no fault: YAML's NaN, and losses that are not known yet."""
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "deepspeed": ("ds.json", lambda file: read_json(str(file), Problems())),
    "import-config": ("c.json", lambda file: read_all([str(file)], None)),
    "recipe": ("r.yaml", files.read),
    "checkpoint": (MANIFEST, lambda file: read_manifest(file.parent)),
    "state": (STATE, lambda file: read_run_state(file.parent)),
    "model": ("config.json", lambda file: json_object(file, ModelError)),
}


CASES = [(reader, content) for reader in READERS for content in BAD if content not in MAY_HOLD.get(reader, ())]


@pytest.mark.parametrize(("reader", "content"), CASES)
def test_json_that_is_none(reader: str, content: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    (tmp_path / name).write_bytes(BAD[content].encode(errors="surrogateescape"))
    with pytest.raises(ToolkitError) as error:
        read(tmp_path / name)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("content", BAD)
def test_what_may_be_missing_may_be_no_json(content: str, tmp_path: Path) -> None:
    """A cache is built again; a tokenizer is that of another family."""
    for name in (store.MANIFEST, "tokenizer_config.json"):
        (tmp_path / name).write_bytes(BAD[content].encode(errors="surrogateescape"))
    assert not store.is_complete(tmp_path)
    assert content == "digits" or directory.read_json_or_empty(tmp_path / "tokenizer_config.json") == {}


def test_a_deepspeed_json_has_finite_numbers(tmp_path: Path) -> None:
    """NaN ended in an assertion."""
    for value in ("NaN", "Infinity", "-Infinity", "1e999"):
        (tmp_path / "ds.json").write_text(f'{{"optimizer": {{"params": {{"lr": {value}}}}}}}')
        with pytest.raises(ConfigError, match=r"ds\.json is not JSON: (NaN|Infinity) is no number"):
            read_json(str(tmp_path / "ds.json"), Problems())


@pytest.mark.parametrize("reader", READERS)
def test_large_files_are_not_read(reader: str, tmp_path: Path) -> None:
    """Neither a sparse one of 64 GiB nor one of 50 MB, which took 6 GB as a DeepSpeed JSON."""
    name, read = READERS[reader]
    with open(tmp_path / name, "wb") as file:
        file.truncate(64 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ToolkitError):
        read(tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_a_deepspeed_json_is_as_small_as_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"a": list(range(200_000))}))
    with pytest.raises(ConfigError, match=r"is not JSON: it has more than 1,000,000 bytes"):
        read_json(str(tmp_path / "ds.json"), Problems())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reader", READERS)
def test_pipes_are_no_files(reader: str, tmp_path: Path) -> None:
    """A FIFO without a writer blocked for ever."""
    name, read = READERS[reader]
    os.mkfifo(tmp_path / name)
    with pytest.raises(ToolkitError, match="it is no file"):
        read(tmp_path / name)


def test_a_header_of_weights_is_bounded(tmp_path: Path) -> None:
    with open(tmp_path / "w.safetensors", "wb") as file:
        file.write((60 << 30).to_bytes(8, "little"))
        file.truncate(64 << 30)
    with pytest.raises(ValueError, match="it has no header"):
        read_header(tmp_path / "w.safetensors")


def test_infinity_is_a_number_of_models(tmp_path: Path) -> None:
    """Mamba-2: "time_step_limit": [0.0, Infinity]."""
    assert parsed_json("[0.0, Infinity]") == [0.0, float("inf")]
    with pytest.raises(ValueError, match="the key 'a' stands twice"):
        parsed_json('{"a": 1, "a": 2}', once=True)
    with pytest.raises(ValueError, match="it has more than 3 bytes"):
        (tmp_path / "x").write_text("four")
        file_bytes(tmp_path / "x", 3)


def test_a_cache_that_was_removed_is_named(tmp_path: Path) -> None:
    """Workers open it again; that was a traceback."""
    with pytest.raises(
        DataError, match=r"Cannot read '.*manifest\.json': No such file or directory\. If the tokenized"
    ):
        store.TokenizedCache(tmp_path / "gone", "train")
    (tmp_path / "cut").mkdir()
    manifest = {"fingerprint": "cut", "content": "", "files": [], "dtype": "uint16"}
    (tmp_path / "cut" / store.MANIFEST).write_text(json.dumps(manifest))
    for name in (store.IDS, store.OFFSETS):  # removed between its opening and theirs
        with pytest.raises(DataError, match=f"Cannot read '.*{name}': No such file or directory. If the tokenized"):
            store.TokenizedCache(tmp_path / "cut", "train")
        for file in (store.IDS, store.TRAINED):
            (tmp_path / "cut" / file).touch()
