"""The tuner as a user calls it, and what it does with experiments that go wrong."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from deepspeed_c.autotuning import tune as module
from deepspeed_c.autotuning.experiment import Launch, Result, arguments_for, config_index, prepare
from deepspeed_c.autotuning.feasible import Memory, MemoryNeed, Plans, plan_candidates, shape_of
from deepspeed_c.autotuning.tune import tune
from deepspeed_c.errors import ConfigError
from tests.deepspeed_c.launcher.test_main import end, run, start, wait_for

SCRIPT = Path(__file__).with_name("trained.py")
TIMES = {"enabled": True, "start_profile_step": 1, "end_profile_step": 2}
OPTIMIZER = {"type": "SGD", "params": {"lr": 0.01}}


def write_config(folder, **section):
    sizes, zero = section.pop("sizes", [1, 2]), section.pop("zero", {})
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": sizes, "optimizer": OPTIMIZER}
    config["autotuning"] = {**TIMES, **section}
    (folder / "ds.json").write_text(json.dumps(config))
    return ["--deepspeed_config", "ds.json"]


def test_tunes_plans_and_trains(tmp_path):
    """An experiment that writes "error" to stderr and succeeds, one that fails, and the run that follows."""
    words = write_config(tmp_path, sizes=[1, 2], arg_mappings={"train_micro_batch_size_per_gpu": "--micro"})
    words += ["--behaviour", "fails at 2"]
    code, out, err = run("--num_procs", 2, "--autotuning", "run", SCRIPT, *words, cwd=tmp_path)
    assert code == 0, out + err
    results, exps = tmp_path / "autotuning_results", tmp_path / "autotuning_exps"
    records = json.loads((results / "records.json").read_text())
    rows = {row["name"]: row for row in records["experiments"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "z0_gas1_tmbspg1": "ran",
        "z0_gas1_tmbspg2": "failed",
    }
    assert "no batch of 2 is wanted" in (exps / "z0_gas1_tmbspg2" / "stderr.log").read_text()
    assert "exit code 1" in rows["z0_gas1_tmbspg2"]["problem"]
    ran = [row for row in rows.values() if row["status"] == "ran"]
    best = max(ran, key=lambda row: row["value"])
    assert records["best"] == best["name"] and records["is_finished"]
    for row in ran:
        # A process of Python and torch, of which the planner's process is one too.
        assert 0.5 < row["plan"]["host"] / row["metrics"]["peak_host_bytes"] < 1.5
    config = json.loads((results / "ds_config_optimal.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == best["choices"]["train_micro_batch_size_per_gpu"]
    assert "autotuning" not in config
    command = (results / "cmd_optimal.txt").read_text()
    assert str(results / "ds_config_optimal.json") in command and "--autotuning" not in command
    assert best["name"] in (results / "summary.txt").read_text().splitlines()[1]
    # The run that follows trains with the best, to its end, on both ranks.
    told = f"trained to the end, micro {config['train_micro_batch_size_per_gpu']}"
    assert out.count(told) == 2 and err.count("error: only a word") == 2
    names = {"cmd.txt", "ds_config.json", "exp.json", "metrics.json", "stderr.log", "stdout.log", "steps.txt"}
    assert {file.name for file in (exps / best["name"]).iterdir()} == names


def test_script_with_its_own_configuration_is_refused_before_it_runs(tmp_path):
    words = [*write_config(tmp_path), "--behaviour", "own configuration", "--steps", "100000000"]
    code, _, err = run("--num_procs", 1, "--autotuning", "tune", SCRIPT, *words, cwd=tmp_path)
    assert code == 2 and "ignores the configuration" in err and "Fix:" in err
    assert not list((tmp_path / "autotuning_exps").glob("*/exp.json"))


def test_a_signal_ends_the_experiment_too(tmp_path):
    words = [*write_config(tmp_path, end_profile_step=10**8), "--steps", "1000000000"]
    process = start("--num_procs", 1, "--autotuning", "tune", SCRIPT, *words, cwd=tmp_path)
    folder = tmp_path / "autotuning_exps" / "z0_gas1_tmbspg1"
    wait_for(
        lambda: (folder / "stderr.log").exists() and "only a word" in (folder / "stderr.log").read_text(), "training"
    )
    process.send_signal(signal.SIGTERM)
    code, _, _ = end(process)
    assert code == 128 + signal.SIGTERM
    mark = str(folder / "ds_config.json").encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert mark not in path.read_bytes()
        except OSError:
            continue


# -- with experiments that are made up ------------------------------------------------------------------------


class Pretended:
    """Experiments and plans without processes. ``rate``: samples per second by micro-batch; None fails."""

    def __init__(self, monkeypatch, rate, room=10**9, need=lambda each: 0):
        self.ran, self.rate, self.shapes = [], rate, []
        self.room, self.need = room, need
        self.metrics, self.model = {}, ""
        self.failure = "exit code 1", "the script's last words\n"
        monkeypatch.setattr(module, "run_experiment", self.run)
        monkeypatch.setattr(module, "plan_candidates", self.plan)

    def run(self, candidate, launch, folder, mappings, watch, host_limit):
        self.ran.append(candidate.name)
        rate = self.rate(candidate)
        if rate is None:
            problem, words = self.failure
            (folder / "stderr.log").write_text(words)
            return Result(candidate.name, None, problem, 1.0)
        size = candidate.micro_batch
        inputs = [{"shape": [size, 7], "is_floating_point": True}]
        found = {"throughput": rate, "latency": size / rate, "train_micro_batch_size_per_gpu": size, "inputs": inputs}
        return Result(candidate.name, {**found, **self.metrics}, "", 1.0)

    def plan(self, candidates, arguments, launch, folder, shape=None):
        self.shapes.append(shape)
        needs = {each.name: MemoryNeed(host=0 if shape is None else self.need(each)) for each in candidates}
        return Plans(needs, Memory(None, self.room), self.model)


def search(folder, monkeypatch, arguments=(), **section):
    monkeypatch.chdir(folder)
    words = write_config(folder, **section)
    launch = Launch((), str(SCRIPT), (*words, *arguments), 1, 1)
    return tune(launch, has_accelerator=False)


def records_in(folder):
    return json.loads((folder / "autotuning_results" / "records.json").read_text())


def test_what_does_not_fit_is_not_started(tmp_path, monkeypatch):
    made = Pretended(monkeypatch, lambda each: each.micro_batch, room=79, need=lambda each: 20 * each.micro_batch)
    search(tmp_path, monkeypatch, sizes=[1, 2, 3, 4, 5])
    assert made.ran == [f"z0_gas1_tmbspg{size}" for size in (1, 2, 3)]
    assert made.shapes == [None, {"sample": [7]}]
    left_out = {row["name"]: row for row in records_in(tmp_path)["experiments"] if row["status"] == "left out"}
    assert set(left_out) == {"z0_gas1_tmbspg4", "z0_gas1_tmbspg5"}
    assert "needs 80 bytes of host memory" in left_out["z0_gas1_tmbspg4"]["problem"]
    assert "has 79" in left_out["z0_gas1_tmbspg4"]["problem"]


def test_buckets_that_hold_the_whole_model_are_one_candidate(tmp_path, monkeypatch):
    """The planner's own process, for a model of 72 elements: with stage 2 a bucket of 40 holds a part of it."""
    made = Pretended(monkeypatch, lambda each: each.micro_batch)
    monkeypatch.setattr(module, "plan_candidates", plan_candidates)
    ranges = {"stage": [0, 2], "reduce_bucket_size": [40, 1000, 5000]}
    search(tmp_path, monkeypatch, sizes=[1], zero=ranges)
    rows = {row["name"]: row for row in records_in(tmp_path)["experiments"]}
    assert len(rows) == 6
    assert made.ran == [
        "z0_gas1_tmbspg1_rbs40",
        "z0_gas1_tmbspg1_rbs1000",
        "z2_gas1_tmbspg1_rbs40",
        "z2_gas1_tmbspg1_rbs1000",
    ]
    assert "runs as z2_gas1_tmbspg1_rbs1000 does" in rows["z2_gas1_tmbspg1_rbs5000"]["problem"]


