"""Gates: the choice of experts for each token, their weights, and the losses that spread tokens over the experts.

The gate's product and everything behind it is float32, whatever the dtype of the model and under autocast. The choice
itself (``ops.moe.route``, ``ops.moe.place``) is integers; gradients come through the softmax alone.

[Note: draws] Noise and random selection come from ``ops.moe.uniform``, whose numbers depend on a seed and a position
only. Each forward that draws takes one seed from torch's default generator of the CPU. So the generator's state is the
one counter: activation checkpointing restores it for a recomputation, a checkpoint restores it at resumption, and the
numbers are the same on any device. Ranks with other tokens draw from other positions (``TopKGate.data_rank``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_c.comm.comm import all_reduce
from deepspeed_c.comm.groups import get_rank, get_world_size, is_initialized
from deepspeed_c.errors import ConfigError, ModelError, RoutingError
from deepspeed_c.logging import warning_once
from deepspeed_c.ops import moe as ops

__all__ = [
    "Draws",
    "RouterLinear",
    "Routes",
    "TopKGate",
    "gumbel_rsample",
    "top1gating",
    "top2gating",
    "topkgating",
]

NOISE_POLICIES = (None, "None", "Jitter", "RSample")
_JITTER = 1e-2
_MAX_SEED = 2**63 - 1
# Positions of the generator, for each of the numbers that one forward draws.
_STREAM = 1 << 60
_OF_JITTER, _OF_NOISE, _OF_SELECTION = range(3)


class Routes(NamedTuple):
    """The way of each token to its experts, in DeepSpeed's order of results."""

    l_aux: Tensor  # the loss that spreads tokens over experts, a scalar
    capacity: Tensor  # places of each expert, an integer
    num_experts: int
    indices: Tensor  # int32 [k, tokens]; -1: dropped, or not a used token
    locations: Tensor  # int32 [k, tokens]: place within the expert; 0 where dropped
    gates: Tensor  # float32 [k, tokens]: weights; 0 where dropped
    exp_counts: Tensor  # int64 [experts]: choices before any was dropped


