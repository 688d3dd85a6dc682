/* Operators on rows: checks what they are given, shares the rows out in chunks, and runs the loops block by block. */
#include "dsc/nn.h"

#include "base/fail.h"
#include "base/par.h"
#include "nn/table.h"

#include <math.h>
#include <string.h>

#define TABLE_ENTRY(isa, is_runnable) &DSC_K_OF(nn_kernels, isa),
static const struct dsc_nn_kernels *const tables[] = {DSC_ISA_MAP(TABLE_ENTRY)};
#undef TABLE_ENTRY

const struct dsc_nn_kernels *dsc_nn_kernels_get(void)
{
    return tables[dsc_isa_index()];
}

/* What every call has: the loops, and how its rows are shared out. */
struct rows {
    const struct dsc_kernels *kernels;
    const struct dsc_nn_kernels *nn;
    int64_t n_rows;
    int64_t n_cols;
    int64_t chunk_rows;
    int64_t n_chunks;
};

/* Chunks depend on sizes alone. Those of calls that sum over rows are few, since each has a sum of its own. */
static int64_t rows_of_chunk(int64_t n_rows, int64_t n_cols, int64_t max_chunks)
{
    int64_t rows = DSC_MIN_CHUNK_ELEMS / n_cols;
    int64_t least = n_rows / max_chunks + (n_rows % max_chunks != 0);

    if (rows < 1)
        rows = 1;
    return rows < least ? least : rows;
}

static int64_t chunks_of(int64_t n_rows, int64_t chunk_rows)
{
    return n_rows / chunk_rows + (n_rows % chunk_rows != 0);
}

static struct rows share_out(int64_t n_rows, int64_t n_cols, int64_t max_chunks)
{
    int64_t chunk_rows = rows_of_chunk(n_rows, n_cols, max_chunks);

    return (struct rows){
        .kernels = dsc_kernels_get(),
        .nn = dsc_nn_kernels_get(),
        .n_rows = n_rows,
        .n_cols = n_cols,
        .chunk_rows = chunk_rows,
        .n_chunks = chunks_of(n_rows, chunk_rows),
    };
}

static int64_t end_of(const struct rows *rows, int64_t chunk)
{
    int64_t end = (chunk + 1) * rows->chunk_rows;

    return end < rows->n_rows ? end : rows->n_rows;
}

int64_t dsc_nn_scratch_elems(int64_t n_rows, int64_t n_cols, int64_t n_sums)
{
    if (n_rows <= 0 || n_cols <= 0 || n_sums <= 0)
        return 0;
    return n_sums * n_cols * chunks_of(n_rows, rows_of_chunk(n_rows, n_cols, DSC_NN_MAX_PARTIALS));
}

static int64_t block_of(int64_t n_left)
{
    return n_left < DSC_BLOCK_ELEMS ? n_left : DSC_BLOCK_ELEMS;
}

/* Element i of data, NULL for NULL. */
static const void *at(const void *data, dsc_dtype dtype, int64_t i)
{
    return data == NULL ? NULL : (const char *)data + (size_t)i * dsc_dtype_bytes(dtype);
}

static void *at_out(void *data, dsc_dtype dtype, int64_t i)
{
    return data == NULL ? NULL : (char *)data + (size_t)i * dsc_dtype_bytes(dtype);
}

/* As dsc_load_f32; NULL for NULL. */
static const dsc_f32 *load(const struct rows *rows, dsc_dtype dtype, const void *data, int64_t n, dsc_f32 *scratch)
{
    return data == NULL ? NULL : dsc_load_f32(rows->kernels, dtype, data, n, scratch);
}

/* Where a loop writes what store() then puts into data. */
static dsc_f32 *target(dsc_dtype dtype, void *data, dsc_f32 *scratch)
{
    return dtype == DSC_DTYPE_F32 ? data : scratch;
}

static void store(const struct rows *rows, dsc_dtype dtype, const dsc_f32 *src, int64_t n, void *data)
{
    dsc_store_f32(rows->kernels, dtype, src, n, data);
}

/*
 * Checks.
 */

struct named {
    const char *name;
    const void *data;
};

static dsc_status check_sizes(int64_t n_rows, int64_t n_cols, dsc_dtype dtype)
{
    int64_t n_elems;

    if (n_rows < 0)
        return dsc_fail(DSC_EINVAL, "n_rows is %lld, must not be negative", (long long)n_rows);
    if (n_cols < 1)
        return dsc_fail(DSC_EINVAL, "n_cols is %lld, must be positive", (long long)n_cols);
    if (dsc_dtype_bytes(dtype) == 0)
        return dsc_fail(DSC_EINVAL, "dtype is %d, which is no dsc_dtype", (int)dtype);
    if (__builtin_mul_overflow(n_rows, n_cols, &n_elems) || n_elems > INT64_MAX / (int64_t)sizeof(float))
        return dsc_fail(DSC_EOVERFLOW, "%lld rows of %lld elements hold more bytes than int64_t counts",
                        (long long)n_rows, (long long)n_cols);
    return DSC_OK;
}

static dsc_status check_present(int64_t n_rows, const struct named *arrays, size_t n_arrays)
{
    for (size_t i = 0; i < n_arrays; i++)
        if (arrays[i].data == NULL && n_rows > 0)
            return dsc_fail(DSC_EINVAL, "%s is NULL for %lld rows", arrays[i].name, (long long)n_rows);
    return DSC_OK;
}

#define CHECK_PRESENT(n_rows, ...)                             \
    check_present(n_rows, (const struct named[]){__VA_ARGS__}, \
                  sizeof((const struct named[]){__VA_ARGS__}) / sizeof(struct named))
#define NAMED(call, field)    \
    {                         \
#field, (call)->field \
    }

static dsc_status check_act(dsc_nn_act act)
{
    if ((int)act < 0 || (int)act >= DSC_NN_ACT_COUNT)
        return dsc_fail(DSC_EINVAL, "act is %d, which is no dsc_nn_act", (int)act);
    return DSC_OK;
}

