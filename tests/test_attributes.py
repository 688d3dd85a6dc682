"""Attributes of a class are set only in the file of the class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Attributes of objects of Python or torch, which any file may set.
FOREIGN = {
    "data": "of a tensor",
    "grad": "of a tensor",
    "__doc__": "of a function",
    "__kwdefaults__": "of a function",
    "__name__": "of a function",
    "__qualname__": "of a function",
    "__spec__": "of a module",
    "__version__": "of a module",
}

SETTERS = {"setattr", "delattr", "object.__setattr__"}

# Permitted exceptions: attributes that another file sets, each with its reason. The list may only get shorter.
PERMITTED: dict[str, str] = {
    "accelerator.py: setattr(Accelerator, _name)": "a table makes the methods of the class below it",
    "engine/getters.py: setattr(ConfigGetters, _name)": "a table makes the methods of the class below it",
    "zero/weights/param.py: setattr(_Released, name)": "a table makes the methods of the class below it",
    "zero/weights/param.py: setattr(_ReleasedTensor, name)": "a table makes the methods of the class below it",
    "compat/alias/finder.py: error.name": "Python's own: an import error says which module",
    "launcher/run.py: logger.propagate": "Python's own: a logger",
    "logging.py: logger.propagate": "Python's own: a logger",
    "comm/watchdog.py: weakref.finalize(comm, watched.close).atexit": "Python's own: a finalizer",
    "checkpoint/native/ranks.py: options.rootRank": "torch's own: options of a collective have no constructor",
    "checkpoint/native/ranks.py: options.rootTensor": "torch's own: options of a collective have no constructor",
    "data/workers.py: batches._worker_pids_set": "torch's own: its loader has no switch for its handler of SIGCHLD",
    "engine/boundary.py: ctx.on_enter": "torch's own: the context of an autograd function",
    **dict.fromkeys(
        ("moe/dispatch.py: ctx.is_return", "moe/dispatch.py: ctx.way", "moe/mappings.py: ctx.dim")
        + ("moe/grouped.py: ctx.counts", "moe/grouped.py: ctx.has_bias", "moe/grouped.py: ctx.is_in_out"),
        "torch's own: the context of an autograd function",
    ),
    **dict.fromkeys(
        (
            f"{file}: param.{mark}"
            for file in ("moe/experts.py", "plan/sizes.py", "zero/layout/experts.py")
            for mark in ("allreduce", "group_name")
        ),
        "DeepSpeed's marks of an expert's parameter",
    ),
    "sequence/exchange.py: ctx.comm": "torch's own: the context of an autograd function",
    "sequence/exchange.py: ctx.shapes": "torch's own: the context of an autograd function",
    "sequence/ring.py: ctx.call": "torch's own: the context of an autograd function",
    "sequence/layer.py: ctx.comm": "torch's own: the context of an autograd function",
    "sequence/layer.py: ctx.dims": "torch's own: the context of an autograd function",
    **dict.fromkeys(
        (
            *("sequence/fpdt.py: ctx.call", "sequence/tiles.py: ctx.call"),
            *("sequence/loss.py: ctx.call", "sequence/loss.py: ctx.ranks"),
        ),
        "torch's own: the context of an autograd function",
    ),
    "zero/weights/code_layers.py: ctx.layer": "torch's own: the context of an autograd function",
    "sequence/layer.py: ctx.sizes": "torch's own: the context of an autograd function",
    "sequence/huggingface.py: module.num_key_value_groups": "transformers' own: its functions read it off the layer, during one call",
    "pipe/transformers.py: self._decoder[0].training": "a flag of torch, for one shell: train() would reach the layers that it shares with the pipeline",
    "pipe/transformers.py: whole.training": "a flag of torch, for one shell: train() would reach the layers that it shares with the pipeline",
    "engine/training.py: optimizer.optimizer._opt_called": "torch's own: its schedules ask whether an optimizer has stepped, and through which method",
    "zero/states/kinds.py: self._base._opt_called": "torch's own: its schedules ask whether an optimizer has stepped, and through which method",
    "zero/states/lent.py: method._wrapped_by_lr_sched": "torch's own: its schedules ask whether an optimizer has stepped, and through which method",
    "zero/states/lent.py: setattr(base, name)": "torch's own: its schedules ask whether an optimizer has stepped, and through which method",
    "plan/sizes.py: trial.param_groups": "torch's own: a copy of an optimizer takes a step on trial",
    "plan/sizes.py: trial.state": "torch's own: a copy of an optimizer takes a step on trial",
    "zero/weights/hooks.py: module._parameters": "torch's own: a module that reads its parameters through ours, until the hooks are removed",
    "zero/weights/hooks.py: source._parameters": "torch's own: a module that reads its parameters through ours, until the hooks are removed",
    "zero/weights/init.py: setattr(torch, *_replaced.popitem())": "torch's own: constructors make sharded parameters within zero.Init",
    "zero/weights/init.py: setattr(torch, name)": "torch's own: constructors make sharded parameters within zero.Init",
    "zero/weights/init.py: torch.nn.Module.__init_subclass__": "torch's own: constructors make sharded parameters within zero.Init",
    "zero/states/access.py: setattr(slot.param, HANDLE)": "torch's own: what a tensor is marked with",
    "zero/weights/param.py: tensor._dsc_shard_of": "torch's own: what a tensor is marked with",
    "zero/layout/experts.py: param.expert_cut": "torch's own: what a tensor is marked with",
    "moe/spread.py: adapter.num_experts": "peft's own: the sizes of an adapter on a stack of experts, which is cut",
    "moe/spread.py: adapter.lora_A[key].out_features": "peft's own: the sizes of an adapter on a stack of experts, which is cut",
    "moe/spread.py: adapter.lora_B[key].in_features": "peft's own: the sizes of an adapter on a stack of experts, which is cut",
    "zero/layout/cuts.py: param.tp_cut": "torch's own: what a tensor is marked with",
    "zero/layout/cuts.py: param.pipe_tied_ranks": "torch's own: what a tensor is marked with",
    "inject/ranks.py: param.tp_sum_gradients": "torch's own: what a tensor is marked with",
    "inject/ranks.py: param.tp_sum_hook": "torch's own: what a tensor is marked with",
    "zero/weights/param.py: torch.Tensor.ds_status": "torch's own: what a tensor is marked with",
    "kv/attention.py: config._attn_implementation_internal": "transformers' own: where a model finds its attention, during one call",
    "engine/cached_generation.py: found.past_key_values": "transformers' own: the cache in the result of generate",
    "kv/cache.py: own.cumulative_length": "transformers' own: the length of a layer with a window",
    "kv/cache.py: setattr(key_states, _VIEW)": "torch's own: what a tensor is marked with",
    "kv/written_out.py: setattr(alibi, _SLOPES)": "torch's own: what a tensor is marked with",
    "weights/configs.py: config.architectures": "transformers' own: what from_pretrained reads",
    "weights/configs.py: config.dtype": "transformers' own: what from_pretrained reads",
    **dict.fromkeys(
        (
            "inject/loss.py: ctx.vocab_size",
            "inject/loss.py: ctx.smoothing",
            "inject/ranks.py: ctx.begin",
            "inject/ranks.py: ctx.held",
        )
        + ("inject/trial_runs.py: ctx.begin", "inject/trial_runs.py: ctx.label", "inject/trial_runs.py: ctx.size")
        + ("inject/ranks.py: ctx.size", "inject/overlap.py: ctx.held"),
        "torch's own: the context of an autograd function",
    ),
    **dict.fromkeys(
        ("inject/cut.py: param.partition_dim", "inject/cut.py: param.partition_stride")
        + ("inject/cut.py: param.tensor_model_parallel", "inject/cut.py: param.tp_cut"),
        "torch's own: what a tensor is marked with, in Megatron's words",
    ),
    **dict.fromkeys(
        (
            "inject/own_heads.py: owner.config",
            "inject/own_heads.py: setattr(holder, name)",
            "inject/own_heads.py: setattr(owner, name)",
        )
        + ("inject/replacement.py: setattr(holder, last)", "inject/loss.py: output.logits"),
        "transformers' own: a model's modules and the counts that they compute with",
    ),
    "data/streams.py: dataset.next_epoch": "mosaicml-streaming's own: the epoch that its stream begins next",
    "compression/shrink.py: layer.in_features": "torch's own: the sizes of a linear layer, which may be plain, that is cut",
    "compression/shrink.py: layer.out_features": "torch's own: the sizes of a linear layer, which may be plain, that is cut",
    "compression/shrink.py: setattr(holder, key)": "transformers' own: the numbers of heads that attention modules compute with",
    "inject/swap.py: module.__class__": "torch's own: the one place that gives a module another class",
    **dict.fromkeys(
        (
            *("zero/weights/param.py: made.__class__", "zero/weights/param.py: param.__class__"),
            *("zero/weights/grad_face.py: copied.__class__", "zero/weights/grad_face.py: param.__class__"),
        ),
        "torch's own: a parameter's class says what its attributes answer",
    ),
    "engine/full_weights.py: tensor.__class__": "torch's own: a tensor that has ended refuses reads, as a released parameter does",
    **dict.fromkeys(
        (
            *("__init__.py: value.__class__", "__init__.py: sys.modules[__name__].__class__"),
            "compat/alias/finder.py: module.__class__",
        ),
        "Python's own: a module of Python, not of torch",
    ),
    "inject/swap.py: module.forward": "torch's own: the one place that gives a module another forward",
    "inject/swap.py: model.loss_function": "transformers' own: the one place that gives a model another loss",
    "inject/kernels.py: module.forward": "torch's own: a module has its own forward again",
    "inject/replace.py: setattr(model.get_submodule(parent), last)": "transformers' own: a model's modules",
    "compat/ds_config.py: param.use_muon": "DeepSpeed's names on a parameter",
    "compat/fragments.py: param._dp_group": "DeepSpeed's names on a parameter",
    "compat/fragments.py: param._hp_mapping": "DeepSpeed's names on a parameter",
    "compat/fragments.py: param._index_in_param_group": "DeepSpeed's names on a parameter",
    "compat/fragments.py: setattr(param, name)": "DeepSpeed's names on a parameter",
    "config/config_model.py: setattr(new, 'model_fields_set')": "an object that its own class makes",
    "compat/config_utils.py: number.custom_print_str": "an object that its own class makes",
    "config/config_model.py: setattr(owner, last)": "a name that DeepSpeed has renamed: the value goes where the new one is",
    "compat/dotted.py: setattr(reduce(getattr, path, model), last)": "a name that DeepSpeed has renamed: the value goes where the new one is",
    "engine/training.py: setattr(getattr(self, part), name)": "what callers set on the engine under DeepSpeed's names, its state holds",
    "comm/comm.py: comms_logger.on_switch": "one log a process, which collectives know nothing of",
    "comm/comm.py: setattr(comms_logger, name)": "one log a process, which collectives know nothing of",
    "comm/comm.py: entry.module": "to be a method of the ledger",
    "comm/mesh.py: part.ledger.phase": "to be a method of the ledger",
    "zero/gradients/slots.py: slot.tracker_index": "the reducer numbers the slots of its buckets",
}


def own_attributes(tree: ast.Module) -> set[str]:
    """The attributes that classes of a file declare: in their bodies, or by their methods on ``self``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [field for field in node.body if isinstance(field, (ast.Assign, ast.AnnAssign))]
            names |= {n.id for field in fields for n in ast.walk(field) if isinstance(n, ast.Name)}
            names |= {f.name for f in node.body if isinstance(f, ast.FunctionDef) and _is_setter(f)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
            names.add(node.attr)
    return names


def _is_setter(function: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in function.decorator_list)


def _is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def set_from_outside(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of each attribute that a file sets or deletes on an object whose class is defined elsewhere."""
    own = own_attributes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            is_known = _is_own(node.value) or node.attr in own or node.attr in FOREIGN
            if node.attr in ("__dict__", "__class__") or not is_known:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in SETTERS and not _is_own(node.args[0]):
            yield node.lineno, f"setattr({ast.unparse(node.args[0])}, {ast.unparse(node.args[1])})"


def test_the_search_finds_what_is_set_from_outside():
    text = """
class Own:
    known: int
    def __init__(self, other):
        self.mine, self.known, other.theirs = 1, 2, 3
        self.part.deep += 1
        other.mine = other.known = 4
        other.data = self.part
        self.__dict__ = other.__dict__
        self.__class__ = other.__class__
        setattr(other, "late", 1)
        setattr(self, "late", 1)
        del other.gone
        with open("f") as other.file:
            pass
def read(other):
    return other.anything
"""
    found = {what for _, what in set_from_outside(ast.parse(text))}
    assert found == {
        "other.theirs",
        "self.part.deep",
        "self.__dict__",
        "self.__class__",
        "setattr(other, 'late')",
        "other.gone",
        "other.file",
    }


def test_no_attribute_is_set_from_another_file():
    found: dict[str, int] = {}
    for path in sorted((ROOT / "deepspeed_c").rglob("*.py")):
        name = path.relative_to(ROOT / "deepspeed_c").as_posix()
        found |= {f"{name}: {what}": line for line, what in set_from_outside(ast.parse(path.read_text()))}
    wrong = [f"{where} (line {found[where]})" for where in sorted(found.keys() - PERMITTED.keys())]
    assert not wrong, "give it to the constructor, or to a method of the object: " + "; ".join(wrong)
    gone = sorted(PERMITTED.keys() - found.keys())
    assert not gone, f"no longer set from outside; take them from the list: {gone}"
