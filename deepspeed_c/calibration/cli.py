"""The command ``deepspeed_c plan``, with measurements of this machine (``--simulate --calibrate``)."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_c.autotuning.rates import current_device
from deepspeed_c.calibration.measure import calibrate, measure_steps
from deepspeed_c.plan import cli
from deepspeed_c.plan.simulate_cli import ThisMachine

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """As ``plan.cli.main``."""
    return cli.main(argv, ThisMachine(current_device().type, calibrate, measure_steps))
