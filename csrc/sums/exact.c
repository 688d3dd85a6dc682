/*
 * Exact sums of squares. A block whose exponents lie close together is summed in f64 without rounding (cpu/squares.c).
 * Other blocks are first split by exponents.
 */
#include "dsc/sums.h"

#include "base/fail.h"
#include "base/half.h"
#include "cpu/spans.h"
#include "cpu/table.h"

#include <stdatomic.h>
#include <string.h>

#define LIMB_BITS 32
#define LIMB_MASK UINT64_C(0xffffffff)
#define INFINITE_FIELD 255

struct total {
    int64_t limbs[DSC_EXACT_LIMBS];
    int64_t n_nonfinite;
};

/* Adds value * 2^(position + DSC_EXACT_LOWEST). */
static void add_word(struct total *total, uint64_t value, int32_t position)
{
    unsigned __int128 shifted = (unsigned __int128)value << position % LIMB_BITS;
    int64_t *limb = &total->limbs[position / LIMB_BITS];

    for (; shifted != 0; shifted >>= LIMB_BITS)
        *limb++ += (int64_t)((uint64_t)shifted & LIMB_MASK);
}

/* Adds what square_sums_f32 has found. */
static void add_sums(struct total *total, const int64_t sums[2], int32_t top)
{
    /* Both together are not negative, though the fine part may be. */
    unsigned __int128 value =
        (unsigned __int128)(((__int128)sums[0] << (DSC_SQUARES_COARSE - DSC_SQUARES_FINE)) + sums[1]);
    int32_t position = 2 * top + DSC_SQUARES_FINE - DSC_EXACT_LOWEST;

    if (position < 0) { /* no square has bits that far down */
        value >>= -position;
        position = 0;
    }
    add_word(total, (uint64_t)value, position);
    if (value >> 64 != 0)
        add_word(total, (uint64_t)(value >> 64), position + 64);
}

/* Subnormal elements are multiples of the least f32. Integers, because a processor may take such elements as zero. */
static void add_subnormal(struct total *total, int64_t n, const dsc_f32 *src)
{
    uint64_t sum = 0;

    for (int64_t i = 0; i < n; i++) {
        uint64_t magnitude = dsc_f32_bits(src[i]) & 0x7fffffffu;

        sum += magnitude * magnitude;
    }
    add_word(total, sum, 0);
}

static int64_t count_nonfinite(int64_t n, const dsc_f32 *src)
{
    int64_t count = 0;

    for (int64_t i = 0; i < n; i++)
        count += (dsc_f32_bits(src[i]) & 0x7f800000u) == 0x7f800000u;
    return count;
}

/* The least magnitude, as bits, that is summed together with elements of exponent field `top`. */
static int32_t floor_of(int32_t top)
{
    int32_t field = top > DSC_SQUARES_WINDOW ? top - DSC_SQUARES_WINDOW : 1;

    return (top == INFINITE_FIELD ? top : field) << 23;
}

static void add_block(const struct dsc_kernels *kernels, struct total *total, int64_t n, const dsc_f32 *block)
{
    DSC_ALIGNED dsc_f32 high[DSC_BLOCK_ELEMS];
    DSC_ALIGNED dsc_f32 low[DSC_BLOCK_ELEMS];
    int32_t least = 0;
    int32_t most = 0;

    for (kernels->square_range_f32(n, block, &least, &most); most > 0;
         kernels->square_range_f32(n, block, &least, &most)) {
        int32_t top = most >> 23;
        int32_t floor = floor_of(top);
        bool is_rest = least >= floor || top == 0;
        const dsc_f32 *summed = block;
        int64_t sums[2];

        if (!is_rest) {
            kernels->split_f32(n, block, floor, high, low);
            summed = high;
            block = low;
        }
        if (top == 0) {
            add_subnormal(total, n, summed);
        } else if (top == INFINITE_FIELD) {
            total->n_nonfinite += count_nonfinite(n, summed);
        } else {
            kernels->square_sums_f32(n, summed, top, sums);
            add_sums(total, sums, top);
        }
        if (is_rest)
            return;
    }
}

void dsc_exact_carry(int64_t limbs[DSC_EXACT_LIMBS])
{
    for (int32_t i = 0; i + 1 < DSC_EXACT_LIMBS; i++) {
        limbs[i + 1] += limbs[i] >> LIMB_BITS; /* arithmetic: negative limbs borrow */
        limbs[i] &= (int64_t)LIMB_MASK;
    }
}

struct squares_job {
    const struct dsc_kernels *kernels;
    const struct dsc_span *spans;
    struct dsc_list list;
    /* Integers: the order of additions does not matter. */
    _Atomic int64_t limbs[DSC_EXACT_LIMBS];
    _Atomic int64_t n_nonfinite;
};

static void squares_chunks(void *arg, int64_t first, int64_t last)
{
    struct squares_job *job = arg;
    struct total total = {0};
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;

        while (dsc_cursor_next(&cursor, &piece)) {
            const struct dsc_span *span = &job->spans[piece.array];
            size_t elem_bytes = dsc_dtype_bytes(span->dtype);
            const char *data = (const char *)span->data + (size_t)piece.begin * elem_bytes;

            for (int64_t n_left = piece.n_elems; n_left > 0; n_left -= dsc_block_of(n_left)) {
                int64_t n = dsc_block_of(n_left);

                dsc_prefetch_ahead(data, (size_t)n * elem_bytes, (size_t)n_left * elem_bytes);
                add_block(job->kernels, &total, n, dsc_load_f32(job->kernels, span->dtype, data, n, scratch));
                data += (size_t)n * elem_bytes;
            }
        }
        dsc_exact_carry(total.limbs);
    }
    for (int32_t i = 0; i < DSC_EXACT_LIMBS; i++)
        atomic_fetch_add_explicit(&job->limbs[i], total.limbs[i], memory_order_relaxed);
    atomic_fetch_add_explicit(&job->n_nonfinite, total.n_nonfinite, memory_order_relaxed);
}

dsc_status dsc_exact_squares(const struct dsc_span *spans, int64_t n_spans, const struct dsc_par *par,
                             int64_t out_limbs[DSC_EXACT_LIMBS], int64_t *out_n_nonfinite)
{
    struct squares_job job = {.spans = spans};

    if (out_limbs == NULL || out_n_nonfinite == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", out_limbs == NULL ? "out_limbs" : "out_n_nonfinite");
    DSC_TRY(dsc_check_spans(spans, n_spans, "spans"));
    DSC_TRY(dsc_list_of_spans(&job.list, spans, n_spans));
    job.kernels = dsc_kernels_get();
    dsc_par_run(par, job.list.n_chunks, squares_chunks, &job);
    for (int32_t i = 0; i < DSC_EXACT_LIMBS; i++)
        out_limbs[i] = job.limbs[i];
    dsc_exact_carry(out_limbs);
    *out_n_nonfinite = job.n_nonfinite;
    return DSC_OK;
}
