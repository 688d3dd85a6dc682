"""The goals of the benchmarks, each with its limit and the place of its measurement."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.results import Line

N_MAIN = 8  # figures that the README shows


class Figure(NamedTuple):
    """A goal, and the place of its measurement."""

    what: str
    goal: str  # "<= 1.25" or ">= 4"
    benchmark: str  # name of the benchmark that measures it
    chosen: Line  # chooses the line of its results
    key: str  # name of the ratio in the line
    is_main: bool = False  # whether the README shows it
    why_not: str = ""  # a reason, shown if the goal is not met; `a key` of the line stands for its value
    is_important: bool = False  # whether docs/performance.md shows it if the goal is met, as it shows the main ones


# Measured beside this benchmark, on its machine: 17 of 23 ms of a token in products, 14 in a read by C.
_TOKEN = "a quarter of a token's time is the Python of the model's modules; the products take 1.2 times a read"

# By case and phase: the reason why an operator of nn_ops may miss its goal. Each reason was found by timing the
# operator's loop alone in the first-level cache.
_ACTIVATION = (
    "most of its time in cache is a division and an exponential an element, which keep the same bits on any processor"
)
WHY_NOT = {
    ("gelu", "forward"): "most of its time in cache is the error function, which keeps the same bits on any processor",
    (
        "rms_norm + residual",
        "forward",
    ): "in float32 two thirds of its time are memory: two tensors are read and two written",
    ("swiglu", "forward"): _ACTIVATION,
    ("swiglu", "backward"): _ACTIVATION,
    (
        "bias_dropout_residual",
        "backward",
    ): "half of its time in cache is drawing the numbers again, so that no mask is kept",
}
_HALVES = "most of it is not exchange: it takes `ratio_to_halves` of the time of two processes of half the tokens each that share none"
_LINEAR = "torch multiplies by the weights of `nn.Linear` in 4 times the time of fp32, which is the bound, and by transposed ones in 40 times"

FIGURES = [
    *(
        Figure(
            f"training step, 29M GPT, {dtype}, 2 ranks, stage {stage}: over DDP with torch's fused AdamW",
            "<= 1",
            f"train_step_{dtype}",
            {"contender": f"stage{stage}"},
            "ratio_to_ddp",
            is_main=(dtype, stage) == ("fp32", 2),
        )
        for dtype in ("fp32", "bf16")
        for stage in (0, 1, 2)
    ),
    *(
        Figure(
            f"training step, 29M GPT, bf16, instructions up to AVX2, 2 ranks, stage 2: over {what}",
            goal,
            "products_step",
            {"contender": "auto", "isa": "avx2"},
            f"ratio_to_{other}",
            is_important=other == "fp32",
        )
        for other, what, goal in (
            ("fp32", "the same in fp32", "<= 1.15"),
            ("fsdp2", "FSDP2's in bf16", "<= 0.1"),
            ("deepspeed", "DeepSpeed's in bf16", "<= 0.1"),
        )
    ),
    Figure(
        'training step, 29M GPT, bf16, AVX-512, 2 ranks, stage 2: over the same with `"cpu_products": "torch"`',
        "<= 1.03",
        "products_step",
        {"contender": "auto", "isa": "native"},
        "ratio_to_torch",
    ),
    *(
        Figure(
            f"training step at stage 3, {what}, fp32, 2 ranks: over {peer_name}",
            goal,
            f"stage3_step_{model}",
            {"contender": "stage3"},
            f"ratio_to_{peer}",
            is_main=(model, peer) in (("gpt", "fsdp2"), ("small", "ddp")),
        )
        for model, what, peer, peer_name, goal in (
            (
                "gpt",
                "29M GPT",
                "fsdp2",
                "FSDP2 (`fully_shard`) with gloo's all-gather",
                "<= 0.95",
            ),
            ("gpt", "29M GPT", "fsdp2_our_all_gather", "FSDP2 with our all-gather", "<= 0.95"),
            (
                "mlp",
                "67M MLP",
                "fsdp2",
                "FSDP2 (`fully_shard`) with gloo's all-gather",
                "<= 0.95",
            ),
            ("mlp", "67M MLP", "fsdp2_our_all_gather", "FSDP2 with our all-gather", "<= 0.95"),
            ("small", "200 layers of 64 x 64, all of them sharded", "ddp", "DDP", "<= 0.95"),
        )
    ),
    *(
        Figure(
            f"{case} of 2048 x 2048 {dtype}, {phase}, {threads} thread{'s' * (threads > 1)}: over torch's {what}",
            goal,
            "nn_ops",
            {"case": case, "phase": phase, "dtype": dtype, "threads": threads},
            "ratio_to_torch",
            why_not=WHY_NOT.get((case, phase), ""),
            is_important=(case, dtype, phase, threads) == ("rms_norm + residual", "bfloat16", "backward", 2),
        )
        for threads in (1, 2)
        for case, what, goal in (
            ("layer_norm", "operator", "<= 1"),
            ("gelu", "operator", "<= 1"),
            ("masked_softmax", "operator", "<= 1"),
            ("rms_norm + residual", "composition", "<= 0.5"),
            ("swiglu", "composition", "<= 0.5"),
            ("bias_dropout_residual", "composition", "<= 0.5"),
        )
        for dtype in ("float32", "bfloat16")
        for phase in ("forward", "backward")
    ),
    *(
        Figure(
            f"attention of 2,048 tokens {dtype}, {what}, {phase}, 2 threads: over torch's with a dense mask",
            "<= 1",
            "attention",
            {"case": case, "phase": phase, "dtype": dtype, "threads": 2},
            "ratio_to_torch",
            is_important=(case, dtype, phase) == ("window", "float32", "backward"),
        )
        for case, what in (("alibi", "ALiBi"), ("window", "a window of 256"), ("packed", "8 documents"))
        for dtype in ("float32", "bfloat16")
        for phase in ("forward", "backward")
    ),
    Figure(
        "attention of 2,048 tokens float32, ALiBi: peak memory over torch's with a dense mask",
        "<= 0.25",
        "attention",
        {"case": "alibi", "phase": "backward", "dtype": "float32", "threads": 2},
        "peak_over_torch",
        is_important=True,
    ),
    Figure(
        "stage 3 step, 17M parameters, 2 hosts x 2 ranks, links of 1 Gbit/s: over that with gloo alone",
        "<= 0.6",
        "hosts_step",
        {"op": "stage 3 step"},
        "ratio_to_gloo",
    ),
    Figure(
        "stage 3 step, 2 hosts x 2 ranks: bytes that leave a host, over the least",
        "<= 1.1",
        "hosts_step",
        {"op": "stage 3 step"},
        "bytes_over_least",
        is_important=True,
    ),
    *(
        Figure(
            f"stage 3 step with `zero_hpz_partition_size`, 2 hosts x 2 ranks, links of 200 Mbit/s, {dtype}, {micros} micro-batch{'es' * (micros > 1)}: {what} over that without",
            goal,
            "second_shards",
            {"dtype": dtype, "micro_batches": micros},
            key,
        )
        for dtype, micros, what, key, goal in (
            ("fp32", 1, "time", "ratio_to_stage_3", "<= 0.75"),
            ("bf16", 4, "time", "ratio_to_stage_3", "<= 0.65"),
            ("fp32", 1, "bytes that leave a host (2/3 by the formula)", "bytes_to_stage_3", "<= 0.67"),
            ("bf16", 1, "bytes that leave a host (3/4 by the formula)", "bytes_to_stage_3", "<= 0.755"),
            ("bf16", 4, "bytes that leave a host (9/16 by the formula)", "bytes_to_stage_3", "<= 0.565"),
        )
    ),
    *(
        Figure(
            f"1 GB of bf16 weights at stage 3 by `iter_full_weights`, 2 ranks, {transport}: {what}",
            goal,
            "full_weights",
            {"transport": transport},
            key,
            why_not="a rank copies its half into its buffer and then reads the other's half, one copy in all, with a wait between",
        )
        for transport, what, key, goal in (
            ("shared memory", "time over a copy of the weights", "ratio_to_copy", "<= 1.3"),
            ("joint memory", "time over a copy of the weights", "ratio_to_copy", "<= 1.3"),
            ("shared memory", "MB beside the shard", "peak_mb", "<= 64"),
        )
    ),
    Figure(
        "`send_weights` of a LoRA adapter: bytes sent over the adapter's",
        "<= 1",
        "full_weights",
        {"transport": "adapter"},
        "sent_over_adapter",
    ),
    *(
        Figure(
            f"stage 3 step with `zero_hpz_partition_size` on one host, 2 ranks, fp32: {what}",
            goal,
            "second_shards_one_host",
            {"hosts": 1},
            key,
        )
        for what, key, goal in (
            ("time over that without", "ratio_to_stage_3", "<= 1.02"),
            ("tensor bytes of a rank beyond those without", "bytes_more", "<= 0"),
        )
    ),
    *(
        Figure(what, goal, "activation_budget", {"benchmark": "activation_budget"}, key)
        for what, goal, key in (
            (
                "activation budget half way: processor time added, over that of recomputing everything",
                "<= 0.583",
                "share_of_added",
            ),
            ("activation budget half way: peak over the budget", "<= 1.05", "peak_over_budget"),
            ("plan of 1,000 layers with 20 operators of 4 choices: milliseconds", "<= 50", "plan_ms"),
            ("a call of a kept layer, with a graph: us over the layer's own", "<= 5", "kept_layer_us"),
        )
    ),
    *(
        Figure(
            f"stage 3 step, 2 hosts, communication {ratio} x computation: over 1.05 x the longer of the two, first gather, last reduction",
            "<= 1",
            "overlap",
            {"communication_over_computation": ratio},
            "ratio_to_goal",
        )
        for ratio in (0.25, 0.5, 1.0, 2.0, 4.0)
    ),
    *(
        Figure(
            f"21M Llama, fp32, cut over 2 ranks, 256 tokens: {what}",
            goal,
            "tensor_parallel",
            {"contender": "ours"},
            key,
            is_important=key == "ratio_to_better_peer",
        )
        for what, goal, key in (
            (
                "time of a step over the better of DeepSpeed's AutoTP and torch's `parallelize_module`",
                "<= 0.95",
                "ratio_to_better_peer",
            ),
            ("time of a step over that of half a Llama that sends nothing", "<= 1.25", "ratio_to_silent"),
            ("peak memory of a rank over that with torch's `parallelize_module`", "<= 1", "memory_to_torch"),
        )
    ),
    Figure(
        "4 tensor-parallel ranks over a shaped link, time that `tp_overlap_comm` leaves above a silent model: over that without",
        "<= 0.5",
        "tp_overlap",
        {"ranks": 4},
        "exposed_to_usual",
    ),
    *(
        Figure(
            f"fake quantization of 16 M fp32 weights to {bits} bits in groups of 64: {what}",
            goal,
            "fake_quantize",
            {"contender": "ours", "bits": bits, "rows": 4096},
            key,
            is_important=(bits, key) == (4, "ratio_to_bound"),
        )
        for bits in (8, 4)
        for what, goal, key in (
            ("over a copy of the weights", "<= 1.25", "ratio_to_bound"),
            ("over DeepSpeed's formula in PyTorch", "<= 0.5", "ratio_to_formula"),
        )
    ),
    *(
        Figure(
            f"a packed fp32 layer 4096 x 4096 of {bits} bits, {rows} {'row' if rows == 1 else 'rows'}: time over {what}",
            goal,
            "packed_linear",
            {"contender": "ours", "bits": bits, "dtype": "float32", "rows": rows, "width": 4096},
            key,
        )
        for bits, rows, what, goal, key in (
            (8, 1, "the fp32 layer's", "<= 0.4", "ratio_to_fp32"),
            (4, 1, "the fp32 layer's", "<= 0.3", "ratio_to_fp32"),
            (8, 128, "dequantizing and torch's product", "<= 1.03", "ratio_to_dequantized"),
            (8, 128, "torchao's dynamic int8", "<= 1.1", "ratio_to_torchao"),
            (4, 128, "dequantizing and torch's product", "<= 1.03", "ratio_to_dequantized"),
        )
    ),
    *(
        Figure(
            f"the example GPT, {what}: {column} over fp32's",
            goal,
            "compress",
            {"contender": contender},
            f"{key}_to_fp32",
            is_important=contender == "int8",
        )
        for contender, what, column, goal, key in (
            ("int8", "weights of 8 bits", "held-out loss", "<= 1.002", "loss"),
            ("int4", "weights of 4 bits", "held-out loss", "<= 1.02", "loss"),
            ("half", "half of the rows and heads, with distillation", "held-out loss", "<= 1.03", "loss"),
            ("int8", "weights of 8 bits", "saved bytes", "<= 0.27", "bytes"),
            ("int4", "weights of 4 bits", "saved bytes", "<= 0.16", "bytes"),
        )
    ),
    Figure(
        "training step, 29M GPT, fp32, 1 rank, all linear layers at int8: over the plain step",
        "<= 1.1",
        "int8_step",
        {"contender": "int8"},
        "ratio_to_plain",
    ),
    *(
        Figure(f"the order of samples: {what}", goal, "data_order", {"contender": contender}, key)
        for contender, what, goal, key in (
            ("round", "microseconds for the next of 10^9 samples", "<= 1", "us_per_sample"),
            (
                "resume",
                "the first batch of a run that resumes at step 10^6 over one at step 10",
                "<= 1.1",
                "ratio_to_step_10",
            ),
            ("batch", "a batch over torch's DataLoader", "<= 1.05", "ratio_to_torch"),
        )
    ),
    Figure(
        "metrics of 1,000,000 samples, 2 processes: DeepSpeed's DataAnalyzer over ours",
        ">= 5",
        "analyzer",
        {},
        "deepspeed_over_it",
        is_important=True,
    ),
    *(
        Figure(
            f"vocabulary-parallel cross-entropy, 2,048 tokens x a vocabulary of 32,768, 2 ranks: {what} over gathering the logits",
            goal,
            "vocab_cross_entropy",
            {"contender": "cut", "tokens": 2048, "words": 32768},
            key,
        )
        for what, goal, key in (("time", "<= 0.8", "ratio_to_gathered"), ("peak memory", "<= 0.6", "peak_to_gathered"))
    ),
    *(
        Figure(
            f"distillation loss ({loss}), 1,024 tokens x a vocabulary of 32,768, {dtype}, forward and backward: {what}",
            goal,
            "distill_loss",
            {"loss": loss, "dtype": dtype},
            key,
            is_important=(loss, dtype, key) == ("mixture", "bfloat16", "ratio_to_torch"),
        )
        for dtype in ("float32", "bfloat16")
        for loss in ("forward KL", "mixture", "reverse KL")
        for what, goal, key in (
            ("time over torch's operators", "<= 0.6", "ratio_to_torch"),
            ("peak memory beside the logits over the student's gradient, its bound", "<= 1.05", "peak_to_gradient"),
        )
    ),
    *(
        Figure(
            f"a batch of a pipeline of 2 stages, a GPT of 4 layers, fp32, {n} micro-batches: over {what}",
            goal,
            "pipeline_step",
            {"micro_batches": n},
            key,
            why_not=why_not,
        )
        for what, goal, key, why_not in (
            (
                "DeepSpeed's `PipelineEngine`",
                "<= 0.9",
                "ratio_to_deepspeed",
                "the slower stage alone, m + 1 times, takes 0.98 to 1.01 of DeepSpeed's time",
            ),
            (
                "1F1B of `torch.distributed.pipelining`",
                "<= 1",
                "ratio_to_torch",
                "a batch takes `ratio_to_stages` of the slower stage alone, m + 1 times, which is the bound",
            ),
            ("the slower stage alone, m + 1 times", "<= 1.05", "ratio_to_stages", ""),
        )
        for n in (2, 4, 8)
    ),
    *(
        Figure(
            f"pipelines of sleeping stages, {ranks} ranks, {n} micro-batches: {what}",
            goal,
            "pipeline_schedules",
            {"schedule": "all", "ranks": ranks, "micro_batches": n},
            key,
            why_not="a processor that has slept is slow at first: 160 us of the runner's own work become 540 us after 5 ms of sleep",
        )
        for what, goal, key in (
            ("time over the simulated, of the schedule with the worst", "<= 1.05", "ratio_to_simulated"),
            ("pairs of schedules in another order than the simulated", "<= 0", "n_swapped"),
        )
        for ranks in (2, 4, 8)
        for n in (8, 32)
    ),
    *(
        Figure(
            f"a batch of a pipeline at stage 3, 2 stages x 2 ranks, a GPT of 4 layers, fp32, {where}: {what}",
            goal,
            "pipeline_stage3",
            {"contender": f"stage 3, {name}"},
            key,
            is_important=(name, key) == ("joint", "ratio_to_stage_2"),
        )
        for what, key in (
            ("time over stage 2's", "ratio_to_stage_2"),
            ("bytes beyond stage 2's with one gather in place of that of the update", "bytes_beyond_formula"),
        )
        for name, where, goal in (
            ("gloo", "over gloo", "<= 1.15"),
            ("shared", "through shared memory", "<= 1.15"),
            ("joint", "weights in joint memory", "<= 1.05"),
        )
        for goal in ((goal,) if key == "ratio_to_stage_2" else ("<= 0",))
    ),
    Figure(
        "an evaluation of a pipeline at stage 3, live tensor bytes of a rank: over shards of weights and gradients, and the limit",
        "<= 1.05",
        "pipeline_stage3",
        {"contender": "peak"},
        "peak_to_plan",
    ),
    Figure(
        "a training batch of a pipeline at stage 3, live tensor bytes of a rank: over shards, the limit, whole sums of gradients, a bucket and a gradient",
        "<= 1.05",
        "pipeline_stage3",
        {"contender": "peak, training"},
        "peak_to_plan",
    ),
    Figure(
        "training batches of a pipeline at stage 3, memory of a rank's weights: over their shard and the limit, of the schedule with the most",
        "<= 1.05",
        "pipeline_stage3",
        {"contender": "peak, training, weights", "schedule": "all"},
        "peak_to_plan",
    ),
    Figure(
        "a pipeline of sleeping stages at stage 3, 2 stages x 2 ranks: time over the simulated table with gathers, of the schedule with the worst",
        "<= 1.05",
        "pipeline_stage3",
        {"contender": "makespan", "schedule": "all"},
        "ratio_to_simulated",
    ),
    *(
        Figure(
            f"an action of a pipeline's runner beyond the stage's own functions and autograd, us: `{schedule}`, {where}",
            "<= 30",
            "pipeline_actions",
            {"schedule": schedule, "ranks": ranks},
            "us_of_an_action",
            why_not="an action between ranks has a send and a receive, which take 12 us each",
        )
        for ranks, schedule, where in (
            (1, "interleaved", "2 stages on a rank"),
            (1, "zb_v", "2 stages on a rank"),
            (2, "1f1b", "2 ranks, with sends and receives"),
            (2, "zb_h1", "2 ranks, with sends and receives"),
        )
    ),
    *(
        Figure(
            f"all-reduce of 64 MiB {dtype} between 2 ranks of one host, {memory}: DeepSpeed's time through shared memory over ours",
            ">= 2",
            "all_reduce_to_deepspeed",
            {"contender": contender, "mib": 64, "dtype": dtype},
            "deepspeed_over_it",
        )
        for contender, memory in (("ours", "buffers of an engine"), ("ours, of other memory", "other memory"))
        for dtype in ("float32", "bfloat16")
    ),
    *(
        Figure(
            f"a message between 2 ranks of one host, from {memory}: {what}",
            goal,
            "messages",
            {"contender": contender, "kib": kib},
            key,
        )
        for contender, memory in (("arena", "the arena"), ("ordinary", "ordinary memory"))
        for what, goal, kib, key in (
            ("one way of 4 KiB, microseconds", "<= 5", 4, "us"),
            ("1 MiB over gloo's `isend` and `irecv`", "<= 0.2", 1024, "ratio_to_gloo"),
        )
    ),
    Figure(
        'a batch of the example GPT in a pipeline of 2 stages, fp32: over the same with `"comm": {"local": "off"}`',
        "<= 0.9",
        "messages",
        {"contender": "pipeline of the example GPT"},
        "ratio_to_gloo",
        why_not="nearly all of the batch is computation: its messages alone take `ms_of_messages_gloo` of `ms_gloo` ms over gloo",
    ),
    *(
        Figure(
            f"attention of {tokens} tokens around a ring of 2 ranks of one host, forward and backward: over the same through gloo",
            "<= 0.9",
            "messages",
            {"contender": "attention around a ring", "tokens": tokens},
            "ratio_to_gloo",
            why_not="no transport can undercut ranks that send nothing: it takes `ratio_to_alone` of their time",
        )
        for tokens in (512, 2048)
    ),
    *(
        Figure(
            f"attention around a ring of 4 hosts, a hop takes 0.8 of a block, forward and backward: {what}",
            goal,
            "ring_attention",
            {},
            key,
            is_important=key == "ratio_to_alone",
        )
        for what, goal, key in (
            ("over compute alone", "<= 1.1", "ratio_to_alone"),
            ("most work of a rank, over the mean", "<= 1.02", "work_over_mean"),
        )
    ),
    *(
        Figure(
            f"compiled training step, {what}, fp32, 2 ranks, stage {stage}: over {peer_name}",
            goal,
            f"compiled_step_{model}",
            {"contender": f"stage{stage}_compiled"},
            f"ratio_to_{peer}",
            is_important=stage == 3,
        )
        for model, what, stage, peer, peer_name, goal in (
            (
                "gpt",
                "29M GPT",
                3,
                "better",
                "the better of the same without a compiler and FSDP2 with compiled blocks",
                "<= 1",
            ),
            (
                "gpt",
                "29M GPT",
                2,
                "better",
                "the better of the same without a compiler and a compiled model in DDP",
                "<= 1",
            ),
            ("swiglu", "narrow SwiGLU blocks", 3, "uncompiled", "the same without a compiler", "<= 0.9"),
            ("swiglu", "narrow SwiGLU blocks", 2, "uncompiled", "the same without a compiler", "<= 0.9"),
        )
    ),
    *(
        Figure(
            f"first step with the compiler, GPT of 2 layers, stage {stage}: over the bare model with `torch.compile`",
            "<= 1.3",
            "compile_time",
            {"contender": f"stage{stage}"},
            "ratio_to_bare",
            is_important=stage == 3,
        )
        for stage in (2, 3)
    ),
    *(
        Figure(
            f"training step at stage 3 with `zero_copy_gather`, {what}, fp32, 2 ranks: over stage 3 with gathers",
            "<= 1",
            f"stage3_step_{model}",
            {"contender": "stage3_zero_copy"},
            "ratio_to_stage3",
        )
        for model, what in (("gpt", "29M GPT"), ("mlp", "67M MLP"), ("small", "200 layers of 64 x 64"))
    ),
    *(
        Figure(
            f"training step, 67M MLP, fp32, 2 ranks, {contender}: over two replicas that send nothing",
            "<= 1.1",
            "stage3_step_mlp",
            {"contender": contender},
            "ratio_to_replica",
            why_not="gathered weights are copies, twice a step, which `zero_copy_gather` saves"
            if contender == "stage3"
            else "",
        )
        for contender in ("stage1", "stage2", "stage3", "stage3_zero_copy")
    ),
    *(
        Figure(
            f"training step, 29M GPT, {dtype}, 2 ranks, stage {stage}: over two replicas that send nothing",
            "<= 1.1",
            f"train_step_{dtype}",
            {"contender": f"stage{stage}"},
            "ratio_to_replica",
        )
        for dtype in ("fp32", "bf16")
        for stage in (0, 1, 2)
    ),
    *(
        Figure(
            f"`engine.step()` after a backward pass, 67M parameters, bf16, 1 rank, stage {stage}: over a C pass over the same memory",
            "<= 1.25",
            "engine_step",
            {"stage": stage},
            "ratio_to_bound",
            is_main=stage == 2,
        )
        for stage in (1, 2)
    ),
    *(
        Figure(
            f"reducing gradients, `engine.step()` and gathering weights, 67M parameters, bf16, 2 ranks, stage {stage}: over the bare collectives and a C pass",
            "<= 1.25",
            "engine_step_2_ranks",
            {"stage": stage},
            "ratio_to_parts",
        )
        for stage in (1, 2)
    ),
    *(
        Figure(
            f"{what}, 67M parameters, bf16, 1 rank, {case}: processor time over DeepSpeed's",
            goal,
            "step_to_deepspeed",
            {"case": case},
            key,
        )
        for what, goal, key in (
            ("gradients and `engine.step()` without the model's own passes", "<= 0.333", "added_to_deepspeed"),
            ("forward, backward and `engine.step()` with the model's own passes", "<= 0.333", "whole_to_deepspeed"),
        )
        for case in ("stage 1", "stage 2", "stage 2, states on the host")
    ),
    Figure(
        "`engine.step()` with states offloaded to the host, 67M parameters, 1 rank, stage 2: over a C pass over the same memory",
        "<= 1.25",
        "offload_step",
        {"offload": "cpu"},
        "ratio_to_bound",
        is_important=True,
    ),
    Figure(
        "`engine.step()` with masters and moments on NVMe, 500M parameters, 1 rank: over the time of the best fio for 24 bytes a parameter",
        "<= 1.15",
        "offload_step",
        {"offload": "nvme"},
        "ratio_to_fio",
        is_important=True,
    ),
    Figure(
        "training 200M parameters with states on NVMe: states over the memory limit of the cgroup, with the losses of a run without a limit",
        ">= 2",
        "memory_limit",
        {"losses_are_equal": True},
        "ratio_states_to_limit",
        is_main=True,
    ),
    Figure(
        "search by `model_based`, example GPT, 2 ranks, 4 GiB, a third of the grid's experiments: throughput of its choice over the grid's best",
        ">= 0.95",
        "tuning",
        {},
        "chosen_over_best",
    ),
    Figure("experiments of both searches that ran out of memory", "<= 0", "tuning", {}, "killed"),
    Figure("an experiment over its script by itself, seconds", "<= 1.2", "tuning", {}, "experiment_over_script"),
    Figure(
        "plan over peak memory of the grid's experiments, the highest", "<= 1.05", "tuning", {}, "planned_over_peak_max"
    ),
    Figure(
        "plan over peak memory of the grid's experiments, the lowest", ">= 0.95", "tuning", {}, "planned_over_peak_min"
    ),
    Figure(
        "48 MB of weights on NVMe beside states, stage 3, 1 rank: peak resident memory above that with states on NVMe alone, over the buffers asked for",
        "<= 1",
        "nvme_weights",
        {},
        "ratio_to_buffers",
    ),
    Figure(
        "host memory of `zero.Init`, 1B parameters, 4 ranks: over shard plus largest tensor",
        "<= 1.1",
        "init_memory",
        {},
        "ratio_to_bound",
        is_important=True,
    ),
    *(
        Figure(
            f"12 recomputed layers with inputs of 16 MiB, {what}",
            goal,
            name,
            {},
            field,
            is_important=field in ("peak_of_torch", "nvme_inputs_less"),
        )
        for what, goal, name, field in (
            (
                "peak of live bytes: over `torch.utils.checkpoint`'s",
                "<= 1.05",
                "activation_checkpointing",
                "peak_of_torch",
            ),
            ("a step: over `torch.utils.checkpoint`'s", "<= 1.03", "activation_checkpointing", "time_of_torch"),
            (
                "inputs on NVMe: part of their bytes that the peak is less",
                ">= 0.75",
                "activation_checkpointing",
                "nvme_inputs_less",
            ),
            (
                "inputs on NVMe, a step: over recomputed",
                "<= 1.15",
                "activation_checkpointing",
                "nvme_time_of_recomputed",
            ),
            (
                "a call without a graph: us over the layer's own",
                "<= 5",
                "activation_checkpointing",
                "wrapper_us",
            ),
            (
                "cut over 2 ranks: part of the inputs' bytes that less is kept for backward",
                ">= 0.45",
                "activation_checkpointing_2_ranks",
                "partitioned_inputs_less",
            ),
            (
                "cut over 2 ranks: part of the inputs' bytes that the peak of resident memory is less",
                ">= 0.5",
                "activation_checkpointing_2_ranks",
                "partitioned_resident_less",
            ),
            (
                "cut over 2 ranks, a step: over recomputed",
                "<= 1.10",
                "activation_checkpointing_2_ranks",
                "partitioned_time_of_recomputed",
            ),
        )
    ),
    *(
        Figure(
            f"QLoRA of a 100M Llama in nf4 at stage 3, 2 ranks: {what}",
            goal,
            "qlora_step",
            {"contender": "nf4_stage3"},
            key,
        )
        for what, goal, key in (
            ("a step over one at stage 0", "<= 1.1", "ratio_to_stage0"),
            ("bytes of the base that a rank holds, over a copy of it", "<= 0.55", "held_of_a_copy"),
            ("bytes of a gather of the base, over bf16's", "<= 0.28", "gathered_of_bf16"),
        )
    ),
    *(
        Figure(
            f"`generate` of a 350M Llama in bf16, {rows} row{'s' * (rows > 1)}, through `init_inference` {how}: over transformers'",
            goal,
            "generate",
            {"contender": contender, "rows": rows, "prompt": 32},
            "ratio_to_transformers",
        )
        for contender, how in (("engine", "without kernels"), ("kernels", "with kernels"))
        for rows, goal in ((1, "<= 0.7"), (8, "<= 1"))
    ),
    Figure(
        "`generate` of a 350M Llama in bf16, 1 row, through `init_inference` with kernels: over a read of the weights for each token",
        "<= 1.35",
        "generate",
        {"contender": "kernels", "rows": 1, "prompt": 32},
        "ratio_to_bound",
        why_not=_TOKEN,
    ),
    Figure(
        "`generate` of a 350M Llama in bf16, 8 rows, through `init_inference` with kernels: over 1 row",
        "<= 1.6",
        "generate",
        {"contender": "kernels", "rows": 8},
        "ratio_to_one_row",
    ),
    Figure(
        "a prompt of 512 tokens and one more, a 350M Llama in bf16, through `init_inference` with kernels: over transformers'",
        "<= 1.1",
        "generate",
        {"contender": "kernels", "prompt": 512},
        "ratio_to_transformers",
    ),
    *(
        Figure(
            f"the ragged engine, a 350M Llama in bf16: {what}",
            goal,
            "ragged",
            {"contender": contender},
            key,
            is_important=key == "ratio_to_transformers",
            why_not="threads of torch spin behind its operators and hold up those of the products, four times as often: with"
            " GOMP_SPINCOUNT=0 most of it is gone, and three more reads of all weights are left"
            if contender == "four pieces"
            else "",
        )
        for what, goal, contender, key in (
            ("16 sequences together over one after another", "<= 0.5", "together", "ratio_to_apart"),
            ("16 sequences over transformers' `generate_batch`", "<= 0.7", "together", "ratio_to_transformers"),
            ("16 sequences over vLLM's", "<= 1", "together", "ratio_to_vllm"),
            ("16 sequences, deterministic, over those that are not", "<= 1.3", "deterministic", "ratio_to_together"),
            ("a prompt of 512 tokens in four pieces over one piece", "<= 1.1", "four pieces", "ratio_to_one_piece"),
            (
                "a prompt of 520 tokens of which 512 are found over one that is computed",
                "<= 0.1",
                "found",
                "ratio_to_not_found",
            ),
        )
    ),
    Figure(
        "16 prompts of a 350M Llama in bf16 through `mii.pipeline`: over transformers' `generate`, one after another",
        "<= 0.55",
        "serving",
        {"contender": "pipeline"},
        "ratio_to_transformers",
    ),
    Figure(
        "16 prompts of a 350M Llama in bf16 through `mii.pipeline`: over the same steps of the engine alone",
        "<= 1.05",
        "serving",
        {"contender": "pipeline"},
        "ratio_to_engine",
    ),
    Figure(
        "a request of one token to a deployment, over a socket: milliseconds above the engine's",
        "<= 2",
        "serving",
        {"contender": "client"},
        "ms_added",
    ),
    Figure(
        "a deployment without requests: share of a core",
        "<= 0.01",
        "serving",
        {"contender": "client"},
        "idle_share",
    ),
    Figure(
        "a token of a stream of `deepspeed_c serve`: milliseconds above the engine's",
        "<= 0.3",
        "serve",
        {"contender": "token"},
        "ms_added",
    ),
    Figure(
        "`deepspeed_c serve`, a 350M Llama in bf16: gaps between the tokens of three answers while a prompt of 2000 tokens is read, p99 over p50",
        "<= 1.5",
        "serve",
        {"contender": "long prompt"},
        "p99_over_p50",
    ),
    Figure(
        "`deepspeed_c serve`, a 350M Llama in bf16, 2 requests a second: tokens a second over those of vLLM's server",
        ">= 1.2",
        "serve",
        {"contender": "deepspeed_c"},
        "ratio_to_vllm",
    ),
    Figure(
        "the choice of one of 128,256 words with top-k 50 and top-p 0.9, 1 thread: over transformers' processors and `torch.multinomial`",
        "<= 0.2",
        "sample",
        {"contender": "ours", "top_k": 50},
        "ratio_to_transformers",
    ),
    *(
        Figure(
            f"`generate` of a 350M Llama in bf16, {rows} row{'s' * (rows > 1)}, through `init_inference` with kernels: over llama.cpp's",
            "<= 1",
            "generate",
            {"contender": "kernels", "rows": rows, "prompt": 32},
            "ratio_to_llama_cpp",
            why_not=_TOKEN if rows == 1 else "",
        )
        for rows in (1, 8)
    ),
    *(
        Figure(
            f"{what} in fp16, {model_name}, {isa_name}, 1 thread, through `init_inference`: over transformers'{' in fp32' * (other == 'fp32')}",
            goal,
            "prompt",
            {"contender": "deepspeed_c", "model": model, "isa": isa},
            f"{key}_to_{other}",
            is_important=(isa, model, key, other) == ("avx2", "gpt2", "prompt", "transformers"),
            why_not=_LINEAR if (model, other) == ("llama", "transformers") else "",
        )
        for isa, isa_name in (("avx2", "instructions up to AVX2"), ("native", "AVX-512"))
        for model, model_name in (("llama", "a 55M Llama"), ("gpt2", "a 46M GPT-2"))
        for what, key, other, goal in (
            ("a prompt of 512 tokens", "prompt", "transformers", "<= 0.1"),
            ("a prompt of 512 tokens", "prompt", "fp32", "<= 1.15"),
            ("a token after it", "token", "transformers", "<= 1"),
        )
    ),
    *(
        Figure(f"rollout of a 100M Llama in bf16, a prompt of 512 tokens: {what}", goal, "rollout", {"samples": 8}, key)
        for what, goal, key in (
            ("eight samples of one token over one sample", "<= 1.15", "eight_over_one"),
            ("eight samples of 64 tokens over the model's own `generate`", "<= 1", "ratio_to_own"),
        )
    ),
    *(
        Figure(
            f"`generate` of a 100M Llama between training steps, 2 ranks, 8 prompts each: {what}",
            goal,
            "generate_in_training",
            {"contender": "stage3"},
            key,
            why_not="the modules' hooks take about 1 ms of the 95 of a token; rounds of the model itself differ by 7 %",
        )
        for what, goal, key in (
            ("stage 3 in joint memory over stage 0", "<= 1.05", "ratio_to_stage0"),
            ("stage 3 in joint memory over the model without an engine", "<= 1.02", "ratio_to_plain"),
            ("stage 3 in joint memory over DeepSpeed", "<= 1", "ratio_to_deepspeed"),
            ("milliseconds of a lease and its end, with `eval()` and `train()`", "<= 20", "switch_ms"),
            ("8 tokens of a rank while the other one makes 64, over its time alone", "<= 1.1", "first_over_alone"),
            ("the same over two processes without an engine", "<= 1.1", "first_to_plain"),
        )
    ),
    *(
        Figure(
            f"a step of PPO with four OPTs of 23M parameters, stage 3, 2 ranks: {what} over DeepSpeed's without its hybrid engine",
            goal,
            "ppo_step",
            {"contender": "deepspeed_c"},
            key,
            is_important=True,
        )
        for what, goal, key in (
            ("time", "<= 0.6", "ratio_to_deepspeed"),
            ("peak memory of a rank", "<= 0.8", "memory_to_deepspeed"),
        )
    ),
    *(
        Figure(
            f"loading a Llama of 1,000M parameters in bf16 on 2 ranks through `init_inference`: {what}",
            goal,
            "load",
            {},
            key,
            is_important=key == "peak_of_part_and_tensor",
        )
        for what, goal, key in (
            ("time over a read of the file into new memory", "<= 1.2", "ratio_to_read"),
            ("peak of a rank over its part and the largest tensor", "<= 1.1", "peak_of_part_and_tensor"),
        )
    ),
    *(
        Figure(
            f"a layer of 8 experts, top-2, 2,048 tokens of 512, forward and backward{what}",
            goal,
            "moe_layer",
            {},
            key,
            why_not=why_not,
        )
        for what, goal, key, why_not in (
            (": over a dense MLP on as many rows", "<= 1.3", "ratio_to_mlp", ""),
            (
                ": over DeepSpeed's layer",
                "<= 0.8",
                "ratio_to_deepspeed",
                "the dense MLP on as many rows, without gate and routing, takes `mlp_to_deepspeed` of the time of DeepSpeed's layer",
            ),
            (
                ": over transformers' `grouped_mm` experts",
                "<= 0.9",
                "ratio_to_transformers",
                "the dense MLP on as many rows, without gate and routing, takes `mlp_to_transformers` of the time of these experts",
            ),
            (", without its experts: part of the layer's time", "<= 0.05", "routing_part", ""),
        )
    ),
    *(
        Figure(f"a layer of 8 experts with its experts on 2 ranks{what}", goal, "moe_ranks", {}, key, is_important=True)
        for what, goal, key in (
            (": over a layer on each rank that sends nothing", "<= 1.15", "ratio_to_local"),
            (", 9 of 10 tokens on one expert: over the busiest rank's own experts", "<= 1.1", "skewed_to_busiest"),
        )
    ),
    *(
        Figure(
            f"a Mixtral (4 layers, 8 experts) with `expert_parallel` over 2 ranks, stage 2: {what}",
            goal,
            "expert_parallel",
            {"contender": "experts over ranks"},
            key,
            why_not=why_not,
            is_important=key in ("ratio_to_whole", "ratio_to_deepspeed"),
        )
        for what, goal, key, why_not in (
            ("a step over one with all experts on each rank", "<= 0.85", "ratio_to_whole", ""),
            ("a step over DeepSpeed's AutoEP", "<= 0.9", "ratio_to_deepspeed", ""),
            ("peak of a rank over the plan", "<= 1.05", "peak_to_plan", ""),
            (
                "peak of `from_pretrained` under `zero.Init` over a rank's part and the largest tensor",
                "<= 1.1",
                "load_of_part_and_tensor",
                "transformers gathers both stacks of a layer at once (1.1 alone); rank 0 joins them from entries of the file",
            ),
        )
    ),
    *(
        Figure(f"{what}: over without tiles", goal, "tiled_loss", {"part": part}, key)
        for what, goal, part, key in (
            (
                "loss of 4,096 tokens over a vocabulary of 32,768 in 16 tiles, peak",
                "<= 0.25",
                "loss",
                "peak_of_whole_tiles",
            ),
            (
                "loss of 4,096 tokens over a vocabulary of 32,768 in 16 tiles, forward and backward",
                "<= 1.15",
                "loss",
                "time_of_whole_tiles",
            ),
            ("`TiledFusedLogitsLoss` with torch's cross-entropy, peak", "<= 0.25", "loss", "peak_of_whole_fused"),
            ("`TiledFusedLogitsLoss`, forward and backward", "<= 1.15", "loss", "time_of_whole_fused"),
            (
                "`TiledMLP` of 16,384 tokens in 8 tiles, peak between its input and output",
                "<= 0.2",
                "MLP",
                "peak_between_of_whole_tiles",
            ),
        )
    ),
    *(
        Figure(
            f"the collective ledger: part of an fp32 training step of {model}, 2 ranks, stage {stage}",
            "<= 0.01",
            "ledger_cost",
            {"contender": model, "stage": stage},
            "share_of_step",
        )
        for model in ("29M GPT", "200 layers of 64 x 64")
        for stage in (2, 3)
    ),
    *(
        Figure(
            f"all monitors, logs and profiles on: {what}, 29M GPT, fp32, 2 ranks, stage {stage}",
            "<= 1.02",
            "observe_step",
            {"stage": stage},
            key,
        )
        for stage in (2, 3)
        for what, key in (
            ("a step over the same step without them", "wall_to_plain"),
            ("processor time of rank 0 in a step over the same without them", "processor_to_plain"),
        )
    ),
    Figure(
        "`MonitorMaster.write_events`, the 15 events of a step to CSV and TensorBoard: time on the caller's thread over DeepSpeed's",
        "<= 0.5",
        "monitor_events",
        {},
        "call_to_deepspeed",
    ),
    *(
        Figure(
            f"a step counted by the FLOPs profiler, {model}: over a plain step",
            "<= 2",
            "flops_step",
            {"contender": model},
            "profiled_over_plain",
            why_not="most is torch's: it enters Python for each operator, and a mode that only passes operators on takes `bare_mode_over_plain` of a plain step"
            if model != "29M GPT"
            else "",
        )
        for model in ("29M GPT", "200 layers of 64 x 64")
    ),
    *(
        Figure(
            f"phases of `wall_clock_breakdown` over the wall clock around them, {case}: {bound}",
            goal,
            "phases",
            {"contender": case},
            "phases_over_wall",
        )
        for case in (*(f"stage {stage}" for stage in range(4)), "pipeline of 2 stages")
        for bound, goal in (("nothing lost", ">= 0.97"), ("nothing twice", "<= 1.01"))
    ),
    *(
        Figure(
            f"`aio_handle` {direction}s 1 GiB from {what}: speed over {peer_name}",
            goal,
            "aio",
            {"contender": f"deepspeed_c, {kind}", "direction": direction},
            f"ratio_to_{peer}",
        )
        for kind, what, peer, peer_name, goal in (
            ("ordinary", "an ordinary unaligned tensor", "fio", "the best fio", ">= 0.9"),
            ("ordinary", "an ordinary unaligned tensor", "deepspeed", "DeepSpeed's", ">= 4"),
            ("locked", "a locked tensor", "deepspeed", "DeepSpeed's", ">= 1"),
        )
        for direction in ("write", "read")
    ),
    *(
        Figure(
            f"checkpoint of 2 GB of fp32 Adam states, stage 3, 2 ranks: {what}",
            goal,
            "checkpoint_io",
            {"contender": contender, "stage": 3},
            f"ratio_to_{peer}",
            is_important=contender in ("load_other_world", "stall"),
            is_main=(contender, peer) == ("save", "fio"),
        )
        for contender, what, peer, goal in (
            ("save", "speed of a save over the best fio", "fio", ">= 0.8"),
            ("save", "speed of a save over `torch.distributed.checkpoint`", "dcp", ">= 2"),
            ("load", "speed of a load over the best fio", "fio", ">= 0.8"),
            ("load_other_world", "time of a load on another number of ranks over a plain load", "load", "<= 1.2"),
            ("stall", "stall of an asynchronous save over copying the bytes in memory", "memcpy", "<= 1.3"),
        )
    ),
    Figure(
        "29M GPT, 2 ranks: time of training with `checkpoint.every` = 60 s over training without",
        "<= 1.02",
        "saves_by_time",
        {"stage": 2},
        "ratio_to_plain",
        is_important=True,
    ),
    *(
        Figure(
            f"67M fp32 parameters, 1 rank, {case}: time of `engine.fingerprint()` over one read of the same bytes",
            "<= 1.2",
            "fingerprint",
            {"case": case},
            "ratio_to_read",
        )
        for case in ("weights", "weights and moments", "weights and moments of a GPT")
    ),
    *(
        Figure(
            f"29M GPT, {n_ranks} ranks, stage {stage}: time of a step of {n_grains} grains with `same_bits` over one without",
            goal,
            f"same_bits_{n_ranks}",
            {"stage": stage},
            "ratio_to_plain",
        )
        for n_ranks, n_grains, goal in ((2, 4, "<= 1.05"), (3, 12, "<= 1.1"))
        for stage in (1, 2, 3)
    ),
    *(
        Figure(
            f"`transformers.Trainer` on a 13M Llama, 2 processes, stage {stage}: {what} over DeepSpeed's",
            goal,
            "trainer_step",
            {"contender": "deepspeed_c", "stage": stage},
            column,
            is_main=stage == 3,
        )
        for stage in (2, 3)
        for what, goal, column in (
            ("time of a step", "<= 0.7", "ratio_to_deepspeed"),
            ("peak memory of a process", "<= 1", "memory_to_deepspeed"),
        )
    ),
    *(
        Figure(
            f"a step of a Llama (4 layers of 256, 8 heads, 1,024 tokens) whose sequence 2 ranks share: {what}",
            goal,
            "ulysses_step",
            {"contender": contender},
            column,
            is_important=column == "ratio_to_deepspeed",
            why_not=_HALVES if column == "ratio_to_one_process" else "",
        )
        for what, contender, goal, column in (
            ("time over DeepSpeed's", "deepspeed_c", "<= 0.9", "ratio_to_deepspeed"),
            ("time over one process with 2 threads", "deepspeed_c", "<= 1.1", "ratio_to_one_process"),
            (
                "time over one process with 2 threads, without shared memory",
                "deepspeed_c over gloo",
                "<= 1.25",
                "ratio_to_one_process",
            ),
            ("ms that the adapter of the loader takes for a batch", "deepspeed_c", "<= 2", "adapter_ms"),
        )
    ),
    Figure(
        "importing all that training needs: over `import torch`",
        "<= 1.06",
        "import_time",
        {"contender": "deepspeed_c"},
        "ratio_to_torch",
    ),
    *(
        Figure(
            f"from the start of 2 processes to the end of their first step, stage {stage}: over bare DDP with torch's AdamW",
            "<= 1.1",
            "start_time",
            {"contender": f"stage{stage}"},
            "ratio_to_ddp",
            is_important=stage == 3,
        )
        for stage in (0, 2, 3)
    ),
    Figure(
        "launching a no-op on 2 processes: over `torch.distributed.run`",
        "<= 1.1",
        "launch",
        {"contender": "deepspeed_c"},
        "ratio_to_torchrun",
    ),
    Figure(
        "launching a no-op on 2 x 2 processes of two hosts through pdsh: over `torchrun` by hand on both",
        "<= 1.25",
        "launch_on_hosts",
        {"contender": "deepspeed_c"},
        "ratio_to_torchrun",
        is_important=True,
    ),
    *(
        Figure(
            f"one of three hosts is lost, `--elastic_training`{words}: {what}",
            goal,
            "lost_host",
            {"contender": contender},
            key,
            is_important=contender == "defaults" and key == "seconds",
        )
        for contender, words, goal in (("defaults", "", "<= 60"), ("--heartbeat 1", " `--heartbeat 1`", "<= 20"))
        for what, goal, key in (
            ("seconds to the next new step of the others", goal, "seconds"),
            ("the same over torchrun (`--nnodes 2:3`)", "<= 1", "ratio_to_torchrun"),
        )
    ),
    *(
        Figure(what, goal, "alias_start", {"what": row}, "added_ms", is_important=row == "deepspeed_c run")
        for row, what, goal in (
            ("deepspeed_c run", "`deepspeed_c run` in front of a command: milliseconds added to its start", "<= 50"),
            (
                "asking for deepspeed instead of torch",
                "`is_deepspeed_available()` with the alias: milliseconds above the same question about torch",
                "<= 0",
            ),
        )
    ),
]
