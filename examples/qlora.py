"""QLoRA: adapters learn the Python standard library's source beside a frozen Llama in 4 bits. To start it:

    deepspeed_c --num_procs 2 examples/qlora.py

Without ``--model`` a new Llama with random weights is saved first, in place of a downloaded one. transformers loads it
with linear layers of 4 bits (nf4, by bitsandbytes). At stage 3 a rank keeps its share of these codes alone, also while
the model is loaded, and gathers a layer's codes while it computes with them.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from text import Windows, spread, standard_library
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, set_seed

import deepspeed_c
from deepspeed_c import comm

EVAL_WINDOWS = 64  # of all ranks


def main() -> None:
    args = parse_arguments()
    deepspeed_c.init_distributed(verbose=False)
    set_seed(args.seed)
    train_text, held_out_text = standard_library(args.lib_bytes)
    folder = args.model or args.out / "base"
    if args.model is None and comm.get_rank() == 0:
        new_model(args).save_pretrained(folder)
    comm.barrier()

    settings = config(args)
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    # transformers itself shards no quantized model while it loads one. The context does.
    with deepspeed_c.zero.Init(config_dict_or_path=settings):
        base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear"))
    engine, _, loader, _ = deepspeed_c.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        training_data=Windows(train_text, args.context),
        config=settings,
    )
    with engine:
        held_out = Windows(held_out_text, args.context)
        before = evaluate(engine, held_out)
        engine.train()
        for windows in islice(deepspeed_c.utils.RepeatingLoader(loader), args.steps):
            engine.backward(loss_of(engine, windows))
            engine.step()
        after = evaluate(engine, held_out)
        adapters = engine.module_state_dict()
        if comm.get_rank() == 0:
            model.save_pretrained(args.out / "adapter", state_dict=adapters)
            print(f"held-out loss {before:.3f} nats per byte at the beginning, {after:.3f} at the end")
        held, whole = base_bytes(model)
        print(f"rank {comm.get_rank()} holds {held:,} of the base's {whole:,} bytes", flush=True)


def new_model(args: argparse.Namespace) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,  # one token is one byte
            hidden_size=args.width,
            intermediate_size=args.width * 11 // 4,
            num_hidden_layers=args.layers,
            num_attention_heads=max(1, args.width // 64),
            num_key_value_heads=max(1, args.width // 64),
            max_position_embeddings=args.context + 1,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def config(args: argparse.Namespace) -> dict:
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "weight_decay": 0.0}},
        # Weights up to a threshold stay whole on each rank. The weights of this small model are below the default.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "steps_per_print": None,
    }


def loss_of(engine: deepspeed_c.DeepSpeedEngine, windows: torch.Tensor) -> torch.Tensor:
    tokens = windows.to(engine.device).long()
    return engine(input_ids=tokens, labels=tokens).loss  # the model shifts the labels


@torch.no_grad()
def evaluate(engine: deepspeed_c.DeepSpeedEngine, held_out: Windows) -> float:
    """Return the mean loss over windows spread evenly over the text; each rank takes its share of them."""
    engine.eval()
    mine = spread(held_out, EVAL_WINDOWS)[comm.get_rank() :: comm.get_world_size()]
    loss = loss_of(engine, torch.stack([held_out[i] for i in mine])).float()
    comm.all_reduce(loss)
    return loss.item() / comm.get_world_size()


def base_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Return the bytes of the frozen weights that this rank keeps, and the bytes of all. Each rank has all scales."""
    frozen = [p for p in model.parameters() if not p.requires_grad]
    scales = sum(p.quant_state.absmax.nbytes for p in frozen if hasattr(p, "quant_state"))
    held, whole = sum(p.ds_tensor.nbytes for p in frozen), sum(p.ds_numel * p.element_size() for p in frozen)
    return held + scales, whole + scales


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher, and ignored")
    parser.add_argument("--model", type=Path, help="a saved model to start from; default: a new one")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--lora", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--layers", type=int, default=4, help="of a new model")
    parser.add_argument("--width", type=int, default=256, help="of a new model")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--batch", type=int, default=8, help="windows of a rank and step")
    parser.add_argument(
        "--lib_bytes", type=int, default=8 << 20, help="how much of the standard library is read, bytes"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/qlora"), help="folder for the new model and the adapters")
    return parser.parse_args()


if __name__ == "__main__":
    main()
