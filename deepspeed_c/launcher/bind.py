"""``bind.py CORES COMMAND ...``: binds itself to the cores (as in 0,2,3) and becomes the command.

Run as a script by a bare interpreter, so it imports nothing of the package: a rank must be bound before its first
thread starts.
"""

import os
import sys

if __name__ == "__main__":
    os.sched_setaffinity(0, [int(core) for core in sys.argv[1].split(",")])
    os.execvp(sys.argv[2], sys.argv[2:])