static dsc_status check_p(float p)
{
    if (!(p >= 0.0f && p <= 1.0f))
        return dsc_fail(DSC_EINVAL, "p is %g, must be in [0, 1]", (double)p);
    return DSC_OK;
}

/*
 * Sums over rows: each chunk has its own in the scratch, and they are folded in the order of the chunks.
 */

static float *partial_of(const struct rows *rows, float *scratch, int64_t sum, int64_t chunk)
{
    return scratch + (sum * rows->n_chunks + chunk) * rows->n_cols;
}

struct fold_job {
    const struct rows *rows;
    const float *partials; /* [n_chunks, n_cols] */
    dsc_dtype dtype;
    void *out;
};

static void fold_blocks(void *arg, int64_t first, int64_t last)
{
    struct fold_job *job = arg;
    int64_t n_cols = job->rows->n_cols;

    for (int64_t block = first; block < last; block++) {
        int64_t begin = block * DSC_BLOCK_ELEMS;
        int64_t n = block_of(n_cols - begin);
        double sums[DSC_BLOCK_ELEMS] = {0};
        dsc_f32 rounded[DSC_BLOCK_ELEMS];

        for (int64_t chunk = 0; chunk < job->rows->n_chunks; chunk++) {
            const float *partial = job->partials + chunk * n_cols + begin;

            for (int64_t i = 0; i < n; i++)
                sums[i] += (double)partial[i];
        }
        for (int64_t i = 0; i < n; i++)
            rounded[i] = (float)sums[i];
        store(job->rows, job->dtype, rounded, n, at_out(job->out, job->dtype, begin));
    }
}

static void fold(const struct rows *rows, const struct dsc_par *par, const float *partials, dsc_dtype dtype, void *out)
{
    struct fold_job job = {rows, partials, dtype, out};

    dsc_par_run(par, chunks_of(rows->n_cols, DSC_BLOCK_ELEMS), fold_blocks, &job);
}

/* Adds n elements to a partial sum. */
static void add_to(const struct rows *rows, int64_t n, const dsc_f32 *src, float *partial)
{
    rows->kernels->add_f32(n, src, (dsc_f32 *)partial);
}

/*
 * Norms.
 */

struct norm_job {
    struct rows rows;
    const struct dsc_nn_norm *call;
};

/* Writes the sum with the residual and gives the moments of what was written. */
static void enter_row(const struct norm_job *job, int64_t row, double *sum, double *sumsq)
{
    const struct dsc_nn_norm *call = job->call;
    const struct rows *rows = &job->rows;
    dsc_f32 scratch[2][DSC_BLOCK_ELEMS];

    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(rows->n_cols - begin);
        int64_t i = row * rows->n_cols + begin;
        const dsc_f32 *x = load(rows, call->dtype, at(call->x, call->dtype, i), n, scratch[0]);

        if (call->residual != NULL) {
            const dsc_f32 *residual = load(rows, call->dtype, at(call->residual, call->dtype, i), n, scratch[1]);
            void *out = at_out(call->sum, call->dtype, i);
            dsc_f32 *added = target(call->dtype, out, scratch[0]);

            rows->nn->add(n, x, residual, added);
            store(rows, call->dtype, added, n, out);
            x = load(rows, call->dtype, out, n, scratch[0]); /* as it was rounded */
        }
        rows->nn->moments(n, x, sum, sumsq);
    }
}

static void norm_row(const struct norm_job *job, int64_t row)
{
    const struct dsc_nn_norm *call = job->call;
    const struct rows *rows = &job->rows;
    const void *from = call->residual != NULL ? call->sum : call->x;
    dsc_f32 scratch[3][DSC_BLOCK_ELEMS];
    double sum = 0.0;
    double sumsq = 0.0;

    enter_row(job, row, &sum, &sumsq);

    double n_cols = (double)rows->n_cols;
    double mean = call->is_rms ? 0.0 : sum / n_cols;
    double variance = sumsq / n_cols - mean * mean;
    /* Rounding may leave a little less than nothing of a constant row; a NaN stays one. */
    double rstd = 1.0 / sqrt((variance < 0.0 ? 0.0 : variance) + (double)call->eps);

    call->rstd[row] = (float)rstd;
    if (!call->is_rms)
        call->mean[row] = (float)mean;
    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(rows->n_cols - begin);
        int64_t i = row * rows->n_cols + begin;
        const dsc_f32 *x = load(rows, call->dtype, at(from, call->dtype, i), n, scratch[0]);
        const dsc_f32 *weight =
            load(rows, call->weight_dtype, at(call->weight, call->weight_dtype, begin), n, scratch[1]);
        const dsc_f32 *bias = load(rows, call->weight_dtype, at(call->bias, call->weight_dtype, begin), n, scratch[2]);
        void *out = at_out(call->y, call->dtype, i);
        dsc_f32 *y = target(call->dtype, out, scratch[0]);

        rows->nn->norm(n, x, (float)mean, (float)rstd, weight, bias, y);
        store(rows, call->dtype, y, n, out);
    }
}

static void norm_chunks(void *arg, int64_t first, int64_t last)
{
    struct norm_job *job = arg;

    for (int64_t chunk = first; chunk < last; chunk++)
        for (int64_t row = chunk * job->rows.chunk_rows; row < end_of(&job->rows, chunk); row++)
            norm_row(job, row);
}

static dsc_status check_eps(float eps)
{
    if (!(eps >= 0.0f))
        return dsc_fail(DSC_EINVAL, "eps is %g, must not be negative", (double)eps);
    return DSC_OK;
}

