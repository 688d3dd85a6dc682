"""What do weights of 8 and 4 bits, and half of the rows and heads, cost in loss, and what do they save in bytes and time?

Runs examples/compress_gpt.py: a byte-level GPT is trained, and then goes on as fp32, with quantized weights, or pruned with
the finished fp32 model as teacher. The losses are those of held-out text; the bytes are those of the saved state.
Run: python -m benchmarks.deepspeed_c.compress [options of the example]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.measure import machine, results_of_example

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "compress_gpt.py"


def main() -> None:
    for row in results_of_example([sys.executable, str(SCRIPT), *sys.argv[1:]], "compress.json"):
        print(json.dumps({"benchmark": "compress", **row, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
