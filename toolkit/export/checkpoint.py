"""Load or export the model of a checkpoint in one process, one parameter at a time.

python -m toolkit.export.checkpoint CHECKPOINT DIRECTORY
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from toolkit.checkpoint import fragment_reader, intact
from toolkit.export.assemble import assemble_state, with_config_keys
from toolkit.export.card import CARD_FILE, card
from toolkit.export.custom import export_custom_checkpoint, is_custom
from toolkit.export.write import ExportOptions, scratch_directory, write_folder
from toolkit.messages import NotExportable, ToolkitError, clauses
from toolkit.models import load_weights, probe
from toolkit.models.load import load_empty
from toolkit.models.save import MODEL_DIR

if TYPE_CHECKING:
    from toolkit.export.merge import TunedPart


def load_checkpoint(checkpoint: Path) -> PreTrainedModel:
    """Return a verified checkpoint's model on the CPU, in its precision; NotExportable if it does not describe it."""
    if (part := _tuned_part(checkpoint)) is not None:
        from toolkit.export.adapter import load_part

        return load_part(part)
    model = load_empty(checkpoint / MODEL_DIR)
    values = fragment_reader.iter_weights(checkpoint)
    load_weights.assign_state(model, assemble_state(checkpoint, model, values, scratch=None, dtype=None))
    return model


def export_checkpoint(checkpoint: Path, folder: Path, options: ExportOptions | None = None, base: str = "") -> None:
    """Write a verified checkpoint's model or adapter, bit for bit as its run would export it.

    Args:
        checkpoint: its files match the manifest.
        folder: must not exist.
        options: None: those of a run's export.
        base: directory of the base model that a part was trained of; "" finds it.
    """
    options = options or ExportOptions()
    if is_custom(checkpoint):
        export_custom_checkpoint(checkpoint, folder, options)
        return
    part = _tuned_part(checkpoint, base)
    describing = [name for name in intact.read_manifest(checkpoint)["files"] if name.startswith(f"{MODEL_DIR}/")]
    files = {name.removeprefix(f"{MODEL_DIR}/"): (checkpoint / name).read_bytes() for name in describing}
    is_adapter = part is not None and bool(part.settings) and not options.merge
    files[CARD_FILE] = card(intact.read_run_state(checkpoint), is_adapter)
    if part is not None:
        from toolkit.export.adapter import export_part

        export_part(checkpoint, part, folder, options, files, options.precision)
        return
    options.check_whole_model()
    with scratch_directory(folder) as scratch:
        model = load_empty(checkpoint / MODEL_DIR)
        values = fragment_reader.iter_weights(checkpoint)
        state = assemble_state(checkpoint, model, values, scratch, options.precision)
        files["config.json"] = with_config_keys(files["config.json"], {}, options.dtype)
        write_folder(model, files, folder, options.format, probe.read(checkpoint), state, options.max_shard_size)


def _tuned_part(checkpoint: Path, base: str = "") -> "TunedPart | None":
    """Return what was trained in a checkpoint of an adapter or of a part of a model, None if it holds the full model;
    NotExportable if it does not say what its model is. `base` "" finds the base model.
    """
    described = checkpoint / MODEL_DIR
    if not described.is_dir():
        raise NotExportable(
            "{folder} does not say what its model is: it was saved by an older version or another program. Go on with "
            "the run (resume={folder}) to its end: it writes export/.",
            folder=checkpoint,
        )
    from toolkit.models.directory import BASE_FILE

    if not (described / BASE_FILE).is_file():
        return None
    from toolkit.export.adapter import part_of_checkpoint

    return part_of_checkpoint(checkpoint, base)


def main() -> None:
    """Verify and export a checkpoint as a separate process; exit with the reason if that fails."""
    source, target = map(Path, sys.argv[1:])
    if wrong := intact.manifest_problems(source):
        sys.exit(clauses(wrong[:3]))
    try:
        export_checkpoint(source, target)
    except (ToolkitError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
