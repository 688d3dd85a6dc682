"""Makes the base optimizer that the configuration or the caller asks for, over the trained parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from deepspeed_c.config.optim import OptimizerSection
from deepspeed_c.config.precision import Bf16
from deepspeed_c.errors import ConfigError, ModelError, OptimizerError
from deepspeed_c.logging import logger
from deepspeed_c.ops.optim import BY_TYPE

__all__ = ["build_optimizer", "trainable_groups"]

Groups = list[dict[str, Any]]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


def trainable_groups(model: torch.nn.Module, model_parameters: Any, *, may_be_empty: bool = False) -> Groups:
    """Normalises the caller's ``model_parameters`` (None, parameters, groups) to groups without frozen parameters.

    Raises ModelError if all parameters are frozen, unless ``may_be_empty``.
    """
    if model_parameters is None:
        given: list[Any] = list(model.parameters())
    elif isinstance(model_parameters, torch.nn.Module):
        given = list(model_parameters.parameters())
    else:
        given = list(model_parameters)
    if not given or not isinstance(given[0], Mapping):
        given = [{"params": [p[1] if isinstance(p, tuple) else p for p in given]}]
    groups: Groups = []
    for group in given:
        params = group["params"]
        params = [params] if torch.is_tensor(params) else list(params)
        groups.append({**group, "params": [p for p in params if p.requires_grad]})
    if not may_be_empty and not any(group["params"] for group in groups):
        raise ModelError(
            "no parameter to train: all are frozen, or model_parameters is empty",
            where="initialize",
            fix="set requires_grad on what is to be trained; for evaluation pass neither optimizer nor optimizer configuration",
        )
    return groups


# Values of optimizer.params.state_dtype; int8 means codes of 8 bits with a scale for each block.
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def _take_state_dtype(bf16: Bf16, params: dict[str, Any]) -> torch.dtype | None:
    """Removes the states' format from ``params`` and returns it; None if neither ``params`` nor ``bf16`` names one."""
    name = params.pop("state_dtype", None)
    if name is not None:
        if name not in STATE_DTYPES:
            raise ConfigError(
                f"is {name!r}", where="optimizer.params.state_dtype", fix=f"use one of {', '.join(STATE_DTYPES)}"
            )
        return STATE_DTYPES[name]
    if bf16.bf16_master_weights_and_grads:  # masters are bf16, and states would be bf16 by default
        return torch.bfloat16 if bf16.bf16_optimizer_states else torch.float32
    return None


def _from_config(
    section: OptimizerSection, bf16: Bf16, model: torch.nn.Module, groups: Groups
) -> torch.optim.Optimizer:
    kind, params = section.type, dict(section.params)
    if "max_grad_norm" in params:
        raise ConfigError(
            "clipping is not the optimizer's business here",
            where="optimizer.params.max_grad_norm",
            fix='set "gradient_clipping" at the top level',
        )
    try:
        if kind.lower() not in BY_TYPE:
            return getattr(torch.optim, kind)(groups, **params)
        state_dtype = _take_state_dtype(bf16, params)
        if state_dtype is not None:
            params["state_dtype"] = state_dtype
        names = {id(p): name for name, p in model.named_parameters()}
        return BY_TYPE[kind.lower()].from_config(kind.lower(), groups, params, names)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), where=f"optimizer.params ({kind})", fix="see docs/config.md") from error


def build_optimizer(
    section: OptimizerSection | None,
    bf16: Bf16,
    model: torch.nn.Module,
    client: torch.optim.Optimizer | OptimizerFactory | None,
    model_parameters: Iterable[Any] | None,
    *,
    may_be_empty: bool = False,
) -> torch.optim.Optimizer | None:
    """The base optimizer: the caller's object, the result of the caller's factory, or the optimizer that ``section``
    names. None if there is none of these. may_be_empty: accept a model whose parameters are all frozen, because other
    ranks have parameters to train."""
    if isinstance(client, torch.optim.Optimizer):
        optimizer = client
        if model_parameters is not None:
            _warn_of_other_groups(optimizer, trainable_groups(model, model_parameters, may_be_empty=True))
    elif callable(client):
        given = trainable_groups(model, model_parameters, may_be_empty=may_be_empty)
        # Optimizers of torch refuse an empty list, but not an empty group.
        is_list = len(given) == 1 and given[0].keys() == {"params"} and given[0]["params"]
        optimizer = client(given[0]["params"] if is_list else given)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(
                f"the optimizer factory returned {type(optimizer).__name__}",
                where="initialize(optimizer=...)",
                fix="return a torch.optim.Optimizer",
            )
    elif client is not None:
        raise OptimizerError(
            f"{type(client).__name__} is neither a torch.optim.Optimizer nor a function that makes one",
            where="initialize(optimizer=...)",
            fix="pass a torch optimizer, a factory, or an optimizer section in the configuration",
        )
    elif section is not None:
        groups = trainable_groups(model, model_parameters, may_be_empty=may_be_empty)
        optimizer = _from_config(section, bf16, model, groups)
    else:
        return None
    _drop_frozen_and_check(optimizer, model, may_be_empty=may_be_empty)
    return optimizer


def _warn_of_other_groups(optimizer: torch.optim.Optimizer, given: Groups) -> None:
    """Says what ``model_parameters`` asks for and a caller's optimizer does not do: the optimizer's groups act."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    n_missing = sum(id(p) not in group_of for group in given for p in group["params"])
    if n_missing:
        logger.warning(
            f"{n_missing} parameters of initialize(model_parameters=...) are not in the optimizer of"
            " initialize(optimizer=...), and are not trained: give that optimizer all parameters"
        )
    for i, group in enumerate(given):
        acting_groups = [group_of[id(p)] for p in group["params"] if id(p) in group_of]
        for name, value in group.items():
            if name == "params":
                continue
            acting = [each.get(name) for each in acting_groups]
            others = [each for each in acting if each is not None and each != value]
            if others:
                logger.warning(
                    f"group {i} of initialize(model_parameters=...) has {name} = {value}, but {others[0]} acts, which is"
                    f" that of initialize(optimizer=...): make the optimizer from these groups"
                )


def _drop_frozen_and_check(optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, may_be_empty: bool) -> None:
    known = {id(p) for p in model.parameters()}
    n_trained = 0
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            # A frozen weight that is a wrapper tensor has been replaced (zero/weights/wrappers.py).
            if p.requires_grad and id(p) not in known:
                raise OptimizerError(
                    f"parameter {j} of group {i} (shape {tuple(p.shape)}) does not belong to the model",
                    where="initialize(optimizer=...)",
                    fix="make the optimizer from the parameters of the model that is passed, after any replacement of its modules",
                )
        group["params"] = [p for p in group["params"] if p.requires_grad]
        n_trained += len(group["params"])
    if n_trained == 0 and not may_be_empty:
        raise ModelError(
            "the optimizer has no parameter to train: all of its parameters are frozen",
            where="initialize",
            fix="set requires_grad on what is to be trained",
        )
