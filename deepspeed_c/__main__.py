"""``python -m deepspeed_c`` is the command ``deepspeed_c``."""

import sys

from deepspeed_c.launcher.main import main

if __name__ == "__main__":
    sys.exit(main())