class Draws:
    """The random numbers of one forward. See [Note: draws].

    data_rank: place among the ranks that have other tokens.
    """

    def __init__(self, data_rank: int = 0) -> None:
        self._data_rank, self._seed = data_rank, -1

    def uniform(self, stream: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return numbers in [0, 1)."""
        if self._seed < 0:
            self._seed = int(torch.randint(_MAX_SEED, (), device="cpu"))
        offset = stream * _STREAM + self._data_rank * math.prod(shape)
        return ops.uniform(shape, self._seed, offset, device)

    def gumbel(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return noise after which the largest logit has the probability of its softmax."""
        drawn = self.uniform(_OF_NOISE, shape, device)
        return -torch.log(-torch.log(drawn.clamp_min(torch.finfo(torch.float32).tiny)))

    def jitter(self, x: Tensor) -> Tensor:
        """Return ``x``, each element times a number within 1 +- 1e-2 (Switch Transformer, arXiv 2101.03961)."""
        return x * (1.0 - _JITTER + 2.0 * _JITTER * self.uniform(_OF_JITTER, tuple(x.shape), x.device))


def gumbel_rsample(shape: Sequence[int], device: torch.device) -> Tensor:
    """Gumbel noise of ``shape`` in float32, from a seed of torch's default generator."""
    return Draws().gumbel(tuple(shape), device)


class _Choice(NamedTuple):
    """Experts of each token, and how they take the tokens."""

    chosen: Tensor  # int32 [tokens, k], -1 for unused tokens
    order: str  # of ``ops.moe.place``
    priority: Tensor | None
    n_in_loss: int  # the loss is about the first choices, this many
    is_normalised: bool  # whether the weights of a token add up to 1

    @property
    def k(self) -> int:
        return self.chosen.shape[1]


class _Routing:
    """The tokens of one forward, with their checked probabilities."""

    def __init__(self, logits: Tensor, used_token: Tensor | None, draws: Draws | None, where: str) -> None:
        self.logits, self.where = logits, where
        self.gates = _probabilities(logits, where)
        self.used = _used(used_token, logits, where)
        self._draws = Draws() if draws is None else draws

    def _best(self, logits: Tensor, k: int) -> Tensor:
        return self._of_used(ops.route(logits.detach(), k))

    def _of_used(self, chosen: Tensor) -> Tensor:
        return chosen if self.used is None else torch.where(self.used.unsqueeze(1), chosen, -1)

    def _noisy(self) -> Tensor:
        return self.logits.detach() + self._draws.gumbel(tuple(self.logits.shape), self.logits.device)

    def top1(self, indices: Tensor | None, *, is_noisy: bool, is_random: bool) -> _Choice:
        """is_random: full experts keep a random choice of their tokens."""
        _check_k(1, self.logits.shape[1], self.where)
        chosen = (
            self._best(self._noisy() if is_noisy else self.logits, 1) if indices is None else self._given(indices, 1)
        )
        if not is_random:
            return _Choice(chosen, "choice", None, 1, False)
        priority = self._draws.uniform(_OF_SELECTION, tuple(chosen.shape), chosen.device)
        return _Choice(chosen, "priority", priority, 1, False)

    def top2(self, indices: Tensor | None, *, is_sampled: bool) -> _Choice:
        """is_sampled: the second expert is drawn."""
        _check_k(2, self.logits.shape[1], self.where)
        if indices is not None:
            chosen = self._given(indices, 2)
        elif is_sampled:
            first = ops.route(self.logits.detach(), 1)
            others = self._noisy().scatter(1, first.long(), float("-inf"))
            chosen = self._of_used(torch.cat((first, ops.route(others, 1)), 1))
        else:
            chosen = self._best(self.logits, 2)
        return _Choice(chosen, "choice", None, 1, True)

    def topk(self, k: int, indices: Tensor | None, drop_policy: str) -> _Choice:
        _check_k(k, self.logits.shape[1], self.where)
        _check_drop_policy(drop_policy, self.where)
        chosen = self._best(self.logits, k) if indices is None else self._given(indices, k)
        if drop_policy == "position":
            return _Choice(chosen, "token", None, k, True)
        return _Choice(chosen, "priority", _taken(self.gates.detach(), chosen), k, True)

    def _given(self, indices: Tensor, k: int) -> Tensor:
        """The experts that come from outside, checked."""
        n_tokens, n_experts = self.logits.shape
        fix = "give integers [tokens, k]: an expert at most once for each token, -1 where there is none"
        if tuple(indices.shape) != (n_tokens, k) or indices.dtype.is_floating_point or indices.dtype == torch.bool:
            raise ModelError(
                f"indices are {indices.dtype} {tuple(indices.shape)}, where {(n_tokens, k)} experts are needed",
                where=self.where,
                fix=fix,
            )
        # int64 first: a large number must not become an expert by wrapping around.
        chosen = indices.to(self.logits.device, torch.int64)
        wrong = (chosen < -1) | (chosen >= n_experts)
        if k > 1:
            in_order = chosen.sort(1).values
            twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)
            wrong = wrong | twice.any(1, keepdim=True)
        if wrong.any():
            token = int(wrong.any(1).nonzero()[0])
            raise ModelError(
                f"indices of token {token} are {chosen[token].tolist()}, and there are {n_experts} experts",
                where=self.where,
                fix=fix,
            )
        return self._of_used(chosen.to(torch.int32))

    def _l_aux(self, choice: _Choice) -> Tensor:
        """experts / choices * sum over experts of (mean probability * share of tokens that chose it), over used tokens
        (Switch Transformer, equation 4; GShard, algorithm 1).
        """
        n_experts = self.gates.shape[1]
        if self.used is None:
            n_used: Tensor | int = max(self.gates.shape[0], 1)
            total = self.gates.sum(0)
        else:
            n_used = self.used.sum().clamp_min(1)
            total = torch.where(self.used.unsqueeze(1), self.gates, 0.0).sum(0)
        counted = choice.chosen[:, : choice.n_in_loss].reshape(-1).long() + 1
        counts = torch.bincount(counted, minlength=n_experts + 1)[1:].to(self.gates.dtype)
        return (total / n_used * (counts / n_used)).sum() * (n_experts / choice.n_in_loss)

    def results(
        self,
        choice: _Choice,
        capacity_factor: float,
        min_capacity: int,
        ep_group: dist.ProcessGroup | None,
        *,
        drops: bool,
        is_sparse: bool,
    ) -> Any:
        n_tokens, n_experts = self.logits.shape
        capacity = -1
        if drops:
            capacity = _capacity(n_tokens, n_experts, capacity_factor * choice.k, min_capacity)
        indices, locations, counts = ops.place(
            choice.chosen, n_experts, capacity, order=choice.order, priority=choice.priority
        )
        weights = _taken(self.gates, indices)
        if choice.is_normalised:
            weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).eps)
        if not drops:
            capacity = _largest(counts, ep_group)
        l_aux = self._l_aux(choice)
        if is_sparse:
            ways = (each.t().contiguous() for each in (indices, locations, weights))
            return Routes(l_aux, torch.tensor(capacity), n_experts, *ways, counts)
        # Dropped choices add their weight, which is 0, to place 0 of expert 0.
        places = indices.clamp_min(0).long() * capacity + locations.long()
        combine = weights.new_zeros((n_tokens, max(n_experts * capacity, 1))).scatter_add(1, places, weights)
        combine = combine[:, : n_experts * capacity].view(n_tokens, n_experts, capacity)
        return l_aux, combine, combine.detach() != 0, counts


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: dist.ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
    *,
    indices: Tensor | None = None,
    draws: Draws | None = None,
    where: str = "top1gating",
) -> Any:
    """Choose one expert for each token. The weight is the probability of the expert.

    logits: float32 [tokens, experts], left as they are. used_token: [tokens]; tokens with 0 take no place, and no part
    in counts and losses. use_rts: full experts keep a random choice of their tokens, instead of the first ones.
    ep_group: ranks whose capacity agrees where nothing is dropped. indices: int [tokens, 1], experts to use instead of
    a choice. ``use_tutel`` changes nothing: rows are moved without padding in any case.

    Returns (l_aux, combine_weights [tokens, experts, capacity], dispatch_mask, exp_counts), or ``Routes``. An expert
    has ``min_capacity`` places or more, also where there are fewer tokens.

    Raises RoutingError for logits that are NaN or inf, and ModelError for ``used_token`` or ``indices`` that do not
    fit.
    """
    routing = _Routing(logits, used_token, draws, where)
    choice = routing.top1(indices, is_noisy=noisy_gate_policy == "RSample", is_random=use_rts and drop_tokens)
    return routing.results(choice, capacity_factor, min_capacity, ep_group, drops=drop_tokens, is_sparse=sparse_routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: dist.ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
    *,
    used_token: Tensor | None = None,
    indices: Tensor | None = None,
    draws: Draws | None = None,
    where: str = "top2gating",
) -> Any:
    """Choose two experts for each token (GShard, arXiv 2006.16668). Experts take first choices before second ones, in
    the order of tokens. The loss is about first choices.

    top2_2nd_expert_sampling: the second expert is drawn with the probabilities of the others. For the other arguments,
    results and errors see ``top1gating``.
    """
    routing = _Routing(logits, used_token, draws, where)
    choice = routing.top2(indices, is_sampled=top2_2nd_expert_sampling)
    return routing.results(choice, capacity_factor, min_capacity, ep_group, drops=drop_tokens, is_sparse=sparse_routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: dist.ProcessGroup | None = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
    *,
    used_token: Tensor | None = None,
    indices: Tensor | None = None,
    where: str = "topkgating",
) -> Any:
    """Choose ``k`` experts for each token.

    drop_policy: a full expert keeps the tokens of highest probability ("probs"), or the first ones ("position"). For
    the other arguments, results and errors see ``top1gating``.
    """
    routing = _Routing(logits, used_token, None, where)
    choice = routing.topk(k, indices, drop_policy)
    return routing.results(choice, capacity_factor, min_capacity, ep_group, drops=drop_tokens, is_sparse=sparse_routes)


