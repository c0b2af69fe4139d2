"""A recipe's run and a bare DeepSpeed script on the same model and the same micro-batches, each as a user starts it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import bare
from benchmarks.processes import Launch
from toolkit.config.schema import Init, Packing, RunConfig, TuningMethod
from toolkit.data.sampler import BEGINNING, next_position
from toolkit.engine.ds_config import build_ds_config
from toolkit.messages import ConfigError, tr
from toolkit.models.load import TORCH_DTYPES, create_model
from toolkit.tasks.language_batches import epoch_rows, rows_per_step, step_samples
from toolkit.tasks.language_data import LanguageData, load_data

QUIET = (
    *("evaluate.at_start=false", "checkpoint.export=false", "checkpoint.keep=0", "train.log_every=1"),
    *("report.enabled=false", "language=en"),
)
_STEPS_OF_ROWS = 50
_ENDLESS = 1_000_000


class Sides:
    """Starts either side.

    Args:
        cfg: the recipe's, checked.
        words: recipe and overrides that give it.
        ranks: of each launch, on this machine.
        folder: where both work; the caller removes it.

    Raises:
        ConfigError: the recipe does something that a bare script does not.
    """

    def __init__(self, cfg: RunConfig, words: Sequence[str], ranks: int, folder: Path) -> None:
        if cfg.tuning.method is not TuningMethod.full or cfg.data.packing is not Packing.none:
            raise ConfigError(
                tr("a bare script trains every parameter on one sample per row: set tuning=full data.packing=none.")
            )
        self.ranks, self.folder = ranks, folder
        self.words = [*words, *QUIET, f"run.dir={folder}"]
        self.runs = 0
        self.bare_words = self._bare_words(cfg)

    def ours(self) -> tuple[Launch, Callable[[], int]]:
        """Start our run; return it, and what tells how many steps it has done."""
        self.runs += 1
        metrics = self.folder / f"ours{self.runs}" / "metrics.jsonl"
        words = ["--module", "--no_local_rank", "toolkit", "train", *self.words, f"run.name=ours{self.runs}"]
        return Launch(words, self.ranks), lambda: metrics.read_bytes().count(b'"loss":') if metrics.exists() else 0

    def bare(self) -> tuple[Launch, Callable[[], int]]:
        """Start the bare script; return the same of it."""
        launch = Launch(self.bare_words, self.ranks)
        return launch, lambda: sum(line.startswith("step ") for line in launch.output().splitlines())

    def _bare_words(self, cfg: RunConfig) -> list[str]:
        """Write what the bare script reads; return its command line."""
        prepared = load_data(cfg)
        self.folder.mkdir(parents=True, exist_ok=True)
        ds_file, rows_file = self.folder / "ds.json", self.folder / "rows.jsonl"
        ds = build_ds_config(cfg, self.ranks, _ENDLESS)
        ds_file.write_text(json.dumps({key: value for key, value in ds.values.items() if key != "scheduler"}))
        rows_file.write_text("".join(json.dumps(row) + "\n" for row in _rows(cfg, prepared, self.ranks)))
        words = [str(Path(bare.__file__)), "--deepspeed", "--deepspeed_config", str(ds_file)]
        words += ["--rows", str(rows_file), "--steps", str(_ENDLESS)]
        words += ["--dtype", str(TORCH_DTYPES[cfg.precision.dtype]).removeprefix("torch.")]
        if cfg.model.init is Init.pretrained:
            return [*words, "--model", cfg.model.path]
        model = create_model(cfg.model, cfg.precision.dtype, prepared.tokenizer, cfg.run.seed)
        model.config.save_pretrained(self.folder / "model")
        return [*words, "--model", str(self.folder / "model"), "--random"]


def _rows(cfg: RunConfig, prepared: LanguageData, ranks: int) -> list[dict[str, Any]]:
    """Return the samples of the first steps in the order in which a plain sampler gives each rank those of its own."""
    ordered: list[int] = []
    place, num_rows, (per_step, _) = BEGINNING, epoch_rows(cfg, prepared), rows_per_step(cfg, prepared.packing)
    for _ in range(_STEPS_OF_ROWS):
        by_rank = [
            [sample for batch in batches for sample in batch] for batches in step_samples(cfg, prepared, ranks, place)
        ]
        ordered += [sample for together in zip(*by_rank, strict=True) for sample in together]
        place = next_position(place, num_rows, per_step)
    rows = []
    for sample in ordered:
        ids, trained = prepared.train[sample]
        labels = [int(token) if is_trained else -100 for token, is_trained in zip(ids, trained, strict=True)]
        rows.append({"input_ids": ids.tolist(), "labels": labels})
    return rows
