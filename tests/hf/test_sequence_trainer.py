"""Sequence parallelism through accelerate and the Trainer, by ``ParallelismConfig(sp_backend="deepspeed")``.

Also runs accelerate's script under ``deepspeed_c run``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.stack import VOCAB, Text, ds_config, llama, make_trainer, numbers, on_ranks, weights
from tests.ranks import free_port

RATE, STEPS, GAS = 0.5, 3, 2


class Same(Text):
    """All rows are equal, so that the order of samples does not matter. Only labels of the first tokens count, and
    these all lie on one rank.
    """

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[0].clone()
        labels[:1], labels[5:] = -100, -100
        return {"input_ids": self.tokens[0], "labels": labels}


def make(folder: Path, stage: int, sp: int, rows: int = 32, **changes: Any) -> Any:
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    model = changes.pop("model", None) or llama()
    config = ds_config(stage, optimizer=False, scheduler=False)
    config["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallelism = ParallelismConfig(
        sp_backend="deepspeed", sp_size=sp, dp_shard_size=int(os.environ["WORLD_SIZE"]) // sp, sp_handler=handler
    )
    given = {
        "gradient_accumulation_steps": GAS,
        "max_steps": STEPS,
        "warmup_steps": 0,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "parallelism_config": parallelism,
        **changes,
    }
    trainer = make_trainer(folder, config, model=model, **given)
    trainer.train_dataset = trainer.eval_dataset = Same(rows)
    return trainer


def train(rank: int, world: int, folder: Path, stage: int, sp: int) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    was_taken = "sdpa" in ALL_ATTENTION_FUNCTIONS._local_mapping  # by an earlier test in the same process
    trainer = make(folder, stage, sp)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    found = numbers(trainer), weights(trainer), evaluated, trainer.model_wrapped.train_batch_size()
    trainer.model_wrapped.close()
    assert ("sdpa" in ALL_ATTENTION_FUNCTIONS._local_mapping) == was_taken, "close gives it back"
    return found


def plain() -> tuple[dict[str, torch.Tensor], list[float], float]:
    model, data = llama(), Same(32)
    batch = torch.utils.data.default_collate([data[0], data[1]])
    losses = []
    for _ in range(STEPS):
        loss = model(**batch, use_cache=False).loss
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for p in model.parameters():
            p.data -= RATE * p.grad
    with torch.no_grad():
        return dict(model.state_dict()), losses, model(**batch).loss.item()


@pytest.mark.parametrize("world, sp, stage", [(2, 2, 3), (2, 2, 1), (4, 2, 2)])
def test_the_trainer_trains_as_one_plain_process(tmp_path: Path, world: int, sp: int, stage: int) -> None:
    state, losses, evaluated = plain()
    for logged, got, got_evaluated, batch in on_ranks(world, train, tmp_path, stage, sp):
        assert batch == 2 * GAS * world // sp
        assert logged["loss"] == pytest.approx(losses, rel=1e-5)
        assert got_evaluated == pytest.approx(evaluated, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name} {m}")  # noqa: B023


def resume(rank: int, world: int, folder: Path) -> Any:
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    runs = []
    for seed, checkpoint in ((0, None), (5, str(folder / "checkpoint-2"))):
        trainer = make(folder, 2, 2, model=llama(seed), **changes)
        trainer.train_dataset = Text(32)  # different rows, so that a wrong place in the data shows
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append((numbers(trainer)["loss"], weights(trainer)))
        trainer.model_wrapped.close()
    return runs


def test_a_run_that_is_resumed_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    (losses, state), (again, state_again) = on_ranks(2, resume, tmp_path)[0]
    assert again == losses and len(losses) == 4
    for name, value in state.items():
        assert torch.equal(state_again[name], value), name


def write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    llama(vocab_size=512).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<unk>": 0, **{f"w{i}": i for i in range(1, VOCAB)}}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)


def test_accelerates_own_script(tmp_path: Path) -> None:
    """Runs the installed script with one change: a local model replaces the model that it would download."""
    pytest.importorskip("accelerate", reason="needs accelerate")
    import accelerate

    theirs = Path(accelerate.__file__).parent / "test_utils/scripts/external_deps/test_ds_alst_ulysses_sp.py"
    write_model(tmp_path / "model")
    text = theirs.read_text().replace(
        '"hf-internal-testing/tiny-random-LlamaForCausalLM"', json.dumps(str(tmp_path / "model"))
    )
    # Without this line accelerate would take CPU ranks for one process.
    text = "from accelerate import PartialState\nPartialState(cpu=True)\n" + text
    # A single write, because both ranks share the pipe and print writes each of its arguments separately.
    end = "\nimport sys\nsys.stdout.write(f'took {iter + 1} batches\\n')\n"
    (tmp_path / "script.py").write_text(text + end)
    command = [sys.executable, "-m", "deepspeed_c", "run", sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--use_deepspeed", "--zero_stage", "3", "--num_processes", "2", "--num_machines", "1"]
    command += [
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        str(free_port()),
        "script.py",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "took 4 batches" in done.stdout and "DL w/ adapter: 4 samples" in done.stdout, done.stdout
