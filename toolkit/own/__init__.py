"""Train a model and a data set of one's own: docs/own_models.md."""

from toolkit.cli.failures import end_with_launcher

end_with_launcher()  # before the seconds in which torch is imported

from toolkit.distributed.process_group import gather_metrics  # noqa: E402
from toolkit.own.entry import train  # noqa: E402
from toolkit.own.share import share  # noqa: E402

__all__ = ["gather_metrics", "share", "train"]
