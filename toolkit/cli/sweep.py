"""Run a recipe for every combination of values, one launch after another; the same command goes on where it was.

toolkit sweep [launcher options] recipe=NAME optim.lr=1e-5,2e-5 zero=stage2,stage3 [sweep=NAME] [key=value …]
toolkit sweep … 'optim.lr=tag(log,interval(1e-6,1e-4))' trials=20 metric=eval_loss

  A,B  range(1,5)  glob(stage3*)   several values of a key or a group, in Hydra's sweep grammar
  sweep=NAME                       the sweep's folder, run.dir/NAME; without it one of the recipe and these words
  max_jobs=64                      refuse a larger grid
  trials=N metric=NAME             choose N combinations by Optuna; interval(low,high) names a range of numbers
  launcher options, other words    as for `toolkit launch`, which starts each run

`python run.py --multirun …` is the same. Nothing starts before every combination has been composed and checked. A run
that has finished is not run again, one that died goes on from its checkpoint, one that diverged stays as it is.
"""

import hashlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit import children
from toolkit.arguments import parse_checked, positive_int
from toolkit.cli.sweep_results import lines, state_name
from toolkit.config import sweep as grammar
from toolkit.config.load import to_dict, to_yaml
from toolkit.config.schema import EVAL_LOSS, RunConfig
from toolkit.errors import ConfigError, Diverged, LaunchError, Stopped
from toolkit.launch import deepspeed, environment
from toolkit.launch.processes import SignalRequests
from toolkit.launch.sweeps import DIVERGED, DONE, FAILED, RUNNING, STOPPED, Job, Sweep, digest, job_name, now, opened
from toolkit.messages import say, tr
from toolkit.problems import Problems
from toolkit.report.page import runs_of
from toolkit.secrets import hide

LAUNCH = [sys.executable, "-m", "toolkit", "launch"]
"""What starts one run."""
MULTIRUN = ("-m", "--multirun")
MOST_JOBS = 64
_OWN = ("sweep", "max_jobs", "trials", "metric")
_POLL_S = 0.1


@dataclass(kw_only=True, slots=True)
class Plan:
    """A command line, read."""

    launcher: list[str]
    """Words of the launcher."""
    options: Mapping[str, str]
    """The launcher's options by name."""
    fixed: list[str]
    """Overrides that all jobs share, and --config-dir."""
    axes: list[grammar.Axis]
    """Overrides with several values."""
    own: dict[str, str]
    """The sweep's own arguments."""

    def words(self, job: Sequence[str]) -> list[str]:
        """Return the overrides of a job."""
        return [*self.fixed, *job]

    def composed(self, job: Sequence[str]) -> RunConfig:
        """Compose and check a job.

        Raises:
            ConfigError: it is wrong; the message names the job.
        """
        problems = Problems()
        found = self.composed_all([job], problems)
        problems.raise_all()
        return found[0]

    def composed_all(self, jobs: Sequence[Sequence[str]], problems: Problems) -> list[RunConfig]:
        """Compose and check jobs.

        Args:
            jobs: what is special about each.
            problems: receives what is wrong; what is wrong with some of several jobs only names the first of these.
        """
        found, wrong = [], dict[str, list[str]]()
        for job in jobs:
            name = hide(" ".join(job))
            try:
                found.append(self._composed(job))
            except ConfigError as error:
                for one in error.parts or (error,):
                    wrong.setdefault(str(one), []).append(name)
        for sentence, names in wrong.items():
            of_all = len(names) == len(jobs) > 1 or not names[0]
            problems.add(ConfigError(sentence if of_all else f"{names[0]}: {sentence}"))
        return found

    def _composed(self, job: Sequence[str]) -> RunConfig:
        problems = Problems()
        given = {"world_size": text} if (text := self.options.get("--num_gpus")) else {}
        world_size = problems.attempt(positive_int, given, "world_size")
        words, here = [*self.words(job), "run.name=run"], deepspeed.hostfile_of(self.options) is None
        loaded = parse_checked(words, world_size=world_size, files=here, problems=problems).loaded
        problems.raise_all()
        to_dict(loaded.cfg)  # learns the secrets in it
        return loaded.cfg


