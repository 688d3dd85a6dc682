"""Communication between ranks: the calls of ``torch.distributed`` under DeepSpeed's names, and the collectives that the
engine uses.
"""

from deepspeed_c.comm.comm import *
from deepspeed_c.comm.groups import *
