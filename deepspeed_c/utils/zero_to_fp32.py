"""fp32 weights from a checkpoint of ours or of DeepSpeed: DeepSpeed's functions, and its program ``zero_to_fp32``."""

from __future__ import annotations

import argparse
import glob
import logging
import math
import os
import re
import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_c.checkpoint.open import open_checkpoint
from deepspeed_c.checkpoint.source import Read, Source
from deepspeed_c.checkpoint.tools.export import Weight, export, weights_of
from deepspeed_c.errors import CheckpointError, DeepSpeedCError
from deepspeed_c.logging import logger

__all__ = [
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "to_torch_tensor",
]

# More than any model has: one file.
NO_LIMIT = 1 << 62
EXIT_FAILED = 1


class _Open:
    """A checkpoint that stays open as long as any of its lazy tensors lives."""

    def __init__(self, source: Source) -> None:
        self.source = source
        weakref.finalize(self, source.close)


class LazyTensor:
    """A weight that has not been read: ``shape`` and ``dtype`` are known, ``contiguous()`` reads it anew each time."""

    def __init__(self, opened: _Open, weight: Weight) -> None:
        self._opened, self._weight = opened, weight
        self.shape = torch.Size(weight.tensor.shape)
        self.dtype = weight.dtype

    def numel(self) -> int:
        return math.prod(self.shape)

    def contiguous(self) -> torch.Tensor:
        """The weight, in host memory. Raises CheckpointError."""
        into = torch.empty(self.numel(), dtype=self.dtype)
        self._opened.source.read([Read(self._weight.tensor, 0, into)])
        return into.view(self.shape)

    def __repr__(self) -> str:
        return f"LazyTensor({self._weight.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> OrderedDict[str, Any]:
    """The whole model's state dict from a checkpoint: parameters in fp32, from their masters; half-precision buffers in
    fp32, others as they are.

    Args:
        checkpoint_dir: the argument of ``save_checkpoint``, or the folder of a tag; ours or DeepSpeed's, any stage and
            world size. tag: default: the tag in the file ``latest``.
        exclude_frozen_parameters: leave frozen parameters out.
        lazy_mode: give :class:`LazyTensor` in the place of tensors, which are read one by one by ``contiguous()``.

    Tied weights are there under all their names, as one tensor. Without ``lazy_mode`` the model is in host memory,
    once. Raises CheckpointError.
    """
    opened = _Open(open_checkpoint(checkpoint_dir, tag))
    source = opened.source
    lazy = OrderedDict(
        (weight.name, LazyTensor(opened, weight))
        for weight in weights_of(source, torch.float32, exclude_frozen_parameters)
    )
    state: OrderedDict[str, Any] = lazy if lazy_mode else to_torch_tensor(lazy)
    for alias, first in source.aliases.items():
        if first in state:
            state[alias] = state[first]
    return state


def to_torch_tensor(state_dict: OrderedDict[str, Any], return_empty_tensor: bool = False) -> OrderedDict[str, Any]:
    """Tensors in the place of lazy ones, each read once; ``return_empty_tensor`` gives them their shape and dtype
    without values or memory.
    """
    read: dict[int, torch.Tensor] = {}
    tensors: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, lazy in state_dict.items():
        if id(lazy) not in read:
            is_lazy = isinstance(lazy, LazyTensor)
            if return_empty_tensor:
                read[id(lazy)] = torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
            else:
                read[id(lazy)] = lazy.contiguous() if is_lazy else lazy
        tensors[name] = read[id(lazy)]
    return tensors


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Writes the fp32 weights of a checkpoint into ``output_dir`` as Hugging Face lays them out, with a bounded part of
    them in memory.

    Args:
        checkpoint_dir, tag, exclude_frozen_parameters: as for ``get_fp32_state_dict_from_zero_checkpoint``.
        max_shard_size: "5GB", "500MB", a number of bytes, or None for one file.
        safe_serialization: ``model.safetensors`` instead of ``pytorch_model.bin``.

    Raises CheckpointError; ``output_dir`` is as it was then.
    """
    with open_checkpoint(checkpoint_dir, tag) as source:
        done = export(
            source,
            output_dir,
            form="safetensors" if safe_serialization else "fp32-pt",
            dtype=torch.float32,
            max_shard_size=NO_LIMIT if max_shard_size is None else max_shard_size,
            exclude_frozen=exclude_frozen_parameters,
        )
        logger.info("%s: %d tensors, %d bytes from %s", output_dir, done.n_tensors, done.total_bytes, source.where)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str, tag: str | None = None
) -> torch.nn.Module:
    """Moves ``model`` to the CPU, loads the fp32 weights of a checkpoint into it and returns it.

    Names that are missing on either side are left alone.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        logger.warning("%s: not in the checkpoint: %s; not in the model: %s", checkpoint_dir, missing, unexpected)
    return model


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """Path of rank 0's model states in a tag's folder of DeepSpeed's layout.

    Raises FileNotFoundError where it is not.
    """
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if zero_stage == 3 else "mp_rank_00_model_states.pt"
    return get_checkpoint_files(checkpoint_dir, name)[0]


def get_optim_files(checkpoint_dir: str) -> list[str]:
    """Paths of the optimizer states in a tag's folder of DeepSpeed's layout, by rank.

    Raises FileNotFoundError where there are none.
    """
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    """Paths of the model states in a tag's folder of DeepSpeed's layout, by rank.

    Raises FileNotFoundError where there are none.
    """
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """Paths in ``checkpoint_dir`` that match, numbers in their names in the order of their values.

    Raises FileNotFoundError where there are none.
    """
    if not os.path.isdir(checkpoint_dir):
        raise FileNotFoundError(f"{checkpoint_dir} is no folder")
    found = glob.glob(os.path.join(glob.escape(checkpoint_dir), glob_pattern))
    if not found:
        raise FileNotFoundError(
            f"{checkpoint_dir} holds no {glob_pattern}. A checkpoint in the layout of deepspeed_c has no such files: "
            'read it with get_fp32_state_dict_from_zero_checkpoint, or save with checkpoint.format "deepspeed"'
        )
    return sorted(found, key=lambda path: [int(p) if p.isdigit() else p for p in re.split(r"([0-9]+)", path)])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``zero_to_fp32.py`` with ``argv`` (default: ``sys.argv[1:]``); 0 when the weights are written, 1 with the
    reason on stderr when not.
    """
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Writes the fp32 weights of a checkpoint of deepspeed_c or DeepSpeed."
    )
    parser.add_argument("checkpoint_dir", help="folder of checkpoints, with the file latest, or of one tag")
    parser.add_argument("output_dir", help="folder for pytorch_model.bin, or what --safe_serialization says")
    parser.add_argument(
        "--max_shard_size", default="5GB", help="size above which weights go to several files and an index; default 5GB"
    )
    parser.add_argument("--safe_serialization", action="store_true", help="write model.safetensors")
    parser.add_argument("-t", "--tag", help="which checkpoint; default: what the file latest names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="say more")
    options = parser.parse_args(argv)
    if options.debug:
        logger.setLevel(logging.DEBUG)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            options.checkpoint_dir,
            options.output_dir,
            max_shard_size=options.max_shard_size,
            safe_serialization=options.safe_serialization,
            tag=options.tag,
            exclude_frozen_parameters=options.exclude_frozen_parameters,
        )
    except DeepSpeedCError as error:
        if options.debug and isinstance(error, CheckpointError):
            raise
        print(f"zero_to_fp32.py: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
