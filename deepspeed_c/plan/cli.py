"""The command ``deepspeed_c plan``: the memory of one rank of a run, computed before anything is allocated."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from deepspeed_c.command_line import command_parser
from deepspeed_c.errors import ConfigError, FeatureError
from deepspeed_c.pipe import PipelineModule
from deepspeed_c.plan import pipeline, simulate_cli
from deepspeed_c.plan.activations import ForwardShape
from deepspeed_c.plan.generation import GenerationShape
from deepspeed_c.plan.inference import plan_inference
from deepspeed_c.plan.memory import Activations
from deepspeed_c.plan.options import read_number, require_config, sample_of
from deepspeed_c.plan.picture import draw
from deepspeed_c.plan.pipeline import plan_pipeline
from deepspeed_c.plan.script import find_model
from deepspeed_c.plan.simulate_cli import ThisMachine
from deepspeed_c.plan.sizes import guess_layers, stack_of
from deepspeed_c.plan.table import as_json, as_text, plan_table
from deepspeed_c.plan.tiers import Budgets, Rates
from deepspeed_c.quantity import parse_bytes, parse_count
from deepspeed_c.script import script_index

__all__ = ["main"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# The largest number of bytes that the C core can represent, more than any machine has.
MOST_BYTES = (1 << 63) - 1
MOST_RATE = 1e24

_DESCRIPTION = """\
Bytes per rank, phase by phase, for each ZeRO stage and offload choice, without allocating them.

  deepspeed_c plan --config ds_config.json --ranks 64 train.py --lr 0.1     the model that train.py passes to initialize
  deepspeed_c plan --batch 8 --seq 4096 train.py                            with its activations, for each way to keep them
  deepspeed_c plan --generate 8x512x128 train.py                            with generation between steps: 8 prompts of 512 tokens, 128 new ones
  deepspeed_c plan --config ds_config.json --ranks 64 --params 7e9          a stack of equal layers of that many parameters
  deepspeed_c plan --simulate --machine h100 --hosts 128 --config ds_config.json train.py   the time of a step on 1,024 ranks
  deepspeed_c plan --inference MODEL_DIR --tp 2 --batch 8 --seq 4096        what generation takes: weights, cache, workspace
