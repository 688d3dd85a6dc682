/* Settings of block files, and the ring that they are written and read through. */
#include "ckpt/blocks.h"

#include "base/fail.h"

#include <stdlib.h>

#define MAX_BYTES ((size_t)1 << 30)
#define MAX_BUFFERS 1024

/* The longest single transfer. Larger ones are no faster on NVMe, and several in flight are. */
#define TRANSFER_BYTES ((size_t)1 << 20)

dsc_status dsc_block_config_check(const struct dsc_block_config *config)
{
    if (config == NULL)
        return dsc_fail(DSC_EINVAL, "config is NULL");
    if (config->size != sizeof *config)
        return dsc_fail(DSC_EINVAL, "config.size is %u, must be %zu", (unsigned)config->size, sizeof *config);
    if (config->block_bytes < 1 || config->block_bytes > MAX_BYTES)
        return dsc_fail(DSC_EINVAL, "block_bytes is %zu, must be 1 to %zu", config->block_bytes, MAX_BYTES);
    if (config->buffer_bytes < 1 || config->buffer_bytes > MAX_BYTES)
        return dsc_fail(DSC_EINVAL, "buffer_bytes is %zu, must be 1 to %zu", config->buffer_bytes, MAX_BYTES);
    if (config->n_buffers < 2 || config->n_buffers > MAX_BUFFERS)
        return dsc_fail(DSC_EINVAL, "n_buffers is %d, must be 2 to %d", (int)config->n_buffers, MAX_BUFFERS);
    return DSC_OK;
}

dsc_status dsc_block_ring_create(const char *backend, size_t n_bytes, dsc_aio **out_aio, unsigned char **out_memory)
{
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    size_t n_transfers = n_bytes / TRANSFER_BYTES + 2; /* a little more than fit, so that the queue is never full */
    void *memory = NULL;

    config.backend = backend;
    config.block_bytes = TRANSFER_BYTES;
    config.queue_depth = n_transfers < 256 ? (int32_t)n_transfers : 256;
    if (posix_memalign(&memory, dsc_aio_alignment(), n_bytes) != 0)
        return dsc_fail(DSC_ENOMEM, "no memory for a ring of %zu bytes", n_bytes);

    dsc_status status = dsc_aio_create(&config, out_aio);

    if (status != DSC_OK) {
        free(memory);
        return status;
    }
    *out_memory = memory;
    return DSC_OK;
}

void dsc_block_ring_destroy(dsc_aio *aio, unsigned char *memory)
{
    const bool is_free = aio == NULL || !dsc_aio_has_given_up(aio);

    dsc_aio_destroy(aio);
    if (is_free)
        free(memory);
}
