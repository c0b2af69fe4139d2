"""Whether torch.compile compiled anything: it may give up on every layer, and a run goes on as fast as without it."""

import torch

from toolkit.messages import warn
from toolkit.train.hooks import Hook
from toolkit.train.step import StepResult


class CompileCheck(Hook):
    """Warns after the first step if no graph was compiled."""

    def __init__(self) -> None:
        self.is_done = False

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Look once at PyTorch's count of graphs of this process."""
        if self.is_done:
            return
        self.is_done = True
        if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
            warn(
                "compile.enabled = true has compiled nothing: torch.compile gave up on every layer, and steps are no "
                "faster than without it. TORCH_LOGS=graph_breaks in the environment tells why."
            )
