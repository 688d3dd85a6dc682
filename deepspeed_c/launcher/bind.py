"""``bind.py CORES COMMAND ...``: binds this process to the cores (for example 0,2,3) and executes the command in its
place.

A rank must be bound before its first thread starts. A bare interpreter therefore runs this file as a script, and the
file imports nothing from the package.
"""

import os
import sys

if __name__ == "__main__":
    os.sched_setaffinity(0, [int(core) for core in sys.argv[1].split(",")])
    os.execvp(sys.argv[2], sys.argv[2:])
