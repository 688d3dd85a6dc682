"""Sequences that are cut over ranks, or computed in tiles (docs/concepts/sequence.md)."""
