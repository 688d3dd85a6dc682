"""Communication between ranks: ``torch.distributed`` under DeepSpeed's names, and the collectives that the engine runs
on.
"""

from deepspeed_c.comm.comm import *
from deepspeed_c.comm.groups import *
