"""``guard.py``: kills the ranks of a launcher that has died, with all that they have started, and other children whose
parent has died.

The launcher writes the process id of each rank to this process's stdin, and "end" when all have ended. If stdin ends
before that, the launcher was killed, and nobody else ends its ranks. ``guarded.py`` does so with one child. A bare
interpreter runs this file as a script, so the file imports nothing from the package.
"""

import os
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # the launcher passes them on to the ranks
    ranks = []
    for line in sys.stdin:
        if line == "end\n":
            sys.exit(0)
        ranks.append(int(line))
    for pid in ranks:
        try:
            os.killpg(pid, signal.SIGKILL)  # each rank leads a process group
        except (ProcessLookupError, PermissionError):
            pass
