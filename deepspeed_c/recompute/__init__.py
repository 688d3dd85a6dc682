"""Layers whose activations are computed again in the backward. ``deepspeed_c.checkpointing`` has the public names."""
