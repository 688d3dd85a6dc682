"""Runs parts of a model that treat every token by itself in tiles, so that only one tile's activations exist at a time.

A tiled part is one node of the graph. It keeps its input for the backward, which runs each tile again. If tiles end in
a loss, their backward runs at once, in the forward. Gradients of weights are summed over the tiles and given to
autograd once. So hooks of weights are called once, and a scaled loss scales the gradients, too. Under ZeRO stage 3 the
weights are gathered once a pass and stay gathered for all tiles. The weights are found in the graph of the first tile,
and the graph of every other tile has to contain the same weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from deepspeed_c.errors import ConfigError, ModelError, RecomputeError
from deepspeed_c.ops.first_derivative import first_derivative_only
from deepspeed_c.recompute.conditions import Conditions
from deepspeed_c.saved_tensors import give_back, hooks_around, overwritten
from deepspeed_c.zero.weights.held import held_whole
from deepspeed_c.zero.weights.param import state_of

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "in_tiles",
    "loss_in_tiles",
    "sequence_tiled_compute",
    "tile_lengths",
]

IGNORED = -100  # torch's cross-entropy ignores this target
_REDUCTIONS = (None, "mean", "sum")


def tile_lengths(n_rows: int, n_tiles: int) -> list[int]:
    """Number of rows of each tile. Tiles have equal numbers, except the last, which may have fewer. No tile is empty,
    so there are fewer tiles if there are fewer rows than tiles. Without rows there is one empty tile.

    Raises ConfigError where ``n_tiles`` is no positive whole number.
    """
    if isinstance(n_tiles, bool) or not isinstance(n_tiles, int) or n_tiles < 1:
        raise ConfigError(
            f"{n_tiles!r} tiles for {n_rows} rows", where="shards", fix="give a whole number of at least 1"
        )
    step = max(1, math.ceil(n_rows / n_tiles))
    return [min(step, n_rows - begin) for begin in range(0, n_rows, step)] or [0]


@contextmanager
def _uncached_casts() -> Iterator[None]:
    """Switches off autocast's cache, which keeps the 16-bit copy of a weight for the next use. Otherwise a copy made
    without gradients would be used by code that differentiates.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _keep_values(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Keep a tensor that a tile saves. This hook is used within the tile, so that outer hooks for saved tensors are
    not.
    """
    return tensor.detach(), tensor._version


@contextmanager
def _differentiating(sums: _TileSums | None = None) -> Iterator[None]:
    """Run a tile whose graph is freed at its end. sums: if the tile has a backward, its gradients are added to
    ``sums``.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(_keep_values, give_back))
        if sums is not None:
            stack.enter_context(_AddsProducts(sums))
        yield


