"""What metrics.jsonl says of an order of the data that changes: a curriculum, or weights of sources."""

from typing import TYPE_CHECKING

from toolkit.data.sampler import Position
from toolkit.train.hooks import Hook

if TYPE_CHECKING:
    from toolkit.train.task import RunContext, Task
    from toolkit.train.throughput import RankTimes


class OrderFigures(Hook):
    """Logs the curriculum's progress or each source's share, which change over the steps."""

    def at_begin(self, run: "RunContext", task: "Task") -> None:
        """Keep the task, which knows the order of its data."""
        self.task = task

    def at_log(self, step: int, position: Position, times: "RankTimes") -> dict[str, float]:
        """Return the task's figures about the data order of the step that began at `position`, for metrics.jsonl."""
        return self.task.order_metrics(position)
