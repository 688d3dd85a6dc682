"""Our own format: a manifest and pieces, written by all ranks and brought into being by one rename."""
