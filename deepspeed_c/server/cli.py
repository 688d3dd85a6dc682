"""The command ``deepspeed_c serve``."""

from __future__ import annotations

import argparse
import asyncio
import codecs
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_c.command_line import command_parser
from deepspeed_c.config.ragged import RaggedInferenceEngineConfig
from deepspeed_c.env import read_env
from deepspeed_c.errors import ConfigError
from deepspeed_c.inject.folder import config_of
from deepspeed_c.logging import logger
from deepspeed_c.ops.sample import Rules
from deepspeed_c.quantity import parse_bytes
from deepspeed_c.server.defaults import default_rules
from deepspeed_c.server.limits import ServerSettings
from deepspeed_c.server.listen import HttpServer, Listening, bind, check_tls
from deepspeed_c.server.model import ServedModel

__all__ = ["add_cors", "main"]

_WHERE = "deepspeed_c serve"
_DEFAULT_LENGTH = 8192  # of models that name no length
_LOOK_S = 0.1
_DESCRIPTION = """\
Serve the model of a Hugging Face folder to clients of OpenAI's API. docs/serving.md has routes, fields and limits.

  deepspeed_c serve MODEL_DIR --port 8000
  deepspeed_c serve MODEL_DIR --served-model-name chat --max-model-len 4096 --api-key-file keys.txt

SIGTERM lets running requests end, and the exit code is 0 then.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``deepspeed_c serve`` with the arguments ``argv``. Returns 0 after a signal to end.

    With ``--tensor-parallel-size N`` this process becomes the launcher of N ranks, which run the same command.

    Raises ConfigError for an option that makes no sense, a file without keys, an address that is in use and a folder
    without a model; otherwise as ``ServedModel.load``.
    """
    options = _parser().parse_args(argv)
    env = read_env()
    settings = _settings(options)
    length = _length(options)
    _check(options, env.world_size)
    if options.tensor_parallel_size > 1 and env.world_size == 1:
        n_ranks, grace = str(options.tensor_parallel_size), str(options.drain_timeout + 60)
        launcher = ["-m", "deepspeed_c", "--num_procs", n_ranks, "--no_local_rank", "--grace", grace]
        os.execv(sys.executable, [sys.executable, *launcher, "--module", "deepspeed_c", "serve", *argv])
    name = settings.names[0] if settings.names else options.folder
    listening = Listening(options.host, options.port, options.drain_timeout, options.ssl_keyfile, options.ssl_certfile)
    check_tls(listening)
    if env.rank != 0:
        return _follow(_load(options, name, length))
    with bind(listening) as sock:
        model = _load(options, name, length)
        model.start()
        asyncio.run(HttpServer(model, settings, listening).serve([sock]))
    _end(model)
    return 0


def _load(options: argparse.Namespace, name: str, length: int) -> ServedModel:
    n_bytes = _cache_bytes(options)
    return ServedModel.load(options.folder, name, _engine_config(options, length), options.tokenizer, n_bytes)


def _follow(model: ServedModel) -> int:
    """The work of a rank other than 0, until rank 0 ends."""
    for each in (signal.SIGTERM, signal.SIGINT):  # rank 0 gets the signal too, and ends after its requests
        signal.signal(each, signal.SIG_IGN)
    model.start()
    while model.is_alive:
        time.sleep(_LOOK_S)
    has_failed = bool(model.why_dead)
    _end(model)
    return int(has_failed)


def _end(model: ServedModel) -> None:
    model.close()
    model.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


def _settings(options: argparse.Namespace) -> ServerSettings:
    origins, methods, headers = options.allowed_origins, options.allowed_methods, options.allowed_headers
    cors = (
        ("allow_origins", tuple(origins or ())),
        ("allow_methods", tuple(methods or ["*"])),
        ("allow_headers", tuple(headers or ["*"])),
        ("allow_credentials", options.allow_credentials),
    )
    return ServerSettings(
        names=tuple(options.served_model_name or ()),
        keys=(*(options.api_key or ()), *_keys_of(options.api_key_file)),
        shares_prefixes=options.share_prefixes,
        max_body_bytes=options.max_body_bytes,
        max_requests=options.max_requests,
        max_requests_per_key=options.max_requests_per_key,
        max_n=options.max_n,
        max_logprobs=options.max_logprobs,
        stall_s=options.stall_timeout,
        chat_template=_template(options.chat_template),
        response_role=options.response_role,
        rules=_rules(options),
        logs_requests=options.enable_log_requests,
        cors=cors if origins else (),
    )


