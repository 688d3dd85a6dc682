/* Cuts rows into chunks for threads, runs an operator's body over each row, and folds the sums over rows. */
#include "nn/rows.h"

#include "dsc/nn.h"

#include <string.h>

#define TABLE_ENTRY(isa, is_runnable) &DSC_K_OF(nn_kernels, isa),
static const struct dsc_nn_kernels *const tables[] = {DSC_ISA_MAP(TABLE_ENTRY)};
#undef TABLE_ENTRY

const struct dsc_nn_kernels *dsc_nn_kernels_get(void)
{
    return tables[dsc_isa_index()];
}

struct dsc_rows dsc_rows_of(int64_t n_rows, int64_t n_cols)
{
    return (struct dsc_rows){dsc_kernels_get(), dsc_nn_kernels_get(), n_rows, n_cols};
}

/* Chunks depend only on sizes. Calls that sum over rows have few chunks, since each chunk has its own partial sum. */
static int64_t rows_of_chunk(int64_t n_rows, int64_t n_cols, int64_t max_chunks)
{
    int64_t rows = DSC_MIN_CHUNK_ELEMS / n_cols;
    int64_t least = n_rows / max_chunks + (n_rows % max_chunks != 0);

    if (rows < 1)
        rows = 1;
    return rows < least ? least : rows;
}

static int64_t chunks_of(int64_t n, int64_t of_chunk)
{
    return n / of_chunk + (n % of_chunk != 0);
}

int64_t dsc_nn_scratch_elems(int64_t n_rows, int64_t n_cols, int64_t n_sums)
{
    if (n_rows <= 0 || n_cols <= 0 || n_sums <= 0)
        return 0;
    return n_sums * n_cols * chunks_of(n_rows, rows_of_chunk(n_rows, n_cols, DSC_NN_MAX_PARTIALS));
}

struct run {
    const struct dsc_rows *rows;
    dsc_row_body body;
    const void *job;
    int64_t chunk_rows;
    int64_t n_chunks;
    float *partials[DSC_ROW_SUMS]; /* [n_chunks, n_cols] each; NULL: not wanted */
};

static void run_chunks(void *arg, int64_t first, int64_t last)
{
    const struct run *run = arg;
    int64_t n_cols = run->rows->n_cols;

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t end = (chunk + 1) * run->chunk_rows;
        float *sums[DSC_ROW_SUMS] = {NULL};

        for (int i = 0; i < DSC_ROW_SUMS; i++) {
            if (run->partials[i] == NULL)
                continue;
            sums[i] = run->partials[i] + chunk * n_cols;
            memset(sums[i], 0, (size_t)n_cols * sizeof **sums);
        }
        for (int64_t row = chunk * run->chunk_rows; row < end && row < run->rows->n_rows; row++)
            run->body(run->job, row, sums);
    }
}

struct fold_job {
    const struct run *run;
    const float *partials;
    dsc_dtype dtype;
    void *out;
};

static void fold_blocks(void *arg, int64_t first, int64_t last)
{
    const struct fold_job *job = arg;
    int64_t n_cols = job->run->rows->n_cols;

    for (int64_t block = first; block < last; block++) {
        int64_t begin = block * DSC_BLOCK_ELEMS;
        int64_t n = dsc_block_of(n_cols - begin);
        double sums[DSC_BLOCK_ELEMS] = {0};
        DSC_ALIGNED dsc_f32 rounded[DSC_BLOCK_ELEMS];

        for (int64_t chunk = 0; chunk < job->run->n_chunks; chunk++) {
            const float *partial = job->partials + chunk * n_cols + begin;

            for (int64_t i = 0; i < n; i++)
                sums[i] += (double)partial[i];
        }
        for (int64_t i = 0; i < n; i++)
            rounded[i] = (float)sums[i];
        dsc_store(job->run->rows, job->dtype, rounded, n, dsc_at_out(job->out, job->dtype, begin));
    }
}

void dsc_rows_run(const struct dsc_rows *rows, const struct dsc_row_sums *sums, dsc_row_body body, const void *job,
                  const struct dsc_par *par)
{
    bool has_sums = sums != NULL && (sums->out[0] != NULL || sums->out[1] != NULL);
    int64_t chunk_rows = rows_of_chunk(rows->n_rows, rows->n_cols, has_sums ? DSC_NN_MAX_PARTIALS : DSC_MAX_CHUNKS);
    struct run run = {rows, body, job, chunk_rows, chunks_of(rows->n_rows, chunk_rows), {NULL}};
    float *free_scratch = has_sums ? sums->scratch : NULL;

    for (int i = 0; has_sums && i < DSC_ROW_SUMS; i++) {
        if (sums->out[i] == NULL)
            continue;
        run.partials[i] = free_scratch;
        free_scratch += run.n_chunks * rows->n_cols;
    }
    dsc_par_run(par, run.n_chunks, run_chunks, &run);
    for (int i = 0; has_sums && i < DSC_ROW_SUMS; i++) {
        struct fold_job fold = {&run, run.partials[i], sums->dtype, sums->out[i]};

        if (sums->out[i] != NULL)
            dsc_par_run(par, chunks_of(rows->n_cols, DSC_BLOCK_ELEMS), fold_blocks, &fold);
    }
}

dsc_status dsc_check_rows(int64_t n_rows, int64_t n_cols, dsc_dtype dtype)
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

dsc_status dsc_check_present(int64_t n_rows, const struct dsc_named *arrays, size_t n_arrays)
{
    for (size_t i = 0; i < n_arrays; i++)
        if (arrays[i].data == NULL && n_rows > 0)
            return dsc_fail(DSC_EINVAL, "%s is NULL for %lld rows", arrays[i].name, (long long)n_rows);
    return DSC_OK;
}

dsc_status dsc_check_dims(const char *names, int64_t a, int64_t b, int64_t c, int64_t *out_n_rows)
{
    int64_t n_rows;

    if (a < 0 || b < 0 || c < 0)
        return dsc_fail(DSC_EINVAL, "[%lld, %lld, %lld] of %s must not be negative", (long long)a, (long long)b,
                        (long long)c, names);
    if (__builtin_mul_overflow(a, b, &n_rows) || __builtin_mul_overflow(n_rows, c, &n_rows))
        return dsc_fail(DSC_EOVERFLOW, "%s hold more rows than int64_t counts", names);
    *out_n_rows = n_rows;
    return DSC_OK;
}

const dsc_f32 *dsc_load_biased(const struct dsc_rows *rows, dsc_dtype dtype, const void *x, const void *bias, int64_t n,
                               dsc_f32 (*scratch)[DSC_BLOCK_ELEMS])
{
    const dsc_f32 *loaded = dsc_load(rows, dtype, x, n, scratch[0]);

    if (bias == NULL)
        return loaded;
    rows->nn->add(n, loaded, dsc_load(rows, dtype, bias, n, scratch[1]), scratch[0]);
    return scratch[0];
}
