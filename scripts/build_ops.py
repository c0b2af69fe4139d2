#!/usr/bin/env python3
"""Build DeepSpeed's ops that CPU ranks use, once, and say what each took: DeepSpeedCPUAdam, FusedAdam, async I/O."""

import sys
import time

from deepspeed.accelerator import get_accelerator

OPS = ("CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder")


def main() -> int:
    """Build what can be built here; what cannot is named with the reason, and the tests that need it are skipped."""
    for name in OPS:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or not builder.is_compatible(verbose=True):
            print(f"{name}: cannot be built here (see the line above for what is missing)")
            continue
        started = time.monotonic()
        builder.load()
        print(f"{name}: {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
