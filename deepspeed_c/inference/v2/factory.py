"""Ragged engines from folders of models."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from deepspeed_c.config.ragged import RaggedInferenceEngineConfig
from deepspeed_c.errors import CheckpointError
from deepspeed_c.inference.engine import init_inference
from deepspeed_c.inference.limits import check_heads
from deepspeed_c.inference.v2.engine import FORMAT, METADATA, InferenceEngineV2
from deepspeed_c.inject.folder import config_of, model_on_meta
from deepspeed_c.logging import set_level

__all__ = ["build_engine_from_ds_checkpoint", "build_hf_engine"]

_PICKLE = "ds_model_config.pkl"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def build_hf_engine(
    path: str,
    engine_config: RaggedInferenceEngineConfig,
    debug_level: int = logging.INFO,
    *,
    kv_cache_memory_bytes: int | None = None,
) -> InferenceEngineV2:
    """An engine for the model in the Hugging Face folder ``path``, or in one that ``serialize`` wrote, in the dtype of
    its configuration. kv_cache_memory_bytes: of ``InferenceEngineV2``.

    Raises ConfigError and ModelError for a folder without a model, and otherwise as ``InferenceEngineV2``.
    """
    set_level(debug_level)
    folder, where = Path(path), "build_hf_engine"
    _refuse_pickle(folder)
    config = config_of(folder, where)
    n_ranks = engine_config.tensor_parallel.tp_size
    check_heads(config, n_ranks)
    is_int8 = engine_config.quantization.quantization_mode == "int8"
    own = config.dtype if config.dtype in _DTYPES else torch.float32
    host = init_inference(
        model_on_meta(folder, where),
        checkpoint=str(folder),
        dtype=torch.int8 if is_int8 else own,
        tensor_parallel=engine_config.tensor_parallel,
        max_out_tokens=engine_config.state_manager.max_context,
        replace_with_kernel_inject=True,
    )
    try:
        return InferenceEngineV2(host, engine_config, kv_cache_memory_bytes)
    except BaseException:
        host.destroy()
        raise


def build_engine_from_ds_checkpoint(
    path: str, engine_config: RaggedInferenceEngineConfig, debug_level: int = logging.INFO
) -> InferenceEngineV2:
    """An engine for the model that ``InferenceEngineV2.serialize`` wrote into the folder ``path``, for any number of
    tensor-parallel ranks.

    Raises CheckpointError for another folder, and for DeepSpeed's pickles, which are not opened.
    """
    folder = Path(path)
    _refuse_pickle(folder)
    try:
        known = json.loads((folder / METADATA).read_text(encoding="utf-8"))
        is_known = known["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{METADATA} cannot be read: {error}",
            where=str(folder),
            fix="name a folder that InferenceEngineV2.serialize wrote; build_hf_engine reads Hugging Face's",
        ) from error
    if not is_known:
        raise CheckpointError(
            f"{METADATA} has the format {known['format']!r}, and {FORMAT} is known",
            where=str(folder),
            fix="read it with the version that wrote it",
        )
    return build_hf_engine(path, engine_config, debug_level)


def _refuse_pickle(folder: Path) -> None:
    if (folder / _PICKLE).exists():
        raise CheckpointError(
            f"{_PICKLE} is a pickle, which can run any code when it is read",
            where=str(folder),
            fix="build the engine from the Hugging Face folder, and serialize it anew",
        )
