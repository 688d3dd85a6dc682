"""Imports the packages, and the code of each family of families.py, once before ranks that cut models of transformers
are forked."""

from __future__ import annotations

import importlib

import peft  # noqa: F401

import deepspeed_c.inject.policies  # noqa: F401

MODELS = (
    *("apertus", "aria", "bert", "bloom", "clip", "codegen", "cohere", "deepseek_v3", "distilbert", "falcon", "gpt2"),
    *("gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "inkling", "llama", "llama4", "mixtral"),
    *("mpt", "opt", "phi", "phi3", "qwen2", "qwen3", "starcoder2", "t5"),
)

importlib.import_module("transformers.models.auto.modeling_auto")
for model in MODELS:
    importlib.import_module(f"transformers.models.{model}.modeling_{model}")
