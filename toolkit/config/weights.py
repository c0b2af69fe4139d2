"""Weights of sources that change over a run: straight lines between points."""

from bisect import bisect_right
from itertools import pairwise

from toolkit.config.schema import SourceConfig


def weight_at(source: SourceConfig, at: float) -> float:
    """Return the weight of a source at a point of the run from 0 to 1; outside of its points that of the nearest."""
    points = source.weights
    if not points:
        return source.weight
    behind = bisect_right(points, at, key=lambda point: point.at)
    if behind in (0, len(points)):
        return points[max(0, behind - 1)].weight
    left, right = points[behind - 1], points[behind]
    return left.weight + (right.weight - left.weight) * (at - left.at) / (right.at - left.at)


def mean_weight(source: SourceConfig) -> float:
    """Return the mean of a source's weight over the run."""
    places = sorted({0.0, 1.0, *(point.at for point in source.weights)})
    return sum(
        (end - begin) * (weight_at(source, begin) + weight_at(source, end)) / 2 for begin, end in pairwise(places)
    )
