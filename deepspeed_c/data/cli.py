"""The command ``deepspeed_c data``: shows which samples the steps of a run have read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.command_line import Actions, command_parser, run_action
from deepspeed_c.data.history import SampleHistory, StepSamples
from deepspeed_c.errors import CheckpointError

__all__ = ["main"]

_DESCRIPTION = """\
Which samples a run has read, from a checkpoint of it.

  deepspeed_c data show RUN                  where reading began, and where ranks, batch or position changed
  deepspeed_c data show RUN --step 1200      the indices in the data set that step 1200 read, by rank and micro-batch

RUN is the folder that save_checkpoint wrote to. The engine must have read the data itself (training_data of initialize).
A sampler or a stream of the program has its own order, and only positions are shown.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``deepspeed_c data`` with the arguments ``argv``. Returns 0 when something was shown.

    Raises CheckpointError where no checkpoint can be read or it says nothing about samples; StateError for a step that
    is not in it; ConfigError where the files of a curriculum's metrics are not there any more.
    """
    parser = command_parser("data", _DESCRIPTION)
    actions = Actions(parser, "show")
    show = actions.add("show", _show, "the samples of a step, or the places where reading changed")
    show.add_argument("folder", metavar="RUN", help="folder of checkpoints")
    show.add_argument("--tag", help="the checkpoint (default: the latest)")
    show.add_argument("--step", type=int, metavar="N", help="an optimizer step, counted from 1")
    show.add_argument("--json", action="store_true", help="print JSON")
    return run_action(parser, argv)


def _show(options: argparse.Namespace) -> int:
    with open_checkpoint(options.folder, options.tag) as source:
        state, where = source.state.get("samples"), source.where
    if state is None:
        raise CheckpointError(
            "says nothing about samples: the engine did not read them, or an older version saved it",
            where=where,
            fix="give the data set to initialize(training_data=...)",
        )
    history = SampleHistory()
    history.check(state, where)
    history.load_state_dict(state)
    steps = history.entries() if options.step is None else [history.samples(options.step)]
    if options.json:
        shown = [_as_dict(step) for step in steps]
        print(json.dumps({"steps": history.steps(), "entries": shown} if options.step is None else shown[0]))
    elif options.step is None:
        print("\n".join([_range(history), *(f"from step {_head(step)}" for step in steps)]))
    else:
        print("\n".join([f"step {_head(steps[0])}", *_lines(steps[0])]))
    return 0


def _range(history: SampleHistory) -> str:
    first, last = history.steps()
    return f"steps {first} to {last}" if last else "no step yet"


def _head(step: StepSamples) -> str:
    reading = step.reading
    places = " and ".join(f"{n} from epoch {epoch}, position {position}" for epoch, position, n in step.runs)
    order = {"order": f"seed {reading['seed']}", "steps": "data_sampling", "own": "the program's own order"}[
        reading["kind"]
    ]
    if reading["kind"] == "order" and reading["seed"] is None:
        order = "in the data set's order"
    return f"{step.step}: micro-batches of {reading['micro_batch']} on {reading['n_ranks']} ranks: {places or 'none'}; {order}"


def _lines(step: StepSamples) -> list[str]:
    if step.samples is None:
        return ["the samples at these positions are up to the program's sampler or stream"]
    return [
        f"rank {rank}, micro-batch {k}: {' '.join(map(str, samples))}"
        for rank, batches in enumerate(step.samples)
        for k, samples in enumerate(batches)
    ]


def _as_dict(step: StepSamples) -> dict[str, Any]:
    return {"step": step.step, "runs": step.runs, "reading": dict(step.reading), "samples": step.samples}
