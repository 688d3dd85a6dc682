"""The ways in which tensors travel among ranks. ``table.py`` has one row for each of them, and each has a module."""
