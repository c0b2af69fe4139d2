#!/usr/bin/env python3
"""Build DeepSpeed's ops that tests use, once, and say what each took: DeepSpeedCPUAdam, FusedAdam, async I/O."""

import argparse
import os
import sys
import time
from pathlib import Path

from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).parents[1]))

from toolkit.config import native_ops
from toolkit.engine import ops

OPS = ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder")


def main() -> int:
    """Build what can be built here; what cannot is named with the reason, and the tests that need it are skipped."""
    ops.drop_unreadable_architectures(os.environ)
    for name in OPS:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or not builder.is_compatible(verbose=True):
            print(f"{name}: cannot be built here (see the line above for what is missing)")
            continue
        if get_accelerator().device_name() == "cuda" and (tools := native_ops.lacking_tools([builder.name])):
            print(f"{name}: cannot be built here, for want of {', '.join(tools)}")
            continue
        started = time.monotonic()
        builder.load()
        print(f"{name}: {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    sys.exit(main())
