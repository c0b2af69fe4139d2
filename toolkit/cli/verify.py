"""Verify a checkpoint or an export: every byte against the manifest, and the logits against those at save time.

toolkit verify PATH [forward=yes|no]

  PATH           a checkpoint (step-N), weights only (step-N-weights), an export, or a run directory: everything in it
  forward=yes    load the model, compare every shape with its config, and run it once on the CPU: the logits must equal
                 those in probe/ up to rounding. Memory holds one layer of a model at a time; checkpoints, and
                 adapters with their base model, are loaded completely
  forward=no     files only: sizes, SHA-256 of every byte, missing or extra files, empty tensors, paths that leave the
                 directory; fast, and without PyTorch

Exit code 0 if everything is intact, 74 otherwise.
"""

import sys
import time
from pathlib import Path

from toolkit.checkpoint import directory, intact
from toolkit.command_line import named_arguments, one_of
from toolkit.config import files
from toolkit.messages import BaseMissing, CheckpointError, CodeNotTrusted, ConfigError, ToolkitError, tr
from toolkit.models.directory import read_config


def run(words: list[str]) -> None:
    """Verify all that a path holds; CheckpointError if something is damaged."""
    arguments = named_arguments(
        words, required=("path",), optional=("forward",), usage="toolkit verify PATH", bare="path"
    )
    forward, folders = one_of(arguments, "forward", ("yes", "no")) == "yes", _find_directories(Path(arguments["path"]))
    if not folders:
        raise ConfigError("{path} is no checkpoint and holds none.", path=arguments["path"])
    damaged = sum(not _verify_directory(folder, forward) for folder in folders)
    if damaged:
        raise CheckpointError("{count} of {total} are damaged.", count=damaged, total=len(folders))


def _find_directories(path: Path) -> list[Path]:
    """Return what to verify: `path` itself, or in a run directory checkpoints, the oldest first, then its models."""
    files.check_directory(path)
    is_checkpoint = directory.step_of(path.absolute()) >= 0  # by its name, though it has lost its manifest
    if is_checkpoint or (path / directory.MANIFEST).exists() or (path / "config.json").exists():
        return [path]
    checkpoints = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    both = [*directory.published_checkpoints(checkpoints), *directory.weights_only(checkpoints)]
    models = [path / name for name in ("base", "export", "merged", "official") if (path / name).is_dir()]
    return [*sorted(both, key=directory.step_of), *models]


def _verify_directory(folder: Path, forward: bool) -> bool:
    """Verify a checkpoint or a model, print what was found, and return whether it is undamaged."""
    started = time.monotonic()
    has_manifest = (folder / directory.MANIFEST).exists()
    is_model = (folder / "config.json").exists()
    needs_manifest = has_manifest or not is_model  # a model of an older version, or of another program, has none
    wrong = intact.manifest_problems(folder) if needs_manifest else []
    seconds = max(time.monotonic() - started, 1e-9)
    note = ""
    try:
        if is_model and not wrong:
            read_config(str(folder))
        if forward and not wrong:
            import transformers

            from toolkit.export.verify import verify_logits

            transformers.utils.logging.disable_progress_bar()
            note = verify_logits(folder)
    except (BaseMissing, CodeNotTrusted) as error:
        note = tr("no forward: {reason}", reason=error)
    except ToolkitError as error:
        wrong.append(str(error))
    if wrong:
        sys.stdout.write(tr("{folder}: DAMAGED", folder=folder) + "".join(f"\n  {problem}" for problem in wrong) + "\n")
        return False
    if has_manifest:
        entries = intact.read_manifest(folder)["files"].values()
        size = sum(entry["size_bytes"] for entry in entries) / 1e6
        line = tr(
            "{folder}: whole, {count} files, {size} MB ({rate} MB/s).",
            folder=folder,
            count=len(entries),
            size=f"{size:,.1f}",
            rate=f"{size / seconds:,.0f}",
        )
    else:
        line = tr(
            "{folder}: it has no manifest (an older version, or another program, wrote it), so damage within its files "
            "cannot be seen; they are there and as long as they say.",
            folder=folder,
        )
    sys.stdout.write(line + (f"\n  {note}" if note else "") + "\n")
    return True
