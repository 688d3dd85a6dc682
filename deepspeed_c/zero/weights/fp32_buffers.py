"""Buffers that stay in fp32 while a model trains in bf16 or fp16 (``data_types.keep_in_fp32_modules``).

Routers of experts add a correction bias to their scores. The biases of experts differ by less than the spacing of bf16
values, so rounding them would send tokens to other experts. transformers names such tensors in two attributes of a
model's class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

__all__ = ["buffers_in_fp32", "keep_buffers_in_fp32", "names_in_fp32"]


def buffers_in_fp32(model: torch.nn.Module, setting: str | Sequence[str], dtype: torch.dtype | None) -> set[int]:
    """Ids of the floating-point buffers that stay in fp32 where weights have ``dtype``.

    setting: "auto" to use the names that the modules' classes list, or patterns (* stands for any characters). A
    pattern may match anywhere in a buffer's full name. Names that a module lists apply only below that module.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return set()
    patterns = _patterns(model, dtype) if setting == "auto" else [_expression(name) for name in setting]
    if not patterns:
        return set()
    wanted = re.compile("|".join(patterns))
    return {
        id(buffer)
        for name, buffer in model.named_buffers(remove_duplicate=False)
        if buffer.is_floating_point() and wanted.search(name)
    }


def names_in_fp32(model: torch.nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of the parameters and buffers of ``model.state_dict()`` that stay in fp32 where weights have ``dtype``,
    according to the classes of the model's modules."""
    if dtype not in (torch.bfloat16, torch.float16):
        return set()
    patterns = _patterns(model, dtype)
    if not patterns:
        return set()
    wanted = re.compile("|".join(patterns))
    return {name for name in model.state_dict(keep_vars=True) if wanted.search(name)}


def keep_buffers_in_fp32(model: torch.nn.Module, setting: str | Sequence[str], dtype: torch.dtype | None) -> None:
    """Give the buffers of ``buffers_in_fp32`` fp32 data, so that values put into them later are not rounded."""
    kept = buffers_in_fp32(model, setting, dtype)
    for buffer in model.buffers():
        if id(buffer) in kept and buffer.dtype != torch.float32:
            buffer.data = buffer.data.float()


def _patterns(model: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    attributes = ["_keep_in_fp32_modules_strict"]
    if dtype is torch.float16:  # the second list protects against overflow; bf16 has the range of fp32
        attributes.append("_keep_in_fp32_modules")
    found = set()
    for path, module in model.named_modules():
        for attribute in attributes:
            for name in getattr(module, attribute, None) or ():
                found.add(rf"^{re.escape(path)}\..*(?:{_expression(name)})" if path else _expression(name))
    return sorted(found)


def _expression(name: str) -> str:
    return ".*".join(re.escape(part) for part in name.split("*"))
