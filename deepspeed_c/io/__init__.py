"""The command ``deepspeed_c io``: measures the speed of a device with our engine, and finds the best settings."""
