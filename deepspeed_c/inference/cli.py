"""The command ``deepspeed_c generate``: text by the model of a Hugging Face folder, on one rank or on several."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from deepspeed_c.command_line import command_parser
from deepspeed_c.compression.packed_folder import make_packed
from deepspeed_c.env import read_env
from deepspeed_c.errors import ConfigError, ModelError, UnsupportedConfigError
from deepspeed_c.inference.engine import init_inference
from deepspeed_c.inference.limits import check_heads
from deepspeed_c.inject.folder import config_of, model_on_meta, tokenizer_of, transformers_for

__all__ = ["main"]

_WHERE = "deepspeed_c generate"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
_DEFAULT_TOKENS = 64
_DESCRIPTION = """\
Continue a prompt by the model of a Hugging Face folder. Only the continuation is printed, by rank 0.

  deepspeed_c generate MODEL_DIR --prompt "Once upon a time"
  deepspeed_c generate MODEL_DIR --prompt "Once" --tp 2 --dtype bf16 --kernels     the model is cut over two ranks
  deepspeed_c generate MODEL_DIR --ids 1,15043,3186                                a folder without a tokenizer
"""


def main(argv: Sequence[str]) -> int:
    """Run ``deepspeed_c generate`` with the arguments ``argv``. Returns 0 when the text was printed.

    With ``--tp N`` this process becomes the launcher of N ranks, which run the same command.

    Raises ConfigError for numbers that make no sense, a folder without a model or without a tokenizer, and prompts that
    are too long; ModelError for a model that transformers cannot build or that does not generate; FeatureError where
    transformers is missing.
    """
    options = _parser().parse_args(argv)
    env = read_env()
    _check(options, env.world_size)
    folder = Path(options.folder)
    config = config_of(folder, _WHERE)
    check_heads(config, options.tp)
    packed = getattr(config, "quantization_config", None)
    if packed is not None and options.tp > 1:
        raise UnsupportedConfigError(
            "layers that are packed are not cut over ranks",
            where="--tp",
            fix="write --tp 1, or name a folder of floats",
        )
    tokenizer = None if options.ids is not None else tokenizer_of(folder, _WHERE, "or pass token ids: --ids 1,2,3")
    ids = _ids(options.ids) if tokenizer is None else tokenizer(options.prompt)["input_ids"]
    n_new = _new_tokens(ids, config.get_text_config(decoder=True), options.max_new_tokens)
    streams = sys.stdout.isatty() if options.stream is None else options.stream
    if options.tp > 1 and env.world_size == 1:
        # Ranks write to pipes, so this process says whether a terminal reads them.
        again = ["generate", *argv, "--stream" if streams else "--no-stream"]
        launcher = ["-m", "deepspeed_c", "--num_procs", str(options.tp), "--no_local_rank", "--module", "deepspeed_c"]
        os.execv(sys.executable, [sys.executable, *launcher, *again])
    model = model_on_meta(folder, _WHERE)
    if packed is not None:
        make_packed(model, packed, str(folder / "config.json"))
    if not callable(getattr(model, "generate", None)):
        raise ModelError(
            f"{type(model).__name__} does not generate",
            where=str(folder / "config.json"),
            fix='name a class that generates in "architectures", such as LlamaForCausalLM',
        )
    if options.seed is not None:
        torch.manual_seed(options.seed)
    engine = init_inference(
        model,
        checkpoint=str(folder),
        dtype=_DTYPES[options.dtype] if options.dtype is not None else _own_dtype(config),
        tensor_parallel={"tp_size": options.tp},
        replace_with_kernel_inject=options.kernels,
        max_out_tokens=len(ids) + n_new,
    )
    with closing(_Printer(tokenizer, is_silent=env.rank != 0, streams=streams)) as printer:
        prompt = torch.tensor([ids], device=engine.device)
        how = _generation_config(folder, model)
        how.update(max_new_tokens=n_new, **_sampling(options))
        output = engine.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), generation_config=how, streamer=printer
        )
        n_skipped = 0 if config.is_encoder_decoder else len(ids)
        printer.finish(output[0, n_skipped:].tolist())
    engine.destroy()
    return 0


class _Printer:
    """Prints tokens on rank 0: as they come, if it streams, or all at the end. All ranks have one, so that their calls
    of ``generate`` are alike.
    """

    def __init__(self, tokenizer: Any, *, is_silent: bool, streams: bool) -> None:
        """tokenizer: None to print ids."""
        self._tokenizer, self._is_silent, self._streams = tokenizer, is_silent, streams
        self._saw_prompt, self._ids, self._printed = False, list[int](), ""

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate`` with the prompt, and then with each token."""
        if self._saw_prompt and self._streams:
            self._ids += value.flatten().tolist()
            text = self._text(self._ids)
            # A token may end within a character, which the next token completes.
            if not text.endswith("\ufffd"):
                self._write(text)
        self._saw_prompt = True

    def end(self) -> None:
        """Called by ``generate`` after the last token."""

    def finish(self, ids: list[int]) -> None:
        """Print the rest of ``ids``, the new tokens."""
        self._write(self._text(ids))

    def close(self) -> None:
        """End the line."""
        if not self._is_silent:
            print(flush=True)

    def _text(self, ids: list[int]) -> str:
        if self._tokenizer is None:
            return ",".join(map(str, ids))
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _write(self, text: str) -> None:
        if not self._is_silent:
            print(text[len(self._printed) :], end="", flush=True)
        self._printed = text