def _check_k(k: int, n_experts: int, where: str) -> None:
    if not 1 <= k <= n_experts:
        raise ConfigError(
            f"k is {k}, and there are {n_experts} experts",
            where=where,
            fix="let k be at least 1 and at most the number of experts",
        )


def _check_drop_policy(drop_policy: str, where: str) -> None:
    if drop_policy not in ("probs", "position"):
        raise ConfigError(f"drop_policy is {drop_policy!r}", where=where, fix='use "probs" or "position"')


def _probabilities(logits: Tensor, where: str) -> Tensor:
    gates = torch.softmax(logits, dim=1)
    rows = torch.isnan(gates.detach())
    if rows.any():
        # A logit of -inf shuts an expert out, so only a token without any other logit is wrong.
        token = int(rows.any(1).nonzero()[0])
        row = logits.detach()[token]
        rank = get_rank() if is_initialized() else 0
        expert = int((torch.isnan(row) | (row == float("inf")) | torch.isneginf(row).all()).nonzero()[0])
        raise RoutingError(
            f"the logit of token {token} for expert {expert} is {float(row[expert])} on rank {rank}",
            where=where,
            fix="look for NaN or inf in the layer's input and in the weights of its gate; a lower learning rate or a"
            " z-loss keeps logits small",
        )
    return gates


