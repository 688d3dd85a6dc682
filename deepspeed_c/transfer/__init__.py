"""Weights on their way from a trainer to engines that generate: a folder, a function, or a process group.

``DeepSpeedEngine.send_weights`` sends. Receivers in other processes read with ``WeightsFolder`` or ``receive_weights``.
"""

from __future__ import annotations

from deepspeed_c.transfer.folder import WeightsFolder
from deepspeed_c.transfer.group import receive_weights
from deepspeed_c.transfer.target import SentWeights

__all__ = ["SentWeights", "WeightsFolder", "receive_weights"]
