"""Fixtures of this folder."""

from shared import rows_file, straight  # noqa: F401