def _rules(options: argparse.Namespace) -> Rules:
    found = default_rules(options.generation_config, options.folder)
    if found != Rules():
        text = ", ".join(f"{name} {value:g}" for name, value in found._asdict().items())
        logger.info("defaults of requests, by --generation-config %s: %s", options.generation_config, text)
    return found


def _keys_of(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot be read: {error}", where=f"--api-key-file {file}", fix="name a file with a key in each line"
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError("has no keys", where=f"--api-key-file {file}", fix="write a key in each line")
    return keys


def _template(given: str | None) -> str | None:
    """The text of a template: of a file, or itself with escapes, as in vLLM and MII."""
    if given is None:
        return None
    try:
        return Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"is no text: {error}", where="--chat-template", fix="name a template in UTF-8") from error
    except (OSError, ValueError) as error:
        if not any(each in given for each in "{}\n"):  # the name of a file that is not there
            raise ConfigError(
                f"cannot be read: {error}", where=f"--chat-template {given}", fix="name a file, or write the template"
            ) from error
    return codecs.decode(given.encode("ascii", "backslashreplace"), "unicode_escape")


def _length(options: argparse.Namespace) -> int:
    """Tokens of a prompt and its answer."""
    text = config_of(Path(options.folder), _WHERE).get_text_config(decoder=True)
    of_model = getattr(text, "max_position_embeddings", None)
    if options.max_model_len is None:
        return of_model or _DEFAULT_LENGTH
    if of_model is not None and options.max_model_len > of_model:
        raise ConfigError(
            f"is {options.max_model_len}, and the model has {of_model} positions",
            where="--max-model-len",
            fix=f"write at most {of_model}",
        )
    return options.max_model_len


def _check(options: argparse.Namespace, world_size: int) -> None:
    for flag in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "max_body_bytes",
                 "max_requests", "max_requests_per_key", "max_n", "num_gpu_blocks_override"):  # fmt: skip
        value = getattr(options, flag)
        if value is not None and value < 1:
            raise ConfigError(f"is {value}", where=f"--{flag.replace('_', '-')}", fix="write an integer >= 1")
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"is {options.port}", where="--port", fix="write a number from 0 (any free port) to 65535")
    for flag in ("drain_timeout", "stall_timeout"):
        if not 0 <= (value := getattr(options, flag)) < 1e9:
            raise ConfigError(f"is {value:g}", where=f"--{flag.replace('_', '-')}", fix="write seconds, 0 or more")
    if world_size not in (1, options.tensor_parallel_size):
        raise ConfigError(
            f"is {options.tensor_parallel_size}, and {world_size} ranks were started",
            where="--tensor-parallel-size",
            fix=f"write {world_size}",
        )
    _cache_bytes(options)
    if bool(options.ssl_keyfile) != bool(options.ssl_certfile):
        raise ConfigError("one of the two files is missing", where="--ssl-keyfile, --ssl-certfile", fix="name both")


def _cache_bytes(options: argparse.Namespace) -> int | None:
    """Bytes of the keys and values of a rank."""
    text, option = options.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    if text is not None and options.num_gpu_blocks_override is not None:
        raise ConfigError("both are given", where=f"{option}, --num-gpu-blocks-override", fix="leave one of them out")
    return None if text is None else parse_bytes(text, option)