def run(words: list[str]) -> int:
    """Sweep."""
    refuse_ranks()
    problems = Problems()
    plan = _read(words, problems)
    if "trials" in plan.own:
        from toolkit.cli.sweep_trials import search

        return search(plan, words, problems)
    if "metric" in plan.own:
        problems.add(ConfigError(tr("metric= has no effect without trials=N.")))
    combinations = problems.attempt(grammar.grid, plan.axes) or []
    most = problems.attempt(positive_int, plan.own, "max_jobs") or MOST_JOBS
    if (number := len(combinations)) > most:
        problems.add(ConfigError(tr("these are {number} runs. Add max_jobs={number} if that is meant.", number=number)))
    configs = plan.composed_all(combinations[:most], problems)
    problems.raise_all()
    with opened(folder_of(plan, configs[0]), typed(words)) as sweep:
        jobs = [sweep.add(new_job(job, cfg)) for job, cfg in zip(combinations, configs, strict=True)]
        sweep.save()
        say(tr("{number} runs, in {folder}.", number=len(jobs), folder=sweep.folder))
        requests = SignalRequests()
        for place, (job, special) in enumerate(zip(jobs, combinations, strict=True), start=1):
            if requests.last:
                break
            told = f"[{place}/{len(jobs)}] {job.name}"
            if job.state in (DONE, DIVERGED):
                say(tr("{run}: {state} already.", run=told, state=state_name(job.state)))
                continue
            say(told)
            launch(plan, sweep, job, special, requests)
        show(sweep, jobs)
        check_stopped(sweep, requests)
        if any(job.state not in (DONE, DIVERGED) for job in jobs):
            say(tr("What is not done is tried again by the same command:  {command}", command=sweep.command))
        name_report(sweep)
        return 0 if all(job.state == DONE for job in jobs) else 1


def folder_of(plan: Plan, cfg: RunConfig) -> Path:
    """Return the sweep's folder: run.dir and a name, made of the recipe and all overrides where none is given.

    Raises:
        ConfigError: the name is none.
    """
    words = [*plan.fixed, *map(str, plan.axes), plan.own.get("metric", "")]
    name = plan.own.get("sweep") or f"sweep-{Path(cfg.recipe).stem}-{digest(sorted(words))}"
    if Path(name).name != name or name.startswith((".", "-")) or not name.isprintable():
        raise ConfigError(tr("sweep = {name} must be a plain folder name; the folder around it is run.dir.", name=name))
    return Path(cfg.run.dir).absolute() / name


def typed(words: Sequence[str], command: str = "sweep") -> str:
    """Return the command as it was typed, without secrets."""
    return hide(shlex.join(["toolkit", command, *(word for word in words if word not in MULTIRUN)]))


def new_job(words: Sequence[str], cfg: RunConfig, trial: int | None = None) -> Job:
    """Return a job that has not run yet.

    Args:
        words: what is special about it.
        cfg: its config.
        trial: its number in a search.
    """
    nowhere = replace(cfg, run=replace(cfg.run, name="", dir=""))
    config = hashlib.sha256(to_yaml(nowhere).encode()).hexdigest()[:16]
    name = job_name(words) if trial is None else f"trial-{trial:03}"
    return Job(name=name, words=[hide(word) for word in words], config=config, trial=trial)