@contextmanager
def _silenced(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Switches off hooks on weights. They see the sum of all tiles, from autograd, and not the gradient of one tile."""
    found = [weight._backward_hooks for weight in weights if weight._backward_hooks]
    contents = [dict(hooks) for hooks in found]
    for hooks in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, content in zip(found, contents):
            hooks.update(content)


def _leaves_of(output: torch.Tensor, inputs: Sequence[torch.Tensor], first_node: int, where: str) -> list[torch.Tensor]:
    """Find the tensors that require a gradient at the ends of one tile's graph, besides ``inputs``.

    first_node: the number of the first node that the tile can have made. Raises ModelError if the tile's graph is
    connected to the model's graph: the gradient of a tensor there would be lost.
    """
    if output.grad_fn is None:
        return []
    own = {id(tensor) for tensor in inputs}
    found: dict[int, torch.Tensor] = {}
    todo, seen = [output.grad_fn], {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if id(leaf) not in own:
                found[id(leaf)] = leaf
            continue
        if node._sequence_nr() < first_node:
            raise ModelError(
                f"the function reads a tensor of the model's graph ({node.name()}) that is not among its arguments",
                where=where,
                fix="pass it: sequence_tiled_compute(kwargs_to_pass={...}) hands its gradient on",
            )
        todo += [follower for follower, _ in node.next_functions]
    return list(found.values())


class _TileSum:
    """A gradient that tiles add to. Gradients of 16 bits are summed in float32, as in a single product over all rows."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self._is_own = False  # False: ``total`` came from autograd, which may share or expand it, so add out of place

    def add(self, part: torch.Tensor | None) -> None:
        if part is None:
            return
        is_narrow = part.dtype in (torch.bfloat16, torch.float16)
        if self.total is None:
            self.total, self._is_own = (part.float(), True) if is_narrow else (part, False)
        elif self._is_own and part.layout is torch.strided:
            self.total.add_(part)
        else:
            self.total = self.total + part
            self._is_own = self.total.layout is torch.strided

    def add_product(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add ``a.T @ b``."""
        if self.total is None:
            self.total, self._is_own = a.mT @ b, True
        elif self._is_own and self.total.layout is torch.strided:
            self.total.addmm_(a.mT, b)
        else:
            self.add(a.mT @ b)


class _AddingLinear(torch.autograd.Function):
    """A linear layer whose backward adds to the sum of the weight's gradient within the matrix product itself."""

    @staticmethod
    def forward(
        ctx: Any, sums: _TileSums, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.call = sums, id(weight)
        ctx.save_for_backward(x, weight)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @first_derivative_only("a tiled layer")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        sums, weight_id = ctx.call
        sums.add_product(weight_id, rows, x.flatten(0, -2))
        of_x = grad @ weight if ctx.needs_input_grad[1] else None
        return None, of_x, None, rows.sum(0) if ctx.needs_input_grad[3] else None


class _AddsProducts(TorchFunctionMode):
    """Within this mode, linear layers add to ``sums`` directly. The product of one tile is neither allocated nor read
    again.
    """

    def __init__(self, sums: _TileSums) -> None:
        super().__init__()
        self._sums = sums

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and not kwargs and torch.is_grad_enabled():
            x, weight, bias = (*args, None)[:3]
            # A checkpoint within the tile counts saved tensors, and runs the layer again without this mode.
            is_direct = hooks_around()[0] is _keep_values
            # Some cases use autograd's own way: inputs that autocast casts; 16-bit weights, whose sums are in float32;
            # subclasses of tensors; and weights that are no parameters.
            is_wide = x.dtype is weight.dtype and weight.dtype in (torch.float32, torch.float64)
            is_plain = type(weight) is torch.nn.Parameter and type(x) is torch.Tensor and type(bias) in _BIASES
            is_whole = weight.requires_grad and x.dim() > 1
            if is_direct and is_wide and is_plain and is_whole and not torch.is_autocast_enabled(x.device.type):
                return _AddingLinear.apply(self._sums, x, weight, bias)
        return func(*args, **(kwargs or {}))


_BIASES = (torch.Tensor, torch.nn.Parameter, type(None))


class _TileSums:
    """Gradients of one tiled part, added up tile by tile.

    tensors: the inputs of the part; the first ``n_cut`` of them are cut along ``dim``. Each tensor that requires a
    gradient gets a gradient.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], n_cut: int, dim: int) -> None:
        self._n_cut, self._dim = n_cut, dim
        self._wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        self._cut = {i: torch.zeros_like(tensors[i]) for i in self._wanted if i < n_cut}
        self._passed = {i: _TileSum() for i in self._wanted if i >= n_cut}
        self._weights: dict[int, _TileSum] = {}

    def add(
        self,
        rows: tuple[int, int],
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        grad: torch.Tensor,
    ) -> None:
        """Run the backward of the tile with these ``rows`` (begin, number)."""
        if not output.requires_grad:
            return
        ends = [*(inputs[i] for i in self._wanted), *weights]
        with _silenced(weights):
            found = list(torch.autograd.grad(output, ends, grad.to(output.dtype), allow_unused=True))
        found.reverse()  # so that ``pop`` frees each part when it has been added
        for i in self._wanted:
            part = found.pop()
            if i >= self._n_cut:
                self._passed[i].add(part)
            elif part is not None:
                self._cut[i].narrow(self._dim, *rows).copy_(part)
        for weight in weights:
            self._weights.setdefault(id(weight), _TileSum()).add(found.pop())

    def add_product(self, weight_id: int, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Add the gradient of a weight [out, in], computed from rows of ``grad`` [n, out] and ``x`` [n, in]."""
        self._weights.setdefault(weight_id, _TileSum()).add_product(grad, x)

    def of_tensor(self, i: int) -> torch.Tensor | None:
        if i in self._cut:
            return self._cut[i]
        return self._passed[i].total if i in self._passed else None

    def of_weight(self, weight: torch.Tensor) -> torch.Tensor | None:
        total = self._weights.get(id(weight))
        return None if total is None else total.total


class _Tiled:
    """One call of a part that is run in tiles.

    function: (tiles of ``cut``, ``passed``) -> one tensor.
    cut: tensors that are cut along ``dim`` into ``lengths``. passed: tensors that each tile gets whole.
    joined: the dimension along which outputs are concatenated; None: outputs are stacked.
    weights: tensors known to be read by the function; more are found in the graph of the first tile.
    """

    def __init__(
        self,
        function: Callable[[list[torch.Tensor], list[torch.Tensor]], Any],
        cut: Sequence[torch.Tensor],
        passed: Sequence[torch.Tensor],
        lengths: Sequence[int],
        dim: int,
        joined: int | None,
        weights: Iterable[torch.Tensor],
        where: str,
    ) -> None:
        self.function, self.lengths, self.dim, self.joined, self.where = function, lengths, dim, joined, where
        self.n_cut, self.n_tensors = len(cut), len(cut) + len(passed)
        self.held = list({id(weight): weight for weight in weights}.values())
        self.weights = [weight for weight in self.held if weight.requires_grad]
        self._tensors = (*cut, *passed)
        self._versions: list[int] = []
        self._conditions: Conditions | None = None
        self._first: torch.Tensor | None = None
        self._out_lengths: list[int] = []

    def run(self) -> torch.Tensor:
        """The outputs of all tiles, in the graph."""
        tensors, self._tensors = self._tensors, ()
        with held_whole(self.held), _uncached_casts():
            if not torch.is_grad_enabled():
                return self._join(self._outputs(tensors, 0))
            self._conditions = Conditions()
            output, _, leaves = self._run_tile(tensors, 0)
            known = set(map(id, self.weights))
            self.weights += [leaf for leaf in leaves if id(leaf) not in known]
            self.held = list({id(weight): weight for weight in (*self.held, *self.weights)}.values())
            self._versions = [weight._version for weight in self.weights]
            self._first = output.detach()
            del output
            with held_whole(self.held):
                return _Recomputed.apply(self, *tensors, *self.weights)

    def _rows(self, i: int) -> tuple[int, int]:
        return sum(self.lengths[:i]), self.lengths[i]

    def _run_tile(
        self, tensors: Sequence[torch.Tensor], i: int, sums: _TileSums | None = None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Run tile ``i`` in a separate graph. Returns (output, tensors of the tile, other leaves of the graph)."""
        inputs = []
        for j, tensor in enumerate(tensors):
            part = tensor.narrow(self.dim, *self._rows(i)) if j < self.n_cut else tensor
            inputs.append(part.detach().requires_grad_(tensor.requires_grad))
        first_node = torch._C._autograd._get_sequence_nr()
        with _differentiating(sums):
            output = self._check(self.function(inputs[: self.n_cut], inputs[self.n_cut :]))
        return output, inputs, _leaves_of(output, inputs, first_node, self.where)

    def _check(self, output: Any) -> torch.Tensor:
        if not torch.is_tensor(output):
            raise ModelError(
                f"the function gave a {type(output).__name__} for one tile",
                where=self.where,
                fix="let it return one tensor",
            )
        return output

    def _outputs(self, tensors: Sequence[torch.Tensor], begin: int) -> Iterator[torch.Tensor]:
        for i in range(begin, len(self.lengths)):
            parts = [tensor.narrow(self.dim, *self._rows(i)) for tensor in tensors[: self.n_cut]]
            yield self._check(self.function(parts, list(tensors[self.n_cut :])))

    def forward(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        first, self._first = self._first, None
        return self._join(itertools.chain([first], self._outputs(tensors, 1)))

    def _join(self, outputs: Iterable[torch.Tensor]) -> torch.Tensor:
        if self.joined is None:
            return torch.stack(list(outputs))
        n_rows = sum(self.lengths)
        whole, self._out_lengths = None, []
        for i, output in enumerate(outputs):
            found = output.shape[self.joined] if output.dim() > self.joined >= -output.dim() else None
            if found != self.lengths[i]:
                raise ModelError(
                    f"the function gave shape {tuple(output.shape)} for a tile of {self.lengths[i]} of {n_rows} tokens,"
                    f" which are to be put together along dimension {self.joined}",
                    where=self.where,
                    fix="let it return a row for each token; what gives one number a tile is joined along dimension 0",
                )
            if whole is None:
                shape = list(output.shape)
                shape[self.joined] = n_rows
                whole = output.new_empty(shape)
            whole.narrow(self.joined, *self._rows(i)).copy_(output)
        return whole

    def backward(self, tensors: Sequence[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor | None]:
        """Gradients of the tensors and of the weights."""
        for weight, version in zip(self.weights, self._versions):
            if weight._version != version and state_of(weight) is None:
                raise overwritten(f"{weight.dtype} {list(weight.shape)}", weight._version, version)
        sums = _TileSums(tensors, self.n_cut, self.dim)
        with held_whole(self.held), self._conditions.replayed(), _uncached_casts():
            for i in range(len(self.lengths)):
                output, inputs, leaves = self._run_tile(tensors, i, sums)
                self._check_leaves(leaves)
                part = grad[i] if self.joined is None else grad.narrow(self.joined, *self._rows(i))
                sums.add(self._rows(i), output, inputs, self.weights, part)
        return [*map(sums.of_tensor, range(self.n_tensors)), *map(sums.of_weight, self.weights)]

    def _check_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        known = set(map(id, self.weights))
        for leaf in leaves:
            if id(leaf) not in known:
                raise RecomputeError(
                    f"a weight of shape {tuple(leaf.shape)} is read by a later tile, and was not by the first",
                    where=self.where,
                    fix="name all weights that any tile may read in compute_params",
                )


class _Recomputed(torch.autograd.Function):
    """Runs the tiles again in the backward."""

    @staticmethod
    def forward(ctx: Any, call: _Tiled, *tensors: torch.Tensor) -> torch.Tensor:
        own = tensors[: call.n_tensors]
        ctx.call = call, [tensor.requires_grad for tensor in own], [tensor.dtype for tensor in tensors]
        # Weights are not saved: in the backward the function reads them where they are at that time.
        ctx.save_for_backward(*own)
        return call.forward(own)

    @staticmethod
    @first_derivative_only("a tiled layer")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call, requires, dtypes = ctx.call
        own = [tensor.detach().requires_grad_(need) for tensor, need in zip(ctx.saved_tensors, requires)]
        grads = call.backward(own, grad)
        return (None, *(None if found is None else found.to(dtype) for found, dtype in zip(grads, dtypes)))


def _is_input(value: Any) -> bool:
    """Whether a tile gets ``value`` from outside. Parameters do not count, because they are read in place."""
    return torch.is_tensor(value) and not isinstance(value, torch.nn.Parameter)


def _weights_of(compute_params: Iterable[torch.Tensor] | None, owner: Any) -> list[torch.Tensor]:
    """Tensors that a tiled part reads, as given by ``compute_params``; by default the parameters of ``owner``, its
    module.
    """
    if compute_params is not None:
        return list(compute_params)
    return list(owner.parameters()) if isinstance(owner, torch.nn.Module) else []


def in_tiles(
    function: Callable[[list[torch.Tensor], dict[str, torch.Tensor | None]], torch.Tensor],
    cut: Sequence[torch.Tensor],
    weights: Mapping[str, torch.Tensor | None],
    lengths: Sequence[int],
    where: str,
) -> torch.Tensor:
    """Run ``function(cut, weights)`` in tiles of ``lengths`` rows, and again in the backward. The function returns a
    row for each row of ``cut``.

    weights: parameters, which the function reads in place, or other tensors. where: names the caller in errors.
    """
    passed = {name: each for name, each in weights.items() if _is_input(each)}
    rest = {name: each for name, each in weights.items() if name not in passed}

    def run(tiles: list[torch.Tensor], whole: list[torch.Tensor]) -> Any:
        return function(tiles, {**rest, **dict(zip(passed, whole))})

    params = [each for each in rest.values() if each is not None]
    return _Tiled(run, cut, list(passed.values()), lengths, 0, 0, params, where).run()


class TiledMLP:
    """An MLP, or another module that treats every token by itself, in tiles."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Iterable[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """``fn(self, x)``, run in ``shards`` tiles of the last dimension but one, and again in the backward.

        x: [..., tokens, width]. compute_params: weights that ``fn`` reads, which ZeRO stage 3 gathers once for all
        tiles; None: the parameters of ``self``. Other weights are found if the first tile reads them.

        Raises ConfigError for a number of tiles below 1. Raises ModelError for inputs of one dimension, for outputs
        with another number of tokens, and where ``fn`` reads a tensor of the model's graph besides ``x``. The backward
        raises RecomputeError where a later tile reads a weight that is not in ``compute_params`` and that the first
        tile did not read.
        """
        if x.dim() < 2:
            raise ModelError(
                f"x has the shape {tuple(x.shape)}", where="TiledMLP", fix="give it as [..., tokens, width]"
            )
        call = _Tiled(
            lambda cut, _: fn(self, cut[0]),
            cut=[x],
            passed=[],
            lengths=tile_lengths(x.shape[-2], shards),
            dim=x.dim() - 2,
            joined=x.dim() - 2,
            weights=_weights_of(compute_params, self),
            where="TiledMLP",
        )
        return call.run()


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Iterable[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """``fn(**kwargs_to_shard, **kwargs_to_pass)``, run in tiles along dimension 1, and again in the backward.

    kwargs_to_shard: tensors [batch, seqlen, ...], or None. kwargs_to_pass: any values; tensors among them get
    gradients, too. grad_requiring_tensor_key: must be one of the names, and has no other effect: every tensor that
    requires a gradient gets one. output_unshard_dimension: the dimension along which outputs are concatenated; 0:
    ``fn`` returns one number for each tile. output_reduction: None returns the outputs, "sum" their sum, "mean" their
    mean. In a mean of one number for each tile, a tile's weight is its number of targets: elements other than -100 in
    the cut tensor of whole numbers whose name contains "label" or "target". Without such a tensor it is the number of
    tokens.

    Raises as ``TiledMLP`` does. Also raises ConfigError for unknown names and reductions, and for lengths other than
    ``seqlen``.
    """
    return SequenceTiledCompute.apply(
        fn,
        seqlen,
        shards,
        list(kwargs_to_shard),
        list(kwargs_to_pass),
        grad_requiring_tensor_key,
        compute_params,
        output_unshard_dimension,
        output_reduction,
        *kwargs_to_shard.values(),
        *kwargs_to_pass.values(),
    )


class SequenceTiledCompute:
    """Runs any function of some tokens in tiles."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Iterable[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """As ``sequence_tiled_compute``, with the values of ``keys_to_shard`` and ``keys_to_pass`` in ``args``."""
        where = "sequence_tiled_compute"
        keys = [*keys_to_shard, *keys_to_pass]
        if output_reduction not in _REDUCTIONS:
            raise ConfigError(
                f"output_reduction is {output_reduction!r}", where=where, fix='give None, "mean" or "sum"'
            )
        if len(set(keys)) < len(keys) or len(args) != len(keys) or grad_requiring_tensor_key not in keys:
            raise ConfigError(
                f"{len(args)} values for the names {keys}, of which {grad_requiring_tensor_key!r} requires a gradient",
                where=where,
                fix="name each value once, and the one that requires a gradient among them",
            )
        given = dict(zip(keys, args))
        cut = [key for key in keys_to_shard if torch.is_tensor(given[key])]
        for key in keys_to_shard:
            value = given[key]
            if key in cut and value.dim() > 1 and value.shape[1] == seqlen or value is None:
                continue
            found = tuple(value.shape) if key in cut else type(value).__name__
            raise ConfigError(
                f"{key} is {found}, and is to be cut into tiles of {seqlen} tokens",
                where=where,
                fix="give tensors [batch, seqlen, ...] in kwargs_to_shard, and everything else in kwargs_to_pass",
            )
        passed = [key for key in keys_to_pass if _is_input(given[key])]
        rest = {key: given[key] for key in keys if key not in cut and key not in passed}

        def run(tiles: list[torch.Tensor], whole: list[torch.Tensor]) -> Any:
            return fn(**dict(zip(cut, tiles)), **dict(zip(passed, whole)), **rest)

        lengths = tile_lengths(seqlen, shards)
        is_number = output_unshard_dimension == 0
        call = _Tiled(
            run,
            cut=[given[key] for key in cut],
            passed=[given[key] for key in passed],
            lengths=lengths,
            dim=1,
            joined=None if is_number else output_unshard_dimension,
            weights=[] if compute_params is None else compute_params,
            where=where,
        )
        outputs = call.run()
        if output_reduction == "sum":
            return outputs.sum()
        if output_reduction == "mean" and is_number:
            return _weighted_mean(outputs, _counts_of({key: given[key] for key in cut}, lengths))
        return outputs.mean() if output_reduction == "mean" else outputs


def _counts_of(cut: Mapping[str, torch.Tensor], lengths: Sequence[int]) -> torch.Tensor:
    """Number of counted tokens of each tile: float64 [tiles]."""
    for key, value in cut.items():
        is_whole = not value.is_floating_point() and value.dtype is not torch.bool
        if is_whole and any(word in key.lower() for word in ("label", "target")):
            return torch.stack([(part != IGNORED).sum() for part in value.split(lengths, dim=1)]).double()
    return torch.tensor(lengths, dtype=torch.float64, device=next(iter(cut.values())).device)


def _weighted_mean(outputs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The weighted mean of one number for each tile. A tile without counted tokens is left out, even if its number is
    not finite (a mean of nothing).
    """
    shares = (counts / counts.sum().clamp(min=1)).to(outputs.dtype)
    shares = shares.view(-1, *[1] * (outputs.dim() - 1))
    return torch.where(shares > 0, outputs * shares, 0.0).sum()


class TiledFusedLogitsLoss:
    """The end of a model and its loss, in tiles: no rank ever has all logits."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Iterable[torch.Tensor] | None,
        output_reduction: str,
    ) -> torch.Tensor:
        """The loss that ``fn(self, x, y)`` gives, or ``fn(self, x, y, mask)`` where there is a mask.

        The backward of each tile runs in the forward, so logits are computed once; the backward only scales gradients.
        x: [batch, tokens, ...], y: [batch, tokens, ...], mask: [batch, tokens] or None. ``fn`` gets them with the first
        two dimensions merged, and returns one number: with ``output_reduction`` "mean" the mean over the tile's counted
        tokens, with "sum" their sum. A token counts if its target is not -100 (for targets of whole numbers) and its
        mask, if there is one, is not 0. If no token counts, the mean and its gradients are 0.
        compute_params: weights that ``fn`` reads, which ZeRO stage 3 gathers once for all tiles.

        Raises ConfigError for another reduction, ModelError for shapes that do not fit.
        """
        where = "TiledFusedLogitsLoss"
        if output_reduction not in _REDUCTIONS[1:]:
            raise ConfigError(f"output_reduction is {output_reduction!r}", where=where, fix='give "mean" or "sum"')
        shapes = [tuple(t.shape) for t in (x, y, mask) if t is not None]
        if x.dim() < 2 or any(shape[:2] != shapes[0][:2] for shape in shapes) or (mask is not None and mask.dim() != 2):
            raise ModelError(
                f"x, y{', mask' if mask is not None else ''} have the shapes {', '.join(map(str, shapes))}",
                where=where,
                fix="give x and y as [batch, tokens, ...], and a mask as [batch, tokens]",
            )
        cut = [t.flatten(0, 1) for t in (x, y, mask) if t is not None]
        lengths = tile_lengths(len(cut[0]), shards)
        counts = _counted_tokens(cut[1], cut[2] if mask is not None else None, lengths)
        return loss_in_tiles(
            lambda tiles: fn(self, *tiles),
            cut,
            lengths,
            counts if output_reduction == "mean" else None,
            [] if compute_params is None else compute_params,
            where,
        )


def _counted_tokens(targets: torch.Tensor, mask: torch.Tensor | None, lengths: Sequence[int]) -> list[int]:
    """Number of counted targets of each tile."""
    counted = torch.ones_like(targets, dtype=torch.bool)
    if not targets.is_floating_point():
        counted = targets != IGNORED
    if mask is not None:
        counted = counted & (mask != 0).view(-1, *[1] * (targets.dim() - 1))
    return torch.stack([part.sum() for part in counted.split(lengths)]).tolist()


def loss_in_tiles(
    function: Callable[[list[torch.Tensor]], torch.Tensor],
    cut: Sequence[torch.Tensor],
    lengths: Sequence[int],
    counts: Sequence[int] | None,
    weights: Iterable[torch.Tensor],
    where: str,
) -> torch.Tensor:
    """One number for tiles whose backward runs in the forward.

    function: maps tiles of ``cut`` to one number. cut: tensors whose rows are cut into ``lengths``. counts: number of
    counted items in each tile, if ``function`` returns means over them; None if it returns sums. weights: the tensors
    that ``function`` reads, as far as known. where: names the caller in errors.
    """
    return _LossInTiles(function, cut, lengths, counts, weights, where).run()


class _LossInTiles:
    """One call of ``loss_in_tiles``."""

    def __init__(
        self,
        function: Callable[[list[torch.Tensor]], Any],
        cut: Sequence[torch.Tensor],
        lengths: Sequence[int],
        counts: Sequence[int] | None,
        weights: Iterable[torch.Tensor],
        where: str,
    ) -> None:
        self._function, self._cut, self._lengths, self._counts = function, cut, lengths, counts
        self._held, self._where = list(weights), where

    def run(self) -> torch.Tensor:
        with held_whole(self._held), _uncached_casts():
            return self._run()

    def _run(self) -> torch.Tensor:
        is_training = torch.is_grad_enabled()
        sums = _TileSums(self._cut, len(self._cut), 0)
        weights = {id(weight): weight for weight in self._held if weight.requires_grad}
        n_counted = 1 if self._counts is None else max(1, sum(self._counts))
        loss, begin, holds = None, 0, ExitStack()
        with holds:
            for i, length in enumerate(self._lengths):
                rows, begin = (begin, length), begin + length
                n = 1 if self._counts is None else self._counts[i]
                if n == 0:
                    continue  # a mean of nothing
                inputs = [t.narrow(0, *rows).detach().requires_grad_(t.requires_grad) for t in self._cut]
                first_node = torch._C._autograd._get_sequence_nr()
                with _differentiating(sums) if is_training else torch.no_grad():
                    output = self._check(self._function(inputs))
                value = output.detach() * n
                loss = value if loss is None else loss + value
                if output.requires_grad:
                    leaves = _leaves_of(output, inputs, first_node, self._where)
                    found = {id(leaf): leaf for leaf in leaves if id(leaf) not in weights}
                    weights.update(found)
                    holds.enter_context(held_whole(found.values()))
                    # The gradient of the sum, not of the mean, so that 16-bit gradients are scaled only once, at the
                    # end.
                    sums.add(rows, output, inputs, list(weights.values()), torch.full_like(output, n))
                del output
        if loss is None:
            loss = self._cut[0].new_zeros((), dtype=torch.float32)
        return _Finished.apply(loss, n_counted, sums, len(self._cut), *self._cut, *weights.values())

    def _check(self, output: Any) -> torch.Tensor:
        if torch.is_tensor(output) and output.numel() == 1:
            return output.reshape(())
        found = tuple(output.shape) if torch.is_tensor(output) else type(output).__name__
        raise ModelError(f"the function gave {found} for one tile", where=self._where, fix="let it return one number")


class _Finished(torch.autograd.Function):
    """A loss whose gradients are computed already."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, n_counted: int, sums: _TileSums, n_cut: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        grads = [*map(sums.of_tensor, range(n_cut)), *map(sums.of_weight, tensors[n_cut:])]
        ctx.call = n_counted, [tensor.dtype for tensor in tensors]
        ctx.save_for_backward(*grads)
        return loss / n_counted

    @staticmethod
    @first_derivative_only("a tiled loss")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        n_counted, dtypes = ctx.call
        scale = grad / n_counted
        grads = [
            None if found is None else (found * scale).to(dtype) for found, dtype in zip(ctx.saved_tensors, dtypes)
        ]
        return (None, None, None, None, *grads)
