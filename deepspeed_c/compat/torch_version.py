"""Properties of the installed torch, as in ``deepspeed.utils.torch`` and ``deepspeed.git_version_info``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.torch_version import TorchVersion

from deepspeed_c.errors import ConfigError

__all__ = [
    "is_compile_supported",
    "is_functorch_transforming",
    "jit_script_compat",
    "register_grad_hook",
    "required_torch_version",
]


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Whether torch is at least ``min_version`` and at most ``max_version``. Numbers are converted to text, so version
    2.10 has to be written "2.10".

    A build's local part ("+cu128") counts, as in PEP 440: 2.10.0+cu128 is above 2.10.0. Raises ConfigError if neither
    version is given.
    """
    if not (min_version or max_version):
        raise ConfigError(
            "neither min_version nor max_version is given", where="required_torch_version", fix="pass one"
        )
    version = TorchVersion(torch.__version__)
    return (not min_version or bool(version >= str(min_version))) and (
        not max_version or bool(version <= str(max_version))
    )


def is_compile_supported() -> bool:
    """Always True: every torch that this package supports can compile."""
    return hasattr(torch, "compile")


def is_functorch_transforming() -> bool:
    """Whether the call happens inside ``torch.func.grad``, ``vmap`` or another transform of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call ``hook(param)`` after a backward has accumulated the gradient in ``param.grad``. The returned handle removes
    the hook.
    """
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(fn)``."""
    return torch.compile(fn)


def _short(version: str | None) -> str:
    return ".".join(version.split("+")[0].split(".")[:2]) if version else "0.0"


def _torch_info() -> dict[str, Any]:
    """Major and minor versions as text; "0.0" for a library that this torch was built without.

    ``nccl_version`` is the version of the library that torch contains.
    """
    has_cuda = torch.version.cuda is not None
    return {
        "version": _short(str(torch.__version__)),
        "bf16_support": has_cuda and torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        "cuda_version": _short(torch.version.cuda),
        "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if has_cuda else "0.0",
        "hip_version": _short(torch.version.hip),
    }


def __getattr__(name: str) -> Any:
    # Computed at the first read, because the check for bf16 asks the driver.
    if name == "torch_info":
        return globals().setdefault(name, _torch_info())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
