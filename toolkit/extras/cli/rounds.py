"""Sample answers, score them and train on the best, in rounds; rerun the command to resume.

toolkit rounds [launcher options] recipe=NAME preference=dpo model.path=DIR prompts=FILE reward=… [rounds=3] [key=value]

  preference=dpo        learn from the best and the worst answer of each prompt; without it (preference=none) learn the
                        best one (best-of-n, rejection sampling), if its reward is at least min_reward=N
                        (1 for exact_match, json and regex, else any)
  prompts=FILE          questions, as for `toolkit generate input=FILE`; a final answer is the `reference`
  rounds=3              each: sample answers, score them, choose, train; the next round begins with what this one
                        trained
  samples=4             answers per prompt; temperature=1, top_p, top_k, max_new_tokens=256, batch_size=8, seed, system
                        as for `toolkit generate`
  server=vllm           a server of each round's model answers, as for `toolkit generate` (timeout_s=600): one per GPU;
                        of a command ('vllm serve {model} --port {port} --tensor-parallel-size 4') one for all
  reward=exact_match    1 where the answer is the reference, else 0
  reward=json           1 where the answer is JSON
  reward=regex pattern=…       1 where the pattern is found
  reward=length least=N most=N 0 within these numbers of characters, less by 1 for each character beyond
  reward=DIR            a reward model (AutoModelForSequenceClassification)
  reward=module:function allow_code=true   a function of yours: it gets a row of `toolkit generate`, returns a number
  run.name=NAME         the directory, below run.dir, of everything; default: named after recipe and arguments
  launcher options, other arguments as for `toolkit launch`, which starts each run
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.arguments import parse_checked
from toolkit.cli.generate import check_server
from toolkit.command_line import non_negative_int, number, positive_int
from toolkit.config import devices
from toolkit.launch import deepspeed, environment, hostfile
from toolkit.messages import ConfigError, tr

if TYPE_CHECKING:
    from toolkit.evaluate.rewards import Reward

GENERATE = ("samples", "temperature", "top_p", "top_k", "max_new_tokens", "batch_size", "seed", "system")
SERVER = ("server", "timeout_s")
OWN = ("prompts", "rounds", "reward", "min_reward", "pattern", "least", "most", "allow_code", *GENERATE, *SERVER)


def run(words: list[str]) -> int:
    """Check the arguments and do the rounds; return the exit code."""
    environment.reject_if_rank()
    launcher, options, typed = deepspeed.typed_options(words)
    if any(word.startswith(("data=", "data.sources")) for word in typed):
        raise ConfigError(tr("data= has no effect: rounds learn from the pairs that they make. Give prompts=FILE."))
    # Each round's data are made later: any name stands for them while the recipe is checked.
    arguments = parse_checked([*typed, "data=pairs.jsonl"], names=OWN, files=False)
    settings, cfg = arguments.values, arguments.loaded.cfg
    for name in ("prompts", "reward"):
        if not settings.get(name):
            raise ConfigError("{name} is missing: {usage}", name=name, usage="toolkit rounds … prompts=FILE reward=…")
    if (positive_int(settings, "samples") or 4) < 2:
        raise ConfigError(tr("samples = 1 makes no pairs. Use 2 or more."))
    if number(settings, "temperature", 1.0) == 0:
        raise ConfigError(tr("temperature = 0 gives the same answer each time. Set it above 0."))
    if "min_reward" in settings and cfg.preference.is_on:
        raise ConfigError(tr("min_reward has an effect without a preference loss only. Remove it."))
    if "timeout_s" in settings and not settings.get("server"):
        raise ConfigError("{name} has an effect with {owner}= only. Remove it.", name="timeout_s", owner="server")
    positive_int(settings, "timeout_s")  # only checked here
    # A server that is a command of the user's own gets all GPUs; else each GPU has a process.
    shares_gpus = bool(settings.get("server")) and not check_server(settings["server"])
    if not deepspeed.hostfile_of(options):
        hostfile.check_visible_devices_here(options)
    from toolkit.evaluate.rewards import Reward
    from toolkit.extras.rounds import RoundsPlan, run_rounds

    generate = {"samples": "4", "temperature": "1", "max_new_tokens": "256"}
    reward = Reward(
        kind=settings["reward"],
        pattern=settings.get("pattern", ""),
        least=non_negative_int(settings, "least", 0),
        most=non_negative_int(settings, "most", 0),
        allow_code=settings.get("allow_code", "false").lower() == "true",
    )
    plan = RoundsPlan(
        cfg=cfg,
        launcher=launcher,
        words=[word for word in typed if word.partition("=")[0] not in OWN],
        prompts=Path(settings["prompts"]).absolute(),
        reward=reward,
        rounds=positive_int(settings, "rounds") or 3,
        min_reward=-math.inf if cfg.preference.is_on else _min_reward(settings, reward),
        devices=[",".join(_devices(options))] if shares_gpus else _devices(options),
        server={name: settings[name] for name in SERVER if settings.get(name)},
        generate=generate | {name: settings[name] for name in GENERATE if name in settings},
    )
    return run_rounds(plan)


def _min_reward(settings: dict[str, str], reward: "Reward") -> float:
    """Return the least reward of an answer that is learned without a preference loss; -inf for any."""
    text = settings.get("min_reward", "")
    if not text:
        return 1.0 if reward.kind in ("exact_match", "json", "regex") else -math.inf
    try:
        return float(text)
    except ValueError:
        raise ConfigError("min_reward = {value} must be a number.", value=text) from None


def _devices(options: dict[str, str]) -> list[str]:
    """Return the GPUs that answer prompts, each with a process of its own: those that the runs use on this node.

    [""] is one process that sees what this one sees: on several nodes, on CPUs, and where there is one GPU.
    """
    if deepspeed.hostfile_of(options):
        return [""]
    if {"--include", "-i", "--exclude", "-e"} & options.keys():
        return [str(gpu) for gpus in deepspeed.hosts_of(options).values() for gpu in gpus]
    count = deepspeed.ranks_of(options) or _gpus_here()
    if count <= 1:
        return [""]
    # A process sees the GPU whose entry of CUDA_VISIBLE_DEVICES it is given; without the variable, that of the number.
    visible = os.environ.get(devices.visible_variable(), "")
    visible_gpus = visible.split(",") if visible and not visible.startswith(",") else []
    return [visible_gpus[number] if number < len(visible_gpus) else str(number) for number in range(count)]


def _gpus_here() -> int:
    """Return the number of visible GPUs, 1 on CPUs."""
    import torch

    from toolkit.distributed.accelerator import device_alone

    device = device_alone()
    return 1 if device.type == "cpu" else int(torch.get_device_module(device).device_count())
