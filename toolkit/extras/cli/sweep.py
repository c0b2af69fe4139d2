"""Train a recipe for every combination of values, one run after another; rerun the command to resume.

toolkit sweep [launcher options] recipe=NAME optim.lr=1e-5,2e-5 zero=stage2,stage3 [sweep=NAME] [key=value …]
toolkit sweep … 'optim.lr=tag(log,interval(1e-6,1e-4))' trials=20 metric=eval_loss

  A,B  range(1,5)  glob(stage3*)   several values of a key or a group, in Hydra's sweep grammar
  sweep=NAME                       the sweep's directory, run.dir/NAME; default: named after recipe and arguments
  max_jobs=64                      reject a larger grid
  trials=N metric=NAME             choose N combinations by Optuna; interval(low,high) names a range of numbers
  launcher options, other arguments as for `toolkit launch`, which starts each run

`python run.py --multirun …` is the same. Nothing starts before every combination has been composed and checked. A run
that has finished is not run again, one that crashed resumes from its checkpoint, one that diverged is not repeated.
"""

from toolkit.extras.sweep import parse_sweep, run_grid, run_trials
from toolkit.launch import environment
from toolkit.messages import Problems


def run(words: list[str]) -> int:
    """Run a grid, or with `trials=N` a search; return the exit code."""
    environment.reject_if_rank()
    problems = Problems()
    plan = parse_sweep(words, problems)
    return (run_trials if "trials" in plan.settings else run_grid)(plan, words, problems)
