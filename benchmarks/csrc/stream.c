/*
 * The memory bound of an optimizer step: a pass that reads and writes exactly the bytes of the step and computes next
 * to nothing. It runs over the arrays of the measured process, on the same number of pool threads.
 *
 * `make -C csrc stream` builds this as a separate library for benchmarks/stream.py. It is no part of the package. The
 * pass keeps every value, except that the sign of a zero may change: it multiplies by 1 and adds 0, and the compiler
 * does not know these operands. Copies become the parameters rounded to bf16.
 */
#include "dsc/dsc.h"

#include <stdlib.h>
#include <string.h>

#define CHUNK_ELEMS 16384

/* Like the cores, the loops are compiled for the instruction set of the machine. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PER_ISA __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define PER_ISA
#endif

/* One array of each kind, all of n_elems. The members have the same order as in stream.py. */
struct stream_part {
    int64_t n_elems;
    float *param;
    const void *grad;
    float *state0;
    float *state1;
    uint16_t *copy;         /* bf16, or NULL */
    int64_t grad_is_bf16;   /* otherwise f32 */
};

struct pass {
    const struct stream_part *parts;
    int64_t n_parts;
    int64_t *first_chunk; /* number of each part's first chunk */
    double *sums;         /* sum of squares of each chunk, for the norm */
    float one;
    float zero;
};

DSC_API dsc_status stream_resize(int32_t n_threads);
DSC_API dsc_status stream_read(const struct stream_part *parts, int64_t n_parts, uint64_t *out_sum);
DSC_API dsc_status stream_step(const struct stream_part *parts, int64_t n_parts, int32_t with_norm, float one, float zero, double *out_sumsq);

static inline float widen(uint16_t half)
{
    uint32_t bits = (uint32_t)half << 16;
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint16_t narrow(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define LANES 16

/* Sums in lanes, so that the loop uses the width of the machine and does not wait for a chain of additions. */
PER_ISA static double sumsq_f32(const float *restrict g, int64_t n)
{
    float lanes[LANES] = {0};
    double sum = 0;
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES)
        for (int64_t j = 0; j < LANES; j++)
            lanes[j] += g[i + j] * g[i + j];
    for (; i < n; i++)
        sum += (double)g[i] * g[i];
    for (int64_t j = 0; j < LANES; j++)
        sum += lanes[j];
    return sum;
}

PER_ISA static double sumsq_bf16(const uint16_t *restrict g, int64_t n)
{
    float lanes[LANES] = {0};
    double sum = 0;
    int64_t i = 0;

    for (; i + LANES <= n; i += LANES)
        for (int64_t j = 0; j < LANES; j++)
            lanes[j] += widen(g[i + j]) * widen(g[i + j]);
    for (; i < n; i++)
        sum += (double)widen(g[i]) * widen(g[i]);
    for (int64_t j = 0; j < LANES; j++)
        sum += lanes[j];
    return sum;
}

#define UPDATE(name, grad_type, value_of, with_copy)                                                                                              \
    PER_ISA static void name(float *restrict p, const grad_type *restrict g, float *restrict m, float *restrict v, uint16_t *restrict c, float one, \
                             float zero, int64_t n)                                                                                                 \
    {                                                                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                                                           \
            float grad = value_of(g[i]);                                                                                                            \
                                                                                                                                                    \
            m[i] = one * m[i] + zero * grad;                                                                                                        \
            v[i] = one * v[i] + zero * grad;                                                                                                        \
            p[i] = one * p[i] + zero * grad;                                                                                                        \
            if (with_copy)                                                                                                                          \
                c[i] = narrow(p[i]);                                                                                                                \
        }                                                                                                                                           \
    }

UPDATE(update_f32, float, (float), 0)
UPDATE(update_f32_copy, float, (float), 1)
UPDATE(update_bf16, uint16_t, widen, 0)
UPDATE(update_bf16_copy, uint16_t, widen, 1)

/*
 * Finds the part that holds a chunk of the pass, and the chunk's range in it. All parts are cut into consecutive
 * chunks, so that a pass over many small parts is also shared among threads.
 */
static const struct stream_part *find(const struct pass *pass, int64_t chunk, int64_t *out_begin, int64_t *out_n)
{
    int64_t low = 0, high = pass->n_parts - 1;

    while (low < high) {
        int64_t middle = (low + high + 1) / 2;

        if (pass->first_chunk[middle] <= chunk)
            low = middle;
        else
            high = middle - 1;
    }

    const struct stream_part *part = &pass->parts[low];
    int64_t begin = (chunk - pass->first_chunk[low]) * CHUNK_ELEMS;

    *out_begin = begin;
    *out_n = part->n_elems - begin < CHUNK_ELEMS ? part->n_elems - begin : CHUNK_ELEMS;
    return part;
}

static void norm_body(void *arg, int64_t first, int64_t last)
{
    struct pass *pass = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t begin, n;
        const struct stream_part *part = find(pass, chunk, &begin, &n);

        pass->sums[chunk] = part->grad_is_bf16 ? sumsq_bf16((const uint16_t *)part->grad + begin, n) : sumsq_f32((const float *)part->grad + begin, n);
    }
}

