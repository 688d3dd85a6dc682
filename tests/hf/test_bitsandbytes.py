"""Models with linear layers of bitsandbytes, loaded by transformers, under adapters of peft: losses, saved adapters and
merged weights equal one plain process's at every stage."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch

from tests.hf.stack import LEARNING_RATE, Text, arguments, ds_config, forget, llama, numbers, on_ranks
from tests.hf.test_trl import rows, tokenizer
from tests.ranks import free_port

pytest.importorskip("bitsandbytes")

N_ROWS, STEPS = 4, 3
KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 of scales": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
# Stage, and the way of loading: transformers knows of stage 3 (config), a context shards (init), both, or neither.
PLACES = [(0, ""), (2, ""), (3, ""), (3, "config"), (3, "init"), (3, "config, init")]


def base(folder, kind, dtype=torch.float32):
    """The model of ``folder`` with quantized linear layers. kind None: as the folder says."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    given = {}
    if kind is not None:
        compute = {"bnb_4bit_compute_dtype": dtype} if "load_in_4bit" in KINDS[kind] else {}
        given["quantization_config"] = BitsAndBytesConfig(**KINDS[kind], **compute)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **given)


def adapted(model, how):
    """The model with adapters, the same on all ranks. From the start they change its output."""
    from peft import IA3Config, LoraConfig, get_peft_model

    names = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    if how == "ia3":
        config = IA3Config(feedforward_modules=["down_proj"], **names)
    else:
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, use_dora=how == "dora", **names)
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad and p.dim() == 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05 + (how == "ia3"))
    return model


