"""Measure how fast this machine is, in processes of their own; see bench/calibrate.py."""

from concurrent.futures.process import BrokenProcessPool

from toolkit import children
from toolkit.config.schema import RunConfig
from toolkit.errors import ConfigError
from toolkit.launch.environment import free_port
from toolkit.messages import tr
from toolkit.plan.calibration import file_of
from toolkit.plan.kept import write
from toolkit.plan.machine import Machine, this_machine
from toolkit.plan.parameters import Outline

_PATIENCE_S = 300


def calibrate(cfg: RunConfig, machine: Machine, outline: Outline) -> None:
    """Measure this machine's rates and keep them.

    Args:
        cfg: whose model and rows are measured.
        machine: how many ranks, on what.
        outline: of the model.

    Raises:
        ConfigError: it is not this machine, or the measuring fails.
    """
    _check_here(machine)
    from toolkit.bench.calibrate import measure_rank

    port = free_port()
    pool = children.workers(machine.ranks)
    try:
        ranks = [
            pool.submit(measure_rank, cfg, rank, machine.ranks, port, machine.on_cpu) for rank in range(machine.ranks)
        ]
        found = [rank.result(timeout=_PATIENCE_S) for rank in ranks]
    except TimeoutError as error:
        raise ConfigError(tr("calibrate=true: no answer within {seconds} s.", seconds=_PATIENCE_S)) from error
    except (RuntimeError, ValueError, OSError, MemoryError, BrokenProcessPool) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(tr("calibrate=true: the machine could not be measured: {reason}", reason=reason)) from error
    finally:
        for process in (pool._processes or {}).values():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
    # All wait for the slowest: its rates are the machine's.
    slowest = {
        name: (max if name in ("micro_s", "latency_s") else min)(one[name] for one in found) for name in found[0]
    }
    write(file_of(cfg, machine, outline), slowest)


def _check_here(machine: Machine) -> None:
    if machine.nodes > 1:
        raise ConfigError(tr("calibrate=true measures one machine, this one: leave nodes= out."))
    here = this_machine()
    if machine.on_cpu:
        return
    is_alike = here is not None and (
        machine.ranks <= here.ranks and abs(machine.memory_bytes / here.memory_bytes - 1) < 0.1
    )
    if not is_alike:
        raise ConfigError(
            tr(
                "calibrate=true measures this machine, which is not {machine}: it has {here}. Leave gpus= out, or "
                "write gpus=2xcpu.",
                machine=machine.name,
                here=here.name if here else tr("no NVIDIA GPU"),
            )
        )
