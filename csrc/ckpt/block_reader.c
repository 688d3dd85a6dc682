/*
 * Reads a block file, or the blocks of it that are asked for: requests run ahead through a ring, and each block is
 * checked before anything is taken from it.
 */
#include "ckpt/blocks.h"

#include "base/fail.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Consecutive blocks that are read at once. */
struct request {
    dsc_aio_id id;
    int64_t first; /* block */
    int64_t n_blocks;
    int64_t slot; /* the first block's; a slot is the room for one block in the ring */
};

struct reader {
    const struct dsc_block_file *about;
    size_t block_bytes;
    int64_t n_blocks;
    dsc_aio *aio;
    dsc_aio_file *file;
    unsigned char *memory;
    struct request *requests; /* a ring of n_slots entries, in order of submission */
    int64_t oldest;
    int64_t n_requests;
    int64_t max_blocks; /* of one request */
    int64_t n_slots;
    int64_t next_slot;
    int64_t n_free;
    int64_t n_bytes_read;
};

/* The user of a read: chooses the blocks, and takes each. */
struct visitor {
    void *ctx;
    /*
     * The next run of blocks [*out_first, *out_end), ascending and apart from one another; false when there are no
     * more.
     */
    bool (*next)(void *ctx, int64_t *out_first, int64_t *out_end);
    /* n_bytes of a block; it matches its checksum, or there is none, when is_good. Called in ascending order. */
    dsc_status (*take)(void *ctx, int64_t block, const unsigned char *data, size_t n_bytes, bool is_good);
};

static size_t bytes_of_block(const struct reader *reader, int64_t block)
{
    int64_t n_left = reader->about->n_bytes - block * (int64_t)reader->block_bytes;

    return n_left < (int64_t)reader->block_bytes ? (size_t)n_left : reader->block_bytes;
}

