"""Supervised fine-tuning with the calls of DeepSpeed-Chat's first step, on text of the standard library and a model of a few thousand parameters.

Rank 0 writes the results to OUTPUT_DIR/result.json, and the weights beside it.
"""

import argparse
import inspect
import json
import math
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from transformers import AutoModelForCausalLM, LlamaConfig, SchedulerType, get_scheduler, set_seed
from transformers.integrations import HfDeepSpeedConfig

LENGTH, N_ROWS, VOCABULARY = 24, 32, 128


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--dtype", choices=["fp16", "bf16"], default="bf16")
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--lr_scheduler_type", type=SchedulerType, default="cosine")
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--lora_dim", type=int, default=0)
    parser.add_argument("--lora_module_name", default="layers.")
    parser.add_argument("--only_optimize_lora", action="store_true")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--output_dir")
    return deepspeed.add_config_arguments(parser).parse_args()


def train_config(args):
    config = {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "train_batch_size": args.per_device_train_batch_size
        * torch.distributed.get_world_size()
        * args.gradient_accumulation_steps,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": args.zero_stage,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu" if args.offload else "none"},
            "stage3_param_persistence_threshold": 100,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {"enabled": False, "max_out_tokens": 512, "inference_tp_size": 1, "pin_parameters": True},
        "tensorboard": {"enabled": False, "output_path": "logs", "job_name": "sft"},
    }
    if args.zero_stage == 3 and args.offload:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    config[args.dtype] = {"enabled": True}
    return config


class Source(Dataset):
    """Rows of bytes from a module's source."""

    def __init__(self):
        text = inspect.getsource(argparse.ArgumentParser).encode("ascii", "replace")
        self.rows = [torch.tensor(list(text[11 * i : 11 * i + LENGTH])) for i in range(N_ROWS)]

    def __len__(self):
        return N_ROWS

    def __getitem__(self, i):
        return {
            "input_ids": self.rows[i],
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": self.rows[i],
        }


class LoraLinear(nn.Module):
    """A linear layer whose weight stays, and two narrow matrices beside it that are trained."""

    def __init__(self, linear, dim):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        n_out, n_in = getattr(self.weight, "ds_shape", self.weight.shape)
        self.lora_right_weight = nn.Parameter(torch.empty(n_in, dim))
        self.lora_left_weight = nn.Parameter(torch.zeros(dim, n_out))
        nn.init.kaiming_uniform_(self.lora_right_weight, a=math.sqrt(5))
        self.weight.requires_grad = False

    def fuse(self):
        self.weight.data += (self.lora_left_weight.t() @ self.lora_right_weight.t()).to(self.weight.dtype)

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) + x @ self.lora_right_weight @ self.lora_left_weight


def add_lora(model, part, dim):
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and part in name]
    for name in names:
        recursive_setattr(model, name, LoraLinear(recursive_getattr(model, name), dim))
    return model


def to_fetch(params):
    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def fuse_lora(model, is_stage_3):
    for name in [name for name, module in model.named_modules() if isinstance(module, LoraLinear)]:
        module = recursive_getattr(model, name)
        params = [module.weight, module.bias, module.lora_left_weight, module.lora_right_weight]
        with deepspeed.zero.GatheredParameters(
            to_fetch([p for p in params if p is not None]), modifier_rank=0, enabled=is_stage_3
        ):
            module.fuse()
    return model


def grouped_parameters(model, weight_decay, words=("bias", "norm.weight", "layernorm.weight")):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    is_plain = {name: any(word in name for word in words) for name, _ in named}
    groups = [
        {"params": [p for name, p in named if not is_plain[name]], "weight_decay": weight_decay},
        {"params": [p for name, p in named if is_plain[name]], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def mean_over_ranks(tensor):
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.SUM)
    return tensor / torch.distributed.get_world_size()


def evaluate(model, batches, device):
    model.eval()
    losses = 0.0
    for batch in batches:
        with torch.no_grad():
            losses += model(**{name: value.to(device) for name, value in batch.items()}).loss.float()
    model.train()
    return mean_over_ranks(losses / len(batches)).item()


def save_weights(model, args):
    saved = {}
    for name, param in model.named_parameters():
        if "lora" in name:
            continue
        if hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters(to_fetch([param]), enabled=args.zero_stage == 3):
                value = param.data.cpu().clone()
        else:
            value = param.cpu().clone()
        if args.global_rank == 0:
            saved[name] = value
    if args.global_rank == 0:
        torch.save(saved, os.path.join(args.output_dir, "pytorch_model.bin"))


def main():
    args = parse_args()
    get_accelerator().set_device(args.local_rank)
    device = torch.device(get_accelerator().device_name(), args.local_rank)
    deepspeed.init_distributed()
    args.global_rank = torch.distributed.get_rank()
    config = train_config(args)
    set_seed(args.seed)
    get_accelerator().manual_seed_all(args.seed)
    torch.distributed.barrier()

    hf_config = HfDeepSpeedConfig(config) if args.zero_stage == 3 else None  # noqa: F841  as long as it lives, models are made in parts
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**sizes, max_position_embeddings=64, vocab_size=VOCABULARY - 5, use_cache=False)
    )
    model.resize_token_embeddings(int(8 * math.ceil((VOCABULARY - 5) / 8.0)))
    if args.lora_dim > 0:
        model = add_lora(model, args.lora_module_name, args.lora_dim)
        if args.only_optimize_lora:
            for name, param in model.named_parameters():
                param.requires_grad = "lora_" in name
            if args.gradient_checkpointing:
                model.enable_input_require_grads()

    data, is_alone = Source(), args.local_rank == -1
    samplers = (
        [RandomSampler(data), SequentialSampler(data)]
        if is_alone
        else [DistributedSampler(data), DistributedSampler(data, shuffle=False)]
    )
    train_batches, eval_batches = (
        DataLoader(data, sampler=sampler, batch_size=args.per_device_train_batch_size) for sampler in samplers
    )
    optimizer_class = DeepSpeedCPUAdam if args.offload else FusedAdam
    optimizer = optimizer_class(grouped_parameters(model, args.weight_decay), lr=args.learning_rate, betas=(0.9, 0.95))
    n_updates = args.num_train_epochs * math.ceil(len(train_batches) / args.gradient_accumulation_steps)
    scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.num_warmup_steps, n_updates)
    model, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, args=args, config=config, lr_scheduler=scheduler, dist_init_required=True
    )
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()

    losses = [evaluate(model, eval_batches, device)]
    for _ in range(args.num_train_epochs):
        model.train()
        for batch in train_batches:
            outputs = model(**{name: value.to(device) for name, value in batch.items()}, use_cache=False)
            model.backward(outputs.loss)
            model.step()
        losses.append(evaluate(model, eval_batches, device))
        model.tput_timer.update_epoch_count()

    model.save_checkpoint(args.output_dir, tag="last")
    n_params = sum(p.ds_numel if hasattr(p, "ds_tensor") else p.numel() for p in model.module.parameters())
    plain = fuse_lora(model.module, args.zero_stage == 3) if args.lora_dim > 0 else model.module
    save_weights(plain, args)
    if args.global_rank == 0:
        result = {
            "losses": losses,
            "n_params": n_params,
            "rate": scheduler.get_last_lr()[0],
            "steps": model.global_steps,
            "stage": model.zero_optimization_stage(),
        }
        result["rows"] = [row.tolist() for row in data.rows]
        with open(os.path.join(args.output_dir, "result.json"), "w") as file:
            json.dump(result, file)


if __name__ == "__main__":
    main()
