"""A rank of an elastic launch in the tests: says that it is up, and obeys files of a folder. Needs no torch.

orderly.py FOLDER. Files, with N the number of the round from 1: saveN, againN (note a first and a second checkpoint),
goN (end with exit code 0), failN-RANK-STEP (note the step, then end with exit code 9).
"""

import os
import sys
import time
from pathlib import Path

from deepspeed_c.step_file import StepFile

if __name__ == "__main__":
    folder, rank = Path(sys.argv[-1]), os.environ["RANK"]
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
    file = StepFile(os.environ["DSC_STEP_FILE"])
    sys.stdout.write(f"up {rank} of {os.environ['WORLD_SIZE']} in round {number} on {os.uname().nodename}\n")
    sys.stdout.flush()
    while not (folder / f"go{number}").exists():
        if (folder / f"save{number}").exists():
            file.n_saves = 1 + (folder / f"again{number}").exists()
        for order in folder.glob(f"fail{number}-{rank}-*"):
            file.step = int(order.name.rpartition("-")[2])
            sys.stderr.write("bad luck\n")
            sys.exit(9)
        time.sleep(0.02)
