"""What goes to disk and comes back: weight files so far, written one tensor at a time."""
