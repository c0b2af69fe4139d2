"""Which layouts, ZeRO stages and methods are tried together, for the tests that run them and the page that shows it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from shared import LORA, RECOMPUTE, STEADY

from toolkit.config.load import LoadedConfig, load
from toolkit.config.rules import check_rules
from toolkit.messages import ConfigError

LAYOUTS = {
    "tensor 2": ["parallel.tensor=2"],
    "sequence 2": ["parallel.sequence=2"],
    "pipeline 2": ["parallel.pipeline=2"],
    "tensor 2 x sequence 2": ["parallel.tensor=2", "parallel.sequence=2"],
    "tensor 2 x pipeline 2": ["parallel.tensor=2", "parallel.pipeline=2"],
}
"""How the ranks share one model; each row of the page is one of these at one ZeRO stage."""
TUNINGS = {
    "full": [],
    "freeze": ["tuning=freeze", "tuning.patterns=[*.mlp.*]", "tuning.last_layers=0"],
    "lora": [*LORA, "tuning.rank=4"],
    "qlora": [*LORA, "tuning=qlora", "tuning.rank=4"],
    "ptuning_v2": ["tuning=ptuning_v2", "tuning.num_tokens=4", "tuning.dropout=0", "optim.lr=0.01"],
    "prompt": ["tuning=prompt", "tuning.num_tokens=4", "optim.lr=0.01"],
}
STAGES = (0, 1, 2, 3)
OTHERS = {
    "data.packing=packed": ["data.packing=packed"],
    "train.activation_checkpointing.enabled=true": [RECOMPUTE],
    "kernels.mlp_pieces=3": ["kernels.mlp_pieces=3"],
    "compile.backend=aot_eager": ["compile=inductor", "compile.backend=aot_eager"],
}
"""What is tried with full fine-tuning at stage 0."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    layout: str
    stage: int
    tuning: str
    other: str = ""

    @property
    def ranks(self) -> int:
        """As few as the layout needs at even stages, twice as many at odd ones: two data-parallel groups."""
        shared = 1
        for word in LAYOUTS[self.layout]:
            shared *= int(word.partition("=")[2])
        return shared * (1 + self.stage % 2)

    @property
    def name(self) -> str:
        """Of its run."""
        parts = (self.layout, f"stage{self.stage}", self.tuning, *OTHERS.get(self.other, [])[:1])
        return "-".join(parts).translate(str.maketrans(" =.", "---"))

    @property
    def what(self) -> tuple[str, ...]:
        """The overrides that decide what is learned; the rest decides how."""
        return (*TUNINGS[self.tuning], *(OTHERS[self.other] if "packing" in self.other else ()))

    @property
    def words(self) -> list[str]:
        """All its overrides."""
        how = [f"zero=stage{self.stage}", *LAYOUTS[self.layout], *OTHERS.get(self.other, []), STEADY]
        return [*TUNINGS[self.tuning], *how]

    def refusals(self) -> list[str]:
        """Return why the config is rejected, in the language of messages; [] if it is not."""
        try:
            check_rules(_loaded(self), self.ranks, files=False)
        except ConfigError as error:
            lines = [line for line in str(error).splitlines() if "parallel." in line or "tuning." in line]
            return [re.sub(r"^(\d+\. )?(\S+:\d+|command line|命令行)[:：] ?", "", line) for line in lines]
        return []


@cache
def _loaded(cell: Cell) -> LoadedConfig:
    own = ["recipe=quickstart", "model=glm_tiny", "batch.global_size=4", "batch.micro_per_gpu=1", "evaluate.prompts=[]"]
    return load([*own, *cell.words])


def cells() -> Iterator[Cell]:
    """Yield all of them."""
    for layout in LAYOUTS:
        for stage in STAGES:
            yield from (Cell(layout, stage, tuning) for tuning in TUNINGS)
        yield from (Cell(layout, 0, "full", other) for other in OTHERS)
