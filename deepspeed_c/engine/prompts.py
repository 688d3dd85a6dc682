"""Checks of the prompts of a ``generate``, before any rank sends anything."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_c.errors import StateError

__all__ = [
    "are_tokens",
    "check_length",
    "check_padding",
    "check_words",
    "find_tokens",
    "has_encoder",
    "n_tokens_of",
    "prompts_of",
    "setting_of",
]


def prompts_of(args: tuple, kwargs: dict[str, Any]) -> Any:
    """The prompts among the arguments of ``generate``, as transformers orders and names them."""
    return args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))


def n_tokens_of(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[int, int]:
    """The tokens of the prompts, and the most new tokens that ``generate`` is asked for, at least 1.

    A prompt is integers [batch, tokens] or embeddings [batch, tokens, width]; anything else (features of sound) counts
    as 0 tokens.
    """
    prompts, embeds = prompts_of(args, kwargs), kwargs.get("inputs_embeds")
    n_prompt = prompts.shape[1] if are_tokens(prompts) else 0
    if not n_prompt and torch.is_tensor(embeds) and embeds.ndim == 3:
        n_prompt = embeds.shape[1]
    n_new = setting_of(model, kwargs, "max_new_tokens")
    if n_new is None:
        n_first = 1 if has_encoder(model) else n_prompt  # a decoder behind an encoder begins with one token
        n_new = (setting_of(model, kwargs, "max_length") or 0) - n_first
    return n_prompt, max(n_new, 1)


def has_encoder(model: torch.nn.Module) -> bool:
    """Whether an encoder of its own reads the prompts."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def check_length(
    model: torch.nn.Module, args: tuple, kwargs: dict[str, Any], limit: int | None, what: str, fix: str
) -> None:
    """Raises StateError if a prompt and its new tokens are more than ``limit``. In a model with an encoder, each of
    both counts alone. ``what``: the limit, for the message.
    """
    if limit is None:
        return
    n_prompt, n_new = n_tokens_of(model, args, kwargs)
    if n_prompt > limit:
        raise StateError(f"a prompt of {n_prompt} tokens is longer than {what}", where="generate", fix=fix)
    n_longest = n_new if has_encoder(model) else n_prompt + n_new
    if n_longest > limit:
        raise StateError(
            f"a prompt of {n_prompt} tokens and {n_new} new ones are longer than {what}", where="generate", fix=fix
        )


def check_words(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises StateError if a prompt has an id that is no word of the model. Ids that stand for pictures or sounds are
    not looked up. Models with a ``generate`` of their own are not checked.
    """
    prompts, config = prompts_of(args, kwargs), getattr(model, "config", None)
    is_known = getattr(type(model).generate, "__module__", "").startswith("transformers.")
    if not is_known or config is None or not are_tokens(prompts) or not prompts.numel():
        return
    words = getattr(model.get_input_embeddings(), "num_embeddings", 0)
    n_words = max(words, getattr(config.get_text_config(), "vocab_size", None) or 0)
    least, most = (int(bound) for bound in torch.aminmax(prompts))
    if n_words and (least < 0 or most >= n_words):
        special = [n for name, n in vars(config).items() if name.endswith(("token_id", "token_index"))]
        is_wrong = (prompts < 0) | (prompts >= n_words)
        for n in special:
            if isinstance(n, int):
                is_wrong &= prompts != n
        if is_wrong.any():
            row, place = is_wrong.nonzero()[0].tolist()
            raise StateError(
                f"token {place} of prompt {row} is {int(prompts[row, place])}, and the model has {n_words} words",
                where="generate",
                fix="give ids from 0 up to that number; the tokenizer must be the model's own",
            )


def check_padding(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises StateError if padding stands after or within a prompt: new tokens would follow the padding.

    ``attention_mask`` [batch, tokens] is 0 where there is padding. Without a mask, pad tokens at the end are padding,
    unless the pad token also ends sequences; transformers infers its mask in the same way. Token 0 is a pad token like
    any other. Prompts of a model with an encoder may be padded anywhere.
    """
    is_token = _mask_of(model, args, kwargs)
    if is_token is None:
        return
    ends = (is_token[:, :-1] & ~is_token[:, 1:]).nonzero()
    if not len(ends):
        return
    row, place = ends[0].tolist()
    n_places = is_token.shape[1]
    what = f"the mask of prompt {row} has a hole after place {place} of {n_places}"
    if not is_token[row, -1]:
        what = f"prompt {row} is padded on the right, after place {place} of {n_places}"
    raise StateError(
        what,
        where="generate",
        fix='pad prompts on the left (tokenizer.padding_side = "left"), so that each row of attention_mask is 0 and then 1',
    )


def _mask_of(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Where prompts have tokens, as bool [batch, tokens]. None if nothing says so."""
    if has_encoder(model):
        return None
    mask = kwargs.get("attention_mask")
    if mask is not None:
        return mask != 0 if torch.is_tensor(mask) and mask.ndim == 2 else None
    prompts, pad = prompts_of(args, kwargs), _pad_token(model, kwargs)
    if not are_tokens(prompts) or pad is None:
        return None
    return (prompts == pad).long().flip(1).cumprod(1).flip(1) == 0


def find_tokens(model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """Where prompts [batch, tokens] have tokens, as bool [batch, tokens].

    The mask says so. Without a mask, pad tokens are padding, unless they also end sequences. Transformers infers its
    mask in the same way.
    """
    mask, prompts = kwargs.get("attention_mask"), prompts_of(args, kwargs)
    if mask is not None:
        return mask != 0
    pad = _pad_token(model, kwargs)
    return torch.ones_like(prompts, dtype=torch.bool) if pad is None else prompts != pad


def _pad_token(model: torch.nn.Module, kwargs: dict[str, Any]) -> int | None:
    """The token that is nothing but padding; None if there is no such token."""
    pad, ends = setting_of(model, kwargs, "pad_token_id"), setting_of(model, kwargs, "eos_token_id")
    return None if pad in (ends if isinstance(ends, (list, tuple)) else [ends]) else pad


def setting_of(model: torch.nn.Module, kwargs: dict[str, Any], name: str) -> Any:
    """A setting of one ``generate``: of its arguments, of its generation_config, else of the model."""
    if name in kwargs:
        return kwargs[name]
    own = getattr(kwargs.get("generation_config"), name, None)
    return own if own is not None else getattr(getattr(model, "generation_config", None), name, None)


def are_tokens(prompts: Any) -> bool:
    """Whether they are token numbers [batch, tokens]."""
    return torch.is_tensor(prompts) and prompts.ndim == 2 and not prompts.is_floating_point()
