/*
 * Passes over flat buffers: checks the spans, cuts them into chunks for threads, and runs the kernels block by block.
 */
#include "dsc/flat.h"

#include "base/fail.h"
#include "cpu/spans.h"
#include "cpu/table.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>

struct partial {
    double sumsq;
    int64_t n_nonfinite;
};

/* Adds in chunk order, so that the sum does not depend on which thread computed which chunk. */
static struct partial fold(const struct partial *partials, int64_t n_chunks)
{
    struct partial total = {0};

    for (int64_t chunk = 0; chunk < n_chunks; chunk++) {
        total.sumsq += partials[chunk].sumsq;
        total.n_nonfinite += partials[chunk].n_nonfinite;
    }
    return total;
}

struct sumsq_job {
    const struct dsc_kernels *kernels;
    const struct dsc_span *spans;
    struct dsc_list list;
    struct partial partials[DSC_MAX_CHUNKS];
};

static void sumsq_chunks(void *arg, int64_t first, int64_t last)
{
    struct sumsq_job *job = arg;
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;
        struct partial partial = {0};

        while (dsc_cursor_next(&cursor, &piece)) {
            const struct dsc_span *span = &job->spans[piece.array];
            size_t elem_bytes = dsc_dtype_bytes(span->dtype);
            const char *data = (const char *)span->data + (size_t)piece.begin * elem_bytes;

            for (int64_t n_left = piece.n_elems; n_left > 0; n_left -= dsc_block_of(n_left)) {
                int64_t n = dsc_block_of(n_left);
                const dsc_f32 *block;

                dsc_prefetch_ahead(data, (size_t)n * elem_bytes, (size_t)n_left * elem_bytes);
                block = dsc_load_f32(job->kernels, span->dtype, data, n, scratch);
                job->kernels->sumsq_f32(n, block, &partial.sumsq, &partial.n_nonfinite);
                data += (size_t)n * elem_bytes;
            }
        }
        job->partials[chunk] = partial;
    }
}

dsc_status dsc_flat_sumsq(const struct dsc_span *spans, int64_t n_spans, const struct dsc_par *par, double *out_sumsq,
                          int64_t *out_n_nonfinite)
{
    struct sumsq_job job;

    if (out_sumsq == NULL || out_n_nonfinite == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", out_sumsq == NULL ? "out_sumsq" : "out_n_nonfinite");
    DSC_TRY(dsc_check_spans(spans, n_spans, "spans"));
    DSC_TRY(dsc_list_of_spans(&job.list, spans, n_spans));
    job.kernels = dsc_kernels_get();
    job.spans = spans;
    dsc_par_run(par, job.list.n_chunks, sumsq_chunks, &job);

    struct partial total = fold(job.partials, job.list.n_chunks);

    *out_sumsq = total.sumsq;
    *out_n_nonfinite = total.n_nonfinite;
    return DSC_OK;
}

struct reduce_job {
    const struct dsc_kernels *kernels;
    const struct dsc_span *srcs;
    int64_t n_srcs;
    const struct dsc_span *acc;
    float scale;
    bool is_accumulating;
    bool has_sumsq;
    struct dsc_list list;
    struct partial partials[DSC_MAX_CHUNKS];
};

/*
 * Adds up one block of the sources. Returns the sum: in acc if all are f32 and nothing is accumulated, so that no block
 * is copied, otherwise in sum.
 */
static dsc_f32 *add_sources(const struct reduce_job *job, int64_t begin, int64_t n, char *acc, dsc_f32 *sum)
{
    const struct dsc_kernels *kernels = job->kernels;
    dsc_dtype dtype = job->srcs[0].dtype;
    size_t src_bytes = dsc_dtype_bytes(dtype);
    bool is_plain = dtype == DSC_DTYPE_F32 && job->acc->dtype == DSC_DTYPE_F32 && !job->is_accumulating;
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];
    const dsc_f32 *so_far = NULL;

    for (int64_t i = 0; i < job->n_srcs; i++) {
        const char *src = (const char *)job->srcs[i].data + (size_t)begin * src_bytes;
        const dsc_f32 *block = dsc_load_f32(kernels, dtype, src, n, i == 0 ? sum : scratch);
        /* acc is written last, because it may also be a source. */
        dsc_f32 *target = is_plain && i + 1 == job->n_srcs ? (dsc_f32 *)(void *)acc : sum;

        if (i > 0) {
            kernels->sum_two_f32(n, so_far, block, target);
            so_far = target;
        } else
            so_far = block;
    }
    if (so_far == sum || (is_plain && (const char *)so_far == acc))
        return (dsc_f32 *)(uintptr_t)so_far;
    memcpy(sum, so_far, (size_t)n * sizeof *sum); /* a single source of f32 */
    return sum;
}

