"""DeepSpeed's module paths and names, and what answers to each here: the one table to edit when something is added.

A module of DeepSpeed's either is one of our modules (``MODULES``), or is gathered from several of them, name by name (``NAMES``). ``NAMES`` also holds
what a module of ours is asked for under DeepSpeed's name for it, and has elsewhere or under another name. ``ABSENT`` says what to do without the rest.
"""

from __future__ import annotations

__all__ = ["ABSENT", "MODULES", "NAMES"]

# DeepSpeed's module -> our module, which is the same object under both names. Modules with the same path need no line to be imported; with
# one they are also there as attributes, without an import of their own, as they are in DeepSpeed.
MODULES: dict[str, str] = {
    "deepspeed.accelerator": "deepspeed_c.accelerator",
    "deepspeed.checkpoint": "deepspeed_c.checkpoint",
    "deepspeed.checkpoint.utils": "deepspeed_c.checkpoint.utils",
    "deepspeed.comm": "deepspeed_c.comm",
    "deepspeed.comm.comm": "deepspeed_c.comm.comm",
    "deepspeed.ops": "deepspeed_c.ops",
    "deepspeed.ops.adagrad": "deepspeed_c.ops.adagrad",
    "deepspeed.ops.adam": "deepspeed_c.ops.adam",
    "deepspeed.ops.aio": "deepspeed_c.ops.aio",
    "deepspeed.ops.lamb": "deepspeed_c.ops.lamb",
    "deepspeed.ops.lion": "deepspeed_c.ops.lion",
    "deepspeed.runtime.engine": "deepspeed_c.engine.engine",
    "deepspeed.runtime.lr_schedules": "deepspeed_c.lr_schedules",
    "deepspeed.runtime.zero": "deepspeed_c.zero",
    "deepspeed.runtime.zero.partition_parameters": "deepspeed_c.zero.partition_parameters",
    "deepspeed.utils": "deepspeed_c.utils",
    "deepspeed.utils.logging": "deepspeed_c.logging",
    "deepspeed.utils.z3_leaf_module": "deepspeed_c.zero.leaf",
    "deepspeed.utils.zero_to_fp32": "deepspeed_c.utils.zero_to_fp32",
    "deepspeed.zero": "deepspeed_c.zero",
}

# DeepSpeed's module -> name -> "module:name" of ours.
NAMES: dict[str, dict[str, str]] = {
    "deepspeed.launcher.runner": {
        "DEEPSPEED_ENVIRONMENT_NAME": "deepspeed_c.alias.constants:DEEPSPEED_ENVIRONMENT_NAME",
        "main": "deepspeed_c.launcher.main:main",
    },
    "deepspeed.runtime.base_optimizer": {"DeepSpeedOptimizer": "deepspeed_c.zero.optimizer:DeepSpeedOptimizer"},
}

# Longest prefix of what was asked for -> what to use. Names stand with their modules, as "module.name".
ABSENT: dict[str, str] = {}
