"""TensorBoard, W&B, Comet and Prometheus: their own readers find the events after a close, a restart and a kill."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
import zipfile

import pytest

from deepspeed_c.config import load_config
from deepspeed_c.errors import ConfigError, MissingPackageError
from deepspeed_c.monitor import MonitorMaster
from deepspeed_c.monitor.comet import EventsLogScheduler
from deepspeed_c.monitor.prometheus import gauge_name
from tests import fresh
from tests.waits import LIMIT_SECONDS, ended

# Each run is a process of its own: these packages start threads and services, which would slow every later fork.
PROGRAM = """
import json, os, sys, time
from deepspeed_c.config import load_config
from deepspeed_c.monitor import MonitorMaster
sections, first, last, ending = json.load(sys.stdin)
master = MonitorMaster(load_config({"train_batch_size": 4, **sections}, world_size=1))
for step in range(first, last):
    master.write_events([("Train/Samples/train_loss", step / 2, step), ("bad", float("nan"), step)])
if ending == "exit":
    sys.exit(0)
master.flush()
print("written", flush=True)
time.sleep(60)
"""


def run(folder, sections, first, last, ending="exit"):
    """Write the events of the steps, then exit or be killed."""
    given = json.dumps([sections, first, last, ending])
    if ending == "exit":
        done = fresh.run(["-c", PROGRAM], cwd=folder, input=given, check=True)
        return done.stderr
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        process.stdin.write(given)
        process.stdin.close()
        process.stdin = None  # for communicate
        for line in process.stdout:
            if line == "written\n":
                process.send_signal(signal.SIGKILL)
                break
        _, said = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, said
    return said


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_tensorboard_reads_every_run(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sections = {"tensorboard": {"enabled": True, "output_path": "runs", "job_name": "job"}}
    run(tmp_path, sections, 0, 3, "kill")
    run(tmp_path, sections, 3, 5)
    found = reader.EventAccumulator(str(tmp_path / "runs" / "job"))
    found.Reload()
    values = [(event.step, event.value) for event in found.Scalars("Train/Samples/train_loss")]
    assert values == [(step, step / 2) for step in range(5)]
    text = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert '"train_batch_size": 4' in text


def wandb_records(folder):
    """The steps and losses in the file of a run, the configuration, and the path of the file.

    The file is a log in the format of LevelDB after a header of 7 bytes. It has blocks of 32 KiB, which contain parts
    (crc, length, kind) of records. Classes of W&B parse the records, but W&B's Python package has no reader of the
    file."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, place, whole, losses, config = path.read_bytes(), 7, b"", {}, {}
    while place + 7 <= len(data):
        left = -place % 32768 or 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record = messages.Record()
            record.ParseFromString(whole)
            whole = b""
            items = {"/".join(each.nested_key) or each.key: each.value_json for each in record.history.item}
            if "Train/Samples/train_loss" in items:
                losses[int(items["_step"])] = float(items["Train/Samples/train_loss"])
            config |= {each.key or each.nested_key[0]: each.value_json for each in record.config.update}
    return losses, config, path


def test_wandb_reads_an_offline_run(tmp_path):
    pytest.importorskip("wandb")
    section = {"enabled": True, "mode": "offline", "id": "abc123", "project": "p", "name": "n"}
    run(tmp_path, {"wandb": section}, 0, 3)
    losses, config, path = wandb_records(tmp_path)
    assert losses == {step: step / 2 for step in range(3)}
    assert "abc123" in path.name and '"train_batch_size":4' in config["deepspeed_c"].replace(" ", "")


def test_comet_archives_an_offline_experiment(tmp_path):
    pytest.importorskip("comet_ml")
    section = {"enabled": True, "online": False, "samples_log_interval": 2, "api_key": "SECRET", "experiment_name": "n"}
    run(tmp_path, {"comet": section}, 0, 5)
    (archive,) = tmp_path.glob(".cometml-runs/*.zip")
    with zipfile.ZipFile(archive) as file:
        text = file.read("messages.json").decode()
    messages = [json.loads(line) for line in text.splitlines()]
    metrics = [each["payload"] for each in messages if each["type"] == "metric_msg"]
    losses = [
        (each["metric"]["step"], float(each["metric"]["metricValue"]))
        for each in metrics
        if each["metric"]["metricName"] == "Train/Samples/train_loss"
    ]
    assert losses == [(0, 0.0), (2, 1.0), (4, 2.0)], metrics[:2]
    assert "train_batch_size" in text and "SECRET" not in text


def test_the_interval_of_comet_counts_from_what_was_logged():
    schedule = EventsLogScheduler(10)
    assert [step for step in range(0, 40, 3) if schedule.needs_logging("a", step)] == [0, 12, 24, 36]
    assert schedule.needs_logging("b", 37)


def serve(port, **more):
    section = {"enabled": True, "port": port, "job_name": "a job", **more}
    return MonitorMaster(load_config({"train_batch_size": 4, "prometheus": section}, world_size=1))


