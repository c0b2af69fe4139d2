"""A sweep whose combinations Optuna chooses, each by what the ones before it came to; kept in the sweep's folder."""

import math
from typing import Any

from toolkit.arguments import positive_int
from toolkit.config.load import Axis
from toolkit.config.schema import EVAL_LOSS, RunConfig
from toolkit.errors import ConfigError
from toolkit.jobs import sweep as sweeping
from toolkit.jobs.sweep import DONE, FAILED, STOPPED, SweepDir, SweepJob, SweepPlan
from toolkit.launch.processes import SignalRequests
from toolkit.messages import did_you_mean, joined, say, tr
from toolkit.problems import Problems
from toolkit.secrets import hide

STUDY = "optuna.log"
"""Optuna's journal: every trial, appended line by line."""
_BEGAN = "began with"


def run_trials(plan: SweepPlan, words: list[str], problems: Problems) -> int:
    """Run trials until there are as many as asked for; return the exit code: 0 if one at least has finished."""
    most = problems.attempt(positive_int, plan.own, "trials") or 1
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(tr("trials=N needs Optuna: pip install 'optuna>=5'")) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    first = _check_ends(plan, problems)
    metric = _metric(plan, first)
    with sweeping.open_sweep(sweeping.sweep_dir(plan, first), sweeping.typed_command(words)) as sweep:
        study = _open_study(plan, sweep, metric, first)
        sweep.save()
        say("{number} trials, in {folder}.", number=most, folder=sweep.folder)
        requests = SignalRequests()
        while not requests.last and (trial := _next(plan, study, most)) is not None:
            number, special = trial
            try:
                job = sweep.add(sweeping.new_job(special, plan.compose(special), number))
            except ConfigError as error:
                say(f"[{number + 1}/{most}] " + tr("left out: {reason}", reason=error))
                _leave_out(study, sweep, special, number)
                continue
            if job.state != DONE:
                say(f"[{number + 1}/{most}] {' '.join(job.words)}")
                sweeping.launch(plan, sweep, job, special, requests)
            if job.state == STOPPED:
                break  # by a signal, or its own file `stop`: it stays open, and resumes the next time
            _tell(study, sweep, job, metric)
        sweeping.show(sweep, sweep.jobs, metric)
        is_found = _say_best(study, sweep, metric)
        sweeping.check_stopped(sweep, requests)
        is_stopped = any(job.state == STOPPED for job in sweep.jobs)
        sweeping.end(sweep, is_done=not is_stopped)
        return 0 if is_found and not is_stopped else 1


