"""Whole layers are replaced by DeepSpeed's layers and back. They compute the same afterwards, and they train."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deepspeed_c.errors import CheckpointError, ConfigError, ModelError
from deepspeed_c.inject.kernels import revert_kernels
from deepspeed_c.inject.layer_policies import HFBertLayerPolicy, HFDistilBertLayerPolicy
from deepspeed_c.inject.replace import (
    generic_injection,
    get_transformer_name,
    replace_module,
    replace_transformer_layer,
    revert_transformer_layer,
    skip_level_0_prefix,
)
from deepspeed_c.ops.transformer import DeepSpeedTransformerLayer
from tests.deepspeed_c.inject.families import VOCAB, make
from tests.training import descend

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def bert(kind: str = "BertForMaskedLM", **options):
    torch.manual_seed(3)
    config = transformers.BertConfig(
        **{
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_hidden_layers": 2,
            "intermediate_size": 70,
            "vocab_size": VOCAB,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            **options,
        }
    )
    return getattr(transformers, kind)(config)


def roberta():
    torch.manual_seed(3)
    config = transformers.RobertaConfig(
        hidden_size=48, num_attention_heads=6, num_hidden_layers=2, intermediate_size=70, vocab_size=VOCAB,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64, pad_token_id=1,
    )  # fmt: skip
    return transformers.RobertaForMaskedLM(config)


def layer_of(name: str) -> type:
    module, kind = {
        "bert": ("bert", "BertLayer"),
        "bert with tanh": ("bert", "BertLayer"),
        "roberta": ("roberta", "RobertaLayer"),
        "distilbert": ("distilbert", "TransformerBlock"),
    }[name]
    return getattr(getattr(transformers.models, module), f"modeling_{module}").__dict__[kind]


def model_of(name: str):
    if name == "distilbert":
        return make(name)
    return {"bert": bert, "roberta": roberta, "bert with tanh": lambda: bert(hidden_act="gelu_new")}[name]()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@pytest.mark.parametrize("name", ["bert", "bert with tanh", "roberta", "distilbert"])
def test_layers_are_replaced_train_and_come_back(name: str) -> None:
    model, reference = model_of(name).train(), model_of(name).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kind = layer_of(name)
    assert replace_transformer_layer(kind, model, None, {}, model.config, training_mode=True) is model
    layers = [module for module in model.modules() if isinstance(module, DeepSpeedTransformerLayer)]
    assert len(layers) == 2 and not any(type(module) is kind for module in model.modules())
    data = batch()
    expected, got = reference(**data), model(**data)
    assert (got.logits - expected.logits).abs().max() < 2e-6
    for run in (reference, model):  # each makes three steps of plain SGD
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        for _ in range(3):
            descend(optimizer, run(**data).loss)
    revert_transformer_layer(kind, model, model.config)
    after, wanted = model.state_dict(), reference.state_dict()
    assert list(after) == list(wanted) and type(model.get_submodule(_first(model, kind))) is kind
    assert max((after[key] - wanted[key]).abs().max().item() for key in wanted) < 1e-5
    assert max((after[key] - before[key]).abs().max().item() for key in wanted) > 1e-3  # weights have moved
    assert (model(**data).logits - reference(**data).logits).abs().max() < 1e-5


def _first(model: nn.Module, kind: type) -> str:
    return next(name for name, module in model.named_modules() if type(module) is kind)


def test_to_and_fro_gives_the_same_bits_dtype_and_what_is_frozen() -> None:
    model = bert().to(torch.bfloat16).eval()
    for name, param in model.named_parameters():
        param.requires_grad_("query" not in name and "layer.1.output" not in name)
    before = {name: (param.detach().clone(), param.requires_grad) for name, param in model.named_parameters()}
    kind = layer_of("bert")
    replace_transformer_layer(kind, model, None, SimpleNamespace(dtype=None), model.config)
    layer = model.bert.encoder.layer[1]
    assert layer.output_w.dtype is torch.bfloat16 and not layer.output_w.requires_grad and not layer.training
    revert_transformer_layer(kind, model, model.config)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name][0]) and param.dtype is torch.bfloat16
        if "query" not in name and "key" not in name and "value" not in name:  # these have become one parameter
            assert param.requires_grad == before[name][1], name


class Preln(nn.Module):
    """A layer with the names of Turing's BERT layer."""

    def __init__(self, config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attention = nn.Module()
        self.attention.self = nn.Module()
        for name in ("query", "key", "value"):
            setattr(self.attention.self, name, nn.Linear(hidden, hidden))
        self.attention.self.num_attention_heads, self.attention.self.dropout = (
            config.num_attention_heads,
            nn.Dropout(0.0),
        )
        self.attention.output, self.intermediate, self.output = nn.Module(), nn.Module(), nn.Module()
        self.attention.output.dense = nn.Linear(hidden, hidden)
        self.intermediate.dense_act, self.output.dense = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.output.dropout = nn.Dropout(0.0)
        self.PreAttentionLayerNorm, self.PostAttentionLayerNorm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.attention.self
        normed = self.PreAttentionLayerNorm(x)
        q, k, v = (
            f(normed).unflatten(-1, (own.num_attention_heads, -1)).transpose(1, 2)
            for f in (own.query, own.key, own.value)
        )
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.attention.output.dense((scores @ v).transpose(1, 2).flatten(-2))
        return x + self.output.dense(nn.functional.gelu(self.intermediate.dense_act(self.PostAttentionLayerNorm(x))))


def test_norms_ahead_by_replace_module_and_back() -> None:
    torch.manual_seed(0)
    config = SimpleNamespace(hidden_size=12, intermediate_size=20, num_attention_heads=3)
    model = nn.Sequential(Preln(config), nn.Sequential(Preln(config)))
    for param in model.parameters():
        nn.init.normal_(param)
    before, x = copy.deepcopy(model), torch.randn(2, 5, 12)
    numbers = []

    def replace(module, policy, number):
        from deepspeed_c.inject.replace import _replacer

        numbers.append(number)
        return _replacer(inference=False)(module, policy, number)

    assert replace_module(model, Preln, replace, HFBertLayerPolicy) is model and numbers == [0, 1]
    assert all(isinstance(layer, DeepSpeedTransformerLayer) for layer in (model[0], model[1][0]))
    assert torch.allclose(model(x), before(x), rtol=1e-4, atol=1e-4)
    revert_transformer_layer(Preln, model, config, preln=True)
    for a, b in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b)


