"""``python -m deepspeed_c.config show FILE`` is ``deepspeed_c config show FILE``."""

import sys

from .cli import main

sys.exit(main())