def test_nothing_fits(tmp_path, monkeypatch):
    made = Pretended(monkeypatch, lambda each: 1.0, room=-1)
    with pytest.raises(ConfigError, match="no candidate fits") as caught:
        search(tmp_path, monkeypatch)
    assert made.ran == [] and caught.value.fix


SMALLER, CORRECT = "allow smaller micro-batches or a higher stage", "correct what the script's output says"


@pytest.mark.parametrize(
    ("problem", "words", "fix"),
    [
        ("exit code 1", "the script's last words\n", CORRECT),
        ("exit code 1", "torch.OutOfMemoryError: CUDA out of memory.\n", SMALLER),
        ("exit code 1", "RuntimeError: DefaultCPUAllocator: can't allocate memory\n", SMALLER),
        ("exit code -9", "", SMALLER),
        ("exit code 137", "", SMALLER),
        ("out of memory: killed by its cgroup at 79 bytes", "", SMALLER),
    ],
)
def test_nothing_succeeds(tmp_path, monkeypatch, problem, words, fix):
    made = Pretended(monkeypatch, lambda each: None)
    made.failure = problem, words
    what = "the first 2 experiments ended with the same error" if fix == CORRECT else "none of 2 experiments succeeded"
    with pytest.raises(ConfigError, match=f"{what}.*; z0_gas1_tmbspg1: {problem}") as caught:
        search(tmp_path, monkeypatch)
    assert caught.value.fix == fix and words.strip() in str(caught.value)
    assert not (tmp_path / "autotuning_results" / "ds_config_optimal.json").exists()