def zero3(stage=3):
    params = {"lr": LEARNING_RATE, "weight_decay": 0.0}
    return {
        "train_batch_size": N_ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": params},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def loaded(folder, kind, stage, told, dtype=torch.float32):
    """The quantized model, and an object. As long as it lives, transformers knows of stage 3."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    forget()
    keep = HfDeepSpeedConfig(zero3(stage)) if "config" in told else None
    with deepspeed.zero.Init(config_dict_or_path=zero3(stage), enabled="init" in told):
        return base(folder, kind, dtype), keep


def batch_of(step, rank=0, world=1):
    n = N_ROWS // world
    start = N_ROWS * step + n * rank
    batch = Text().batch(start, start + n)
    return {**batch, "labels": batch["input_ids"]}  # as many labels in each row


def train(rank, world, folder, kind, how, options, places):
    """The losses at each place. Stage None: transformers, peft and torch alone."""
    import deepspeed
    from peft import prepare_model_for_kbit_training

    found = []
    for stage, told in places:
        model, keep = loaded(folder, kind, stage, told, options.get("dtype", torch.float32))
        if "reentrant" in options:
            reentrant = {"use_reentrant": options["reentrant"]}
            model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=reentrant)
        model = adapted(model, how)
        # Models are loaded in the mode of evaluation. There the library repacks 4-bit codes on some processors, and under an
        # engine it does not. Layers of 8 bits compute otherwise there: they quantize their input.
        model.train(stage is None or "reentrant" in options or hasattr(model, "is_loaded_in_8bit"))
        trained = [p for p in model.parameters() if p.requires_grad]
        if stage is None:
            optimizer = torch.optim.AdamW(trained, **zero3()["optimizer"]["params"])
        else:
            engine = deepspeed.initialize(model=model, model_parameters=trained, config=zero3(stage))[0]
        losses = []
        for step in range(STEPS):
            loss = (model if stage is None else engine)(**batch_of(step, rank, world)).loss
            losses.append(loss.item())
            if stage is None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            else:
                engine.backward(loss)
                engine.step()
        if stage is not None:
            engine.destroy()
        del keep
        found.append(losses)
    return found


def save_source(rank, world, folder):
    forget()
    llama(seed=3).save_pretrained(folder / "plain")
    for kind in KINDS:
        base(folder / "plain", kind).save_pretrained(folder / kind)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder with a model, and its quantized models as transformers saves them."""
    folder = tmp_path_factory.mktemp("source")
    on_ranks(1, save_source, folder)
    return folder


CELLS = [
    *((kind, "lora", {}) for kind in KINDS),
    *((kind, how, {}) for kind in ("nf4", "int8") for how in ("dora", "ia3") if (kind, how) != ("int8", "dora")),
    ("nf4 of scales", "dora", {}),
    ("nf4", "lora", {"reentrant": True}),
    ("nf4 of scales", "lora", {"reentrant": False, "dtype": torch.bfloat16}),
    ("int8", "lora", {"reentrant": False}),
    ("fp4", "lora", {"dtype": torch.bfloat16}),
]


@pytest.mark.parametrize("kind, how, options", CELLS, ids=str)
def test_adapters_train_as_in_one_plain_process(source, kind, how, options):
    # peft casts the rest of the model to fp32, and a shard in bf16 refuses the cast. The remedy is to load in fp32.
    places = [(stage, told) for stage, told in PLACES if "init" not in told or len(options) < 2]
    (expected,) = on_ranks(1, train, source / "plain", kind, how, options, [(None, "")])[0]
    found = on_ranks(2, train, source / "plain", kind, how, options, places)
    for place, one, two in zip(places, *found, strict=True):
        mean = [(a + b) / 2 for a, b in zip(one, two, strict=True)]
        assert mean == pytest.approx(expected, rel=1e-3 if "dtype" in options else 1e-6), place


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_quantized_models_are_loaded_as_they_are(source, kind):
    (expected,) = on_ranks(1, train, source / "plain", kind, "lora", {}, [(None, "")])[0]
    places = [(3, told) for told in ("", "config", "init")]
    found = on_ranks(2, train, source / kind, None, "lora", {}, places)
    for place, one, two in zip(places, *found, strict=True):
        mean = [(a + b) / 2 for a, b in zip(one, two, strict=True)]
        assert mean == pytest.approx(expected, rel=1e-6), place


def load_measured(rank, world, folder, is_quantized):
    """Bytes of a rank while a model is loaded under zero.Init and after it, bytes of all codes, and of the largest
    weight before it is quantized."""
    import deepspeed

    from deepspeed_c.plan.live_bytes import LiveBytes

    forget()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    source = folder / ("codes" if is_quantized else "plain")
    if rank == 0:
        llama(**sizes).save_pretrained(folder / "plain")
        base(folder / "plain", "nf4").save_pretrained(folder / "codes")
    torch.distributed.barrier()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # LiveBytes sees one thread
    live = LiveBytes()
    with live, live.phase("load"), deepspeed.zero.Init(config_dict_or_path=zero3()):
        model = base(source, None if is_quantized else "nf4")
    del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
    weights = list(model.parameters())
    beside = sum(p.quant_state.absmax.nbytes + p.quant_state.code.nbytes for p in weights if hasattr(p, "quant_state"))
    whole = sum(p.ds_numel * p.element_size() for p in weights)
    return live.peaks["load"], live.nbytes(), whole, beside, all(p.ds_status.name == "NOT_AVAILABLE" for p in weights)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_no_rank_holds_the_whole_while_it_is_loaded(tmp_path, is_quantized):
    for peak, after, whole, beside, is_sharded in on_ranks(2, load_measured, tmp_path, is_quantized):
        print(peak, after, whole, beside)
        assert is_sharded
        assert whole / 2 <= after - beside < whole / 2 + 4096  # and tables of positions
        largest = 4 * 128 * 256  # of a layer in fp32
        assert peak < after + (2 * largest if not is_quantized else largest / 4)


def logits_of(model):
    with torch.no_grad():
        return model(**{**batch_of(7), "labels": None}).logits.clone()


def save_and_merge(rank, world, folder, source, kind, how, told):
    """Trains adapters by the engine, saves them, and merges them into the codes: logits before and after it."""
    import deepspeed
    from deepspeed.zero import GatheredParameters

    model, keep = loaded(source, kind, 3, told)
    model = adapted(model, how).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=trained, config=zero3())[0]
    for step in range(STEPS):
        engine.backward(engine(**batch_of(step, rank, world)).loss)
        engine.step()
    before = logits_of(engine)
    state = engine.module_state_dict()
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    engine.destroy()
    with GatheredParameters(list(model.parameters())):
        merged = before if how == "ia3" else logits_of(model.merge_and_unload())  # peft does not merge IA3 into codes
    del keep
    return before, merged


def merge_plainly(rank, world, folder, source, kind, how):
    from peft import PeftModel

    forget()
    model = PeftModel.from_pretrained(base(source, kind), folder).train()
    before = logits_of(model)
    return before, before if how == "ia3" else logits_of(model.merge_and_unload())


@pytest.mark.parametrize(
    "kind, how, told",
    [("nf4", "lora", "config"), ("nf4 of scales", "dora", "init"), ("fp4", "ia3", "init"), ("int8", "lora", "")],
)
def test_saved_adapters_load_into_peft_and_merge(tmp_path, source, kind, how, told):
    found = on_ranks(2, save_and_merge, tmp_path, source / "plain", kind, how, told)
    expected = on_ranks(1, merge_plainly, tmp_path, source / "plain", kind, how)[0]
    for logits in found:
        for value, wanted in zip(logits, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=2e-6)


TRAINED, SAVED, BATCH, MICRO = (
    4,
    2,
    12,
    2,
)  # steps of a run, step of its checkpoint, rows of a step and of a micro-batch


