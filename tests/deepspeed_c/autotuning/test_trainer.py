"""Options of a script that follow the configuration, although the user has not named them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from deepspeed_c.autotuning.experiment import Launch
from deepspeed_c.autotuning.trainer import trainer_mappings

MICRO, STEPS = "--per_device_train_batch_size", "--gradient_accumulation_steps"
KEYS = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": STEPS}
OF_TRAINER = ("--deepspeed", "ds.json", "--output_dir", "out")
HF = "from transformers import {0}, TrainingArguments\nargs = {0}(TrainingArguments).parse_args_into_dataclasses()\n"


def options(folder: Path, words, script="train.py", keys=(*KEYS, "train_batch_size"), is_file=True):
    path = str(folder / script) if is_file else script
    return sorted(trainer_mappings(set(keys), Launch((), path, tuple(words), 1, 1, is_file)).values())


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("parser", ["HfArgumentParser", "TrlParser"])
@pytest.mark.parametrize("words", [OF_TRAINER, ("--deepspeed=ds.json",)])
def test_a_script_of_the_trainer(tmp_path, parser, words):
    write(tmp_path, {"train": HF.format(parser)})
    assert options(tmp_path, words) == [STEPS, MICRO]
    assert options(tmp_path, words, keys=["gradient_accumulation_steps"]) == [STEPS]
    assert options(tmp_path, words, keys=["train_batch_size"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "import argparse\nparser = argparse.ArgumentParser()\n",
        # It makes the Trainer's arguments, and reads none of them from the command line.
        "from transformers import Trainer, TrainingArguments\nTrainingArguments('out', deepspeed='ds.json')\n",
        '"""Unlike HfArgumentParser ..."""  # HfArgumentParser\n',
        "this is no Python HfArgumentParser\n",
        "import transformers\n",
        "",
    ],
)
def test_other_scripts_stay_as_they_are(tmp_path, text):
    others = dict.fromkeys(("other", "transformers/__init__"), HF.format("HfArgumentParser"))
    write(tmp_path, {"train": text, **others})
    assert options(tmp_path, OF_TRAINER) == []
    assert options(tmp_path, OF_TRAINER, script="no_such_file.py") == []


def test_the_file_is_named_by_the_option_of_deepspeed(tmp_path):
    """``--deepspeed_config`` is no option of the Trainer."""
    write(tmp_path, {"train": HF.format("HfArgumentParser")})
    assert options(tmp_path, ["--deepspeed_config", "ds.json"]) == []
    assert options(tmp_path, ["--deepspeed", "--deepspeed_config", "ds.json"]) == []
    assert options(tmp_path, ["--deepspeed", "--deepspeed_config=ds.json"]) == []


@pytest.mark.parametrize("words", [[MICRO, "4"], [f"{MICRO}=4"]])
def test_an_option_that_the_command_has_is_known_to_the_script(tmp_path, words):
    write(tmp_path, {"train": ""})
    assert options(tmp_path, ["--deepspeed_config", "ds.json", *words]) == [MICRO]
    assert options(tmp_path, [*words, *OF_TRAINER], script="a-program", is_file=False) == [MICRO]


IMPORTS = {
    "plain": {"train": "import helpers", "helpers": "import transformers as t\nt.HfArgumentParser"},
    "a name of a package": {"train": "from own.deep import arguments",
     "own/deep/arguments": HF.format("HfArgumentParser")},
    "the package itself": {"train": "import own.deep", "own/__init__": HF.format("HfArgumentParser"), "own/deep": ""},
    "a function's": {"train": "def f():\n    from own import x", "own/x": HF.format("HfArgumentParser")},
    "in a circle": {"train": "import a", "a": "import b", "b": "import a\nimport c", "c": HF.format("TrlParser")},
    "relative": {"train": "from own import a", "own/a": "from .b import c", "own/b/c": "from .. import d",
     "own/d": HF.format("HfArgumentParser")},
}  # fmt: skip


@pytest.mark.parametrize("case", IMPORTS)
def test_imports_from_the_folder_of_the_script_are_followed(tmp_path, case):
    write(tmp_path, IMPORTS[case])
    assert options(tmp_path, OF_TRAINER) == [STEPS, MICRO]


def test_a_module_is_found_as_python_finds_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parser = HF.format("TrlParser")
    write(tmp_path, {"own/__init__": "", "own/run": "from .words import f", "own/words": parser, "single": parser})
    write(tmp_path, {"other/__init__": "", "other/__main__": "import sys", "other/unused": parser})
    assert options(tmp_path, OF_TRAINER, "own.run", is_file=False) == [STEPS, MICRO]
    assert options(tmp_path, OF_TRAINER, "single", is_file=False) == [STEPS, MICRO]
    for script in ("other", "no_such_module", "a-program", "json.tool"):
        assert options(tmp_path, OF_TRAINER, script, is_file=False) == []


def test_options_exist_in_the_trainer():
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    assert isinstance(parser, argparse.ArgumentParser)
    known = {option for action in parser._actions for option in action.option_strings}
    assert {MICRO, STEPS, "--deepspeed"} <= known
