"""A training script in the style of Megatron-DeepSpeed. The imports at its top are copied from there. Features that its
arguments turn off are not used. The script trains two steps, and rank 0 saves the weights.
"""

# ruff: noqa: F401  (imports that nobody uses are the point)

import argparse
import math

import deepspeed
import deepspeed.runtime.hybrid_engine
import deepspeed.runtime.pipe.schedule
import torch
from deepspeed import PipelineModule, init_inference
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.real_accelerator import get_accelerator as real_accelerator
from deepspeed.checkpoint import DeepSpeedCheckpoint
from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state
from deepspeed.compression.compress import init_compression, redundancy_clean
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import has_moe_layers, is_moe_param
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups

N_VOCABULARY, N_TOKENS, WIDTH, N_HEADS = 61, 12, 24, 3
ACCUMULATION, MICRO, N_STEPS, CLIP = 2, 3, 2, 0.7


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, N_HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(torch.nn.Module):
    def __init__(self, num_experts=1):
        super().__init__()
        self.norm_1, self.norm_2, self.attention = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH), Attention()
        mlp = torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))
        self.mlp: MoE | torch.nn.Module = mlp if num_experts == 1 else MoE(WIDTH, mlp, num_experts=num_experts)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        y = self.mlp(self.norm_2(x))
        return x + (y[0] if isinstance(self.mlp, MoE) else y)


class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(N_VOCABULARY, WIDTH), torch.nn.Embedding(N_TOKENS, WIDTH)
        self.layers, self.norm = torch.nn.ModuleList(Layer() for _ in range(2)), torch.nn.LayerNorm(WIDTH)

    def forward(self, tokens):
        x = self.words(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.norm(x) @ self.words.weight.T
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batches(rank, n_ranks):
    """All micro-batches of a rank, cut from a table that does not depend on the number of ranks."""
    tokens = torch.randint(
        N_VOCABULARY, (N_STEPS, 2, ACCUMULATION, MICRO, N_TOKENS), generator=torch.Generator().manual_seed(5)
    )
    return tokens[:, rank].flatten(0, 1) if n_ranks == 2 else tokens.flatten(1, 3)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-4, weight_decay=0.1)


def make_model():
    torch.manual_seed(3)
    return GPT()


def main():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    for switch in ("compression", "random-ltd", "curriculum", "hybrid", "profile", "universal"):
        parser.add_argument(f"--{switch}", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--save")
    args = parser.parse_args()
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    model = make_model()
    if args.compression:
        model = init_compression(model, args.deepspeed_config)
    if args.random_ltd:
        model = convert_to_random_ltd(model, Layer)
    assert not any(isinstance(module, (MoE, PipelineModule, RandomLayerTokenDrop)) for module in model.modules())
    assert not has_moe_layers(model)[0] and not any(map(is_moe_param, model.parameters()))
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": args.stage},
    }
    # Megatron makes its configuration itself and takes the path out of args: DeepSpeed refuses both.
    path, args.deepspeed_config = args.deepspeed_config, None
    engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=adam(model.parameters()), config=config)
    assert not isinstance(engine, deepspeed.runtime.hybrid_engine.DeepSpeedHybridEngine)
    for tokens in batches(dist.get_rank(), dist.get_world_size()):
        engine.backward(engine(tokens))
        engine.step()
    see_memory_usage("after training", force=False)
    if args.compression:
        redundancy_clean(engine, path)
    weights = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            weights[name] = parameter.detach().clone()
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "steps": engine.global_steps}, args.save)
    dist.barrier()


if __name__ == "__main__":
    main()
