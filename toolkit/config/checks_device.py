"""Rules about the device of the ranks, as far as it is known without torch."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from toolkit.config.load import Loaded
from toolkit.config.places import fail
from toolkit.config.schema import Dtype
from toolkit.errors import ConfigError
from toolkit.messages import tr

_TOOLS = ("nvidia-smi", "rocm-smi", "amd-smi", "npu-smi", "hl-smi", "xpu-smi", "cnmon", "mthreads-gmi")
"""Programs that come with the drivers of NVIDIA, AMD, Ascend, Gaudi, Intel, Cambricon and Moore Threads."""


def is_cpu() -> bool:
    """Return whether ranks on this machine compute on its processors: DeepSpeed was told so, or finds nothing else."""
    accelerator = os.environ.get("DS_ACCELERATOR", "")
    return accelerator == "cpu" if accelerator else not any(map(shutil.which, _TOOLS))


def _has_fp16(cpuinfo: Path) -> bool:
    """Return whether oneDNN computes in fp16 on these processors, which DeepSpeed asks; true where it is unknown.

    oneDNN 3 has it for the instruction sets avx512_core_fp16 and avx2_vnni_2, of which avx_ne_convert is part.
    """
    if platform.machine() != "x86_64" or not cpuinfo.is_file():
        return True
    return bool(re.search(r"\b(avx512_fp16|avx_ne_convert)\b", cpuinfo.read_text(errors="replace")))


def check_device(loaded: Loaded) -> Iterator[ConfigError]:
    """Check that the ranks' device computes in the precision of the run.

    Yields:
        What does not hold.
    """
    # DeepSpeed 0.19.8, runtime/engine.py: "Type fp16 is not supported on your device" once the model is built.
    if loaded.cfg.precision.dtype is Dtype.fp16 and is_cpu() and not _has_fp16(Path("/proc/cpuinfo")):
        yield fail(
            loaded,
            "precision.dtype",
            tr(
                "precision.dtype = fp16 needs a GPU: the ranks here run on CPUs that do not compute in fp16. Use "
                "precision=bf16 or precision=fp32. To check a recipe for other machines, set DS_ACCELERATOR=cuda."
            ),
        )
