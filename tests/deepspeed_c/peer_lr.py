"""A program for a Python that has DeepSpeed. It reads cases of schedules as JSON, and writes the learning rate and
momentum of each group for every step."""

from __future__ import annotations

import json
import sys


def main() -> None:
    import torch
    from deepspeed.runtime import lr_schedules

    results = []
    for case in json.load(sys.stdin):
        groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in case["lrs"]]
        optimizer = torch.optim.Adam(groups)
        schedule = getattr(lr_schedules, case["name"])(optimizer, **case["params"])
        rows = []
        for step in range(case["steps"] + 1):
            if step:
                schedule.step()
            rows.append([[group["lr"], group["betas"][0]] for group in optimizer.param_groups])
        results.append(rows)
    with open(sys.argv[1], "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
