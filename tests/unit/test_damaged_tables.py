"""Damaged Arrow and Parquet files: never a crash, always a message that names the file."""

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.unit.data_tools import run_config
from tests.unit.test_strange_files import message

COUNT = 240
READ = """
import sys
from pathlib import Path
from toolkit.data.readers import blocks
from toolkit.messages import DataError

for name in sys.argv[1:]:
    print("begin", name, flush=True)
    try:
        rows = sum(len(block.content) for block in blocks(Path(name), 1 << 20))
        print("read", rows)
    except DataError as error:
        assert name in str(error), error
        print("message", error)
"""


def intact(folder: Path) -> dict[str, bytes]:
    """Return good files of every form."""
    table = pyarrow.table(
        {
            "prompt": [f"question {number} " * (number % 7 + 1) for number in range(300)],
            "response": [f"answer {number}" for number in range(300)],
            "history": [[["a", "b"]] * (number % 3) for number in range(300)],
            "system": pyarrow.array(["x", "y", "z"] * 100).dictionary_encode(),
        }
    )
    found = {}
    forms: dict[str, Callable[..., Any]] = {"file": pyarrow.ipc.new_file, "stream": pyarrow.ipc.new_stream}
    for packing in (None, "zstd", "lz4"):
        for name, writer in forms.items():
            path = folder / f"{name}_{packing}.arrow"
            options = pyarrow.ipc.IpcWriteOptions(compression=packing)
            with pyarrow.OSFile(str(path), "wb") as file, writer(file, table.schema, options=options) as out:
                out.write_table(table, max_chunksize=100)
            found[path.name] = path.read_bytes()
    for packing in ("none", "snappy", "zstd"):
        path = folder / f"{packing}.parquet"
        pyarrow.parquet.write_table(table, path, compression=packing)
        found[path.name] = path.read_bytes()
    return found


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Return a file cut short, overwritten, or with a piece missing."""
    kind, place, size = dice.randrange(5), dice.randrange(len(content)), dice.randrange(1, 200)
    if kind == 0:
        return content[: place + 1]
    if kind == 1:
        return content[:place] + dice.randbytes(min(size, 20)) + content[place + min(size, 20) :]
    if kind == 2:
        return content[:place] + dice.randbytes(size) + content[place + size :]
    if kind == 3:
        number = dice.choice([b"\xff\xff\xff\x7f", b"\xff" * 4, b"\0" * 4, b"\0\0\0\x80"])
        return content[:place] + number + content[place + 4 :]
    return content[:place] + content[place + size :]


def test_damaged_tables_never_end_the_process(tmp_path: Path) -> None:
    good, dice, names = intact(tmp_path), random.Random(18), []
    for number in range(COUNT):
        form = dice.choice(sorted(good))
        path = tmp_path / f"{number}_{form}"
        path.write_bytes(damaged(good[form], dice))
        names.append(str(path))
    ran = subprocess.run([sys.executable, "-c", READ, *names], capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, (ran.returncode, lines[-1:], ran.stderr[-500:])
    said = [line for line in lines if not line.startswith("begin")]
    assert len(said) == COUNT
    assert sum(line.startswith("message") for line in said) > COUNT / 2  # the damage was real


def test_more_rows_than_bytes(tmp_path: Path) -> None:
    """Constant columns pack into nothing: a small file would give rows for days."""
    nothing = pyarrow.nulls(1 << 24)  # pyarrow takes a bit for each while it writes
    batch = pyarrow.record_batch({"prompt": nothing, "response": nothing})
    path = tmp_path / "d.arrow"
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, batch.schema) as out:
        out.write_batch(batch)
    assert message(run_config(tmp_path, str(path))).startswith(f"Cannot read '{path}': it claims 16,777,216 rows")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ("{}", "has no list '_data_files'"),
        ('{"_data_files": [{"filename": "../x.arrow"}]}', "names files outside"),
        ('{"_data_files": [{}]}', "names files outside"),
        ('{"_data_files": [{"filename": ".."}]}', "names files outside"),
    ],
)
def test_states_of_datasets(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text(content)
    found = message(run_config(tmp_path, str(tmp_path / "saved")))
    assert f"{tmp_path}/saved/state.json" in found
    assert said in found
