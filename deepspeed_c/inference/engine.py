"""The inference engine: any module, cast, cut over tensor-parallel ranks, with kernels where they fit."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch

from deepspeed_c.accelerator import get_accelerator
from deepspeed_c.comm import init_distributed, is_initialized
from deepspeed_c.comm.axes import DATA, TP
from deepspeed_c.comm.collectives import Collectives
from deepspeed_c.comm.mesh import Mesh, mesh_of_mpu
from deepspeed_c.comm.watchdog import watch
from deepspeed_c.config import Config, read_config
from deepspeed_c.config.inference import DeepSpeedInferenceConfig, load_inference_config
from deepspeed_c.config.source import GivenConfig, copy_plain
from deepspeed_c.engine.consistency import check_same_model
from deepspeed_c.engine.edits import EditContext, Edits, need_of_plain_weights
from deepspeed_c.engine.host import ModelHost, take_from_others
from deepspeed_c.engine.packed_models import dequantize_packed
from deepspeed_c.engine.precision import Precision
from deepspeed_c.engine.prompts import check_length, check_words, has_encoder, n_tokens_of
from deepspeed_c.engine.shard import lay_out_model
from deepspeed_c.engine.whole import WholeModel
from deepspeed_c.errors import CommError, ConfigError, FeatureError, ModelError, StateError
from deepspeed_c.inference.int8 import quantize_weights
from deepspeed_c.inference.limits import check_heads, positions_of
from deepspeed_c.inference.load import load_checkpoint, save_mp_checkpoint, shards_from_files
from deepspeed_c.logging import log_dist
from deepspeed_c.ops.product_times import product_times
from deepspeed_c.utils import groups
from deepspeed_c.zero.layout.layout import Layout, gather_for_good
from deepspeed_c.zero.weights.code_layers import check_layers
from deepspeed_c.zero.weights.fp32_buffers import names_in_fp32
from deepspeed_c.zero.weights.kinds import is_codes, names_beside
from deepspeed_c.zero.weights.wrappers import check_wrappers

__all__ = ["InferenceEngine", "init_inference"]

_WHERE = "init_inference"


def init_inference(model: torch.nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Makes an engine that runs ``model`` for inference.

    Args:
        model: any module. A model of transformers keeps its ``generate``. Parameters may be on the meta device if
            ``checkpoint`` is given.
        config: a dict, the path of a JSON file, or a ``DeepSpeedInferenceConfig``. Never modified.
        **kwargs: further keys of the configuration (docs/concepts/inference.md lists them).

    The module is changed in place: floating-point weights are cast to ``dtype`` (default: float16), layers are cut over
    ``tensor_parallel.tp_size`` ranks, and the module is set to evaluation.

    Raises ConfigError for a wrong configuration, ModelError for a model that cannot be cut or loaded, CommError where
    the ranks cannot be divided so. The module's weights are unchanged then, but for their dtype.
    """
    return InferenceEngine(model, load_inference_config(config, kwargs))