"""


def main(argv: Sequence[str], this_machine: ThisMachine | None = None) -> int:
    """Runs ``deepspeed_c plan`` with these arguments. Returns 0 if a plan was printed. Raises ConfigError, ModelError,
    OptimizerError."""
    parser = _parser()
    n_own = script_index(parser, argv)
    options = parser.parse_args(argv[:n_own])
    script, *arguments = [*argv[n_own:]] or [""]
    if options.inference is not None:
        return _plan_inference(options, parser, script)
    if options.simulate:
        return simulate_cli.run(options, script, arguments, _write_svg, this_machine)
    if options.dtype is not None:
        raise ConfigError(
            "it is the dtype of weights for inference", where="--dtype", fix="give --inference MODEL_DIR, or --given"
        )
    for name in ("prompt", "ways"):
        if getattr(options, name) is not None:
            raise ConfigError(
                "it is about one call of generate for inference",
                where=f"--{name}",
                fix="give --inference MODEL_DIR, or --generate",
            )
    if bool(script) == (options.params is not None):
        raise ConfigError(
            "both a script and --params were given" if script else "neither a script nor --params was given",
            where="deepspeed_c plan",
            fix="give one of them: SCRIPT [ARGS ...], or --params COUNT",
        )
    n_ranks = options.ranks
    if n_ranks < 1:
        raise ConfigError(f"{n_ranks} is not a number of ranks", where="--ranks", fix="write an integer >= 1")
    batch = _batch(options, has_script=bool(script))
    generates = _generates(options.generate, has_script=bool(script))
    n_bytes = parse_bytes(options.activations, "--activations")
    shared = {
        "device_type": options.device,
        "activations": Activations(n_bytes, n_bytes),
        "n_tensor": options.tp,
        "budgets": _budgets(options),
        "rates": _rates(options.rates),
    }
    if script:
        find = partial(find_model, script, arguments, n_ranks)
        found = find(rank=0)
        source = options.config if options.config is not None else found.read_source()
        require_config(source, f"--config, or {script}")
        if isinstance(found.model, PipelineModule):
            _refuse_for_pipelines(options)
            plan = plan_pipeline(lambda rank: find(rank=rank), found, source, n_ranks, **shared)
            print(json.dumps(pipeline.as_json(plan)) if options.json else pipeline.as_text(plan))
            return 0
        table = plan_table(
            source,
            n_ranks,
            model=found.model,
            optimizer=found.optimizer,
            model_parameters=found.model_parameters,
            is_sharded=found.is_sharded,
            batch=batch,
            generates=generates,
            **shared,
        )
    else:
        require_config(options.config, "--config")
        n_params = parse_count(options.params, "--params")
        n_layers = guess_layers(n_params) if options.layers is None else options.layers
        sizes = stack_of(n_params, n_layers, DTYPES[options.given])
        table = plan_table(options.config, n_ranks, sizes=sizes._replace(is_sharded=options.zero_init), **shared)
        table.notes.append(f"a stack of {n_layers} equal layers (--layers), given in {options.given} (--given)")
    if options.svg is not None:
        _write_svg(options.svg, draw(table.options))
    print(json.dumps(as_json(table)) if options.json else as_text(table))
    return 0


def _refuse_for_pipelines(options: argparse.Namespace) -> None:
    for name in ("batch", "generate", "device_memory"):
        if getattr(options, name) is not None:
            raise FeatureError(
                "it plans a whole model, and the model is a PipelineModule",
                where=f"--{name.replace('_', '-')}",
                fix="leave it out; --activations adds bytes to each stage",
            )


def _plan_inference(options: argparse.Namespace, parser: argparse.ArgumentParser, script: str) -> int:
    shared = ("inference", "tp", "batch", "seq", "prompt", "ways", "dtype", "json")
    other = next((n for n, v in vars(options).items() if n not in shared and v != parser.get_default(n)), None)
    if script or other is not None:
        raise ConfigError(
            f"does not go with {script or '--' + other.replace('_', '-')}, which plans training",
            where="--inference",
            fix="give it --tp, --batch, --seq, --prompt, --ways, --dtype and --json alone",
        )
    n_ranks = 1 if options.tp is None else options.tp
    if n_ranks < 1:
        raise ConfigError(f"{n_ranks} is not a number of ranks", where="--tp", fix="write an integer >= 1")
    plan = plan_inference(
        Path(options.inference),
        n_ranks=n_ranks,
        n_samples=1 if options.batch is None else read_number(options.batch, "--batch"),
        n_tokens=None if options.seq is None else read_number(options.seq, "--seq"),
        dtype=options.dtype,
        n_prompt=None if options.prompt is None else read_number(options.prompt, "--prompt"),
        n_ways=1 if options.ways is None else read_number(options.ways, "--ways"),
    )
    print(json.dumps(plan.as_json()) if options.json else str(plan))
    return 0


def _batch(options: argparse.Namespace, *, has_script: bool) -> ForwardShape | None:
    """The inputs of a rank's forward; None if no option gives them."""
    told = [flag for flag in ("batch", "seq", "sample", "svg") if getattr(options, flag) is not None]
    if not told:
        return None
    if options.batch is None or not has_script or options.activations != "0":
        raise ConfigError(
            f"--{told[0]} says what a forward is given, whose activations are then counted",
            where=f"--{told[0]}",
            fix="give --batch N and a script with it, and no --activations",
        )
    return ForwardShape(read_number(options.batch, "--batch"), *sample_of(options))


def _generates(text: str | None, *, has_script: bool) -> GenerationShape | None:
    """The shape of a call of ``generate``; None if the option is not given."""
    if text is None:
        return None
    words = text.split("x")
    if len(words) != len(GenerationShape._fields):
        raise ConfigError(
            f"{text!r} is not understood",
            where="--generate",
            fix="write samples, tokens of a prompt and new tokens, such as 8x512x128",
        )
    if not has_script:
        raise ConfigError(
            "sizes alone do not say what a model keeps of its tokens",
            where="--generate",
            fix="give a script in place of --params",
        )
    return GenerationShape(*(read_number(word, "--generate") for word in words))


def _write_svg(path: str, picture: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(picture)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=f"--svg {path}", fix="name another") from error


