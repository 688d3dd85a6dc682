"""A script for the tuner: trains a layer, and does as its first argument says."""

import argparse
import sys

import torch

import deepspeed_c
from tests.toys import Chain, mean_square
from tests.training import engine_of, step

parser = argparse.ArgumentParser()
parser.add_argument("--behaviour", default="good")
parser.add_argument("--width", type=int, default=8)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--micro", type=int)
parser.add_argument("--local_rank", type=int)
deepspeed_c.add_config_arguments(parser)
args = parser.parse_args()
config = args.deepspeed_config
if args.behaviour == "own configuration":
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}}
model = Chain(end=mean_square, layer=torch.nn.Linear(args.width, args.width))
engine = engine_of(model, config)
size = 3 if args.behaviour == "own batch" else engine.train_micro_batch_size_per_gpu()
if args.behaviour == "fails at 2" and size == 2:
    sys.exit("no batch of 2 is wanted")
print("error: only a word on stderr", file=sys.stderr)
for _ in range(args.steps):
    for _ in range(engine.gradient_accumulation_steps()):
        step(engine, torch.ones(size, args.width))
print(f"trained to the end, micro {args.micro}")
