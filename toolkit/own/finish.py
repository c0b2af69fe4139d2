"""After the last step of a model of one's own: export, DONE, and the last lines that are printed."""

import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_model
from torch import nn

from toolkit.cli.context import AnySession
from toolkit.cli.tracking import hand_on_end
from toolkit.config.schema import EVAL_LOSS
from toolkit.distributed import process_group
from toolkit.errors import CheckpointError
from toolkit.export.checkpoint import WEIGHTS, export_custom
from toolkit.messages import tr
from toolkit.own.objective import share_buffers
from toolkit.own.task import Task
from toolkit.terminal import phase
from toolkit.train import folder_lock, run_folder
from toolkit.train.job import Outcome


def finish(session: AnySession, task: Task, outcome: Outcome, total_steps: int, card: dict[str, Any]) -> None:
    """Export, mark the run done and say what was achieved. A collective."""
    folder, config = session.folder / "export", session.cfg.checkpoint
    if config.export:
        share_buffers(session.engine.module)
        with phase(tr("Exporting"), speaks=session.ranks.rank == 0):
            export_custom(session.engine, card, folder)
            if config.verify_export:
                process_group.on_rank0(lambda: _prove(task, session.cfg.run.seed, folder))
    summary = _summary(session, outcome, total_steps, card)
    hand_on_end(session, outcome, total_steps, [])
    process_group.barrier()
    process_group.on_rank0(lambda: folder_lock.check(session.folder))
    if session.ranks.rank == 0:
        _print(session, summary)
        run_folder.mark_done(session.folder, summary)
        if session.reporter:
            session.reporter.finish()


def _prove(task: Task, seed: int, folder: Path) -> None:
    """Load the export into a new model, where the program can make one.

    Raises:
        CheckpointError: it does not fit, or the program's function fails: whatever it raises, other ranks wait for it.
    """
    if isinstance(task.model, nn.Module):
        return
    try:
        model = task.build(seed)
    except Exception as error:
        raise CheckpointError(
            tr(
                "{folder} could not be proved: model= failed when it was called once more, {reason}. Let it make the "
                "model again, or set checkpoint.verify_export=false.",
                folder=folder,
                reason=_first_line(error),
            )
        ) from error
    try:
        load_model(model, folder / WEIGHTS)
    except Exception as error:
        raise CheckpointError(
            tr("{folder} does not hold its model: {reason}.", folder=folder, reason=_first_line(error))
        ) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _summary(session: AnySession, outcome: Outcome, total_steps: int, card: dict[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {
        "parameters": card["parameters"],
        "trained_parameters": card["trained_parameters"],
        "steps": total_steps,
        "skipped_steps": outcome.skipped_steps,
        "bad_steps": outcome.bad_steps,
        "rewinds": outcome.rewinds,
        "samples": outcome.total_tokens,
        "first_loss": outcome.first_loss,
        "last_loss": outcome.last_loss,
        "seconds": round(time.monotonic() - session.started, 1),
        "steps_done": outcome.steps,
        "steps_seconds": round(outcome.steps_s, 1),
    }
    if outcome.evaluations:
        found["first_eval_loss"] = outcome.evaluations[0][EVAL_LOSS]
        found |= {f"last_{name}": value for name, value in outcome.evaluations[-1].items() if name != "step"}
    return found


def _print(session: AnySession, summary: dict[str, Any]) -> None:
    folder = session.display_folder
    print(
        "\n"
        + tr(
            "Done: {steps} steps in {steps_s} s ({seconds} s in all, from the start of the command), training loss "
            "{first} -> {last}.",
            steps=summary["steps_done"],
            steps_s=summary["steps_seconds"],
            seconds=summary["seconds"],
            first=f"{summary['first_loss']:.4f}",
            last=f"{summary['last_loss']:.4f}",
        )
    )
    if session.cfg.checkpoint.export:
        print(tr("The weights: {file} (safetensors.torch.load_model)", file=f"{folder}/export/{WEIGHTS}"))
    print(tr("Everything is in {folder}: metrics.jsonl, config.yaml, ds_config.json, checkpoints/.", folder=folder))
