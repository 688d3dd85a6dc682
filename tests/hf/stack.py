"""Helpers shared by the tests of the Hugging Face stack: a small Llama, text with labels to skip, and a Trainer run
with all its numbers.

Functions import the stack's modules where they use them: the ranks have the stack loaded (preload.py), and the test
session does not need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.ranks import run_ranks

PRELOAD = "tests.hf.preload"
VOCAB, WIDTH, LENGTH = 61, 32, 12
ACCUMULATION, MICRO_BATCH, STEPS = 2, 2, 5
LEARNING_RATE = 5e-3


def on_ranks(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """``run_ranks`` on ranks that have the stack loaded."""
    return run_ranks(world, body, *args, preload=PRELOAD)


def forget() -> None:
    """Reset the stack's process-wide state, as at the start of a program."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": VOCAB, "pad_token_id": 0}
    return LlamaConfig(**{**sizes, **more, "bos_token_id": 1, "eos_token_id": 2, **changes})


def llama(seed: int = 0, **changes: Any) -> Any:
    """A Llama of about 20 thousand parameters in fp32, with the same weights on all ranks."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(**changes))


class Text(torch.utils.data.Dataset):
    """Token rows with a pattern to learn. The first labels of each row are skipped (-100). Their number differs from
    row to row, so that a mean over micro-batches is not the mean over tokens.
    """

    def __init__(self, rows: int = 64, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(3, VOCAB, (rows, 1), generator=generator)
        step = torch.randint(1, 4, (rows, 1), generator=generator)
        self.tokens = 3 + (start + step * torch.arange(LENGTH)) % (VOCAB - 3)
        self.n_skipped = torch.randint(0, LENGTH - 3, (rows,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[i].clone()
        labels[: self.n_skipped[i]] = -100
        return {"input_ids": self.tokens[i], "labels": labels}

    def batch(self, start: int, stop: int) -> dict[str, torch.Tensor]:
        return torch.utils.data.default_collate([self[i] for i in range(start, stop)])


def ds_config(stage: int, *, optimizer: bool = True, scheduler: bool = True, **changes: Any) -> dict[str, Any]:
    """A configuration that leaves as many values as possible to the Trainer."""
    config: dict[str, Any] = {
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 8},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            "sub_group_size": 1e9,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": float("inf"),
    }
    if optimizer:
        auto = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
        config["optimizer"] = {"type": "AdamW", "params": auto}
    if scheduler:
        auto = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
        config["scheduler"] = {"type": "WarmupDecayLR", "params": {**auto, "warmup_type": "linear"}}
    for section, value in changes.items():
        config[section] = {**config[section], **value} if isinstance(config.get(section), dict) else value
    return config


def arguments(folder: Path, deepspeed: dict[str, Any] | None, **changes: Any) -> Any:
    from transformers import TrainingArguments

    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": MICRO_BATCH,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "weight_decay": 0.0,  # the Trainer's own optimizer has a second group, without decay; ours has one
        "max_grad_norm": 0.5,  # below the gradient norms of this model
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "seed": 7,
        "deepspeed": deepspeed,
    }
    return TrainingArguments(**{**given, **changes})


def make_trainer(
    folder: Path, deepspeed: dict[str, Any] | None, model: Any = None, rows: int = 64, **changes: Any
) -> Any:
    """A Trainer over ``Text``. ``changes`` are training arguments, except ``optimizers``, ``model_init`` and ``callbacks``."""
    from transformers import PrinterCallback, Trainer

    own = {name: changes.pop(name) for name in ("optimizers", "model_init", "callbacks") if name in changes}
    forget()
    args = arguments(folder, deepspeed, **changes)
    if model is None and "model_init" not in own:
        model = llama()
    trainer = Trainer(model=model, args=args, train_dataset=Text(rows), eval_dataset=Text(rows=14, seed=2), **own)
    trainer.remove_callback(PrinterCallback)
    return trainer


def numbers(trainer: Any) -> dict[str, list[float]]:
    """The logged numbers of a run by name: loss, grad_norm, learning_rate, eval_loss."""
    logged: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
            if name in entry:
                logged.setdefault(name, []).append(float(entry[name]))
    return logged


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """The gathered weights of a trainer's model. Collective."""
    model = trainer.model_wrapped
    state = model.module_state_dict() if hasattr(model, "module_state_dict") else trainer.model.state_dict()
    return {name: value.detach().float().clone() for name, value in state.items()}
