"""Iterative training on a model's own answers: rounds of sampling, scoring, choosing and a run, each from the last's
model. A preference loss learns from the best and the worst answer of each prompt, without one the run learns the best
(best-of-n, or rejection sampling).

Everything is a file below run.dir/NAME, and a step whose file exists is done: the same command resumes after a kill.

rounds.json            the arguments, and what each round gave
round-N/samples.jsonl  answers of `toolkit generate`; samples.jsonl.part while they are being made, of several processes
                       samples.jsonl.I-of-N, and of a server samples.jsonl.server.log
round-N/merged/        the model with the last round's adapter in its weights, while a server gives the answers
round-N/scored.jsonl   the same with their rewards
round-N/pairs.jsonl    the best and the worst answer of each prompt; without a preference loss best.jsonl, the best
round-N/run/           the run
round-N+1/             of the last round N: answers and rewards of what it trained; a further round learns from them
"""

import json
import math
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit import children, disk, secrets
from toolkit.config import devices
from toolkit.config.files import quoted
from toolkit.config.schema import Family, Init, RunConfig, TaskKind
from toolkit.disk import json_lines
from toolkit.evaluate import rewards
from toolkit.evaluate.servable import resolve_servable
from toolkit.extras.sweep import LAUNCH, TOOLKIT, digest
from toolkit.launch.processes import SignalRequests, wait_for
from toolkit.messages import ConfigError, DataError, LaunchError, Stopped, current_language, say, tr
from toolkit.tables import text_table

FILE = "rounds.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundsPlan:
    """What `toolkit rounds` is asked to do."""

    cfg: RunConfig
    """The checked config of the runs."""
    launcher: list[str]
    words: list[str]
    """Recipe and overrides of each run."""
    prompts: Path
    """File of prompts, as for `toolkit generate input=`."""
    reward: rewards.Reward
    rounds: int
    generate: dict[str, str]
    """Arguments of `toolkit generate`: samples, temperature, max_new_tokens, batch_size and others."""
    server: dict[str, str] = field(default_factory=dict)
    """Those about a server, `server` and `timeout_s`, which may change when rounds are resumed; {}: none."""
    min_reward: float = -math.inf
    """Without a preference loss: least reward of an answer that is learned."""
    devices: list[str] = field(default_factory=lambda: [""])
    """GPUs, a process each, that answer a round's prompts in parallel; "": all that are visible."""

    def _run_settings(self) -> list[str]:
        """Return the arguments of the runs that influence the result: all but the language."""
        return [word for word in self.words if not word.startswith("language=")]  # what is printed changes no result

    @property
    def folder(self) -> Path:
        """The directory of all rounds, run.dir/NAME."""
        name = self.cfg.run.name or f"rounds-{Path(self.cfg.recipe).stem}-{digest(sorted(self._run_settings()))}"
        return Path(self.cfg.run.dir).absolute() / name

    @property
    def data_name(self) -> str:
        """The name of the file of a round that is learned."""
        return "pairs" if self.cfg.preference.is_paired else "best"

    def settings(self) -> dict[str, Any]:
        """Return what must be the same when the command is repeated; the number of rounds may grow."""
        return {
            "words": [secrets.hide_word(word) for word in self._run_settings()],
            "prompts": disk.sha256(self.prompts),
            "reward": asdict(self.reward),
            "generate": self.generate,
            **({"min_reward": self.min_reward} if self.min_reward > -math.inf else {}),
        }


def check(plan: RoundsPlan) -> None:
    """Raise ConfigError if the plan's recipe, model, prompts or reward do not allow rounds."""
    cfg = plan.cfg
    if cfg.task.kind is not TaskKind.language or (cfg.preference.is_on and not cfg.preference.is_paired):
        raise ConfigError(
            tr(
                "rounds learn from pairs (preference=dpo or another loss of pairs) or from the best answers "
                "(preference=none), with task=language."
            )
        )
    if cfg.model.init is not Init.pretrained or not Path(cfg.model.path).is_dir():
        raise ConfigError(tr("rounds begin with a model that answers: give model.path=DIR."))
    if not cfg.checkpoint.export:
        raise ConfigError(tr("checkpoint.export=false: each round begins with the export of the last. Remove it."))
    if not plan.prompts.is_file():
        raise ConfigError("prompts = {file} is not a file.", file=plan.prompts)
    if plan.server and not cfg.tuning.adapter:  # with an adapter it is merged first, as after each round
        resolve_servable(Path(cfg.model.path), chats=False)
    plan.reward.check()


