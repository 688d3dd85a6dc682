"""A minimal byte-level GPT for readers: pre-norm blocks, rotary positions, GELU, one tied embedding, and experts in each
second block if there are any."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed_c.moe.layer import MoE

VOCAB = 256  # one token is one byte
# Weight of the loss that spreads tokens over experts, for each layer of experts (Switch Transformer, arXiv 2101.03961).
AUX_WEIGHT = 0.01


def compute_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype to multiply in: the parameter's own, or fp32 on a CPU that has no fast 16-bit products.

    PyTorch's bf16 matmul on a CPU below AVX-512 takes 4 to 40 times as long as its fp32 one. On such a CPU, parameters,
    gradients and communication stay in bf16, and only the products run in fp32.
    """
    if parameter.device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return torch.float32
    return parameter.dtype


class Linear(nn.Linear):
    """``x @ weight.T`` in the dtype of ``x``; the cast is a no-op when the weight has that dtype already."""

    @staticmethod
    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's output; tensor-parallel ranks call this function with their parts of the weight."""
        return F.linear(x, weight.to(x.dtype), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)


class Norm(nn.RMSNorm):
    """Root-mean-square normalisation in the dtype of ``x``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864) for ``x`` of shape (..., time, head width).

    After training on 400 thousand bytes, a model with learned absolute positions is still at the bigram entropy. A
    model with rotary positions is below it.
    """
    T, D = x.shape[-2:]
    frequency = 1000.0 ** (-torch.arange(0, D, 2, device=x.device) / D)
    angle = torch.outer(torch.arange(T, device=x.device), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class MLP(nn.Module):
    """A matrix to four times the width, GELU, and a matrix back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width, bias=False)
        self.down = Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``. If ``mlp`` is a mixture of experts, the result is a pair:
    the sum, and the loss that spreads tokens over the experts.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)
        self.mlp: nn.Module = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        B, T, _ = x.shape
        # The number of heads is derived from the sizes, because a tensor-parallel rank has only some of the heads.
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        if not isinstance(self.mlp, MoE):
            return x + self.mlp(self.norm2(x))
        # The loss is a result, and not an attribute, because recomputation replaces the results of a block only.
        output, l_aux, _ = self.mlp(self.norm2(x))
        return x + output, l_aux


def embed(embedding: nn.Embedding, tokens: torch.Tensor) -> torch.Tensor:
    """Return the vectors of ``tokens``, in the dtype to multiply in."""
    x = embedding(tokens.long())
    return x.to(compute_dtype(x))


def scores(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    """Return the scores of the next byte; the embedding is also the output layer."""
    return F.linear(x, embedding.weight.to(x.dtype))


def cross_entropy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean, in nats per byte, for ``logits`` (batch, time, 256) of ``tokens`` (batch, time)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten().long())


class GPT(nn.Module):
    """``loss = GPT(...)(tokens)`` for ``tokens`` of shape (batch, up to context + 1) and any integer dtype.

    experts: number of experts in each second block; 0: none. ep_size: ranks that hold the experts of a block together.
    k: experts of each token.
    """

    def __init__(
        self, layers: int, width: int, heads: int, context: int, *, experts: int = 0, ep_size: int = 1, k: int = 1
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = Norm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As in GPT-2, the initial weights that add to the residual stream are divided by the root of the number
                # of additions.
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
        for block in self.blocks[1::2] if experts else ():
            # Each expert begins as a copy of the MLP, so the weights do not depend on the number of ranks.
            block.mlp = MoE(width, block.mlp, experts, ep_size, k, capacity_factor=1.25, eval_capacity_factor=2.0)

    def hidden(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (vectors behind the last norm, sum of the losses that spread tokens over experts)."""
        x = embed(self.embedding, tokens)
        l_aux = torch.zeros((), device=x.device)
        for block in self.blocks:
            output = block(x)
            if isinstance(output, tuple):
                x, l_aux = output[0], l_aux + output[1]
            else:
                x = output
        return self.norm(x), l_aux

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next byte, (batch, time, 256), for tokens of shape (batch, time <= context)."""
        return scores(self.embedding, self.hidden(tokens)[0])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy, in nats per byte, of predicting every byte from the bytes before it. In
        training the loss that spreads tokens over experts is added.
        """
        x, l_aux = self.hidden(tokens[:, :-1])
        loss = cross_entropy(scores(self.embedding, x), tokens[:, 1:])
        return loss + AUX_WEIGHT * l_aux if self.training else loss

    @torch.no_grad()
    def sample(self, prompt: bytes, n_bytes: int, temperature: float, seed: int) -> bytes:
        """Return ``prompt`` continued by ``n_bytes`` bytes drawn at ``temperature``."""
        device = self.embedding.weight.device
        random = torch.Generator(device).manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(n_bytes):
            scores = self.logits(tokens[:, -self.context :])[0, -1].float() / temperature
            token = torch.multinomial(scores.softmax(-1), 1, generator=random)
            tokens = torch.cat([tokens, token[None]], dim=1)
        return bytes(tokens[0].tolist())