def test_policies_name_the_parts() -> None:
    layer = bert().bert.encoder.layer[0]
    policy = HFBertLayerPolicy(layer, inference=True)
    assert policy.get_hidden_heads() == (48, 6, 1e-12, 70) and not policy.pre_attn_norm
    qkvw, qkvb, ow, ob = policy.attention(enable_training=True)
    own = layer.attention.self
    assert torch.equal(qkvw, torch.cat([own.query.weight, own.key.weight, own.value.weight])) and qkvw.requires_grad
    assert (
        qkvb.shape == (144,) and ow is layer.attention.output.dense.weight and ob is layer.attention.output.dense.bias
    )
    assert policy.mlp()[0] is layer.intermediate.dense.weight and policy.layernorm()[2] is layer.output.LayerNorm.weight
    block = make("distilbert").distilbert.transformer.layer[0]
    assert HFDistilBertLayerPolicy(block).get_hidden_heads() == (48, 6, 1e-12, 70)
    assert HFDistilBertLayerPolicy(block).layernorm()[0] is block.sa_layer_norm.weight


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_come_from_a_file(tmp_path, suffix: str) -> None:
    model, other = bert(), bert()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(0.1)
    file = tmp_path / f"model{suffix}"
    weights = {name: param.detach().clone() for name, param in other.named_parameters()}
    save_file(weights, file) if suffix == ".safetensors" else torch.save({"module": weights}, file)
    config = {"replace_with_kernel_inject": True}
    replace_transformer_layer(
        layer_of("bert"), model, {"base_dir": str(tmp_path), "checkpoints": [file.name]}, config, None
    )
    data = batch()
    assert (model.eval()(**data).logits - other.eval()(**data).logits).abs().max() < 1e-5


