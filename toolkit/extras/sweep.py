"""A sweep: a grid of runs, or runs chosen by Optuna, launched one after another; sweep.json lets the command resume."""

import hashlib
import json
import math
import re
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from toolkit import arguments, children, command_line, disk, messages, secrets
from toolkit.config import files, load, schema
from toolkit.config.suggest import keys_meant, option_meant
from toolkit.config.sweep_axes import Axis, grid, split_axes
from toolkit.disk import json_lines
from toolkit.launch import deepspeed, processes
from toolkit.messages import say, tr
from toolkit.report.run import runs_of
from toolkit.tables import text_table

FILE = "sweep.json"
STUDY = "optuna.log"
"""Optuna's journal: every trial, appended line by line."""
TOOLKIT = [sys.executable, "-m", "toolkit"]
LAUNCH = [*TOOLKIT, "launch"]
MOST_JOBS = 64
WAITING, RUNNING, DONE, FAILED, DIVERGED, STOPPED = "waiting", "running", "done", "failed", "diverged", "stopped"
BRIEF = (
    "train.log_every=1",
    "train.rehearse=false",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "schedule.warmup_ratio=0",
    "checkpoint.minutes=0",
    "report.enabled=false",
    "track=jsonl",
    "run.max_restarts=0",
    "run.deadline=",
)
"""Overrides for runs of a few steps that are started only to measure something."""
_SWEEP_ARGUMENTS = ("sweep", "max_jobs", "trials", "metric")
_LONGEST_NAME, _LONGEST_VALUE = 60, 20
_LOWER_IS_BETTER = ("loss", "perplexity")
"""Ends of the names in metrics.jsonl whose smaller values are better."""
_TIME = "%Y-%m-%dT%H:%M:%S%z"


@dataclass(kw_only=True, slots=True)
class SweepJob:
    """One run of a sweep, as sweep.json stores it."""

    name: str
    """Its run.name."""
    words: list[str]
    """The overrides that only this run has, without secrets."""
    config: str = ""
    """Digest of its composed config, without run.name, run.dir and language."""
    state: str = WAITING
    exit_code: int | None = None
    """Of its last launch."""
    started: str = ""
    ended: str = ""
    trial: int | None = None
    """Its number in a search by Optuna; None in a grid."""


@dataclass(kw_only=True, slots=True)
class SweepDir:
    """A sweep on disk: sweep.json and the run directories."""

    folder: Path
    command: str
    """What was typed, without secrets."""
    jobs: list[SweepJob] = field(default_factory=list)
    """In the order in which they run."""

    def save(self) -> None:
        """Write sweep.json atomically."""
        values = {"command": self.command, "jobs": [asdict(job) for job in self.jobs]}
        text = json.dumps(secrets.hide_all(values), indent=1, ensure_ascii=False) + "\n"
        temporary = self.folder / f".{FILE}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8")
            disk.flush(temporary)
            temporary.replace(self.folder / FILE)
        except OSError as error:
            reason = error.strerror or error
            raise messages.LaunchError(
                "cannot write {file}: {reason}.", file=self.folder / FILE, reason=reason
            ) from error

    def add(self, job: SweepJob) -> SweepJob:
        """Add a job, or return the one of this name that is there already; an error if that has other settings."""
        listed_job = next((other for other in self.jobs if other.name == job.name), None)
        if listed_job is None:
            self.jobs.append(job)
            return job
        if listed_job.config != job.config:
            raise messages.LaunchError(
                "{folder}: the run {name} of this sweep began with other settings (the recipe or an override has "
                "changed since). Choose another sweep=NAME.",
                folder=self.folder,
                name=job.name,
            )
        return listed_job

    def run_dir(self, job: SweepJob) -> Path:
        """Return the run directory of a job."""
        return self.folder / job.name