def _check(options: argparse.Namespace, world_size: int) -> None:
    if options.tp < 1:
        raise ConfigError(f"{options.tp} is no number of ranks", where="--tp", fix="write an integer >= 1")
    if world_size not in (1, options.tp):
        raise ConfigError(
            f"is {options.tp}, and {world_size} ranks were started", where="--tp", fix=f"write --tp {world_size}"
        )
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise ConfigError(
            f"{options.max_new_tokens} is no number of tokens", where="--max-new-tokens", fix="write an integer >= 1"
        )
    if (options.prompt is None) == (options.ids is None):
        raise ConfigError(
            "neither --prompt nor --ids was given" if options.ids is None else "both --prompt and --ids were given",
            where=_WHERE,
            fix="give one of them",
        )
    for name, low, high in (("temperature", 0, float("inf")), ("top_p", 0, 1), ("top_k", 0, float("inf"))):
        value = getattr(options, name)
        flag = f"--{name.replace('_', '-')}"
        if value is not None and not options.sample:
            raise ConfigError("has no effect without --sample", where=flag, fix="add --sample, or leave it out")
        if value is not None and not low < value <= high:
            raise ConfigError(f"{value:g} is not in ({low}, {high}]", where=flag, fix="write a number in that range")


def _ids(text: str) -> list[int]:
    words = text.split(",")
    wrong = next((word for word in words if not word.strip().isdecimal()), None)
    if wrong is not None:
        raise ConfigError(f"{wrong!r} is no token id", where="--ids", fix="write numbers and commas, such as 1,2,3")
    return [int(word) for word in words]


def _new_tokens(ids: list[int], config: Any, wanted: int | None) -> int:
    """The number of tokens to generate. Raises ConfigError for a prompt that the model cannot read."""
    if not ids:
        raise ConfigError("the prompt has no tokens", where="--prompt", fix="write a prompt of one word or more")
    if max(ids) >= config.vocab_size:
        raise ConfigError(
            f"token {max(ids)} is not in the model's vocabulary of {config.vocab_size}",
            where=_WHERE,
            fix="give ids below that number, or the tokenizer that belongs to the model",
        )
    positions = getattr(config, "max_position_embeddings", None)
    room = _DEFAULT_TOKENS if positions is None else positions - len(ids)
    n_new = min(_DEFAULT_TOKENS, max(room, 1)) if wanted is None else wanted
    if positions is not None and n_new > room:
        raise ConfigError(
            f"the prompt has {len(ids)} token(s); with {n_new} new ones they exceed the model's {positions} positions",
            where=_WHERE,
            fix="shorten the prompt, or give a smaller --max-new-tokens",
        )
    return n_new


def _own_dtype(config: Any) -> torch.dtype:
    return config.dtype if config.dtype in _DTYPES.values() else torch.float32


def _generation_config(folder: Path, model: Any) -> Any:
    if (folder / "generation_config.json").is_file():
        return transformers_for(_WHERE).GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.generation_config


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    if not options.sample:
        return {"do_sample": False, "num_beams": 1}
    given = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    return {"do_sample": True, "num_beams": 1, **{name: value for name, value in given.items() if value is not None}}


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("generate", _DESCRIPTION)
    parser.add_argument("folder", metavar="MODEL_DIR", help="folder with config.json, weights and a tokenizer")
    parser.add_argument("--prompt", metavar="TEXT", help="text to continue")
    parser.add_argument("--ids", metavar="1,2,3", help="token ids to continue, without a tokenizer; ids are printed")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 64, or what the positions allow")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks; default %(default)s")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights; default: as config.json says")
    parser.add_argument("--kernels", action="store_true", help="run the package's kernels where they fit the model")
    parser.add_argument("--sample", action="store_true", help="draw tokens; default: the likeliest token")
    parser.add_argument("--temperature", type=float, metavar="T", help="with --sample")
    parser.add_argument("--top-k", type=int, metavar="K", help="with --sample")
    parser.add_argument("--top-p", type=float, metavar="P", help="with --sample")
    parser.add_argument("--seed", type=int, metavar="N", help="of the random numbers of --sample")
    parser.add_argument(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print tokens as they come; default: if stdout is a terminal",
    )
    return parser