@pytest.mark.parametrize(
    ("words", "n_ran"),
    [
        (lambda each: f"train.py: error: unrecognized arguments: --batch {each.micro_batch}", 2),
        (lambda each: f"File '/exps/{each.name}/x', <Layer at 0x7f{each.micro_batch}b>: ValueError: no", 2),
        (lambda each: f"ValueError: {'abcde'[each.micro_batch % 5]}", 4),
        (lambda each: "MemoryError", 4),
        (lambda each: "", 4),
    ],
)
def test_two_equal_errors_stop_the_search(tmp_path, monkeypatch, words, n_ran):
    """Numbers and names of experiments differ in one error. Errors of memory say nothing of other candidates, and
    neither does a script that says nothing."""
    made = Pretended(monkeypatch, lambda each: None)
    run_one = made.run

    def run(candidate, *rest):
        made.failure = "exit code 2", words(candidate) + "\n"
        return run_one(candidate, *rest)

    monkeypatch.setattr(module, "run_experiment", run)
    with pytest.raises(ConfigError) as caught:
        search(tmp_path, monkeypatch, sizes=[1, 2, 3, 4], zero={"stage": [0]})
    assert len(made.ran) == n_ran, made.ran
    said = str(caught.value)
    assert str(tmp_path / "autotuning_exps" / made.ran[0] / "stderr.log") in said and "exit code 2" in said
    assert (n_ran == 2) == ("ended with the same error" in said) and caught.value.fix, said


def test_an_equal_error_after_a_success_does_not_stop_the_search(tmp_path, monkeypatch):
    made = Pretended(monkeypatch, lambda each: 1.0 if each.micro_batch in (1, 5) else None)
    search(tmp_path, monkeypatch, sizes=[1, 2, 3, 4, 5])
    assert len(made.ran) == 5 and records_in(tmp_path)["best"] == "z0_gas1_tmbspg1"


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_plain_script_with_auto_stays_as_it_is(tmp_path, monkeypatch, is_plain):
    """The micro-batch comes by the configuration alone, for the planner and for each experiment. With the option in the
    command, the option follows."""
    made = Pretended(monkeypatch, lambda each: each.micro_batch)
    options = {}

    def run(candidate, launch, folder, mappings, *rest):
        options[candidate.micro_batch] = prepare(candidate, launch, folder, mappings)[2:]
        return made.run(candidate, launch, folder, mappings, *rest)

    def plan(candidates, arguments, *rest):
        assert not is_plain or not any("batch_size" in word for words in arguments for word in words), arguments
        return made.plan(candidates, arguments, *rest)

    monkeypatch.setattr(module, "run_experiment", run)
    monkeypatch.setattr(module, "plan_candidates", plan)
    section = {"sizes": "auto", "min_train_micro_batch_size_per_gpu": 2, "max_train_micro_batch_size_per_gpu": 4}
    given = () if is_plain else ("--per_device_train_batch_size", "9")
    search(tmp_path, monkeypatch, given, **section)
    expected = {n: [] if is_plain else ["--per_device_train_batch_size", str(n)] for n in (2, 4)}
    assert options == expected, options