def launch(plan: Plan, sweep: Sweep, job: Job, special: Sequence[str], requests: SignalRequests) -> None:
    """Run one job in a process of its own, pass signals on, and note how it ended."""
    folder = str(sweep.folder)
    if not re.fullmatch(r"[\w./+-]+", folder, re.ASCII):  # Hydra takes anything else in quotes only
        folder = "'" + folder.replace("\\", "\\\\").replace("'", "\\'") + "'"
    command = [*LAUNCH, *plan.launcher, *plan.words(special), f"run.dir={folder}", f"run.name={job.name}"]
    job.state, job.started, job.ended, job.exit_code = RUNNING, now(), "", None
    sweep.save()
    # A session of its own: Ctrl-C reaches it through us alone, once.
    process = children.start(command, start_new_session=True)
    while (code := process.poll()) is None:
        if requests.is_new:
            requests.is_new = False
            process.send_signal(requests.last)
        time.sleep(_POLL_S)
    job.exit_code, job.ended = code, now()
    if (sweep.run_folder(job) / "DONE").exists():
        job.state = DONE
    elif code == Stopped.exit_code or requests.last:
        job.state = STOPPED
    else:
        job.state = DIVERGED if code == Diverged.exit_code else FAILED
    sweep.save()


def show(sweep: Sweep, jobs: Sequence[Job], metric: str = EVAL_LOSS) -> None:
    """Print the table of a sweep."""
    say("")
    for line in lines(sweep, jobs, metric):
        say(line)
    say(tr("Everything is in {folder}.", folder=sweep.folder))


def name_report(sweep: Sweep) -> None:
    """Say what compares the runs, if there is anything to compare yet."""
    if runs_of(sweep.folder):
        folder = shlex.quote(str(sweep.folder))
        say(tr("To compare the runs in a page of charts:  {command}", command=f"toolkit report {folder}"))


def check_stopped(sweep: Sweep, requests: SignalRequests) -> None:
    """End a sweep that was asked to stop, with the exit code of a run that was.

    Raises:
        Stopped: it was.
    """
    if requests.last:
        raise Stopped(
            tr(
                "the sweep was stopped by {signal}. The same command goes on with it:  {command}",
                signal=signal.Signals(requests.last).name,
                command=sweep.command,
            )
        )


def refuse_ranks() -> None:
    """Refuse to work in one of several ranks.

    Raises:
        LaunchError: this is one.
    """
    ranks = environment.detect(os.environ)
    if ranks.launcher != "single":
        raise LaunchError(
            tr(
                "this command starts the ranks of each run itself: type it once, without {launcher}.",
                launcher=ranks.launcher,
            )
        )


def _read(words: Sequence[str], problems: Problems) -> Plan:
    """Tell the launcher's words, our own, and overrides apart; `problems` receives what does not belong in a sweep."""
    mine, options, rest = deepspeed.typed_options([word for word in words if word not in MULTIRUN])
    own = {name: value for name, equals, value in (word.partition("=") for word in rest) if equals and name in _OWN}
    overrides, others, config_dir = [], [], ""
    iterator = iter(word for word in rest if word.partition("=")[0] not in _OWN)
    for word in iterator:
        name, equals, value = word.partition("=")
        if name in ("--config-dir", "-cd"):
            config_dir = value if equals else next(iterator, "")
            others += ["--config-dir", config_dir]
        else:
            overrides.append(word)
    fixed, axes = grammar.read(overrides, config_dir)
    for word in [*fixed, *(f"{axis.key}=" for axis in axes)]:
        if word.lstrip("+").startswith("run.name="):
            problems.add(ConfigError(tr("the sweep names its runs itself; sweep=NAME names the sweep.")))
    if any(axis.key.lstrip("+") == "run.dir" for axis in axes):
        problems.add(ConfigError(tr("run.dir is one folder for the whole sweep.")))
    if not axes:
        problems.add(
            ConfigError(
                tr(
                    "nothing is swept: give a key several values, such as optim.lr=1e-5,2e-5, or run it once with "
                    "`toolkit launch`."
                )
            )
        )
    return Plan(launcher=mine, options=options, fixed=[*others, *fixed], axes=axes, own=own)
