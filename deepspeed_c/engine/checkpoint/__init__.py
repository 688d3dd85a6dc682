"""An engine's side of its checkpoints: which rank saves which states, and how an engine is filled from any source."""