def test_nothing_succeeds_with_auto_that_no_trainer_fills_in(tmp_path):
    words = write_config(tmp_path, sizes=[1])
    config = json.loads((tmp_path / "ds.json").read_text())
    (tmp_path / "ds.json").write_text(json.dumps({**config, "gradient_accumulation_steps": "auto"}))
    code, out, err = run("--num_procs", 1, "--autotuning", "tune", SCRIPT, *words, cwd=tmp_path)
    assert code == 2, out + err
    fix = err.rpartition("Fix: ")[2]
    assert CORRECT in fix and "write a number for gradient_accumulation_steps" in fix and "smaller" not in fix, err


@pytest.mark.parametrize(("metric", "best"), [("throughput", 4), ("latency", 1)])
def test_best_is_the_fastest_whatever_the_metric(tmp_path, monkeypatch, metric, best):
    Pretended(monkeypatch, lambda each: {1: 10.0, 2: 12.0, 4: 15.0, 8: 9.0}[each.micro_batch])
    search(tmp_path, monkeypatch, sizes=[1, 2, 4, 8], metric=metric)
    assert records_in(tmp_path)["best"] == f"z0_gas1_tmbspg{best}"


def test_stops_without_gain_and_after_trials(tmp_path, monkeypatch):
    made = Pretended(monkeypatch, lambda each: 1 / each.micro_batch)
    search(tmp_path, monkeypatch, sizes=list(range(1, 12)), tuner_early_stopping=3)
    assert len(made.ran) == 1 + 3
    made.ran.clear()
    search(tmp_path, monkeypatch, sizes=list(range(1, 12)), tuner_early_stopping=0, tuner_num_trials=7)
    assert len(made.ran) == 7


def test_sizes_are_spread_over_the_range(tmp_path, monkeypatch):
    made = Pretended(monkeypatch, lambda each: each.micro_batch, room=300, need=lambda each: each.micro_batch)
    search(tmp_path, monkeypatch, sizes=None)
    assert made.ran == [f"z0_gas1_tmbspg{size}" for size in (1, 16, 256)], "of 1, 2, 4, ..., 256"


def test_script_that_takes_another_batch(tmp_path, monkeypatch):
    made = Pretended(monkeypatch, lambda each: 1.0)
    made.metrics = {"inputs": [{"shape": [5, 7], "is_floating_point": True}]}
    with pytest.raises(ConfigError, match="told a micro-batch of 1, and ran 5") as caught:
        search(tmp_path, monkeypatch)
    assert caught.value.fix and len(made.ran) == 1


def test_metric_that_is_not_measured(tmp_path, monkeypatch):
    Pretended(monkeypatch, lambda each: 1.0)
    with pytest.raises(ConfigError, match="does not measure 'flops'"):
        search(tmp_path, monkeypatch, metric="flops")


def test_metric_that_never_appears(tmp_path, monkeypatch):
    made = Pretended(monkeypatch, lambda each: 1.0)
    made.run = lambda *_: Result("z0_gas1_tmbspg1", None, "the script ended and wrote no metric", 1.0)
    monkeypatch.setattr(module, "run_experiment", made.run)
    with pytest.raises(ConfigError, match="wrote no metric") as caught:
        search(tmp_path, monkeypatch)
    assert caught.value.fix


