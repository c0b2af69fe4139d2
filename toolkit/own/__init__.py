"""Train a model and a data set of one's own: docs/own_models.md."""

from toolkit.distributed.process_group import gather_metrics
from toolkit.own.entry import train
from toolkit.own.share import share

__all__ = ["gather_metrics", "share", "train"]
