"""Communication between ranks: ``torch.distributed`` under DeepSpeed's names, and the collectives that the engine runs on."""

from deepspeed_c.comm import comm as _comm
from deepspeed_c.comm import groups as _groups
from deepspeed_c.comm.comm import *  # noqa: F403
from deepspeed_c.comm.groups import *  # noqa: F403

__all__ = [*_comm.__all__, *_groups.__all__]