dsc_status dsc_nn_norm(const struct dsc_nn_norm *norm, const struct dsc_par *par)
{
    DSC_TRY(check_sizes(norm->n_rows, norm->n_cols, norm->dtype));
    DSC_TRY(check_sizes(1, norm->n_cols, norm->weight_dtype));
    DSC_TRY(check_eps(norm->eps));
    DSC_TRY(CHECK_PRESENT(norm->n_rows, NAMED(norm, x), NAMED(norm, y), NAMED(norm, rstd)));
    if (!norm->is_rms)
        DSC_TRY(CHECK_PRESENT(norm->n_rows, NAMED(norm, mean)));
    if (norm->residual != NULL)
        DSC_TRY(CHECK_PRESENT(norm->n_rows, NAMED(norm, sum)));

    struct norm_job job = {share_out(norm->n_rows, norm->n_cols, DSC_MAX_CHUNKS), norm};

    dsc_par_run(par, job.rows.n_chunks, norm_chunks, &job);
    return DSC_OK;
}

struct norm_grad_job {
    struct rows rows;
    const struct dsc_nn_norm_grad *call;
};

/* What both passes over a row read of one block. */
struct norm_block {
    const dsc_f32 *dy;
    const dsc_f32 *x;
    const dsc_f32 *weight;
};

static struct norm_block load_norm_block(const struct norm_grad_job *job, int64_t row, int64_t begin, int64_t n,
                                         dsc_f32 (*scratch)[DSC_BLOCK_ELEMS])
{
    const struct dsc_nn_norm_grad *call = job->call;
    int64_t i = row * call->n_cols + begin;

    return (struct norm_block){
        load(&job->rows, call->dtype, at(call->dy, call->dtype, i), n, scratch[0]),
        load(&job->rows, call->dtype, at(call->sum, call->dtype, i), n, scratch[1]),
        load(&job->rows, call->weight_dtype, at(call->weight, call->weight_dtype, begin), n, scratch[2]),
    };
}

static void norm_grad_row(const struct norm_grad_job *job, int64_t row, float *dweight, float *dbias)
{
    const struct dsc_nn_norm_grad *call = job->call;
    const struct rows *rows = &job->rows;
    float mean = call->is_rms ? 0.0f : call->mean[row];
    float rstd = call->rstd[row];
    dsc_f32 scratch[4][DSC_BLOCK_ELEMS];
    double sum_g = 0.0;
    double sum_gh = 0.0;

    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(rows->n_cols - begin);
        struct norm_block block = load_norm_block(job, row, begin, n, scratch);

        rows->nn->norm_sums(n, block.dy, block.x, mean, rstd, block.weight,
                            dweight == NULL ? NULL : (dsc_f32 *)dweight + begin,
                            dbias == NULL ? NULL : (dsc_f32 *)dbias + begin, &sum_g, &sum_gh);
    }

    float mean_g = call->is_rms ? 0.0f : (float)(sum_g / (double)rows->n_cols);
    float mean_gh = (float)(sum_gh / (double)rows->n_cols);

    for (int64_t begin = 0; begin < rows->n_cols; begin += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(rows->n_cols - begin);
        int64_t i = row * rows->n_cols + begin;
        struct norm_block block = load_norm_block(job, row, begin, n, scratch);
        dsc_f32 *dx = scratch[0];

        rows->nn->norm_grad(n, block.dy, block.x, mean, rstd, block.weight, mean_g, mean_gh, dx);
        if (call->dsum != NULL)
            rows->nn->add(n, dx, load(rows, call->dtype, at(call->dsum, call->dtype, i), n, scratch[3]), dx);
        store(rows, call->dtype, dx, n, at_out(call->dx, call->dtype, i));
    }
}

static void norm_grad_chunks(void *arg, int64_t first, int64_t last)
{
    struct norm_grad_job *job = arg;
    const struct dsc_nn_norm_grad *call = job->call;

    for (int64_t chunk = first; chunk < last; chunk++) {
        float *dweight = call->dweight == NULL ? NULL : partial_of(&job->rows, call->scratch, 0, chunk);
        float *dbias = call->dbias == NULL ? NULL : partial_of(&job->rows, call->scratch, call->dweight != NULL, chunk);

        if (dweight != NULL)
            memset(dweight, 0, (size_t)call->n_cols * sizeof *dweight);
        if (dbias != NULL)
            memset(dbias, 0, (size_t)call->n_cols * sizeof *dbias);
        for (int64_t row = chunk * job->rows.chunk_rows; row < end_of(&job->rows, chunk); row++)
            norm_grad_row(job, row, dweight, dbias);
    }
}

dsc_status dsc_nn_norm_grad(const struct dsc_nn_norm_grad *grad, const struct dsc_par *par)
{
    bool has_sums = grad->dweight != NULL || grad->dbias != NULL;

    DSC_TRY(check_sizes(grad->n_rows, grad->n_cols, grad->dtype));
    DSC_TRY(check_sizes(1, grad->n_cols, grad->weight_dtype));
    DSC_TRY(CHECK_PRESENT(grad->n_rows, NAMED(grad, sum), NAMED(grad, dy), NAMED(grad, rstd), NAMED(grad, dx)));
    if (!grad->is_rms)
        DSC_TRY(CHECK_PRESENT(grad->n_rows, NAMED(grad, mean)));
    if (has_sums)
        DSC_TRY(CHECK_PRESENT(grad->n_rows, NAMED(grad, scratch)));

    struct norm_grad_job job = {share_out(grad->n_rows, grad->n_cols, has_sums ? DSC_NN_MAX_PARTIALS : DSC_MAX_CHUNKS),
                                grad};

    dsc_par_run(par, job.rows.n_chunks, norm_grad_chunks, &job);
    if (grad->dweight != NULL)
        fold(&job.rows, par, grad->scratch, grad->weight_dtype, grad->dweight);
    if (grad->dbias != NULL)
        fold(&job.rows, par, partial_of(&job.rows, grad->scratch, grad->dweight != NULL, 0), grad->weight_dtype,
             grad->dbias);
    return DSC_OK;
}

