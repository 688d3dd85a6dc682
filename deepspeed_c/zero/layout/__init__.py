"""The places of parameters: the states that a stage shards, units and their flat buffers, and parameters that stay
whole."""