def _used(used_token: Tensor | None, logits: Tensor, where: str) -> Tensor | None:
    """Which tokens are used, bool [tokens]; None: all."""
    if used_token is None:
        return None
    if used_token.numel() != logits.shape[0]:
        raise ModelError(
            f"used_token has {used_token.numel()} elements for {logits.shape[0]} tokens",
            where=where,
            fix="give one element for each token of the layer's input",
        )
    return (used_token.reshape(-1) != 0).to(logits.device)


def _capacity(n_tokens: int, n_experts: int, factor: float, min_capacity: int) -> int:
    """Places of each expert."""
    # In float32, as in DeepSpeed: 10 tokens times 1.1 give 11 places, and in float64 they would give 12.
    return max(int(torch.ceil(torch.tensor(factor, dtype=torch.float32) * (n_tokens / n_experts))), min_capacity)


def _largest(counts: Tensor, ep_group: dist.ProcessGroup | None) -> int:
    largest = counts.max()
    if ep_group is not None and get_world_size(ep_group) > 1:
        all_reduce(largest, op=dist.ReduceOp.MAX, group=ep_group)
    return int(largest)


def _taken(gates: Tensor, indices: Tensor) -> Tensor:
    """The probabilities of ``indices`` [tokens, k]; 0 where there is no expert."""
    return gates.gather(1, indices.clamp_min(0).long()) * (indices >= 0)


