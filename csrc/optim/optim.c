/*
 * The optimizer step: checks all arguments, computes the scalars, cuts the tensors into chunks for threads, and runs
 * the loops block by block.
 */
#include "dsc/optim.h"

#include "base/fail.h"
#include "base/par.h"
#include "optim/loops.h"
#include "optim/q8.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* The dsc_optim_args that an optimizer uses beyond lr, weight_decay and grad_scale. */
#define DSC_USES_BETAS (1u << 0)
#define DSC_USES_EPS (1u << 1)
#define DSC_USES_MOMENTUM (1u << 2)
#define DSC_USES_LR_DECAY (1u << 3)
#define DSC_USES_COEFFS (1u << 4)

#define ALL_FLAGS (DSC_OPTIM_BIAS_CORRECTION | DSC_OPTIM_NESTEROV | DSC_OPTIM_MAXIMIZE | DSC_OPTIM_STATE_Q8)

/* The codes of an optimizer's slots. */
#define DSC_Q8_MOMENTS                 \
    {                                  \
        DSC_Q8_SIGNED, DSC_Q8_UNSIGNED \
    }
#define DSC_Q8_MOMENTUM            \
    {                              \
        DSC_Q8_SIGNED, DSC_Q8_NONE \
    }
#define DSC_Q8_NEVER             \
    {                            \
        DSC_Q8_NONE, DSC_Q8_NONE \
    }

struct dsc_optim_kind {
    const char *name;
    int32_t n_states;
    uint32_t uses;
    bool needs_norms;
    dsc_q8_code q8[DSC_OPTIM_MAX_STATES];
};

static const struct dsc_optim_kind kinds[DSC_OPTIM_N_KINDS] = {
#define DSC_OPTIMIZER(name, n_states, uses, q8) [DSC_OPTIM_ID_##name] = {#name, n_states, uses, false, q8},
#define DSC_OPTIMIZER_NORMS(name, n_states, uses, q8) [DSC_OPTIM_ID_##name] = {#name, n_states, uses, true, q8},
#include "optim/optimizers.inc"
#undef DSC_OPTIMIZER
#undef DSC_OPTIMIZER_NORMS
};

/*
 * Muon's halves share the checks. Muon is not in the registry, because its step needs matrix products between the
 * halves.
 */
static const struct dsc_optim_kind muon = {"muon", 1, DSC_USES_MOMENTUM, false, DSC_Q8_NEVER};

#define TABLE_ENTRY(isa, is_runnable) &DSC_K_OF(optim_table, isa),
static const struct dsc_optim_table *const tables[] = {DSC_ISA_MAP(TABLE_ENTRY)};
#undef TABLE_ENTRY

