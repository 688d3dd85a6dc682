/*
 * The extension module deepspeed_c._C. This file adds the handles, one line for each file. Operators register
 * themselves when the library is loaded.
 */
#include "handles.h"

PYBIND11_MODULE(_C, m)
{
    m.doc() = "The compiled part of deepspeed_c: operators in torch.ops.deepspeed_c, handles here.";
    dsc::bind_zero(m);
    dsc::bind_gradients(m);
    dsc::bind_tp(m);
    dsc::bind_seq(m);
    dsc::bind_tier(m);
    dsc::bind_pipe(m);
    dsc::bind_plan(m);
    dsc::bind_recompute(m);
    dsc::bind_compile(m);
    dsc::bind_fetch(m);
    dsc::bind_scaler(m);
    dsc::bind_data(m);
    dsc::bind_infer(m);
    dsc::bind_batch(m);
    dsc::bind_schedule(m);
    dsc::bind_ckpt(m);
    dsc::bind_aio(m);
    dsc::bind_comm(m);
    dsc::bind_build(m);
}
