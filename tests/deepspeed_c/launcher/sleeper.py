"""A rank of a launch in the tests: says that it is up, starts a process, and waits. Needs no torch.

sleeper.py [--save] [--deaf] [--fail RANK CODE FOLDER]
"""

import os
import signal
import subprocess
import sys
import time
from typing import TextIO

RANK = os.environ["RANK"]


def say(text: str, stream: TextIO) -> None:
    """Write a line in one piece: ranks of a host share its stdout, and print writes the end of a line separately."""
    stream.write(f"{text}\n")
    stream.flush()


def save(number: int, frame: object) -> None:
    say(f"saved {RANK}", sys.stdout)
    sys.exit(0)


if __name__ == "__main__":
    if "--save" in sys.argv:
        signal.signal(signal.SIGTERM, save)
    if "--deaf" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "86431"])  # a process of its own, such as a data loader's
    say(f"up {RANK}", sys.stdout)
    if "--fail" in sys.argv:
        failing, code, folder = sys.argv[sys.argv.index("--fail") + 1 :][:3]
        open(os.path.join(folder, f"up{RANK}"), "w").close()
        if failing == RANK:
            while len([name for name in os.listdir(folder) if name.startswith("up")]) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.02)
            say("bad luck", sys.stderr)
            sys.exit(int(code))
    time.sleep(86431)
