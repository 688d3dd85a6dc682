"""Section optimizer: the optimizers that can be named, and the parameters that each takes."""

from typing import Annotated, ClassVar, Literal, NamedTuple

import msgspec

from .keys import FrozenDict, NonNeg, NonNegFloat, Positive, PositiveFloat, Section, acts, asks, inherent

__all__ = ["FILLED_PARAMS", "OPTIMIZERS", "Kind", "OptimizerSection", "find_torch_optimizer"]

FILLED_PARAMS = ("lr", "betas", "eps", "weight_decay")
"""Parameters whose "auto" the Trainer and accelerate replace, for any type of optimizer."""

Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Betas = tuple[Beta, Beta]

_LR = acts("Learning rate.", auto="fill")
_DECAY = acts("Weight decay.", auto="fill")
_EPS = acts("Added to the denominator.", auto="fill")
_BETAS = acts("Factors of the moving averages.", auto="fill")
_STATES = acts(
    "Format of the optimizer's states; null: fp32, or what bf16.bf16_optimizer_states says. int8: 8 bits with a scale for"
    " each 256, a quarter of the bytes; for Adam, AdamW, Lion and SGD, where the states live on the host."
)

StateDType = Literal["fp32", "bf16", "int8"]


class AdamParams(Section, kw_only=True):
    """Adam and AdamW."""

    lr: Annotated[NonNegFloat, _LR] = 1e-3
    betas: Annotated[Betas, _BETAS] = (0.9, 0.999)
    eps: Annotated[NonNegFloat, _EPS] = 1e-8
    weight_decay: Annotated[NonNegFloat, _DECAY] = 0.0
    bias_correction: Annotated[bool, acts("Correct the moments' bias towards zero.")] = True
    adam_w_mode: Annotated[bool, acts("Decoupled decay (type Adam; AdamW always has it).")] = True
    torch_adam: Annotated[bool, acts("Use torch's optimizer in place of the fused one.")] = False
    amsgrad: Annotated[bool, acts("The AMSGrad variant; only with torch_adam.")] = False
    state_dtype: Annotated[StateDType | None, _STATES] = None
    set_grad_none: Annotated[bool, inherent("Drop gradients in zero_grad.", "gradients are always dropped")] = True
    fp32_optimizer_states: Annotated[bool, asks("Keep moments in fp32.", "optimizer_states_by_params")] = True
    foreach: Annotated[bool | None, acts("torch's foreach form; only with torch_adam.")] = None


class LambParams(Section, kw_only=True):
    """LAMB."""

    lr: Annotated[NonNegFloat, _LR] = 1e-3
    betas: Annotated[Betas, _BETAS] = (0.9, 0.999)
    eps: Annotated[NonNegFloat, _EPS] = 1e-8
    weight_decay: Annotated[NonNegFloat, _DECAY] = 0.0
    bias_correction: Annotated[bool, acts("Correct the moments' bias towards zero.")] = True
    max_coeff: Annotated[PositiveFloat, acts("Upper bound of the trust ratio.")] = 10.0
    min_coeff: Annotated[NonNegFloat, acts("Lower bound of the trust ratio.")] = 0.01
    state_dtype: Annotated[StateDType | None, _STATES] = None
    eps_inside_sqrt: Annotated[bool, asks("Add eps under the root.", "lamb_variants")] = False
    amsgrad: Annotated[bool, asks("The AMSGrad variant.", "lamb_variants")] = False


class LionParams(Section, kw_only=True):
    """Lion."""

    lr: Annotated[NonNegFloat, _LR] = 1e-3
    betas: Annotated[Betas, _BETAS] = (0.9, 0.999)
    weight_decay: Annotated[NonNegFloat, _DECAY] = 0.0
    state_dtype: Annotated[StateDType | None, _STATES] = None
    set_grad_none: Annotated[bool, inherent("Drop gradients in zero_grad.", "gradients are always dropped")] = True


