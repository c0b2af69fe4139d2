"""Benchmark a part of the toolkit on this machine against a bare baseline; needs a source checkout.

toolkit bench NAME recipe=NAME [ranks=2] [output=FILE] [key=value …]
toolkit bench faults [only="K1 K2"] [output=FILE]

  step [pairs=20] [steps=5]    steps per second of our loop and of a bare DeepSpeed loop, in turns
  data [rows=1000000]          tokenizing, the cache's size, opening it, packing; with made-up Chinese and English rows
  encode [turns=1,2,6,12] [repeats=5]
                               encoding the recipe's conversations, as they are and joined to so many turns, next to
                               the tokenizer library's own batch call on the same texts, one thread each
  memory [steps=20]            each rank's memory during training, next to a bare DeepSpeed script's
  checkpoint [repeats=5]       how long training waits for a save, next to a bare engine.save_checkpoint
  start [pairs=5]              seconds from the command to the first step, next to a bare DeepSpeed script's
  resume [pairs=5]             the same for a run that resumes from a checkpoint, next to a new run
  plan                         memory per rank and time per step, next to the plan's estimate, on the longest sequences
  nvme [directory=/nvme] [gib=1] [repeats=3]
                               DeepSpeed's reading and writing, by settings of zero.aio; prints the best as overrides
  trees [pairs=5] [turns=6,12] tokens and time per epoch with and without data.share_prefixes, in turns; of the data as
                               it is, or joined to conversations of so many turns
  experts [pairs=5] [steps=3] [counts=8,16,32,64]
                               a step of made-up models with so many experts a layer, divided over the ranks and under
                               ZeRO-3, in turns; bytes that a rank sends for it, and the formula's
  faults                       inject kills, full disks, signals … and check the recovery; takes an hour

  ranks=2         ranks of each launch, on this machine; not of data, encode and nvme
  output=FILE     append the result to this JSON list; without it the result is only shown

The last line is the result, one JSON object. All but `faults` work in prepare.dir/bench, which they delete. Linux only.
"""

import os
import sys

from toolkit import children
from toolkit.config.files import PACKAGE
from toolkit.messages import ConfigError


def run(words: list[str]) -> int:
    """Run benchmarks/run.py of this checkout with the arguments; return its exit code."""
    checkout = PACKAGE.parent
    program = checkout / "benchmarks" / "run.py"
    if not program.is_file():
        raise ConfigError("toolkit bench needs a checkout of this toolkit: there is no {file}.", file=program)
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    return children.start_tree([sys.executable, str(program), *words], env=os.environ | {"PYTHONPATH": path}).wait()
