"""Random combinations of parallelisms, adapters and recomputation against one plain torch process.

    python -m tests.deepspeed_c.engine.fuzz_parallel --cases 1000 --seed 1

A case is a dict of settings, drawn from its seed: a model of transformers whose weights and sequences are cut over
ranks or whose layers are in a pipeline, or plain layers in a pipeline. After some steps of SGD every trained weight
must have moved as far, and to the same place, as in the plain process. SGD shows a wrong scale of gradients; Adam would
hide it.

[Note: dropout] The plain process has to drop the same elements, and ranks draw in another order than one process does.
So with "keyed" dropout each layer draws one number from torch's generator, the key of its mask. Ranks report their keys
and the plain process makes the same masks. A layer that is computed again with other random numbers reports keys that
are too many. With "own" dropout the modules of the model drop by themselves, and both runs seed torch's generator
before each forward.
"""

from __future__ import annotations

import json
import random
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

import deepspeed_c
from tests import training
from tests.deepspeed_c.engine.fuzz import Case, cases_of, machine_of, parser_of
from tests.deepspeed_c.inject.families import VOCAB, make
from tests.deepspeed_c.pipe.models import Plain, loss_fn, micro_batches, module_of
from tests.deepspeed_c.zero.test_tensor_parallel import logical
from tests.hf.test_sequence import WAYS
from tests.ranks import RanksFailed, run_ranks

__all__ = ["CHOICES", "check_case", "draw", "main", "settled"]