def test_an_experiment_without_steps(tmp_path, monkeypatch):
    """The first one tells that the script does not train. A later one may have failed by its own configuration."""
    made = Pretended(monkeypatch, lambda each: 1.0)

    def run(candidate, *rest):
        found = made.run(candidate, *rest)
        is_stuck = candidate.micro_batch == stuck
        return Result(candidate.name, None, "no step in 5 minutes", 300.0, is_stuck=True) if is_stuck else found

    monkeypatch.setattr(module, "run_experiment", run)
    stuck = 2
    search(tmp_path, monkeypatch)
    rows = {row["name"]: row for row in records_in(tmp_path)["experiments"]}
    assert rows["z0_gas1_tmbspg2"]["status"] == "failed" and "no step in 5" in rows["z0_gas1_tmbspg2"]["problem"]
    stuck = 1
    with pytest.raises(ConfigError, match="does not train: no step in 5 minutes") as caught:
        search(tmp_path, monkeypatch)
    assert str(tmp_path / "autotuning_exps" / "z0_gas1_tmbspg1") in caught.value.where and caught.value.fix


def test_results_of_another_run_stay(tmp_path, monkeypatch):
    Pretended(monkeypatch, lambda each: 1.0)
    search(tmp_path, monkeypatch)
    before = records_in(tmp_path)
    with pytest.raises(ConfigError, match="results of another run: its arguments") as caught:
        search(tmp_path, monkeypatch, arguments=("--width", "16"))
    assert caught.value.where == "autotuning.results_dir" and records_in(tmp_path) == before
    for text in ("{", "[]"):
        (tmp_path / "autotuning_results" / "records.json").write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            search(tmp_path, monkeypatch)


def test_results_of_another_model_stay(tmp_path, monkeypatch):
    """The script is the same, and so are its arguments. Only the planner knows."""
    made = Pretended(monkeypatch, lambda each: 1.0)
    made.model = "72 elements in 2 parameters, digest 1"
    search(tmp_path, monkeypatch)
    folder = tmp_path / "autotuning_exps" / "z0_gas1_tmbspg1"
    (folder / "exp.json").write_text("{}")
    before, n = records_in(tmp_path), len(made.ran)
    assert before["model"] == made.model
    made.model = "73 elements in 2 parameters, digest 2"
    with pytest.raises(ConfigError, match="results of another run: its model is '72 .* not '73 ") as caught:
        search(tmp_path, monkeypatch)
    assert caught.value.where == "autotuning.results_dir" and caught.value.fix
    assert records_in(tmp_path) == before and (folder / "exp.json").exists() and len(made.ran) == n
    made.model = ""  # no model was found
    search(tmp_path, monkeypatch)
    assert len(made.ran) > n


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("overwrite", [True, False])
def test_finished_experiments_are_kept(tmp_path, monkeypatch, is_finished, overwrite):
    """An interrupted search goes on. A finished one begins anew, unless the section says otherwise."""
    Pretended(monkeypatch, lambda each: 1.0)
    search(tmp_path, monkeypatch, overwrite=overwrite)
    folder = tmp_path / "autotuning_exps" / "z0_gas1_tmbspg1"
    (folder / "exp.json").write_text("{}")
    (folder / "users.txt").write_text("")
    records = {**records_in(tmp_path), "is_finished": is_finished}
    (tmp_path / "autotuning_results" / "records.json").write_text(json.dumps(records))
    search(tmp_path, monkeypatch, overwrite=overwrite)
    assert (folder / "users.txt").exists() == (not (is_finished and overwrite))