static void reduce_block(const struct reduce_job *job, int64_t begin, int64_t n, struct partial *partial)
{
    const struct dsc_kernels *kernels = job->kernels;
    char *acc = (char *)job->acc->data + (size_t)begin * dsc_dtype_bytes(job->acc->dtype);
    DSC_ALIGNED dsc_f32 space[DSC_BLOCK_ELEMS];
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];
    dsc_f32 *sum = add_sources(job, begin, n, acc, space);

    if (job->scale != 1.0f)
        kernels->scale_f32(n, job->scale, sum);
    if (job->is_accumulating)
        kernels->add_f32(n, dsc_load_f32(kernels, job->acc->dtype, acc, n, scratch), sum);
    if ((char *)sum != acc)
        dsc_store_f32(kernels, job->acc->dtype, sum, n, acc);
    if (job->has_sumsq) {
        const dsc_f32 *written =
            job->acc->dtype == DSC_DTYPE_F32 ? sum : dsc_load_f32(kernels, job->acc->dtype, acc, n, scratch);

        kernels->sumsq_f32(n, written, &partial->sumsq, &partial->n_nonfinite);
    }
}

static void reduce_chunks(void *arg, int64_t first, int64_t last)
{
    struct reduce_job *job = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;
        struct partial partial = {0};

        while (dsc_cursor_next(&cursor, &piece))
            for (int64_t done = 0; done < piece.n_elems; done += DSC_BLOCK_ELEMS)
                reduce_block(job, piece.begin + done, dsc_block_of(piece.n_elems - done), &partial);
        job->partials[chunk] = partial;
    }
}

dsc_status dsc_flat_reduce(const struct dsc_span *srcs, int64_t n_srcs, float scale, bool accumulate,
                           const struct dsc_span *acc, const struct dsc_par *par, double *out_sumsq,
                           int64_t *out_n_nonfinite)
{
    struct reduce_job job;

    if (acc == NULL)
        return dsc_fail(DSC_EINVAL, "acc is NULL");
    if (n_srcs < 1)
        return dsc_fail(DSC_EINVAL, "n_srcs is %lld, must be at least 1", (long long)n_srcs);
    if (!isfinite(scale))
        return dsc_fail(DSC_EINVAL, "scale is %g, must be finite", (double)scale);
    DSC_TRY(dsc_check_span(acc, "acc", 0));
    DSC_TRY(dsc_check_spans(srcs, n_srcs, "srcs"));
    for (int64_t i = 0; i < n_srcs; i++) {
        if (srcs[i].n_elems != acc->n_elems)
            return dsc_fail(DSC_EINVAL, "srcs[%lld] has %lld elements, acc has %lld", (long long)i,
                            (long long)srcs[i].n_elems, (long long)acc->n_elems);
        if (srcs[i].dtype != srcs[0].dtype)
            return dsc_fail(DSC_EINVAL, "srcs[%lld].dtype is %d, srcs[0].dtype is %d; sources share one dtype",
                            (long long)i, (int)srcs[i].dtype, (int)srcs[0].dtype);
    }
    DSC_TRY(dsc_list_of_spans(&job.list, acc, 1));
    job.kernels = dsc_kernels_get();
    job.srcs = srcs;
    job.n_srcs = n_srcs;
    job.acc = acc;
    job.scale = scale;
    job.is_accumulating = accumulate;
    job.has_sumsq = out_sumsq != NULL || out_n_nonfinite != NULL;
    dsc_par_run(par, job.list.n_chunks, reduce_chunks, &job);

    struct partial total = fold(job.partials, job.list.n_chunks);

    if (out_sumsq != NULL)
        *out_sumsq = total.sumsq;
    if (out_n_nonfinite != NULL)
        *out_n_nonfinite = total.n_nonfinite;
    return DSC_OK;
}

struct scale_job {
    const struct dsc_kernels *kernels;
    const struct dsc_span *spans;
    float scale;
    struct dsc_list list;
};

static void scale_chunks(void *arg, int64_t first, int64_t last)
{
    struct scale_job *job = arg;
    const struct dsc_kernels *kernels = job->kernels;
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;

        while (dsc_cursor_next(&cursor, &piece)) {
            const struct dsc_span *span = &job->spans[piece.array];
            char *data = (char *)span->data + (size_t)piece.begin * dsc_dtype_bytes(span->dtype);

            if (span->dtype == DSC_DTYPE_F32) {
                kernels->scale_f32(piece.n_elems, job->scale, (dsc_f32 *)data);
                continue;
            }
            for (int64_t n_left = piece.n_elems; n_left > 0; n_left -= dsc_block_of(n_left)) {
                int64_t n = dsc_block_of(n_left);

                dsc_load_f32(kernels, span->dtype, data, n, scratch);
                kernels->scale_f32(n, job->scale, scratch);
                dsc_store_f32(kernels, span->dtype, scratch, n, data);
                data += (size_t)n * dsc_dtype_bytes(span->dtype);
            }
        }
    }
}

dsc_status dsc_flat_scale(const struct dsc_span *spans, int64_t n_spans, float scale, const struct dsc_par *par)
{
    struct scale_job job;

    if (!isfinite(scale))
        return dsc_fail(DSC_EINVAL, "scale is %g, must be finite", (double)scale);
    DSC_TRY(dsc_check_spans(spans, n_spans, "spans"));
    DSC_TRY(dsc_list_of_spans(&job.list, spans, n_spans));
    job.kernels = dsc_kernels_get();
    job.spans = spans;
    job.scale = scale;
    dsc_par_run(par, job.list.n_chunks, scale_chunks, &job);
    return DSC_OK;
}

