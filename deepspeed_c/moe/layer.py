"""Mixture-of-experts layers under DeepSpeed's names: a gate, experts over ranks, and the rows' way between them.

A token's way: the gate chooses experts; the choices that are kept are sorted by expert; one row for each of them is
gathered, sent to the rank of the expert if there are several (``dispatch.py``), computed, sent back, and the rows of a
token are added up with the gate's weights. Rows are never padded, with or without a capacity.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.errors import CommError, ConfigError, DeepSpeedCError, StateError
from deepspeed_c.logging import warning_once
from deepspeed_c.moe.dispatch import find_way, from_experts, report_failure, to_experts
from deepspeed_c.moe.experts import Experts, SpreadLayer
from deepspeed_c.moe.gate import TopKGate
from deepspeed_c.ops import moe as ops
from deepspeed_c.utils import groups

__all__ = ["MOELayer", "MoE"]


class MOELayer(SpreadLayer):
    """A gate and this rank's experts. Of the last forward: ``l_aux``, ``exp_counts`` (tokens of each expert before any
    was dropped) and ``kept_counts`` (afterwards).

    Args:
        gate: chooses experts, with the arguments and results of ``TopKGate``.
        experts: this rank's experts.
        ep_group_name: name of the group of ranks that hold the experts together.
        ep_size: number of these ranks.
        num_local_experts: experts of this rank.
        use_tutel: changes nothing.
    """

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        super().__init__(ep_size)
        if use_tutel:
            warning_once("use_tutel changes nothing: rows go to experts without padding in any case")
        self.gate = gate
        self.experts = experts
        self.ep_group: dist.ProcessGroup | None = None
        self.ep_group_name = ep_group_name
        self.num_local_experts = num_local_experts
        self._ranks: Collectives | None = None
        self.l_aux: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The loss is a part of a graph, which cannot be copied or pickled; and ranks belong to this process.
        return {
            **self.__dict__,
            "l_aux": None,
            "exp_counts": None,
            "kept_counts": None,
            "_ranks": None,
            "ep_group": None,
        }

    def rename(self, name: str) -> None:
        super().rename(name)
        if isinstance(self.gate, TopKGate):
            self.gate.rename(name)

    def connect(self, ep: Collectives) -> None:
        """Take the ranks that hold the experts together, this rank among them, and number this rank's experts.

        Raises ConfigError if they are not ``ep_size`` ranks.
        """
        if ep.world_size != self.ep_size:
            raise ConfigError(
                f"ep_size is {self.ep_size}, and there are {ep.world_size} ranks for the experts",
                where=self.name,
                fix="give the layer as many ranks as its ep_size",
            )
        self._ranks = ep if ep.world_size > 1 else None
        self.ep_group = ep.group
        if isinstance(self.experts, Experts):
            self.experts.number_from(ep.rank * self.num_local_experts)
        if isinstance(self.gate, TopKGate):
            self.gate.draw_as(ep.rank)  # these ranks have other tokens, so they draw other numbers

    def _set_ep_group(self, ep_group: dist.ProcessGroup | None) -> None:
        ep = Collectives(ep_group)
        ep.use_shared_memory("auto")
        self.connect(ep)

    def forward(
        self,
        hidden_states: torch.Tensor,
        used_token: torch.Tensor | None = None,
        *,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Send each token of ``hidden_states`` [..., hidden] to its experts. For ``used_token`` and ``indices`` see
        ``top1gating``. A token without experts gives 0.
        """
        if self._ranks is None and self.ep_size > 1:
            raise StateError(
                f"the experts are to lie on {self.ep_size} ranks, and the layer does not have them yet",
                where=self.name,
                fix="make an engine (deepspeed_c.initialize), or call MoE.set_deepspeed_parallelism() on all ranks",
            )
        shape = hidden_states.shape
        x = hidden_states.reshape(-1, shape[-1])
        order, inverse, counts, weights = self._sorted(x, used_token, indices)
        rows = ops.gather_rows(x, order, inverse.shape[1], inverse)
        if self._ranks is None:
            rows = self.experts(rows, counts.tolist())
        else:
            way = find_way(self._ranks, counts, self.name)
            rows = from_experts(self.experts(to_experts(rows, way), way.counts), way)
        out = ops.combine_rows(rows, inverse, weights)
        return out.view(*shape[:-1], out.shape[-1])

    def _sorted(
        self, x: torch.Tensor, used_token: torch.Tensor | None, indices: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The kept slots by expert: (order, inverse, slots of each expert, weights [tokens, k])."""
        replayed = {} if indices is None else {"indices": indices}
        try:
            found = self.gate(x, used_token, True, **replayed)
        except DeepSpeedCError:
            if self._ranks is not None:
                # The other ranks are about to wait for this rank's counts.
                report_failure(self._ranks, self.ep_size * self.num_local_experts, x.device, self.name)
            raise
        self.l_aux, _, n_experts, chosen, _, weights, self.exp_counts = found
        order, inverse, counts = ops.sort_slots(chosen.t().contiguous(), n_experts)
        self.kept_counts = counts
        return order, inverse, counts, weights.t().contiguous()


class MoE(nn.Module):
    """A mixture of experts: ``layer(x)`` returns (output, l_aux, exp_counts). The training loss adds ``l_aux`` times a
    small number.

    Args:
        hidden_size: width of a token, in and out.
        expert: module of one expert, called with [rows, hidden_size]; each expert is a copy.
        num_experts: number of experts on all ranks.
        ep_size: number of ranks that hold the experts together.
        k: experts of each token.
        capacity_factor: places of an expert in training, in units of an even share of the tokens' choices.
        eval_capacity_factor: the same in evaluation.
        min_capacity: least number of places of an expert.
        use_residual: the output is a learned mean of the experts' output and of ``expert`` itself, which all tokens go
            through (arXiv 2201.05596).
        noisy_gate_policy: "Jitter", "RSample", or None (``TopKGate``).
        drop_tokens: whether an expert without a free place drops tokens.
        use_rts: for k = 1: full experts keep a random choice of their tokens.
        use_tutel: changes nothing.
        enable_expert_tensor_parallelism: changes nothing.
        top2_2nd_expert_sampling: for k = 2: draw the second expert.
        shared_expert: module whose output for all tokens is added.

    Raises:
        ConfigError: experts that do not divide by ``ep_size``, ``k`` above the number of experts, an unknown policy.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
        *,
        shared_expert: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            raise ConfigError(
                f"{num_experts} experts cannot be divided among ep_size = {ep_size} ranks",
                where="MoE",
                fix="let num_experts be a multiple of ep_size",
            )
        if enable_expert_tensor_parallelism:
            warning_once("enable_expert_tensor_parallelism changes nothing: each expert lies on one rank as a whole")
        self.use_residual = use_residual
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.ep_size = ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_experts = num_experts
        self.num_local_experts = num_experts // ep_size
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        experts = Experts(expert, self.num_local_experts, self.expert_group_name)
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel=use_tutel
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)
        self.shared_expert = shared_expert

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Give the layer its ranks, for use without an engine. All ranks of the world call it, for their layers in the
        same order.

        use_data_before_expert_parallel_: ranks that hold the experts together are world / ``ep_size`` apart, instead of
        next to each other. The first call decides for all layers. Raises ConfigError if the number of ranks is no
        multiple of ``ep_size``.
        """
        try:
            groups.create_expert_groups(self.ep_size, data_first=use_data_before_expert_parallel_)
        except CommError as error:
            raise ConfigError(error.what, where=self.deepspeed_moe.name, fix=error.fix) from error
        self.deepspeed_moe.connect(groups.expert_ranks(self.expert_group_name))
        self.deepspeed_moe.gate.draw_as(groups._get_sequence_data_parallel_rank())

    def forward(
        self,
        hidden_states: torch.Tensor,
        used_token: torch.Tensor | None = None,
        *,
        indices: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (output [..., hidden], l_aux, tokens of each expert before any was dropped).

        used_token: one element for each token; tokens with 0 are for no expert, and their output is that of ``mlp`` and
        ``shared_expert`` alone. indices: experts of each token, int [tokens, k], in place of the gate's choice (like
        ``deepspeed_moe.gate.last_indices`` of an earlier forward).
        """
        output = self.deepspeed_moe(hidden_states, used_token, indices=indices)
        if self.use_residual:
            shares = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * shares[..., 0:1] + _first(self.mlp(hidden_states)) * shares[..., 1:]
        if self.shared_expert is not None:
            output = output + _first(self.shared_expert(hidden_states))
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def _first(output: Any) -> torch.Tensor:
    """The output of a module that may return a tuple."""
    return output[0] if isinstance(output, tuple) else output
