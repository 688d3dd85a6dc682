"""The configuration of the ragged engine, under DeepSpeed's names."""

from __future__ import annotations

import enum
from typing import Any

from deepspeed_c.config.config_model import DeepSpeedConfigModel, Field
from deepspeed_c.config.inference import DeepSpeedTPConfig, dtype_of
from deepspeed_c.errors import ConfigError

__all__ = [
    "AllocationMode",
    "DSStateManagerConfig",
    "KVCacheConfig",
    "KVCacheType",
    "MemoryConfig",
    "RaggedInferenceEngineConfig",
    "RaggedQuantizationConfig",
]


class AllocationMode(enum.Enum):
    """How the number of blocks of keys and values follows from ``MemoryConfig.size``."""

    RESERVE = "reserve"
    """``size`` bytes stay free; blocks take the rest."""
    ALLOCATE = "allocate"
    """There are ``size`` blocks."""


class KVCacheType(enum.Enum):
    """The tokens that a query of some layers sees."""

    DENSE = "dense"
    """All tokens before it."""
    LOCAL = "local"
    """Tokens in a window."""


class KVCacheConfig(DeepSpeedConfigModel):
    """The shape of the keys and values of layers that hold the same tokens. The engine finds it in the model itself."""

    type: KVCacheType = KVCacheType.DENSE
    block_size: int = Field(128, gt=0)
    """Tokens of a block; those of the engine have 16."""
    num_allocation_groups: int = Field(1, gt=0)
    """Tables of blocks of a sequence."""
    cache_shape: tuple[int, int, int]
    """(layers, heads of keys and values, elements of a head)."""
    cache_dtype: Any = Field(default_factory=lambda: dtype_of("float16"))
    """A dtype of torch, its name or a member of ``DtypeEnum``."""
    max_blocks_per_allocation_group: int = Field(64, gt=0)
    """Blocks of one table."""

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(strict, **data)
        self.cache_dtype = dtype_of(self.cache_dtype)
        if min(self.cache_shape) < 1:
            raise ConfigError(
                f"is {self.cache_shape!r}", where="KVCacheConfig.cache_shape", fix="write three numbers above 0"
            )


class MemoryConfig(DeepSpeedConfigModel):
    """The memory of keys and values. A block has room for 16 tokens of all layers with one window."""

    mode: AllocationMode = AllocationMode.RESERVE
    size: int = Field(1_000_000_000, gt=0)


class DSStateManagerConfig(DeepSpeedConfigModel):
    """Limits of sequences and tokens."""

    max_tracked_sequences: int = Field(2048, gt=0)
    """Sequences that the engine knows at one time."""
    max_ragged_batch_size: int = Field(768, gt=0)
    """Tokens of one ``put``."""
    max_ragged_sequence_count: int = Field(512, gt=0)
    """Sequences of one ``put``."""
    max_context: int = Field(8192, gt=0)
    """Tokens of a sequence, new ones too."""
    memory_config: MemoryConfig = MemoryConfig()
    enable_prefix_caching: bool = True
    """Full blocks of sequences that have ended stay until their memory is needed, and a sequence that begins with the
    same tokens takes them instead of computing them."""
    offload: bool = False
    """True is refused: keys and values lie in host memory on a CPU anyway."""

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(strict, **data)
        for name in ("max_tracked_sequences", "max_ragged_batch_size"):
            if self.max_ragged_sequence_count > getattr(self, name):
                raise ConfigError(
                    f"{self.max_ragged_sequence_count} is more than {name}, {getattr(self, name)}",
                    where="state_manager.max_ragged_sequence_count",
                    fix=f"set it to at most {getattr(self, name)}, or raise {name}",
                )
        if self.offload:
            raise ConfigError(
                "keys and values are not moved to another memory",
                where="state_manager.offload",
                fix="set it to false; memory_config limits their memory",
            )


class RaggedQuantizationConfig(DeepSpeedConfigModel):
    """How weights are stored."""

    quantization_mode: str | None = None
    """None: in the model's dtype; "int8": 8 bits, as ``init_inference`` stores them."""

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(strict, **data)
        if self.quantization_mode not in (None, "int8"):
            raise ConfigError(
                f"{self.quantization_mode!r} is no format of weights here",
                where="quantization.quantization_mode",
                fix='write "int8", or leave it out',
            )


class RaggedInferenceEngineConfig(DeepSpeedConfigModel):
    """The configuration of ``InferenceEngineV2``."""

    tensor_parallel: DeepSpeedTPConfig = Field(DeepSpeedTPConfig(), alias="tp")
    state_manager: DSStateManagerConfig = Field(DSStateManagerConfig(), alias="manager")
    quantization: RaggedQuantizationConfig = RaggedQuantizationConfig()
    deterministic: bool = False
    """The logits of a sequence have the same bits alone, in any batch, for any pieces of its tokens, behind a found
    prefix and on any number of threads. A model with operators that cannot is refused."""
