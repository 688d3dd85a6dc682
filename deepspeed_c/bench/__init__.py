"""``deepspeed_c bench``: how fast what runs below training is on this machine."""
