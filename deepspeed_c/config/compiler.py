"""Section compile: graphs of torch.compile with ZeRO's operators in them."""

from typing import Annotated, Literal

from .keys import NonNeg, Section, asks, tunes

__all__ = ["Compile"]

_C = "compile"


class Compile(Section, kw_only=True):
    """Compiled graphs that gather weights and reduce gradients by themselves."""

    deepcompile: Annotated[bool, asks("Let engine.compile put gathers and reductions into the graphs, at stages 1 to 3.", "deepcompile")] = False
    autoep_non_moe: Annotated[bool, asks("Compile all but the experts of AutoEP.", _C)] = False
    free_activation: Annotated[bool, tunes("Free activations early.", _C)] = False
    free_activation_threshold: Annotated[NonNeg, tunes("Bytes an activation must have for that.", _C, floor=True)] = (
        10 << 20
    )
    offload_activation: Annotated[bool, tunes("Move activations to the host.", _C)] = False
    offload_activation_pin_memory: Annotated[bool, tunes("Use page-locked memory for them.", _C)] = True
    offload_opt_states: Annotated[bool, tunes("Move optimizer state to the host.", _C)] = False
    double_buffer: Annotated[bool, tunes("Use two gather buffers.", _C)] = True
    symmetric_memory: Annotated[bool, tunes("Use symmetric memory.", _C)] = False
    debug_log: Annotated[bool, tunes("Write each graph after each pass to the folder compiled_graphs.", "deepcompile")] = False
    offload_parameters: Annotated[bool, tunes("Move parameters to the host.", _C)] = False
    sync_before_reduce: Annotated[bool, tunes("Wait before each reduction.", _C)] = False
    sync_after_reduce: Annotated[bool, tunes("Wait after each reduction.", _C)] = False
    sync_before_allgather: Annotated[bool, tunes("Wait before each gather.", _C)] = False
    sync_after_allgather: Annotated[bool, tunes("Wait after each gather.", _C)] = False
    keep_int_input_tensors: Annotated[bool, tunes("Keep integer inputs for profiling.", _C)] = True
    keep_all_input_tensors: Annotated[bool, tunes("Keep all inputs for profiling.", _C)] = False
    passes: Annotated[
        tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None, asks("Passes to run; null: by stage.", _C)
    ] = None