@dataclass(kw_only=True, slots=True)
class SweepPlan:
    """The parsed command line of a sweep."""

    launcher: list[str]
    """Launcher options as typed, such as --num_gpus 2."""
    options: Mapping[str, str]
    """The same by name."""
    fixed: list[str]
    """Overrides that all jobs share, and --config-dir."""
    axes: list[Axis] = field(default_factory=list)
    """Keys with several values or a range."""
    settings: dict[str, str]
    """Arguments of the sweep itself: sweep, max_jobs, trials, metric."""

    def compose(self, job: Sequence[str]) -> schema.RunConfig:
        """Compose and check the config of a job, given its overrides; the ConfigError names it."""
        problems = messages.Problems()
        configs = self.compose_all([job], problems)
        problems.raise_all()
        return configs[0]

    def compose_all(self, jobs: Sequence[Sequence[str]], problems: messages.Problems) -> list[schema.RunConfig]:
        """Compose and check jobs, each given by its overrides. Each error is added to `problems` once: with the
        overrides of the first job that has it, or without if all have it.
        """
        configs, jobs_by_error = [], dict[str, list[str]]()  # error -> overrides of the jobs that have it
        for job in jobs:
            job_problems = messages.Problems()
            cfg = job_problems.attempt(self._compose, job, job_problems)
            configs.append(cfg or schema.RunConfig())  # in place of one with errors, which the caller will raise
            for error in job_problems.errors:
                jobs_by_error.setdefault(str(error), []).append(" ".join(map(secrets.hide_word, job)))
        for sentence, overrides in jobs_by_error.items():
            is_of_all = len(overrides) == len(jobs) > 1
            names_job = overrides[0] and not is_of_all  # "": a job without overrides
            problems.add(messages.ConfigError(f"{overrides[0]}: {sentence}" if names_job else sentence))
        return configs

    def _compose(self, job: Sequence[str], problems: messages.Problems) -> schema.RunConfig:
        """Compose and check one job's config; errors of several rules go to `problems`."""
        world_size = problems.attempt(deepspeed.ranks_of, self.options) or None
        words = [*self.fixed, *job, "run.name=run"]  # any name: each job gets its own at its launch
        is_local = deepspeed.hostfile_of(self.options) is None  # else files may lie on other machines
        cfg = arguments.parse_checked(words, world_size=world_size, files=is_local, problems=problems).loaded.cfg
        load.to_dict(cfg)  # registers the secrets in it, so that they are masked
        return cfg


def parse_sweep(words: Sequence[str], problems: messages.Problems) -> SweepPlan:
    """Sort the arguments into launcher options, the sweep's settings and overrides; errors are added to `problems`."""
    launcher, options, rest = deepspeed.typed_options(words)
    settings, overrides = dict[str, str](), list[str]()
    config_dir, config_dir_words = "", list[str]()
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        # Hydra's option, of which the value may be the next word.
        if name in ("--config-dir", "-cd"):
            config_dir = value if equals else "".join(rest[:1])
            rest = rest if equals else rest[1:]
            config_dir_words += ["--config-dir", config_dir]
        elif word.startswith("-"):
            problems.add(
                command_line.unknown_option(word, "", _SWEEP_ARGUMENTS, deepspeed.OPTIONS, keys_meant, option_meant)
            )
        elif equals and name in _SWEEP_ARGUMENTS:
            settings[name] = value
        else:
            overrides.append(arguments.named_recipe(word, "".join(rest[:1]), _SWEEP_ARGUMENTS))
    fixed, axes = split_axes(overrides, config_dir)
    for word in [*fixed, *(f"{axis.key}=" for axis in axes)]:
        if word.lstrip("+").startswith("run.name="):
            problems.add(messages.ConfigError(tr("the sweep names its runs itself; sweep=NAME names the sweep.")))
    if any(axis.key.lstrip("+") == "run.dir" for axis in axes):
        problems.add(messages.ConfigError(tr("run.dir is one directory for the whole sweep.")))
    if not axes:
        text = tr(
            "nothing is swept: give a key several values, such as optim.lr=1e-5,2e-5, or run it once with "
            "`toolkit launch`."
        )
        problems.add(messages.ConfigError(text))
    return SweepPlan(
        launcher=launcher, options=options, fixed=[*config_dir_words, *fixed], axes=axes, settings=settings
    )


