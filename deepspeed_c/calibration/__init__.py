"""Measures this machine, for simulations of steps on it."""
