"""Plain values that DeepSpeed's modules hold under names of their own."""

from __future__ import annotations

import os

from deepspeed_c.alias.version import API_VERSION

# File of NAME=VALUE lines that a launch over several hosts hands on; accelerate writes it.
DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")

VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = (int(part) for part in API_VERSION.split("+")[0].split("."))

# As in a release of DeepSpeed's that was not built from a checkout.
GIT_HASH = GIT_BRANCH = "unknown"

# Optimizers as `type` names them, in lower case.
ADAGRAD_OPTIMIZER = "adagrad"
ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"

# DeepSpeed's operators, by the names of their builders -> whether they work here. What is there was built with the package.
COMPATIBLE_OPS: dict[str, bool] = {
    **dict.fromkeys(
        ("async_io", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"), True
    ),
    **dict.fromkeys(
        (
            *("cutlass_ops", "dc", "evoformer_attn", "fp_quantizer", "gds", "inference_core_ops", "pin_memory"),
            *("quantizer", "ragged_device_ops", "ragged_ops", "random_ltd", "sparse_attn", "spatial_inference"),
            *("stochastic_transformer", "transformer", "transformer_inference", "utils"),
        ),
        False,
    ),
}
