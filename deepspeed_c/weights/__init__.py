"""Weights of a model from files: the forms of files, the names in them, and memory for models on the meta device."""