/*
 * Activations.
 */

dsc_status dsc_nn_act_find(const char *name, dsc_nn_act *out_act)
{
    static const char *const names[] = {
#define DSC_NN_ACT(name) #name,
#include "dsc/activations.inc"
#undef DSC_NN_ACT
    };
    static const char known[] = ""
#define DSC_NN_ACT(name) " " #name
#include "dsc/activations.inc"
#undef DSC_NN_ACT
        ;

    for (int i = 0; i < DSC_NN_ACT_COUNT; i++) {
        if (name != NULL && strcmp(name, names[i]) == 0) {
            *out_act = (dsc_nn_act)i;
            return DSC_OK;
        }
    }
    return dsc_fail(DSC_EINVAL, "no activation \"%.63s\"; there are:%s", name == NULL ? "" : name, known);
}

typedef void (*act_loop)(int64_t n, const dsc_f32 *x, dsc_f32 *y);
typedef void (*act_grad_loop)(int64_t n, const dsc_f32 *x, const dsc_f32 *dy, dsc_f32 *dx);
typedef void (*gated_loop)(int64_t n, const dsc_f32 *gate, const dsc_f32 *up, dsc_f32 *y);
typedef void (*gated_grad_loop)(int64_t n, const dsc_f32 *gate, const dsc_f32 *up, const dsc_f32 *dy, dsc_f32 *dgate,
                                dsc_f32 *dup);

struct act_loops {
    act_loop act;
    act_grad_loop grad;
    gated_loop gated;
    gated_grad_loop gated_grad;
};

#define LOOPS(name)                                                          \
    {                                                                        \
        nn->name, nn->name##_grad, nn->gated_##name, nn->gated_##name##_grad \
    }

static struct act_loops loops_of(const struct dsc_nn_kernels *nn, dsc_nn_act act)
{
    const struct act_loops loops[DSC_NN_ACT_COUNT] = {
#define DSC_NN_ACT(name) [DSC_NN_ACT_##name] = LOOPS(name),
#include "dsc/activations.inc"
#undef DSC_NN_ACT
    };

    return loops[act];
}

/* One block of x with the bias added, in scratch where there is one. */
static const dsc_f32 *load_biased(const struct rows *rows, dsc_dtype dtype, const void *x, const void *bias, int64_t n,
                                  dsc_f32 (*scratch)[DSC_BLOCK_ELEMS])
{
    const dsc_f32 *loaded = load(rows, dtype, x, n, scratch[0]);

    if (bias == NULL)
        return loaded;
    rows->nn->add(n, loaded, load(rows, dtype, bias, n, scratch[1]), scratch[0]);
    return scratch[0];
}

struct bias_act_job {
    struct rows rows;
    const struct dsc_nn_bias_act *call;
    act_loop act;
};

static void bias_act_chunks(void *arg, int64_t first, int64_t last)
{
    struct bias_act_job *job = arg;
    const struct dsc_nn_bias_act *call = job->call;
    dsc_f32 scratch[2][DSC_BLOCK_ELEMS];

    for (int64_t row = first * job->rows.chunk_rows; row < end_of(&job->rows, last - 1); row++) {
        for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
            int64_t n = block_of(call->n_cols - begin);
            int64_t i = row * call->n_cols + begin;
            const dsc_f32 *x = load_biased(&job->rows, call->dtype, at(call->x, call->dtype, i),
                                           at(call->bias, call->dtype, begin), n, scratch);
            void *out = at_out(call->y, call->dtype, i);
            dsc_f32 *y = target(call->dtype, out, scratch[0]);

            job->act(n, x, y);
            store(&job->rows, call->dtype, y, n, out);
        }
    }
}

dsc_status dsc_nn_bias_act(const struct dsc_nn_bias_act *call, const struct dsc_par *par)
{
    DSC_TRY(check_sizes(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(check_act(call->act));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, x), NAMED(call, y)));

    struct bias_act_job job = {.rows = share_out(call->n_rows, call->n_cols, DSC_MAX_CHUNKS), .call = call};

    job.act = loops_of(job.rows.nn, call->act).act;
    dsc_par_run(par, job.rows.n_chunks, bias_act_chunks, &job);
    return DSC_OK;
}

struct bias_act_grad_job {
    struct rows rows;
    const struct dsc_nn_bias_act_grad *call;
    act_grad_loop grad;
};

static void bias_act_grad_chunks(void *arg, int64_t first, int64_t last)
{
    struct bias_act_grad_job *job = arg;
    const struct dsc_nn_bias_act_grad *call = job->call;
    const struct rows *rows = &job->rows;
    dsc_f32 scratch[2][DSC_BLOCK_ELEMS];
    dsc_f32 dy_scratch[DSC_BLOCK_ELEMS];

    for (int64_t chunk = first; chunk < last; chunk++) {
        float *dbias = call->dbias == NULL ? NULL : partial_of(rows, call->scratch, 0, chunk);

        if (dbias != NULL)
            memset(dbias, 0, (size_t)call->n_cols * sizeof *dbias);
        for (int64_t row = chunk * rows->chunk_rows; row < end_of(rows, chunk); row++) {
            for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
                int64_t n = block_of(call->n_cols - begin);
                int64_t i = row * call->n_cols + begin;
                const dsc_f32 *x = load_biased(rows, call->dtype, at(call->x, call->dtype, i),
                                               at(call->bias, call->dtype, begin), n, scratch);
                const dsc_f32 *dy = load(rows, call->dtype, at(call->dy, call->dtype, i), n, dy_scratch);
                void *out = at_out(call->dx, call->dtype, i);
                dsc_f32 *dx = target(call->dtype, out, scratch[0]);

                job->grad(n, x, dy, dx);
                if (dbias != NULL)
                    add_to(rows, n, dx, dbias + begin);
                store(rows, call->dtype, dx, n, out);
            }
        }
    }
}

