"""Where C meets torch: the operators of ``torch.ops.deepspeed_c``, and the optimizers made of them.

Importing this loads the compiled part.
"""

from deepspeed_c import _C  # noqa: F401  (registers the operators)
from deepspeed_c.ops import adagrad, adam, aio, fake, flat, lamb, lion, muon, op_builder, optim, q8, sgd  # noqa: F401

__all__ = ["adagrad", "adam", "aio", "flat", "lamb", "lion", "muon", "op_builder", "optim", "q8", "sgd"]

# DeepSpeed's table of operators by name, and whether they are here.
__compatible_ops__ = op_builder.compatible_ops()
