"""Fixtures of this folder."""

from shared import pairs_file, rows_file  # noqa: F401
