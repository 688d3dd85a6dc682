"""What people run on checkpoints: the command, conversions, and exports of whole weights."""
