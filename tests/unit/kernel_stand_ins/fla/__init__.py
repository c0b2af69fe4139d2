"""Stands in for flash-linear-attention."""
