"""A small convolutional network, trained with the calls of DeepSpeed's CIFAR-10 example on pictures that are drawn here. Rank 0 writes OUTPUT."""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.nn import functional as F

N_CLASSES, N_TRAIN, N_TEST = 10, 192, 100


def add_argument():
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--epochs", default=3, type=int)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--log-interval", type=int, default=2000)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--stage", default=0, type=int, choices=[0, 1, 2, 3])
    parser.add_argument("--moe-param-group", default=False, action="store_true")
    parser.add_argument("--output")
    return deepspeed.add_config_arguments(parser).parse_args()


def create_moe_param_groups(model):
    parameters = {"params": list(model.parameters()), "name": "parameters"}
    return split_params_into_different_moe_groups_for_optimizer(parameters)


def ds_config(args):
    return {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.003, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.003, "warmup_num_steps": 5},
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {
            "enabled": args.dtype == "fp16",
            "fp16_master_weights_and_grads": False,
            "loss_scale": 0,
            "loss_scale_window": 500,
            "hysteresis": 2,
            "min_loss_scale": 1,
            "initial_scale_power": 15,
        },
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": args.stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
        },
    }


class Pictures(torch.utils.data.Dataset):
    """A bright bar and noise: its place is the class."""

    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.pictures = torch.randn(n, 3, 32, 32, generator=generator) / 4
        for i in range(n):
            self.pictures[i, :, 3 * (i % N_CLASSES) : 3 * (i % N_CLASSES) + 3] += 1

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return self.pictures[i], i % N_CLASSES


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, N_CLASSES)

    def forward(self, x):
        x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x))))))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.view(-1, 16 * 5 * 5))))))


def accuracy(engine, testset, device, dtype):
    engine.eval()
    n_right = 0
    with torch.no_grad():
        for images, labels in torch.utils.data.DataLoader(testset, batch_size=4):
            predicted = engine(images.to(device).to(dtype)).argmax(1)
            n_right += (predicted == labels.to(device)).sum().item()
    return n_right / len(testset)


def main():
    args = add_argument()
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK")))
    if torch.distributed.get_rank() != 0:
        torch.distributed.barrier()
    trainset, testset = Pictures(N_TRAIN, 0), Pictures(N_TEST, 1)
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()

    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    if args.moe_param_group:
        parameters = create_moe_param_groups(net)
    engine, _, batches, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=ds_config(args)
    )
    device = get_accelerator().device_name(engine.local_rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else torch.float
    criterion = nn.CrossEntropyLoss()
    before = accuracy(engine, testset, device, dtype)
    losses = []
    for _ in range(args.epochs):
        engine.train()
        for images, labels in batches:
            loss = criterion(engine(images.to(device).to(dtype)), labels.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    after = accuracy(engine, testset, device, dtype)
    if engine.global_rank == 0:
        with open(args.output, "w") as file:
            json.dump(
                {"before": before, "after": after, "losses": losses, "steps": engine.global_steps, "dtype": str(dtype)},
                file,
            )


if __name__ == "__main__":
    main()
