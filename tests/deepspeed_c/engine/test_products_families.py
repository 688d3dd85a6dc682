"""Models of many families with widened products, against float64 and against torch's own products: training in bf16,
greedy generation in fp16, and one run of each kind of engine on 2 ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import deepspeed_c
from deepspeed_c.ops import products
from tests import training
from tests.deepspeed_c.engine.test_products import SLOW, are_widened, found_times
from tests.deepspeed_c.inject import families
from tests.deepspeed_c.inject.families import VOCAB
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")

PRELOAD = "tests.deepspeed_c.inject.preload"
WHO = ("auto", "torch")
STEPS, RATE = 3, 0.1
# Distances from float64 are as large as torch's: those of all families in the mean, and each up to chance. In training
# chance is larger, because a ReLU or a choice of experts may jump.
FACTOR, MEAN_FACTOR = 1.3, 1.1
JUMPS, MEAN_JUMPS = 4.0, 1.15
ROUNDING = 2.0**-8  # to bfloat16, relative: some families compute the loss in it
SCORE_BOUND = 0.01


class Images(nn.Module):
    """Convolutions with strides, groups and dilation, one of them transposed, over images and their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(12, 12, 3, groups=4, padding="same", bias=False)
        self.back = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.rows = nn.Conv1d(6 * 12, 10, 3, dilation=2)
        self.head = nn.Linear(10, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Any:
        x = self.first(pixel_values).relu()
        x = self.back((x + self.grouped(x)).tanh())
        logits = self.head(self.rows(x.flatten(1, 2)).mean(-1))
        return nn.functional.cross_entropy(logits.float(), labels)


class Recurrent(nn.Module):
    """Recurrent layers, and a layer of torch with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.lstm = nn.LSTM(24, 24, batch_first=True)
        self.gru = nn.GRU(24, 24, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(24, 4, 40, dropout=0.0, batch_first=True)
        self.both = nn.Bilinear(24, 24, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        first = self.lstm(x)[0]
        logits = self.both(self.gru(first)[0], self.layer(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def make(family: str) -> nn.Module:
    small = {
        "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    heads = {**small, "intermediate_size": 70, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    configs: dict[str, Callable[[], Any]] = {
        "mistral": lambda: transformers.MistralConfig(**heads, sliding_window=5),
        "gemma": lambda: transformers.GemmaConfig(**heads),
        "mamba": lambda: transformers.MambaConfig(**small, state_size=4),
    }
    torch.manual_seed(11)
    if family in configs:
        return transformers.AutoModelForCausalLM.from_config(configs[family]())
    if family in ("images", "recurrent"):
        return Images() if family == "images" else Recurrent()
    if family == "lora":
        import peft

        rule = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(families.make("llama"), rule)
    return families.make(family)


def feed(family: str) -> dict[str, Tensor]:
    if family == "images":
        g = torch.Generator().manual_seed(5)
        return {"pixel_values": torch.randn(4, 3, 12, 12, generator=g), "labels": torch.tensor([0, 4, 2, 2])}
    return families.feed("clip" if family == "clip" else "llama")


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with values that ``dtype`` has: what is off later is off by products and sums. Biases, which begin as
    zeros, get values too."""
    g = torch.Generator().manual_seed(13)
    for param in model.parameters():
        if not param.any():
            param.data = 0.1 * torch.randn(param.shape, generator=g)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype).to(tensor.dtype)
    return model


def in_float64(model: nn.Module) -> nn.Module:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no float64
    return model.double()


