"""Check a recipe without training: config, files, model folder. Nothing is loaded or built.

toolkit check recipe=NAME [world_size=8] [key=value …]

  world_size=8     number of ranks that the batch sizes are checked for
"""

from toolkit.cli.compose import compose, positive_int
from toolkit.config.checks import accumulation, check, settled
from toolkit.config.checks_track import check_track_here
from toolkit.config.hub import is_hub_name, with_folder
from toolkit.config.layout import layout_of
from toolkit.config.schema import AUTO, Init, RunConfig
from toolkit.data.duplicates import check_paths
from toolkit.data.sources import local_files
from toolkit.engine.ds_config import build_ds_config
from toolkit.messages import say, tr
from toolkit.models.folder import read_config, trust_folder
from toolkit.plan.parameters import shapes_of_config, tuned
from toolkit.plan.tensor import part_of


def run(words: list[str]) -> int:
    """Check."""
    composed = compose(words, world_size=None, arguments=("world_size",))
    world_size = positive_int(composed.arguments, "world_size")
    check(composed.loaded, world_size)
    has_weights = not is_hub_name(composed.loaded.cfg.model.path)
    composed.loaded = with_folder(composed.loaded, say, config_only=True)
    cfg = composed.loaded.cfg
    check_track_here(composed.loaded)
    check_paths(cfg.data, local_files(cfg.data))
    # The vocabulary of a random model is known once its tokenizer has been fitted.
    known = None
    if cfg.model.init is Init.pretrained:
        if cfg.model.trust_remote_code:
            trust_folder(cfg.model.path)
        known = shapes_of_config(read_config(cfg.model.path, with_weights=has_weights))
    for note in composed.notes:
        print(note)
    if world_size:
        build_ds_config(settled(cfg), world_size, cfg.train.max_steps or None)  # refuses unknown names in ds_extra
    for ranks in sorted({*cfg.batch.world_sizes, *([world_size] if world_size else [])}):
        print(_rows(cfg, ranks))
    if world_size and cfg.parallel.tensor > 1:
        groups, size = layout_of(cfg, world_size).data_ranks, cfg.parallel.tensor
        print(tr("{groups} groups of {size} neighbouring ranks, which split the layers.", groups=groups, size=size))
    if known and not cfg.tuning.adapter:
        outline = tuned(*known, cfg.tuning)
        trained, total = f"{outline.num_trained:,}", f"{outline.num_parameters:,}"
        print(tr("{trained} of {total} parameters are trained.", trained=trained, total=total))
        mine = part_of(outline, cfg.parallel.tensor)  # refuses what cannot be split
        if mine is not outline:
            print(tr("{count} of all parameters are on each rank.", count=f"{mine.num_parameters:,}"))
    print(tr("{recipe}: config and files are in order.", recipe=cfg.recipe))
    return 0


def _rows(cfg: RunConfig, world_size: int) -> str:
    size = cfg.batch.global_size
    if cfg.batch.micro_per_gpu == AUTO:
        return tr(
            "{size} rows per step on {world_size} ranks; how many of them at once, training finds out.",
            size=size,
            world_size=world_size,
        )
    return tr(
        "{size} rows per step = {micro} x {times} x {world_size} (micro-batch x accumulation x ranks).",
        size=size,
        micro=cfg.batch.micro_per_gpu,
        times=accumulation(cfg, world_size),
        world_size=layout_of(cfg, world_size).data_ranks,
    )