static void update_body(void *arg, int64_t first, int64_t last)
{
    struct pass *pass = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t begin, n;
        const struct stream_part *part = find(pass, chunk, &begin, &n);
        float *p = part->param + begin, *m = part->state0 + begin, *v = part->state1 + begin;
        uint16_t *c = part->copy == NULL ? NULL : part->copy + begin;

        if (part->grad_is_bf16)
            (c == NULL ? update_bf16 : update_bf16_copy)(p, (const uint16_t *)part->grad + begin, m, v, c, pass->one, pass->zero, n);
        else
            (c == NULL ? update_f32 : update_f32_copy)(p, (const float *)part->grad + begin, m, v, c, pass->one, pass->zero, n);
    }
}

/* The sum of words modulo 2^64. */
PER_ISA static uint64_t sum_words(const uint64_t *restrict words, int64_t n)
{
    uint64_t lanes[2 * LANES] = {0}, sum = 0;
    int64_t i = 0;

    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int64_t j = 0; j < 2 * LANES; j++)
            lanes[j] += words[i + j];
    for (; i < n; i++)
        sum += words[i];
    for (int64_t j = 0; j < 2 * LANES; j++)
        sum += lanes[j];
    return sum;
}

static void read_body(void *arg, int64_t first, int64_t last)
{
    struct pass *pass = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t begin, n;
        const struct stream_part *part = find(pass, chunk, &begin, &n);
        uint64_t sum = sum_words((const uint64_t *)part->grad + begin, n);

        memcpy(&pass->sums[chunk], &sum, sizeof sum);
    }
}

/* Sets the number of threads, which should equal the size of the process's own pool. */
DSC_API dsc_status stream_resize(int32_t n_threads)
{
    return dsc_pool_resize(n_threads);
}

/* Finds the pool, and cuts the parts into chunks. DSC_ENOMEM if there is no memory for the plan of 16 bytes a chunk. */
static dsc_status open_pass(struct pass *pass, struct dsc_par *out_par, int64_t *out_n_chunks)
{
    int64_t n_chunks = 0;
    dsc_status status = dsc_pool_par(out_par);

    if (status != DSC_OK)
        return status;
    pass->first_chunk = malloc((size_t)(pass->n_parts + 1) * sizeof *pass->first_chunk);
    if (pass->first_chunk == NULL)
        return DSC_ENOMEM;
    for (int64_t i = 0; i < pass->n_parts; i++) {
        pass->first_chunk[i] = n_chunks;
        n_chunks += (pass->parts[i].n_elems + CHUNK_ELEMS - 1) / CHUNK_ELEMS;
    }
    pass->sums = calloc((size_t)n_chunks + 1, sizeof *pass->sums);
    if (pass->sums == NULL) {
        free(pass->first_chunk);
        return DSC_ENOMEM;
    }
    *out_n_chunks = n_chunks;
    return DSC_OK;
}

static double close_pass(struct pass *pass, int64_t n_chunks)
{
    double sumsq = 0;

    for (int64_t chunk = 0; chunk < n_chunks; chunk++)
        sumsq += pass->sums[chunk];
    free(pass->sums);
    free(pass->first_chunk);
    return sumsq;
}

/* Reads the n_elems words of 8 bytes at the gradient of each part, and nothing else. *out_sum: theirs, modulo 2^64. */
DSC_API dsc_status stream_read(const struct stream_part *parts, int64_t n_parts, uint64_t *out_sum)
{
    struct pass pass = {.parts = parts, .n_parts = n_parts};
    struct dsc_par par;
    int64_t n_chunks;
    dsc_status status = open_pass(&pass, &par, &n_chunks);

    if (status != DSC_OK)
        return status;
    if (n_chunks > 0)
        par.run(par.ctx, n_chunks, read_body, &pass);
    *out_sum = 0;
    for (int64_t chunk = 0; chunk < n_chunks; chunk++) {
        uint64_t sum;

        memcpy(&sum, &pass.sums[chunk], sizeof sum);
        *out_sum += sum;
    }
    close_pass(&pass, 0);
    return DSC_OK;
}

/*
 * With with_norm, a first pass reads all gradients. The main pass reads the gradient, reads and writes the parameter
 * and both states, and writes the copy of each element. Pass one = 1 and zero = 0. *out_sumsq is the sum of the squares
 * of the gradients (0 without the norm).
 */
DSC_API dsc_status stream_step(const struct stream_part *parts, int64_t n_parts, int32_t with_norm, float one, float zero, double *out_sumsq)
{
    struct pass pass = {.parts = parts, .n_parts = n_parts, .one = one, .zero = zero};
    struct dsc_par par;
    int64_t n_chunks;
    dsc_status status = open_pass(&pass, &par, &n_chunks);

    if (status != DSC_OK)
        return status;
    if (with_norm && n_chunks > 0)
        par.run(par.ctx, n_chunks, norm_body, &pass);
    if (n_chunks > 0)
        par.run(par.ctx, n_chunks, update_body, &pass);
    *out_sumsq = close_pass(&pass, n_chunks);
    return DSC_OK;
}
