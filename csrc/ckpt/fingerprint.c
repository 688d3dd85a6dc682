/*
 * The CRC32C of a tensor from parts of it that lie apart.
 *
 * A register that begins at zero and is not inverted is linear in the bytes. So a byte string is the XOR of its pieces,
 * each with zeros before and behind. Zeros before a piece leave the register at zero; n zeros behind it multiply it by
 * x^(8n) mod P.
 */
#include "ckpt/crc32c.h"
#include "ckpt/part.h"

#include "base/fail.h"
#include "base/par.h"
#include "dsc/ckpt.h"

#include <inttypes.h>

/*
 * Chunks so long that the shift to the tensor's end (a few microseconds) does not count beside the pass over the bytes,
 * and so many that threads end together.
 */
#define MIN_CHUNK_BYTES (INT64_C(512) << 10)
#define MAX_CHUNKS 32

/* A part as runs: elements [i * run_elems, (i + 1) * run_elems) of its box lie together in the tensor, too. */
struct work {
    const int64_t *shape;
    struct dsc_part part;
    int32_t n_dims;
    int32_t n_outer; /* dimensions along which runs are counted */
    int64_t run_elems;
    int64_t elem_bytes;
    int64_t n_elems; /* of the tensor */
    const unsigned char *data;
    int64_t chunk_elems;
    uint32_t sums[MAX_CHUNKS];
};

/* The register after the bytes, from zero, without inversion. */
static uint32_t raw_crc(const unsigned char *data, int64_t n_bytes)
{
    return ~dsc_crc32c(UINT32_MAX, data, (size_t)n_bytes);
}

/* The element of the tensor that is element i of the box. */
static int64_t elem_of(const struct work *work, int64_t i)
{
    int64_t run = i / work->run_elems;
    int64_t at = i % work->run_elems;
    int64_t stride = work->n_elems;
    int64_t inner = 1; /* runs of one step along the dimension */

    for (int32_t d = 0; d < work->n_outer; d++)
        inner *= work->part.size[d];
    for (int32_t d = 0; d < work->n_outer; d++) {
        stride /= work->shape[d];
        inner /= work->part.size[d];
        at += (work->part.start[d] + run / inner) * stride;
        run %= inner;
    }
    if (work->n_dims > 0) /* the box's start along the first dimension of the run; it is whole along the others */
        at += work->part.start[work->n_outer] * (stride / work->shape[work->n_outer]);
    return at;
}

static void crc_of_chunks(void *arg, int64_t first, int64_t last)
{
    struct work *work = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        int64_t at = work->part.begin + chunk * work->chunk_elems;
        int64_t end = work->part.end - at > work->chunk_elems ? at + work->chunk_elems : work->part.end;
        const unsigned char *p = work->data + chunk * work->chunk_elems * work->elem_bytes;
        uint32_t crc = 0;
        uint32_t power = 0;
        int64_t power_elems = -1; /* distances repeat from run to run */
        int64_t done = 0;         /* the end of the bytes in crc */

        while (at < end) {
            int64_t n = work->run_elems - at % work->run_elems;
            int64_t begin = elem_of(work, at);

            if (n > end - at)
                n = end - at;
            if (crc != 0) {
                if (power_elems != begin + n - done) {
                    power_elems = begin + n - done;
                    power = dsc_crc32c_power((uint64_t)(power_elems * work->elem_bytes));
                }
                crc = dsc_crc32c_multiply(crc, power);
            }
            crc ^= raw_crc(p, n * work->elem_bytes);
            done = begin + n;
            p += n * work->elem_bytes;
            at += n;
        }
        work->sums[chunk] =
            dsc_crc32c_multiply(crc, dsc_crc32c_power((uint64_t)((work->n_elems - done) * work->elem_bytes)));
    }
}

dsc_status dsc_crc32c_part(const int64_t *shape, int32_t n_dims, const int64_t *part, int64_t elem_bytes,
                           const void *data, const struct dsc_par *par, uint32_t *out)
{
    struct work work = {.shape = shape, .n_dims = n_dims, .elem_bytes = elem_bytes, .data = data, .run_elems = 1};
    int64_t n_bytes = 0;
    int64_t n_chunks = 0;
    uint32_t sum = 0;
    dsc_status status = dsc_shape_check(shape, n_dims, &work.n_elems);

    if (status == DSC_OK)
        status = dsc_part_check(shape, n_dims, part, -1);
    if (status != DSC_OK)
        return status;
    if (elem_bytes <= 0)
        return dsc_fail(DSC_EINVAL, "elem_bytes is %" PRId64 ", must be above 0", elem_bytes);
    if (__builtin_mul_overflow(work.n_elems, elem_bytes, &n_bytes))
        return dsc_fail(DSC_EOVERFLOW, "the bytes of the shape do not fit int64_t");
    work.part = dsc_part_at(part, n_dims);
    int64_t n_elems = work.part.end - work.part.begin;
    if (n_elems == 0) {
        *out = 0;
        return DSC_OK;
    }
    if (data == NULL)
        return dsc_fail(DSC_EINVAL, "data is NULL");
    work.n_outer = n_dims; /* a run takes in dimensions from the last one on, up to the first that is not whole */
    while (work.n_outer > 0) {
        work.n_outer--;
        work.run_elems *= work.part.size[work.n_outer];
        if (work.part.size[work.n_outer] != shape[work.n_outer])
            break;
    }
    work.chunk_elems = (n_elems - 1) / MAX_CHUNKS + 1;
    if (work.chunk_elems < MIN_CHUNK_BYTES / elem_bytes)
        work.chunk_elems = MIN_CHUNK_BYTES / elem_bytes;
    n_chunks = (n_elems - 1) / work.chunk_elems + 1;
    dsc_par_run(par, n_chunks, crc_of_chunks, &work);
    for (int64_t i = 0; i < n_chunks; i++)
        sum ^= work.sums[i];
    *out = sum;
    return DSC_OK;
}

uint32_t dsc_crc32c_of_parts(uint32_t sum, uint64_t n_bytes)
{
    /* The register of dsc_crc32c begins with all bits set, and is inverted at the end. */
    return ~(sum ^ dsc_crc32c_multiply(UINT32_MAX, dsc_crc32c_power(n_bytes)));
}
