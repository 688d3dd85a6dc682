"""The format of deepspeed_c: a manifest and pieces, written by all ranks and committed by one rename."""
