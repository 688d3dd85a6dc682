"""How long does a linear layer take whose weight is packed codes, compared with the fp32 layer?

A weight [4096, 4096] of 8 bits with a scale for each row, and of 4 bits in groups of 64, times rows of fp32 or bf16. The
peers are torch's ``linear`` with the fp32 weight, and the weight dequantized for each call. With one row both layers wait
for memory, so the bound is the ratio of the bytes that they read ("bytes_to_fp32"). "codes" never dequantizes, "ours"
chooses by the number of rows (FEW_ROWS). Where torchao is installed (pip install --no-deps torchao), its dynamic int8
takes part with fp32 rows: it rounds the rows to 8 bits too, and multiplies integers.
Run: python -m benchmarks.ops.packed_linear [--width 4096] [--rounds 15] [--rows 1 8 128]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable

import torch

from benchmarks.measure import keep_freed_memory, machine, median_spread, ratios, require, time_alternately
from deepspeed_c.ops import quant

GROUPS = {8: 0, 4: 64}


def packed_of(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    quantized = quant.quantize(weight, f"int{bits}", group=GROUPS[bits])
    codes = quantized.codes.view(torch.uint8)
    return (codes if bits == 4 else codes.bitwise_xor(128)).view(torch.int32), quantized.scales


def steps_of(weight: torch.Tensor, x: torch.Tensor, bits: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    packed, scales = packed_of(weight, bits)
    rest = (packed, scales, None, bits, GROUPS[bits])
    x32 = x.float()
    return {
        "ours": lambda x: quant.packed_linear(x, packed, scales, bits=bits, group=GROUPS[bits]),
        "codes": lambda x: torch.ops.deepspeed_c.quant_packed_linear(x, *rest),
        "dequantized": lambda x: quant._formula_packed_linear(x, *rest),
        "fp32": lambda _: torch.nn.functional.linear(x32, weight),
    }


def torchao_step(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return torchao's layer of weights with 8 bits and a scale for each row, whose input is quantized by rows."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_  # a peer, mostly absent

    layer = torch.nn.Linear(*weight.T.shape, bias=False)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    quantize_(layer, Int8DynamicActivationInt8WeightConfig())
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    keep_freed_memory()
    has_torchao = importlib.util.find_spec("torchao") is not None
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(args.width, args.width, generator=generator)
    for bits, dtype, n_rows in ((b, d, m) for b in GROUPS for d in (torch.float32, torch.bfloat16) for m in args.rows):
        x = torch.randn(n_rows, args.width, generator=generator).to(dtype)
        steps = steps_of(weight, x, bits)
        wanted = steps["dequantized"](x).float()
        worst = ((steps["codes"](x).float() - wanted).norm() / wanted.norm()).item()
        # Sums of 4096 products in another order differ by some units of the last place of fp32.
        require(worst < max(2 * torch.finfo(dtype).eps, 2e-6), f"products from codes and from floats agree: {worst}")
        if has_torchao and bits == 8 and dtype == torch.float32:
            steps["torchao"] = torchao_step(weight)
            # Rows of 8 bits are off by about a hundredth.
            worst = ((steps["torchao"](x) - wanted).norm() / wanted.norm()).item()
            require(worst < 0.03, f"torchao's products and ours agree: {worst}")
        times = time_alternately(steps, x, args.rounds, warmup=1)  # the first round gets the memory of the results
        packed, scales = packed_of(weight, bits)
        for name in (name for name in steps if name != "fp32"):
            line = {"benchmark": "packed_linear", "contender": name, "bits": bits, "dtype": str(dtype)[6:]}
            line |= {"rows": n_rows, "width": args.width, "ms": round(1e3 * median_spread(times[name])[0], 3)}
            line |= ratios("ratio_to_fp32", times[name], times["fp32"])
            line |= ratios("ratio_to_dequantized", times[name], times["dequantized"])
            if "torchao" in times:
                line |= ratios("ratio_to_torchao", times[name], times["torchao"])
            if n_rows == 1:
                line["bytes_to_fp32"] = round((packed.nbytes + scales.nbytes) / weight.nbytes, 4)
            print(json.dumps({**line, "threads": torch.get_num_threads(), "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