def run_grid(plan: SweepPlan, words: Sequence[str], problems: messages.Problems) -> int:
    """Run every combination of values that is not done; return the exit code: 0 if all are done now. `words`: the
    arguments as typed; `problems`: errors found before, raised together with those found here.
    """
    if "metric" in plan.settings:
        problems.add(messages.ConfigError(tr("metric= has no effect without trials=N.")))
    combinations = problems.attempt(grid, plan.axes) or []
    most = problems.attempt(command_line.positive_int, plan.settings, "max_jobs") or MOST_JOBS
    if (number := len(combinations)) > most:
        problems.add(
            messages.ConfigError("these are {number} runs. Add max_jobs={number} if that is meant.", number=number)
        )
    configs = plan.compose_all(combinations[:most], problems)
    problems.raise_all()
    with open_sweep(sweep_dir(plan, configs[0]), typed_command(words)) as sweep:
        jobs = [sweep.add(new_job(job, cfg)) for job, cfg in zip(combinations, configs, strict=True)]
        sweep.save()
        say("{number} runs, in {folder}.", number=len(jobs), folder=sweep.folder)
        requests = processes.SignalRequests()
        for index, (job, overrides) in enumerate(zip(jobs, combinations, strict=True), start=1):
            if requests.last:
                break
            label = f"[{index}/{len(jobs)}] {job.name}"
            if job.state in (DONE, DIVERGED):
                say("{run}: {state} already.", run=label, state=state_name(job.state))
                continue
            say(label)
            launch(plan, sweep, job, overrides, requests)
        show(sweep, jobs)
        check_stopped(sweep, requests)
        end(sweep, is_done=all(job.state in (DONE, DIVERGED) for job in jobs))
        return 0 if all(job.state == DONE for job in jobs) else 1


def run_trials(plan: SweepPlan, words: list[str], problems: messages.Problems) -> int:
    """Run trials chosen by Optuna until there are `trials`; return 0 if one has finished, else 1. See `run_grid`."""
    most = problems.attempt(command_line.positive_int, plan.settings, "trials") or 1
    try:
        import optuna
    except ImportError as error:
        raise messages.ConfigError(tr("trials=N needs Optuna: pip install 'optuna>=5'")) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    first = _check_axis_ends(plan, problems)
    metric = _chosen_metric(plan, first)
    with open_sweep(sweep_dir(plan, first), typed_command(words)) as sweep:
        study = _open_study(plan, sweep, metric, first)
        sweep.save()
        say("{number} trials, in {folder}.", number=most, folder=sweep.folder)
        requests = processes.SignalRequests()
        while not requests.last and (trial := _next_trial(plan, study, most)) is not None:
            number, overrides = trial
            try:
                job = sweep.add(new_job(overrides, plan.compose(overrides), number))
            except messages.ConfigError as error:
                say(f"[{number + 1}/{most}] " + tr("skipped: {reason}", reason=error))
                job = _rejected_trial(sweep, number, overrides)
            else:
                if job.state != DONE:
                    say(f"[{number + 1}/{most}] {' '.join(job.words)}")
                    launch(plan, sweep, job, overrides, requests)
            if job.state == STOPPED:
                break  # by a signal, or its own file `stop`: it stays open, and resumes the next time
            value = read_result(sweep.run_dir(job), metric).best
            is_result = job.state == DONE and not math.isnan(value)
            if is_result:
                study.tell(number, value)
            else:
                study.tell(number, None, optuna.trial.TrialState.FAIL)
        show(sweep, sweep.jobs, metric)
        is_found = bool(study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)))
        if is_found:
            best = study.best_trial
            say(
                "Best: {metric} = {value}, trial-{trial}: {words}",
                metric=metric,
                value=f"{best.value:.4f}",
                trial=f"{best.number:03}",
                words=" ".join(word for job in sweep.jobs if job.trial == best.number for word in job.words),
            )
        check_stopped(sweep, requests)
        is_stopped = any(job.state == STOPPED for job in sweep.jobs)
        end(sweep, is_done=not is_stopped)
        return 0 if is_found and not is_stopped else 1


def _rejected_trial(sweep: SweepDir, number: int, overrides: Sequence[str]) -> SweepJob:
    """Record the trial `number`, whose config the checks have rejected, as a job that has failed; return the job."""
    job = SweepJob(name=f"trial-{number:03}", words=[secrets.hide_word(word) for word in overrides], trial=number)
    job.state, job.exit_code = FAILED, messages.ConfigError.exit_code
    # In place of its job, if a command that was killed in here has recorded that: its trial stayed open.
    sweep.jobs = [*(other for other in sweep.jobs if other.name != job.name), job]
    sweep.save()
    return job


