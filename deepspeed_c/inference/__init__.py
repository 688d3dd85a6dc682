"""Inference: a model in the dtype of its weights, cut over tensor-parallel ranks, with kernels where they fit
(docs/concepts/inference.md)."""
