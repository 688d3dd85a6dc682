"""Train a classifier of images with mixtures of experts, by the calls of a program for DeepSpeed. To start it:

    deepspeed_c --num_procs 2 examples/cifar_moe.py --moe --ep-world-size 2 --num-experts 2 2 --mlp-type residual \
        --top-k 1 --min-capacity 0 --noisy-gate-policy RSample

The images have the size of CIFAR-10's, and are made here: coloured waves whose direction is the class, and noise. With
the imports of ``deepspeed`` in place of ``deepspeed_c`` it is a program for DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import deepspeed_c as deepspeed
from deepspeed_c.moe.layer import MoE
from deepspeed_c.moe.utils import split_params_into_different_moe_groups_for_optimizer

N_CLASSES, SIDE = 10, 32  # as in CIFAR-10
AUX_WEIGHT = 0.01


class Images(torch.utils.data.Dataset):
    """``n`` images [3, 32, 32], each with its class. The class gives waves their direction and their length; their places
    are random, for each colour, and noise is added.
    """

    def __init__(self, n: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(n) % N_CLASSES
        phases = 6.3 * torch.rand(n, 3, 1, 1, generator=random)
        y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        angle = self.labels.view(n, 1, 1, 1) * 3.14159 / N_CLASSES
        speed = 0.4 + 0.08 * (self.labels % 3).view(n, 1, 1, 1)
        waves = torch.sin(speed * (x * angle.cos() + y * angle.sin()) + phases)
        self.images = waves + 0.5 * torch.randn(n, 3, SIDE, SIDE, generator=random)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[i], self.labels[i]


class Net(nn.Module):
    """Two convolutions, two layers, and a layer of experts for each number of ``args.num_experts``."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 5), nn.Conv2d(8, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84)
        self.moe_layers = nn.ModuleList(
            MoE(
                hidden_size=84,
                expert=nn.Linear(84, 84),
                num_experts=n_experts,
                ep_size=args.ep_world_size,
                use_residual=args.mlp_type == "residual",
                k=args.top_k,
                min_capacity=args.min_capacity,
                noisy_gate_policy=args.noisy_gate_policy,
            )
            for n_experts in (args.num_experts if args.moe else ())
        )
        self.head = nn.Linear(84, N_CLASSES)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores of the classes, sum of the losses that spread images over experts)."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        losses = x.new_zeros((), dtype=torch.float32)
        for layer in self.moe_layers:
            output, l_aux, _ = layer(x)
            x, losses = F.relu(output), losses + l_aux
        return self.head(x), losses


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    net = Net(args)
    parameters = {"params": list(net.parameters()), "name": "parameters"}
    engine, _, loader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=split_params_into_different_moe_groups_for_optimizer(parameters),
        training_data=Images(args.images, seed=args.seed),
        config=configuration(args),
    )
    held_out = Images(20 * N_CLASSES, seed=args.seed + 1)
    before = accuracy(engine, held_out)
    losses = []
    for _ in range(args.epochs):
        engine.train()
        for images, labels in loader:
            scores, l_aux = engine(images.to(engine.device))
            loss = F.cross_entropy(scores, labels.to(engine.device)) + AUX_WEIGHT * l_aux
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    after = accuracy(engine, held_out)
    if torch.distributed.get_rank() == 0:
        print(f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
        print(f"accuracy {before:.1%} before, {after:.1%} after; chance is {1 / N_CLASSES:.0%}", flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps({"before": before, "after": after, "losses": losses}))


@torch.no_grad()
def accuracy(engine: nn.Module, held_out: Images) -> float:
    """Return the share of images whose class is right. All ranks evaluate all images, so that experts get tokens from
    each.
    """
    engine.eval()
    scores, _ = engine(held_out.images.to(engine.device))
    return (scores.argmax(1).cpu() == held_out.labels).float().mean().item()


def configuration(args: argparse.Namespace) -> dict:
    """Return DeepSpeed's configuration."""
    return {
        "train_batch_size": args.batch,
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-3, "warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
        "steps_per_print": 1_000_000,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a classifier of images with mixtures of experts.")
    parser.add_argument("--moe", action="store_true", help="use layers of experts")
    parser.add_argument("--ep-world-size", type=int, default=1, help="ranks that hold the experts of a layer together")
    parser.add_argument(
        "--num-experts", type=int, nargs="+", default=[2], help="experts of each layer, one number each"
    )
    parser.add_argument("--mlp-type", choices=("standard", "residual"), default="standard", help="MoE, or residual MoE")
    parser.add_argument("--top-k", type=int, default=1, help="experts of each image")
    parser.add_argument("--min-capacity", type=int, default=0, help="least number of places of an expert")
    parser.add_argument("--noisy-gate-policy", choices=("RSample", "Jitter"), help="noise of the gates (default: none)")
    parser.add_argument("--stage", type=int, default=0, choices=(0, 1, 2, 3), help="ZeRO stage")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=640, help="training images")
    parser.add_argument("--batch", type=int, default=32, help="images of a step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for accuracy and losses")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by launchers that set no environment")
    return deepspeed.add_config_arguments(parser).parse_args()


if __name__ == "__main__":
    main()
