/*
 * Writes a block file: bytes are copied into a ring of buffers and summed up on the way, while full buffers go to the
 * disk.
 */
#include "ckpt/blocks.h"

#include "base/fail.h"
#include "dsc/process.h"

#include <stdlib.h>

enum state {
    STATE_OPEN,
    STATE_FINISHED,
    STATE_FAILED /* reported; the file's contents are of no use */
};

struct dsc_block_writer {
    enum state state;
    struct dsc_process process;
    dsc_aio *aio;
    dsc_aio_file *file;
    unsigned char *memory;
    size_t buffer_bytes;
    int32_t n_buffers;
    dsc_aio_id *ids; /* each buffer's request in flight; 0: none */
    int32_t current; /* the buffer that is being filled; nothing of it is in flight once it holds a byte */
    size_t fill;     /* bytes in it */
    int64_t n_bytes; /* given so far */
    size_t block_bytes;
    size_t block_fill; /* bytes of the last block that crc covers */
    uint32_t crc;
    uint32_t *crcs; /* of whole blocks */
    int64_t n_crcs;
    int64_t crc_capacity;
};

static void close_writer(dsc_block_writer *writer)
{
    dsc_block_ring_destroy(writer->aio, writer->memory); /* first: it waits for transfers that use file and memory */
    writer->aio = NULL;
    writer->memory = NULL;
    (void)dsc_aio_close(writer->file); /* sync has reported its errors, or they no longer matter */
    writer->file = NULL;
    free(writer->ids);
    writer->ids = NULL;
}

