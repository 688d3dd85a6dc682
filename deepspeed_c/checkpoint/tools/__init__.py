"""Tools for checkpoints: the command, conversions, and exports of whole weights."""
