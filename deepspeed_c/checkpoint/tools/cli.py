"""The command ``deepspeed_c checkpoint``: shows a checkpoint's contents, verifies it, and writes its weights or all of
it in other formats.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from deepspeed_c.checkpoint.fingerprint import fingerprint_of_source
from deepspeed_c.checkpoint.formats.deepspeed import open_deepspeed
from deepspeed_c.checkpoint.formats.huggingface import parse_json
from deepspeed_c.checkpoint.formats.model_folder import FORMATS as EXPORT_FORMATS
from deepspeed_c.checkpoint.formats.tensor_ranks import rules_of_info
from deepspeed_c.checkpoint.native.reader import NativeSource
from deepspeed_c.checkpoint.open import FORMATS, find_checkpoint, open_checkpoint
from deepspeed_c.checkpoint.source import BUFFER, MASTER, PARAM, LogicalTensor, Source
from deepspeed_c.checkpoint.tools.convert import TARGETS, Target, convert, tag_for
from deepspeed_c.checkpoint.tools.export import Weight, export, stream_weights
from deepspeed_c.checkpoint.tools.upcycle import ROUTER_STD, UpcycledSource
from deepspeed_c.command_line import Actions, command_parser, run_action
from deepspeed_c.errors import CheckpointError

__all__ = ["main", "verify"]

EXIT_BROKEN = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = {PARAM: "weights", MASTER: "fp32 masters", BUFFER: "buffers"}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

_DESCRIPTION = """\
Checkpoints of deepspeed_c, DeepSpeed (its engine's and its universal format), Hugging Face (safetensors) and torch (DCP).

  deepspeed_c checkpoint info ckpt                              what is in it, and whether its bytes are those that were written
  deepspeed_c checkpoint verify ckpt                            reads all of it; exit code 1 names what is broken
  deepspeed_c checkpoint verify a --like b                      whether both hold the same bits; exit code 1 names what differs first
  deepspeed_c checkpoint export ckpt out --format safetensors   the weights, for from_pretrained
  deepspeed_c checkpoint convert ckpt out --to deepspeed        all of it, in another format

PATH is a folder of checkpoints (the one that `latest` names is taken, or --tag), or one checkpoint.
"""


def main(argv: Sequence[str]) -> int:
    """Runs ``deepspeed_c checkpoint`` with the words after it.

    Returns 0, or 1 for a broken checkpoint; raises CheckpointError if files are missing or cannot be written.
    """
    return run_action(_parser(), argv)


def _info(options: argparse.Namespace) -> int:
    with _open(options) as source:
        # Other formats have no checksums, so a complete read proves little for them.
        problems = verify(source) if isinstance(source, NativeSource) and not options.no_verify else None
        if options.json:
            print(json.dumps(_as_json(source, problems), indent=2, default=str))
        else:
            print(_as_text(source, problems))
    return EXIT_BROKEN if problems else 0


def _verify(options: argparse.Namespace) -> int:
    folder, form = find_checkpoint(options.path, options.tag)
    try:
        with open_checkpoint(folder, form=options.source) as source:
            problems = verify(source)
            n_bytes = sum(map(_bytes_of, source.tensors.values()))
            summary = f"{len(source.tensors)} tensors, {_human(n_bytes)}"
            has_checksums = isinstance(source, NativeSource)
    except CheckpointError as error:
        problems, summary, has_checksums = [str(error)], "", False
    if options.like is not None and not problems:
        return _compare(folder, options)
    if options.json:
        print(json.dumps({"where": folder, "format": form, "ok": not problems, "problems": problems}, indent=2))
    elif problems:
        print("\n".join([f"{folder}: broken ({form})", *(f"  {problem}" for problem in problems)]), file=sys.stderr)
    else:
        how = "all checksums match" if has_checksums else "all of it could be read; the format has no checksums"
        print(f"{folder}: {how} ({form}, {summary})")
    return EXIT_BROKEN if problems else 0


def _compare(folder: str, options: argparse.Namespace) -> int:
    """Prints the fingerprints of a checkpoint that has been verified and of the one that it should be like."""
    with open_checkpoint(folder, form=options.source) as source, open_checkpoint(options.like) as like:
        mine, theirs = fingerprint_of_source(source, like), fingerprint_of_source(like, source)
        formats = source.format, like.format
        places = source.where, like.where
    difference = mine.first_difference(theirs)
    numbers = [f"{found.number:016x}" for found in (mine, theirs)]
    if options.json:
        sides = [
            {"where": place, "format": form, "fingerprint": number}
            for place, form, number in zip(places, formats, numbers, strict=True)
        ]
        print(json.dumps({"compared": sides, "ok": not difference, "first_difference": difference}, indent=2))
        return EXIT_BROKEN if difference else 0
    for place, form, number in zip(places, formats, numbers, strict=True):
        print(f"{number}  {place} ({form})")
    if difference:
        print(f"first difference: {difference}", file=sys.stderr)
    return EXIT_BROKEN if difference else 0


def verify(source: Source) -> list[str]:
    """Reads all of a checkpoint.

    Returns its defects, a sentence each: in our own format every block is compared with its checksum.
    """
    if isinstance(source, NativeSource):
        return source.verify()
    problems = []
    for tensor in source.tensors.values():
        try:
            for _ in stream_weights(source, [Weight(tensor.name, tensor, tensor.dtype)]):
                pass
        except CheckpointError as error:
            problems.append(f"{tensor.kind} of {tensor.name}: {str(error).splitlines()[0]}")
    return problems


def _export(options: argparse.Namespace) -> int:
    with _open(options) as source:
        done = export(
            source,
            options.out,
            form=options.format,
            dtype=DTYPES[options.dtype] if options.dtype else None,
            max_shard_size=options.max_shard_size,
            exclude_frozen=options.exclude_frozen,
        )
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    print(f"{options.out}: {done.n_tensors} tensors, {_human(done.total_bytes)} in {files}")
    return 0


def _rules(file: str) -> Mapping[str, Any]:
    try:
        with open(file, "rb") as content:
            rules = parse_json(content.read(), file)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", where=file) from error
    if not isinstance(rules, dict):
        raise CheckpointError("is no JSON object", where=file, fix="write the keys of universal_checkpoint_info in it")
    return rules


def _open_for_conversion(options: argparse.Namespace) -> Source:
    if options.tp_rules is None or options.source not in (None, "deepspeed"):
        return _open(options)
    folder, form = find_checkpoint(options.path, options.tag)
    if form != "deepspeed":
        return _open(options)
    return open_deepspeed(folder, rules=rules_of_info(_rules(options.tp_rules), options.tp_rules))


def _convert(options: argparse.Namespace) -> int:
    target = Target(
        tag=options.new_tag,
        world_size=options.world_size,
        stage=options.stage,
        dtype=DTYPES[options.dtype] if options.dtype else None,
        max_shard_size=options.max_shard_size,
        tensor_ranks=options.tp,
        expert_ranks=options.expert_ranks,
        tensor_info=None if options.tp_rules is None or options.tp is None else _rules(options.tp_rules),
    )
    if options.upcycle is None and any((options.modules, options.hidden_size, options.seed)):
        raise CheckpointError(
            "--modules, --hidden-size and --seed belong to --upcycle", where="convert", fix="add --upcycle N"
        )
    if options.upcycle is not None and options.hidden_size is None:
        raise CheckpointError(
            "the width of the MLPs' input is not known", where="convert --upcycle", fix="add --hidden-size N"
        )
    with _open_for_conversion(options) as source:
        if options.upcycle is None:
            path = convert(source, options.out, options.to, target)
            print(f"{path}: {options.to}, from {source.where} ({source.format})")
            return 0
        made = UpcycledSource(
            source,
            options.upcycle,
            [pattern for pattern in (options.modules or "").split(",") if pattern],
            hidden_size=options.hidden_size,
            router_std=options.router_std,
            seed=options.seed,
        )
        tag = options.new_tag or (None if options.to in ("torch-dcp", "safetensors") else tag_for(source))
        path = convert(made, options.out, options.to, replace(target, tag=tag))
    print(f"{path}: {options.to}, from {source.where} ({source.format})")
    print(f"  {len(made.layers)} MLPs became {options.upcycle} equal experts and a router each")
    print("  optimizer states are left out: load it with load_module_only=True")
    return 0


def _open(options: argparse.Namespace) -> Source:
    return open_checkpoint(options.path, options.tag, form=options.source)


def _bytes_of(tensor: LogicalTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _human(n_bytes: int) -> str:
    value, unit = float(n_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{n_bytes} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def _totals(source: Source) -> dict[str, tuple[int, int]]:
    """Kind -> (tensors, bytes), in the source's order of kinds."""
    totals: dict[str, tuple[int, int]] = {}
    for tensor in source.tensors.values():
        n, n_bytes = totals.get(tensor.kind, (0, 0))
        totals[tensor.kind] = n + 1, n_bytes + _bytes_of(tensor)
    return totals


def _as_json(source: Source, problems: list[str] | None) -> dict[str, Any]:
    topology = source.topology
    return {
        "where": source.where,
        "format": source.format,
        "topology": {
            "world_size": topology.world_size,
            "stage": topology.stage,
            "tensor_parallel": topology.tensor_parallel,
            "pipeline_parallel": topology.pipeline_parallel,
            "axes": dict(topology.axes),
            "expert_parallel": topology.expert_parallel,
        },
        "counters": dict(source.state.get("counters") or {}),
        "versions": dict(source.state.get("versions") or {}),
        "state": sorted(source.state),
        "totals": {kind: {"tensors": n, "bytes": b} for kind, (n, b) in _totals(source).items()},
        "tensors": [
            {
                "name": tensor.name,
                "kind": tensor.kind,
                "shape": list(tensor.shape),
                "dtype": _dtype(tensor.dtype),
                "bytes": _bytes_of(tensor),
            }
            for tensor in source.tensors.values()
        ],
        "aliases": dict(source.aliases),
        "groups": len(source.groups),
        "frozen": [name for name, info in source.params.items() if info.group is None],
        # null: not examined.
        "problems": problems,
    }


def _as_text(source: Source, problems: list[str] | None) -> str:
    topology, totals = source.topology, _totals(source)
    ranks = f"{topology.world_size} rank{'s' if topology.world_size != 1 else ''}, stage {topology.stage}"
    if topology.tensor_parallel > 1 or topology.pipeline_parallel > 1:
        ranks += f", tensor parallel {topology.tensor_parallel}, pipeline parallel {topology.pipeline_parallel}"
    if topology.expert_parallel > 1:
        ranks += f", expert parallel {topology.expert_parallel}"
    if len(topology.axes) > 1:
        ranks += f", mesh {' x '.join(f'{axis} {size}' for axis, size in topology.axes.items())}"
    lines = [f"{source.where}", f"  format     {source.format}", f"  saved by   {ranks}"]
    for title, key in (("counters", "counters"), ("versions", "versions")):
        values = source.state.get(key) or {}
        if values:
            lines.append(f"  {title}   " + ", ".join(f"{name} {value}" for name, value in values.items()))
    others = sorted(source.state.keys() - {"counters", "versions"})
    if others:
        lines.append(f"  also       {', '.join(others)}")
    if problems is not None:
        lines.append(f"  checksums  {f'{len(problems)} problems' if problems else 'verified'}")
        lines += [f"    {problem}" for problem in problems]
    whole = sum(n_bytes for _, n_bytes in totals.values())
    lines.append(f"  in all     {sum(n for n, _ in totals.values())} tensors, {_human(whole)}")
    rows = [[_KINDS.get(kind, kind), str(n), _human(n_bytes)] for kind, (n, n_bytes) in totals.items()]
    lines += ["", *_table(["kind", "tensors", "bytes"], rows)]
    by_name: dict[str, list[LogicalTensor]] = {}
    for tensor in source.tensors.values():
        by_name.setdefault(tensor.name, []).append(tensor)
    frozen = {name for name, info in source.params.items() if info.group is None}
    aliases: dict[str, list[str]] = {}
    for alias, first in source.aliases.items():
        aliases.setdefault(first, []).append(alias)
    rows = []
    for name, tensors in by_name.items():
        shape = "x".join(map(str, tensors[0].shape)) or "scalar"
        kinds = ", ".join(f"{t.kind} {_dtype(t.dtype)}" for t in tensors)
        is_frozen = name in frozen and any(t.kind == PARAM for t in tensors)
        notes = ["frozen"] * is_frozen + [f"also {alias}" for alias in aliases.get(name, ())]
        rows.append(
            [name, shape, _human(sum(map(_bytes_of, tensors))), kinds + (f" ({', '.join(notes)})" if notes else "")]
        )
    lines += ["", *_table(["name", "shape", "bytes", "what"], rows)]
    return "\n".join(lines)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("checkpoint", _DESCRIPTION)
    actions = Actions(parser, "info | verify | export | convert")

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = actions.add(name, run, text)
        command.add_argument("path", metavar="PATH", help="folder of checkpoints, or one checkpoint")
        return command

    def add_common(command: argparse.ArgumentParser) -> None:
        command.add_argument("--tag", help="which of the checkpoints of the folder; default: what `latest` names")
        command.add_argument(
            "--from", dest="source", choices=FORMATS, help="refuse a checkpoint that is of another format than this"
        )

    info = add("info", _info, "what is in a checkpoint: tensors, shapes, dtypes, topology, step, checksums verified")
    add_common(info)
    info.add_argument("--json", action="store_true", help="print JSON")
    info.add_argument("--no-verify", action="store_true", help="do not read the payload")

    check = add("verify", _verify, "read all of a checkpoint; exit code 1 where something is broken, which is named")
    add_common(check)
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument(
        "--like",
        metavar="PATH",
        help="print the fingerprints of weights and optimizer states of both checkpoints, of any format; exit code 1"
        " names the first tensor that differs",
    )

    out = add("export", _export, "write the weights as Hugging Face lays them out")
    out.add_argument("out", metavar="OUT", help="folder; a model in it is replaced, other files stay")
    add_common(out)
    out.add_argument(
        "--format",
        choices=EXPORT_FORMATS,
        default="safetensors",
        help="model.safetensors in the dtype that is trained in (default), or pytorch_model.bin in fp32",
    )
    out.add_argument("--dtype", choices=DTYPES, help="of the parameters")
    out.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file: 5GB (default), 2GiB, 500MB")
    out.add_argument("--exclude-frozen", action="store_true", help="leave out what was not trained")

    other = add("convert", _convert, "write all of a checkpoint in another format")
    other.add_argument(
        "out",
        metavar="OUT",
        help="folder of checkpoints (deepspeed_c, deepspeed, deepspeed-universal), or a new folder",
    )
    add_common(other)
    other.add_argument("--to", required=True, choices=TARGETS, help="the format")
    other.add_argument("--new-tag", metavar="TAG", help="what it is called in OUT; default: global_step and its step")
    other.add_argument(
        "--world-size", type=int, metavar="N", help="ranks that will load it (deepspeed); default: as saved"
    )
    other.add_argument(
        "--stage", type=int, choices=range(4), help="ZeRO stage that will load it (deepspeed); default: as saved"
    )
    other.add_argument("--dtype", choices=DTYPES, help="of the weights; default: the one that is trained in")
    other.add_argument(
        "--tp", type=int, metavar="N", help="tensor-parallel ranks that will load it (deepspeed); default: 1"
    )
    other.add_argument(
        "--tp-rules",
        metavar="FILE",
        help="JSON with the keys of DeepSpeed's universal_checkpoint_info: how tensors are cut over such ranks, in PATH"
        " and in OUT; default: as PATH says, or by Megatron's names",
    )
    other.add_argument(
        "--expert-ranks",
        type=int,
        metavar="N",
        help="ranks that will hold the experts of a layer together, its ep_size (deepspeed); default: as saved",
    )
    other.add_argument(
        "--upcycle",
        type=int,
        metavar="N",
        help="make a mixture of N equal experts of each MLP that --modules names (layers deepspeed_c.moe.layer.MoE)",
    )
    other.add_argument("--modules", metavar="PATTERNS", help="paths of MLPs, with commas between: 'layers.*.mlp'")
    other.add_argument(
        "--hidden-size",
        type=int,
        metavar="N",
        help="width of the input of these MLPs",
    )
    other.add_argument(
        "--router-std",
        type=float,
        default=ROUTER_STD,
        metavar="X",
        help=f"standard deviation of new routers; 0: zeros; default {ROUTER_STD}",
    )
    other.add_argument("--seed", type=int, default=0, help="seed of new routers; default 0")
    other.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file of safetensors; default 5GB")
    return parser
