"""The command ``deepspeed_c io``: how fast a device is with our engine, and which settings suit it best."""