class RouterLinear(nn.Linear):
    """The product of a gate: float32 whatever the dtype of input and weight, under autocast too."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(input.float(), self.weight.float(), bias)


class TopKGate(nn.Module):
    """The gate of one layer: ``k`` experts for each token, by the softmax of a linear map.

    With k = 1 the gate is Switch Transformer's, with k = 2 GShard's. ``wg`` is the linear map.

    Args:
        model_dim: width of a token.
        num_experts: number of experts.
        k: experts of each token.
        capacity_factor: places of an expert in training, in units of an even share of the tokens' choices.
        eval_capacity_factor: the same in evaluation.
        min_capacity: least number of places of an expert.
        noisy_gate_policy: "Jitter" (the input times 1 +- 1e-2) or "RSample" (Gumbel noise on the logits of the choice,
            for k = 1), in training; None or "None": no noise.
        drop_tokens: whether an expert without a free place drops tokens; False: there is place for all.
        use_rts: for k = 1: full experts keep a random choice of their tokens.
        ep_group: ranks over which results of capacity without drops agree.
        top2_2nd_expert_sampling: for k = 2: draw the second expert.
        drop_policy: for k > 2: "probs" or "position" (``topkgating``).

    Raises:
        ConfigError: ``k`` that does not fit ``num_experts``; an unknown policy.
    """

    wg: nn.Linear

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: dist.ProcessGroup | None = None,
        top2_2nd_expert_sampling: bool = True,
        *,
        drop_policy: str = "probs",
    ) -> None:
        super().__init__()
        _check_k(k, num_experts, "TopKGate")
        _check_drop_policy(drop_policy, "TopKGate")
        if noisy_gate_policy not in NOISE_POLICIES:
            raise ConfigError(
                f"noisy_gate_policy is {noisy_gate_policy!r}",
                where="TopKGate",
                fix=f"use one of {', '.join(map(repr, NOISE_POLICIES))}",
            )
        if noisy_gate_policy == "RSample" and k > 1:
            warning_once("noisy_gate_policy 'RSample' adds noise with k = 1 only, as in DeepSpeed")
        self.wg = RouterLinear(model_dim, num_experts, bias=False)
        self.ep_group = ep_group
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling
        self.drop_policy = drop_policy
        self.data_rank = 0
        self.name = "TopKGate"
        self._last: tuple[Tensor, Tensor | None, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Results of a forward are parts of a graph, which cannot be copied or pickled.
        return {**self.__dict__, "_last": None}

    def _set_ep_group(self, ep_group: dist.ProcessGroup | None) -> None:
        self.ep_group = ep_group

    def draw_as(self, data_rank: int) -> None:
        """Draw the numbers of rank ``data_rank`` among the ranks that have other tokens. Ranks with the same tokens
        have the same number.
        """
        self.data_rank = data_rank

    def rename(self, name: str) -> None:
        """Set the name in errors."""
        self.name = name

    @property
    def last_indices(self) -> Tensor | None:
        """The experts that the last forward chose, before any was dropped: int32 [tokens, k], -1 for unused tokens.
        None before the first forward.
        """
        return None if self._last is None else self._last[2]

    @property
    def z_loss(self) -> Tensor:
        """Mean of logsumexp(logits)^2 over the used tokens of the last forward (ST-MoE, arXiv 2202.08906, equation 5).
        Differentiable. 0 before the first forward.
        """
        if self._last is None:
            return self.wg.weight.new_zeros((), dtype=torch.float32)
        logits, used, _ = self._last
        squares = torch.logsumexp(logits, 1).square()
        if used is None:
            return squares.sum() / max(logits.shape[0], 1)
        return torch.where(used, squares, 0.0).sum() / used.sum().clamp_min(1)

    def forward(
        self,
        input: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
        *,
        indices: Tensor | None = None,
    ) -> Any:
        """Choose experts for ``input`` [tokens, model_dim]. For results, and for ``used_token`` and ``indices``, see
        ``top1gating``.
        """
        draws = Draws(self.data_rank)
        x = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = draws.jitter(x)
        logits = self.wg(x).float()
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        routing = _Routing(logits, used_token, draws, self.name)
        if self.k == 1:
            is_noisy = self.noisy_gate_policy == "RSample" and self.training
            choice = routing.top1(indices, is_noisy=is_noisy, is_random=self.use_rts and self.drop_tokens)
        elif self.k == 2:
            choice = routing.top2(indices, is_sampled=self.top2_2nd_expert_sampling)
        else:
            choice = routing.topk(self.k, indices, self.drop_policy)
        found = routing.results(
            choice, factor, self.min_capacity, self.ep_group, drops=self.drop_tokens, is_sparse=sparse_routes
        )
        self._last = logits, routing.used, choice.chosen
        return found
