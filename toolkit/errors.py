"""The errors that are the user's or the machine's, and the exit code of each.

Whatever raises one of these ends as a single message without traceback; any other exception is a defect of ours
and keeps its traceback.
"""

from toolkit import messages


class ToolkitError(Exception):
    """Base of all errors that are shown to the user as one message, in the user's language.

    With values, the message is a template, written out at the call as that of `tr`; else it is taken as it is.
    `exit_code` is the process's exit status, `parts` are the errors that one message numbers (toolkit.problems), `more`
    how many it only counts, `keys` the config keys that it is about.
    """

    exit_code = 2
    parts: "tuple[ToolkitError, ...]" = ()
    more: int = 0
    keys: tuple[str, ...] = ()

    def __init__(self, message: str = "", /, **values: object) -> None:
        super().__init__(messages.tr(message, **values) if values else message)


class ConfigError(ToolkitError):
    """A recipe, an override or a DeepSpeed JSON says something that cannot be."""


class DataError(ToolkitError):
    """A data file cannot be read, or holds rows that cannot be used: the user's to mend, so exit code 2."""


class ModelError(ToolkitError):
    """A model or tokenizer folder is missing, incomplete or of a kind that cannot be trained."""


class BaseMissing(ModelError):
    """An adapter or a checkpoint without frozen weights is whole, but the model that it stands on is not there."""


class RowError(Exception):
    """One row cannot be used; the message, made as in ToolkitError, says why. Whoever reads rows adds the position."""

    def __init__(self, message: str = "", /, **values: object) -> None:
        super().__init__(messages.tr(message, **values) if values else message)


class LaunchError(ToolkitError):
    """The processes were not started as the user asked: hostfile, ranks, ports."""


class RunFolderError(ToolkitError):
    """The run folder cannot be made, or belongs to another run."""


class CheckpointError(ToolkitError):
    """A checkpoint or an export could not be written or read."""

    exit_code = 74


class ProofDiffers(CheckpointError):
    """Logits are not those of the save but for rounding, though they may well be of the same weights."""


class NotExportable(CheckpointError):
    """A checkpoint is whole, but its model cannot be taken out of it."""


class Diverged(ToolkitError):
    """The loss is no number any more, or no step could be taken for many steps in a row."""

    exit_code = 70


class OutOfMemory(ToolkitError):
    """The run does not fit into memory as it is set: the user's to change, so exit code 2."""


class TrackError(ToolkitError):
    """What a run measures cannot be written."""

    exit_code = 74


class Stopped(ToolkitError):
    """The run was stopped by a signal, at a step boundary, with a checkpoint saved."""

    exit_code = 75


class RepeatedDeath(ToolkitError):
    """The run died twice without getting any further: to start it again would not help."""

    exit_code = 1