dsc_status dsc_nn_bias_act_grad(const struct dsc_nn_bias_act_grad *call, const struct dsc_par *par)
{
    DSC_TRY(check_sizes(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(check_act(call->act));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, x), NAMED(call, dy), NAMED(call, dx)));
    if (call->dbias != NULL)
        DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, scratch)));

    struct bias_act_grad_job job = {
        .rows = share_out(call->n_rows, call->n_cols, call->dbias != NULL ? DSC_NN_MAX_PARTIALS : DSC_MAX_CHUNKS),
        .call = call,
    };

    job.grad = loops_of(job.rows.nn, call->act).grad;
    dsc_par_run(par, job.rows.n_chunks, bias_act_grad_chunks, &job);
    if (call->dbias != NULL)
        fold(&job.rows, par, call->scratch, call->dtype, call->dbias);
    return DSC_OK;
}

static dsc_status check_stride(int64_t n_rows, int64_t n_cols, int64_t in_stride, dsc_dtype dtype)
{
    DSC_TRY(check_sizes(n_rows, n_cols, dtype));
    if (in_stride < n_cols)
        return dsc_fail(DSC_EINVAL, "in_stride is %lld, less than n_cols %lld", (long long)in_stride,
                        (long long)n_cols);
    return check_sizes(n_rows, in_stride, dtype);
}

struct gated_job {
    struct rows rows;
    const struct dsc_nn_gated *call;
    gated_loop gated;
};

static void gated_chunks(void *arg, int64_t first, int64_t last)
{
    struct gated_job *job = arg;
    const struct dsc_nn_gated *call = job->call;
    const struct rows *rows = &job->rows;
    dsc_f32 scratch[2][DSC_BLOCK_ELEMS];

    for (int64_t row = first * rows->chunk_rows; row < end_of(rows, last - 1); row++) {
        for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
            int64_t n = block_of(call->n_cols - begin);
            int64_t i = row * call->in_stride + begin;
            const dsc_f32 *gate = load(rows, call->dtype, at(call->gate, call->dtype, i), n, scratch[0]);
            const dsc_f32 *up = load(rows, call->dtype, at(call->up, call->dtype, i), n, scratch[1]);
            void *out = at_out(call->y, call->dtype, row * call->n_cols + begin);
            dsc_f32 *y = target(call->dtype, out, scratch[0]);

            job->gated(n, gate, up, y);
            store(rows, call->dtype, y, n, out);
        }
    }
}

dsc_status dsc_nn_gated(const struct dsc_nn_gated *call, const struct dsc_par *par)
{
    DSC_TRY(check_stride(call->n_rows, call->n_cols, call->in_stride, call->dtype));
    DSC_TRY(check_act(call->act));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, gate), NAMED(call, up), NAMED(call, y)));

    struct gated_job job = {.rows = share_out(call->n_rows, call->n_cols, DSC_MAX_CHUNKS), .call = call};

    job.gated = loops_of(job.rows.nn, call->act).gated;
    dsc_par_run(par, job.rows.n_chunks, gated_chunks, &job);
    return DSC_OK;
}

struct gated_grad_job {
    struct rows rows;
    const struct dsc_nn_gated_grad *call;
    gated_grad_loop grad;
};

static void gated_grad_chunks(void *arg, int64_t first, int64_t last)
{
    struct gated_grad_job *job = arg;
    const struct dsc_nn_gated_grad *call = job->call;
    const struct rows *rows = &job->rows;
    dsc_f32 scratch[3][DSC_BLOCK_ELEMS];

    for (int64_t row = first * rows->chunk_rows; row < end_of(rows, last - 1); row++) {
        for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
            int64_t n = block_of(call->n_cols - begin);
            int64_t i = row * call->in_stride + begin;
            const dsc_f32 *gate = load(rows, call->dtype, at(call->gate, call->dtype, i), n, scratch[0]);
            const dsc_f32 *up = load(rows, call->dtype, at(call->up, call->dtype, i), n, scratch[1]);
            const dsc_f32 *dy =
                load(rows, call->dtype, at(call->dy, call->dtype, row * call->n_cols + begin), n, scratch[2]);
            void *gate_out = at_out(call->dgate, call->dtype, i);
            void *up_out = at_out(call->dup, call->dtype, i);
            dsc_f32 *dgate = target(call->dtype, gate_out, scratch[0]);
            dsc_f32 *dup = target(call->dtype, up_out, scratch[1]);

            job->grad(n, gate, up, dy, dgate, dup);
            store(rows, call->dtype, dgate, n, gate_out);
            store(rows, call->dtype, dup, n, up_out);
        }
    }
}

dsc_status dsc_nn_gated_grad(const struct dsc_nn_gated_grad *call, const struct dsc_par *par)
{
    DSC_TRY(check_stride(call->n_rows, call->n_cols, call->in_stride, call->dtype));
    DSC_TRY(check_act(call->act));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, gate), NAMED(call, up), NAMED(call, dy), NAMED(call, dgate),
                          NAMED(call, dup)));

    struct gated_grad_job job = {.rows = share_out(call->n_rows, call->n_cols, DSC_MAX_CHUNKS), .call = call};

    job.grad = loops_of(job.rows.nn, call->act).gated_grad;
    dsc_par_run(par, job.rows.n_chunks, gated_grad_chunks, &job);
    return DSC_OK;
}

/*
 * Dropout.
 */

#define TWO_TO_32 4294967296.0

/* How the loop is called: numbers below threshold are dropped, what is kept is scaled. */
struct dropping {
    uint64_t seed;
    uint32_t threshold;
    float scale;
    bool drops_all;
};

static struct dropping dropping_of(float p, uint64_t seed)
{
    double threshold = nearbyint((double)p * TWO_TO_32);

    if (threshold >= TWO_TO_32)
        return (struct dropping){.seed = seed, .drops_all = true};
    return (struct dropping){.seed = seed, .threshold = (uint32_t)threshold, .scale = (float)(1.0 / (1.0 - (double)p))};
}

