"""Who says when gather units are gathered and released: one file for each kind of driver."""
