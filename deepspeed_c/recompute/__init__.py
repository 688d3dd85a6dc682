"""Layers whose activations are computed again in the backward; the public names are ``deepspeed_c.checkpointing``."""
