/* Quantised states (dsc/optim.h): cuts arrays of any length into blocks and spreads them over threads. */
#include "optim/q8.h"

#include "base/fail.h"
#include "base/par.h"

_Static_assert(DSC_BLOCK_ELEMS % DSC_Q8_BLOCK_ELEMS == 0, "what a thread takes begins and ends with a block");

int64_t dsc_q8_n_scales(int64_t n_elems)
{
    return n_elems / DSC_Q8_BLOCK_ELEMS + (n_elems % DSC_Q8_BLOCK_ELEMS != 0);
}

/* Number of elements from element at to the end of its block, at most n_left. */
static int64_t rest_of_block(int64_t at, int64_t n_left)
{
    int64_t n = DSC_Q8_BLOCK_ELEMS - at % DSC_Q8_BLOCK_ELEMS;

    return n < n_left ? n : n_left;
}

void dsc_q8_load(const struct dsc_quant_kernels *kernels, dsc_q8_code code, const void *codes, const void *scales,
                 int64_t begin, int64_t n, dsc_f32 *dst)
{
    const dsc_f32 *scale = scales;
    int64_t n_done = 0;

    while (n_done < n) {
        int64_t at = begin + n_done;
        int64_t n_here = rest_of_block(at, n - n_done);

        if (code == DSC_Q8_SIGNED)
            kernels->values_of_q8_signed(n_here, (const int8_t *)codes + at, scale[at / DSC_Q8_BLOCK_ELEMS],
                                         dst + n_done);
        else
            kernels->values_of_q8_unsigned(n_here, (const uint8_t *)codes + at, scale[at / DSC_Q8_BLOCK_ELEMS],
                                           dst + n_done);
        n_done += n_here;
    }
}

void dsc_q8_store(const struct dsc_quant_kernels *kernels, dsc_q8_code code, const dsc_f32 *src, int64_t begin,
                  int64_t n, void *codes, void *scales)
{
    dsc_f32 *scale = scales;
    int64_t n_done = 0;

    while (n_done < n) {
        int64_t at = begin + n_done;
        int64_t n_here = rest_of_block(at, n - n_done);

        if (code == DSC_Q8_SIGNED)
            kernels->q8_signed(n_here, src + n_done, (int8_t *)codes + at, &scale[at / DSC_Q8_BLOCK_ELEMS]);
        else
            kernels->q8_unsigned(n_here, src + n_done, (uint8_t *)codes + at, &scale[at / DSC_Q8_BLOCK_ELEMS]);
        n_done += n_here;
    }
}

struct job {
    const struct dsc_quant_kernels *kernels;
    dsc_q8_code code;
    int64_t n_elems;
    int64_t chunk_elems;
    int64_t begin;
    const void *codes;
    const void *scales;
    const dsc_f32 *values;
    void *out_codes;
    void *out_scales;
    dsc_f32 *out_values;
    int64_t first_negative[DSC_MAX_CHUNKS]; /* -1: no such element in the chunk */
};

static int64_t end_of_chunk(const struct job *job, int64_t chunk)
{
    int64_t end = (chunk + 1) * job->chunk_elems;

    return end < job->n_elems ? end : job->n_elems;
}

static void find_negatives(void *arg, int64_t first, int64_t last)
{
    struct job *job = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t end = end_of_chunk(job, chunk);
        int64_t i = chunk * job->chunk_elems;

        while (i < end && !(job->values[i] < 0.0f))
            i++;
        job->first_negative[chunk] = i < end ? i : -1;
    }
}

static void quantize_chunks(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t begin = chunk * job->chunk_elems;

        dsc_q8_store(job->kernels, job->code, job->values + begin, begin, end_of_chunk(job, chunk) - begin,
                     job->out_codes, job->out_scales);
    }
}

static void dequantize_chunks(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t begin = chunk * job->chunk_elems;

        dsc_q8_load(job->kernels, job->code, job->codes, job->scales, job->begin + begin,
                    end_of_chunk(job, chunk) - begin, job->out_values + begin);
    }
}

/* Makes the checks that both directions share, and cuts the elements into chunks. */
static dsc_status init_job(struct job *job, const char *what, dsc_q8_code code, int64_t n_elems, const void *codes,
                           const void *scales, const void *values, int64_t *out_n_chunks)
{
    struct dsc_list list;

    if (code != DSC_Q8_SIGNED && code != DSC_Q8_UNSIGNED)
        return dsc_fail(DSC_EINVAL, "%s: code is %d, must be DSC_Q8_SIGNED or DSC_Q8_UNSIGNED", what, (int)code);
    if (n_elems < 0)
        return dsc_fail(DSC_EINVAL, "%s: n_elems is %lld, must not be negative", what, (long long)n_elems);
    if (n_elems > 0 && (codes == NULL || scales == NULL || values == NULL))
        return dsc_fail(DSC_EINVAL, "%s: %s is NULL for %lld elements", what,
                        codes == NULL    ? "codes"
                        : scales == NULL ? "scales"
                                         : "values",
                        (long long)n_elems);
    job->kernels = dsc_quant_kernels_get();
    DSC_TRY(dsc_list_init(&list, &n_elems, sizeof n_elems, 1));
    job->code = code;
    job->n_elems = n_elems;
    job->chunk_elems = list.chunk_elems;
    *out_n_chunks = list.n_chunks;
    return DSC_OK;
}

dsc_status dsc_q8_quantize(dsc_q8_code code, int64_t n_elems, const void *values, void *codes, void *scales,
                           const struct dsc_par *par)
{
    struct job job;
    int64_t n_chunks = 0;

    DSC_TRY(init_job(&job, "dsc_q8_quantize", code, n_elems, codes, scales, values, &n_chunks));
    job.values = values;
    job.out_codes = codes;
    job.out_scales = scales;
    if (code == DSC_Q8_UNSIGNED) {
        dsc_par_run(par, n_chunks, find_negatives, &job);
        for (int64_t chunk = 0; chunk < n_chunks; chunk++)
            if (job.first_negative[chunk] >= 0)
                return dsc_fail(DSC_EINVAL,
                                "dsc_q8_quantize: values[%lld] is %g, must not be negative for unsigned codes",
                                (long long)job.first_negative[chunk], (double)job.values[job.first_negative[chunk]]);
    }
    dsc_par_run(par, n_chunks, quantize_chunks, &job);
    return DSC_OK;
}

dsc_status dsc_q8_dequantize(dsc_q8_code code, const void *codes, const void *scales, int64_t begin, int64_t n_elems,
                             void *out_values, const struct dsc_par *par)
{
    struct job job;
    int64_t n_chunks = 0;

    DSC_TRY(init_job(&job, "dsc_q8_dequantize", code, n_elems, codes, scales, out_values, &n_chunks));
    if (begin < 0)
        return dsc_fail(DSC_EINVAL, "dsc_q8_dequantize: begin is %lld, must not be negative", (long long)begin);
    job.begin = begin;
    job.codes = codes;
    job.scales = scales;
    job.out_values = out_values;
    dsc_par_run(par, n_chunks, dequantize_chunks, &job);
    return DSC_OK;
}
