"""Sharded weights: the parameter itself, its gathers and their plan, the hooks, ``Init`` and ``GatheredParameters``."""
