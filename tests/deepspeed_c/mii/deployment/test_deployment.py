"""Deployments: answers, streams, errors, and what happens when a client, a replica or the deployment's process dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deepspeed_c import mii
from deepspeed_c.errors import (
    CommError,
    ConfigError,
    DeepSpeedCError,
    FeatureError,
    LaunchError,
    ModelError,
    StateError,
)
from deepspeed_c.mii.constants import GenerationFinishReason
from deepspeed_c.mii.deployment import frames, registry
from deepspeed_c.mii.deployment.start import start
from deepspeed_c.mii.errors import DeploymentNotFoundError
from tests import waits
from tests.deepspeed_c.mii.deployments import FAKE, config_of, deployed, gone, supervisor_of, tree_of, until

FOLDER = Path(__file__).resolve().parents[4]
# A busy machine takes far less; a wait without an end would take far more.
SOON_SECONDS = 30.0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MII_CACHE_PATH", str(tmp_path))
    monkeypatch.chdir(FOLDER)  # the deployment's processes import the fake service
    return tmp_path / "deployments"


def texts(responses):
    return [response.generated_text for response in responses]


def in_threads(*calls):
    """Runs the calls at once. Returns their results, or their exceptions."""
    found = [None] * len(calls)

    def run(i, call):
        try:
            found[i] = call()
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            found[i] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        waits.joined(thread)
    return found


def error_in(call, kind=DeepSpeedCError):
    with pytest.raises(kind) as found:
        call()
    return found.value


def test_answers_streams_and_errors_of_one_deployment(cache):
    with deployed() as client:
        # Several prompts keep their order.
        prompts = [f"prompt {i}" for i in range(7)]
        responses = client.generate(prompts)
        assert texts(responses) == [f"<{prompt}>" for prompt in prompts]
        assert texts(client("one")) == ["<one>"]
        first = responses[0]
        assert (first.prompt_length, first.generated_length) == (8, 2)
        assert first.finish_reason is GenerationFinishReason.STOP

        # A stream's pieces make up the whole answer.
        pieces = []
        assert client.generate("a b  \N{GRINNING FACE} c", streaming_fn=pieces.extend) is None
        assert "".join(texts(pieces)) == texts(client.generate("a b  \N{GRINNING FACE} c"))[0]
        reasons = [piece.finish_reason for piece in pieces]
        none = GenerationFinishReason.NONE
        assert reasons == [none] * (len(pieces) - 1) + [GenerationFinishReason.STOP] and len(pieces) == 5

        # Each mistake is an error of its class, and the same good request gives the same answer before and after.
        mistakes = {
            "unknown": (lambda: client("x", unknown=1), ConfigError, "unknown: is unknown\nFix: give one of stream"),
            "nan": (lambda: client("x", temperature=float("nan")), ConfigError, "temperature: is nan"),
            "object": (lambda: client("x", temperature=object()), ConfigError, "temperature: cannot be sent"),
            "no prompts": (lambda: client([]), ConfigError, "prompts: is no list of strings"),
            "a number": (lambda: client([1]), ConfigError, "prompts: is no list of strings"),
            "too long": (lambda: client("x" * 10_000_000), ConfigError, "prompts: .* 10000028 .* limit is 10000000"),
            "two": (lambda: client(["a", "b"], streaming_fn=print), ConfigError, "prompts: has 2"),
            "no streaming_fn": (lambda: client("a", stream=True), ConfigError, "stream: .*nothing takes the pieces"),
            "a defect": (lambda: client(["x", "break"]), DeepSpeedCError, "ZeroDivisionError: a defect"),
        }
        for call, kind, message in mistakes.values():
            with pytest.raises(kind, match=message) as found:
                call()
            assert type(found.value) is kind
            assert texts(client(prompts)) == texts(responses)

        # A long prompt and a long answer.
        longest = "x" * (10_000_000 - 100)
        assert texts(client(longest)) == [f"<{longest}>"]
        assert texts(client("big 20000000")) == ["x" * 20_000_000]

        # An exception of the caller's function ends its request alone.
        def fail(pieces):
            raise ZeroDivisionError("of the caller")

        error_in(lambda: client("a b c", streaming_fn=fail), ZeroDivisionError)
        assert texts(client("one")) == ["<one>"]

        # Other clients find it by its name.
        assert texts(mii.client("fake")("one")) == ["<one>"]
        assert "did you mean 'fake'" in str(error_in(lambda: mii.client("fakee"), DeploymentNotFoundError))
        taken = error_in(lambda: start(config_of("fake"), f"{FAKE}:build"), StateError)
        assert "runs already" in str(taken)
        assert texts(client("one")) == ["<one>"]
        assert len(list(cache.iterdir())) == 1
    assert list(cache.iterdir()) == []
    assert "does not run" in str(error_in(lambda: client("one"), CommError))
    assert "does not run" in str(error_in(client.terminate_server, CommError))
    error_in(lambda: mii.client("fake"), DeploymentNotFoundError)


def test_broken_messages_end_their_connection_alone():
    broken = {
        b"\0\0\0\1{": "is no JSON",
        b"\xff\xff\xff\xff": "the limit is 65536",
        frames.pack(b"{}"): "is unknown",
        frames.pack(b'{"replica": 7}'): "is unknown",
        frames.pack(b'{"replica": 0}'): "is connected already",
        frames.pack(b'{"generate": true}') + b"\x7f\0\0\0": "the limit is 10000000",
        frames.pack(b'{"generate": true}') + frames.pack(b"[]"): "not an object",
        frames.pack(b'{"generate": true}') + frames.pack(b"{}"): "prompts: is no list",
        frames.pack(b'{"generate": true}') + frames.pack(b'{"prompts": ["a"], "fields": 1}'): "fields: is a int",
    }
    with deployed() as client:
        for sent, message in broken.items():
            with contextlib.closing(registry.connect("fake")) as connection:
                connection.sendall(sent)
                body = frames.receive(connection)
                assert body is not None, sent
                error = frames.parse(body)["error"]
                assert message in f"{error['where']}: {error['what']}", (sent, error)
        for sent in (b"", b"\0", frames.pack(b'{"generate": true}'), frames.pack(b'{"generate": true}') + b"\0\0\1\0a"):
            with contextlib.closing(registry.connect("fake")) as connection:
                connection.sendall(sent)
        assert texts(client("one")) == ["<one>"]


def test_two_clients_at_once_and_a_request_to_the_replica_with_the_fewest():
    with deployed(n_replicas=2) as client:
        found = in_threads(*(lambda i=i: texts(client([f"{i} {j}" for j in range(5)], pause=0.001)) for i in range(8)))
        assert found == [[f"<{i} {j}>" for j in range(5)] for i in range(8)]
        # A request that hangs makes its replica the busier one, so the next requests go to the other replica.
        with contextlib.closing(registry.connect("fake")) as connection:
            ask = frames.pack(b'{"generate": true}') + frames.pack(b'{"prompts": ["hang"], "fields": {}}')
            connection.sendall(ask)
            until(lambda: client("count")[0].generated_text.endswith("/0"), "the request has come")
            free = set(texts(client("who") + client("who") + client("who")))
            assert len(free) == 1
            with contextlib.closing(registry.connect("fake")) as second:
                second.sendall(ask)
                both = lambda: {client("count")[0].generated_text.split("/")[2]}
                until(lambda: both() == {"1"}, "both replicas have one that hangs")
        pids = set()
        until(lambda: client("count")[0].generated_text.endswith("/0"), "they have been cancelled")
        pids.update(texts(client("who")))
        assert pids | free <= {str(pid) for pid in tree_of(supervisor_of("fake"))}


def test_many_requests_a_third_cancelled_leave_threads_and_files_as_they_were():
    class Enough(Exception):
        pass

    def stop(pieces):
        raise Enough

    with deployed() as client:
        texts(client("warm up"))
        supervisor = supervisor_of("fake")

        def level():
            n_tasks = len(os.listdir(f"/proc/{supervisor}/task"))
            n_files = len(os.listdir(f"/proc/{supervisor}/fd"))
            return client("count")[0].generated_text, n_tasks, n_files

        before = level()
        n_threads, n_files = threading.active_count(), len(os.listdir("/proc/self/fd"))

        def run(first):
            n_right = 0
            for i in range(first, 200, 4):
                if i % 3:
                    n_right += texts(client(f"number {i}")) == [f"<number {i}>"]
                else:
                    error_in(lambda i=i: client(f"a b {i}", streaming_fn=stop), Enough)
                    n_right += 1
            return n_right

        assert in_threads(*(lambda first=first: run(first) for first in range(4))) == [50] * 4
        until(lambda: level() == before, f"{before} again, not {level()}")
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (n_threads, n_files)


KILLED_CLIENT = """
from deepspeed_c import mii
client = mii.client("fake")
client.generate("a hang", streaming_fn=lambda pieces: print("begun", flush=True))
client.generate("hang")
"""


def test_a_killed_client_leaves_nothing_in_the_engine():
    with deployed() as client:
        killed = subprocess.Popen([sys.executable, "-c", KILLED_CLIENT], stdout=subprocess.PIPE, text=True)
        with killed:
            assert waits.first_line(killed) == "begun\n"
            until(lambda: client("count")[0].generated_text.endswith("/1"), "its request has come")
            killed.kill()
            assert waits.ended(killed) == -signal.SIGKILL
        until(lambda: client("count")[0].generated_text.endswith("/0"), "its request was cancelled")


def test_a_killed_deployment_is_an_error_at_once_and_leaves_nothing(cache):
    with deployed(n_replicas=2) as client:
        pid = supervisor_of("fake")
        pids = tree_of(pid)
        assert len(pids) == 3
        begun = threading.Event()

        def kill():
            waits.set_within(begun)
            os.kill(pid, signal.SIGKILL)
            return time.monotonic()

        def ask(call):
            error = error_in(call, CommError)
            return time.monotonic(), str(error)

        stream = lambda: client("a " * 100_000, streaming_fn=lambda pieces: begun.set(), pause=0.001)
        killed_at, *errors = in_threads(kill, lambda: ask(stream), lambda: ask(lambda: client("hang")))
        for at, message in errors:
            assert "it has ended" in message
            assert at - killed_at < SOON_SECONDS
        error_in(lambda: client("one"), CommError)  # while the process is being taken apart, connections may succeed
        for each in pids:
            gone(each)
        assert list(cache.iterdir()) == []
        error_in(lambda: mii.client("fake"), DeploymentNotFoundError)
    with deployed() as client:
        assert texts(client("one")) == ["<one>"]


def test_a_replica_that_dies_fails_its_requests_alone(cache):
    with deployed(n_replicas=2) as client:
        pids = tree_of(supervisor_of("fake"))
        with contextlib.closing(registry.connect("fake")) as connection:
            connection.sendall(frames.pack(b'{"generate": true}') + frames.pack(b'{"prompts": ["hang"], "fields": {}}'))
            until(lambda: client("count")[0].generated_text.endswith("/0"), "the request has come")
            message = str(error_in(lambda: client(["a", "die"]), CommError))
            assert "it ended with exit code 9" in message and "the last words of a replica" in message
            connection.settimeout(0.05)
            with pytest.raises(TimeoutError):
                frames.receive(connection)  # the other replica still works on it
        for _ in range(3):
            assert texts(client("one")) == ["<one>"]
        # The last one ends the deployment.
        message = str(error_in(lambda: client("die"), CommError))
        assert "it ended with exit code 9" in message
        for pid in pids:
            gone(pid)
        assert list(cache.iterdir()) == []


def test_a_killed_replica_says_so():
    with deployed() as client:
        _, replica = tree_of(supervisor_of("fake"))
        begun = threading.Event()

        def kill():
            waits.set_within(begun)
            os.kill(replica, signal.SIGKILL)

        stream = lambda: client("a " * 100_000, streaming_fn=lambda pieces: begun.set(), pause=0.001)
        _, error = in_threads(kill, stream)
        assert isinstance(error, CommError) and "was ended by SIGKILL" in str(error), error


def test_terminate_ends_running_requests_and_frees_the_name(cache):
    with deployed() as client:
        pids = tree_of(supervisor_of("fake"))

        def terminate():
            until(lambda: client("count")[0].generated_text.endswith("/1"), "the request has come")
            asyncio.run(client.terminate_async())
            return [pid for pid in pids[1:] if pid in tree_of(os.getpid())], list(cache.iterdir())

        error, left = in_threads(lambda: client("hang"), terminate)
        assert left == ([], [])
        assert isinstance(error, StateError) and "the engine was closed" in str(error), error
        with deployed() as again:
            assert texts(again("one")) == ["<one>"]


def test_a_stuck_engine_is_ended_by_force():
    with deployed(factory="build_stuck") as client:
        pids = tree_of(supervisor_of("fake"))
        os.kill(pids[0], signal.SIGKILL)
        for pid in pids:
            gone(pid)
        error_in(lambda: client("one"), CommError)


@pytest.mark.parametrize(
    ("factory", "kind", "message"),
    [
        ("build_refused", ModelError, "model: has no generation\nFix: give another model"),
        (
            "build_broken",
            LaunchError,
            "exit code 1 before it was ready(.|\n)*ZeroDivisionError: a defect of the factory",
        ),
        ("absent", LaunchError, "exit code 1 before it was ready(.|\n)*has no attribute 'absent'"),
    ],
)
def test_a_failed_start_says_why_and_leaves_nothing(cache, factory, kind, message):
    with pytest.raises(kind, match=message) as found:
        start(config_of("fake", 2), f"{FAKE}:{factory}")
    assert type(found.value) is kind
    assert list(cache.iterdir()) == []


STARTING = f"""
from deepspeed_c.mii.deployment.start import start
from tests.deepspeed_c.mii.deployments import config_of
print("begun", flush=True)
start(config_of("fake"), "{FAKE}:build_slowly")
"""


def test_a_creator_that_is_killed_in_the_midst_of_the_start_leaves_nothing(cache):
    creator = subprocess.Popen([sys.executable, "-c", STARTING], stdout=subprocess.PIPE, text=True)
    with creator:
        assert waits.first_line(creator) == "begun\n"
        until(lambda: list(cache.glob("*/replica-0.log")), "the replica has started")
        pids = tree_of(supervisor_of("fake"))
        until(lambda: len(tree_of(pids[0])) == 2, "the replica's process is there")
        pids = tree_of(pids[0])
        creator.kill()
        assert waits.ended(creator) == -signal.SIGKILL
    for pid in pids:
        gone(pid)
    until(lambda: not list(cache.iterdir()), "the folder has gone")


CREATOR = f"""
import os
from deepspeed_c.mii.deployment.start import start
from tests.deepspeed_c.mii.deployments import config_of
start(config_of("fake"), "{FAKE}:build")
print("ready", flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_deployment_outlives_its_creator():
    creator = subprocess.Popen([sys.executable, "-c", CREATOR], stdout=subprocess.PIPE, text=True)
    with creator:
        assert waits.first_line(creator) == "ready\n"
        assert waits.ended(creator) == -signal.SIGKILL
    client = mii.client("fake")
    pids = tree_of(supervisor_of("fake"))
    assert texts(client("one")) == ["<one>"]
    client.terminate_server()
    for pid in pids:
        gone(pid)


def test_a_group_of_ranks_is_started_by_the_launcher(cache):
    with deployed(n_ranks=2) as client:
        pids = tree_of(supervisor_of("fake"))
        assert texts(client(["one", "two"])) == ["<one>", "<two>"]
        os.kill(pids[0], signal.SIGKILL)
        for pid in pids:
            gone(pid)


def test_an_idle_deployment_sleeps():
    def wakes(pids):
        found = 0
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                lines = dict(
                    line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line
                )
                found += int(lines["voluntary_ctxt_switches"])
        return found

    with deployed(enable_restful_api=True, restful_api_port=0) as client:
        client("one")
        pids = tree_of(supervisor_of("fake"))
        found = []
        for _ in range(20):  # the end of the request may come late
            before = wakes(pids)
            time.sleep(1.0)
            found.append(wakes(pids) - before)
            if found[-1] <= 4:
                break
        assert found[-1] <= 4, f"something polls: {found} wakes a second"


def test_a_client_of_another_host_is_refused():
    with pytest.raises(FeatureError, match="'elsewhere'"):
        mii.MIIClient(config_of("fake"), host="elsewhere")


def test_the_deployments_process_imports_no_torch():
    code = "import sys, deepspeed_c.mii.deployment.supervisor; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert waits.ran([sys.executable, "-c", code], check=True).stdout == "False False\n"
