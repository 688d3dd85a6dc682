"""Cross-entropy without whole logits: each rank keeps its part of the vocabulary and sends four numbers for each token."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_c.errors import StateError
from deepspeed_c.inject.layers import LinearLayer
from deepspeed_c.inject.overlap import LOOKS
from deepspeed_c.inject.ranks import TensorRanks
from deepspeed_c.inject.swap import swap_loss
from deepspeed_c.ops import cross_entropy
from deepspeed_c.ops.first_derivative import first_derivative_only

__all__ = ["CutCausalLoss", "CutLogits", "cut_loss", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    sizes: list[int],
    ranks: TensorRanks,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The loss of each token, float32 [n]. It equals ``torch.nn.functional.cross_entropy`` with ``reduction="none"``.

    logits: [n, sizes[rank]], this rank's columns (float32, bfloat16, float16). The backward overwrites them with their
    gradient. targets: int64 [n], the same on all ranks.
    """
    return _CrossEntropy.apply(logits, targets, sizes, ranks, ignore_index, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        sizes: list[int],
        ranks: TensorRanks,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        vocab_size = sum(sizes)
        is_counted = targets != ignore_index
        is_wrong = is_counted & ((targets < 0) | (targets >= vocab_size))
        if is_wrong.device.type == "cpu":
            wrong = targets[is_wrong]
            if wrong.numel():
                raise IndexError(f"target {int(wrong[0])} is not in the vocabulary of {vocab_size}")
        else:
            # The device reports the error, as for torch's own loss, so that no rank waits for its device.
            torch._assert_async((~is_wrong).all(), f"a target is not in the vocabulary of {vocab_size}")
        logits = logits.contiguous()
        here = torch.where(is_counted, targets - sum(sizes[: ranks.rank]), -1)
        # A target on a later rank has an index above this rank's columns, a target on an earlier rank an index below 0.
        rows = cross_entropy.rows(logits, here)
        log_sum, target, total = cross_entropy.join(ranks.comm.all_gather_list(rows, label="cross-entropy"))
        loss = log_sum - (1 - smoothing) * target
        if smoothing:
            loss = loss - smoothing * total / vocab_size
        ctx.save_for_backward(logits, here, log_sum, is_counted)
        ctx.smoothing, ctx.vocab_size = smoothing, vocab_size
        return torch.where(is_counted, loss, 0.0)

    @staticmethod
    @first_derivative_only("the cross-entropy over a vocabulary cut over tensor-parallel ranks")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, here, log_sum, is_counted = ctx.saved_tensors
        scale = torch.where(is_counted, grad.float(), 0.0).contiguous()
        cross_entropy.grad_(logits, here, log_sum, scale, ctx.smoothing, ctx.vocab_size)
        return logits, None, None, None, None, None


class CutLogits(torch.Tensor):
    """Logits [..., columns of this rank] that behave as whole logits, [..., vocab_size], in every use.

    Each use is a collective, so all ranks must use them in the same way. After the backward they cannot be read
    (StateError), because their gradient is in their memory.
    """

    # ``cut_loss`` sets these attributes on each instance, because a tensor's constructor takes no such arguments.
    cut_sizes: list[int]
    cut_ranks: TensorRanks
    cut_version: int

    @classmethod
    def of(cls, logits: torch.Tensor, sizes: list[int], ranks: TensorRanks) -> CutLogits:
        made = logits.as_subclass(cls)
        with torch._C.DisableTorchFunctionSubclass():
            made.cut_sizes, made.cut_ranks, made.cut_version = sizes, ranks, logits._version
        return made

    def gathered(self) -> torch.Tensor:
        """The whole logits, on all ranks."""
        with torch._C.DisableTorchFunctionSubclass():
            plain = self.as_subclass(torch.Tensor)
            if plain._version != self.cut_version:
                raise StateError(
                    "the gradient has taken the place of these logits",
                    where="logits of a model that is cut over tensor-parallel ranks",
                    fix="read them before backward",
                )
            return self.cut_ranks.gather(plain, self.cut_sizes, "logits")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An engine looks at every output of a model, and at the origin of its gradient. Such looks need no gather.
        if func not in LOOKS:
            args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.gathered, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class CutCausalLoss:
    """Stands in for transformers' ``ForCausalLMLoss`` on one model whose logits are cut: each rank has some of their
    columns.
    """

    def __init__(self, head: LinearLayer, sizes: list[int], ranks: TensorRanks, usual: Any) -> None:
        self.head, self.sizes, self.ranks, self.usual = head, sizes, ranks, usual
        self.is_cut = self.is_tiled = False

    def compute_in_tiles(self, value: bool) -> None:
        """Sets whether another loss replaces this one and calls ``columns`` and ``losses`` for some tokens at a time.
        The model itself then never returns cut logits.
        """
        self.is_tiled = value
        self.head.gather_columns(self.sizes)

    def columns(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's logits [..., columns of this rank] for hidden states [..., width]."""
        return self.head.columns(hidden)

    def losses(self, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
        """The loss of each token, float32 [n]. logits: result of ``columns``, [n, columns of this rank]. targets: int64
        [n].
        """
        return vocab_parallel_cross_entropy(logits, targets, self.sizes, self.ranks, ignore_index=ignore_index)

    def before(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A hook before the forward. The logits stay cut if the model trains with labels."""
        if self.is_tiled:
            return
        self.is_cut = model.training and kwargs.get("labels") is not None and torch.is_grad_enabled()
        self.head.gather_columns(None if self.is_cut else self.sizes)

    def after(self, model: torch.nn.Module, args: Any, output: Any) -> Any:
        if self.is_cut:
            self.is_cut = False
            self.head.gather_columns(self.sizes)
            if isinstance(output, tuple):
                return (output[0], CutLogits.of(output[1], self.sizes, self.ranks), *output[2:])
            output.logits = CutLogits.of(output.logits, self.sizes, self.ranks)
        return output

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """logits [..., tokens, columns of this rank], labels [..., tokens]. The logits of token t predict label t + 1."""
        if not self.is_cut:
            return self.usual(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        flat = logits.reshape(-1, logits.shape[-1])
        losses = self.losses(flat, targets, ignore_index)
        if num_items_in_batch is None:
            return losses.sum() / (targets != ignore_index).sum()
        if torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(losses.device)
        return losses.sum() / num_items_in_batch


def cut_loss(model: torch.nn.Module, head: LinearLayer, ranks: TensorRanks, sizes: list[int]) -> None:
    """Let ``model`` compute its causal loss on cut logits when it trains with labels. head: the layer that gives the
    logits.

    In all other uses (evaluation, generation) the logits are whole. An adapter's model passes attributes on to the
    model that it wraps. Only the wrapped model computes the loss.
    """
    has_own = (module for module in model.modules() if hasattr(type(module), "loss_function"))
    owner = next((module for module in has_own if any(part is head for part in module.modules())), model)
    loss = CutCausalLoss(head, sizes, ranks, owner.loss_function)
    swap_loss(owner, loss)
    # Includes wrappers: some of them call the forward of the wrapped model directly, without its hooks.
    for module in _holders(model, owner):
        module.register_forward_pre_hook(loss.before, with_kwargs=True)
        module.register_forward_hook(loss.after, always_call=False)


def _holders(model: torch.nn.Module, part: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of ``model`` that ``part`` lies in, and ``part``."""
    places = [name.split(".") for name, module in model.named_modules(remove_duplicate=False) if module is part]
    above = dict.fromkeys(".".join(place[:n]) for place in places for n in range(len(place) + 1))
    return list(dict.fromkeys(model.get_submodule(name) for name in above))
