"""Which parameter lies where: what a stage shards, units and their flat buffers, and what stays whole."""
