"""``deepspeed_c bench``: the speed of the layers below training on this machine."""