/* y = keep * x * scale, for elements first and on. */
static void drop(const struct rows *rows, const struct dropping *how, int64_t n, int64_t first, const dsc_f32 *x,
                 dsc_f32 *y)
{
    if (how->drops_all)
        memset(y, 0, (size_t)n * sizeof *y);
    else
        rows->nn->drop(n, how->seed, (uint64_t)first, how->threshold, how->scale, x, y);
}

struct dropout_job {
    struct rows rows;
    const struct dsc_nn_dropout *call;
    struct dropping how;
};

static void dropout_chunks(void *arg, int64_t first, int64_t last)
{
    struct dropout_job *job = arg;
    const struct dsc_nn_dropout *call = job->call;
    const struct rows *rows = &job->rows;
    dsc_f32 scratch[2][DSC_BLOCK_ELEMS];

    for (int64_t row = first * rows->chunk_rows; row < end_of(rows, last - 1); row++) {
        for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
            int64_t n = block_of(call->n_cols - begin);
            int64_t i = row * call->n_cols + begin;
            const dsc_f32 *x = load_biased(rows, call->dtype, at(call->x, call->dtype, i),
                                           at(call->bias, call->dtype, begin), n, scratch);
            dsc_f32 *y = scratch[0];

            drop(rows, &job->how, n, i, x, y);
            if (call->residual != NULL)
                rows->nn->add(n, y, load(rows, call->dtype, at(call->residual, call->dtype, i), n, scratch[1]), y);
            store(rows, call->dtype, y, n, at_out(call->y, call->dtype, i));
        }
    }
}

dsc_status dsc_nn_dropout(const struct dsc_nn_dropout *call, const struct dsc_par *par)
{
    DSC_TRY(check_sizes(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(check_p(call->p));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, x), NAMED(call, y)));

    struct dropout_job job = {share_out(call->n_rows, call->n_cols, DSC_MAX_CHUNKS), call,
                              dropping_of(call->p, call->seed)};

    dsc_par_run(par, job.rows.n_chunks, dropout_chunks, &job);
    return DSC_OK;
}

struct dropout_grad_job {
    struct rows rows;
    const struct dsc_nn_dropout_grad *call;
    struct dropping how;
};

static void dropout_grad_chunks(void *arg, int64_t first, int64_t last)
{
    struct dropout_grad_job *job = arg;
    const struct dsc_nn_dropout_grad *call = job->call;
    const struct rows *rows = &job->rows;
    dsc_f32 scratch[2][DSC_BLOCK_ELEMS];

    for (int64_t chunk = first; chunk < last; chunk++) {
        float *dbias = call->dbias == NULL ? NULL : partial_of(rows, call->scratch, 0, chunk);

        if (dbias != NULL)
            memset(dbias, 0, (size_t)call->n_cols * sizeof *dbias);
        for (int64_t row = chunk * rows->chunk_rows; row < end_of(rows, chunk); row++) {
            for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
                int64_t n = block_of(call->n_cols - begin);
                int64_t i = row * call->n_cols + begin;
                const dsc_f32 *dy = load(rows, call->dtype, at(call->dy, call->dtype, i), n, scratch[0]);
                dsc_f32 *dx = scratch[1];

                drop(rows, &job->how, n, i, dy, dx);
                if (dbias != NULL)
                    add_to(rows, n, dx, dbias + begin);
                store(rows, call->dtype, dx, n, at_out(call->dx, call->dtype, i));
            }
        }
    }
}

dsc_status dsc_nn_dropout_grad(const struct dsc_nn_dropout_grad *call, const struct dsc_par *par)
{
    DSC_TRY(check_sizes(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(check_p(call->p));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, dy), NAMED(call, dx)));
    if (call->dbias != NULL)
        DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, scratch)));

    struct dropout_grad_job job = {
        share_out(call->n_rows, call->n_cols, call->dbias != NULL ? DSC_NN_MAX_PARTIALS : DSC_MAX_CHUNKS), call,
        dropping_of(call->p, call->seed)};

    dsc_par_run(par, job.rows.n_chunks, dropout_grad_chunks, &job);
    if (call->dbias != NULL)
        fold(&job.rows, par, call->scratch, call->dtype, call->dbias);
    return DSC_OK;
}

/*
 * Rotary positions.
 */

struct rotary_job {
    struct rows rows;
    const struct dsc_nn_rotary *call;
};

/* Turns a run of n pairs that begins with pair `begin`. */
static void rotate_run(const struct rotary_job *job, const char *x, char *y, int64_t begin, int64_t n,
                       const dsc_f32 *cos, const dsc_f32 *sin)
{
    const struct dsc_nn_rotary *call = job->call;
    const struct rows *rows = &job->rows;
    float sign = call->is_inverse ? -1.0f : 1.0f;
    dsc_f32 scratch[DSC_BLOCK_ELEMS];

    if (call->is_interleaved) {
        const dsc_f32 *from = load(rows, call->dtype, at(x, call->dtype, 2 * begin), 2 * n, scratch);
        void *out = at_out(y, call->dtype, 2 * begin);
        dsc_f32 *to = target(call->dtype, out, scratch);

        rows->nn->rotate_pairs(n, from, cos + begin, sin + begin, sign, to);
        store(rows, call->dtype, to, 2 * n, out);
        return;
    }

    int64_t second = begin + call->rotary_dim / 2;
    const dsc_f32 *x0 = load(rows, call->dtype, at(x, call->dtype, begin), n, scratch);
    const dsc_f32 *x1 = load(rows, call->dtype, at(x, call->dtype, second), n, scratch + n);
    dsc_f32 *y0 = target(call->dtype, at_out(y, call->dtype, begin), scratch);
    dsc_f32 *y1 = target(call->dtype, at_out(y, call->dtype, second), scratch + n);

    rows->nn->rotate_halves(n, x0, x1, cos + begin, sin + begin, sign, y0, y1);
    store(rows, call->dtype, y0, n, at_out(y, call->dtype, begin));
    store(rows, call->dtype, y1, n, at_out(y, call->dtype, second));
}

