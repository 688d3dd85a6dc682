"""Pipeline parallelism: a model is cut by layers over ranks, and run by a table of actions that C cores make and prove.

``PipelineModule`` holds the layers of this rank, and ``deepspeed_c.initialize`` makes its engine. The command
``deepspeed_c pipe show`` draws a schedule.
"""

from __future__ import annotations

from deepspeed_c.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed_c.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
)
from deepspeed_c.pipe.transformers import CausalLMPipeline, from_transformers

__all__ = [
    "CausalLMPipeline",
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "PipelineParallelGrid",
    "ProcessTopology",
    "TiedLayerSpec",
    "from_transformers",
]
