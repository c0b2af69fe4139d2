"""A model's directory that has its name only once it is proven."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from toolkit import disk
from toolkit.export import model
from toolkit.messages import ToolkitError


def export_verified(
    path: Path, folder: Path, wanted: model.ExportOptions, *, forward: bool = True, **chosen: str
) -> str:
    """Do as `model.export_any`, and give the directory its name once its logits are those of the model, so that one
    that is there is proven; return what was compared, "" without `forward`. An error leaves nothing.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent) as parent:
            aside = Path(parent) / folder.name
            try:
                model.export_any(path, aside, wanted, **chosen)
                verdict = model.verify_logits(aside) if forward else ""
            except ToolkitError as error:
                text = str(error).replace(str(aside), str(folder))
                raise type(error)(text if os.sep in text else f"{path}: {text}") from error
            aside.rename(folder)
            disk.flush(folder.parent)
    except OSError as error:
        raise model.cannot_write(folder, error) from error
    return verdict