static void rotary_chunks(void *arg, int64_t first, int64_t last)
{
    struct rotary_job *job = arg;
    const struct dsc_nn_rotary *call = job->call;
    int64_t n_pairs = call->rotary_dim / 2;
    size_t rest_bytes = (size_t)(call->head_dim - call->rotary_dim) * dsc_dtype_bytes(call->dtype);

    for (int64_t row = first * job->rows.chunk_rows; row < end_of(&job->rows, last - 1); row++) {
        int64_t head = row % call->n_heads;
        int64_t token = row / call->n_heads % call->n_tokens;
        int64_t batch = row / call->n_heads / call->n_tokens;
        const char *x = at(call->x, call->dtype,
                           batch * call->x_strides[0] + token * call->x_strides[1] + head * call->x_strides[2]);
        char *y = at_out(call->y, call->dtype,
                         batch * call->y_strides[0] + token * call->y_strides[1] + head * call->y_strides[2]);
        int64_t table = batch * call->table_strides[0] + token * call->table_strides[1];

        for (int64_t begin = 0; begin < n_pairs; begin += DSC_BLOCK_ELEMS / 2) {
            int64_t n = n_pairs - begin < DSC_BLOCK_ELEMS / 2 ? n_pairs - begin : DSC_BLOCK_ELEMS / 2;

            rotate_run(job, x, y, begin, n, (const dsc_f32 *)call->cos + table, (const dsc_f32 *)call->sin + table);
        }
        if (rest_bytes > 0 && x != y)
            memcpy(at_out(y, call->dtype, call->rotary_dim), at(x, call->dtype, call->rotary_dim), rest_bytes);
    }
}

dsc_status dsc_nn_rotary(const struct dsc_nn_rotary *call, const struct dsc_par *par)
{
    int64_t n_rows;

    if (call->n_batch < 0 || call->n_tokens < 0 || call->n_heads < 0)
        return dsc_fail(DSC_EINVAL, "[%lld, %lld, %lld] of batch, tokens and heads must not be negative",
                        (long long)call->n_batch, (long long)call->n_tokens, (long long)call->n_heads);
    if (__builtin_mul_overflow(call->n_batch, call->n_tokens, &n_rows) ||
        __builtin_mul_overflow(n_rows, call->n_heads, &n_rows))
        return dsc_fail(DSC_EOVERFLOW, "batch, tokens and heads hold more rows than int64_t counts");
    DSC_TRY(check_sizes(n_rows, call->head_dim, call->dtype));
    if (call->rotary_dim < 0 || call->rotary_dim % 2 != 0 || call->rotary_dim > call->head_dim)
        return dsc_fail(DSC_EINVAL, "rotary_dim is %lld, must be even and at most head_dim %lld",
                        (long long)call->rotary_dim, (long long)call->head_dim);
    DSC_TRY(CHECK_PRESENT(n_rows, NAMED(call, x), NAMED(call, y), NAMED(call, cos), NAMED(call, sin)));

    struct rotary_job job = {share_out(n_rows, call->head_dim, DSC_MAX_CHUNKS), call};

    dsc_par_run(par, job.rows.n_chunks, rotary_chunks, &job);
    return DSC_OK;
}

/*
 * Softmax.
 */

struct softmax_job {
    struct rows rows;
    const struct dsc_nn_softmax *call;
};

/* Rows of up to so many keys are worked on in one place; of longer ones the scores are computed three times. */
#define ROW_ELEMS (4 * DSC_BLOCK_ELEMS)

/* One row: where it lies, where its mask does, and how many of its keys are seen. */
struct softmax_row {
    const void *x;
    void *y;
    int64_t mask;
    int64_t n_seen;
};

static struct softmax_row row_of(const struct dsc_nn_softmax *call, int64_t row)
{
    int64_t query = row % call->n_queries;
    int64_t head = row / call->n_queries % call->n_heads;
    int64_t batch = row / call->n_queries / call->n_heads;
    int64_t n_seen = call->n_keys;

    if (call->is_causal && query + call->n_keys - call->n_queries + 1 < n_seen)
        n_seen = query + call->n_keys - call->n_queries + 1;
    return (struct softmax_row){
        .x = at(call->x, call->dtype, row * call->n_keys),
        .y = at_out(call->y, call->dtype, row * call->n_keys),
        .mask = batch * call->mask_strides[0] + head * call->mask_strides[1] + query * call->mask_strides[2],
        .n_seen = n_seen < 0 ? 0 : n_seen,
    };
}

/* scale * x + mask of n elements, -inf where the mask leaves out, in scores; raises *max. */
static void load_scores(const struct softmax_job *job, const struct softmax_row *row, int64_t begin, int64_t n,
                        dsc_f32 *scores, float *max)
{
    const struct dsc_nn_softmax *call = job->call;
    const struct rows *rows = &job->rows;
    dsc_f32 scratch[DSC_BLOCK_ELEMS];
    const dsc_f32 *x = load(rows, call->dtype, at(row->x, call->dtype, begin), n, scores);

    if (call->mask_kind == DSC_NN_MASK_KEEP) {
        rows->nn->scores_kept(n, x, call->scale, (const uint8_t *)call->mask + row->mask + begin, scores, max);
    } else {
        const void *added = call->mask_kind == DSC_NN_MASK_ADD ? at(call->mask, call->dtype, row->mask + begin) : NULL;

        rows->nn->scores(n, x, call->scale, load(rows, call->dtype, added, n, scratch), scores, max);
    }
}