class AdagradParams(Section, kw_only=True):
    """Adagrad, as torch.optim.Adagrad."""

    lr: Annotated[NonNegFloat, _LR] = 1e-2
    lr_decay: Annotated[NonNegFloat, asks("Decay of the learning rate per step.", "adagrad_variants")] = 0.0
    weight_decay: Annotated[NonNegFloat, _DECAY] = 0.0
    state_dtype: Annotated[StateDType | None, _STATES] = None
    initial_accumulator_value: Annotated[NonNegFloat, asks("First value of the sums.", "adagrad_variants")] = 0.0
    eps: Annotated[NonNegFloat, _EPS] = 1e-10
    maximize: Annotated[bool, asks("Turn the gradient's sign.", "adagrad_variants")] = False
    foreach: Annotated[bool | None, inherent("torch's foreach form.", "the fused loop does the same")] = None
    fused: Annotated[bool | None, inherent("torch's fused form.", "the loop is always fused")] = None


class SgdParams(Section, kw_only=True):
    """SGD with momentum, as torch.optim.SGD."""

    lr: Annotated[NonNegFloat, _LR] = 1e-3
    momentum: Annotated[NonNegFloat, acts("Factor of the moving sum; 0 for none.")] = 0.0
    dampening: Annotated[float, acts("Part of the gradient kept out of the momentum.")] = 0.0
    weight_decay: Annotated[NonNegFloat, _DECAY] = 0.0
    nesterov: Annotated[bool, acts("Nesterov momentum.")] = False
    maximize: Annotated[bool, acts("Turn the gradient's sign.")] = False
    state_dtype: Annotated[StateDType | None, _STATES] = None
    foreach: Annotated[bool | None, inherent("torch's foreach form.", "the fused loop does the same")] = None
    fused: Annotated[bool | None, inherent("torch's fused form.", "the loop is always fused")] = None


class MuonParams(Section, kw_only=True):
    """Muon for matrices (parameters with use_muon), Adam for the rest."""

    lr: Annotated[NonNegFloat, _LR] = 1e-3
    muon_lr: Annotated[NonNegFloat | None, acts("Learning rate of the matrices; null: lr.")] = None
    adam_lr: Annotated[NonNegFloat | None, acts("Learning rate of the rest; null: lr.")] = None
    momentum: Annotated[Beta, acts("Momentum of the matrices.")] = 0.95
    betas: Annotated[Betas, acts("Adam's factors, for the rest.", auto="fill")] = (0.9, 0.999)
    eps: Annotated[NonNegFloat, acts("Adam's denominator, for the rest.", auto="fill")] = 1e-8
    weight_decay: Annotated[NonNegFloat, _DECAY] = 0.0
    state_dtype: Annotated[StateDType | None, _STATES] = None
    ns_method: Annotated[
        Literal["gram", "standard"],
        inherent("Newton-Schulz flavour.", "both compute the same polynomial of the matrix"),
    ] = "gram"
    adam_w_mode: Annotated[bool, asks("Decoupled decay for the rest.", "muon_variants")] = True
    torch_adam: Annotated[bool, asks("Use torch's optimizer for the rest.", "muon_variants")] = False
    fp32_optimizer_states: Annotated[bool, asks("Keep moments in fp32.", "optimizer_states_by_params")] = True


class _OneBitParams(Section, kw_only=True):
    """Parameters of all optimizers with compressed communication."""

    lr: Annotated[NonNegFloat, _LR] = 1e-3
    betas: Annotated[Betas, _BETAS] = (0.9, 0.999)
    eps: Annotated[NonNegFloat, _EPS] = 1e-8
    weight_decay: Annotated[NonNegFloat, _DECAY] = 0.0
    bias_correction: Annotated[bool, acts("Correct the moments' bias towards zero.")] = True
    eps_inside_sqrt: Annotated[bool, acts("Add eps under the root.")] = False
    amsgrad: Annotated[bool, acts("The AMSGrad variant.")] = False
    cuda_aware: Annotated[bool, acts("The MPI library takes device pointers.")] = False
    comm_backend_name: Annotated[str, acts("Backend of the compressed all-reduce.")] = "nccl"