dsc_status dsc_optim_find(const char *name, const struct dsc_optim_kind **out_kind)
{
    char names[160] = "";
    size_t used = 0;

    if (name == NULL || out_kind == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", name == NULL ? "name" : "out_kind");
    for (int32_t i = 0; i < DSC_OPTIM_N_KINDS; i++) {
        if (strcmp(kinds[i].name, name) == 0) {
            *out_kind = &kinds[i];
            return DSC_OK;
        }
        if (used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i == 0 ? "" : ", ", kinds[i].name);
    }
    return dsc_fail(DSC_ENOTFOUND, "no optimizer \"%.63s\"; there are: %s", name, names);
}

const struct dsc_optim_kind *dsc_optim_at(int32_t i)
{
    return i >= 0 && i < DSC_OPTIM_N_KINDS ? &kinds[i] : NULL;
}

const char *dsc_optim_name(const struct dsc_optim_kind *kind)
{
    return kind->name;
}

int32_t dsc_optim_n_states(const struct dsc_optim_kind *kind)
{
    return kind->n_states;
}

bool dsc_optim_needs_norms(const struct dsc_optim_kind *kind)
{
    return kind->needs_norms;
}

dsc_q8_code dsc_optim_q8_code(const struct dsc_optim_kind *kind, int32_t slot)
{
    return slot >= 0 && slot < kind->n_states ? kind->q8[slot] : DSC_Q8_NONE;
}

/* Checks one field of dsc_optim_args: finite after rounding to f32, and in [low, high) if the optimizer uses it. */
static dsc_status check_field(const char *kind, const char *field, double value, bool is_used, double low, double high)
{
    if (!(fabs(value) <= FLT_MAX))
        return dsc_fail(DSC_EINVAL, "%s: args.%s is %g, must be finite in f32", kind, field, value);
    if (is_used && !(value >= low && value < high))
        return dsc_fail(DSC_EINVAL, "%s: args.%s is %g, must be in [%g, %g)", kind, field, value, low, high);
    return DSC_OK;
}

static dsc_status check_dtype(const char *kind, const char *field, dsc_dtype dtype)
{
    if (dsc_dtype_bytes(dtype) == 0)
        return dsc_fail(DSC_EINVAL, "%s: args.%s is %d, which is no dsc_dtype", kind, field, (int)dtype);
    return DSC_OK;
}

static dsc_status check_flags(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args)
{
    if ((args->flags & ~ALL_FLAGS) != 0)
        return dsc_fail(DSC_EINVAL, "%s: args.flags is 0x%x, has unknown bits", kind->name, (unsigned)args->flags);
    if ((args->flags & DSC_OPTIM_STATE_Q8) != 0 && dsc_optim_q8_code(kind, 0) == DSC_Q8_NONE)
        return dsc_fail(DSC_ENOTSUP, "%s: its states cannot be quantised to 8 bits", kind->name);
    if ((args->flags & DSC_OPTIM_NESTEROV) == 0)
        return DSC_OK;
    if ((kind->uses & DSC_USES_MOMENTUM) == 0)
        return dsc_fail(DSC_EINVAL, "%s: args.flags has DSC_OPTIM_NESTEROV, which it has no use for", kind->name);
    if (kind != &muon && (args->momentum == 0.0 || args->dampening != 0.0))
        return dsc_fail(DSC_EINVAL, "%s: DSC_OPTIM_NESTEROV needs momentum > 0 and dampening 0, not %g and %g",
                        kind->name, args->momentum, args->dampening);
    return DSC_OK;
}

static dsc_status check_args(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args)
{
    if (kind == NULL || args == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", kind == NULL ? "kind" : "args");

    const char *name = kind->name;
    bool has_betas = (kind->uses & DSC_USES_BETAS) != 0;
    bool has_momentum = (kind->uses & DSC_USES_MOMENTUM) != 0;
    bool has_coeffs = (kind->uses & DSC_USES_COEFFS) != 0;

    if (args->size != sizeof *args)
        return dsc_fail(DSC_EINVAL, "%s: args.size is %u, this library expects %u; start from DSC_OPTIM_ARGS_INIT",
                        name, (unsigned)args->size, (unsigned)sizeof *args);
    DSC_TRY(check_dtype(name, "param_dtype", args->param_dtype));
    DSC_TRY(check_dtype(name, "grad_dtype", args->grad_dtype));
    DSC_TRY(check_dtype(name, "state_dtype", args->state_dtype));
    DSC_TRY(check_dtype(name, "copy_dtype", args->copy_dtype));
    if (args->step < 1)
        return dsc_fail(DSC_EINVAL, "%s: args.step is %lld, must be at least 1", name, (long long)args->step);
    DSC_TRY(check_field(name, "lr", args->lr, true, 0.0, INFINITY));
    DSC_TRY(check_field(name, "beta1", args->beta1, has_betas, 0.0, 1.0));
    DSC_TRY(check_field(name, "beta2", args->beta2, has_betas, 0.0, 1.0));
    DSC_TRY(check_field(name, "eps", args->eps, (kind->uses & DSC_USES_EPS) != 0, 0.0, INFINITY));
    DSC_TRY(check_field(name, "weight_decay", args->weight_decay, true, 0.0, INFINITY));
    DSC_TRY(check_field(name, "momentum", args->momentum, has_momentum, 0.0, INFINITY));
    DSC_TRY(check_field(name, "dampening", args->dampening, false, 0.0, 0.0));
    DSC_TRY(check_field(name, "lr_decay", args->lr_decay, (kind->uses & DSC_USES_LR_DECAY) != 0, 0.0, INFINITY));
    DSC_TRY(check_field(name, "min_coeff", args->min_coeff, has_coeffs, 0.0, INFINITY));
    DSC_TRY(check_field(name, "max_coeff", args->max_coeff, has_coeffs, args->min_coeff, INFINITY));
    DSC_TRY(check_field(name, "grad_scale", args->grad_scale, false, 0.0, 0.0));
    return check_flags(kind, args);
}

/* The operands that a pass reads and writes. */
#define READS_PARAM (1u << 0)
#define WRITES_PARAM (1u << 1)
#define READS_GRAD (1u << 2)
#define READS_STATE (1u << 3)
#define WRITES_STATE (1u << 4)
#define WRITES_COPY (1u << 5)   /* from the param block, if the tensor has a copy */
#define REQUIRES_COPY (1u << 6) /* the copy is the result */

#define TOUCHES_PARAM (READS_PARAM | WRITES_PARAM)
#define TOUCHES_STATE (READS_STATE | WRITES_STATE)

static const char *const state_fields[DSC_OPTIM_MAX_STATES] = {"state[0]", "state[1]"};
static const char *const scale_fields[DSC_OPTIM_MAX_STATES] = {"state_scale[0]", "state_scale[1]"};

static const char *missing_state(const struct dsc_optim_tensor *tensor, int32_t n_states, bool is_q8)
{
    for (int32_t slot = 0; slot < n_states; slot++) {
        if (tensor->state[slot] == NULL)
            return state_fields[slot];
        if (is_q8 && tensor->state_scale[slot] == NULL)
            return scale_fields[slot];
    }
    return NULL;
}

static dsc_status check_tensors(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args,
                                const struct dsc_optim_tensor *tensors, int64_t n_tensors, int32_t n_states,
                                unsigned operands)
{
    if (n_tensors < 0)
        return dsc_fail(DSC_EINVAL, "%s: n_tensors is %lld, must not be negative", kind->name, (long long)n_tensors);
    if (tensors == NULL && n_tensors > 0)
        return dsc_fail(DSC_EINVAL, "%s: tensors is NULL for %lld entries", kind->name, (long long)n_tensors);

    int64_t total = 0;

    for (int64_t i = 0; i < n_tensors; i++) {
        const struct dsc_optim_tensor *tensor = &tensors[i];
        const char *missing = NULL;

        if (tensor->n_elems < 0)
            return dsc_fail(DSC_EINVAL, "%s: tensors[%lld].n_elems is %lld, must not be negative", kind->name,
                            (long long)i, (long long)tensor->n_elems);
        if (__builtin_add_overflow(total, tensor->n_elems, &total))
            return dsc_fail(DSC_EOVERFLOW, "%s: the first %lld tensors hold more elements than int64_t counts",
                            kind->name, (long long)(i + 1));
        if (tensor->n_elems == 0)
            continue;
        if ((operands & TOUCHES_STATE) != 0)
            missing = missing_state(tensor, n_states, (args->flags & DSC_OPTIM_STATE_Q8) != 0);
        if (tensor->copy == NULL && (operands & REQUIRES_COPY) != 0)
            missing = "copy";
        if (tensor->grad == NULL && (operands & READS_GRAD) != 0)
            missing = "grad";
        if (tensor->param == NULL && (operands & TOUCHES_PARAM) != 0)
            missing = "param";
        if (missing != NULL)
            return dsc_fail(DSC_EINVAL, "%s: tensors[%lld].%s is NULL for %lld elements", kind->name, (long long)i,
                            missing, (long long)tensor->n_elems);
    }
    return DSC_OK;
}

static struct dsc_optim_scalars scalars_of(const struct dsc_optim_args *args)
{
    bool has_correction = (args->flags & DSC_OPTIM_BIAS_CORRECTION) != 0;
    double correction1 = has_correction ? 1.0 - pow(args->beta1, (double)args->step) : 1.0;
    double correction2 = has_correction ? 1.0 - pow(args->beta2, (double)args->step) : 1.0;

    return (struct dsc_optim_scalars){
        .grad_scale = (float)((args->flags & DSC_OPTIM_MAXIMIZE) != 0 ? -args->grad_scale : args->grad_scale),
        .lr = (float)args->lr,
        .weight_decay = (float)args->weight_decay,
        .decay = (float)(1.0 - args->lr * args->weight_decay),
        .beta1 = (float)args->beta1,
        .one_minus_beta1 = (float)(1.0 - args->beta1),
        .beta2 = (float)args->beta2,
        .one_minus_beta2 = (float)(1.0 - args->beta2),
        .eps = (float)args->eps,
        .corrected_one = (float)(sqrt(correction2) / correction1),
        .corrected_lr = (float)(args->lr * sqrt(correction2) / correction1),
        .corrected_eps = (float)(args->eps * sqrt(correction2)),
        .momentum = (float)args->momentum,
        .one_minus_dampening = (float)(1.0 - args->dampening),
        .decayed_lr = (float)(args->lr / (1.0 + (double)(args->step - 1) * args->lr_decay)),
        .is_nesterov = (args->flags & DSC_OPTIM_NESTEROV) != 0,
        .is_first_step = args->step == 1,
        .has_momentum = args->momentum != 0.0,
    };
}

/* A loop and the operands it works on. */
struct pass {
    dsc_optim_loop *loop;
    unsigned operands;
};

#define MAX_PASSES 2

/* The partial sums of tensors that a chunk border cuts, on both sides of the border. */
struct edges {
    double head[2]; /* for the tensor that began in an earlier chunk */
    double tail[2]; /* for the tensor that begins here and goes on in the next */
};

struct job {
    const struct dsc_kernels *kernels;
    const struct dsc_quant_kernels *quant;
    const struct dsc_optim_args *args;
    const struct dsc_optim_tensor *tensors;
    struct dsc_optim_scalars scalars;
    int32_t n_states;
    const dsc_q8_code *q8;          /* the codes of the states; NULL if the states are of args->state_dtype */
    struct pass passes[MAX_PASSES]; /* run one after the other on each block, while it is in the cache; the second may
                                       have no loop */
    const double *ratios;           /* one a tensor, or NULL */
    double *sumsq;                  /* two a tensor, or NULL */
    struct dsc_list list;
    struct edges edges[DSC_MAX_CHUNKS]; /* where sumsq is not NULL */
};

/* Scratch that a block's 16-bit operands are converted through. */
struct scratch {
    DSC_ALIGNED dsc_f32 param[DSC_BLOCK_ELEMS];
    DSC_ALIGNED dsc_f32 grad[DSC_BLOCK_ELEMS];
    DSC_ALIGNED dsc_f32 state[DSC_OPTIM_MAX_STATES][DSC_BLOCK_ELEMS];
};

static char *at(const void *data, dsc_dtype dtype, int64_t element)
{
    return data == NULL ? NULL : (char *)data + (size_t)element * dsc_dtype_bytes(dtype);
}

/*
 * Returns a writable block of an operand. An f32 operand is used in place; otherwise the block is in scratch, and is
 * filled if the loop also reads it.
 */
static dsc_f32 *writable(const struct dsc_kernels *kernels, dsc_dtype dtype, char *data, int64_t n, dsc_f32 *scratch,
                         bool is_read)
{
    if (dtype == DSC_DTYPE_F32)
        return (dsc_f32 *)data;
    if (is_read)
        dsc_load_f32(kernels, dtype, data, n, scratch);
    return scratch;
}

/*
 * Returns the param block for the loop. For a pass without a parameter (muon), the block only receives the result; it
 * is the memory of the result itself if possible.
 */
static dsc_f32 *param_block(const struct job *job, unsigned operands, char *param, char *copy, int64_t n,
                            struct scratch *scratch)
{
    if ((operands & TOUCHES_PARAM) == 0)
        return job->args->copy_dtype == DSC_DTYPE_F32 && copy != NULL ? (dsc_f32 *)copy : scratch->param;
    return writable(job->kernels, job->args->param_dtype, param, n, scratch->param, (operands & READS_PARAM) != 0);
}

/* A state's block as f32; decoded codes are always in scratch. */
static dsc_f32 *state_block(const struct job *job, const struct dsc_optim_tensor *tensor, int32_t slot, int64_t begin,
                            int64_t n, dsc_f32 *scratch, bool is_read)
{
    dsc_dtype dtype = job->args->state_dtype;

    if (job->q8 == NULL)
        return writable(job->kernels, dtype, at(tensor->state[slot], dtype, begin), n, scratch, is_read);
    if (is_read)
        dsc_q8_load(job->quant, job->q8[slot], tensor->state[slot], tensor->state_scale[slot], begin, n, scratch);
    return scratch;
}

static void store_state(const struct job *job, const struct dsc_optim_tensor *tensor, int32_t slot, int64_t begin,
                        int64_t n, const dsc_f32 *block)
{
    dsc_dtype dtype = job->args->state_dtype;

    if (job->q8 == NULL)
        dsc_store_f32(job->kernels, dtype, block, n, at(tensor->state[slot], dtype, begin));
    else
        dsc_q8_store(job->quant, job->q8[slot], block, begin, n, tensor->state[slot], tensor->state_scale[slot]);
}

static void run_pass(const struct job *job, const struct pass *pass, const struct dsc_optim_tensor *tensor,
                     int64_t begin, int64_t n, struct dsc_optim_block *block, struct scratch *scratch)
{
    const struct dsc_kernels *kernels = job->kernels;
    const struct dsc_optim_args *args = job->args;
    unsigned operands = pass->operands;
    char *param = at(tensor->param, args->param_dtype, begin);
    char *copy = at(tensor->copy, args->copy_dtype, begin);

    block->param = param_block(job, operands, param, copy, n, scratch);
    if ((operands & READS_GRAD) != 0)
        block->grad =
            dsc_load_f32(kernels, args->grad_dtype, at(tensor->grad, args->grad_dtype, begin), n, scratch->grad);
    for (int32_t slot = 0; slot < job->n_states && (operands & TOUCHES_STATE) != 0; slot++)
        block->state[slot] =
            state_block(job, tensor, slot, begin, n, scratch->state[slot], (operands & READS_STATE) != 0);

    pass->loop(&job->scalars, n, block);

    for (int32_t slot = 0; slot < job->n_states && (operands & WRITES_STATE) != 0; slot++)
        store_state(job, tensor, slot, begin, n, block->state[slot]);
    if ((operands & WRITES_PARAM) != 0)
        dsc_store_f32(kernels, args->param_dtype, block->param, n, param);
    if ((operands & WRITES_COPY) != 0 && copy != NULL) {
        const dsc_f32 *updated = block->param;

        if ((operands & WRITES_PARAM) != 0) /* the weights as they were stored */
            updated = dsc_load_f32(kernels, args->param_dtype, param, n, scratch->param);
        dsc_store_f32(kernels, args->copy_dtype, updated, n, copy);
    }
}

static void run_piece(const struct job *job, const struct dsc_piece *piece, double sumsq[2], struct scratch *scratch)
{
    struct dsc_optim_block block = {
        .ratio = job->ratios == NULL ? 1.0f : (float)job->ratios[piece->array],
        .sumsq = sumsq,
    };

    for (int64_t done = 0; done < piece->n_elems; done += DSC_BLOCK_ELEMS) {
        int64_t n_left = piece->n_elems - done;
        int64_t n = n_left < DSC_BLOCK_ELEMS ? n_left : DSC_BLOCK_ELEMS;

        for (int i = 0; i < MAX_PASSES && job->passes[i].loop != NULL; i++)
            run_pass(job, &job->passes[i], &job->tensors[piece->array], piece->begin + done, n, &block, scratch);
    }
}

/*
 * Returns the elements of a piece whose scales no other chunk writes. Chunk borders are multiples of a block in the
 * list, but a tensor can begin anywhere in the list, so a border may cut a block of scales. Such a block belongs to the
 * chunk in which it begins.
 */
static struct dsc_piece whole_blocks(const struct dsc_piece *piece, int64_t n_elems)
{
    int64_t begin = dsc_q8_n_scales(piece->begin) * DSC_Q8_BLOCK_ELEMS;
    int64_t end = dsc_q8_n_scales(piece->begin + piece->n_elems) * DSC_Q8_BLOCK_ELEMS;

    if (end > n_elems)
        end = n_elems;
    return (struct dsc_piece){.array = piece->array, .begin = begin, .n_elems = end > begin ? end - begin : 0};
}

static void run_chunks(void *arg, int64_t first, int64_t last)
{
    struct job *job = arg;
    struct scratch scratch;

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;
        struct edges edges = {0};

        while (dsc_cursor_next(&cursor, &piece)) {
            double sumsq[2] = {0};
            double *target;

            if (job->q8 != NULL)
                piece = whole_blocks(&piece, job->tensors[piece.array].n_elems);
            run_piece(job, &piece, sumsq, &scratch);
            if (job->sumsq == NULL)
                continue;
            if (piece.begin > 0)
                target = edges.head;
            else if (piece.n_elems < job->tensors[piece.array].n_elems)
                target = edges.tail;
            else
                target = &job->sumsq[2 * piece.array]; /* only this chunk holds the tensor */
            memcpy(target, sumsq, sizeof sumsq);
        }
        if (job->sumsq != NULL)
            job->edges[chunk] = edges;
    }
}

static void add_pair(double to[2], const double from[2])
{
    to[0] += from[0];
    to[1] += from[1];
}

/* Adds up, in chunk order, the sums on either side of chunk borders that cut a tensor. */
static void fold_edges(struct job *job)
{
    for (int64_t chunk = 0; chunk < job->list.n_chunks; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;

        while (dsc_cursor_next(&cursor, &piece)) {
            if (piece.begin > 0)
                add_pair(&job->sumsq[2 * piece.array], job->edges[chunk].head);
            else if (piece.n_elems < job->tensors[piece.array].n_elems)
                add_pair(&job->sumsq[2 * piece.array], job->edges[chunk].tail);
        }
    }
}

static dsc_status init_job(struct job *job, const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                           int64_t n_tensors, int32_t n_states)
{
    job->args = args;
    job->tensors = tensors;
    job->scalars = scalars_of(args);
    job->n_states = n_states;
    job->q8 = NULL;
    job->passes[0] = job->passes[1] = (struct pass){NULL, 0};
    job->ratios = NULL;
    job->sumsq = NULL;
    job->kernels = dsc_kernels_get();
    job->quant = dsc_quant_kernels_get();
    return dsc_list_init(&job->list, n_tensors > 0 ? &tensors->n_elems : NULL, sizeof *tensors, n_tensors);
}

/* Runs one pass over a checked list; q8 is as in struct job. */
static dsc_status run(const struct pass *pass, const dsc_q8_code *q8, const struct dsc_optim_args *args,
                      const struct dsc_optim_tensor *tensors, int64_t n_tensors, int32_t n_states, const double *ratios,
                      const struct dsc_par *par)
{
    struct job job;

    DSC_TRY(init_job(&job, args, tensors, n_tensors, n_states));
    job.passes[0] = *pass;
    job.q8 = q8;
    job.ratios = ratios;
    dsc_par_run(par, job.list.n_chunks, run_chunks, &job);
    return DSC_OK;
}

#define STEP_OPERANDS (READS_PARAM | WRITES_PARAM | READS_GRAD | READS_STATE | WRITES_STATE | WRITES_COPY)
#define MOMENTS_OPERANDS (READS_GRAD | READS_STATE | WRITES_STATE)
#define NORMS_OPERANDS (READS_PARAM | READS_STATE)
#define APPLY_OPERANDS (READS_PARAM | WRITES_PARAM | READS_STATE | WRITES_COPY)
#define MUON_MOMENTUM_OPERANDS (READS_GRAD | READS_STATE | WRITES_STATE | WRITES_COPY | REQUIRES_COPY)
#define MUON_APPLY_OPERANDS (READS_PARAM | WRITES_PARAM | READS_GRAD | WRITES_COPY)

static dsc_status run_norms(const struct dsc_optim_loops *loops, const struct dsc_optim_args *args,
                            const struct dsc_optim_tensor *tensors, int64_t n_tensors, int32_t n_states,
                            const struct dsc_par *par, double *out_sumsq)
{
    struct job job;

    DSC_TRY(init_job(&job, args, tensors, n_tensors, n_states));
    /*
     * Two passes on each block: the norms are computed from the moments as stored, because apply reads the stored ones.
     */
    job.passes[0] = (struct pass){loops->moments, MOMENTS_OPERANDS};
    job.passes[1] = (struct pass){loops->norms, NORMS_OPERANDS};
    job.sumsq = out_sumsq;
    for (int64_t i = 0; i < 2 * n_tensors; i++)
        out_sumsq[i] = 0.0;
    dsc_par_run(par, job.list.n_chunks, run_chunks, &job);
    fold_edges(&job);
    return DSC_OK;
}

#define GROUP_TENSORS 512

/* Runs a whole step of a kind with norms, on groups of tensors whose norms fit the stack. */
static dsc_status run_norm_groups(const struct dsc_optim_loops *loops, const struct dsc_optim_args *args,
                                  const struct dsc_optim_tensor *tensors, int64_t n_tensors, int32_t n_states,
                                  const struct dsc_par *par)
{
    const struct pass apply = {loops->apply, APPLY_OPERANDS};
    double sumsq[2 * GROUP_TENSORS];
    double ratios[GROUP_TENSORS];

    for (int64_t first = 0; first < n_tensors; first += GROUP_TENSORS) {
        int64_t n = n_tensors - first < GROUP_TENSORS ? n_tensors - first : GROUP_TENSORS;

        DSC_TRY(run_norms(loops, args, &tensors[first], n, n_states, par, sumsq));
        for (int64_t i = 0; i < n; i++)
            ratios[i] = dsc_optim_trust_ratio(args, sumsq[2 * i], sumsq[2 * i + 1]);
        DSC_TRY(run(&apply, NULL, args, &tensors[first], n, n_states, ratios, par));
    }
    return DSC_OK;
}

dsc_status dsc_optim_step(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args,
                          const struct dsc_optim_tensor *tensors, int64_t n_tensors, const struct dsc_par *par)
{
    const struct dsc_optim_table *table;

    DSC_TRY(check_args(kind, args));

    bool is_stateless = (kind->uses & DSC_USES_MOMENTUM) != 0 && args->momentum == 0.0;
    int32_t n_states = is_stateless ? 0 : kind->n_states;

    DSC_TRY(check_tensors(kind, args, tensors, n_tensors, n_states, STEP_OPERANDS));
    table = tables[dsc_isa_index()];

    const struct dsc_optim_loops *loops = &table->kinds[kind - kinds];
    const struct pass step = {loops->step, STEP_OPERANDS};

    if (kind->needs_norms)
        return run_norm_groups(loops, args, tensors, n_tensors, n_states, par);
    return run(&step, (args->flags & DSC_OPTIM_STATE_Q8) != 0 ? kind->q8 : NULL, args, tensors, n_tensors, n_states,
               NULL, par);
}

static dsc_status check_norms_kind(const struct dsc_optim_kind *kind)
{
    if (kind == NULL)
        return dsc_fail(DSC_EINVAL, "kind is NULL");
    if (!kind->needs_norms)
        return dsc_fail(DSC_ENOTSUP, "%s needs no norms: use dsc_optim_step on the pieces", kind->name);
    return DSC_OK;
}

dsc_status dsc_optim_norms(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args,
                           const struct dsc_optim_tensor *tensors, int64_t n_tensors, const struct dsc_par *par,
                           double *out_sumsq)
{
    const struct dsc_optim_table *table;

    DSC_TRY(check_norms_kind(kind));
    DSC_TRY(check_args(kind, args));
    DSC_TRY(check_tensors(kind, args, tensors, n_tensors, kind->n_states, MOMENTS_OPERANDS | NORMS_OPERANDS));
    if (out_sumsq == NULL && n_tensors > 0)
        return dsc_fail(DSC_EINVAL, "%s: out_sumsq is NULL for %lld tensors", kind->name, (long long)n_tensors);
    table = tables[dsc_isa_index()];
    return run_norms(&table->kinds[kind - kinds], args, tensors, n_tensors, kind->n_states, par, out_sumsq);
}

double dsc_optim_trust_ratio(const struct dsc_optim_args *args, double param_sumsq, double update_sumsq)
{
    if (param_sumsq == 0.0 || update_sumsq == 0.0)
        return 1.0;

    double ratio = sqrt(param_sumsq) / sqrt(update_sumsq);

    if (ratio < args->min_coeff)
        return args->min_coeff;
    return ratio > args->max_coeff ? args->max_coeff : ratio;
}

dsc_status dsc_optim_apply(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args,
                           const struct dsc_optim_tensor *tensors, int64_t n_tensors, const struct dsc_par *par,
                           const double *ratios)
{
    const struct dsc_optim_table *table;

    DSC_TRY(check_norms_kind(kind));
    DSC_TRY(check_args(kind, args));
    DSC_TRY(check_tensors(kind, args, tensors, n_tensors, kind->n_states, APPLY_OPERANDS));
    if (ratios == NULL && n_tensors > 0)
        return dsc_fail(DSC_EINVAL, "%s: ratios is NULL for %lld tensors", kind->name, (long long)n_tensors);
    table = tables[dsc_isa_index()];

    const struct pass apply = {table->kinds[kind - kinds].apply, APPLY_OPERANDS};

    return run(&apply, NULL, args, tensors, n_tensors, kind->n_states, ratios, par);
}

dsc_status dsc_muon_momentum(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors,
                             int64_t n_tensors, const struct dsc_par *par)
{
    const struct dsc_optim_table *table;

    DSC_TRY(check_args(&muon, args));
    DSC_TRY(check_tensors(&muon, args, tensors, n_tensors, muon.n_states, MUON_MOMENTUM_OPERANDS));
    table = tables[dsc_isa_index()];

    const struct pass pass = {table->muon_momentum, MUON_MOMENTUM_OPERANDS};

    return run(&pass, NULL, args, tensors, n_tensors, muon.n_states, NULL, par);
}

dsc_status dsc_muon_apply(const struct dsc_optim_args *args, const struct dsc_optim_tensor *tensors, int64_t n_tensors,
                          const struct dsc_par *par)
{
    const struct dsc_optim_table *table;

    DSC_TRY(check_args(&muon, args));
    DSC_TRY(check_tensors(&muon, args, tensors, n_tensors, 0, MUON_APPLY_OPERANDS));
    table = tables[dsc_isa_index()];

    const struct pass pass = {table->muon_apply, MUON_APPLY_OPERANDS};

    return run(&pass, NULL, args, tensors, n_tensors, 0, NULL, par);
}