static void softmax_row(const struct softmax_job *job, int64_t row_index)
{
    const struct dsc_nn_softmax *call = job->call;
    const struct rows *rows = &job->rows;
    const struct softmax_row row = row_of(call, row_index);
    bool is_short = row.n_seen <= ROW_ELEMS;
    dsc_f32 scores[ROW_ELEMS];
    float max = -INFINITY;
    float ignored_max = -INFINITY;
    double sum = 0.0;
    double ignored_sum = 0.0;

    for (int64_t begin = 0; begin < row.n_seen; begin += DSC_BLOCK_ELEMS)
        load_scores(job, &row, begin, block_of(row.n_seen - begin), scores + (is_short ? begin : 0), &max);
    if (max == -INFINITY) /* nothing is seen, or NaN alone, which must stay */
        max = 0.0f;
    for (int64_t begin = 0; begin < row.n_seen; begin += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(row.n_seen - begin);
        dsc_f32 *block = scores + (is_short ? begin : 0);

        if (!is_short)
            load_scores(job, &row, begin, n, block, &ignored_max);
        rows->nn->exps(n, block, max, block, &sum);
    }

    float factor = sum == 0.0 ? 0.0f : (float)(1.0 / sum);

    for (int64_t begin = 0; begin < row.n_seen; begin += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(row.n_seen - begin);
        dsc_f32 *block = scores + (is_short ? begin : 0);

        if (!is_short) {
            load_scores(job, &row, begin, n, block, &ignored_max);
            rows->nn->exps(n, block, max, block, &ignored_sum);
        }
        rows->kernels->scale_f32(n, factor, block);
        store(rows, call->dtype, block, n, at_out(row.y, call->dtype, begin));
    }
    memset(at_out(row.y, call->dtype, row.n_seen), 0,
           (size_t)(call->n_keys - row.n_seen) * dsc_dtype_bytes(call->dtype));
}

static void softmax_chunks(void *arg, int64_t first, int64_t last)
{
    struct softmax_job *job = arg;

    for (int64_t row = first * job->rows.chunk_rows; row < end_of(&job->rows, last - 1); row++)
        softmax_row(job, row);
}

dsc_status dsc_nn_softmax(const struct dsc_nn_softmax *call, const struct dsc_par *par)
{
    int64_t n_rows;

    if (call->n_batch < 0 || call->n_heads < 0 || call->n_queries < 0)
        return dsc_fail(DSC_EINVAL, "[%lld, %lld, %lld] of batch, heads and queries must not be negative",
                        (long long)call->n_batch, (long long)call->n_heads, (long long)call->n_queries);
    if (__builtin_mul_overflow(call->n_batch, call->n_heads, &n_rows) ||
        __builtin_mul_overflow(n_rows, call->n_queries, &n_rows))
        return dsc_fail(DSC_EOVERFLOW, "batch, heads and queries hold more rows than int64_t counts");
    DSC_TRY(check_sizes(n_rows, call->n_keys, call->dtype));
    if (call->mask_kind != DSC_NN_MASK_NONE && call->mask_kind != DSC_NN_MASK_ADD &&
        call->mask_kind != DSC_NN_MASK_KEEP)
        return dsc_fail(DSC_EINVAL, "mask_kind is %d, which is no dsc_nn_mask", (int)call->mask_kind);
    DSC_TRY(CHECK_PRESENT(n_rows, NAMED(call, x), NAMED(call, y)));
    if (call->mask_kind != DSC_NN_MASK_NONE)
        DSC_TRY(CHECK_PRESENT(n_rows, NAMED(call, mask)));

    struct softmax_job job = {share_out(n_rows, call->n_keys, DSC_MAX_CHUNKS), call};

    dsc_par_run(par, job.rows.n_chunks, softmax_chunks, &job);
    return DSC_OK;
}

struct softmax_grad_job {
    struct rows rows;
    const struct dsc_nn_softmax_grad *call;
};

static void softmax_grad_chunks(void *arg, int64_t first, int64_t last)
{
    struct softmax_grad_job *job = arg;
    const struct dsc_nn_softmax_grad *call = job->call;
    const struct rows *rows = &job->rows;
    dsc_f32 scratch[2][DSC_BLOCK_ELEMS];

    for (int64_t row = first * rows->chunk_rows; row < end_of(rows, last - 1); row++) {
        double sum = 0.0;

        for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
            int64_t n = block_of(call->n_cols - begin);
            int64_t i = row * call->n_cols + begin;

            rows->nn->dot(n, load(rows, call->dtype, at(call->y, call->dtype, i), n, scratch[0]),
                          load(rows, call->dtype, at(call->dy, call->dtype, i), n, scratch[1]), &sum);
        }
        for (int64_t begin = 0; begin < call->n_cols; begin += DSC_BLOCK_ELEMS) {
            int64_t n = block_of(call->n_cols - begin);
            int64_t i = row * call->n_cols + begin;
            const dsc_f32 *y = load(rows, call->dtype, at(call->y, call->dtype, i), n, scratch[0]);
            const dsc_f32 *dy = load(rows, call->dtype, at(call->dy, call->dtype, i), n, scratch[1]);
            void *out = at_out(call->dx, call->dtype, i);
            dsc_f32 *dx = target(call->dtype, out, scratch[1]);

            rows->nn->softmax_grad(n, y, dy, (float)sum, call->scale, dx);
            store(rows, call->dtype, dx, n, out);
        }
    }
}

dsc_status dsc_nn_softmax_grad(const struct dsc_nn_softmax_grad *call, const struct dsc_par *par)
{
    DSC_TRY(check_sizes(call->n_rows, call->n_cols, call->dtype));
    DSC_TRY(CHECK_PRESENT(call->n_rows, NAMED(call, y), NAMED(call, dy), NAMED(call, dx)));

    struct softmax_grad_job job = {share_out(call->n_rows, call->n_cols, DSC_MAX_CHUNKS), call};

    dsc_par_run(par, job.rows.n_chunks, softmax_grad_chunks, &job);
    return DSC_OK;
}