class OneBitAdamParams(_OneBitParams, kw_only=True):
    """1-bit Adam."""

    freeze_step: Annotated[NonNeg, acts("Steps before compression starts.")] = 100_000


class ZeroOneAdamParams(_OneBitParams, kw_only=True):
    """0/1 Adam."""

    var_freeze_step: Annotated[NonNeg, acts("Last step that updates the variance.")] = 100_000
    var_update_scaler: Annotated[Positive, acts("Steps between updates of the variance.")] = 16
    local_step_scaler: Annotated[Positive, acts("Growth of the interval of local steps.")] = 32678
    local_step_clipper: Annotated[Positive, acts("Longest interval of local steps.")] = 16


class OneBitLambParams(_OneBitParams, kw_only=True):
    """1-bit LAMB."""

    freeze_step: Annotated[NonNeg, acts("Steps before compression starts.")] = 100_000
    max_coeff: Annotated[PositiveFloat, acts("Upper bound of the trust ratio.")] = 10.0
    min_coeff: Annotated[NonNegFloat, acts("Lower bound of the trust ratio.")] = 0.01
    coeff_beta: Annotated[Beta, acts("Factor of the ratio's moving average.")] = 0.9
    factor_max: Annotated[PositiveFloat, acts("Upper bound of the scaling factor.")] = 4.0
    factor_min: Annotated[NonNegFloat, acts("Lower bound of the scaling factor.")] = 0.5
    factor_threshold: Annotated[NonNegFloat, acts("Largest change per step.")] = 0.1


class Kind(NamedTuple):
    """One value that ``type`` can have."""

    name: str
    """The spelling that ``config`` reports; any case is read."""
    params: type[Section] | None = None
    """The struct of its parameters; None passes any parameters on to torch's class."""
    feature: str | None = None
    """The feature that this value needs."""


# The classes of torch.optim, by name, so that a file can be checked without torch. A class that is missing here,
# because a later torch added it, is looked up in torch: see find_torch_optimizer.
_TORCH = ("ASGD", "Adadelta", "Adafactor", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam")

OPTIMIZERS: dict[str, Kind] = {
    kind.name.lower(): kind
    for kind in (
        Kind("Adam", AdamParams),
        Kind("AdamW", AdamParams),
        Kind("Lamb", LambParams),
        Kind("Lion", LionParams),
        Kind("Adagrad", AdagradParams),
        Kind("SGD", SgdParams),
        Kind("Muon", MuonParams),
        Kind("OneBitAdam", OneBitAdamParams, "onebit"),
        Kind("ZeroOneAdam", ZeroOneAdamParams, "onebit"),
        Kind("OneBitLamb", OneBitLambParams, "onebit"),
        Kind("MuAdam", None, "mup"),
        Kind("MuAdamW", None, "mup"),
        Kind("MuSGD", None, "mup"),
        Kind("LBFGS", None, "closure_optimizer"),
        *(Kind(name) for name in _TORCH),
    )
}


class OptimizerSection(Section, kw_only=True):
    """The optimizer that the engine builds when the client passes none."""

    kinds: ClassVar[dict[str, Kind]] = OPTIMIZERS

    type: Annotated[str, acts("The optimizer: a name of the table below, or of torch.optim, in any case.")]
    params: Annotated[
        FrozenDict, acts("What is passed to its constructor: what was written and acts; defaults are its own.")
    ] = FrozenDict()
    legacy_fusion: Annotated[bool, inherent("Use the old fused fp16 path.", "there is one path")] = False


def find_torch_optimizer(name: str) -> Kind | None:
    """The kind for a class of torch.optim that is not in the table; None if torch has no such class or is not
    installed.

    This imports torch. It is therefore only called for a name that would be an error without it.
    """
    try:
        import torch.optim
    except ImportError:
        return None
    for known in dir(torch.optim):
        candidate = getattr(torch.optim, known)
        if known.lower() == name.lower() and known != "Optimizer" and isinstance(candidate, type):
            return Kind(known) if issubclass(candidate, torch.optim.Optimizer) else None
    return None