dsc_status dsc_block_writer_create(const char *path, const struct dsc_block_config *config,
                                   dsc_block_writer **out_writer)
{
    if (path == NULL || out_writer == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", path == NULL ? "path" : "out_writer");
    DSC_TRY(dsc_block_config_check(config));

    size_t align = dsc_aio_alignment();
    struct dsc_process process;

    DSC_TRY(dsc_process_note(&process));

    dsc_block_writer *writer = calloc(1, sizeof *writer);

    if (writer == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a writer");
    writer->process = process;
    writer->block_bytes = config->block_bytes;
    writer->buffer_bytes = (config->buffer_bytes + align - 1) / align * align;
    writer->n_buffers = config->n_buffers;
    writer->ids = calloc((size_t)writer->n_buffers, sizeof *writer->ids);

    dsc_status status = writer->ids == NULL
                            ? dsc_fail(DSC_ENOMEM, "no memory for a writer")
                            : dsc_block_ring_create(config->backend, writer->buffer_bytes * (size_t)writer->n_buffers,
                                                    &writer->aio, &writer->memory);

    if (status == DSC_OK) /* last, so that no other failure leaves a file behind */
        status = dsc_aio_open(path, DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_EXCLUSIVE, true, &writer->file);
    if (status != DSC_OK) {
        close_writer(writer);
        free(writer);
        return status;
    }
    *out_writer = writer;
    return DSC_OK;
}

static dsc_status check_open(const dsc_block_writer *writer)
{
    DSC_TRY(dsc_process_check(&writer->process, "this writer"));
    if (writer->state == STATE_FINISHED)
        return dsc_fail(DSC_ESTATE, "the writer is finished");
    if (writer->state == STATE_FAILED)
        return dsc_fail(DSC_ESTATE, "the writer has failed before: the file is incomplete");
    return DSC_OK;
}

static dsc_status push_crc(dsc_block_writer *writer)
{
    if (writer->n_crcs == writer->crc_capacity) {
        int64_t capacity = writer->crc_capacity == 0 ? 1024 : 2 * writer->crc_capacity;
        uint32_t *crcs = realloc(writer->crcs, (size_t)capacity * sizeof *crcs);

        if (crcs == NULL)
            return dsc_fail(DSC_ENOMEM, "no memory for the checksums of %lld blocks", (long long)capacity);
        writer->crcs = crcs;
        writer->crc_capacity = capacity;
    }
    writer->crcs[writer->n_crcs++] = writer->crc;
    writer->crc = 0;
    writer->block_fill = 0;
    return DSC_OK;
}

static dsc_status wait_for(dsc_block_writer *writer, int32_t buffer)
{
    dsc_aio_id id = writer->ids[buffer];

    if (id == 0)
        return DSC_OK;
    writer->ids[buffer] = 0;
    return dsc_aio_wait(writer->aio, id, NULL);
}

/* Hands the current buffer to the disk, and goes on with the next. */
static dsc_status submit_buffer(dsc_block_writer *writer)
{
    const unsigned char *data = writer->memory + (size_t)writer->current * writer->buffer_bytes;
    int64_t offset = writer->n_bytes - (int64_t)writer->fill;

    DSC_TRY(dsc_aio_submit_write(writer->aio, writer->file, offset, data, writer->fill, &writer->ids[writer->current]));
    writer->current = (writer->current + 1) % writer->n_buffers;
    writer->fill = 0;
    return DSC_OK;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static dsc_status append(dsc_block_writer *writer, const unsigned char *data, size_t n_bytes)
{
    while (n_bytes > 0) {
        size_t n = least(n_bytes, least(writer->buffer_bytes - writer->fill, writer->block_bytes - writer->block_fill));

        if (writer->fill == 0)
            DSC_TRY(wait_for(writer, writer->current));
        writer->crc = dsc_crc32c_copy(
            writer->crc, writer->memory + (size_t)writer->current * writer->buffer_bytes + writer->fill, data, n);
        data += n;
        n_bytes -= n;
        writer->fill += n;
        writer->block_fill += n;
        writer->n_bytes += (int64_t)n;
        if (writer->block_fill == writer->block_bytes)
            DSC_TRY(push_crc(writer));
        if (writer->fill == writer->buffer_bytes)
            DSC_TRY(submit_buffer(writer));
    }
    return DSC_OK;
}

dsc_status dsc_block_writer_write(dsc_block_writer *writer, const void *data, size_t n_bytes)
{
    if (writer == NULL || (data == NULL && n_bytes > 0))
        return dsc_fail(DSC_EINVAL, "%s is NULL", writer == NULL ? "writer" : "data");
    DSC_TRY(check_open(writer));
    if (n_bytes > (size_t)(INT64_MAX - writer->n_bytes))
        return dsc_fail(DSC_EOVERFLOW, "%zu bytes after %lld do not fit int64_t", n_bytes, (long long)writer->n_bytes);

    dsc_status status = append(writer, data, n_bytes);

    if (status != DSC_OK)
        writer->state = STATE_FAILED;
    return status;
}

int64_t dsc_block_writer_bytes(const dsc_block_writer *writer)
{
    return writer->n_bytes;
}

static dsc_status flush(dsc_block_writer *writer)
{
    if (writer->block_fill > 0)
        DSC_TRY(push_crc(writer));
    if (writer->fill > 0)
        DSC_TRY(submit_buffer(writer));
    for (int32_t i = 0; i < writer->n_buffers; i++) /* the oldest first: its failure is the one to tell */
        DSC_TRY(wait_for(writer, (writer->current + i) % writer->n_buffers));
    return dsc_aio_sync(writer->file);
}

dsc_status dsc_block_writer_finish(dsc_block_writer *writer, const uint32_t **out_crcs, int64_t *out_n_blocks)
{
    if (writer == NULL || out_crcs == NULL || out_n_blocks == NULL)
        return dsc_fail(DSC_EINVAL, "writer, out_crcs or out_n_blocks is NULL");
    DSC_TRY(check_open(writer));

    dsc_status status = flush(writer);

    if (status == DSC_OK) {
        status = dsc_aio_close(writer->file);
        writer->file = NULL; /* closed even on an error: nothing is pending on it */
    }
    writer->state = status == DSC_OK ? STATE_FINISHED : STATE_FAILED;
    close_writer(writer);
    if (status != DSC_OK)
        return status;
    *out_crcs = writer->crcs;
    *out_n_blocks = writer->n_crcs;
    return DSC_OK;
}

void dsc_block_writer_destroy(dsc_block_writer *writer)
{
    /* A child of fork has no threads to wait for, and would take the kernel's answers from its parent. */
    if (writer == NULL || !dsc_process_is_this(&writer->process))
        return;
    close_writer(writer);
    free(writer->crcs);
    free(writer);
}