def _open_study(plan: SweepPlan, sweep: SweepDir, metric: str, first: schema.RunConfig) -> Any:
    """Return the Optuna study in a sweep's directory, created if it is not there; ConfigError if it was begun with
    another metric, other axes or another config. `first`: the config of the axes' first values.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(sweep.folder / STUDY))),
        # A resumed search must not draw again what it has drawn: so the seed counts the jobs.
        sampler=optuna.samplers.TPESampler(seed=first.run.seed + len(sweep.jobs)),
        study_name="sweep",
        direction="minimize" if metric.endswith(_LOWER_IS_BETTER) else "maximize",
        load_if_exists=True,
    )
    words = [secrets.hide_word(word) for word in sorted(map(str, plan.axes))]
    settings = {"metric": metric, "axes": words, "config": new_job([], first).config}
    recorded = study.user_attrs.get("began with")
    if recorded is None:
        study.set_user_attr("began with", settings)
    elif (recorded["metric"], recorded["axes"]) != (metric, words):
        raise messages.ConfigError(
            "{folder}: this search began with {then}, and that cannot become {now}. Type the metric and the values "
            "that it began with, or choose another sweep=NAME.",
            folder=sweep.folder,
            then=" ".join([f"metric={recorded['metric']}", *recorded["axes"]]),
            now=" ".join([f"metric={metric}", *words]),
        )
    elif recorded != settings:
        raise messages.ConfigError(
            "{folder}: this search began with other settings (the recipe or an override has changed since). Choose "
            "another sweep=NAME.",
            folder=sweep.folder,
        )
    return study


def _check_axis_ends(plan: SweepPlan, problems: messages.Problems) -> schema.RunConfig:
    """Check configs before a search: the first and the last value of every axis, with the others at their first values.
    Return the config of all first values.
    """
    ends = {axis.key: axis.ends() for axis in plan.axes}
    first = {key: low for key, (low, _) in ends.items()}
    last_of_each = [{**first, key: high} for key, (_, high) in ends.items()]
    jobs = [[f"{key}={value}" for key, value in job.items()] for job in (first, *last_of_each)]
    configs = plan.compose_all(jobs, problems)
    problems.raise_all()
    return configs[0]


def _chosen_metric(plan: SweepPlan, cfg: schema.RunConfig) -> str:
    """Return the metric to optimize, a name in metrics.jsonl; ConfigError if runs of this sweep would not write it."""
    metrics = ["loss"]
    if cfg.data.validation or cfg.data.validation_fraction:
        metrics += [schema.EVAL_LOSS, *(f"eval_{metric.value}" for metric in cfg.evaluate.metrics)]
        metrics += ["eval_perplexity"] if cfg.task.is_language and not cfg.preference.is_on else []
    metric = plan.settings.get("metric", "")
    if metric not in metrics:
        text = tr("metric = {metric} is none of {known}.", metric=metric or '""', known=", ".join(metrics))
        raise messages.ConfigError(messages.joined(text, messages.did_you_mean(metric, metrics)))
    return metric


def _next_trial(plan: SweepPlan, study: Any, most: int) -> tuple[int, list[str]] | None:
    """Return number and overrides of a trial that was begun but not ended, else of a new one; None from `most` on.

    A stopped command leaves its trial begun (Optuna's RUNNING), so that the next one resumes it.
    """
    from optuna import trial

    keys = {axis.key for axis in plan.axes}
    open_trial: Any = None  # the first that has all its values
    for begun in study.get_trials(deepcopy=False, states=(trial.TrialState.RUNNING,)):
        if keys - begun.params.keys():  # this process died while its values were drawn
            study.tell(begun.number, state=trial.TrialState.FAIL)
        else:
            open_trial = open_trial or begun
    if open_trial is None:
        if len(study.get_trials(deepcopy=False)) >= most:
            return None
        open_trial = study.ask({axis.key: _distribution(axis) for axis in plan.axes})
    return open_trial.number, [f"{axis.key}={axis.typed(open_trial.params[axis.key])}" for axis in plan.axes]


def _distribution(axis: Axis) -> Any:
    """Return what Optuna draws the values of an axis from: its values, or its range of numbers."""
    from optuna import distributions

    if axis.values:
        return distributions.CategoricalDistribution(axis.values)
    if axis.is_whole:
        return distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.is_log)
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.is_log)


def sweep_dir(plan: SweepPlan, cfg: schema.RunConfig) -> Path:
    """Return the sweep's directory, run.dir/NAME: sweep=NAME, or named after the recipe and a digest of overrides."""
    words = [*plan.fixed, *map(str, plan.axes), plan.settings.get("metric", "")]
    name = plan.settings.get("sweep") or f"sweep-{Path(cfg.recipe).stem}-{digest(sorted(words))}"
    if Path(name).name != name or name.startswith((".", "-")) or not name.isprintable():
        raise messages.ConfigError(
            "sweep = {name} must be a plain directory name; the directory around it is run.dir.", name=name
        )
    return Path(cfg.run.dir).absolute() / name


def typed_command(words: Sequence[str], command: str = "sweep") -> str:
    """Return the command as it was typed, without secrets."""
    return shlex.join(["toolkit", command, *map(secrets.hide_word, words)])


def new_job(words: Sequence[str], cfg: schema.RunConfig, trial: int | None = None) -> SweepJob:
    """Return a job that has not run yet, of its overrides `words`, its config, and its number in a search."""
    without_place = replace(cfg, language="", run=replace(cfg.run, name="", dir=""))
    config = hashlib.sha256(load.to_yaml(without_place).encode()).hexdigest()[:16]
    name = job_name(words) if trial is None else f"trial-{trial:03}"
    return SweepJob(name=name, words=[secrets.hide_word(word) for word in words], config=config, trial=trial)


def job_name(words: Sequence[str]) -> str:
    """Return a short directory name: optim.lr=1e-5 zero=stage2 is lr-1e-5_zero-stage2; with a digest if it is cut."""
    parts, is_complete = [], True
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        name = key.rpartition(".")[2]
        # Secrets are known by their values, or (hide_all) by their keys.
        shown = str(secrets.hide_all({name: secrets.hide(value)})[name]).replace(secrets.MASK, "hidden")
        if "/" in shown:  # of a path, the last part
            shown = Path(shown.strip("/'\"")).name
        shown = re.sub(r"[^A-Za-z0-9._+-]+", "-", shown).strip("-.")[:_LONGEST_VALUE]
        # With both _ and -, a value may look like two words: a=x_b-y gives the same name as a=x b=y.
        is_complete = is_complete and shown == value and not {"_", "-"} <= set(value)
        parts.append(f"{name}-{shown}")
    name = "_".join(parts) or "run"
    if is_complete and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{digest(words)}"


def digest(words: Sequence[str]) -> str:
    """Return eight hexadecimal digits that identify a list of words."""
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:8]