def _open_study(plan: SweepPlan, sweep: SweepDir, metric: str, first: RunConfig) -> Any:
    """Return the study in a sweep's directory, or begin it; one of another metric, axes or config is an error."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(sweep.folder / STUDY))),
        # The seed says where a search begins; what comes back decides how it continues.
        sampler=optuna.samplers.TPESampler(seed=first.run.seed + len(sweep.jobs)),
        study_name="sweep",
        direction="minimize" if sweeping.lower_is_better(metric) else "maximize",
        load_if_exists=True,
    )
    words = [hide(word) for word in sorted(map(str, plan.axes))]
    now = {"metric": metric, "axes": words, "config": sweeping.new_job([], first).config}
    then = study.user_attrs.get(_BEGAN)
    if then is None:
        study.set_user_attr(_BEGAN, now)
    elif (then["metric"], then["axes"]) != (metric, words):
        raise ConfigError(
            "{folder}: this search began with {then}, and that cannot become {now}. Type the metric and the values "
            "that it began with, or choose another sweep=NAME.",
            folder=sweep.folder,
            then=" ".join([f"metric={then['metric']}", *then["axes"]]),
            now=" ".join([f"metric={metric}", *words]),
        )
    elif then != now:
        raise ConfigError(
            "{folder}: this search began with other settings (the recipe or an override has changed since). Choose "
            "another sweep=NAME.",
            folder=sweep.folder,
        )
    return study


def _check_ends(plan: SweepPlan, problems: Problems) -> RunConfig:
    """Compose and check the ends of every axis, the others at their first values; return the first config."""
    ends = [axis.ends() for axis in plan.axes]
    first = [f"{axis.key}={low}" for axis, (low, _) in zip(plan.axes, ends, strict=True)]
    others = [
        [*first[:place], f"{axis.key}={high}", *first[place + 1 :]]
        for place, (axis, (_, high)) in enumerate(zip(plan.axes, ends, strict=True))
    ]
    found = plan.compose_all([first, *others], problems)
    problems.raise_all()
    return found[0]


def _metric(plan: SweepPlan, cfg: RunConfig) -> str:
    """Return the name in metrics.jsonl that decides; an error if no run of this sweep writes it."""
    known = ["loss"]
    if cfg.data.validation or cfg.data.validation_fraction:
        known += [EVAL_LOSS, "eval_perplexity", *(f"eval_{metric.value}" for metric in cfg.evaluate.metrics)]
    metric = plan.own.get("metric", "")
    if metric not in known:
        text = tr("metric = {metric} is none of {known}.", metric=metric or '""', known=", ".join(known))
        raise ConfigError(joined(text, did_you_mean(metric, known)))
    return metric


def _next(plan: SweepPlan, study: Any, most: int) -> tuple[int, list[str]] | None:
    """Return number and overrides of the trial that is open still, else of a new one; None after the last."""
    import optuna

    begun = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    for trial in begun:
        if {axis.key for axis in plan.axes} - trial.params.keys():  # this process died while they were drawn
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    begun = [trial for trial in begun if len(trial.params) == len(plan.axes)]
    if not begun and len(study.get_trials(deepcopy=False)) >= most:
        return None
    trial = begun[0] if begun else study.ask({axis.key: _distribution(axis) for axis in plan.axes})
    return trial.number, [f"{axis.key}={axis.typed(trial.params[axis.key])}" for axis in plan.axes]


def _distribution(axis: Axis) -> Any:
    """Return what Optuna draws the values of an axis from."""
    from optuna import distributions

    if axis.values:
        return distributions.CategoricalDistribution(axis.values)
    if axis.is_whole:
        return distributions.IntDistribution(int(axis.low), int(axis.high), log=axis.is_log)
    return distributions.FloatDistribution(axis.low, axis.high, log=axis.is_log)


def _tell(study: Any, sweep: SweepDir, job: SweepJob, metric: str) -> None:
    """Tell Optuna what a run came to."""
    import optuna

    value = sweeping.read_result(sweep.run_dir(job), metric).best
    if job.state == DONE and not math.isnan(value):
        study.tell(job.trial, value)
    else:
        study.tell(job.trial, state=optuna.trial.TrialState.FAIL)


def _leave_out(study: Any, sweep: SweepDir, special: list[str], number: int) -> None:
    """Note that the combination of a trial is rejected: it failed, and nothing was started."""
    import optuna

    job = SweepJob(name=f"trial-{number:03}", words=[hide(word) for word in special], trial=number)
    job.state, job.exit_code = FAILED, ConfigError.exit_code
    sweep.jobs = [*(other for other in sweep.jobs if other.name != job.name), job]
    sweep.save()
    study.tell(number, state=optuna.trial.TrialState.FAIL)


def _say_best(study: Any, sweep: SweepDir, metric: str) -> bool:
    """Say which trial was the best; return whether there is one."""
    import optuna

    if not study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,)):
        return False
    best = study.best_trial
    say(
        "Best: {metric} = {value}, trial-{trial}: {words}",
        metric=metric,
        value=f"{best.value:.4f}",
        trial=f"{best.number:03}",
        words=" ".join(word for job in sweep.jobs if job.trial == best.number for word in job.words),
    )
    return True
