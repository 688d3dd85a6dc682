"""Sections elasticity and autotuning: batch sizes and settings chosen by the tool."""

from typing import Annotated, Literal

from .keys import FrozenDict, NonNeg, Positive, Section, asks, inherent, tunes

__all__ = ["Autotuning", "Elasticity"]

_E = "elasticity"
_A = "autotuning"
_FOUND = "the planner reads it from the model itself"


class Elasticity(Section, kw_only=True):
    """A global batch size that works for many world sizes: it replaces the three keys of the batch."""

    enabled: Annotated[
        bool, asks("Switch of the section; max_train_batch_size and micro_batch_sizes are required then.", _E)
    ] = False
    max_train_batch_size: Annotated[Positive, tunes("Largest global batch, in samples.", _E)] = 2000
    micro_batch_sizes: Annotated[tuple[Positive, ...], tunes("Micro batches to choose from, in samples.", _E)] = (
        2,
        4,
        6,
    )
    min_gpus: Annotated[Positive, tunes("Fewest ranks of the search for a batch.", _E)] = 1
    max_gpus: Annotated[Positive, tunes("Most ranks of the search for a batch.", _E)] = 10000
    min_time: Annotated[
        NonNeg, tunes("Least minutes of a round before hosts are taken in, in an elastic launch.", _E)
    ] = 0
    prefer_larger_batch: Annotated[bool, tunes("Of equally good batches, take the larger one.", _E)] = True
    ignore_non_elastic_batch_info: Annotated[
        bool, tunes("Ignore the three keys of the batch, which are otherwise refused beside this section.", _E)
    ] = False
    version: Annotated[
        float,
        tunes(
            "Rules of the choice: 0.1 counts ranks; 0.2 counts whole hosts, and gives other worlds another batch.",
            _E,
        ),
    ] = 0.2
    model_parallel_size: Annotated[Positive, tunes("Ranks of one model copy, at version 0.2.", _E)] = 1
    num_gpus_per_node: Annotated[Positive, tunes("Devices of one host, at version 0.2.", _E)] = 1


class ModelInfo(Section, kw_only=True):
    """The tuner's knowledge of the model."""

    profile: Annotated[bool, inherent("Find these by profiling.", _FOUND)] = False
    num_params: Annotated[Positive | None, inherent("Parameters.", _FOUND, floor=True)] = None
    hidden_size: Annotated[Positive | None, inherent("Hidden size.", _FOUND)] = None
    num_layers: Annotated[Positive | None, inherent("Layers.", _FOUND)] = None


class Autotuning(Section, kw_only=True):
    """Search for the fastest settings."""

    enabled: Annotated[bool, asks("Switch of the section.", _A)] = False
    start_profile_step: Annotated[NonNeg, tunes("First step that is timed, from 0.", _A)] = 3
    end_profile_step: Annotated[
        NonNeg, tunes("Last step that is timed; the run of an experiment ends after it.", _A)
    ] = 5
    results_dir: Annotated[str, tunes("Directory of the results.", _A)] = "autotuning_results"
    exps_dir: Annotated[str, tunes("Directory of the experiments.", _A)] = "autotuning_exps"
    overwrite: Annotated[bool, tunes("Begin anew after a finished search, and remove its experiments.", _A)] = True
    metric: Annotated[
        Literal["throughput", "latency", "flops", "forward", "step"],
        tunes("What is tuned: samples/s, s a step, FLOP/s a rank, s of forwards or of steps.", _A),
    ] = "throughput"
    metric_path: Annotated[str | None, tunes("File that an experiment writes its times to.", _A)] = None
    fast: Annotated[
        bool,
        tunes(
            "Tune the micro batch and the keys that are lists; otherwise also stage, offload, buckets, recomputation.",
            _A,
        ),
    ] = True
    max_train_batch_size: Annotated[
        Positive | None, tunes("Largest global batch, which accumulation steps fill.", _A)
    ] = None
    min_train_batch_size: Annotated[Positive, tunes("Smallest global batch.", _A)] = 1
    max_train_micro_batch_size_per_gpu: Annotated[Positive, tunes("Largest micro batch.", _A)] = 1024
    min_train_micro_batch_size_per_gpu: Annotated[Positive, tunes("Smallest micro batch.", _A)] = 1
    num_tuning_micro_batch_sizes: Annotated[
        Positive, tunes("Micro batches that are tried, of the powers of two that fit.", _A)
    ] = 3
    tuner_type: Annotated[
        Literal["gridsearch", "random", "model_based"],
        tunes("Kind of search; model_based needs the extra [tuning].", _A),
    ] = "gridsearch"
    tuner_early_stopping: Annotated[NonNeg, tunes("Experiments without gain before it stops; 0: it does not.", _A)] = 5
    tuner_num_trials: Annotated[Positive, tunes("Most experiments.", _A)] = 50
    max_minutes_without_step: Annotated[
        Positive, tunes("Minutes without an optimizer step after which an experiment is ended.", _A)
    ] = 30
    mp_size: Annotated[Positive, tunes("Ranks of one model copy.", _A)] = 1
    model_info: Annotated[ModelInfo | None, inherent("What is known of the model.", _FOUND)] = None
    model_info_path: Annotated[str | None, inherent("File of the model info.", _FOUND)] = None
    arg_mappings: Annotated[FrozenDict | None, tunes("Configuration keys to command-line names.", _A)] = None
