"""Questions that programs ask a builder of DeepSpeed about the machine and about torch."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import shutil
from collections.abc import Iterable

import torch


class BuildQuestions:
    """The base of all builders. It answers, where DeepSpeed may raise: (0, 0) and empty texts stand for "not there"."""

    def has_function(
        self, funcname: str, libraries: Iterable[str], library_dirs: Iterable[str] | None = None, verbose: bool = False
    ) -> bool:
        """Whether one of the shared libraries (their names without "lib") has a function. They are loaded, where
        DeepSpeed compiles a program."""
        for name in libraries:
            places = [os.path.join(folder, f"lib{name}.so") for folder in library_dirs or ()]
            for place in [*filter(os.path.exists, places), ctypes.util.find_library(name)]:
                try:
                    if place is not None and hasattr(ctypes.CDLL(place), funcname):
                        return True
                except OSError:
                    continue
        return False

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Whether torch was built for AMD's GPUs."""
        return torch.version.hip is not None

    @staticmethod
    def is_sycl_enabled() -> bool:
        """Whether the command c2s of Intel's SYCL is there."""
        return shutil.which("c2s") is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """(major, minor) of the ROCm that torch was built for; (0, 0) for another torch."""
        if torch.version.hip is None:
            return 0, 0
        major, minor = torch.version.hip.split(".")[:2]
        return int(major), int(minor)

    @staticmethod
    def get_rocm_gpu_arch() -> str:
        """The name of the first AMD GPU's generation, such as "gfx90a"; empty without one."""
        if torch.version.hip is None or not torch.cuda.is_available():
            return ""
        return torch.cuda.get_device_properties(0).gcnArchName.split(":")[0]

    @staticmethod
    def get_rocm_wavefront_size() -> str:
        """The threads of a wavefront of the first AMD GPU; "32" without one."""
        if torch.version.hip is None or not torch.cuda.is_available():
            return "32"
        return str(torch.cuda.get_device_properties(0).warp_size)