def run_rounds(plan: RoundsPlan) -> int:
    """Do the rounds that are not done yet, each sampling, scoring, choosing and training; return the exit code."""
    check(plan)
    if not plan.cfg.preference.is_paired:
        say("There is no preference loss: each round learns the best answer of each prompt (best-of-n).")
    with _open_rounds(plan) as record:
        requests = SignalRequests()
        model, adapter = plan.cfg.model.path, plan.cfg.tuning.adapter
        for number in range(1, plan.rounds + 1):
            folder = plan.folder / f"round-{number}"
            about = _sample_and_pair(plan, requests, folder, number, model, adapter)
            _print_round(number, about)
            if not about["pairs"]:
                raise _nothing_to_learn_error(plan, folder)
            run = folder / "run"
            if not (run / "DONE").exists():
                _run_process([*LAUNCH, *plan.launcher, *_run_arguments(plan, folder, model, adapter)], requests)
                if not (run / "DONE").exists():
                    raise LaunchError("the run in {folder} did not end. The same command resumes.", folder=run)
            about["accuracy"] = _accuracy(run)
            _record(plan, record, f"round-{number}", about)
            export = str(run / "export")
            is_adapter = (run / "export" / "adapter_config.json").is_file()
            model, adapter = (model, export) if is_adapter else (export, "")
        # The result is judged by what would be a next round's answers: if that is asked for later, it has them already.
        after = plan.rounds + 1
        result = _sample_and_pair(plan, requests, plan.folder / f"round-{after}", after, model, adapter)
        _record(plan, record, "result", result)
        say("\n".join(_table(record, plan.rounds)))
        say("Trained: {folder}", folder=adapter or model)
    return 0


def _nothing_to_learn_error(plan: RoundsPlan, folder: Path) -> DataError:
    """Return the error for a round, in `folder`, of whose answers none is chosen."""
    if plan.cfg.preference.is_paired:
        return DataError(
            "{folder}: no prompt has answers with different rewards, so there is nothing to learn. Use more "
            "samples, a higher temperature, other prompts, or another reward.",
            folder=folder,
        )
    return DataError(
        "{folder}: no answer has a reward of at least {least}, so there is nothing to learn. Use more "
        "samples, a higher temperature, other prompts, another reward, or a smaller min_reward.",
        folder=folder,
        least=plan.min_reward,
    )


def _sample_and_pair(
    plan: RoundsPlan, requests: SignalRequests, folder: Path, number: int, model: str, adapter: str
) -> dict[str, Any]:
    """Generate, score and pair the answers of round `number` in `folder`, skipping steps whose file exists; return
    their figures (samples, prompts, pairs, ties, rewards). `model`, `adapter`: directories of what answers.
    """
    folder.mkdir(exist_ok=True)
    samples, scored, learned = (folder / f"{name}.jsonl" for name in ("samples", "scored", plan.data_name))
    if not samples.exists():
        if plan.server and adapter:
            model, adapter = _merge(requests, folder / "merged", model, adapter), ""
        settings = {"model.path": model, "adapter": adapter, "input": str(plan.prompts), "output": str(samples)}
        # `toolkit generate` counts up from its seed, batch by batch: rounds so far apart share no seed.
        settings |= {**plan.generate, "seed": str(int(plan.generate.get("seed", 0)) + 1_000_003 * number)}
        settings |= {**plan.server, "language": current_language()}
        if number == 1:  # from the second round on, the last run's export has its own template
            settings["model.chat_template"] = plan.cfg.model.chat_template
            settings["model.family"] = "" if plan.cfg.model.family is Family.auto else plan.cfg.model.family.value
        words = [f"{name}={value}" for name, value in settings.items() if value]
        _generate(plan, requests, samples, [*TOOLKIT, "generate", *words])
    shutil.rmtree(folder / "merged", ignore_errors=True)
    if not scored.exists():
        _run_process(rewards.scoring_command(plan.reward, samples, scored), requests, ",".join(plan.devices))
    rows = rewards.read_lines(scored)
    if plan.cfg.preference.is_paired:
        learned_rows, about = rewards.best_and_worst_pairs(rows)
    else:
        learned_rows, about = rewards.best_answers(rows, plan.min_reward)
    if not learned.exists():
        rewards.write_lines(learned, learned_rows)
    return about


