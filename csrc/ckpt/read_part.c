/* Reads a part of a tensor from a file that holds the whole tensor. */
#include "dsc/ckpt.h"

#include "base/fail.h"
#include "ckpt/part.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/*
 * A read of the page cache costs about 0.4 us and 0.2 ns a byte, so up to this distance it is cheaper to read the bytes
 * between two runs than to call again. Longer runs are not read through the staging buffer, because the copy out of it
 * costs more than the call.
 */
#define MAX_GAP_BYTES 2048
#define MAX_STAGED_RUN_BYTES 2048
/* Within the second-level cache, and small enough for the stack of any thread. */
#define STAGING_BYTES (64 << 10)

/* A position among the runs of a part. */
struct walk {
    const struct dsc_part *part;
    int32_t cut; /* the last dimension that the box cuts; a run is contiguous from there on. -1: the box is whole */
    int64_t stride[DSC_RESHAPE_MAX_DIMS]; /* bytes in the file */
    int64_t index[DSC_RESHAPE_MAX_DIMS];  /* in the box, of dimensions before cut */
    int64_t row_offset;                   /* in the file, of the row's first byte in the box */
    int64_t row_bytes;
    int64_t within; /* bytes of the row that have been passed */
    int64_t n_left; /* bytes of the part that are still to come */
};

struct run {
    int64_t offset;
    int64_t n_bytes;
};

static void begin_walk(struct walk *walk, const struct dsc_part *part, const int64_t *shape, int32_t n_dims,
                       int64_t offset, int64_t elem_bytes)
{
    int64_t bytes = elem_bytes;

    *walk = (struct walk){.part = part, .cut = -1, .n_left = (part->end - part->begin) * elem_bytes};
    for (int32_t d = n_dims - 1; d >= 0; d--) {
        walk->stride[d] = bytes;
        bytes *= shape[d];
        if (walk->cut < 0 && part->size[d] != shape[d])
            walk->cut = d;
    }
    walk->row_offset = offset;
    walk->row_bytes = bytes;
    if (walk->cut >= 0) {
        walk->row_bytes = part->size[walk->cut] * walk->stride[walk->cut];
        walk->row_offset += part->start[walk->cut] * walk->stride[walk->cut];
    }

    int64_t row = part->begin * elem_bytes / walk->row_bytes;

    walk->within = part->begin * elem_bytes % walk->row_bytes;
    for (int32_t d = walk->cut - 1; d >= 0; d--) {
        walk->index[d] = row % part->size[d];
        row /= part->size[d];
        walk->row_offset += (part->start[d] + walk->index[d]) * walk->stride[d];
    }
}

/* The next run; of 0 bytes after the last one. */
static struct run run_at(const struct walk *walk)
{
    int64_t rest = walk->row_bytes - walk->within;

    return (struct run){walk->row_offset + walk->within, walk->n_left < rest ? walk->n_left : rest};
}

/* Goes behind the next run, which has n_bytes. */
static void pass_run(struct walk *walk, int64_t n_bytes)
{
    walk->n_left -= n_bytes;
    walk->within = 0;
    for (int32_t d = walk->cut - 1; d >= 0; d--) {
        walk->row_offset += walk->stride[d];
        if (++walk->index[d] < walk->part->size[d])
            break;
        walk->row_offset -= walk->part->size[d] * walk->stride[d];
        walk->index[d] = 0;
    }
}