class InferenceEngine(WholeModel, ModelHost):
    """A module that is ready to be run. Call the engine as the module, or ``generate``.

    Attributes of the module can be read from the engine, so ``pipe.model = engine`` works for a pipeline of
    transformers. On several tensor-parallel ranks every rank makes the same calls and gets the same results.
    """

    def __init__(self, model: torch.nn.Module, config: DeepSpeedInferenceConfig | dict[str, Any] | str) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ModelError(
                f"model must be a torch.nn.Module, not {type(model).__name__}",
                where=f"{_WHERE}(model=...)",
                fix="pass the model; of a transformers.pipeline pass its attribute model",
            )
        config = load_inference_config(config, {})
        if not is_initialized():
            init_distributed()
        mesh = _mesh_of(config)
        n_ranks = mesh.size(TP)
        settings = read_config(_engine_config(config, n_ranks)).resolve(world_size=mesh.size(*DATA))
        groups.set_mesh(mesh)
        watch(mesh.comm, settings.collective_timeout_s)
        for note in config.notes:
            log_dist(note, ranks=[0])
        check_heads(getattr(model, "config", None), n_ranks)
        if not config.checkpoint:
            _require_weights(model)
        check_same_model(model, mesh.tensors)
        take_from_others(model)
        dequantize_packed(model)
        check_layers(model, is_cut=n_ranks > 1)
        check_wrappers(
            model,
            config.dtype,
            why_plain=need_of_plain_weights(mesh, settings.tensor_parallel, settings.hybrid_engine),
        )
        device = torch.device("cpu" if config.keep_module_on_host else get_accelerator().current_device_name())
        edits = Edits(model)
        with ExitStack() as undo:
            undo.callback(edits.close)
            gather_for_good(model)
            _cast_weights(model, config.dtype)
            edits.make(EditContext(settings, mesh, trains=False, injection_policy=config.injection_policy))
            precision, layout = _load_and_lay_out(model, config, settings, mesh)
            model.to(device)
            model.eval()
            super().__init__(model, settings, mesh, precision, device, edits)
            self.inference_config = config
            self._times: _Times | None = None
            self._positions = positions_of(model)
            self._generation.keep_cache(config.max_out_tokens)
            # Pipelines of transformers read the configuration of their model here.
            self.config = getattr(model, "config", None) if config.config is None else config.config
            self._open(layout)
            undo.pop_all()
        if config.save_mp_checkpoint_path:
            save_mp_checkpoint(model, config.save_mp_checkpoint_path, mesh=mesh, fetcher=self._fetcher)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        self._require_open()
        return self._run(inputs, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's ``generate`` with all its arguments.

        Raises StateError if a prompt and its new tokens are more than ``max_out_tokens`` or than the model's learned
        positions, and for an id that is no word of the model.
        """
        self._require_open()
        if not callable(getattr(self.module, "generate", None)):
            raise FeatureError(
                f"{type(self.module).__name__} has no generate",
                where="InferenceEngine.generate",
                fix="call the engine itself, or pass a model that generates",
            )
        return super().generate(*args, **kwargs)

    @property
    def multiplies_by_core(self) -> bool:
        """Whether products of the model's dtype are the core's, because torch's are slow on this processor."""
        config = self.inference_config
        is_widened = config.dtype in (torch.bfloat16, torch.float16) and self.device.type == "cpu"
        return is_widened and config.cpu_products == "auto" and product_times(config.dtype).is_torch_slow

    def _check_prompts(self, args: tuple, kwargs: dict[str, Any]) -> None:
        limit = self.inference_config.max_out_tokens
        check_length(
            self.module,
            args,
            kwargs,
            limit,
            f"max_out_tokens, which is {limit}",
            "call init_inference with a larger max_out_tokens, cut the prompt, or ask for fewer new tokens",
        )
        self._check_positions(*n_tokens_of(self.module, args, kwargs))
        check_words(self.module, args, kwargs)

    def _check_positions(self, n_prompt: int, n_new: int) -> None:
        """Raises StateError where a token has no position. The last new token is not read again, and needs none."""
        of_prompt, of_sequence = self._positions
        n_last = n_new if has_encoder(self.module) else n_prompt + n_new - 1
        for n_tokens, limit in ((n_prompt, of_prompt), (n_last, of_sequence)):
            if limit is not None and n_tokens > limit:
                raise StateError(
                    f"a prompt of {n_prompt} tokens and {n_new} new ones are longer than the model's {limit} positions",
                    where="generate",
                    fix="cut the prompt, or ask for fewer new tokens; the model has no position for further ones",
                )

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Begins to time the module's forwards, those within ``generate`` too (``model_times``).

        ``use_cuda_events`` is accepted; the time ends when the device has ended its work.
        """
        self._require_open()
        if self._times is None:
            self._times = _Times(self.module)

    def model_times(self) -> list[float]:
        """The milliseconds of each forward since the last call. Raises StateError before ``profile_model_time``."""
        if self._times is None:
            raise StateError(
                "forwards are not timed", where="InferenceEngine.model_times", fix="call profile_model_time() first"
            )
        return self._times.take()

    def _claimed_params(self) -> list[torch.nn.Parameter]:
        return list(self.module.parameters())

    def _hand_over(self) -> None:
        self._end_times()
        super()._hand_over()

    def _end(self) -> None:
        self._end_times()
        super()._end()

    def _end_times(self) -> None:
        if self._times is not None:
            self._times.close()


class _Times:
    """Times a module's forwards by hooks."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._begin, self._times = 0.0, list[float]()
        self._hooks = [
            module.register_forward_pre_hook(self._start, prepend=True),
            module.register_forward_hook(self._stop, always_call=True),
        ]

    def _start(self, *_: Any) -> None:
        get_accelerator().synchronize()
        self._begin = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        get_accelerator().synchronize()
        self._times.append((time.perf_counter() - self._begin) * 1e3)

    def take(self) -> list[float]:
        found, self._times = self._times, []
        return found

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _mesh_of(config: DeepSpeedInferenceConfig) -> Mesh:
    """The ranks of the engine, divided into groups of neighbours that hold one model together."""
    section = config.tensor_parallel
    if section.mpu is not None:
        mesh = mesh_of_mpu(section.mpu)
        if section.tp_size not in (1, mesh.size(TP)):
            raise ConfigError(
                f"tp_size is {section.tp_size}; the mpu's tensor-parallel groups have {mesh.size(TP)} ranks",
                where=f"{_WHERE}: tensor_parallel",
                fix="leave tp_size out",
            )
        return mesh
    try:
        mesh = Mesh(Collectives()) if section.tp_size == 1 else Mesh(Collectives()).split_tensors(section.tp_size)
    except CommError as error:
        raise ConfigError(error.what, where=f"{_WHERE}: tensor_parallel.tp_size", fix=error.fix) from error
    if section.tp_group is not None:
        given = torch.distributed.get_process_group_ranks(section.tp_group)
        if given != mesh.ranks(TP):
            raise ConfigError(
                f"tp_group has the ranks {given}; tp_size {section.tp_size} gives the ranks {mesh.ranks(TP)} here",
                where=f"{_WHERE}: tensor_parallel.tp_group",
                fix="pass a group of neighbouring ranks and its size as tp_size",
            )
    return mesh


def _engine_config(config: DeepSpeedInferenceConfig, n_ranks: int) -> GivenConfig:
    """The configuration of an engine that trains nothing. n_ranks: tensor-parallel ranks, which an mpu may give."""
    tensors = {"autotp_size": n_ranks, "replace_with_kernel_inject": config.replace_with_kernel_inject}
    source: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": tensors}
    source["cpu_products"] = config.cpu_products
    if config.zero:
        # Sections fp16 and bf16 stay out: each weight has its dtype already, and some stay in fp32.
        source["zero_optimization"] = copy_plain(config.zero, "zero")
    return GivenConfig(source, "dict")


def _cast_weights(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Casts floating-point parameters and persistent buffers, but for tensors that the model's class keeps in float32.

    Other buffers (tables of rotary frequencies) keep their dtype: rounded to 16 bits, they would turn far positions by
    wrong angles.
    """
    if not dtype.is_floating_point:
        return
    kept = names_in_fp32(model, dtype)
    tensors = model.state_dict(keep_vars=True)
    beside = names_beside(model, tensors)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in beside or is_codes(tensor):
                continue
            if torch.is_tensor(tensor) and tensor.is_floating_point():
                wanted = torch.float32 if name in kept else dtype
                if tensor.dtype != wanted:
                    tensor.data = tensor.data.to(wanted)


def _load_and_lay_out(
    model: torch.nn.Module, config: DeepSpeedInferenceConfig, settings: Config, mesh: Mesh
) -> tuple[Precision, Layout]:
    """Give ``model``, which has been cut, its weights and 8-bit values, and shard it if the configuration says so."""
    is_sharded, is_int8 = settings.zero.sharding.parameters, config.dtype == torch.int8
    how = {
        "base_dir": config.base_dir,
        "mesh": mesh,
        "dtype": config.dtype if config.dtype.is_floating_point else None,  # None: the model's own
    }
    if config.checkpoint and is_sharded and not is_int8:
        with ExitStack() as undo:
            with shards_from_files(model, config.checkpoint, **how):
                precision = Precision(settings, model)
                layout = lay_out_model(model, None, settings, precision, mesh)
                undo.callback(_drop, layout)
            undo.pop_all()
        return precision, layout
    if config.checkpoint:
        if is_sharded:
            log_dist(
                "dtype int8: weights are read whole before they are sharded, because scales are of whole rows", [0]
            )
        load_checkpoint(model, config.checkpoint, **how)
    if is_int8:
        log_dist(str(quantize_weights(model)), ranks=[0])
    precision = Precision(settings, model)
    return precision, lay_out_model(model, None, settings, precision, mesh) if is_sharded else Layout([], [], None)


def _drop(layout: Layout) -> None:
    """Close the files of a layout whose weights could not be read."""
    for unit in layout.frozen:
        unit.weights.end()


def _require_weights(model: torch.nn.Module) -> None:
    name = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if name is not None:
        raise ModelError(
            "is on the meta device: it has no values",
            where=f"{_WHERE}: {name}",
            fix="pass checkpoint=... (a folder of weights), or a model with its weights",
        )
