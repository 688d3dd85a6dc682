/* aio/pinned.c: sizes are exact, buffers are reused, and the budget holds for every order of taking and returning. */
#include "test.h"

#include "dsc/aio.h"

#define PAGE 4096

static void test_sizes(void)
{
    static const size_t sizes[] = {1, 4095, 4096, 4097, 1000003};
    dsc_aio_pool *pool = NULL;
    int64_t used = -1;
    int64_t held = -1;
    int64_t wanted = 0;

    CHECK_STATUS(dsc_aio_pool_create(1 << 20 | 12 * PAGE, &pool), DSC_OK);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        unsigned char *buf = NULL;

        TEST_CASE("%zu bytes", sizes[i]);
        CHECK_STATUS(dsc_aio_pool_take(pool, sizes[i], (void **)&buf, NULL), DSC_OK);
        CHECK_EQ((uintptr_t)buf % PAGE, 0);
        CHECK_EQ(buf[0] | buf[sizes[i] - 1], 0);
        memset(buf, 0xff, sizes[i]);
        wanted += (int64_t)((sizes[i] + PAGE - 1) / PAGE * PAGE);
        dsc_aio_pool_bytes(pool, &used, &held);
        CHECK_EQ(used, wanted);
        CHECK_EQ(held, wanted);
    }
    dsc_aio_pool_destroy(pool); /* while all its buffers are in use */
}

static void test_budget(void)
{
    dsc_aio_pool *pool = NULL;
    bool is_locked = false;
    void *a = NULL;
    void *b = NULL;
    void *c = NULL;
    int64_t used;
    int64_t held;

    TEST_CASE("budget");
    CHECK_STATUS(dsc_aio_pool_create(4 * PAGE, &pool), DSC_OK);
    CHECK_STATUS(dsc_aio_pool_take(pool, 3 * PAGE, &a, &is_locked), DSC_OK);
    CHECK_ERROR(dsc_aio_pool_take(pool, PAGE + 1, &b, NULL), DSC_ENOMEM, "12288 of the 16384 bytes");
    CHECK(b == NULL);
    CHECK_STATUS(dsc_aio_pool_take(pool, PAGE, &b, NULL), DSC_OK);
    CHECK_STATUS(dsc_aio_pool_give(pool, a), DSC_OK);
    CHECK_ERROR(dsc_aio_pool_give(pool, a), DSC_EINVAL, "in use");
    CHECK_STATUS(dsc_aio_pool_take(pool, 3 * PAGE - 5, &c, NULL), DSC_OK); /* the same one */
    CHECK(c == a);
    CHECK_STATUS(dsc_aio_pool_give(pool, c), DSC_OK);
    CHECK_STATUS(dsc_aio_pool_take(pool, 2 * PAGE, &c, NULL), DSC_OK); /* kept buffers make room */
    dsc_aio_pool_bytes(pool, &used, &held);
    CHECK_EQ(used, 3 * PAGE);
    CHECK_EQ(held, 3 * PAGE);
    CHECK_ERROR(dsc_aio_pool_give(pool, &used), DSC_EINVAL, "no buffer");
    dsc_aio_pool_destroy(pool);
    dsc_aio_pool_destroy(NULL);
}

static void test_arguments(void)
{
    dsc_aio_pool *pool = NULL;
    void *buf = NULL;

    TEST_CASE("arguments");
    CHECK_ERROR(dsc_aio_pool_create(-1, &pool), DSC_EINVAL, "budget_bytes is -1");
    CHECK_ERROR(dsc_aio_pool_create(1, NULL), DSC_EINVAL, "out_pool");
    CHECK_STATUS(dsc_aio_pool_create(INT64_MAX, &pool), DSC_OK);
    CHECK_ERROR(dsc_aio_pool_take(pool, 0, &buf, NULL), DSC_EINVAL, "n_bytes is 0");
    CHECK_ERROR(dsc_aio_pool_take(pool, SIZE_MAX, &buf, NULL), DSC_EINVAL, "n_bytes");
    CHECK_ERROR(dsc_aio_pool_take(pool, (size_t)1 << 62, &buf, NULL), DSC_ENOMEM, "system");
    CHECK_ERROR(dsc_aio_pool_take(pool, 1, NULL, NULL), DSC_EINVAL, "out_buf");
    dsc_aio_pool_destroy(pool);
}

/* A random run against a model that counts used and held bytes. */
static void test_random_run(void)
{
    enum { MAX = 20 };
    dsc_aio_pool *pool = NULL;
    void *bufs[MAX] = {NULL};
    size_t sizes[MAX] = {0};
    uint64_t random = 7;
    int64_t wanted = 0;
    const int64_t budget = 40 * PAGE;

    CHECK_STATUS(dsc_aio_pool_create(budget, &pool), DSC_OK);
    for (int i = 0; i < 5000; i++) {
        int64_t at = test_below(&random, MAX);
        int64_t used;
        int64_t held;

        TEST_CASE("step %d", i);
        if (bufs[at] != NULL) {
            CHECK_EQ(((unsigned char *)bufs[at])[sizes[at] - 1], at); /* nobody else has written there */
            CHECK_STATUS(dsc_aio_pool_give(pool, bufs[at]), DSC_OK);
            wanted -= (int64_t)((sizes[at] + PAGE - 1) / PAGE * PAGE);
            bufs[at] = NULL;
        } else {
            int64_t rounded;

            sizes[at] = 1 + (size_t)test_below(&random, 6 * PAGE);
            rounded = (int64_t)((sizes[at] + PAGE - 1) / PAGE * PAGE);
            CHECK_STATUS(dsc_aio_pool_take(pool, sizes[at], &bufs[at], NULL), wanted + rounded <= budget ? DSC_OK : DSC_ENOMEM);
            if (bufs[at] != NULL) {
                memset(bufs[at], (int)at, sizes[at]);
                wanted += rounded;
            }
        }
        dsc_aio_pool_bytes(pool, &used, &held);
        CHECK_EQ(used, wanted);
        CHECK(held >= used && held <= budget);
    }
    dsc_aio_pool_destroy(pool);
}

int main(void)
{
    test_sizes();
    test_budget();
    test_arguments();
    test_random_run();
    return test_finish(__FILE__);
}
