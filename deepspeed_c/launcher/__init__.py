"""The command ``deepspeed_c``: starts ranks on this host, shows configurations, reports what was built and found."""
