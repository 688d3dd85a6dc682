#!/usr/bin/env python3
"""DeepSpeed's program of this name, run by the interpreter that has put this folder on PATH."""

import os
import sys

python = os.environ["DSC_ALIAS_PYTHON"]
os.execv(python, [python, "-m", "deepspeed_c.utils.zero_to_fp32", *sys.argv[1:]])