def _merge(requests: SignalRequests, folder: Path, model: str, adapter: str) -> str:
    """Write the model with an adapter in its weights to `folder`, unless that is there, and return its name."""
    if not folder.exists():
        words = [adapter, "merge=true", f"base={model}", f"output={folder}", "forward=no"]
        _run_process([*TOOLKIT, "export-model", *words, f"language={current_language()}"], requests)
    return str(folder)


def _generate(plan: RoundsPlan, requests: SignalRequests, samples: Path, command: Sequence[str]) -> None:
    """Run a command of `toolkit generate` that writes the file `samples`. With several devices a process on each writes
    a shard first, samples.jsonl.1-of-2 and so on; shards that a stopped command has finished are kept.
    """
    shards = len(plan.devices)
    for path in samples.parent.glob(f"{samples.name}.*-of-*"):
        if f"-of-{shards}." not in f"{path.name}.":  # neither 1-of-2 nor 1-of-2.part: of another number of devices
            path.unlink()
    if shards > 1:
        missing = [n for n in range(shards) if not samples.with_name(f"{samples.name}.{n + 1}-of-{shards}").exists()]
        commands = [[*command, f"shard={n + 1}/{shards}"] for n in missing]
        _run_processes(commands, requests, [_visible_gpus(plan.devices[n]) for n in missing])
    _run_process(command, requests, plan.devices[0])  # joins the shards; without any, it generates


def _run_arguments(plan: RoundsPlan, folder: Path, model: str, adapter: str) -> list[str]:
    """Return the overrides of a round's run: the recipe's, the chosen answers as data, and the last round's model. What
    a round sets replaces the user's own word for the same key.
    """
    round_settings: dict[str, str | Path] = {
        "data": folder / f"{plan.data_name}.jsonl",
        "run.dir": folder,
        "run.name": "run",
        "model.path": model,
        **({"tuning.adapter": adapter} if adapter else {}),
    }
    recipe_words = [word for word in plan.words if word.partition("=")[0] not in round_settings]
    return [*recipe_words, *(f"{name}={quoted(Path(value))}" for name, value in round_settings.items())]


def _run_process(command: Sequence[str], requests: SignalRequests, device: str = "") -> None:
    """Run one step as a child process on the GPUs `device` ("" all visible); see `_run_processes`."""
    _run_processes([command], requests, [_visible_gpus(device)])


def _visible_gpus(device: str) -> dict[str, str]:
    """Return the environment variable that limits a process to GPUs, such as "0" or "0,1"; {} for ""."""
    return {devices.visible_variable(): device} if device else {}


def _run_processes(
    commands: Sequence[Sequence[str]], requests: SignalRequests, environs: Sequence[Mapping[str, str]]
) -> None:
    """Run the commands of a step in parallel, each with its own additional environment variables (`environs`), and pass
    signals on. Raises Stopped if the step or this command was stopped, LaunchError if a process failed.
    """
    running = [
        children.start(list(command), start_new_session=True, env={**os.environ, **variables})
        for command, variables in zip(commands, environs, strict=True)
    ]
    codes = wait_for(running, requests)
    first_failure = next(filter(None, codes), 0)  # its message is enough; 0: none failed
    if requests.last or first_failure == Stopped.exit_code:
        raise Stopped(tr("The rounds were stopped. The same command resumes."))
    if not first_failure:
        return
    # The beginning of PYTHON -m toolkit COMMAND NAME=VALUE … without PYTHON.
    shown = shlex.join(map(secrets.hide_word, commands[codes.index(first_failure)][1:6]))
    if first_failure < 0:  # a signal's number, negated: the process could not leave a message
        raise LaunchError(
            "a step of the rounds was killed by signal {signal}. If not on purpose, memory may have run out: see "
            "dmesg, or ask the scheduler. The same command resumes. Step: {command}",
            signal=-first_failure,
            command=shown,
        )
    raise LaunchError(
        "a step of the rounds failed with exit code {code}; its message is above. The same command resumes. "
        "Step: {command}",
        code=first_failure,
        command=shown,
    )


