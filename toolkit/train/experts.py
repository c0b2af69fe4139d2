"""Load of a mixture-of-experts model's experts: figures for metrics.jsonl, tokens per expert for the report."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit import disk
from toolkit.data.sampler import Position
from toolkit.distributed import process_group
from toolkit.models.router_loss import Routers, expert_load_metrics
from toolkit.train.hooks import Hook
from toolkit.train.step import StepResult

if TYPE_CHECKING:
    from toolkit.train.throughput import RankTimes


class ExpertFigures(Hook):
    """Adds up the tokens that each expert was routed, over the steps between two logs."""

    def __init__(self, routers: Routers, folder: Path) -> None:
        self.routers, self.folder = routers, folder
        self.loads: torch.Tensor | None = None

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Add the step's tokens per expert, and drop them from `result`, which is kept and would hold GPU memory."""
        if result.expert_loads is not None:
            self.loads = result.expert_loads if self.loads is None else result.expert_loads + self.loads
            result.expert_loads = None

    def at_log(self, step: int, position: Position, times: "RankTimes") -> dict[str, float]:
        """Return figures of load balance since the last log; rank 0 also writes experts.json, for the report."""
        if self.loads is None:
            return {}
        loads, self.loads = self.loads.cpu(), None
        table = self.routers.table(loads)
        if process_group.rank() == 0:
            content = json.dumps({"step": step, "loads": table}).encode() + b"\n"
            with suppress(OSError):  # a full disk has been reported by what has to be saved
                disk.write_atomically(self.folder / "experts.json", content)
        return expert_load_metrics(table.values()) | self.routers.dropped(loads)

    def at_rewind(self, step: int) -> None:
        """Forget the tokens of steps that are repeated after a rewind."""
        self.loads = None
