"""A program for a Python that has DeepSpeed. It reads cases from a file that torch.save wrote: the values of a model's
parameters, its section compression_training and inputs. It writes the outputs of two training forwards and one of
evaluation, and the parameters of the cleaned model.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def model_of(values: dict[str, torch.Tensor]) -> nn.Module:
    """An embedding of 12 words, 8 wide, and an MLP."""
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    model.load_state_dict(values)
    return model.to(next(iter(values.values())).dtype)


def outputs_of(case: dict[str, Any], made: nn.Module) -> list[torch.Tensor]:
    """The outputs of a compressed model, whose scores of method topk are those of the case."""
    made.load_state_dict(case["scores"], strict=False)
    outputs = [made.train()(words) for words in case["words"]]
    return [each.detach() for each in (*outputs, made.eval()(case["words"][0]))]


def main() -> None:
    from deepspeed.compression.compress import init_compression, redundancy_clean
    from deepspeed.compression.config import get_compression_config
    from deepspeed.compression.scheduler import compression_scheduler

    results = []
    for case in torch.load(sys.argv[1]):
        config = {"train_batch_size": 1, "compression_training": case["section"]}
        made = init_compression(model_of(case["values"]), config)
        methods = get_compression_config(config)
        methods["sparse_pruning"]["shared_parameters"].setdefault("schedule_offset_end", 10**6)  # a KeyError otherwise
        scheduler = compression_scheduler(made, methods)
        scheduler.step(step_zero_check=True)
        scheduler.step()
        outputs = outputs_of(case, made)
        redundancy_clean(made, config)
        results.append(
            {"outputs": outputs, "state": {name: value.detach() for name, value in made.state_dict().items()}}
        )
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