def test_other_layers_get_kernels() -> None:
    model, reference = make("llama"), make("llama")
    replace_transformer_layer(None, model, None, {"replace_with_kernel_inject": True, "dtype": torch.float32}, None)
    ids = batch()["input_ids"]
    assert (model(ids).logits - reference(ids).logits).abs().max() < 2e-6 and revert_kernels(model) > 5
    pipeline = SimpleNamespace(text_encoder=make("llama"), unet=nn.Linear(2, 2), name="a pipeline")
    reports = generic_injection(pipeline, dtype=torch.bfloat16)
    assert list(reports) == ["text_encoder"] and pipeline.unet.weight.dtype is torch.bfloat16
    assert list(generic_injection(make("gpt2"))) == [""]


def test_names() -> None:
    assert get_transformer_name(make("llama")) == "model.layers" and get_transformer_name(make("bert")) == "bert."
    assert get_transformer_name(nn.Linear(2, 2)) == ""
    assert skip_level_0_prefix(make("bloom"), {"h.0.weight": 0}) and skip_level_0_prefix(make("opt"), None)
    assert not skip_level_0_prefix(make("opt"), {"model.decoder": 0}) and not skip_level_0_prefix(make("gpt2"), None)


def test_what_does_not_fit_is_refused_with_nothing_changed(tmp_path) -> None:
    kind = layer_of("bert")
    save_file({"nobody": torch.zeros(2)}, tmp_path / "other.safetensors")
    save_file({"bert.pooler.dense.bias": torch.zeros(2)}, tmp_path / "wrong.safetensors")
    distil = transformers.DistilBertForMaskedLM(
        transformers.DistilBertConfig(dim=48, n_heads=6, n_layers=1, hidden_dim=70, vocab_size=VOCAB)
    )

    def replaced():
        model = bert()
        return replace_transformer_layer(kind, model, None, {}, model.config)

    def checkpoint(name: str):
        return lambda m: replace_module(m, kind, lambda child, policy, number: child, None, tmp_path / name)

    for model, act, error, text in (
        (
            bert(is_decoder=True),
            lambda m: replace_transformer_layer(kind, m, None, {}, None),
            ModelError,
            "a layer with decoder",
        ),
        (
            bert(hidden_act="mish"),
            lambda m: replace_transformer_layer(kind, m, None, {}, None),
            ModelError,
            "no kernel computes its activation",
        ),
        (bert(), lambda m: replace_transformer_layer(None, m, None, {}, None), ConfigError, "there is nothing to do"),
        (
            bert(),
            lambda m: replace_transformer_layer(kind, m, None, {"dtype": torch.int8}, None),
            ConfigError,
            "needs an inference engine",
        ),
        (bert(), lambda m: replace_module(m, nn.Conv1d, copy.copy, None), ModelError, "has no module of Conv1d"),
        (
            bert(),
            lambda m: revert_transformer_layer(kind, m, m.config),
            ModelError,
            "has no module of DeepSpeedTransformerLayer",
        ),
        (bert(), checkpoint("other.safetensors"), CheckpointError, "none of its 1 tensors"),
        (
            bert("BertModel"),
            lambda m: replace_module(m, kind, lambda *_: None, None, tmp_path / "missing.pt"),
            CheckpointError,
            "missing.pt",
        ),
        (
            distil,
            lambda m: replace_transformer_layer(layer_of("distilbert"), m, None, {}, None, True),
            ModelError,
            "behind its network alone",
        ),
        (nn.Sequential(nn.Linear(2, 2)), generic_injection, ModelError, "nothing has a kernel"),
        (replaced(), lambda m: revert_transformer_layer(kind, m, m.config, preln=True), ModelError, "pass preln=False"),
        (SimpleNamespace(modules=list), generic_injection, ModelError, "holds no torch.nn.Module"),
    ):
        kinds = [type(module) for module in model.modules()]
        with pytest.raises(error, match=text) as caught:
            act(model)
        assert "Fix: " in str(caught.value) or error is CheckpointError
        assert [type(module) for module in model.modules()] == kinds
