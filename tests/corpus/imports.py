"""Import lines of projects that use DeepSpeed, with the expected outcome of each.

An import line has one row, even if several projects contain it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["IMPORTS", "Import"]


class Import(NamedTuple):
    line: str
    projects: str
    words: str = ""
    """Words of the error that a call raises if the name is not implemented; "" if it is implemented."""


INFERENCE = "inference"

IMPORTS = [
    Import("import deepspeed", "all of them"),
    Import("import deepspeed.comm as dist", "OpenRLHF, Megatron-DeepSpeed, DeepSpeed-Chat"),
    Import("from deepspeed import comm as dist", "Megatron-DeepSpeed"),
    Import("from deepspeed import get_accelerator", "DeepSpeedExamples"),
    Import(
        "from deepspeed.accelerator import get_accelerator",
        "DeepSpeed-Chat, accelerate, transformers, Megatron-DeepSpeed",
    ),
    Import("from deepspeed.accelerator.real_accelerator import get_accelerator", "GPT-NeoX"),
    Import("from deepspeed import DeepSpeedEngine", "accelerate, LLaMA-Factory"),
    Import("from deepspeed import initialize, init_distributed, add_config_arguments", "CIFAR example"),
    Import("from deepspeed import zero", "transformers, peft"),
    Import("from deepspeed import log_dist", "Megatron-DeepSpeed"),
    Import("from deepspeed import OnDevice", "BLOOM inference, GPT-NeoX"),
    Import("from deepspeed.runtime.engine import DeepSpeedEngine", "accelerate, Lightning"),
    Import("from deepspeed.runtime.zero.config import ZeroStageEnum", "axolotl"),
    Import(
        "from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus",
        "DeepSpeed-Chat, OpenRLHF, peft, trl, LLaVA",
    ),
    Import("from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init", "transformers"),
    Import("from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum", "OpenRLHF"),
    Import("from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum", "OpenRLHF, trl"),
    Import("from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live", "HF docs"),
    Import(
        "from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live", "HF docs"
    ),
    Import("from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold", "HF docs"),
    Import("from deepspeed.runtime.lr_schedules import WarmupLR", "GPT-NeoX"),
    Import("from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP", "axolotl, ArcticTraining"),
    Import(
        "from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, sequence_tiled_compute",
        "ArcticTraining",
    ),
    Import("from deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy", "Megatron-DeepSpeed"),
    Import(
        "from deepspeed.sequence.fpdt_layer import FPDT_FFN, FPDT_Attention, FPDT_InputConstruct, FPDT_LogitsLoss",
        "Megatron-DeepSpeed",
    ),
    Import(
        "from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest",
        "DeepSpeedExamples",
    ),
    Import("from deepspeed.runtime.lr_schedules import add_tuning_arguments", "BERT example"),
    Import("from deepspeed.runtime.dataloader import RepeatingLoader", "GPT-NeoX"),
    Import("from deepspeed.runtime.utils import see_memory_usage", "Megatron-DeepSpeed, OpenRLHF"),
    Import("from deepspeed.runtime.utils import clip_grad_norm_", "Megatron-DeepSpeed"),
    Import("from deepspeed.ops.adam import FusedAdam", "DeepSpeed-Chat, OpenRLHF, Lightning, GPT-NeoX"),
    Import("from deepspeed.ops.adam import DeepSpeedCPUAdam", "DeepSpeed-Chat, OpenRLHF, Lightning"),
    Import("from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam", "DeepSpeed-Chat"),
    Import("from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam", "ColossalAI benchmarks"),
    Import("from deepspeed.ops.adam.fused_adam import FusedAdam", "Megatron-LLaMA"),
    Import("from deepspeed.ops.lamb import FusedLamb", "BingBert"),
    Import("from deepspeed.ops.transformer import DeepSpeedTransformerLayer", "BingBert"),
    Import("from deepspeed.module_inject import replace_transformer_layer, revert_transformer_layer", "DeepSpeed docs"),
    Import(
        "from deepspeed.module_inject.replace_module import replace_module, generic_injection", "diffusers examples"
    ),
    Import("from deepspeed.module_inject.replace_policy import HFBertLayerPolicy", "DeepSpeed inference tutorial"),
    Import(
        "from deepspeed.module_inject import AutoTPConfig, AutoTPPresets, PartitionType, TPLayerSpec",
        "DeepSpeed AutoTP docs",
    ),
    Import(
        "from deepspeed.module_inject.layers import EmbeddingLayer, fused_LinearLayer, set_autotp_mode",
        "AutoTP extensions",
    ),
    Import("from deepspeed.ops.lion import FusedLion, DeepSpeedCPULion", "axolotl"),
    Import("from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad", "DLRM example"),
    Import("from deepspeed.ops.aio import AsyncIOBuilder", "nvme benchmarks"),
    Import("from deepspeed.utils import logger", "OpenRLHF, transformers, Lightning"),
    Import("from deepspeed.utils import log_dist", "DeepSpeed-Chat, GPT-NeoX"),
    Import("from deepspeed.utils import groups", "Megatron-DeepSpeed, verl forks"),
    Import(
        "from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state",
        "trl, LISA",
    ),
    Import("from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state", "GaLore forks"),
    Import(
        "from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_grad, safe_set_local_optimizer_state",
        "LISA",
    ),
    Import("from deepspeed.utils import set_z3_leaf_modules", "OpenRLHF, LLaMA-Factory, axolotl, ms-swift"),
    Import("from deepspeed.utils import get_z3_leaf_modules, unset_z3_leaf_modules", "ms-swift"),
    Import("from deepspeed.utils import instrument_w_nvtx", "DeepSpeed-Chat"),
    Import("from deepspeed.utils import OnDevice", "DeepSpeed-MII"),
    Import("from deepspeed.utils.logging import log_dist, logger", "LAVIS forks"),
    Import("from deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer", "GPT-NeoX"),
    Import(
        "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint",
        "Lightning, OpenRLHF, HF docs",
    ),
    Import("from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint", "HF docs, trl"),
    Import(
        "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict",
        "accelerate, open-instruct",
    ),
    Import("from deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files", "Lightning"),
    Import("from deepspeed.checkpoint.ds_to_universal import main", "OpenRLHF"),
    Import("from deepspeed import checkpointing", "Megatron-DeepSpeed"),
    Import(
        "from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler",
        "torch.load of checkpoints, NeMo",
    ),
    Import("import deepspeed; deepspeed.zero.GatheredParameters, deepspeed.zero.Init", "OpenRLHF, transformers"),
    Import("import deepspeed; deepspeed.zero.register_external_parameter", "DeepSpeed docs"),
    Import("from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME", "accelerate"),
    Import("from deepspeed.comm import init_distributed, get_rank, get_world_size, barrier", "DeepSpeed-Chat"),
    Import("from deepspeed.comm.comm import broadcast, all_reduce, all_gather", "trlx"),
    Import("from deepspeed import add_tuning_arguments", "Megatron-DeepSpeed"),
    Import("from deepspeed import __version__ as deepspeed_version", "transformers, NeMo"),
    Import("from deepspeed.comm import ReduceOp, all_reduce", "Megatron-DeepSpeed"),
    Import("from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules", "LLaMA-Factory"),
    Import("from deepspeed.utils.nvtx import instrument_w_nvtx", "Megatron-DeepSpeed"),
    Import("from deepspeed.runtime.zero import GatheredParameters", "FastChat forks"),
    Import(
        "from deepspeed.runtime.zero.partition_parameters import register_external_parameter", "ColossalAI comparisons"
    ),
    Import("import deepspeed; deepspeed.DeepSpeedEngine.save_checkpoint", "Lightning"),
    Import("import deepspeed; deepspeed.runtime.engine.DeepSpeedEngine", "accelerate"),
    Import("import deepspeed; deepspeed.utils.safe_get_full_fp32_param", "peft"),
    Import("import deepspeed; deepspeed.checkpointing.configure", "Lightning"),
    Import("import deepspeed; deepspeed.ops.adam.FusedAdam", "GPT-NeoX"),
    Import("from deepspeed import load_ds_config", "Megatron-DeepSpeed"),
    Import("from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT", "Lightning, Megatron-DeepSpeed"),
    Import("from deepspeed.compression.helper import recursive_getattr, recursive_setattr", "DeepSpeed-Chat"),
    Import("from deepspeed.git_version_info import torch_info", "NeMo"),
    Import("from deepspeed.moe.utils import is_moe_param, has_moe_layers", "Megatron-DeepSpeed"),
    Import(
        "from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer",
        "CIFAR example, Megatron-DeepSpeed",
    ),
    Import("from deepspeed.ops.op_builder import CPUAdamBuilder", "transformers, DeepSpeed-Chat"),
    Import("from deepspeed.ops.op_builder import FusedAdamBuilder, UtilsBuilder", "GPT-NeoX"),
    Import("from deepspeed.runtime.bf16_optimizer import BF16_Optimizer", "Megatron-DeepSpeed"),
    Import("from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine", "Megatron-DeepSpeed"),
    Import("from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine", "OpenRLHF"),
    Import("from deepspeed.runtime.config import DeepSpeedConfig", "accelerate forks, GPT-NeoX"),
    Import("from deepspeed.runtime.config_utils import DeepSpeedConfigModel", "DeepSpeed-MII"),
    Import("from deepspeed.runtime.config_utils import get_scalar_param", "GPT-NeoX"),
    Import("from deepspeed.runtime.constants import GRADIENT_ACCUMULATION_STEPS", "GPT-NeoX"),
    Import("from deepspeed.runtime.constants import ROUTE_TRAIN", "Megatron-DeepSpeed"),
    Import("from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer", "BingBert"),
    Import("from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer", "BingBert"),
    Import("from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES", "Lightning"),
    Import("from deepspeed.runtime.swap_tensor.constants import AIO_BLOCK_SIZE", "NVMe benchmarks"),
    Import("from deepspeed.runtime.zero.config import DeepSpeedZeroConfig", "DeepSpeed-MII, axolotl"),
    Import("from deepspeed.runtime.zero.linear import LinearModuleForZeroStage3, zero3_linear_wrap", "peft forks"),
    Import("from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3", "DeepSpeed-Chat, OpenRLHF, LISA"),
    Import("from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer", "open-instruct"),
    Import("from deepspeed.utils.timer import FORWARD_GLOBAL_TIMER", "Megatron-DeepSpeed"),
    Import("from deepspeed.utils.torch import required_torch_version", "GPT-NeoX"),
    Import("from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint", "GPT-NeoX"),
    Import("from deepspeed.sequence.layer import DistributedAttention", "Megatron-DeepSpeed"),
    Import("from deepspeed.sequence.layer import _SeqAllToAll", "Megatron-DeepSpeed"),
    Import(
        "from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF", "transformers, accelerate"
    ),
    Import("from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter", "accelerate"),
    Import("import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu", "ArcticTraining"),
    Import("from deepspeed.pipe import PipelineModule", "Megatron-DeepSpeed, GPT-NeoX, LLaMA pipelines"),
    Import("from deepspeed.pipe import LayerSpec, TiedLayerSpec", "Megatron-DeepSpeed, GPT-NeoX"),
    Import("from deepspeed import PipelineEngine", "GPT-NeoX"),
    Import("from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology", "Megatron-DeepSpeed"),
    Import("from deepspeed.runtime.zero.mics import MiCS_Init", "DeepSpeed docs", "zero_param_parallel_group"),
    Import("import deepspeed.accelerator as ds_acc; ds_acc.get_accelerator", "DeepSpeed-Chat"),
    Import("from deepspeed.accelerator import set_accelerator", "Intel's extension, Megatron-DeepSpeed"),
    Import("from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator", "vendors' extensions"),
    Import("from deepspeed.utils.groups import _get_sequence_parallel_group", "transformers, ms-swift"),
    Import("from deepspeed.utils import safe_get_full_grad, safe_set_full_grad", "ms-swift"),
    Import("from deepspeed.ops.adam import DeepSpeedCPUAdam as CPUAdam; CPUAdam.step", "OpenRLHF"),
    Import("from deepspeed.runtime.zero.utils import is_zero_param", "trl forks, OpenRLHF"),
    Import("from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig", "DeepSpeed-MII"),
    Import("from deepspeed.runtime.pipe.module import PipelineModule, LayerSpec, TiedLayerSpec", "Megatron-DeepSpeed"),
    Import("from deepspeed.runtime.base_optimizer import ZeROOptimizer", "accelerate forks"),
    Import("from deepspeed.runtime.constants import TRAIN_BATCH_SIZE", "Lightning forks"),
    Import("from deepspeed.checkpoint import DeepSpeedCheckpoint", "Megatron-DeepSpeed tools"),
    Import(
        "from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO, VOCABULARY_PARAMETER_PATTERNS",
        "Megatron-DeepSpeed",
    ),
    Import("from deepspeed.checkpoint.reshape_meg_2d import reshape_meg_2d_parallel", "Megatron-DeepSpeed tools"),
    Import("from deepspeed.launcher.runner import parse_args", "DeepSpeed-MII", "start processes"),
    Import(
        "from deepspeed.launcher.multinode_runner import PDSHRunner", "DeepSpeed-MII, accelerate", "start processes"
    ),
    Import("from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile", "calflops, GPT-NeoX"),
    Import("from deepspeed.profiling.flops_profiler.profiler import get_model_profile", "ms-swift forks"),
    Import("from deepspeed.moe.layer import MoE", "Megatron-DeepSpeed, DeepSpeedExamples"),
    Import("from deepspeed.moe.sharded_moe import TopKGate, MOELayer", "MoE-LLaVA"),
    Import("from deepspeed.moe.experts import Experts", "MoE-LLaVA"),
    Import("from deepspeed.moe.sharded_moe import top1gating, top2gating, gumbel_rsample", "MoE-LLaVA"),
    Import("from deepspeed.moe.mappings import drop_tokens, gather_tokens", "Megatron-DeepSpeed"),
    Import("from deepspeed.compression.helper import convert_conv1d_to_linear", "DeepSpeedExamples"),
    # -- missing here, with an error -----------------------------------------------------------------------------------
    Import("from deepspeed import init_inference", "DeepSpeed-MII, BLOOM inference"),
    Import("from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine", "DeepSpeed-Chat"),
    Import(
        "from deepspeed.compression.compress import init_compression, redundancy_clean",
        "DeepSpeedExamples",
        "compression",
    ),
    Import(
        "from deepspeed.ops.sparse_attention import SparseSelfAttention", "GPT-NeoX, DALLE-pytorch", "flex_attention"
    ),
    Import("from deepspeed.elasticity.elastic_agent import DSElasticAgent", "torchrun users", "any number of ranks"),
    Import("from deepspeed.runtime.fp16.onebit.adam import OnebitAdam", "DeepSpeedExamples", "1-bit optimizers"),
    Import(
        "from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd",
        "Megatron-DeepSpeed training.py",
        "random layer token drop",
    ),
    Import(
        "from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop",
        "Megatron-DeepSpeed",
        "random layer token drop",
    ),
    Import(
        "from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer", "Megatron-DeepSpeed"
    ),
    Import(
        "from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset",
        "Megatron-DeepSpeed",
    ),
    Import(
        "from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler", "Megatron-DeepSpeed"
    ),
    Import(
        "from deepspeed.compression.compress import redundancy_clean", "Megatron-DeepSpeed training.py", "compression"
    ),
    Import("from deepspeed.compression.scheduler import compression_scheduler", "DeepSpeedExamples", "compression"),
    Import("from deepspeed.inference.config import DeepSpeedInferenceConfig", "DeepSpeed-MII"),
    Import("from deepspeed.inference.engine import InferenceEngine", "DeepSpeed-MII, BLOOM inference"),
    Import(
        "from deepspeed.inference.v2 import RaggedInferenceEngineConfig, DeepSpeedTPConfig", "DeepSpeed-MII", INFERENCE
    ),
    Import("from deepspeed.inference.v2.engine_v2 import InferenceEngineV2", "DeepSpeed-MII", INFERENCE),
    Import("from deepspeed.inference.v2.engine_factory import build_hf_engine", "DeepSpeed-MII", INFERENCE),
    Import("from deepspeed.inference.v2.scheduling_utils import SchedulingResult, SchedulingError", "DeepSpeed-MII"),
    Import("from deepspeed.model_implementations import DeepSpeedTransformerInference", "DeepSpeed-MII", INFERENCE),
    Import(
        "from deepspeed.ops.transformer.inference import DeepSpeedTransformerInference", "DeepSpeed-Chat", INFERENCE
    ),
    Import(
        "from deepspeed.linear import LoRAConfig, OptimizedLinear, QuantizationConfig",
        "DeepSpeedExamples, ArcticTraining",
        "use peft",
    ),
    Import("from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig as c", "GPT-NeoX"),
    Import("from deepspeed.monitor.monitor import MonitorMaster", "GPT-NeoX"),
    Import("from deepspeed.autotuning.autotuner import Autotuner", "GPT-NeoX"),
    Import("from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb", "BingBert", "1-bit optimizers"),
    Import("from deepspeed.runtime.zero.tiling import TiledLinear", "DeepSpeed docs", "tiled layers"),
    Import("from deepspeed.elasticity import compute_elastic_config", "Megatron-DeepSpeed", "any number of ranks"),
]
