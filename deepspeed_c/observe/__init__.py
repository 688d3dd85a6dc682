"""Measurements of a run: the time of each phase of a step, and the numbers for logs and monitors."""
