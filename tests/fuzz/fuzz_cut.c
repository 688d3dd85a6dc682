/*
 * aio/block.c by itself: for every division of requests and every result of a transfer, direct transfers are aligned in
 * file and memory, no block goes past its border, each byte is moved by one block, and all wanted bytes are moved in
 * the end. Transfers are copies to and from an array here.
 */
#include "fuzz.h"

#include "aio/engine.h"
#include "aio/file.h"

#define FILE_BYTES 65536
#define MEMORY_BYTES (FILE_BYTES + 8192)
#define BUFFERED_FD 1000
#define DIRECT_FD 1001

static uint8_t model[FILE_BYTES];                            /* contents of the file */
static uint8_t wanted[FILE_BYTES];                           /* its expected contents in the end */
static _Alignas(4096) uint8_t memory[MEMORY_BYTES];
static uint8_t n_moved[FILE_BYTES];                          /* how often each byte of the request was moved */

static void check_block(const dsc_aio *aio, const struct dsc_aio_request *request, const struct dsc_aio_block *block, size_t memory_align)
{
    const struct dsc_aio_op *op = &block->op;
    const int64_t border = (int64_t)aio->config.block_bytes;
    const int64_t end = block->position + (int64_t)block->n_wanted;

    REQUIRE(block->n_wanted > 0 && op->n_bytes > 0);
    REQUIRE(block->position >= request->offset && end <= request->offset + request->n_bytes);
    REQUIRE(block->position / border == (end - 1) / border);
    REQUIRE(op->offset <= block->position && op->offset + (int64_t)op->n_bytes >= end);
    REQUIRE(op->is_write == request->is_write);
    REQUIRE(op->fd == (block->is_direct ? DIRECT_FD : BUFFERED_FD));
    if (block->is_direct) {
        REQUIRE(op->offset % aio->alignment == 0 && (int64_t)op->n_bytes % aio->alignment == 0);
        REQUIRE(((uintptr_t)op->buf & (memory_align - 1)) == 0);
    } else {
        REQUIRE(block->ring_block == NULL && op->offset == block->position && op->n_bytes == block->n_wanted);
    }
    if (op->is_write) /* never more than was asked for: no read-modify-write */
        REQUIRE(op->offset == block->position && op->n_bytes == block->n_wanted);
    if (block->ring_block == NULL)
        REQUIRE((uint8_t *)op->buf == (uint8_t *)request->buf + (op->offset - request->offset));
}

/* Moves n bytes of the transfer. */
static void transfer(const struct dsc_aio_block *block, int64_t n)
{
    const struct dsc_aio_op *op = &block->op;

    for (int64_t i = op->offset; i < op->offset + n; i++)
        if (i >= block->position && i < block->position + (int64_t)block->n_wanted)
            n_moved[i]++;
    if (op->is_write)
        memcpy(model + op->offset, op->buf, (size_t)n);
    else
        memcpy(op->buf, model + op->offset, (size_t)n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    struct dsc_aio_file file = {.fd = BUFFERED_FD, .direct_fd = DIRECT_FD};
    struct dsc_aio_request *request = NULL;
    dsc_aio *aio = NULL;
    int64_t offset;
    int64_t length;
    bool is_write;

    config.backend = "sync";
    config.block_bytes = 1 + (size_t)take_below(&input, 20000);
    config.queue_depth = 1 + (int32_t)take_below(&input, 6);
    config.uses_direct = take_byte(&input) % 8 != 0;
    REQUIRE(dsc_aio_create(&config, &aio) == DSC_OK);
    atomic_store(&file.is_direct, take_byte(&input) % 8 != 0);
    atomic_store(&file.memory_align, (size_t)1 << take_byte(&input) % 13);
    is_write = take_byte(&input) % 2 == 0;
    offset = take_below(&input, FILE_BYTES / 2);
    length = 1 + take_below(&input, FILE_BYTES / 2);
    REQUIRE(dsc_aio_request_new(aio, &request) == DSC_OK);
    *request = (struct dsc_aio_request){
        .generation = request->generation,
        .index = request->index,
        .is_used = true,
        .is_write = is_write,
        .file = &file,
        .buf = (char *)memory + take_below(&input, 8192),
        .offset = offset,
        .n_bytes = length,
        .end_of_file = INT64_MAX,
    };
    for (int64_t i = 0; i < FILE_BYTES; i++)
        model[i] = (uint8_t)(i * 7 + i / 256);
    for (int64_t i = 0; i < length; i++)
        request->buf[i] = is_write ? (char)(i * 13 + i / 256 + 1) : (char)~model[offset + i];
    memcpy(wanted, model, sizeof wanted);
    if (is_write)
        memcpy(wanted + offset, request->buf, (size_t)length);
    memset(n_moved, 0, sizeof n_moved);
    dsc_aio_request_enqueue(aio, request);

    while (aio->queue != NULL || aio->n_ready > 0) {
        if (aio->queue != NULL && aio->free_blocks != NULL && (aio->n_ready == 0 || take_byte(&input) % 2 == 0)) {
            int32_t n_ready = aio->n_ready;
            size_t memory_align = atomic_load(&file.memory_align);

            if (dsc_aio_block_cut(aio, request)) {
                REQUIRE(aio->n_ready == n_ready + 1);
                check_block(aio, request, (const struct dsc_aio_block *)aio->ready[n_ready], memory_align);
                continue;
            }
            REQUIRE(aio->n_ready > 0 && aio->n_free_ring_blocks == 0); /* it waits for the ring alone, and others hold that */
        }

        int32_t which = (int32_t)take_below(&input, aio->n_ready);
        struct dsc_aio_block *block = (struct dsc_aio_block *)aio->ready[which];
        uint8_t kind = take_byte(&input);

        aio->ready[which] = aio->ready[--aio->n_ready];
        if (kind < 20 && block->is_direct) {
            block->op.res = -EINVAL; /* as of a file system that refuses O_DIRECT */
        } else {
            int64_t n = kind < 200 ? (int64_t)block->op.n_bytes : 1 + take_below(&input, (int64_t)block->op.n_bytes);

            transfer(block, n);
            block->op.res = n;
        }
        dsc_aio_block_take(aio, block);
        REQUIRE(request->err == 0);
    }
    REQUIRE(request->n_blocks == 0 && request->n_cut == length && request->end_of_file == INT64_MAX);
    REQUIRE(aio->ring == NULL || aio->n_free_ring_blocks == aio->n_ring_blocks);
    for (int64_t i = 0; i < FILE_BYTES; i++)
        REQUIRE(n_moved[i] == (i >= offset && i < offset + length));
    REQUIRE(memcmp(model, wanted, sizeof wanted) == 0);
    REQUIRE(memcmp(request->buf, wanted + offset, (size_t)length) == 0);
    request->file = &file;
    atomic_store(&file.n_requests, 1);
    aio->n_pending = 1;
    dsc_aio_request_forget(aio, request);
    REQUIRE(atomic_load(&file.n_requests) == 0);
    dsc_aio_destroy(aio);
    return 0;
}
