"""Compression during training (``docs/concepts/compression.md``): linear layers and embeddings with quantized weights
and activations."""