def test_experiment_with_a_result_is_not_run_again(tmp_path, monkeypatch):
    from deepspeed_c.autotuning import experiment
    from deepspeed_c.autotuning.space import make_space

    commands = []

    def pretend(command, folder, limit, watch, group):
        commands.append(command)
        (folder / "metrics.json").write_text('{"throughput": 3.5}')
        (folder / "stderr.log").write_text("Traceback\nthe last line\n")
        return 0 if len(commands) != 3 else 9

    monkeypatch.setattr(experiment, "_run", pretend)
    config = {"train_micro_batch_size_per_gpu": [2], "autotuning": {"max_train_micro_batch_size_per_gpu": 1}}
    config["autotuning"] |= {"enabled": True, "end_profile_step": 5}
    (candidate,) = make_space(config, 1, has_accelerator=False).candidates
    launch = Launch(("--num_procs", "1"), "t.py", ("--deepspeed_config", "a.json"), 1, 1)
    first = experiment.run_experiment(candidate, launch, tmp_path / "x", {})
    again = experiment.run_experiment(candidate, launch, tmp_path / "x", {})
    assert (first.metrics, again.metrics) == ({"throughput": 3.5},) * 2 and len(commands) == 1
    assert again.is_reused and not first.is_reused
    said = {"tuner_num_trials": 3, "overwrite": False, "max_minutes_without_step": 1}  # of the search alone
    section = {**candidate.config["autotuning"], **said}
    longer = candidate._replace(config={**candidate.config, "autotuning": section})
    assert experiment.run_experiment(longer, launch, tmp_path / "x", {}).is_reused
    section = {**section, "end_profile_step": 9}
    longer = candidate._replace(config={**candidate.config, "autotuning": section})
    assert not experiment.run_experiment(longer, launch, tmp_path / "x", {}).is_reused
    del commands[1:]
    other = launch._replace(arguments=("--deepspeed_config", "a.json", "--lr", "2"))
    assert not experiment.run_experiment(candidate, other, tmp_path / "x", {}).is_reused
    changed = candidate._replace(config={**candidate.config, "gradient_clipping": 1.0})
    failed = experiment.run_experiment(changed, other, tmp_path / "x", {})
    assert failed.metrics is None and failed.problem == "exit code 9", "a metric file alone is no success"
    assert json.loads((tmp_path / "x" / "exp.json").read_text())["tail"][-1] == "the last line"
    assert not experiment.run_experiment(changed, other, tmp_path / "x", {}).is_reused and len(commands) == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--deepspeed_config", "a.json"], ["--deepspeed_config", "NEW"]),
        (["--x", "1", "--deepspeed_config=a.json"], ["--x", "1", "--deepspeed_config=NEW"]),
        (["--deepspeed", "a.json", "--x"], ["--deepspeed", "NEW", "--x"]),
        (["--deepspeed=a.json"], ["--deepspeed=NEW"]),
        (["--deepspeed", "--deepspeed_config", "a.json"], ["--deepspeed", "--deepspeed_config", "NEW"]),
    ],
)
def test_configuration_among_the_arguments(words, expected):
    assert arguments_for(words, "NEW", {}, {}) == expected


@pytest.mark.parametrize("words", [[], ["--deepspeed"], ["--deepspeed", "--x"], ["--deepspeed_config"], ["a.json"]])
def test_no_configuration_among_the_arguments(words):
    with pytest.raises(ConfigError) as caught:
        config_index(words)
    assert caught.value.fix


def test_arguments_follow_the_configuration():
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"params": {"lr": 0.5}}, "train_batch_size": "auto"}
    keys = {"train_micro_batch_size_per_gpu": "--batch", "optimizer.params.lr ": " --lr", "train_batch_size": "--all"}
    found = arguments_for(["--deepspeed", "a.json", "--lr=1", "--batch", "9"], "b", config, {**keys, "none": "--none"})
    assert found == ["--deepspeed", "b", "--lr=0.5", "--batch", "4"]
    found = arguments_for(["--deepspeed", "a.json"], "b", config, keys)
    assert found == ["--deepspeed", "b", "--batch", "4", "--lr", "0.5"]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([([4, 9], False)], {"n_tokens": 9}),
        ([([4, 3, 5], True)], {"sample": [3, 5]}),
        ([([], False), ([4], True)], {"sample": []}),
        ([([4, 9, 2], False)], None),
        ([([5, 9], False)], None),
        ([], None),
    ],
)
def test_shape_of_a_sample(inputs, expected):
    shown = [{"shape": shape, "is_floating_point": is_floating} for shape, is_floating in inputs]
    assert shape_of({"inputs": shown, "train_micro_batch_size_per_gpu": 4}) == expected
    assert shape_of({"inputs": None, "train_micro_batch_size_per_gpu": 4}) is None
