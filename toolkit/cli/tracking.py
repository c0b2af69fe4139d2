"""What the trackers are told of a session, from its config to its last figures."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from toolkit.cli.context import AnySession, Session
from toolkit.config.load import to_dict, to_plain
from toolkit.config.schema import RunConfig
from toolkit.data.store import TokenizedCache
from toolkit.errors import Stopped
from toolkit.tables import leaves
from toolkit.track.backends import ANSWERS, FAILED, FINISHED, SAMPLES, STOPPED
from toolkit.track.metrics import is_evaluation, metric_values
from toolkit.track.trackers import Trackers
from toolkit.train.job import Outcome
from toolkit.train.prepared import Prepared


def trackers_of(cfg: RunConfig, say: Callable[[str], None]) -> Trackers:
    """Return the trackers of a session, which have not begun.

    Args:
        cfg: with `track.patience_s`. What is waited for them is no more than a quarter of `distributed.timeout_s`:
            meanwhile the other ranks wait in a collective, in the end for the report too, which may take half of it.
        say: tells the user.
    """
    return Trackers(say, min(cfg.track.patience_s, cfg.distributed.timeout_s / 4))


@contextmanager
def tracked(session: AnySession, step: int, data: Mapping[str, Any]) -> Iterator[None]:
    """Begin the trackers, on the first rank, and tell them how the session ended.

    Args:
        session: of the run.
        step: after which it begins.
        data: what it learns from, in numbers.
    """
    trackers = session.trackers
    if session.ranks.rank == 0:
        track = to_plain(session.cfg.track)
        chosen = {name: track[name] for name in session.cfg.track.enabled}
        trackers.begin(session.folder, chosen, hyperparameters(session, data) if chosen else {}, step)
    try:
        yield
    except BaseException as error:
        trackers.end(STOPPED if isinstance(error, Stopped) else FAILED)
        raise
    trackers.end(FINISHED)


def data_summary(prepared: Prepared) -> dict[str, Any]:
    """Return what a language model learns from, in numbers."""
    return {
        "sources": prepared.source_names,
        "packing": prepared.packing.value,
        "fingerprint": prepared.train.fingerprint,
        "train": _size(prepared.train),
        "validation": _size(prepared.validation) if prepared.validation else {},
    }


def hyperparameters(session: AnySession, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run is made of, flat: its config, its data, the code's commit and the versions."""
    environment = json.loads((session.folder / "environment.json").read_text(encoding="utf-8"))
    return {
        **dict(leaves(to_dict(session.cfg))),
        **{f"data_summary.{key}": value for key, value in leaves(dict(data))},
        **{f"environment.{key}": value for key, value in leaves(environment)},
        "commit": environment["commit"],
    }


def hand_on_answers(session: Session, step: int) -> None:
    """Hand on what the model answered at an evaluation, of which each answer is a line of a file."""
    if not session.trackers.is_on:
        return
    # The file may be cut off: a disk that is full has been told, and is no reason to end a run.
    with (
        suppress(OSError, ValueError),
        (session.folder / "evaluations" / f"step-{step}.jsonl").open(encoding="utf-8") as lines,
    ):
        session.trackers.answers(step, ANSWERS, [json.loads(line) for line in lines])


def hand_on_end(session: AnySession, outcome: Outcome, steps: int, samples: list[dict[str, str]]) -> None:
    """Hand on the last answers, and figures of the whole run as transformers has them.

    Args:
        session: that has done its last step.
        outcome: of its steps.
        steps: of the whole run.
        samples: of samples.jsonl.
    """
    if not session.trackers.is_on:
        return
    seconds = max(outcome.steps_s, 1e-9)
    values = {
        "train_runtime": outcome.steps_s,
        "train_steps_per_second": outcome.steps / seconds,
        "train_samples_per_second": outcome.steps * session.cfg.batch.global_size / seconds,
        "train_loss": _mean_loss(session),
    }
    session.trackers.answers(steps, SAMPLES, samples)
    session.trackers.summary(steps, values)


def _size(store: TokenizedCache) -> dict[str, int]:
    return {"samples": len(store), "tokens": store.num_tokens, "trained_tokens": store.num_trained_tokens}


def _mean_loss(session: AnySession) -> float:
    """Return the mean over the trained tokens (or samples) of the run, by what metrics.jsonl says."""
    total = tokens = before = 0.0
    with suppress(OSError, ValueError, KeyError), (session.folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = metric_values(json.loads(line))
            if is_evaluation(row):
                continue
            count = row["trained_tokens"] if "trained_tokens" in row else row["samples"]
            since, before = count - before, count
            if math.isfinite(row["loss"]):
                total += row["loss"] * since
                tokens += since
    return total / tokens if tokens else math.nan
