"""Makes the base optimizer that the configuration or the caller asks for, over the parameters that are to be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from deepspeed_c.config import Config
from deepspeed_c.errors import ConfigError, ModelError, OptimizerError
from deepspeed_c.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed_c.ops.adam import FusedAdam
from deepspeed_c.ops.lamb import FusedLamb
from deepspeed_c.ops.lion import FusedLion
from deepspeed_c.ops.muon import Muon
from deepspeed_c.ops.sgd import FusedSGD

__all__ = ["build_optimizer", "muon_groups", "trainable_groups"]

Groups = list[dict[str, Any]]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


def trainable_groups(model: torch.nn.Module, model_parameters: Any) -> Groups:
    """Normalises what the caller passed as ``model_parameters`` (None, parameters, groups) to groups without frozen parameters."""
    if model_parameters is None:
        given: list[Any] = list(model.parameters())
    elif isinstance(model_parameters, torch.nn.Module):
        given = list(model_parameters.parameters())
    else:
        given = list(model_parameters)
    if given and not isinstance(given[0], Mapping):
        given = [{"params": [p[1] if isinstance(p, tuple) else p for p in given]}]
    groups: Groups = []
    for group in given:
        params = group["params"]
        params = [params] if torch.is_tensor(params) else list(params)
        groups.append({**group, "params": [p for p in params if p.requires_grad]})
    if not any(group["params"] for group in groups):
        raise ModelError(
            "no parameter to train: all are frozen, or model_parameters is empty",
            where="initialize",
            fix="set requires_grad on what is to be trained; for evaluation pass neither optimizer nor optimizer configuration",
        )
    return groups


def muon_groups(model: torch.nn.Module, groups: Groups, params: Mapping[str, Any]) -> Groups:
    """Splits groups into matrices (Muon) and the rest (AdamW).

    As DeepSpeed: matrices are parameters of at least two dimensions whose name holds neither "embed" nor "lm_head"; a ``use_muon``
    attribute that the caller set on a parameter decides otherwise.
    """
    names = {id(p): name for name, p in model.named_parameters()}

    def wants_muon(p: torch.nn.Parameter) -> bool:
        name = names.get(id(p), "").lower()
        return getattr(p, "use_muon", p.dim() >= 2 and "embed" not in name and "lm_head" not in name)

    lr = params.get("lr")
    split: Groups = []
    for group in groups:
        for use_muon, key in ((True, "muon_lr"), (False, "adam_lr")):
            members = [p for p in group["params"] if wants_muon(p) == use_muon]
            if not members:
                continue
            new = {**group, "params": members, "use_muon": use_muon}
            chosen = params.get(key, lr)
            if chosen is not None:
                new.setdefault("lr", chosen)
            split.append(new)
    return split


def _adam(groups: Groups, params: dict[str, Any]) -> torch.optim.Optimizer:
    adam_w_mode = params.pop("adam_w_mode", True)
    if params.pop("torch_adam", False):
        return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(groups, **params)
    return FusedAdam(groups, adam_w_mode=adam_w_mode, **params)


def _adamw(groups: Groups, params: dict[str, Any]) -> torch.optim.Optimizer:
    return _adam(groups, {**params, "adam_w_mode": True})


OURS: dict[str, Callable[[Groups, dict[str, Any]], torch.optim.Optimizer]] = {
    "adam": _adam,
    "adamw": _adamw,
    "lamb": lambda groups, params: FusedLamb(groups, **params),
    "lion": lambda groups, params: FusedLion(groups, **params),
    "adagrad": lambda groups, params: DeepSpeedCPUAdagrad(groups, **params),
    "sgd": lambda groups, params: FusedSGD(groups, **params),
    "muon": lambda groups, params: Muon(groups, **params),
}


# What optimizer.params.state_dtype can be; int8 means codes of 8 bits with a scale for each block.
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def _take_state_dtype(config: Config, params: dict[str, Any]) -> torch.dtype | None:
    """Takes the states' format out of ``params``: None where neither they nor the bf16 section say one."""
    name = params.pop("state_dtype", None)
    if name is not None:
        if name not in STATE_DTYPES:
            raise ConfigError(
                f"is {name!r}", where="optimizer.params.state_dtype", fix=f"use one of {', '.join(STATE_DTYPES)}"
            )
        return STATE_DTYPES[name]
    if config.bf16.bf16_master_weights_and_grads:  # masters are bf16, and states would be as they are
        return torch.bfloat16 if config.bf16.bf16_optimizer_states else torch.float32
    return None


def _from_config(config: Config, model: torch.nn.Module, groups: Groups) -> torch.optim.Optimizer:
    kind = config.optimizer.type
    params = dict(config.optimizer.params)
    if "max_grad_norm" in params:
        raise ConfigError(
            "clipping is not the optimizer's business here",
            where="optimizer.params.max_grad_norm",
            fix='set "gradient_clipping" at the top level',
        )
    make = OURS.get(kind.lower())
    try:
        if make is None:
            return getattr(torch.optim, kind)(groups, **params)
        state_dtype = _take_state_dtype(config, params)
        if kind.lower() == "muon":
            groups = muon_groups(model, groups, params)
            params = {k: v for k, v in params.items() if k not in ("muon_lr", "adam_lr")}
        if state_dtype is not None and not params.get("torch_adam", False):
            params["state_dtype"] = state_dtype
        return make(groups, params)
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error), where=f"optimizer.params ({kind})", fix="see docs/config.md") from error


def build_optimizer(
    config: Config,
    model: torch.nn.Module,
    client: torch.optim.Optimizer | OptimizerFactory | None,
    model_parameters: Iterable[Any] | None,
) -> torch.optim.Optimizer | None:
    """The base optimizer: the caller's object, what the caller's factory makes, or what the configuration names; None for none of these."""
    if isinstance(client, torch.optim.Optimizer):
        optimizer = client
    elif callable(client):
        optimizer = client([p for g in trainable_groups(model, model_parameters) for p in g["params"]])
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
    elif config.optimizer is not None:
        optimizer = _from_config(config, model, trainable_groups(model, model_parameters))
    else:
        return None
    _drop_frozen_and_check(optimizer, model)
    return optimizer


def _drop_frozen_and_check(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    known = {id(p) for p in model.parameters()}
    n_trained = 0
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            if id(p) not in known:
                raise OptimizerError(
                    f"parameter {j} of group {i} (shape {tuple(p.shape)}) does not belong to the model",
                    where="initialize(optimizer=...)",
                    fix="make the optimizer from the parameters of the model that is passed, after any replacement of its modules",
                )
        group["params"] = [p for p in group["params"] if p.requires_grad]
        n_trained += len(group["params"])
    if n_trained == 0:
        raise ModelError(
            "the optimizer has no parameter to train: all of its parameters are frozen",
            where="initialize",
            fix="set requires_grad on what is to be trained",
        )