def scraped(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return reply.read().decode()


EVENTS = [
    ("Train/Samples/train_loss", 2.5, 8),
    ("Train/Samples/elapsed_time_ms_forward", 1500, 8),
    ("Train/Samples/skipped_total", 3, 8),
    ("Memory/maxAllocated_GB", 2, 8),
    ("9 – odd/ñame", float("nan"), 8),
]


def test_prometheus_client_parses_what_is_served():
    parser = pytest.importorskip("prometheus_client.parser")
    port = free_port()
    master = serve(port)
    master.write_events(EVENTS)
    master.flush()
    text = scraped(port)
    master.close()
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    values = {sample.name: sample.value for sample in samples}
    assert {sample.labels["job_name"] for sample in samples} == {"a job"}
    assert values.pop("deepspeed_c_9_odd_ame") != 0  # NaN
    assert values == {
        "deepspeed_c_last_step": 8,
        "deepspeed_c_train_loss": 2.5,
        "deepspeed_c_elapsed_time_forward_seconds": 1.5,
        "deepspeed_c_skipped_total_value": 3,
        "deepspeed_c_memory_max_allocated_bytes": 2e9,
    }
    with pytest.raises(OSError, match="refused"):
        scraped(port)
    serve(port).close()  # the port is free again


def test_promtool_has_nothing_to_say():
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    pytest.importorskip("prometheus_client")
    port = free_port()
    master = serve(port)
    master.write_events(EVENTS)
    master.flush()
    text = scraped(port)
    master.close()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_prometheus_scrapes_a_run(tmp_path):
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian's package prometheus)")
    pytest.importorskip("prometheus_client")
    port, own = free_port(), free_port()
    scrape = {
        "job_name": "j",
        "scrape_interval": "100ms",
        "scrape_timeout": "100ms",
        "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
    }
    (tmp_path / "p.yml").write_text(json.dumps({"scrape_configs": [scrape]}))
    master = serve(port)
    master.write_events(EVENTS)
    command = ["prometheus", "--config.file=p.yml", "--storage.tsdb.path=data", f"--web.listen-address=127.0.0.1:{own}"]
    with open(tmp_path / "log", "w") as log, subprocess.Popen(command, cwd=tmp_path, stderr=log) as server:
        found, deadline = [], time.monotonic() + 30
        while not found and time.monotonic() < deadline:
            time.sleep(0.1)
            try:
                query = f"http://127.0.0.1:{own}/api/v1/query?query=deepspeed_c_train_loss"
                with urllib.request.urlopen(query, timeout=5) as reply:
                    found = json.load(reply)["data"]["result"]
            except OSError:
                continue
        server.terminate()
        ended(server)
    master.close()
    assert [each["value"][1] for each in found] == ["2.5"], (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "name, shown, scale",
    [
        ("Train/Samples/lr", "deepspeed_c_lr", 1.0),
        ("Train/Samples/", "deepspeed_c_event", 1.0),
        ("a/elapsed_time_ms", "deepspeed_c_a_elapsed_time_seconds", 1e-3),
        ("x_count", "deepspeed_c_x_count_value", 1.0),
    ],
)
def test_names_become_legal(name, shown, scale):
    assert gauge_name(name) == (shown, scale)
    assert re.fullmatch(r"[a-z_][a-z0-9_]*", shown)


def test_a_port_in_use_is_named():
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"prometheus.port: cannot listen at 127.0.0.1:{port}: Address already in use"
        ):
            serve(port)


@pytest.mark.parametrize(
    "key, package",
    [("tensorboard", "tensorboard"), ("wandb", "wandb"), ("comet", "comet_ml"), ("prometheus", "prometheus_client")],
)
def test_a_missing_package_is_named_with_the_extra(monkeypatch, tmp_path, key, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingPackageError, match=rf"{key}.enabled: the package {package} cannot") as raised:
        MonitorMaster(load_config({"train_batch_size": 4, key: {"enabled": True}}, world_size=1))
    assert 'pip install "deepspeed_c[monitor]"' in str(raised.value)
    assert isinstance(raised.value, ImportError) and raised.value.name == package
    assert list(tmp_path.iterdir()) == []


def test_an_old_comet_is_refused(monkeypatch):
    comet_ml = pytest.importorskip("comet_ml")
    monkeypatch.setattr(comet_ml, "__version__", "3.40.9")
    with pytest.raises(MissingPackageError, match=r"comet_ml is 3.40.9, older than 3.41.0"):
        MonitorMaster(load_config({"train_batch_size": 4, "comet": {"enabled": True, "online": False}}, world_size=1))


def test_importing_the_package_imports_no_backend():
    code = "import sys, deepspeed_c, deepspeed_c.monitor.utils, deepspeed_c.config; print(*sys.modules)"
    done = fresh.run(["-c", code], check=True, has_package=False)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"tensorboard", "wandb", "comet_ml", "prometheus_client"}