def cast(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


class Run(NamedTuple):
    losses: list[float]
    moved: dict[str, Tensor]
    """Trained parameter -> how far it has gone, in float64."""
    n_products: int


@contextmanager
def counted() -> Iterator[mock.Mock]:
    with mock.patch.object(products, "_product", wraps=products._product) as product:
        yield product


def trained(engine: Any, start: dict[str, Tensor], given: dict[str, Any], count: mock.Mock) -> Run:
    """Some steps, and how far the masters have gone."""
    losses = []
    for _ in range(STEPS):
        losses.append(training.update(engine, loss_of(engine(**given))))
    after = {name: deepspeed_c.utils.safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    return Run(losses, {name: after[name].double() - value for name, value in start.items()}, count.call_count)


def train(family: str, who: str) -> Run:
    model = rounded(make(family), torch.bfloat16)
    start = {name: p.detach().double() for name, p in model.named_parameters() if p.requires_grad}
    config = training.config(rows=2, lr=RATE, gradient_clipping=0.0, bf16={"enabled": True}, cpu_products=who)
    with found_times(SLOW, SLOW), counted() as count:
        with deepspeed_c.initialize(model=model, config=config)[0] as engine:
            assert are_widened() is (who == "auto")
            run = trained(engine, start, cast(feed(family), torch.bfloat16), count)
        assert not are_widened()
    return run


def plain(family: str) -> Run:
    model = in_float64(rounded(make(family), torch.bfloat16))
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in params.items()}
    optimizer, losses = torch.optim.SGD(params.values(), lr=RATE), []
    for _ in range(STEPS):
        loss = loss_of(model.train()(**cast(feed(family), torch.float64)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, {name: p.detach() - start[name] for name, p in params.items()}, 0)


def off(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The distance of all values together, relative to the wanted ones."""
    flat = [torch.cat([values[name].flatten() for name in want]) for values in (got, want)]
    return ((flat[0] - flat[1]).norm() / flat[1].norm()).item()


GENERATING = (
    *("gpt2", "opt", "bloom", "falcon", "gpt_neox", "llama", "mistral", "qwen2", "gemma", "phi", "mixtral"),
    *("deepseek_v3", "aria", "t5", "mamba", "lora"),
)
FAMILIES = (*GENERATING, "bert", "clip", "images", "recurrent")


def told(family: str, ours: float, torchs: float) -> str:
    return f"{family}: off by {ours:.3g} with widened products, {torchs:.3g} with torch's"


def check_distances(found: dict[str, tuple[float, float]], factor: float, mean_factor: float) -> None:
    """``found``: family -> distances with widened products and with torch's."""
    lines = [told(family, *both) for family, both in found.items()]
    print("\n".join(lines))
    ratios = torch.tensor([ours / torchs for ours, torchs in found.values()])
    mean = ratios.log().mean().exp()
    print(f"ratio: {mean:.3f} in the mean, {ratios.max():.3f} at most")
    assert ratios.max() <= factor and mean <= mean_factor, lines


def train_body(rank: int, world: int) -> dict[str, tuple[float, float]]:
    found = {}
    for family in FAMILIES:
        ours, torchs, want = train(family, "auto"), train(family, "torch"), plain(family)
        assert ours.n_products > 0 and torchs.n_products == 0, family
        apart = max(abs(a - b) for a, b in zip(torchs.losses, want.losses, strict=True))
        for a, b in zip(ours.losses, want.losses, strict=True):
            assert abs(a - b) <= JUMPS * apart + ROUNDING * b, (
                f"{family}: {ours.losses}, {torchs.losses}, {want.losses}"
            )
        found[family] = off(ours.moved, want.moved), off(torchs.moved, want.moved)
    return found


def test_training_is_as_near_to_float64_as_with_torch() -> None:
    pytest.importorskip("peft")
    check_distances(run_ranks(1, train_body, preload=PRELOAD)[0], JUMPS, MEAN_JUMPS)


N_TOKENS = 5


def generate(family: str, who: str) -> tuple[Tensor, Tensor]:
    """Greedy tokens, and the scores from which they were chosen: [sequence, token, vocabulary]."""
    config = {"dtype": "fp16", "cpu_products": who}
    with (
        found_times(SLOW, SLOW),
        counted() as count,
        deepspeed_c.init_inference(rounded(make(family), torch.float16), config) as engine,
    ):
        out = engine.generate(
            input_ids=feed(family)["input_ids"],
            attention_mask=torch.ones_like(feed(family)["input_ids"]),
            max_new_tokens=N_TOKENS,
            min_new_tokens=N_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert (count.call_count > 0) == are_widened() == (who == "auto"), family
    return out.sequences, torch.stack(out.logits, 1)


def plain_scores(family: str, tokens: Tensor) -> Tensor:
    """The scores of a float64 model that is given the tokens."""
    model = in_float64(rounded(make(family), torch.float16)).eval()
    given = feed(family)["input_ids"]
    parts = {"input_ids": given, "decoder_input_ids": tokens} if family == "t5" else {"input_ids": tokens}
    with torch.no_grad():
        return model(**parts).logits[:, -N_TOKENS - 1 : -1]


def generate_body(rank: int, world: int) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for family in GENERATING:
        distances = []
        for who in WHO:
            tokens, scores = generate(family, who)
            want = plain_scores(family, tokens)
            chosen = want.gather(2, tokens[:, -N_TOKENS:, None])[..., 0]
            furthest = (scores.double() - want).abs().max()
            assert furthest <= SCORE_BOUND * want.abs().max(), f"{family}, {who}: {furthest} of {want.abs().max()}"
            allowed = chosen + 2 * furthest
            assert (allowed >= want.amax(2)).all(), f"{family}, {who}: another token has a higher score in float64"
            distances.append(off({"": scores.double()}, {"": want}))
        found[family] = distances[0], distances[1]
    return found


def test_generation_in_fp16_is_as_near_to_float64_as_with_torch() -> None:
    pytest.importorskip("peft")
    check_distances(run_ranks(1, generate_body, preload=PRELOAD)[0], FACTOR, MEAN_FACTOR)


# -- kinds of engines, on 2 ranks ----------------------------------------------------------------------------------------------

ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 30, "reduce_bucket_size": 3000}
# Kind of engine -> keys of its configuration.
KINDS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 3000}},
    "stage 3": {"zero_optimization": ZERO3},
    "stage 3, offloaded": {
        "zero_optimization": {**ZERO3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    },
    "tensor parallelism": {"tensor_parallel": {"autotp_size": 2}},
    "pipeline": {},
    "recomputation": {"activation_checkpointing": {"layers": "auto"}},
    "recomputation, stage 3": {"activation_checkpointing": {"layers": "auto"}, "zero_optimization": ZERO3},
    "recomputation, autocast": {
        "activation_checkpointing": {"layers": "auto"},
        "torch_autocast": {"enabled": True, "dtype": "bf16"},
    },
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
    "compiled": {},
    "compiled, stage 3": {"zero_optimization": ZERO3, "compile": {"deepcompile": True}},
    "hybrid": {"hybrid_engine": {"enabled": True}, "zero_optimization": ZERO3},
}
# Recomputation -> the same without it.
SAME_BITS = {"recomputation": "stage 0", "recomputation, stage 3": "stage 3", "recomputation, autocast": "autocast"}


def family_of(kind: str) -> str:
    """Tracing a Llama takes seconds."""
    return "images" if kind.startswith("compiled") else "llama"


def train_kind(kind: str, who: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the weights after the last step."""
    model: Any = rounded(make(family_of(kind)), torch.bfloat16)
    given = cast(feed(family_of(kind)), torch.bfloat16)
    config = {
        "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "gradient_clipping": 0.0, **({} if "autocast" in kind else {"bf16": {"enabled": True}}), "cpu_products": who,
        **KINDS[kind],
    }  # fmt: skip
    if kind == "pipeline":
        from deepspeed_c.pipe import from_transformers

        model = from_transformers(model, 2)
    losses = []
    with found_times(SLOW, SLOW), counted() as count, deepspeed_c.initialize(model=model, config=config)[0] as engine:
        assert are_widened() is (who == "auto")
        if kind.startswith("compiled"):
            engine.compile(backend="aot_eager")
        for _ in range(STEPS):
            before = count.call_count
            if kind == "pipeline":
                loss = engine.train_batch(iter([(given["input_ids"], given["labels"])]))
            else:
                loss = loss_of(engine(**given))
                engine.backward(loss)
                engine.step()
            losses.append(loss.item())
            assert (count.call_count > before) is (who == "auto")
            if kind == "hybrid":
                before = count.call_count
                engine.eval()
                tokens = engine.generate(given["input_ids"], max_new_tokens=3, min_new_tokens=3, do_sample=False)
                engine.train()
                assert tokens.shape == (2, 12) and (count.call_count > before) is (who == "auto")
        weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    assert not are_widened()
    return losses, weights


def kind_body(rank: int, world: int, kind: str) -> tuple[list[float], list[float]]:
    (ours, weights), (torchs, _) = train_kind(kind, "auto"), train_kind(kind, "torch")
    if kind in SAME_BITS:
        losses, others = train_kind(SAME_BITS[kind], "auto")
        assert ours == losses, f"{ours}, and without recomputation {losses}"
        for name, value in weights.items():
            assert torch.equal(value, others[name]), name
    return ours, torchs


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_engine_trains_with_widened_products(kind: str) -> None:
    want = plain(family_of(kind)).losses
    for rank, (ours, torchs) in enumerate(run_ranks(2, kind_body, kind, preload=PRELOAD)):
        print(f"rank {rank}: losses {ours}, with torch {torchs}, in float64 {want}")
        for a, b, c in zip(ours, torchs, want, strict=True):
            assert max(abs(a - b), abs(a - c)) <= ROUNDING * c