@contextmanager
def open_sweep(folder: Path, command: str) -> Iterator[SweepDir]:
    """Lock a sweep's directory, which is made if it does not exist, and yield the sweep; LaunchError if another process
    has locked it, or it is no sweep's.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / FILE).exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
                raise messages.LaunchError(
                    "{folder} exists and is no sweep ({file} is missing). Choose another sweep=NAME.",
                    folder=folder,
                    file=FILE,
                )
            lock = stack.enter_context(open(folder / ".lock", "w", encoding="utf-8"))
            is_granted = disk.lock_or_warn(lock, folder)
        except OSError as error:
            raise messages.LaunchError(
                "cannot make the sweep's directory {folder}, or lock it: {reason}.",
                folder=folder,
                reason=error.strerror or error,
            ) from error
        if not is_granted:
            raise messages.LaunchError("another process is running the sweep in {folder}.", folder=folder)
        yield SweepDir(folder=folder, command=command, jobs=_read_jobs(folder))


def _read_jobs(folder: Path) -> list[SweepJob]:
    """Return the jobs of sweep.json, [] without one, with states corrected by what is in the run directories."""
    if not (folder / FILE).exists():
        return []
    try:
        jobs = [SweepJob(**job) for job in json.loads((folder / FILE).read_text(encoding="utf-8"))["jobs"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise messages.DataError(
            "{file} cannot be read: {reason}. Choose another sweep=NAME.", file=folder / FILE, reason=error
        ) from error
    for job in jobs:
        if (folder / job.name / "DONE").exists():
            job.state = DONE
        elif job.state == DIVERGED and not (folder / job.name).exists():
            job.state = WAITING  # removed, to be run again
        elif job.state in (RUNNING, DONE):
            job.state = FAILED  # the sweep died next to it, or its DONE was removed
    return jobs


def launch(
    plan: SweepPlan,
    sweep: SweepDir,
    job: SweepJob,
    overrides: Sequence[str],
    requests: processes.SignalRequests,
    log: IO[str] | None = None,
) -> None:
    """Run one job in a child process, passing on signals, and record in sweep.json how it ended. `overrides`: the
    job's, with secrets; `log`: file for its output, None for this process's.
    """
    words = [f"run.dir={files.quoted(sweep.folder)}", f"run.name={job.name}"]
    command = [*LAUNCH, *plan.launcher, *plan.fixed, *overrides, *words]
    job.state, job.started, job.ended, job.exit_code = RUNNING, time.strftime(_TIME), "", None
    sweep.save()
    [code] = processes.wait_for([children.start(command, start_new_session=True, stdout=log, stderr=log)], requests)
    job.exit_code, job.ended = code, time.strftime(_TIME)
    if (sweep.run_dir(job) / "DONE").exists():
        job.state = DONE
    elif code == messages.Stopped.exit_code or requests.last:
        job.state = STOPPED
    else:
        job.state = DIVERGED if code == messages.Diverged.exit_code else FAILED
    sweep.save()


def check_stopped(sweep: SweepDir, requests: processes.SignalRequests) -> None:
    """Raise Stopped if the sweep was asked to stop."""
    if requests.last:
        raise messages.Stopped(
            "the sweep was stopped by {signal}. The same command resumes it:  {command}",
            signal=signal.Signals(requests.last).name,
            command=sweep.command,
        )


def end(sweep: SweepDir, is_done: bool) -> None:
    """Print the command that resumes the sweep, unless `is_done`, and the one that compares its runs."""
    if not is_done:
        say("What is not done is tried again by the same command:  {command}", command=sweep.command)
    if runs_of(sweep.folder):
        folder = shlex.quote(str(sweep.folder))
        say("To compare the runs in a page of charts:  {command}", command=f"toolkit report {folder}")


@dataclass(frozen=True, slots=True)
class JobResult:
    """Numbers of one run's metrics.jsonl; NaN if there are none."""

    loss: float
    """Training loss of the last logged step."""
    best: float
    """Best value of the metric: the lowest of losses and perplexities, the highest of others."""
    tokens_per_s: float
    """Median over the logged steps."""


