"""What metrics.jsonl says of an order of the data that changes: a curriculum, or weights of sources."""

from typing import TYPE_CHECKING

from toolkit.data.sampler import Position
from toolkit.train.hooks import Hook

if TYPE_CHECKING:
    from toolkit.train.task import RunContext, Task
    from toolkit.train.throughput import RankTimes


class OrderFigures(Hook):
    """Logs how a step took its data."""

    def at_begin(self, run: "RunContext", task: "Task") -> None:
        """Learn what is trained, which knows its order."""
        self.task = task

    def at_log(self, step: int, position: Position, times: "RankTimes") -> dict[str, float]:
        """Return what the last step took."""
        return self.task.order_metrics(position)