def run_trainer(rank, world, folder, source, stage, resumes):
    """The losses of a Trainer's run. Stage None: without DeepSpeed."""
    from transformers import PrinterCallback, Trainer

    forget()
    config = None if stage is None else ds_config(stage, scheduler=False)
    split = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": BATCH // MICRO // world}
    saves = {"max_steps": TRAINED, "save_strategy": "steps", "save_steps": SAVED}
    args = arguments(folder, config, warmup_steps=0, max_grad_norm=1.0, **split, **saves)
    trainer = Trainer(model=adapted(base(source, "nf4"), "lora"), args=args, train_dataset=Text(60))
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resumes else None)
    trainer.save_model(str(folder / "adapter"))
    return numbers(trainer)["loss"]


def test_the_trainer_resumes_on_another_number_of_ranks(tmp_path, source):
    expected = on_ranks(1, run_trainer, tmp_path / "plain", source / "plain", None, False)[0]
    wanted = on_ranks(1, merge_plainly, tmp_path / "plain" / "adapter", source / "plain", "nf4", "lora")[0][0]
    folder = tmp_path / "zero"
    for world, resumes in ((2, False), (3, True), (1, True)):
        losses = on_ranks(world, run_trainer, folder, source / "plain", 3, resumes)[0]
        assert losses == pytest.approx(expected, rel=2e-6), world
        found = on_ranks(1, merge_plainly, folder / "adapter", source / "plain", "nf4", "lora")[0][0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


SCRIPT = """
import json
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

with open("settings.json") as file:
    given = json.load(file)
args = SFTConfig(
    "out", use_cpu=True, bf16=False, max_steps=3, learning_rate=5e-3, logging_steps=1, save_strategy="no", report_to=[],
    max_length=16, gradient_checkpointing=True, disable_tqdm=True, per_device_train_batch_size=2,
    gradient_accumulation_steps=given["accumulation"],
)
quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
model = AutoModelForCausalLM.from_pretrained("model", quantization_config=quantization, dtype=torch.float32)
torch.manual_seed(0)
trainer = SFTTrainer(
    model=model, args=args, train_dataset=Dataset.from_dict({"text": given["texts"]}),
    processing_class=AutoTokenizer.from_pretrained("model"),
    peft_config=LoraConfig(r=4, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("adapter")
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weight = next(p for name, p in model.named_parameters() if name.endswith("up_proj.base_layer.weight"))
    engine = trainer.model_wrapped
    stage = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None
    facts = [type(weight).__name__, str(getattr(weight, "ds_status", None)), stage]
    with open("found.json", "w") as file:  # and not to the output, where the other rank's lines may come between
        json.dump([losses, facts], file)
"""


def prepare_sft(rank, world, folder):
    words = tokenizer()
    # As many rows at a time in both runs: where a gradient is near 0, Adam's first step has the sign of its rounding.
    for accumulation, name in ((2, "plain"), (1, "zero")):
        llama(vocab_size=len(words)).save_pretrained(folder / name / "model")
        words.save_pretrained(folder / name / "model")
        (folder / name / "settings.json").write_text(json.dumps({"accumulation": accumulation, "texts": rows()}))
        (folder / name / "script.py").write_text(SCRIPT)
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    section = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    (folder / "zero" / "zero.json").write_text(
        json.dumps({**dict.fromkeys(names, "auto"), "zero_optimization": section})
    )


def run_script(rank, world, folder):
    forget()
    os.chdir(folder)
    runpy.run_path("script.py")


def test_supervised_fine_tuning_under_accelerate_launch(tmp_path):
    from safetensors.torch import load_file

    on_ranks(1, prepare_sft, tmp_path)
    on_ranks(1, run_script, tmp_path / "plain")
    command = [sys.executable, "-m", "deepspeed_c", "run", sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--use_deepspeed", "--deepspeed_config_file", "zero.json", "--mixed_precision", "no"]
    command += ["--num_processes", "2", "--num_machines", "1", "--dynamo_backend", "no"]
    command += ["--main_process_port", str(free_port()), "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)}  # no configuration of the user's
    done = subprocess.run(
        command, cwd=tmp_path / "zero", env=environment, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses, facts = json.loads((tmp_path / "zero" / "found.json").read_text())
    expected, plain = json.loads((tmp_path / "plain" / "found.json").read_text())
    assert facts == ["Params4bit", "ZeroParamStatus.NOT_AVAILABLE", 3] and plain == ["Params4bit", "None", None]
    assert losses == pytest.approx(expected, rel=1e-6)
    found, wanted = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("zero", "plain"))
    assert found.keys() == wanted.keys() and len(found) == 2 * 2 * 7
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4, msg=name)