def read_result(folder: Path, metric: str = schema.EVAL_LOSS) -> JobResult:
    """Return the numbers in a run directory's metrics.jsonl, if there is one, with the best value of `metric`."""
    rows = []
    with suppress(OSError):
        rows = [row for row in json_lines(folder / "metrics.jsonl") if row is not None]

    def series(name: str) -> list[float]:
        """Return the numbers of one name, in order."""
        return [float(row[name]) for row in rows if isinstance(row.get(name), (int, float))]

    losses, speeds, values = series("loss"), series("tokens_per_s"), filter(math.isfinite, series(metric))
    is_lower_better = metric.endswith(_LOWER_IS_BETTER)
    best = min(values, default=math.nan) if is_lower_better else max(values, default=math.nan)
    last_loss = losses[-1] if losses else math.nan
    return JobResult(last_loss, best, statistics.median(speeds) if speeds else math.nan)


def show(sweep: SweepDir, jobs: Sequence[SweepJob], metric: str = schema.EVAL_LOSS) -> None:
    """Print a table of jobs with their best values of `metric`, and below it the error of each that failed."""
    heads = (tr("overrides"), tr("state"), tr("exit code"), tr("loss"), tr("best {metric}", metric=metric))
    rows, errors = [], []
    for job in jobs:
        result = read_result(sweep.run_dir(job), metric)
        values = ((result.loss, ".4f"), (result.best, ".4f"), (result.tokens_per_s, ".0f"))
        numbers = ["-" if math.isnan(value) else format(value, form) for value, form in values]
        code = "" if job.exit_code is None else str(job.exit_code)
        rows.append((" ".join(job.words) or job.name, state_name(job.state), code, *numbers, job.name))
        if job.state in (FAILED, DIVERGED):
            with suppress(OSError):
                text = (sweep.run_dir(job) / "FAILED").read_text(encoding="utf-8", errors="replace")
                errors.append(f"  {job.name}: {' '.join(text.split())[:200]}")
    say("")
    for line in text_table((*heads, tr("tokens/s"), tr("directory")), rows):
        say(line)
    for line in [tr("Errors:"), *errors] if errors else []:
        say(line)
    say("Everything is in {folder}.", folder=sweep.folder)


def state_name(state: str) -> str:
    """Return a state in the user's language."""
    words = (tr("waiting"), tr("running"), tr("done"), tr("failed"), tr("diverged"), tr("stopped"))
    return dict(zip((WAITING, RUNNING, DONE, FAILED, DIVERGED, STOPPED), words, strict=True)).get(state, state)