static dsc_status read_all(int fd, struct run run, unsigned char *into, struct dsc_read_failure *out_failure)
{
    int64_t done = 0;

    while (done < run.n_bytes) {
        ssize_t n = pread(fd, into + done, (size_t)(run.n_bytes - done), run.offset + done);
        int err = n < 0 ? errno : 0;

        if (err == EINTR)
            continue;
        if (n > 0) {
            done += n;
            continue;
        }

        struct stat about;
        int64_t at = run.offset + done;

        if (n == 0 && fstat(fd, &about) == 0 && about.st_size < at)
            at = about.st_size; /* the end lies before the run */
        if (out_failure != NULL)
            *out_failure = (struct dsc_read_failure){run.offset, run.offset + run.n_bytes, at, err};
        if (n == 0)
            return dsc_fail(DSC_ECORRUPT, "the file ends at byte %" PRId64 ", and %" PRId64 " are needed", at,
                            run.offset + run.n_bytes);
        return dsc_fail(DSC_EIO, "bytes %" PRId64 " to %" PRId64 " cannot be read: %s", run.offset,
                        run.offset + run.n_bytes, strerror(err));
    }
    return DSC_OK;
}

/*
 * Finds the stretch of the file in which the next runs lie so near one another that one read is cheaper: at least one
 * run. Goes behind them. *out_n_runs: their number.
 */
static struct run pass_stretch(struct walk *walk, int64_t *out_n_runs)
{
    struct run stretch = run_at(walk);
    bool is_short = stretch.n_bytes <= MAX_STAGED_RUN_BYTES;

    pass_run(walk, stretch.n_bytes);
    for (*out_n_runs = 1; is_short; ++*out_n_runs) {
        struct run run = run_at(walk);
        int64_t end = run.offset + run.n_bytes;

        if (run.n_bytes == 0 || run.n_bytes > MAX_STAGED_RUN_BYTES || end - stretch.offset > STAGING_BYTES ||
            run.offset - (stretch.offset + stretch.n_bytes) > MAX_GAP_BYTES)
            break;
        stretch.n_bytes = end - stretch.offset;
        pass_run(walk, run.n_bytes);
    }
    return stretch;
}

static dsc_status read_runs(int fd, struct walk *walk, unsigned char *into, struct dsc_read_failure *out_failure)
{
    unsigned char staging[STAGING_BYTES];

    while (walk->n_left > 0) {
        struct walk again = *walk;
        int64_t n_runs;
        struct run stretch = pass_stretch(walk, &n_runs);

        if (n_runs == 1) {
            DSC_TRY(read_all(fd, stretch, into, out_failure));
            into += stretch.n_bytes;
            continue;
        }
        DSC_TRY(read_all(fd, stretch, staging, out_failure));
        for (; n_runs > 0; n_runs--) {
            struct run run = run_at(&again);

            memcpy(into, staging + (run.offset - stretch.offset), (size_t)run.n_bytes);
            into += run.n_bytes;
            pass_run(&again, run.n_bytes);
        }
    }
    return DSC_OK;
}

dsc_status dsc_part_read(int fd, int64_t offset, int64_t elem_bytes, const int64_t *shape, int32_t n_dims,
                         const int64_t *wanted, void *into, struct dsc_read_failure *out_failure)
{
    int64_t end = 0;

    DSC_TRY(dsc_shape_check(shape, n_dims, &end));
    if (wanted == NULL)
        return dsc_fail(DSC_EINVAL, "wanted is NULL");
    DSC_TRY(dsc_part_check(shape, n_dims, wanted, -1));
    if (elem_bytes <= 0 || offset < 0)
        return dsc_fail(DSC_EINVAL, "elem_bytes is %" PRId64 " and offset %" PRId64 ", must be at least 1 and 0",
                        elem_bytes, offset);
    if (__builtin_mul_overflow(end, elem_bytes, &end) || __builtin_add_overflow(end, offset, &end))
        return dsc_fail(DSC_EOVERFLOW, "the tensor's bytes from %" PRId64 " of the file do not fit int64_t", offset);

    struct dsc_part part = dsc_part_at(wanted, n_dims);
    struct walk walk;

    if (part.begin == part.end)
        return DSC_OK;
    if (into == NULL)
        return dsc_fail(DSC_EINVAL, "into is NULL");
    begin_walk(&walk, &part, shape, n_dims, offset, elem_bytes);
    return read_runs(fd, &walk, into, out_failure);
}
