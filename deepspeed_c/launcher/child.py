"""``child.py CORES COMMAND ...``: the last step before a rank's own program. It binds this process to the cores (for
example 0,2,3; "": any), ties its life to the launcher's, and executes the command in its place.

A rank must be bound before its first thread starts. A bare interpreter therefore runs this file as a script, and the
file imports nothing from the package.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__main__":
    if sys.argv[1]:
        os.sched_setaffinity(0, [int(core) for core in sys.argv[1].split(",")])
    if sys.platform == "linux":
        # A launcher that is killed can end no rank: the kernel does it. This outlasts the execution of the command.
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:
            sys.exit("deepspeed_c: the launcher has ended")  # before the call
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"deepspeed_c: {sys.argv[2]} cannot be started: {error.strerror}")
