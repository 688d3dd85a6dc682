"""Sections curriculum_learning and data_efficiency: choice of samples, difficulty and order."""

from typing import Annotated, Literal

from .keys import FrozenDict, NonNeg, NonNegFloat, Positive, Section, asks, inherent, tunes

__all__ = ["Curriculum", "DataEfficiency"]

_C = "curriculum"
_D = "data_efficiency"
_T = "dynamic_batching"
_L = "random_ltd"
Schedule = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


class CurriculumSchedule(Section, kw_only=True):
    """How difficulty grows."""

    total_curriculum_step: Annotated[Positive | None, tunes("Steps until full difficulty.", _C)] = None
    difficulty_step: Annotated[Positive | None, tunes("Difficulty is a multiple of this.", _C)] = None
    root_degree: Annotated[NonNegFloat | None, tunes("Degree of the root (fixed_root).", _C)] = None
    difficulty: Annotated[tuple[NonNeg, ...] | None, tunes("Difficulties (fixed_discrete).", _C)] = None
    max_step: Annotated[tuple[NonNeg, ...] | None, tunes("Last step of each but the last (fixed_discrete).", _C)] = None


class Curriculum(Section, kw_only=True):
    """The old form of curriculum learning, by sequence length."""

    enabled: Annotated[bool, asks("Switch of the section.", _C)] = False
    curriculum_type: Annotated[str | None, tunes("What grows: seqlen.", _C)] = None
    min_difficulty: Annotated[NonNeg | None, tunes("First difficulty.", _C)] = None
    max_difficulty: Annotated[NonNeg | None, tunes("Last difficulty.", _C)] = None
    schedule_type: Annotated[Schedule | None, tunes("Shape of the growth.", _C)] = None
    schedule_config: Annotated[CurriculumSchedule, tunes("Its numbers.", _C)] = CurriculumSchedule()


class Metric(Section, kw_only=True):
    """One difficulty metric."""

    index_to_sample_path: Annotated[str | None, tunes("File: index to samples.", _D)] = None
    index_to_metric_path: Annotated[str | None, tunes("File: index to difficulty.", _D)] = None
    difficulty_type: Annotated[Literal["value", "percentile"] | None, tunes("Unit of difficulty.", _D)] = None
    clustering_type: Annotated[
        Literal["schedule_based", "single_cluster"] | None, tunes("How samples are pooled.", _D)
    ] = None
    min_difficulty: Annotated[NonNeg | None, tunes("First difficulty.", _D)] = None
    max_difficulty: Annotated[NonNeg | None, tunes("Last difficulty.", _D)] = None
    schedule_type: Annotated[Schedule | None, tunes("Shape of the growth.", _D)] = None
    schedule_config: Annotated[CurriculumSchedule, tunes("Its numbers.", _D)] = CurriculumSchedule()


class SamplingCurriculum(Section, kw_only=True):
    """Curriculum learning by metrics computed beforehand."""

    enabled: Annotated[bool, asks("Switch of the section.", _D)] = False
    data_cluster_path: Annotated[
        str | None, inherent("Directory of the pools.", "pools are computed, not written to files")
    ] = None
    curriculum_metrics: Annotated[dict[str, Metric], tunes("The metrics, by name.", _D)] = FrozenDict()


class DynamicBatching(Section, kw_only=True):
    """Batches of a number of tokens instead of samples."""

    enabled: Annotated[bool, asks("Switch of the section.", _T)] = False
    metrics_path: Annotated[str | None, tunes("Directory of the sequence lengths.", _T)] = None
    lr_scaling_method: Annotated[Literal["linear", "sqrt", "none"], tunes("How the rate follows the batch.", _T)] = (
        "linear"
    )
    min_batch_size: Annotated[Positive, tunes("Fewest samples.", _T)] = 1
    max_batch_size: Annotated[Positive | None, tunes("Most samples.", _T)] = None
    sequence_picking_order: Annotated[Literal["random", "seqlen", "dataloader"], tunes("Order of sequences.", _T)] = (
        "dataloader"
    )
    max_tokens: Annotated[Positive | None, tunes("Most tokens.", _T)] = None
    verbose: Annotated[bool, tunes("Report.", _T)] = False