def _accuracy(run: Path) -> float | None:
    """Return the last accuracy (share of pairs in order) of a run's evaluations, else of its steps; None if none."""
    rows = [row for row in json_lines(run / "metrics.jsonl") if row]
    for name in ("eval_rewards/accuracies", "rewards/accuracies"):
        if values := [float(row[name]) for row in rows if name in row]:
            return values[-1]
    return None


@contextmanager
def _open_rounds(plan: RoundsPlan) -> Iterator[dict[str, Any]]:
    """Lock the directory of the rounds, and yield the content of rounds.json, created if it is new; LaunchError or
    ConfigError if another process has it, it is no such directory, or the settings differ.
    """
    # Through JSON, so that they equal those read from rounds.json, which has no tuples.
    folder, settings = plan.folder, json.loads(json.dumps(plan.settings()))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        if not disk.lock_or_warn(lock, folder):
            raise LaunchError("another process runs the rounds in {folder}.", folder=folder)
        file = folder / FILE
        if not file.exists() and any(path.name != ".lock" for path in folder.iterdir()):
            raise LaunchError(
                "{folder} exists and holds no rounds ({file} is missing). Choose another run.name.",
                folder=folder,
                file=FILE,
            )
        record = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"settings": settings}
        recorded_settings = record["settings"]
        if changed := sorted(name for name in settings if recorded_settings.get(name) != settings[name]):
            raise ConfigError(
                "the rounds in {folder} were started with other settings ({names}). Choose another run.name.",
                folder=folder,
                names=", ".join(changed),
            )
        disk.write_atomically(file, json.dumps(record, indent=1, ensure_ascii=False).encode())
        yield record


def _record(plan: RoundsPlan, record: dict[str, Any], name: str, about: dict[str, Any]) -> None:
    """Write the figures (`about`) of a round ("round-1"), or of the "result", into `record` and rounds.json."""
    record[name] = about
    disk.write_atomically(plan.folder / FILE, json.dumps(record, indent=1, ensure_ascii=False).encode())


def _print_round(number: int, about: dict[str, Any]) -> None:
    """Print the figures of a round, as `_sample_and_pair` returns them."""
    say(
        "Round {number}: {samples} answers to {prompts} prompts, mean reward {reward}; {pairs} pairs, {ties} prompts "
        "whose answers are worth the same.",
        number=number,
        samples=f"{about['samples']:,}",
        prompts=f"{about['prompts']:,}",
        reward="-" if about["mean_reward"] is None else f"{about['mean_reward']:.4f}",
        pairs=f"{about['pairs']:,}",
        ties=f"{about['ties']:,}",
    )


def _table(record: dict[str, Any], rounds: int) -> list[str]:
    """Return the lines of a table of so many rounds and the result, from the content of rounds.json (`record`)."""
    heads = (tr("round"), tr("mean reward"), tr("best of each prompt"), tr("pairs"), tr("ties"), tr("accuracy"))
    rows = []
    for name in [*(f"round-{number}" for number in range(1, rounds + 1)), "result"]:
        about = record[name]
        figures = [about[key] for key in ("mean_reward", "best_reward", "pairs", "ties")] + [about.get("accuracy")]
        rows.append([name, *map(_cell, figures)])
    return text_table(heads, rows)


def _cell(figure: float | None) -> str:
    """Return a reward or a count as text; "" for None."""
    if figure is None:
        return ""
    return f"{figure:.4f}" if isinstance(figure, float) else f"{figure:,}"