def _budgets(options: argparse.Namespace) -> Budgets | None:
    """A rank's budgets, from the memory of its device and its node; None if no option gives them."""
    if options.ranks_per_node is not None and options.ranks_per_node < 1:
        raise ConfigError(
            f"{options.ranks_per_node} is not a number of ranks", where="--ranks-per-node", fix="write an integer >= 1"
        )
    shared = [options.host_memory, options.nvme]
    if options.device_memory is None:
        if shared == [None, None]:
            return None
        raise ConfigError(
            "--host-memory and --nvme say where states can go that have no room on the device",
            where="--device-memory",
            fix="give it, too",
        )
    if options.device == "cpu" and options.host_memory is not None:
        raise ConfigError(
            "ranks that train on the CPU have host memory as their device's",
            where="--host-memory",
            fix="give --device-memory alone, or --device cuda",
        )
    n_local = min(options.ranks, 8) if options.ranks_per_node is None else options.ranks_per_node
    host, nvme = (
        0 if text is None else min(parse_bytes(text, where) // n_local, MOST_BYTES)
        for text, where in zip(shared, ("--host-memory", "--nvme"))
    )
    return Budgets(min(parse_bytes(options.device_memory, "--device-memory"), MOST_BYTES), host, nvme)


def _rates(text: str | None) -> Rates:
    if text is None:
        return Rates()
    try:
        rates = [float(word) * 1e9 for word in text.split(",")]
    except ValueError:
        rates = []
    if len(rates) != len(Rates._fields) or not all(0 < rate < MOST_RATE for rate in rates):
        raise ConfigError(
            f"{text!r} is not understood", where="--rates", fix="write three numbers > 0, such as 2000,25,25"
        )
    return Rates(*rates)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "plan",
        _DESCRIPTION,
        usage="deepspeed_c plan [OPTIONS] SCRIPT [ARGS ...]\n       deepspeed_c plan --config FILE --params COUNT [OPTIONS]",
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="ranks of the run; default 1")
    parser.add_argument(
        "--tp", type=int, metavar="N", help="of them, that hold one model together; default: as the configuration says"
    )
    parser.add_argument("--batch", metavar="N", help="samples of a micro-batch of a rank: has activations counted")
    parser.add_argument("--seq", metavar="N", help="tokens of a sample (--batch)")
    parser.add_argument(
        "--sample", metavar="SHAPE", help="shape of a sample that is not made of tokens, such as 3x224x224 (--batch)"
    )
    parser.add_argument(
        "--generate",
        metavar="SHAPE",
        help="have the model generate between steps: samples, tokens of a prompt and new tokens, such as 8x512x128",
    )
    parser.add_argument(
        "--svg", metavar="FILE", help="a picture of activations over a step, for each way to keep them (--batch)"
    )
    parser.add_argument("--config", metavar="FILE", help="configuration; default: what the script passes to initialize")
    parser.add_argument(
        "--params", metavar="COUNT", help="parameters of the model, in place of a script: 7e9, 7B, 350M"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="equal layers of --params; default: as a transformer of that size has"
    )
    parser.add_argument(
        "--given",
        choices=DTYPES,
        default="fp32",
        help="what weights are given to initialize in (--params); default fp32",
    )
    parser.add_argument("--zero-init", action="store_true", help="the model is built under zero.Init (--params)")
    parser.add_argument(
        "--activations",
        default="0",
        metavar="BYTES",
        help="as measured, where --batch is not given: added to forward and backward; 2e9, 1.5GiB",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where ranks train: decides how collectives work; default: what this machine has",
    )
    parser.add_argument(
        "--device-memory",
        metavar="BYTES",
        help="of each rank's device: 24GB, 80GiB; for each stage it is then said which states live where, and the configuration for it",
    )
    parser.add_argument(
        "--host-memory", metavar="BYTES", help="of a node, for states of all its ranks (--device-memory); default 0"
    )
    parser.add_argument(
        "--nvme", metavar="BYTES", help="of a node's disks, for states of all its ranks (--device-memory); default 0"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="that share host memory and NVMe; default: all, up to 8"
    )
    parser.add_argument(
        "--rates",
        metavar="DEVICE,HOST,LINK",
        help="GB/s that a rank has of device memory, host memory and the link between them, for the ratio that is suggested; default 2000,25,25",
    )
    parser.add_argument(
        "--inference", metavar="MODEL_DIR", help="plan generation by the model of a Hugging Face folder, not training"
    )
    parser.add_argument(
        "--dtype", choices=(*DTYPES, "int8"), help="of the weights (--inference); default: as config.json says"
    )
    parser.add_argument("--prompt", metavar="N", help="tokens of a prompt, among those of --seq (--inference)")
    parser.add_argument("--ways", metavar="N", help="samples of each of the --batch prompts (--inference); default 1")
    parser.add_argument("--json", action="store_true", help="print JSON, in bytes")
    simulate_cli.add_options(parser)
    return parser
