"""metrics.csv in the run folder: metrics.jsonl as a table, one column per metric."""

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence

from toolkit.track.backends import EVAL, TRAIN, Backend, Row, TrackedRun
from toolkit.track.metrics import append_rows


class CsvFile(Backend):
    """Written anew with the first rows of a session, and when there is a new column; otherwise appended to."""

    redoes = True
    most_rows = sys.maxsize

    def begin(self, run: TrackedRun) -> None:
        """Make the file, without rows; one of an earlier session stays until its rows are there again."""
        self.path = run.folder / "metrics.csv"
        self.columns = ["step"]
        self.is_old = self.path.exists()
        if not self.is_old:
            self._write(self.columns, [])

    def held(self) -> dict[str, int]:
        """A run that goes on has all its rows written again."""
        return {TRAIN: -1, EVAL: -1}

    def take_back(self, step: int) -> None:
        """Leave out the rows after a step."""
        if not self.is_old:
            self._write(self.columns, [row for row in self._read() if int(row["step"]) <= step])

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows; an empty cell is a metric that a row does not have."""
        cells = [
            {"step": str(step)}
            | {name: str(int(value) if value.is_integer() else value) for name, value in values.items()}
            for step, values in rows
        ]
        columns = list(dict.fromkeys([*self.columns, *(name for row in cells for name in row)]))
        is_there = self.path.exists() and not self.is_old
        if is_there and columns == self.columns:
            append_rows(self.path, _text(columns, cells))
            return
        self._write(columns, [*(self._read() if is_there else []), *cells])
        self.columns, self.is_old = columns, False  # not before: without room for it, it is tried again

    def summary(self, step: int, values: Mapping[str, float]) -> None:
        """Skip it: the table holds logged steps and evaluations only."""

    def _read(self) -> list[dict[str, str]]:
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def _write(self, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
        temporary = self.path.with_suffix(".csv.tmp")
        temporary.write_bytes(_text(columns, [dict(zip(columns, columns, strict=True)), *rows]))
        temporary.replace(self.path)


def _text(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns).writerows(rows)
    return text.getvalue().encode()
