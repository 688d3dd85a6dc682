"""Small models, and their plain-torch runs for comparison. Each model has a trait that has broken a ZeRO implementation
somewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.deepspeed_c.zero.reference import Event, Flow, Reference

WIDTH = 13  # prime, so that nothing divides evenly
BATCH = 3


class Mlp(nn.Module):
    """Has odd sizes, a parameter of one element (fewer elements than ranks) and a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, 17)
        self.mid = nn.Linear(17, 11, bias=False)
        self.out = nn.Linear(11, 5)
        self.gain = nn.Parameter(torch.ones(1))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.mid(torch.tanh(self.inp(x))))) * self.gain

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.body(x).float() - y).square().mean()


class Tied(Mlp):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(17, WIDTH, bias=False)
        self.forth = nn.Linear(WIDTH, 17, bias=False)
        self.forth.weight = nn.Parameter(self.inp.weight.detach().clone())
        self.inp.weight = self.forth.weight

    def body(self, x):
        return super().body(x + 0.1 * self.back(torch.tanh(self.forth(x))))


class UsedTwice(Mlp):
    """A submodule used twice in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        return super().body(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class Checkpointed(UsedTwice):
    """Checkpoints the activations of a shared submodule. If the checkpoint is reentrant, the submodule's hooks fire
    twice in one backward."""

    use_reentrant = False

    def body(self, x):
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda t: torch.tanh(self.shared(t)), x, use_reentrant=self.use_reentrant)
        return Mlp.body(self, x)


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class Frozen(Mlp):
    """Frozen parameters between trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mid.weight.requires_grad_(False)
        self.inp.bias.requires_grad_(False)


class ZeroSize(Mlp):
    """A parameter without elements, used in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 7))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def body(self, x):
        return super().body(x) + self.nothing.sum() + self.scalar


class Unused(Mlp):
    """Has parameters that never get a gradient, and a branch that the data choose, so that ranks differ."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(7, 9)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def body(self, x):
        if float(x[0, 0]) > 0:
            x = self.sometimes(x)
        return super().body(x)


class Embedded(nn.Module):
    """An embedding whose gradient touches few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, WIDTH)
        self.mlp = Mlp()

    def forward(self, x, y):
        index = (x.float().abs() * 7).long().clamp(max=18)[:, :3]
        return self.mlp(x + self.embed(index).sum(1).to(x.dtype), y)


class Trait(NamedTuple):
    model: type[nn.Module] = Mlp
    n_backwards: int = 1  # calls of backward in a micro-batch, each after a forward of its own
    user_backward: bool = False  # loss.backward() instead of engine.backward(loss)
    groups: int = 1
    config: Mapping = MappingProxyType({})


TRAITS: dict[str, Trait] = {
    "plain": Trait(), "loss_backward": Trait(user_backward=True), "tied": Trait(Tied), "used_twice": Trait(UsedTwice),
    "two_backwards": Trait(n_backwards=2), "checkpoint": Trait(Checkpointed),
    "checkpoint_reentrant": Trait(CheckpointedReentrant),
    "checkpoint_reentrant_user": Trait(CheckpointedReentrant, user_backward=True), "frozen": Trait(Frozen),
    "zero_size": Trait(ZeroSize), "unused": Trait(Unused), "groups": Trait(Tied, groups=2),
    "sparse_embedding": Trait(Embedded, config={"sparse_gradients": True}),
    "tiny_buckets": Trait(UsedTwice, config={"zero_optimization": {"reduce_bucket_size": 40, "overlap_comm": True}}),
    "no_overlap": Trait(config={"zero_optimization": {"overlap_comm": False}}),
    "all_reduce": Trait(config={"zero_optimization": {"reduce_scatter": False, "allgather_partitions": False}}),
    "prescale": Trait(config={"prescale_gradients": True}),
    "predivide": Trait(config={"gradient_predivide_factor": 2.0}),
    "fp32_comm": Trait(config={"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}),
}  # fmt: skip

STEPS = 4
CLIP = 0.3  # norms lie between 0.2 and 2, so nearly every run clips some steps and not others
OPTIMIZER = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}


def make_model(trait: Trait) -> nn.Module:
    torch.manual_seed(7)
    return trait.model()


def make_groups(model: nn.Module, n: int) -> list[dict]:
    params = list(model.parameters())
    if n == 1:
        return [{"params": params}]
    return [{"params": params[::2], "weight_decay": 0.0}, {"params": params[1::2], "lr": 0.01}]


def batch(step: int, micro: int, rank: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * step + 100 * micro + 10 * rank + part)
    # Inputs that bf16 holds exactly, so that all precisions see the same numbers.
    return torch.randn(BATCH, WIDTH, generator=g).bfloat16().float(), torch.randn(BATCH, 5, generator=g)


class Run(NamedTuple):
    losses: list[float]  # sorted by step, micro-batch, rank, part
    norms: list[float]
    params: dict[str, torch.Tensor]
    order: Sequence[Event] = ()  # an engine's events, which tell when it sent gradients


def plain_run(trait: Trait, world: int, gas: int, make_optimizer: Callable | None = None) -> Run:
    """The oracle: one process, fp32, plain torch, the whole global batch."""
    model = make_model(trait)
    groups = make_groups(model, trait.groups)
    optimizer = (make_optimizer or (lambda g: torch.optim.AdamW(g, **OPTIMIZER)))(groups)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(gas):
            for rank in range(world):
                for part in range(trait.n_backwards):
                    loss = model(*batch(step, micro, rank, part))
                    losses.append(loss.item())
                    (loss / (gas * world)).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, CLIP)))
        optimizer.step()
    return Run(losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()})


def rounded_run(
    trait: Trait,
    world: int,
    flow: Flow,
    orders: Sequence[Sequence[Event]] | None = None,
    make: type[Reference] = Reference,
) -> Run:
    """As ``plain_run``, but rounds where an engine with this ``flow`` rounds. ``orders``: the events of this engine, by
    rank."""
    model = make_model(trait)
    reference = make(model, make_groups(model, trait.groups), flow, world, OPTIMIZER, orders)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(flow.gas):
            of_parts = []
            for part in range(trait.n_backwards):

                def loss_of(rank: int, at=(step, micro), part=part) -> torch.Tensor:
                    x, y = batch(*at, rank, part)
                    return model(x.to(flow.dtype), y)

                of_parts.append(reference.backward(loss_of))
            losses += [of_part[rank] for rank in range(world) for of_part in of_parts]
        reference.step()
        norms.append(reference.norm)
    return Run(losses, norms, reference.weights())
