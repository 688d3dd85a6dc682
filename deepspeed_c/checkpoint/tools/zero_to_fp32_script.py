"""The program ``zero_to_fp32.py`` that lies in every folder of checkpoints: it turns the folder into plain weights."""

from __future__ import annotations

import os

from deepspeed_c.checkpoint.native.commit import replace_durably

__all__ = ["NAME", "SCRIPT", "write_script"]

NAME = "zero_to_fp32.py"

SCRIPT = '''\
#!/usr/bin/env python3
"""Turns the checkpoint beside this file into fp32 weights that load without deepspeed_c:

    python zero_to_fp32.py . output_dir                         pytorch_model.bin
    python zero_to_fp32.py . output_dir --safe_serialization    model.safetensors
"""

import sys

try:
    from deepspeed_c.utils.zero_to_fp32 import main
except ModuleNotFoundError as error:
    sys.exit(f"{error}. The checkpoint is read by deepspeed_c: pip install deepspeed-c, or run this where training ran.")

sys.exit(main())
'''


def write_script(folder: str) -> None:
    """Puts the program into ``folder``, executable. A file of this name is replaced at one instant, and left alone if
    it is the same.
    """
    path = os.path.join(folder, NAME)
    content = SCRIPT.encode()
    try:
        with open(path, "rb") as file:
            if file.read(len(content) + 1) == content and os.access(path, os.X_OK):
                return
    except (FileNotFoundError, PermissionError):
        pass
    replace_durably(path, content, mode=0o777)
