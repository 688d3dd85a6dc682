"""A rank of a launch in the tests: says that it is up, starts a process, and waits. Needs no torch.

    sleeper.py [--save] [--deaf] [--fail RANK CODE]
"""

import os
import signal
import subprocess
import sys
import time

RANK = os.environ["RANK"]


def save(number: int, frame: object) -> None:
    print("saved", RANK, flush=True)
    sys.exit(0)


if __name__ == "__main__":
    if "--save" in sys.argv:
        signal.signal(signal.SIGTERM, save)
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "86431"])  # a process of its own, such as a data loader's
    print("up", RANK, flush=True)
    if "--fail" in sys.argv:
        failing, code = sys.argv[sys.argv.index("--fail") + 1 :][:2]
        if failing == RANK:
            print("bad luck", file=sys.stderr, flush=True)
            sys.exit(int(code))
    time.sleep(86431)
