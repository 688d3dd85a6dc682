"""``deepspeed_c [OPTIONS] SCRIPT [ARGS ...]``: parse the command line and start the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepspeed_c.launcher.cluster import launch_on_hosts
from deepspeed_c.launcher.hostfile import allocated_hosts, hostfile_of, is_this_host, select_hosts
from deepspeed_c.launcher.options import Options, parse_options
from deepspeed_c.launcher.plan import find_devices, make_plan
from deepspeed_c.launcher.runners import find_runner

if TYPE_CHECKING:
    from deepspeed_c.autotuning.experiment import Launch

__all__ = ["experiment_launch", "main"]


def main(argv: Sequence[str]) -> int:
    """Start the ranks and wait for them. Returns their exit code. Raises LaunchError if nothing can be started."""
    options = parse_options(argv)
    runner = find_runner(options.launcher)
    if options.autotuning:
        from deepspeed_c.autotuning.tune import tune

        launch = experiment_launch(options, argv[: len(argv) - 1 - len(options.script_args)])
        words = tune(launch, has_accelerator=find_devices() is not None)
        return main(words) if options.autotuning == "run" else 0
    if options.no_ssh:
        return _launch_without_runner(options)
    if _names_hosts(options) or options.force_multi:
        hosts = _hosts(options)
        if options.force_multi or len(hosts) > 1 or not all(map(is_this_host, hosts)):
            return launch_on_hosts(options, hosts, runner)
    if options.elastic_training:
        return _launch_without_runner(options)
    plan = make_plan(options)
    from deepspeed_c.launcher.run import launch

    return launch(plan)


def _launch_without_runner(options: Options) -> int:
    # The modules that start ranks import torch, so help and errors must not need them.
    from deepspeed_c.launcher.without_runner import launch_without_runner

    return launch_without_runner(options, _hosts(options))


def experiment_launch(options: Options, words: Sequence[str]) -> Launch:
    """How each experiment of a search is started. words: the launcher's own, before the script.

    Raises LaunchError if no experiment could start.
    """
    from deepspeed_c.autotuning.experiment import Launch

    hosts = _hosts(options)
    if not _names_hosts(options):
        make_plan(options)
    slots = [len(slots) for slots in hosts.values()]
    return Launch(
        options=_without_autotuning(words),
        script=options.script,
        arguments=options.script_args,
        n_ranks=sum(slots),
        n_local=max(slots),
        is_file=not (options.module or options.no_python),
    )


def _without_autotuning(words: Sequence[str]) -> tuple[str, ...]:
    left: list[str] = []
    for i, word in enumerate(words):
        is_value = i > 0 and words[i - 1] == "--autotuning"
        if not (is_value or word == "--" or word.partition("=")[0] == "--autotuning"):
            left.append(word)
    return tuple(left)


def _names_hosts(options: Options) -> bool:
    return hostfile_of(options) is not None or allocated_hosts(options) is not None


def _hosts(options: Options) -> dict[str, list[int]]:
    """The hosts of a launch and their slots. Devices are looked for only where neither a hostfile nor a batch system
    says how many there are: the agents compare their number with the devices of their hosts.
    """
    devices = None if _names_hosts(options) else find_devices()
    return select_hosts(options, None if devices is None else devices.slots)
