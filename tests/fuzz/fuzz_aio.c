/*
 * The I/O engine over the fault backend: for any requests in any order and any faults, successful requests have moved
 * their bytes, and all succeed if every fault could be mended.
 */
#include "fuzz.h"

#include "dsc/aio.h"

#include "aio/fault.c"
#include "aio/file.h"

#include <sys/mman.h>

#define REGION ((int64_t)40000) /* part of the file reserved for one request; requests in flight must not overlap */
#define MAX_REQUESTS 12

struct sent {
    dsc_aio_id id; /* 0: waited for */
    bool is_write;
    int64_t offset;
    int64_t n_bytes;
    uint8_t *buf;
};

static uint8_t model[MAX_REQUESTS * REGION];   /* expected contents of the file */
static bool is_known[MAX_REQUESTS];            /* no write to the region has failed */
static uint8_t memory[MAX_REQUESTS * (REGION + 8192)];
static dsc_aio_file *file;

static void open_file(void)
{
    int fd = memfd_create("fuzz_aio", MFD_CLOEXEC); /* no disk is worn */
    char path[64];

    REQUIRE(fd >= 0);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    REQUIRE(dsc_aio_open(path, DSC_AIO_READ | DSC_AIO_WRITE, true, &file) == DSC_OK);
    close(fd);
}

static void settle(struct sent *sent, int64_t region, dsc_status status, int64_t res, bool may_fail)
{
    sent->id = 0;
    REQUIRE((status == DSC_OK) == (res >= 0));
    if (status != DSC_OK) {
        REQUIRE(status == DSC_EIO && may_fail);
        is_known[region] &= !sent->is_write;
        return;
    }
    REQUIRE(res <= sent->n_bytes);
    if (sent->is_write) {
        REQUIRE(res == sent->n_bytes);
        memcpy(model + sent->offset, sent->buf, (size_t)res);
    } else {
        REQUIRE(res == sent->n_bytes);
        REQUIRE(!is_known[region] || memcmp(model + sent->offset, sent->buf, (size_t)res) == 0);
    }
}

static void set_plan(struct input *input, bool *out_may_fail)
{
    struct dsc_aio_fault_plan plan = {.seed = (uint64_t)take_wild(input)};
    uint8_t kinds = take_byte(input);

    plan.short_chance = kinds & 1 ? take_byte(input) : 0;
    plan.passing_chance = kinds & 2 ? take_byte(input) / 16 : 0;
    plan.failure_chance = kinds & 4 ? take_byte(input) / 4 : 0;
    plan.late_chance = kinds & 8 ? take_byte(input) : 0;
    plan.reorders = (kinds & 16) != 0;
    plan.takes_part = (kinds & 32) != 0;
    plan.refuses_direct = (kinds & 64) != 0;
    if (kinds & 128) {
        plan.bad_begin = take_below(input, MAX_REQUESTS * REGION);
        plan.bad_end = plan.bad_begin + take_below(input, 5000);
    }
    *out_may_fail = plan.failure_chance > 0 || plan.bad_end > plan.bad_begin;
    dsc_aio_fault_set(&plan);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    struct dsc_aio_config config = DSC_AIO_CONFIG_INIT;
    struct sent sent[MAX_REQUESTS] = {{0}};
    bool may_fail = false;
    dsc_aio *aio = NULL;

    open_file();
    dsc_aio_plug_backend(&dsc_aio_backend_fault, false);
    set_plan(&input, &may_fail);
    REQUIRE(ftruncate(file->fd, (off_t)sizeof model) == 0);
    memset(model, 0, sizeof model);
    memset(is_known, 1, sizeof is_known);
    config.backend = "fault";
    config.block_bytes = 1 + (size_t)take_below(&input, 20000);
    config.queue_depth = 1 + (int32_t)take_below(&input, 9);
    config.single_submit = take_byte(&input) % 4 == 0;
    config.overlap_events = take_byte(&input) % 4 != 0;
    config.uses_direct = take_byte(&input) % 4 != 0;
    REQUIRE(dsc_aio_create(&config, &aio) == DSC_OK);
    while (input.n_left > 0) {
        int64_t r = take_below(&input, MAX_REQUESTS);
        struct sent *one = &sent[r];
        uint8_t action = take_byte(&input);
        int64_t n_done = 0;
        int64_t res = 0;
        bool is_done = false;

        if (one->id == 0) {
            int64_t skip = take_below(&input, REGION);

            one->is_write = action % 2 == 0;
            one->n_bytes = take_below(&input, REGION - skip + 1);
            one->offset = r * REGION + skip;
            one->buf = memory + r * (REGION + 8192) + take_below(&input, 8192);
            memset(one->buf, one->is_write ? action : ~model[one->offset], (size_t)one->n_bytes);
            REQUIRE((one->is_write ? dsc_aio_submit_write(aio, file, one->offset, one->buf, (size_t)one->n_bytes, &one->id)
                                   : dsc_aio_submit_read(aio, file, one->offset, one->buf, (size_t)one->n_bytes, &one->id)) == DSC_OK);
            REQUIRE(one->id != 0);
        } else if (action < 60) {
            REQUIRE(dsc_aio_poll(aio, one->id, &is_done) == DSC_OK);
        } else if (action < 220) {
            dsc_aio_id id = one->id;
            dsc_status status = dsc_aio_wait(aio, id, &res);

            settle(one, r, status, res, may_fail);
            REQUIRE(dsc_aio_wait(aio, id, &res) == DSC_ENOTFOUND);
        } else if (action < 240) {
            dsc_status status;

            REQUIRE(dsc_aio_cancel(aio, one->id) == DSC_OK);
            status = dsc_aio_wait(aio, one->id, &res);
            REQUIRE(res != -ECANCELED || status == DSC_EIO);
            settle(one, r, status, res, may_fail || res == -ECANCELED);
        } else {
            dsc_status status = dsc_aio_wait_all(aio, &n_done);

            REQUIRE(status == DSC_OK || (status == DSC_EIO && may_fail));
            for (int64_t i = 0; i < MAX_REQUESTS; i++)
                if (sent[i].id != 0 && status == DSC_OK)
                    settle(&sent[i], i, DSC_OK, sent[i].n_bytes, may_fail);
                else if (sent[i].id != 0)
                    settle(&sent[i], i, DSC_EIO, -1, true);
        }
        int64_t n_pending = 0;

        for (int64_t i = 0; i < MAX_REQUESTS; i++)
            n_pending += sent[i].id != 0;
        REQUIRE(dsc_aio_pending(aio) == n_pending);
    }
    dsc_aio_destroy(aio);
    REQUIRE(dsc_aio_close(file) == DSC_OK);
    return 0;
}
