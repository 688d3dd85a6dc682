"""The command ``deepspeed_c``: starts ranks on this host, shows configurations, reports the build and the machine."""
