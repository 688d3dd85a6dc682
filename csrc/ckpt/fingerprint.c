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
 * Chunks so long that the shift to the tensor's end (a microsecond) does not count beside the pass over the bytes, and
 * so short that threads end together: 528 kB, a multiple of what the CRC instruction takes in three long streams.
 */
#define CHUNK_BYTES (INT64_C(43) * 12288)

/* A part as runs: elements [i * run_elems, (i + 1) * run_elems) of its box lie together in the tensor, too. */
struct runs {
    const struct dsc_crc32c_part *of;
    struct dsc_part part;
    int32_t n_outer; /* dimensions along which runs are counted */
    int64_t run_elems;
    int64_t n_elems; /* of the tensor */
};

struct work {
    struct dsc_crc32c_part *parts;
    int64_t n_parts;
};

/* The register after the bytes, from zero, without inversion. */
static uint32_t raw_crc(const unsigned char *data, int64_t n_bytes)
{
    return ~dsc_crc32c(UINT32_MAX, data, (size_t)n_bytes);
}

static int64_t chunk_elems_of(const struct dsc_crc32c_part *part)
{
    return part->elem_bytes < CHUNK_BYTES ? CHUNK_BYTES / part->elem_bytes : 1;
}

static struct runs runs_of(const struct dsc_crc32c_part *of)
{
    struct runs runs = {.of = of, .part = dsc_part_at(of->part, of->n_dims), .run_elems = 1, .n_elems = 1};

    for (int32_t d = 0; d < of->n_dims; d++)
        runs.n_elems *= of->shape[d];
    runs.n_outer = of->n_dims; /* a run takes in dimensions from the last one on, up to the first that is not whole */
    while (runs.n_outer > 0) {
        runs.n_outer--;
        runs.run_elems *= runs.part.size[runs.n_outer];
        if (runs.part.size[runs.n_outer] != of->shape[runs.n_outer])
            break;
    }
    return runs;
}

/* The element of the tensor that is element i of the box. */
static int64_t elem_of(const struct runs *runs, int64_t i)
{
    const int64_t *shape = runs->of->shape;
    int64_t run = i / runs->run_elems;
    int64_t at = i % runs->run_elems;
    int64_t stride = runs->n_elems;
    int64_t inner = 1; /* runs of one step along the dimension */

    for (int32_t d = 0; d < runs->n_outer; d++)
        inner *= runs->part.size[d];
    for (int32_t d = 0; d < runs->n_outer; d++) {
        stride /= shape[d];
        inner /= runs->part.size[d];
        at += (runs->part.start[d] + run / inner) * stride;
        run %= inner;
    }
    if (runs->of->n_dims > 0) /* the box's start along the first dimension of the run; it is whole along the others */
        at += runs->part.start[runs->n_outer] * (stride / shape[runs->n_outer]);
    return at;
}

/* The contribution of one chunk of a part, which has elements. */
static uint32_t crc_of_chunk(const struct dsc_crc32c_part *part, int64_t chunk)
{
    const struct runs runs = runs_of(part);
    int64_t first = chunk * chunk_elems_of(part);
    int64_t at = runs.part.begin + first;
    int64_t end = runs.part.end - at > chunk_elems_of(part) ? at + chunk_elems_of(part) : runs.part.end;
    const unsigned char *p = (const unsigned char *)part->data + first * part->elem_bytes;
    uint32_t crc = 0;
    uint32_t power = 0;
    int64_t power_elems = -1; /* distances repeat from run to run */
    int64_t done = 0;         /* the end of the bytes in crc */

    while (at < end) {
        int64_t n = runs.run_elems - at % runs.run_elems;
        int64_t begin = elem_of(&runs, at);

        if (n > end - at)
            n = end - at;
        if (crc != 0) {
            if (power_elems != begin + n - done) {
                power_elems = begin + n - done;
                power = dsc_crc32c_power((uint64_t)(power_elems * part->elem_bytes));
            }
            crc = dsc_crc32c_multiply(crc, power);
        }
        crc ^= raw_crc(p, n * part->elem_bytes);
        done = begin + n;
        p += n * part->elem_bytes;
        at += n;
    }
    return dsc_crc32c_multiply(crc, dsc_crc32c_power((uint64_t)((runs.n_elems - done) * part->elem_bytes)));
}

/* The last part whose first chunk is not above the chunk; parts without elements have no chunk. */
static int64_t part_of_chunk(const struct work *work, int64_t chunk)
{
    int64_t low = 0;
    int64_t high = work->n_parts - 1;

    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;

        if (work->parts[middle].first_chunk <= chunk)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static void crc_of_chunks(void *arg, int64_t first, int64_t last)
{
    struct work *work = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_crc32c_part *part = &work->parts[part_of_chunk(work, chunk)];

        /* Chunks of one part may end on several threads. XOR does not depend on their order. */
        __atomic_xor_fetch(&part->sum, crc_of_chunk(part, chunk - part->first_chunk), __ATOMIC_RELAXED);
    }
}

static dsc_status check(const struct dsc_crc32c_part *part, int64_t index)
{
    int64_t n_elems = 0;
    int64_t n_bytes = 0;
    dsc_status status = dsc_shape_check(part->shape, part->n_dims, &n_elems);

    if (status == DSC_OK)
        status = dsc_part_check(part->shape, part->n_dims, part->part, index);
    if (status != DSC_OK)
        return status;
    if (part->elem_bytes <= 0)
        return dsc_fail(DSC_EINVAL, "pieces[%" PRId64 "]: elem_bytes is %" PRId64 ", must be above 0", index,
                        part->elem_bytes);
    if (__builtin_mul_overflow(n_elems, part->elem_bytes, &n_bytes))
        return dsc_fail(DSC_EOVERFLOW, "pieces[%" PRId64 "]: the bytes of the shape do not fit int64_t", index);
    if (part->data == NULL && part->part[2 * part->n_dims + 1] > 0)
        return dsc_fail(DSC_EINVAL, "pieces[%" PRId64 "]: data is NULL", index);
    return DSC_OK;
}

dsc_status dsc_crc32c_parts(struct dsc_crc32c_part *parts, int64_t n_parts, const struct dsc_par *par)
{
    struct work work = {.parts = parts, .n_parts = n_parts};
    int64_t n_chunks = 0;

    if (n_parts < 0 || (parts == NULL && n_parts > 0))
        return dsc_fail(DSC_EINVAL, "n_parts is %" PRId64 ", and parts is %s", n_parts, parts == NULL ? "NULL" : "set");
    for (int64_t i = 0; i < n_parts; i++) {
        dsc_status status = check(&parts[i], i);

        if (status != DSC_OK)
            return status;
    }
    for (int64_t i = 0; i < n_parts; i++) {
        int64_t n_elems = parts[i].part[2 * parts[i].n_dims + 1];

        parts[i].sum = 0;
        parts[i].first_chunk = n_chunks;
        n_chunks += n_elems > 0 ? (n_elems - 1) / chunk_elems_of(&parts[i]) + 1 : 0;
    }
    if (n_chunks > 0)
        dsc_par_run(par, n_chunks, crc_of_chunks, &work);
    return DSC_OK;
}

uint32_t dsc_crc32c_of_parts(uint32_t sum, uint64_t n_bytes)
{
    /* The register of dsc_crc32c begins with all bits set, and is inverted at the end. */
    return ~(sum ^ dsc_crc32c_multiply(UINT32_MAX, dsc_crc32c_power(n_bytes)));
}
