"""Passes over traced graphs, one file a pass."""
