"""Rules for a program that trains a model and a data set of its own (toolkit.own)."""

import re
from collections.abc import Iterator

from toolkit.config.load import LoadedConfig
from toolkit.config.schema import AUTO, DecayOf, RunConfig
from toolkit.config.validate import all_keys
from toolkit.errors import ConfigError
from toolkit.messages import tr

_READ = ("data.num_workers", "evaluate.every", "evaluate.at_start", "evaluate.keep_best")
_SECTIONS = (
    "model.",
    "tuning.",
    "data.",
    "prepare.",
    "kernels.",
    "evaluate.",
    "train.activation_checkpointing.",
    "train.neftune_alpha",
    "train.random_ltd.",
)


def unread_own(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the keys that say what the program itself says, and why they are not read."""
    reason = tr("the program brings its own model, data and loss")
    for key in all_keys():
        if key.startswith(_SECTIONS) and key not in _READ:
            yield key, reason, ""


def check_own(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Refuse what needs to know the model.

    Yields:
        What does not hold.
    """
    cfg = loaded.cfg
    for name in ("tensor", "sequence", "pipeline"):
        ranks, key = getattr(cfg.parallel, name), f"parallel.{name}"
        if ranks > 1:
            yield loaded.error(
                key,
                tr(
                    "{key} = {value}: how to split a model of one's own is not known; its ranks share the data. Set it "
                    "to 1; zero=stage3 splits the parameters of any model.",
                    key=key,
                    value=ranks,
                ),
            )
    for key, value in (("batch.micro_per_gpu", cfg.batch.micro_per_gpu), ("plan.auto", cfg.plan.auto)):
        if value in (AUTO, True) and isinstance(value, (str, bool)):
            yield loaded.error(
                key,
                tr(
                    "{key} = {value}: nobody knows what a model of one's own takes. Give batch.micro_per_gpu a number, "
                    "and choose zero= yourself.",
                    key=key,
                    value=str(value).lower(),
                ),
            )
    yield from _check_optim(loaded)
    name = cfg.evaluate.keep_best
    if name and not re.fullmatch(r"eval_\w+", name):
        yield loaded.error(
            "evaluate.keep_best",
            tr("evaluate.keep_best = {name} must be eval_loss, or eval_ and the name of a metric.", name=name),
        )


def _check_optim(loaded: LoadedConfig) -> Iterator[ConfigError]:
    """Refuse rates and decay by the place of a parameter: it is told by names that language models have."""
    optim = loaded.cfg.optim
    for key, value, is_placed, others in (
        ("optim.decay", optim.decay.value, optim.decay is DecayOf.hidden, "all, matrices"),
        ("optim.layer_lr_decay", optim.layer_lr_decay, optim.layer_lr_decay != 1, "1"),
    ):
        if is_placed:
            yield loaded.error(
                key,
                tr(
                    "{key} = {value}: which parameters of a model of one's own are layers, embeddings or output is not "
                    "known. Possible: {others}.",
                    key=key,
                    value=value,
                    others=others,
                ),
            )
