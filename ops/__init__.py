"""The binding of the C cores to torch: the operators of ``torch.ops.deepspeed_c``, and the optimizers made of them.

Importing this package loads the compiled module.
"""

import importlib
from typing import Any

from deepspeed_c import _C  # noqa: F401  (registers the operators)
from deepspeed_c.ops import adagrad, adam, aio, fake, flat, lamb, lion, muon, op_builder, optim, q8, sgd  # noqa: F401
from deepspeed_c.ops import sums as sums

__all__ = [
    "adagrad",
    "adam",
    "aio",
    "flat",
    "lamb",
    "lion",
    "moe",
    "muon",
    "nn",
    "op_builder",
    "optim",
    "q8",
    "quant",
    "quantizer",
    "sgd",
    "sums",
    "transformer",
]

# DeepSpeed's table: name of an operator -> whether this package has it.
__compatible_ops__ = op_builder.compatible_ops()


def __getattr__(name: str) -> Any:
    # Imported on first use, so that ranks that only step an optimizer do not pay for the import.
    if name in ("moe", "nn", "quant", "quantizer", "transformer"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
