"""The command ``deepspeed_c io``: measures the speed of a device with this package's I/O engine, and finds the best
settings."""
