"""After the last step: answers, export, DONE, and the last lines that are printed."""

import json
import shlex
import time
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from toolkit.cli.context import Session
from toolkit.cli.tracking import hand_on_end
from toolkit.config import files
from toolkit.disk import unused_path
from toolkit.distributed import process_group
from toolkit.engine.parameters import count_parameters
from toolkit.errors import CheckpointError, ProofDiffers
from toolkit.evaluate.generate import answer
from toolkit.evaluate.loss import ngram_baselines
from toolkit.export.huggingface import CARD_FILE as CARD
from toolkit.export.huggingface import card, export_adapter, export_model, prove_adapter
from toolkit.export.verify import verify_logits
from toolkit.messages import tr
from toolkit.models.adapters import FILE as BASE_FILE
from toolkit.models.adapters import has_adapter
from toolkit.models.pipeline import unwrap_model
from toolkit.secrets import hide
from toolkit.terminal import phase
from toolkit.train import folder_lock, run_folder
from toolkit.train.job import Outcome


def finish(session: Session, outcome: Outcome, total_steps: int) -> None:
    """Answer the recipe's questions, export, mark the run done and say what was achieved. A collective."""
    samples = _answers(session)
    if session.cfg.checkpoint.export:
        _export(session, outcome)
    summary = _summary(session, outcome, total_steps)
    hand_on_end(session, outcome, total_steps, samples)
    process_group.barrier()
    process_group.on_rank0(lambda: folder_lock.check(session.folder))
    if process_group.rank() == 0:
        _print_achievement(session, outcome, summary, samples)
        run_folder.mark_done(session.folder, summary)
        if session.reporter:
            session.reporter.finish()
        if line := files.notice(session.cfg.data):
            print(line)


def _export(session: Session, outcome: Outcome) -> None:
    """Write export/ and prove it: it holds what was trained, and gives the logits that the run gives."""
    is_adapter = has_adapter(session.engine.module)
    files = {name: content for name, content in session.described.files.items() if is_adapter or name != BASE_FILE}
    files[CARD] = card(outcome.state, is_adapter)
    folder, probe_ids = session.folder / "export", session.described.probe_ids
    assert probe_ids is not None
    speaks = process_group.rank() == 0
    with phase(tr("Exporting"), speaks=speaks):
        (export_adapter if is_adapter else export_model)(session.engine, files, probe_ids, folder)
    if session.cfg.checkpoint.verify_export:
        with phase(tr("Comparing the export with the run"), speaks=speaks):
            if is_adapter:
                prove_adapter(session.engine, folder)
            else:
                process_group.on_rank0(lambda: _prove(folder))


def _prove(folder: Path) -> None:
    """Compare a model's export with the run.

    A device that rounds otherwise than was measured is no reason to lose a run's model: the export stays. One of other
    weights is put aside, so that nothing takes it for the run's model.

    Raises:
        CheckpointError: the weights are others than were trained.
    """
    try:
        verify_logits(folder)
    except ProofDiffers as error:
        print(
            tr(
                "WARNING: the export does not give the run's logits exactly: {reason}. It is kept in {folder}. Compare "
                "its loss with the run's last validation loss before you use it: toolkit eval.",
                reason=error,
                folder=folder,
            )
        )
    except CheckpointError as error:
        aside = folder.rename(unused_path(folder.with_name("export.wrong")))
        raise CheckpointError(
            tr(
                "{reason}. The export is kept as {folder} for inspection, and the checkpoints are untouched: make "
                "another with toolkit export-model {run}.",
                reason=error,
                folder=aside,
                run=folder.parent,
            )
        ) from error


