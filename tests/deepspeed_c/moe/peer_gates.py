"""Prints the results of gates of DeepSpeed, or of deepspeed_c (argument "ours"), on the same logits, as one line of
JSON. Runs in the Python of either package.
"""

from __future__ import annotations

import json
import sys

import torch


def cases(gating):
    for seed, (n_tokens, n_experts) in enumerate([(16, 4), (37, 8), (5, 5), (64, 3)]):
        torch.manual_seed(seed)
        logits, few = torch.randn(n_tokens, n_experts) * 2, torch.randn(2, n_experts)
        used = (torch.arange(n_tokens) % 3 != 1).float()
        where = f"{n_tokens} tokens, {n_experts} experts"
        for factor in (0.5, 1.0, 8.0):
            for drops in (True, False):
                name = f"{where}, factor {factor}, drops {drops}"
                # DeepSpeed's choice of dropped tokens with k = 1 is random, or follows torch.topk at equal values.
                if factor == 8.0 or not drops:
                    yield f"1: {name}", gating.top1gating, (logits, factor, 2, None, None, drops, False, None)
                    yield f"1 rts: {name}", gating.top1gating, (logits, factor, 2, None, None, drops, True, None)
                yield f"2: {name}", gating.top2gating, (logits, factor, 2, drops, None, False)
                for policy in ("probs", "position"):
                    yield f"3 {policy}: {name}", gating.topkgating, (logits, 3, factor, 2, drops, None, policy)
                    yield f"1 {policy}: {name}", gating.topkgating, (logits, 1, factor, 2, drops, None, policy)
        for factor in (0.5, 1.0):  # fewer tokens than min_capacity; DeepSpeed refuses them with k = 1
            name = f"few tokens, {n_experts} experts, factor {factor}"
            yield f"2: {name}", gating.top2gating, (few, factor, 4, True, None, False)
            for policy in ("probs", "position"):
                yield f"3 {policy}: {name}", gating.topkgating, (few, 3, factor, 4, True, None, policy)
                yield f"1 {policy}: {name}", gating.topkgating, (few, 1, factor, 4, True, None, policy)
        places = gating.top1gating(logits, 8.0, 2, used, None, True, False, None, True)
        yield f"used: {where}", lambda found: [found[3], found[6]], (places,)


def plain(value):
    if torch.is_tensor(value):
        return plain(value.double().tolist())
    return value if not isinstance(value, (list, tuple)) else [plain(each) for each in value]


def main() -> None:
    if sys.argv[1:] == ["ours"]:
        import deepspeed_c.moe.gate as gating
    else:
        import deepspeed.moe.sharded_moe as gating
    found = {}
    for name, function, arguments in cases(gating):
        found[name] = plain(function(*arguments))
        if not name.startswith("used"):
            sparse = function(*arguments, sparse_routes=True)
            found[name + ", sparse"] = plain([*sparse[:2], *sparse[2:]])
    print("GATES " + json.dumps(found))


if __name__ == "__main__":
    main()
