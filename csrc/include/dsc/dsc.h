/* The whole C ABI of deepspeed_c in one include. */
#ifndef DSC_DSC_H
#define DSC_DSC_H

#define DSC_VERSION_MAJOR 0
#define DSC_VERSION_MINOR 1
#define DSC_VERSION_PATCH 0

#include "dsc/accel.h"
#include "dsc/aio.h"
#include "dsc/ckpt.h"
#include "dsc/comm.h"
#include "dsc/compile.h"
#include "dsc/data.h"
#include "dsc/fetch.h"
#include "dsc/flat.h"
#include "dsc/infer.h"
#include "dsc/intake.h"
#include "dsc/kernels.h"
#include "dsc/moe.h"
#include "dsc/nn.h"
#include "dsc/optim.h"
#include "dsc/pipe.h"
#include "dsc/plan.h"
#include "dsc/pool.h"
#include "dsc/process.h"
#include "dsc/quant.h"
#include "dsc/recompute.h"
#include "dsc/scaler.h"
#include "dsc/schedule.h"
#include "dsc/seq.h"
#include "dsc/status.h"
#include "dsc/sums.h"
#include "dsc/tier.h"
#include "dsc/tp.h"
#include "dsc/types.h"
#include "dsc/zero.h"

#endif