# Setting -> its values. The first is the default and the simplest; all are drawn from, and likely values stand twice.
CHOICES: dict[str, list[Any]] = {
    "family": ["llama", "llama", "llama_tied_shared", "qwen3", "gpt2", "gpt_neox", "opt"], "tp": [1, 1, 2, 2],
    "sp": [1, 1, 2], "pp": [1, 1, 1, 2, 4], "pipeline_of": ["layers", "layers", "transformers"], "data": [1, 1, 2],
    "stage": [0, 1, 2, 3, 3], "precision": ["fp32", "fp32", "fp32", "bf16", "fp16", "autocast", "autocast"],
    "gas": [1, 2, 3], "clip": [0.0, 0.0, 0.3], "peft": ["none", "none", "all", "attention"],
    "recompute": ["none", "none", "auto", "budget"], "dropout": ["none", "none", "keyed", "own"],
    "attention": ["auto", "auto", "ring"], "loss": ["model's own", "gathered", "weighted", "of the vocabulary"],
    "schedule": ["1f1b", "gpipe", "zb_h1", "zb_v", "interleaved", "dualpipe_v"], "user_backward": [False, False, True],
    "bucket": [100_000, 3000], "products": ["torch", "widened"], "live": ["all", "all", "two units"],
}  # fmt: skip
STEPS, RATE, BATCH, TOKENS, DROPPED = 2, 0.3, 2, 12, 0.2
WITH_SEQUENCES = ("llama", "llama_tied_shared", "qwen3")
ATTENTION = {
    "gpt2": ["c_attn", "attn.c_proj"],
    "gpt_neox": ["query_key_value", "attention.dense"],
    "opt": ["q_proj", "k_proj", "v_proj", "out_proj"],
}
PRECISIONS = {
    "fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "loss_scale": 1024.0}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}  # fmt: skip
# Tolerances, relative to the distance that a weight moves. The bugs to find are wrong factors and missing terms.
TOLERANCE = {"fp32": 2e-3, "bf16": 0.2, "fp16": 0.1, "autocast": 0.2}
# Their outputs are whole on all tensor-parallel ranks.
NORMS = ("post_attention_layernorm", "ln_2", "self_attn_layer_norm", ".norm")


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    return settled({name: rng.choice(values) for name, values in CHOICES.items()})


def settled(case: Case) -> Case:
    """The case, with each setting put back to its default where the other settings leave it no effect."""
    case, default = dict(case), {name: values[0] for name, values in CHOICES.items()}

    def put_back(*names: str) -> None:
        case.update({name: default[name] for name in names})

    if case["pp"] > 1:
        put_back("sp", "user_backward")
        if case["pipeline_of"] == "layers":
            put_back("family", "tp", "peft")
        elif case["pp"] > 2:
            put_back("tp")
            if case["schedule"] not in ("gpipe", "zb_h1"):
                put_back("schedule")  # the others need two layers a stage and chunk
        if case["recompute"] == "budget":
            case["recompute"] = "auto"
        if case["schedule"] == "dualpipe_v" and case["gas"] < 2 * case["pp"]:
            case["schedule"] = "zb_v"  # refused
    else:
        put_back("schedule", "pipeline_of")
    if case["sp"] > 1 and case["family"] not in WITH_SEQUENCES:
        put_back("family")
    if case["sp"] == 1:
        put_back("loss", "attention")
    else:
        put_back("user_backward")  # refused: the losses of ranks have to be weighted
    if case["dropout"] == "own" and case["pp"] * case["tp"] * case["sp"] > 1:
        case["dropout"] = "keyed"
    if case["pp"] * case["tp"] * case["sp"] * case["data"] > 4:
        put_back("data")
    if case["precision"] == "fp32":
        put_back("products")
    if case["stage"] < 3:
        put_back("live")
    elif case["live"] != "all":
        case["bucket"] = 3000
    return case


def world_of(case: Case) -> int:
    return case["pp"] * case["tp"] * case["sp"] * case["data"]


def config_of(case: Case) -> dict[str, Any]:
    config: dict[str, Any] = training.config(
        case["stage"],
        zero={"stage3_param_persistence_threshold": 20, "reduce_bucket_size": case["bucket"]},
        rows=BATCH,
        accumulate=case["gas"],
        gradient_clipping=case["clip"],
        lr=RATE,
        **PRECISIONS[case["precision"]],
    )
    if case["live"] == "two units":
        most = max(case["bucket"], *(param.numel() for param in make(case["family"]).parameters()))
        config["zero_optimization"] |= {"stage3_max_live_parameters": 2 * most, "stage3_prefetch_bucket_size": 0}
    if case["tp"] > 1:
        config["tensor_parallel"] = {"autotp_size": case["tp"]}
    if case["sp"] > 1:
        config["sequence_parallel_size"] = case["sp"]
        config["sequence_parallel"] = {
            "loss": "part" if case["loss"] == "weighted" else "auto",
            "attention": case["attention"],
        }
    if case["recompute"] != "none" and case["pp"] == 1:
        config["activation_checkpointing"] = {"layers": "auto"}
        if case["recompute"] == "budget":
            config["activation_checkpointing"]["budget"] = "150KiB"
    return config


def model_of(case: Case) -> torch.nn.Module:
    """The model, in fp32 and the same on every rank. Its adapters change the output from the beginning."""
    model = make(case["family"]).train()
    p = DROPPED if case["dropout"] == "own" else 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = p
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, p)
    if case["peft"] == "none":
        return model
    from peft import LoraConfig, get_peft_model

    names = ATTENTION.get(case["family"], ["q_proj", "k_proj", "v_proj", "o_proj"])
    torch.manual_seed(3)
    model = get_peft_model(
        model,
        LoraConfig(
            r=3,
            lora_alpha=5,
            lora_dropout=p,
            target_modules="all-linear" if case["peft"] == "all" else names,
            task_type="CAUSAL_LM",
        ),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.1)
    return model


def batch(step: int, micro: int, data_rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + data_rank)
    tokens = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=generator)
    labels = tokens.clone()
    labels[0, : 2 + data_rank] = -100
    return {"input_ids": tokens, "labels": labels}


# By layer, for each forward: the key of each part of the sequence, and the places of its tokens.
Forwards = dict[str, list[list[tuple[int, list[int]]]]]


