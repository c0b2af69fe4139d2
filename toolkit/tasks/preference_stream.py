"""Preference losses on a stream (`data.streaming`): pairs of answers are read as they are trained."""

from collections.abc import Mapping
from typing import Any

from toolkit.tasks.preference import PreferenceTask
from toolkit.tasks.stream import StreamTask


class PreferenceStreamTask(PreferenceTask, StreamTask):
    """Trains a causal language model on a stream of pairs of answers. A sequence of a lane is a pair."""

    def end_lines(self, summary: Mapping[str, Any]) -> list[str]:
        return [*super().end_lines(summary), *self.read_lines(summary)]

    def _size_of_data(self) -> str:
        return StreamTask._size_of_data(self)
