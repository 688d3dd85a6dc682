"""The command ``deepspeed_c compile show``: what becomes of a script's model when it is compiled with deepcompile."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepspeed_c.command_line import command_parser
from deepspeed_c.compile.report import CompileReport
from deepspeed_c.config.source import CONFIG_ARGUMENTS, read_source, source_of_engine
from deepspeed_c.errors import ConfigError, ModelError
from deepspeed_c.script import StopScript, line_of, run_script, script_index

__all__ = ["main"]

_DESCRIPTION = """\
Runs a training script for a few steps as one rank, compiled with deepcompile, and prints what became of each graph pass
by pass, what stays eager and why, and what was compiled again.

  deepspeed_c compile show train.py --lr 0.1                              with what train.py passes to initialize
  deepspeed_c compile show --config ds.json --steps 5 --json train.py     with another configuration
"""
_FIX = "make the script train an engine of deepspeed_c.initialize on its main path"


class _ShownRun:
    """A run of the script up to the first forward after ``n_steps`` steps of its first engine."""

    def __init__(self, n_steps: int, config: str | None, backend: str) -> None:
        self._n_steps, self._config, self._backend = n_steps, config, backend
        self._engine: Any = None
        self._first: int | None = None  # the engine's step at its first forward
        self.report: CompileReport | None = None

    def initialize(self, original: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Stands in for ``deepspeed_c.initialize``: turns deepcompile on for the first engine."""
        if self._engine is not None:
            return original(**given)
        source = source_of_engine(given) if self._config is None else read_source(self._config)
        if source is None:
            return original(**given)
        config = source.keys
        section = config.get("compile", {})
        if isinstance(section, Mapping):
            config["compile"] = {**section, "deepcompile": True}
        found = original(
            **{key: value for key, value in given.items() if key not in CONFIG_ARGUMENTS} | {"config": config}
        )
        self._engine = found[0]
        if self._engine.zero_optimization_stage() == 0:
            raise ConfigError(
                "without ZeRO nothing is put into compiled graphs",
                where="zero_optimization.stage",
                fix="set it to 1, 2 or 3",
            )
        self._engine.register_forward_pre_hook(self._before_forward)
        return found

    @property
    def n_done(self) -> int:
        return 0 if self._first is None else self._engine.global_steps - self._first

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _before_forward(self, *_: Any) -> None:
        if self._first is None:
            self._first = self._engine.global_steps
        if not self._engine.is_compiled:
            self._engine.compile(backend=self._backend)
        # The engine has no report any more when it is closed.
        self.report = self._engine.get_compile_report()
        if self.n_done >= self._n_steps:
            raise StopScript("enough steps")


def main(argv: Sequence[str]) -> int:
    """Run ``deepspeed_c compile`` with the arguments ``argv``. Returns 0 if a report was printed, also of a script that
    ends early.

    Raises ModelError for a script that is not there, has no engine, or fails; the report up to there is printed before.
    Raises ConfigError for a wrong option or configuration.
    """
    parser = _parser()
    n_own = 1 + script_index(parser, argv[1:])
    options = parser.parse_args(argv[:n_own])
    script, *arguments = [*argv[n_own:]] or [""]
    if not script:
        raise ConfigError("no script was given", where="deepspeed_c compile show", fix="give SCRIPT [ARGS ...]")
    if options.steps < 1:
        raise ConfigError(f"{options.steps} is not a number of steps", where="--steps", fix="write an integer >= 1")
    run = _ShownRun(options.steps, options.config, options.backend)
    ended, failure = "", None
    # What the script prints does not mix with JSON.
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        try:
            run_script(script, arguments, 1, _free_port(), run.initialize)
            ended = "the script ended"
        except StopScript:
            pass
        except SystemExit as stop:
            ended = f"the script ended with exit code {stop.code!r}"
        except Exception as error:  # noqa: BLE001  (whatever the user's script raises)
            failure = error
            ended = f"the script failed with {type(error).__name__}"
    if run.report is not None:
        _print(run.report, script, run.n_done, ended, options)
    run.close()
    if failure is not None:
        if getattr(failure, "where", None) is not None:
            raise failure  # errors of this package need no further explanation
        when = f"after {run.n_done} steps" if run.has_engine else "before it called deepspeed_c.initialize"
        raise ModelError(
            f"the script failed {when}: {type(failure).__name__}: {failure}",
            where=line_of(failure, script),
            fix="run it without this command: it fails in the same way as one rank",
        ) from failure
    if run.report is None:
        what = "run a forward of its engine" if run.has_engine else "call deepspeed_c.initialize"
        raise ModelError(f"{ended} and did not {what}", where=script, fix=_FIX)
    return 0


def _print(report: CompileReport, script: str, n_steps: int, ended: str, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"script": script, "steps": n_steps, "ended": ended or None, **report.as_dict()}))
        return
    why = f"; {ended}" if ended else ""
    print(f"{script}: {n_steps} step{'' if n_steps == 1 else 's'} of {options.steps} as one rank{why}\n\n{report}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("compile", _DESCRIPTION, usage="deepspeed_c compile show [OPTIONS] SCRIPT [ARGS ...]")
    parser.add_argument("action", choices=("show",), help="what to do")
    parser.add_argument("--config", metavar="FILE", help="configuration; default: what the script passes to initialize")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="steps of the optimizer to run; default 2")
    parser.add_argument(
        "--backend",
        default="inductor",
        help="compiler of the graphs, if the script calls no engine.compile; default inductor",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; what the script prints goes to standard error")
    return parser
