"""The command ``deepspeed_c compress``: shows what a configuration's compression does to the weights of a checkpoint,
and writes a Hugging Face folder with packed weights."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import Read, Source
from deepspeed_c.checkpoint.tools.export import weights_of
from deepspeed_c.command_line import Actions, command_parser, run_action
from deepspeed_c.compression.compress import init_compression, redundancy_clean
from deepspeed_c.compression.on_text import check_causal, on_text, windows_of
from deepspeed_c.compression.report import CompressionReport, as_svg, as_text, report_of
from deepspeed_c.config import load_config
from deepspeed_c.config.compression import Compression
from deepspeed_c.config.source import read_source
from deepspeed_c.errors import ConfigError, ModelError, UnsupportedConfigError
from deepspeed_c.inject.folder import config_of, transformers_for

__all__ = ["main"]

_WHERE = "deepspeed_c compress"
_SECTION = "compression_training"
# Names that embeddings have: a checkpoint without a model says only that a weight is a matrix.
_EMBEDDING = re.compile(r"emb|wte|wpe")
_BESIDE_WEIGHTS = {".json", ".txt", ".model", ".jinja"}
_DESCRIPTION = """\
What the section compression_training of a configuration does to the weights of a trained model.

  deepspeed_c compress report CKPT --config ds_config.json         layer by layer: bits, bytes, error of the weight
  deepspeed_c compress export MODEL_DIR OUT --config ds_config.json    a folder with packed weights, for transformers

CKPT is a Hugging Face folder, which is read with transformers, or a checkpoint, of which names and shapes suffice.
Quantization is shown as it is when training has passed every schedule_offset. With --text, a causal language model of a
Hugging Face folder also shows the loss on a text and the time of a forward, before and after.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``deepspeed_c compress`` with the arguments ``argv``. Returns 0 when a report was printed.

    Raises ConfigError for a wrong configuration or folder, or a file that cannot be written; CheckpointError where no
    checkpoint can be read; ModelError where transformers cannot load the model, or for weights with NaN or inf;
    FeatureError where transformers is missing; UnsupportedConfigError for pruning by learned scores in ``export`` and
    with ``--text``.
    """
    return run_action(_parser(), argv)


def _report(options: argparse.Namespace) -> int:
    config, path = _finished(read_source(options.config).keys), Path(options.path)
    section = _section(config)
    if (path / "config.json").is_file():
        model = _pretrained(path)
        report = report_of(model, section)
        if options.text is not None:
            _refuse_learned_scores(section)
            report = _with_text(report, model, path, options, lambda: _compress(model, config))
    elif options.text is not None:
        raise ConfigError(
            "a checkpoint of weights alone has no forward",
            where="--text",
            fix="leave it out, or name a Hugging Face folder",
        )
    else:
        with open_checkpoint(path, options.tag) as source:
            report = report_of(_matrices(source), section)
    _show(report, options)
    return 0


def _export(options: argparse.Namespace) -> int:
    config, folder, out = _finished(read_source(options.config).keys), Path(options.path), Path(options.out)
    section = _section(config)
    _refuse_learned_scores(section)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError("is there already", where=str(out), fix="name a new folder")
    model = _pretrained(folder)
    report = report_of(model, section)

    def compress() -> None:
        init_compression(model, config)
        redundancy_clean(model, config, pack=True)

    if options.text is None:
        compress()
    else:
        report = _with_text(report, model, folder, options, compress)
    try:
        model.save_pretrained(out)
        for file in sorted(folder.iterdir()):
            is_beside = file.suffix in _BESIDE_WEIGHTS and not file.name.endswith(".index.json")
            if is_beside and not (out / file.name).exists():
                shutil.copy(file, out)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=str(out), fix="name another folder") from error
    _show(report, options)
    return 0


def _with_text(
    report: CompressionReport, model: nn.Module, folder: Path, options: argparse.Namespace, compress: Callable[[], None]
) -> CompressionReport:
    """The report with the figures of ``model`` on a text before and after ``compress()``."""
    check_causal(model, _WHERE)
    windows = windows_of(folder, options.text, options.context, model, _WHERE)
    before = on_text(model, windows)
    compress()
    return replace(report, on_text=(before, on_text(model, windows)))


def _compress(model: nn.Module, config: dict[str, Any]) -> None:
    """Compresses in place, and packs the layers if they can be."""
    init_compression(model, config)
    try:
        redundancy_clean(model, config, pack=True)
    except (ConfigError, UnsupportedConfigError) as error:  # raised before anything changes
        print(f"not packed: {error}", file=sys.stderr)
        redundancy_clean(model, config)


def _refuse_learned_scores(section: Compression) -> None:
    for key in ("sparse_pruning", "row_pruning", "head_pruning"):
        shared = getattr(section, key).shared_parameters
        if shared.enabled and shared.method == "topk":
            raise UnsupportedConfigError(
                "a folder of weights has no learned scores, which decide what is pruned",
                where=f"{_SECTION}.{key}.shared_parameters.method",
                fix="call redundancy_clean in the program that trains, and leave the section out here",
            )


def _section(config: dict[str, Any]) -> Compression:
    return load_config(config, world_size=1, batch="skip").compression_training


def _finished(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration for a trained model: techniques have started, and the student exists."""
    finished = deepcopy(config)
    section = finished.get(_SECTION)
    if isinstance(section, dict):
        section.pop("layer_reduction", None)
        for technique in section.values():
            shared = technique.get("shared_parameters") if isinstance(technique, dict) else None
            if isinstance(shared, dict):
                shared.pop("schedule_offset_end", None)
                shared["schedule_offset"] = 0
    return finished