def seed_of(step: int, micro: int, data_rank: int) -> int:
    return 1000 * step + 10 * micro + data_rank


class Drops:
    """Drops elements after a norm of each layer: see [Note: dropout].

    ``given``: the masks of the plain process. Without it keys are drawn, and kept.
    """

    def __init__(self, model: torch.nn.Module, given: Forwards | None = None) -> None:
        # As a dictionary: in order, and a layer that is computed again draws the key of the first time.
        self.keys: dict[str, dict[int, None]] = {}
        self.positions = list(range(TOKENS))
        self._left = None if given is None else {name: iter(forwards) for name, forwards in given.items()}
        for name, module in model.named_modules():
            if name.endswith(NORMS):
                self._add_to(module, plain_name(name))

    def _add_to(self, module: torch.nn.Module, name: str) -> None:
        self.keys[name] = {}

        def drop(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return output
            if self._left is not None:
                parts = next(self._left[name])
            else:
                key = int(torch.randint(2**40, (1,)))
                self.keys[name][key] = None
                parts = [(key, self.positions)]
            factors = torch.full((TOKENS, output.shape[-1]), torch.nan)
            for key, positions in parts:
                drawn = torch.rand(factors.shape, generator=torch.Generator().manual_seed(key))
                factors[positions] = ((drawn > DROPPED) / (1 - DROPPED))[positions]
            mine = list(range(TOKENS)) if self._left is not None else self.positions
            return output * factors[mine[: output.shape[1]]].to(output.dtype)

        module.register_forward_hook(drop)


def plain_name(name: str) -> str:
    """The name in the plain model of a parameter or module of a pipeline or an adapted model."""
    name = name.removeprefix("base_model.model.").removeprefix("built.")
    if name.startswith("tied_modules.embed."):
        return name.replace("tied_modules.embed", "0")
    number, _, rest = name.removeprefix("tied_modules.").partition(".")
    of_transformers = rest.startswith(("model.", "transformer.", "gpt_neox.", "lm_head.", "embed_out."))
    return rest if of_transformers and (number.isdigit() or number == "embeddings") else name


Weights = dict[str, torch.Tensor]


class Outcome(NamedTuple):
    weights: Weights
    data_rank: int
    keys: dict[str, list[int]]
    positions: list[list[int]]
    """For each forward, places of this rank's tokens in the sequence."""


def forwards_of(case: Case, outcomes: list[Outcome]) -> Forwards:
    """The ``given`` of ``Drops``, in the order of ``plain``. Raises AssertionError if a layer drew again, or ranks with
    the same tokens drew differently."""
    found: list[dict[str, Any]] = [{} for _ in range(case["data"])]
    n = STEPS * case["gas"]
    for rank, outcome in enumerate(outcomes):
        for name, keys in outcome.keys.items():
            assert len(keys) == n, f"rank {rank}: {name} drew {len(keys)} keys in {n} forwards"
            forwards = found[outcome.data_rank].setdefault(name, [[] for _ in range(n)])
            for parts, key, positions in zip(forwards, keys, outcome.positions, strict=True):
                if (key, positions) not in parts:
                    parts.append((key, positions))
    for forwards in found:
        for name, each in forwards.items():
            for parts in each:
                places = sorted(place for _, positions in parts for place in positions)
                assert places == list(range(TOKENS)), (
                    f"ranks that hold the same tokens have other keys of {name}: {parts}"
                )
    gas = case["gas"]
    return {
        name: [
            parts
            for step in range(STEPS)
            for of_rank in found
            for parts in of_rank[name][step * gas : (step + 1) * gas]
        ]
        for name in found[0]
    }


def data_of(case: Case, step: int, data_rank: int) -> list[Any]:
    """The micro-batches of a step: of listed layers (input, labels), else a dictionary."""
    if is_listed(case):
        return micro_batches(step, data_rank, case["gas"])
    return [batch(step, micro, data_rank) for micro in range(case["gas"])]


def is_listed(case: Case) -> bool:
    return case["pp"] > 1 and case["pipeline_of"] == "layers"


def plain(case: Case, outcomes: list[Outcome]) -> tuple[Weights, Weights]:
    """All trained weights (at the start, after the steps) of one process. Masters are fp32; the rest is bf16 in a bf16
    case."""
    dtype = torch.bfloat16 if case["precision"] == "bf16" else torch.float32
    model = Plain() if is_listed(case) else model_of(case)
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    start = {name: value.clone() for name, value in masters.items()}
    model.to(dtype)
    if case["dropout"] == "keyed":
        Drops(model, forwards_of(case, outcomes))
    for step in range(STEPS):
        for rank in range(case["data"]):
            for micro, given in enumerate(data_of(case, step, rank)):
                torch.manual_seed(seed_of(step, micro, rank))
                with autocast_of(case):
                    if is_listed(case):
                        loss = loss_fn(model(given[0]), given[1])
                    else:
                        loss = model(**given, use_cache=False).loss
                (loss / (case["gas"] * case["data"])).backward()
        params = {name: p for name, p in model.named_parameters() if name in masters}
        norm = torch.stack([p.grad.float().norm() for p in params.values()]).norm().item()
        scale = min(1.0, case["clip"] / (norm + 1e-6)) if case["clip"] else 1.0
        for name, p in params.items():
            masters[name] -= RATE * scale * p.grad.float()
            p.data.copy_(masters[name])
            p.grad = None
    return by_plain_name(start), by_plain_name(masters)


def autocast_of(case: Case) -> AbstractContextManager:
    return torch.autocast("cpu", torch.bfloat16) if case["precision"] == "autocast" else nullcontext()


def by_plain_name(weights: Weights) -> Weights:
    return {plain_name(name): value for name, value in weights.items()}


def train_pipeline(case: Case) -> Outcome:
    options: dict[str, Any] = {"schedule": case["schedule"]}
    if case["schedule"] == "interleaved":
        options["virtual_stages"] = 2
    if case["recompute"] != "none":
        options["activation_checkpoint_interval"] = 1
    if is_listed(case):
        net = module_of(case["pp"], **options)
    else:
        from deepspeed_c.pipe import from_transformers

        net = from_transformers(model_of(case), case["pp"], **options)
    drops = Drops(net) if case["dropout"] == "keyed" else None
    trained = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed_c.initialize(model=net, model_parameters=trained, config=config_of(case))
    with engine:
        data_rank = net.mpu().get_data_parallel_rank()
        for step in range(STEPS):
            given = data_of(case, step, data_rank)
            if not is_listed(case):
                given = [(each["input_ids"], each["labels"]) for each in given]
            engine.train_batch(iter(given))
        return outcome_of(engine, data_rank, drops, [list(range(TOKENS))] * (STEPS * case["gas"]))


def outcome_of(engine: Any, data_rank: int, drops: Drops | None, positions: list[list[int]]) -> Outcome:
    keys = {} if drops is None else {name: list(of_layer) for name, of_layer in drops.keys.items()}
    return Outcome(by_plain_name(logical(engine)), data_rank, keys, positions)


def train(rank: int, world: int, case: Case) -> Outcome:
    with machine_of(case):
        return train_pipeline(case) if case["pp"] > 1 else train_whole(case)


def train_whole(case: Case) -> Outcome:
    from deepspeed_c.sequence.loader import UlyssesSPDataLoaderAdapter

    model, sp = model_of(case), case["sp"]
    trained = [p for p in model.parameters() if p.requires_grad]
    drops = Drops(model) if case["dropout"] == "keyed" else None
    engine = deepspeed_c.initialize(model=model, model_parameters=trained, config=config_of(case))[0]
    with engine:
        data_rank = engine._mesh.index("dp_replicate", "dp_shard")
        places = [(step, micro) for step in range(STEPS) for micro in range(case["gas"])]
        given: list[dict[str, torch.Tensor]] = [batch(*place, data_rank) for place in places]
        if sp > 1:
            group = engine.get_sequence_parallel_group()
            loader = UlyssesSPDataLoaderAdapter(given, torch.distributed.get_rank(group), group, sp, engine.device)
            # All ranks of a sequence load the same batches here, so the loader yields each batch ``sp`` times.
            # The first copy is trained on.
            given = [part for i, part in enumerate(loader) if i % sp == 0]
        positions = [part["position_ids"][0].tolist() if sp > 1 else list(range(TOKENS)) for part in given]
        for place, part, its_positions in zip(places, given, positions, strict=True):
            torch.manual_seed(seed_of(*place, data_rank))
            if drops is not None:
                drops.positions = its_positions
            loss = loss_of(case, engine, part)
            loss.backward() if case["user_backward"] else engine.backward(loss)
            engine.step()
        assert engine.skipped_steps == 0 and engine.global_steps == STEPS
        return outcome_of(engine, data_rank, drops, positions)


def loss_of(case: Case, engine: Any, part: dict[str, torch.Tensor]) -> torch.Tensor:
    if case["sp"] == 1:
        return engine(**part, use_cache=False).loss
    labels = part["shift_labels"]
    if case["loss"] != "of the vocabulary":
        return WAYS[case["loss"]](engine(**part, labels=labels, use_cache=False).loss, labels)
    from deepspeed_c.sequence.loss import vocab_sequence_parallel_cross_entropy

    group = engine.get_sequence_parallel_group()
    inputs = {name: value for name, value in part.items() if name != "shift_labels"}
    logits = engine(**inputs, use_cache=False).logits
    losses = vocab_sequence_parallel_cross_entropy(logits.transpose(0, 1), labels.T, group)
    n_valid = (labels != -100).sum()
    torch.distributed.all_reduce(n_valid, group=group)
    return losses.sum() / n_valid


def check_case(case: Case, *, timeout: float = 120.0) -> str:
    """A description of the case's failure; empty if there is none."""
    try:
        outcomes = run_ranks(world_of(case), train, case, timeout=timeout, preload="tests.hf.preload")
        start, want = plain(case, outcomes)
    except (RanksFailed, AssertionError) as error:
        return str(error)
    seen: set[str] = set()
    moved = {name: (value - start[name]).norm().item() for name, value in want.items()}
    least = 0.02 * max(moved.values())
    found = []
    for rank, (got, *_) in enumerate(outcomes):
        seen |= set(got)
        for name in sorted(set(got) & set(want)):
            off = (got[name] - want[name]).norm().item() / max(moved[name], least)
            if not off <= TOLERANCE[case["precision"]]:
                far = (got[name] - start[name]).norm().item() / max(moved[name], 1e-30)
                found.append(
                    (off, f"rank {rank}: {name} is off by {off:.3g} of its way, and moved {far:.3g} times as far")
                )
    if seen != set(want):
        return f"other weights are trained: {sorted(seen ^ set(want))[:6]}"
    return "; ".join(text for _, text in sorted(found, reverse=True)[:4])


def told(case: Case) -> str:
    return json.dumps({name: value for name, value in case.items() if value != CHOICES[name][0]})


def main(arguments: list[str] | None = None) -> int:
    options = parser_of("tests.deepspeed_c.engine.fuzz_parallel", __doc__.splitlines()[0]).parse_args(arguments)
    torch.set_num_threads(1)
    cases = cases_of(options, CHOICES, draw, settled)
    n_failed, began = 0, time.monotonic()
    for label, case in cases:
        if problem := check_case(case):
            n_failed += 1
            print(f"{label}: --case '{told(case)}'\n{problem}", flush=True)
    print(f"{len(cases)} cases, {n_failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if n_failed else 0


if __name__ == "__main__":
    # Ranks import the functions that they run by the name of this module.
    from tests.deepspeed_c.engine import fuzz_parallel

    sys.exit(fuzz_parallel.main())