struct cast_job {
    const struct dsc_kernels *kernels;
    const struct dsc_span *src;
    const struct dsc_span *dst;
    struct dsc_list list;
};

static void cast_chunks(void *arg, int64_t first, int64_t last)
{
    struct cast_job *job = arg;
    size_t src_bytes = dsc_dtype_bytes(job->src->dtype);
    size_t dst_bytes = dsc_dtype_bytes(job->dst->dtype);
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;

        while (dsc_cursor_next(&cursor, &piece)) {
            const char *src = (const char *)job->src->data + (size_t)piece.begin * src_bytes;
            char *dst = (char *)job->dst->data + (size_t)piece.begin * dst_bytes;

            if (job->src->dtype == job->dst->dtype) {
                memcpy(dst, src, (size_t)piece.n_elems * src_bytes);
                continue;
            }
            for (int64_t n_left = piece.n_elems; n_left > 0; n_left -= dsc_block_of(n_left)) {
                int64_t n = dsc_block_of(n_left);
                dsc_f32 *block = job->dst->dtype == DSC_DTYPE_F32 ? (dsc_f32 *)dst : scratch;

                dsc_store_f32(job->kernels, job->dst->dtype, dsc_load_f32(job->kernels, job->src->dtype, src, n, block),
                              n, dst);
                src += (size_t)n * src_bytes;
                dst += (size_t)n * dst_bytes;
            }
        }
    }
}

dsc_status dsc_flat_cast(const struct dsc_span *src, const struct dsc_span *dst, const struct dsc_par *par)
{
    struct cast_job job;

    if (src == NULL || dst == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", src == NULL ? "src" : "dst");
    DSC_TRY(dsc_check_span(src, "src", 0));
    DSC_TRY(dsc_check_span(dst, "dst", 0));
    if (src->n_elems != dst->n_elems)
        return dsc_fail(DSC_EINVAL, "src has %lld elements, dst has %lld", (long long)src->n_elems,
                        (long long)dst->n_elems);
    DSC_TRY(dsc_list_of_spans(&job.list, src, 1));
    job.kernels = dsc_kernels_get();
    job.src = src;
    job.dst = dst;
    dsc_par_run(par, job.list.n_chunks, cast_chunks, &job);
    return DSC_OK;
}

#define HUGE_PAGE_BYTES ((uintptr_t)2 << 20)

/*
 * Requests huge pages within a region that is about to be touched. A step streams through five arrays at once, and with
 * small pages it spends a sixth of its time on page borders. The request is only advice: a kernel without huge pages
 * refuses it, and nothing is lost. Huge pages cost no extra memory, since they lie within the region and all of the
 * region will be written.
 */
static void advise_huge_pages(const struct dsc_region *region)
{
#if defined(MADV_HUGEPAGE)
    uintptr_t begin = ((uintptr_t)region->data + HUGE_PAGE_BYTES - 1) & ~(HUGE_PAGE_BYTES - 1);
    uintptr_t end =
        ((uintptr_t)region->data + (uintptr_t)(region->n_elems * region->elem_bytes)) & ~(HUGE_PAGE_BYTES - 1);

    if (begin < end)
        (void)madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)region;
#endif
}

struct zero_job {
    const struct dsc_region *regions;
    struct dsc_list list;
};

static void zero_chunks(void *arg, int64_t first, int64_t last)
{
    struct zero_job *job = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;

        while (dsc_cursor_next(&cursor, &piece)) {
            const struct dsc_region *region = &job->regions[piece.array];

            memset((char *)region->data + piece.begin * region->elem_bytes, 0,
                   (size_t)(piece.n_elems * region->elem_bytes));
        }
    }
}

dsc_status dsc_flat_zero(const struct dsc_region *regions, int64_t n_regions, const struct dsc_par *par)
{
    struct zero_job job = {.regions = regions};

    if (n_regions < 0 || (regions == NULL && n_regions > 0))
        return dsc_fail(DSC_EINVAL, "%lld regions at %p", (long long)n_regions, (const void *)regions);
    for (int64_t i = 0; i < n_regions; i++) {
        const struct dsc_region *region = &regions[i];

        if (region->n_elems < 0 || region->elem_bytes <= 0 || region->n_elems > INT64_MAX / region->elem_bytes ||
            (region->data == NULL && region->n_elems > 0))
            return dsc_fail(DSC_EINVAL, "regions[%lld]: %lld elements of %lld bytes at %p", (long long)i,
                            (long long)region->n_elems, (long long)region->elem_bytes, region->data);
    }
    DSC_TRY(dsc_list_init(&job.list, n_regions > 0 ? &regions->n_elems : NULL, sizeof *regions, n_regions));
    for (int64_t i = 0; i < n_regions; i++)
        advise_huge_pages(&regions[i]);
    dsc_par_run(par, job.list.n_chunks, zero_chunks, &job);
    return DSC_OK;
}