def _pretrained(folder: Path) -> nn.Module:
    config = config_of(folder, _WHERE)
    transformers = transformers_for(_WHERE)
    (architecture,) = (getattr(config, "architectures", None) or [None])[:1]
    kind = getattr(transformers, architecture or "", transformers.AutoModel)
    try:
        model, info = kind.from_pretrained(folder, dtype="auto", local_files_only=True, output_loading_info=True)
    except Exception as error:  # the model's own code, and its checks, may raise anything
        raise ModelError(
            f"transformers cannot load it: {error}",
            where=str(folder),
            fix="name a folder that save_pretrained has written, of a model of transformers' own",
        ) from error
    if info["missing_keys"]:
        raise ModelError(
            f"the files lack {', '.join(sorted(info['missing_keys'])[:5])}",
            where=str(folder),
            fix="name a folder with all weights of the model",
        )
    return model.eval()


def _matrices(source: Source) -> nn.Module:
    """The matrices of a checkpoint, as linear layers and embeddings of their names."""
    root = nn.Module()
    placed: dict[str, nn.Parameter] = {}
    for weight in weights_of(source):
        tensor = weight.tensor
        if len(tensor.shape) == 2 and weight.name.endswith(".weight") and weight.dtype.is_floating_point:
            values = torch.empty(tensor.shape, dtype=weight.dtype)
            if values.numel():
                source.read([Read(tensor, 0, values.view(-1))])
            placed[weight.name] = nn.Parameter(values, requires_grad=False)
    placed |= {alias: placed[first] for alias, first in source.aliases.items() if first in placed}
    for name, param in placed.items():
        _place(root, name.removesuffix(".weight"), param)
    return root


def _place(root: nn.Module, name: str, param: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    n_rows, n_columns = param.shape
    layer = (
        nn.Embedding(n_rows, n_columns, device="meta")
        if _EMBEDDING.search(last)
        else nn.Linear(n_columns, n_rows, bias=False, device="meta")
    )
    layer.register_parameter("weight", param)
    layer._modules.update(root._modules[last]._modules if last in root._modules else {})
    root.add_module(last, layer)


def _show(report: CompressionReport, options: argparse.Namespace) -> None:
    if options.json is not None:
        _write(options.json, json.dumps(report.as_json(), indent=2) + "\n")
    if options.plot is not None:
        _write(options.plot, as_svg(report))
    print(as_text(report))


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=file, fix="name a file in a folder") from error


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("compress", _DESCRIPTION)
    actions = Actions(parser, "report | export")

    def add_common(action: argparse.ArgumentParser) -> None:
        action.add_argument("--config", required=True, metavar="FILE", help="configuration with compression_training")
        action.add_argument("--json", metavar="FILE", help="write the report as JSON as well")
        action.add_argument("--plot", metavar="FILE", help="write a picture of the report, SVG, as well")
        action.add_argument("--text", metavar="FILE", help="a text: show the loss and the time of a forward as well")
        action.add_argument(
            "--context", type=int, default=128, metavar="N", help="tokens of a window of it; %(default)s"
        )

    report = actions.add("report", _report, "bits, bytes and error of each layer that the configuration compresses")
    report.add_argument("path", metavar="CKPT", help="Hugging Face folder, folder of checkpoints, or one checkpoint")
    report.add_argument("--tag", help="which of the checkpoints of the folder; default: what `latest` names")
    add_common(report)
    export = actions.add("export", _export, "quantize and pack the weights of a Hugging Face folder; print the report")
    export.add_argument("path", metavar="MODEL_DIR", help="Hugging Face folder")
    export.add_argument("out", metavar="OUT", help="new folder")
    add_common(export)
    return parser
