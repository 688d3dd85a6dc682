"""Section compile: graphs of torch.compile with ZeRO's operators in them."""

from typing import Annotated, Literal

from .keys import NonNeg, Section, asks, inherent, tunes

__all__ = ["Compile"]

_NO_RUNS = "no graph is run to be measured"


class Compile(Section, kw_only=True):
    """Compiled graphs that gather weights and reduce gradients by themselves."""

    deepcompile: Annotated[
        bool, asks("Let engine.compile put gathers and reductions into the graphs, at stages 1 to 3.", "deepcompile")
    ] = False
    autoep_non_moe: Annotated[
        bool,
        asks(
            "Leave the experts of expert_parallel, and the exchange of their rows, out of compiled graphs.",
            "expert_parallel",
        ),
    ] = False
    free_activation: Annotated[
        bool, inherent("Free activations early.", "a graph frees each value after its last use")
    ] = False
    free_activation_threshold: Annotated[
        NonNeg, inherent("Bytes an activation must have for that.", "all are freed so", floor=True)
    ] = 10 << 20
    offload_activation: Annotated[bool, asks("Move activations to the host.", "graph_activation_offload")] = False
    offload_activation_pin_memory: Annotated[
        bool, tunes("Use page-locked memory for them.", "graph_activation_offload")
    ] = True
    offload_opt_states: Annotated[bool, asks("Move optimizer state to the host.", "graph_state_offload")] = False
    double_buffer: Annotated[
        bool,
        inherent("Use two gather buffers.", "as many units are gathered ahead as stage3_max_live_parameters allows"),
    ] = True
    symmetric_memory: Annotated[bool, asks("Gather through symmetric memory.", "symmetric_memory")] = False
    debug_log: Annotated[
        bool, tunes("Write each graph after each pass to the folder compiled_graphs.", "deepcompile")
    ] = False
    offload_parameters: Annotated[bool, asks("Move parameters to the host.", "graph_parameter_offload")] = False
    sync_before_reduce: Annotated[bool, tunes("Wait for the device before each reduction.", "deepcompile")] = False
    sync_after_reduce: Annotated[bool, tunes("Wait for each reduction.", "deepcompile")] = False
    sync_before_allgather: Annotated[bool, tunes("Wait for the device before each gather.", "deepcompile")] = False
    sync_after_allgather: Annotated[bool, tunes("Wait for each gather as it begins.", "deepcompile")] = False
    keep_int_input_tensors: Annotated[bool, inherent("Keep integer inputs for profiling.", _NO_RUNS)] = True
    keep_all_input_tensors: Annotated[bool, inherent("Keep all inputs for profiling.", _NO_RUNS)] = False
    passes: Annotated[
        tuple[Literal["z1", "z3", "autosp", "autotp"], ...] | None,
        asks(
            "Parallelism that passes add to graphs. The passes of ZeRO (z1, z3) run by stage, named here or not.",
            "graph_parallelism",
            off=((), ("z1",), ("z3",), ("z1", "z3"), ("z3", "z1")),
        ),
    ] = None