def _engine_config(options: argparse.Namespace, length: int) -> RaggedInferenceEngineConfig:
    manager: dict[str, Any] = {
        "max_context": length,
        "max_ragged_sequence_count": options.max_num_seqs,
        "max_ragged_batch_size": options.max_num_batched_tokens,
        "enable_prefix_caching": options.enable_prefix_caching,
    }
    if options.num_gpu_blocks_override is not None:
        manager["memory_config"] = {"mode": "allocate", "size": options.num_gpu_blocks_override}
    return RaggedInferenceEngineConfig(
        tensor_parallel={"tp_size": options.tensor_parallel_size},
        state_manager=manager,
        quantization={"quantization_mode": options.quantization},
        deterministic=options.deterministic,
    )


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("serve", _DESCRIPTION)
    parser.add_argument("folder", metavar="MODEL_DIR", help="folder with config.json, weights and a tokenizer")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address; 0.0.0.0: all of this machine; default %(default)s"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any free port; default %(default)s")
    parser.add_argument("--served-model-name", nargs="+", metavar="NAME", help="in requests; default: MODEL_DIR")
    parser.add_argument("--tokenizer", default="", metavar="DIR", help="folder of a tokenizer; default: MODEL_DIR")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of a prompt and its answer; default: the model's"
    )
    engine.add_argument(
        "--max-num-seqs", type=int, default=128, metavar="N", help="answers of one step; default %(default)s"
    )
    engine.add_argument(
        "--max-num-batched-tokens", type=int, default=256, metavar="N", help="tokens of one step; default %(default)s"
    )
    engine.add_argument("--quantization", "-q", choices=["int8"], help="weights of 8 bits")
    engine.add_argument(
        "--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help="ranks; default %(default)s"
    )
    engine.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
                        help="find prompts that begin alike in the memory; default: yes")  # fmt: skip
    engine.add_argument("--num-gpu-blocks-override", type=int, metavar="N",
                        help="blocks of 16 tokens, on a CPU too; default: the free memory, without 1 GB")  # fmt: skip
    engine.add_argument("--kv-cache-memory-bytes", metavar="SIZE",
                        help="of keys and values in a rank, such as 4GiB; "
                        "default: the free memory, without 1 GB")  # fmt: skip
    engine.add_argument("--deterministic", action="store_true", help="an answer has the same bits beside any others")
    parser.add_argument("--generation-config", default="auto", metavar="auto|vllm|DIR",
                        help="generation_config.json with defaults of requests: of MODEL_DIR, none, or of a folder; "
                        "default %(default)s")  # fmt: skip
    chats = parser.add_argument_group("chats")
    chats.add_argument("--chat-template", metavar="FILE", help="file, or text, of a template; default: the tokenizer's")
    chats.add_argument("--response-role", default="assistant", metavar="ROLE", help="of answers; default %(default)s")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--api-key", nargs="+", metavar="KEY", help="keys; other processes see them in this command")
    limits.add_argument("--api-key-file", metavar="FILE", help="a key in each line; # begins a comment")
    limits.add_argument("--share-prefixes", action="store_true", help="prompts find those of other keys in the memory")
    limits.add_argument("--max-requests", type=int, default=1024, metavar="N",
                        help="answers that run or wait; more get 429; default %(default)s")  # fmt: skip
    limits.add_argument("--max-requests-per-key", type=int, default=256, metavar="N", help="default %(default)s")
    limits.add_argument(
        "--max-n", type=int, default=16, metavar="N", help="answers of one request; default %(default)s"
    )
    limits.add_argument("--max-logprobs", type=int, default=20, metavar="N", help="per token; default %(default)s")
    limits.add_argument("--max-body-bytes", type=int, default=4 << 20, metavar="N", help="default %(default)s")
    limits.add_argument("--stall-timeout", type=float, default=60.0, metavar="S",
                        help="seconds until a stream that nobody reads is cut off; default %(default)s")  # fmt: skip
    limits.add_argument("--drain-timeout", type=float, default=30.0, metavar="S",
                        help="seconds for running requests after SIGTERM; default %(default)s")  # fmt: skip
    web = parser.add_argument_group("connections")
    web.add_argument("--enable-log-requests", action="store_true", help="log prompts and fields")
    web.add_argument("--ssl-keyfile", metavar="FILE")
    web.add_argument("--ssl-certfile", metavar="FILE")
    add_cors(web, None)
    return parser


def add_cors(parser: Any, default: list[str] | None) -> None:
    """Options for pages of other origins, as vLLM and MII have them."""
    parser.add_argument("--allow-credentials", action="store_true", help="cookies of pages of other origins")
    for name in ("origins", "methods", "headers"):
        parser.add_argument(f"--allowed-{name}", type=_list_of_json, default=default, metavar="JSON",
                            help=f"{name} of pages of other origins: a list in JSON")  # fmt: skip


def _list_of_json(text: str) -> list[str]:
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise ValueError(f"{text!r} is no list of strings")
    return found