static dsc_status check_file(const struct dsc_block_file *file, const struct dsc_block_config *config)
{
    if (file == NULL || file->path == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", file == NULL ? "file" : "file.path");
    DSC_TRY(dsc_block_config_check(config));
    if (file->n_bytes < 0)
        return dsc_fail(DSC_EINVAL, "n_bytes is %" PRId64 ", must not be negative", file->n_bytes);

    int64_t n_blocks =
        file->n_bytes / (int64_t)config->block_bytes + (file->n_bytes % (int64_t)config->block_bytes != 0);

    if (file->n_crcs != (file->crcs == NULL ? 0 : n_blocks))
        return dsc_fail(DSC_EINVAL, "n_crcs is %" PRId64 ", and %" PRId64 " bytes are %" PRId64 " blocks of %zu",
                        file->n_crcs, file->n_bytes, n_blocks, config->block_bytes);
    return DSC_OK;
}

static void close_reader(struct reader *reader)
{
    dsc_block_ring_destroy(reader->aio, reader->memory); /* first: it waits for transfers that use file and memory */
    (void)dsc_aio_close(reader->file);                   /* nothing has been written */
    free(reader->requests);
}

static dsc_status open_reader(const struct dsc_block_file *about, const struct dsc_block_config *config,
                              struct reader *reader)
{
    int64_t max_blocks = (int64_t)(config->buffer_bytes / config->block_bytes);
    int64_t n_bytes = -1;

    *reader = (struct reader){
        .about = about, .block_bytes = config->block_bytes, .max_blocks = max_blocks > 0 ? max_blocks : 1};
    reader->n_blocks =
        about->n_bytes / (int64_t)config->block_bytes + (about->n_bytes % (int64_t)config->block_bytes != 0);
    reader->n_slots = reader->max_blocks * config->n_buffers;
    if (reader->n_slots > reader->n_blocks) /* a small file needs no large ring */
        reader->n_slots = reader->n_blocks > 0 ? reader->n_blocks : 1;
    reader->n_free = reader->n_slots;
    DSC_TRY(dsc_aio_open(about->path, DSC_AIO_READ, true, &reader->file));

    dsc_status status = dsc_aio_file_bytes(reader->file, &n_bytes);

    if (status == DSC_OK && n_bytes != about->n_bytes)
        status =
            dsc_fail(DSC_ECORRUPT, "the file has %" PRId64 " bytes and should have %" PRId64, n_bytes, about->n_bytes);
    if (status == DSC_OK) {
        reader->requests = calloc((size_t)reader->n_slots, sizeof *reader->requests);
        if (reader->requests == NULL)
            status = dsc_fail(DSC_ENOMEM, "no memory for %" PRId64 " requests", reader->n_slots);
        else
            status = dsc_block_ring_create(config->backend, (size_t)reader->n_slots * reader->block_bytes, &reader->aio,
                                           &reader->memory);
    }
    if (status != DSC_OK)
        close_reader(reader);
    return status;
}

/* As much of [first, end) as the ring has room for in one piece; *out_n_blocks is 0 when it is full. */
static dsc_status submit(struct reader *reader, int64_t first, int64_t end, int64_t *out_n_blocks)
{
    int64_t n_blocks = end - first;

    if (n_blocks > reader->max_blocks)
        n_blocks = reader->max_blocks;
    if (n_blocks > reader->n_free)
        n_blocks = reader->n_free;
    if (n_blocks > reader->n_slots - reader->next_slot)
        n_blocks = reader->n_slots - reader->next_slot;
    *out_n_blocks = n_blocks;
    if (n_blocks == 0)
        return DSC_OK;

    struct request *request = &reader->requests[(reader->oldest + reader->n_requests) % reader->n_slots];
    size_t n_bytes = (size_t)(n_blocks - 1) * reader->block_bytes + bytes_of_block(reader, first + n_blocks - 1);

    *request = (struct request){.first = first, .n_blocks = n_blocks, .slot = reader->next_slot};
    DSC_TRY(dsc_aio_submit_read(reader->aio, reader->file, first * (int64_t)reader->block_bytes,
                                reader->memory + (size_t)request->slot * reader->block_bytes, n_bytes, &request->id));
    reader->n_requests++;
    reader->n_free -= n_blocks;
    reader->next_slot = (reader->next_slot + n_blocks) % reader->n_slots;
    reader->n_bytes_read += (int64_t)n_bytes;
    return DSC_OK;
}

/* Waits for the oldest request, checks its blocks and hands them out. */
static dsc_status take_oldest(struct reader *reader, const struct visitor *visitor)
{
    struct request request = reader->requests[reader->oldest];
    const unsigned char *data = reader->memory + (size_t)request.slot * reader->block_bytes;
    int64_t n_bytes = 0;

    DSC_TRY(dsc_aio_wait(reader->aio, request.id, &n_bytes));
    for (int64_t block = request.first; block < request.first + request.n_blocks; block++) {
        size_t block_bytes = bytes_of_block(reader, block);

        if (n_bytes < (int64_t)block_bytes) /* it was long enough when it was opened */
            return dsc_fail(DSC_ECORRUPT, "the file ends in block %" PRId64 ", it was made shorter while it was read",
                            block);

        bool is_good = reader->about->crcs == NULL || dsc_crc32c(0, data, block_bytes) == reader->about->crcs[block];

        DSC_TRY(visitor->take(visitor->ctx, block, data, block_bytes, is_good));
        data += block_bytes;
        n_bytes -= (int64_t)block_bytes;
    }
    reader->oldest = (reader->oldest + 1) % reader->n_slots;
    reader->n_requests--;
    reader->n_free += request.n_blocks;
    return DSC_OK;
}

static dsc_status read_all(struct reader *reader, const struct visitor *visitor)
{
    int64_t first = 0;
    int64_t end = 0;
    bool has_more = visitor->next(visitor->ctx, &first, &end);

    while (has_more || reader->n_requests > 0) {
        int64_t n_blocks = 1;

        while (has_more && n_blocks > 0) {
            DSC_TRY(submit(reader, first, end, &n_blocks));
            first += n_blocks;
            if (first == end)
                has_more = visitor->next(visitor->ctx, &first, &end);
        }
        DSC_TRY(take_oldest(reader, visitor));
    }
    return DSC_OK;
}

/* The copies, as a visitor. */
struct scatter {
    const struct dsc_block_copy *copies; /* by offset */
    int64_t n_copies;
    int64_t n_listed; /* copies whose blocks next() has handed out, ... */
    int64_t listed;   /* ... which are those below this one */
    int64_t n_done;   /* leading copies that have been made whole */
    int64_t block_bytes;
    int64_t bad_block; /* -1 as long as there is none */
};

static bool next_run(void *ctx, int64_t *out_first, int64_t *out_end)
{
    struct scatter *scatter = ctx;
    int64_t first = -1;

    for (; scatter->n_listed < scatter->n_copies; scatter->n_listed++) {
        const struct dsc_block_copy *copy = &scatter->copies[scatter->n_listed];
        int64_t begin = copy->offset / scatter->block_bytes;
        int64_t end = (copy->offset + copy->n_bytes - 1) / scatter->block_bytes + 1;

        if (copy->n_bytes == 0 || end <= scatter->listed)
            continue;
        if (begin < scatter->listed)
            begin = scatter->listed;
        if (first < 0)
            first = begin;
        else if (begin > scatter->listed)
            break; /* apart from the run: the next call's */
        scatter->listed = end;
    }
    *out_first = first;
    *out_end = scatter->listed;
    return first >= 0;
}

static dsc_status copy_block(void *ctx, int64_t block, const unsigned char *data, size_t n_bytes, bool is_good)
{
    struct scatter *scatter = ctx;
    int64_t begin = block * scatter->block_bytes;
    int64_t end = begin + (int64_t)n_bytes;

    if (!is_good) {
        scatter->bad_block = block;
        return dsc_fail(DSC_ECORRUPT,
                        "block %" PRId64 " (bytes %" PRId64 " to %" PRId64 ") does not match its checksum", block,
                        begin, end - 1);
    }
    while (scatter->n_done < scatter->n_copies &&
           scatter->copies[scatter->n_done].offset + scatter->copies[scatter->n_done].n_bytes <= begin)
        scatter->n_done++;
    for (int64_t i = scatter->n_done; i < scatter->n_copies && scatter->copies[i].offset < end; i++) {
        const struct dsc_block_copy *copy = &scatter->copies[i];
        int64_t from = copy->offset > begin ? copy->offset : begin;
        int64_t to = copy->offset + copy->n_bytes < end ? copy->offset + copy->n_bytes : end;

        if (from < to)
            memcpy((unsigned char *)copy->into + (from - copy->offset), data + (from - begin), (size_t)(to - from));
    }
    return DSC_OK;
}

static int by_offset(const void *a, const void *b)
{
    int64_t x = ((const struct dsc_block_copy *)a)->offset;
    int64_t y = ((const struct dsc_block_copy *)b)->offset;

    return (x > y) - (x < y);
}

dsc_status dsc_blocks_read(const struct dsc_block_file *file, const struct dsc_block_config *config,
                           struct dsc_block_copy *copies, int64_t n_copies, int64_t *out_n_bytes_read,
                           int64_t *out_bad_block)
{
    bool is_empty = true;

    DSC_TRY(check_file(file, config));
    if (n_copies < 0 || (copies == NULL && n_copies > 0) || out_bad_block == NULL)
        return dsc_fail(DSC_EINVAL, "n_copies is %" PRId64 ", and copies or out_bad_block may not be NULL", n_copies);
    for (int64_t i = 0; i < n_copies; i++) {
        if (copies[i].offset < 0 || copies[i].n_bytes < 0 || copies[i].offset > file->n_bytes ||
            copies[i].n_bytes > file->n_bytes - copies[i].offset)
            return dsc_fail(DSC_EINVAL,
                            "copies[%" PRId64 "] is %" PRId64 " bytes at offset %" PRId64 " of a file of %" PRId64, i,
                            copies[i].n_bytes, copies[i].offset, file->n_bytes);
        if (copies[i].into == NULL && copies[i].n_bytes > 0)
            return dsc_fail(DSC_EINVAL, "copies[%" PRId64 "].into is NULL", i);
        is_empty = is_empty && copies[i].n_bytes == 0;
    }

    int64_t n_bytes_read = 0;

    if (!is_empty) {
        struct scatter scatter = {
            .copies = copies, .n_copies = n_copies, .block_bytes = (int64_t)config->block_bytes, .bad_block = -1};
        const struct visitor visitor = {&scatter, next_run, copy_block};
        struct reader reader;

        qsort(copies, (size_t)n_copies, sizeof *copies, by_offset);
        *out_bad_block = -1;
        DSC_TRY(open_reader(file, config, &reader));

        dsc_status status = read_all(&reader, &visitor);

        n_bytes_read = reader.n_bytes_read;
        close_reader(&reader);
        *out_bad_block = scatter.bad_block;
        if (status != DSC_OK)
            return status;
    }
    if (out_n_bytes_read != NULL)
        *out_n_bytes_read = n_bytes_read;
    return DSC_OK;
}

/* All blocks, as a visitor. */
struct audit {
    int64_t n_blocks;
    bool is_listed;
    int64_t *bad;
    int64_t n_bad;
};

static bool next_whole(void *ctx, int64_t *out_first, int64_t *out_end)
{
    struct audit *audit = ctx;

    if (audit->is_listed || audit->n_blocks == 0)
        return false;
    audit->is_listed = true;
    *out_first = 0;
    *out_end = audit->n_blocks;
    return true;
}

static dsc_status note_block(void *ctx, int64_t block, const unsigned char *data, size_t n_bytes, bool is_good)
{
    struct audit *audit = ctx;

    (void)data;
    (void)n_bytes;
    if (!is_good)
        audit->bad[audit->n_bad++] = block;
    return DSC_OK;
}

dsc_status dsc_blocks_verify(const struct dsc_block_file *file, const struct dsc_block_config *config, int64_t *out_bad,
                             int64_t *out_n_bad)
{
    DSC_TRY(check_file(file, config));
    if (file->n_bytes > 0 && (file->crcs == NULL || out_bad == NULL))
        return dsc_fail(DSC_EINVAL, "%s is NULL", file->crcs == NULL ? "crcs" : "out_bad");
    if (out_n_bad == NULL)
        return dsc_fail(DSC_EINVAL, "out_n_bad is NULL");

    struct reader reader;

    DSC_TRY(open_reader(file, config, &reader));

    struct audit audit = {.n_blocks = reader.n_blocks, .bad = out_bad};
    dsc_status status = read_all(&reader, &(struct visitor){&audit, next_whole, note_block});

    close_reader(&reader);
    if (status == DSC_OK)
        *out_n_bad = audit.n_bad;
    return status;
}
