"""Tokenise a recipe's data now, so that training finds it ready.

toolkit prepare recipe=NAME [key=value …]
"""

from toolkit.cli.compose import compose
from toolkit.config.checks import check
from toolkit.messages import tr


def run(words: list[str]) -> int:
    """Prepare."""
    composed = compose(words, world_size=None)
    check(composed.loaded)
    from toolkit.train.prepared import prepare_data

    prepared = prepare_data(composed.loaded.cfg, speaks=True)
    print(
        tr(
            "{samples} training samples, {tokens} tokens ({trained} trained), in {folder}.",
            samples=f"{len(prepared.train):,}",
            tokens=f"{prepared.train.num_tokens:,}",
            trained=f"{prepared.train.num_trained_tokens:,}",
            folder=prepared.train.folder,
        )
    )
    return 0
