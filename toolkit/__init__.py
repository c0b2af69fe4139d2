"""ExactTune: config-driven fine-tuning with DeepSpeed of causal language models, ChatGLM first."""

import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.jobs.finetune import Run, finetune

__all__ = ["Run", "finetune"]

__version__ = "0.1.0"


class _NoMlflowForAutotuning(MetaPathFinder):
    """Answers DeepSpeed's autotuner that MLflow is not installed; all others find it as ever.

    `import deepspeed` imports the autotuner and that, since it would log to it, MLflow: 1.8 s of processor time and
    112 MiB of host memory for each rank that never tunes (seen in DeepSpeed 0.19.8 with MLflow 3.17.2).
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for that one module in that one importer; None lets the other finders look."""
        if name == "mlflow":
            spec = getattr(sys.modules.get("deepspeed.autotuning.autotuner"), "__spec__", None)
            if getattr(spec, "_initializing", False):  # the autotuner is being imported right now: it is the importer
                raise ModuleNotFoundError(f"not needed here: {name}", name=name)


sys.meta_path.insert(0, _NoMlflowForAutotuning())


def __getattr__(name: str) -> Any:
    """Import what Python programs use only when they ask for it: no command does."""
    if name in __all__:
        from importlib import import_module

        return getattr(import_module("toolkit.jobs.finetune"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