class Sampling(Section, kw_only=True):
    """The choice of samples."""

    enabled: Annotated[bool, asks("Switch of the section.", _D)] = False
    num_epochs: Annotated[Positive, tunes("Passes over the data.", _D)] = 1000
    num_workers: Annotated[NonNeg, tunes("Loader processes.", _D)] = 0
    pin_memory: Annotated[bool, inherent("Use page-locked memory.", "engine.deepspeed_io(pin_memory=...) says it")] = (
        False
    )
    curriculum_learning: Annotated[SamplingCurriculum, tunes("Curriculum learning.", _D)] = SamplingCurriculum()
    dynamic_batching: Annotated[DynamicBatching, tunes("Batches by tokens.", _T)] = DynamicBatching()


class LtdScheduleConfig(Section, kw_only=True):
    """Numbers of the token schedule."""

    require_steps: Annotated[Positive | None, tunes("Steps until all tokens are kept.", _L)] = None
    seq_per_step: Annotated[Positive | None, tunes("Tokens added at a time.", _L)] = None


class LtdSchedule(Section, kw_only=True):
    """How many tokens the dropped layers keep."""

    min_value: Annotated[NonNeg | None, tunes("First number of tokens.", _L)] = None
    max_value: Annotated[NonNeg | None, tunes("Last number of tokens.", _L)] = None
    schedule_type: Annotated[Literal["fixed_linear"] | None, tunes("Shape of the growth.", _L)] = None
    schedule_config: Annotated[LtdScheduleConfig, tunes("Its numbers.", _L)] = LtdScheduleConfig()


class LtdTokenLr(Section, kw_only=True):
    """A learning rate that follows the number of kept tokens."""

    enabled: Annotated[bool, asks("Switch of the section.", _L)] = False
    total_layer_tokens: Annotated[Positive | None, tunes("Tokens of the whole run.", _L, floor=True)] = None
    warmup_type: Annotated[str | None, tunes("Shape of the warm-up.", _L)] = None
    warmup_layer_tokens: Annotated[NonNeg | None, tunes("Tokens of the warm-up.", _L, floor=True)] = None


class RandomLtd(Section, kw_only=True):
    """Random layer-wise token dropping (arXiv 2211.11586)."""

    enabled: Annotated[bool, asks("Switch of the section.", _L)] = False
    total_layer_num: Annotated[Positive | None, tunes("Layers of the model.", _L)] = None
    random_ltd_layer_num: Annotated[Positive | None, tunes("Layers that drop tokens.", _L)] = None
    random_ltd_layer_id: Annotated[tuple[NonNeg, ...] | None, tunes("Which layers they are.", _L)] = None
    model_mask_name: Annotated[str | None, tunes("Argument that is the attention mask.", _L)] = None
    model_type: Annotated[Literal["encoder", "decoder"] | None, tunes("Kind of model.", _L)] = None
    micro_batch_size: Annotated[Positive | None, tunes("Micro batch, in samples.", _L)] = None
    global_batch_size: Annotated[Positive | None, tunes("Global batch, in samples.", _L)] = None
    hidden_state_order: Annotated[
        Literal["batch_seq_dim", "seq_batch_dim"] | None, tunes("Order of dimensions.", _L)
    ] = None
    random_ltd_schedule: Annotated[LtdSchedule, tunes("Tokens kept.", _L)] = LtdSchedule()
    layer_token_lr_schedule: Annotated[LtdTokenLr, tunes("Learning rate by tokens.", _L)] = LtdTokenLr()


class Routing(Section, kw_only=True):
    """The layers that each token goes through."""

    enabled: Annotated[bool, asks("Switch of the section.", _L)] = False
    random_ltd: Annotated[RandomLtd, tunes("Token dropping.", _L)] = RandomLtd()


class DataEfficiency(Section, kw_only=True):
    """Sampling and token dropping that save data."""

    enabled: Annotated[bool, asks("Switch of the section.", _D)] = False
    seed: Annotated[int, tunes("Seed of the sampling.", _D)] = 1234
    data_sampling: Annotated[Sampling, tunes("Which samples are drawn.", _D)] = Sampling()
    data_routing: Annotated[Routing, tunes("Which tokens are dropped.", _L)] = Routing()

    @property
    def chooses_samples(self) -> bool:
        """Whether the section chooses the samples of training. As in DeepSpeed, a curriculum does so by its own
        switch."""
        sampling = self.data_sampling
        return sampling.curriculum_learning.enabled or (self.enabled and sampling.enabled)

    @property
    def n_workers(self) -> int:
        """Processes that load samples, if the section chooses them."""
        return self.data_sampling.num_workers if self.chooses_samples else 0
