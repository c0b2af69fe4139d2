"""Loads and builds DeepSpeed's compiled ops on a rank; which a config needs: config/native_ops.py."""

import logging
import os
import re
import time
from collections.abc import Iterable, MutableMapping

from deepspeed.accelerator import get_accelerator

from toolkit.disk import STALE_S

_BUILDERS = {
    "fused_adam": "FusedAdamBuilder",
    "fused_lion": "FusedLionBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "async_io": "AsyncIOBuilder",
    "gds": "GDSBuilder",
    "quantizer": "QuantizerBuilder",
    "dc": "DeepCompileBuilder",
}
"""Ops of `native_ops.needed_ops` that engines load -> DeepSpeed's class that builds each (0.19.8, op_builder)."""
_ARCHITECTURE = re.compile(r"\d+\.\d+(\+PTX)?")


def load_ops(names: Iterable[str]) -> str:
    """Load DeepSpeed's native ops on this rank, after building those that are not built yet, which takes minutes;
    return "NAME: the compiler's error" of the first that cannot be built, "" if all are loaded. PyTorch's lock lets one
    process build while the others poll, so no collective waits for a compiler.
    """
    drop_unreadable_architectures(os.environ)
    deadline = time.monotonic() + STALE_S
    for name in filter(_BUILDERS.__contains__, names):
        while True:
            try:
                get_accelerator().create_op_builder(_BUILDERS[name]).load(verbose=False)
                break
            except Exception as error:  # whatever a missing CUDA toolkit, a compiler or a linker make of it
                # A file server may still hide what another node has built.
                if isinstance(error, ImportError) and "No such file" in str(error) and time.monotonic() < deadline:
                    time.sleep(1)
                    continue
                logging.getLogger("DeepSpeed").info("building %s", name, exc_info=True)
                lines = str(error).splitlines() or [type(error).__name__]
                summary = [lines[0], *(line for line in lines[1:] if "error" in line.lower())][:2]
                return f"{name}: {' '.join(line.strip() for line in summary)}"
    return ""


def drop_unreadable_architectures(environ: MutableMapping[str, str]) -> None:
    """Remove TORCH_CUDA_ARCH_LIST where DeepSpeed could not read it: it builds its ops for the GPUs it sees then.

    PyTorch also takes variants and names, such as `9.0a`, which images of CUDA set on an H200, and `Hopper`. DeepSpeed
    takes numbers alone, with +PTX, and fails at others with "invalid literal for int()" (0.19.8, op_builder/builder.py,
    compute_capability_args).
    """
    architectures = environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not all(map(_ARCHITECTURE.fullmatch, architectures)):
        del environ["TORCH_CUDA_ARCH_LIST"]
