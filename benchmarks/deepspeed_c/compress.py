"""What do weights of 8 and 4 bits, and half of the rows and heads, cost in loss, and what do they save in bytes and time?

Runs examples/compress_gpt.py: a byte-level GPT is trained, and then goes on as fp32, with quantized weights, or pruned with
the finished fp32 model as teacher. The losses are those of held-out text; the bytes are those of the saved state.
Run: python -m benchmarks.deepspeed_c.compress [options of the example]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import machine, require

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "compress_gpt.py"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(SCRIPT), *sys.argv[1:], "--out", folder]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        require(done.returncode == 0, f"the example ends with exit code 0: {done.stderr[-2000:]}")
        rows = json.loads((Path(folder) / "compress.json").read_text())
    for row in rows:
        print(json.dumps({"benchmark": "compress", **row, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
