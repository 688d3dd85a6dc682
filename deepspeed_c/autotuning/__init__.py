"""Search for the fastest configuration of a training script: plan, run experiments, compare."""
