"""Tokenize a recipe's data in advance.

toolkit prepare recipe=NAME [key=value …]

  prepare.shard=i/n   process one of n parts, for n nodes that share prepare.dir; then run once without it

An interrupted run resumes where it stopped. Data that is already prepared is verified: every byte is read.
"""

from toolkit.arguments import parse_checked
from toolkit.config import context_length, hub, objective
from toolkit.messages import DataError, say


def run(words: list[str]) -> None:
    """Tokenize a recipe's data, or with `prepare.shard` a part of it, and print what there is."""
    arguments = parse_checked(words)
    loaded = hub.resolve_teacher(hub.resolve_model_path(arguments.loaded))
    context_length.check_positions(loaded)
    cfg = loaded.cfg
    from toolkit.data.preview import padding_line, unit_name
    from toolkit.data.store import damaged_files
    from toolkit.data.tokenize import prepare_shard
    from toolkit.tasks.language_data import build_encoder, load_data
    from toolkit.tasks.registry import task_of

    encoder = build_encoder(cfg)
    task_of(cfg).check(cfg, encoder.tokenizer)
    if cfg.prepare.shard:
        total, new = prepare_shard(cfg, encoder)
        say(
            "Part {shard} is done: {total} pieces, {new} of them made now. When all parts are, run the same command "
            "without prepare.shard to join them.",
            shard=cfg.prepare.shard,
            total=f"{total:,}",
            new=f"{new:,}",
        )
        return
    prepared = load_data(cfg, encoder)
    folder = prepared.train.folder
    if not prepared.report.built and (damaged := damaged_files(folder)):
        raise DataError(
            "The prepared data in {folder} is damaged ({files}). Remove the directory, and prepare again.",
            folder=folder,
            files=", ".join(damaged),
        )
    _, samples_per_unit = objective.data_unit(cfg)
    say(
        "{count} training {unit}, {tokens} tokens ({trained} trained), in {folder}.",
        count=f"{len(prepared.train) // samples_per_unit:,}",
        unit=unit_name(cfg),
        tokens=f"{prepared.train.num_tokens:,}",
        trained=f"{prepared.train.num_trained_tokens:,}",
        folder=folder,
    )
    if line := padding_line(cfg, prepared.packing, prepared.train, prepared.train_plan):
        say(line)
