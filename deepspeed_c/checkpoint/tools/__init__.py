"""Tools for people who work with checkpoints: the command, conversions, and exports of whole weights."""