def _answers(session: Session) -> list[dict[str, str]]:
    cfg = session.cfg.evaluate
    samples = [
        {
            "prompt": hide(prompt),
            "answer": answer(
                session.engine.module,
                session.prepared.encoder,
                prompt,
                cfg.max_new_tokens,
                session.engine.device,
            ),
        }
        for prompt in cfg.prompts
    ]
    if samples and process_group.rank() == 0:
        lines = [json.dumps(sample, ensure_ascii=False) for sample in samples]
        (session.folder / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return samples


def _summary(session: Session, outcome: Outcome, total_steps: int) -> dict[str, object]:
    counts = count_parameters(unwrap_model(session.engine.module)).values()
    summary: dict[str, object] = {
        "parameters": sum(one.total for one in counts),
        "trained_parameters": sum(one.trained for one in counts),
        "steps": total_steps,
        "skipped_steps": outcome.skipped_steps,
        "bad_steps": outcome.bad_steps,
        "rewinds": outcome.rewinds,
        "trained_tokens": outcome.trained_tokens,
        "total_tokens": outcome.total_tokens,
        "first_loss": outcome.first_loss,
        "last_loss": outcome.last_loss,
        "seconds": round(time.monotonic() - session.started, 1),
        "steps_done": outcome.steps,
        "steps_seconds": round(outcome.steps_s, 1),
    }
    if outcome.evaluations:
        summary["first_eval_loss"] = outcome.evaluations[0]["eval_loss"]
        summary["last_eval_loss"] = outcome.evaluations[-1]["eval_loss"]
    validation = session.prepared.validation
    if session.cfg.evaluate.ngram_baselines and validation is not None and process_group.rank() == 0:
        counted = ngram_baselines(
            session.prepared.train, validation, len(session.prepared.tokenizer), _evaluated(session)
        )
        summary |= {"unigram_loss": counted.unigram, "bigram_loss": counted.bigram}
    return summary


def _evaluated(session: Session) -> NDArray[Any] | None:
    """Return the validation samples that the loss is measured on, so that all figures are of the same tokens."""
    plan = session.prepared.validation_plan
    return None if plan is None else plan.members


def _print_achievement(
    session: Session,
    outcome: Outcome,
    summary: dict[str, object],
    samples: list[dict[str, str]],
) -> None:
    print()
    print(
        tr(
            "Done: {steps} steps in {steps_s} s ({seconds} s in all, from the start of the command), training loss "
            "{first} -> {last} nats/token.",
            steps=summary["steps_done"],
            steps_s=summary["steps_seconds"],
            seconds=summary["seconds"],
            first=f"{outcome.first_loss:.3f}",
            last=f"{outcome.last_loss:.3f}",
        )
    )
    if outcome.skipped_steps or outcome.rewinds:
        print(
            tr(
                "{skipped} steps left out; {bad} went wrong (logs/bad-step-*.jsonl); "
                "{rewinds} times back to a checkpoint.",
                skipped=outcome.skipped_steps,
                bad=outcome.bad_steps,
                rewinds=outcome.rewinds,
            )
        )
    if outcome.evaluations:
        print(
            tr(
                "Validation loss {first} -> {last} nats/token.",
                first=f"{summary['first_eval_loss']:.3f}",
                last=f"{summary['last_eval_loss']:.3f}",
            )
        )
    if "unigram_loss" in summary:
        print(
            tr(
                "For comparison, on the same tokens: unigram {unigram}, bigram {bigram}.",
                unigram=f"{summary['unigram_loss']:.3f}",
                bigram=f"{summary['bigram_loss']:.3f}",
            )
        )
    _print_next_steps(session, samples)


def _print_next_steps(session: Session, samples: list[dict[str, str]]) -> None:
    folder = session.display_folder
    for sample in samples:
        print(tr("  Q: {prompt}\n  A: {answer}", **sample))
    print(
        tr(
            "Everything is in {folder}: metrics.jsonl, config.yaml, ds_config.json, checkpoints/.",
            folder=folder,
        )
    )
    if session.cfg.checkpoint.export:
        if has_adapter(session.engine.module):
            print(tr("The adapter: {folder}/export", folder=folder))
        elif unwrap_model(session.engine.module).config.model_type == "chatglm":
            print(tr("The model: {folder}/export (transformers itself does not know ChatGLM-6B)", folder=folder))
        else:
            print(tr("The model, for any program that uses transformers: {folder}/export", folder=folder))
        prompt = samples[0]["prompt"] if samples else "Hello"
        print(
            tr(
                "Ask it:  {command}",
                command=shlex.join(["toolkit", "generate", f"model.path={folder}/export", f"prompt={prompt}"]),
            )
        )
    else:
        print(tr("See the curve:  {command}", command=f"less {folder}/metrics.jsonl"))
