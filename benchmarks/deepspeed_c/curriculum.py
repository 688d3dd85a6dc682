"""Does a curriculum of lengths, or of frequent bytes first, change the loss after the same number of tokens?

Runs examples/curriculum_gpt.py on 2 ranks: byte-level GPTs of the same first weights are trained without and with a
curriculum. The losses are those of held-out text, in nats per byte.
Run: python -m benchmarks.deepspeed_c.curriculum [options of the example]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.measure import machine, results_of_example

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "curriculum_gpt.py"


def main() -> None:
    command = [sys.executable, "-m", "deepspeed_c", "--num_procs", "2", str(SCRIPT), *sys.argv[1:]]
    curves = results_of_example(command, "curriculum.json")
    common = {"benchmark": "curriculum", "machine": machine()}
    for name, points in curves.items():
        for i in sorted({len(points) // 2 - 1, len(points) - 1}):
            (tokens, loss), (_, plain) = points[i], curves["none"][i]
            line = {"contender": name, "tokens": tokens, "loss": round(loss, 4), "loss_to_none": round(loss / plain, 4)}
            print(json.dumps({**common, **line}), flush=True)


if __name__ == "__main__":
    main()
