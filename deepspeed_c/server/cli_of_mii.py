"""MII's ``python -m mii.entrypoints.openai_api_server``: its arguments become those of ``deepspeed_c serve``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from deepspeed_c.env import read_env
from deepspeed_c.errors import ConfigError
from deepspeed_c.server.cli import add_cors
from deepspeed_c.server.cli import main as serve

__all__ = ["main"]

# Option of MII's module -> option of this command, where both take one value.
_OF_MII = {
    "host": "--host",
    "port": "--port",
    "max_length": "--max-model-len",
    "tensor_parallel": "--tensor-parallel-size",
    "chat_template": "--chat-template",
    "response_role": "--response-role",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run MII's module with the arguments ``argv``; None: those of the process.

    Requests that name no ``max_tokens`` follow OpenAI's defaults, not MII's. Raises ConfigError for an argument that
    asks for other processes, and as ``deepspeed_c serve``.
    """
    options = _parser_of_mii().parse_args(argv)
    for flag, value, fix in (
        ("--load-balancer", options.load_balancer, "leave it out: this process has the model itself"),
        ("--replica-num", options.replica_num != 1, "start a server for each replica, at ports of their own"),
    ):
        if value:
            raise ConfigError("other processes with the model are not asked", where=flag, fix=fix)
    words = [options.model, "--generation-config", "vllm"]  # MII's server has defaults of its own
    for name, flag in _OF_MII.items():
        if (value := getattr(options, name)) is not None:
            words += [flag, str(value)]
    for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
        words += [f"--{name.replace('_', '-')}", json.dumps(getattr(options, name))]
    words += ["--allow-credentials"] if options.allow_credentials else []
    words += ["--api-key", *options.api_keys] if options.api_keys else []
    if options.ssl:
        env = read_env()
        for name, file in (("keyfile", env.ssl_keyfile), ("certfile", env.ssl_certfile)):
            if not file:
                raise ConfigError(
                    "is not set", where=f"SSL_{name.upper()}", fix="name the file there, or leave --ssl out"
                )
            words += [f"--ssl-{name}", file]
    return serve(words)


def _parser_of_mii() -> argparse.ArgumentParser:
    text = "The server of deepspeed_c, with the arguments of MII's."
    parser = argparse.ArgumentParser("mii.entrypoints.openai_api_server", description=text, allow_abbrev=False)
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of the model; there is no default here")
    parser.add_argument(
        "--deployment-name", metavar="NAME", help="read, without an effect: this process is the deployment"
    )
    parser.add_argument("--load-balancer", metavar="ADDRESS", help="refused")
    parser.add_argument("--max-length", "--max_length", type=int, metavar="N", help="tokens of a prompt and its answer")
    parser.add_argument("--host", default="0.0.0.0", help="default %(default)s")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks; default %(default)s")
    parser.add_argument("--replica-num", type=int, default=1, metavar="N", help="1; more are refused")
    parser.add_argument("--chat-template", metavar="FILE", help="file, or text, of a template")
    parser.add_argument("--response-role", default="assistant", metavar="ROLE", help="default %(default)s")
    parser.add_argument(
        "--api-keys", type=lambda text: text.split(","), metavar="KEYS", help="with commas between them"
    )
    parser.add_argument("--ssl", action="store_true", help="TLS, with the files of SSL_KEYFILE and SSL_CERTFILE")
    add_cors(parser, ["*"])
    return parser
