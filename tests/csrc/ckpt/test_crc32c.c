/* ckpt/crc32c.c: the values of RFC 3720, and every variant against the definition bit by bit. */
#include "test.h"

#include "ckpt/crc32c.h"
#include "dsc/ckpt.h"

#define LARGE (200 * 1000 + 7)

/* CRC-32C by its definition: one bit after the other. */
static uint32_t crc_brute(uint32_t crc, const unsigned char *p, size_t n_bytes)
{
    crc = ~crc;
    for (size_t i = 0; i < n_bytes; i++) {
        crc ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            crc = (crc & 1) != 0 ? crc >> 1 ^ UINT32_C(0x82f63b78) : crc >> 1;
    }
    return ~crc;
}

static void check_all(uint32_t crc, const unsigned char *p, size_t n_bytes)
{
    uint32_t wanted = crc_brute(crc, p, n_bytes);
    unsigned char *copy = test_alloc(n_bytes + 1);

    copy[n_bytes] = 0x5a;
    CHECK_EQ(dsc_crc32c(crc, p, n_bytes), wanted);
    CHECK_EQ(dsc_crc32c_by_table(crc, p, n_bytes), wanted);
    if (dsc_crc32c_has_instruction())
        CHECK_EQ(dsc_crc32c_by_instruction(crc, p, n_bytes), wanted);
    CHECK_EQ(dsc_crc32c_copy(crc, copy, p, n_bytes), wanted);
    CHECK_BYTES(copy, p, n_bytes);
    CHECK_EQ(copy[n_bytes], 0x5a);
    free(copy);
}

static void test_known_values(void)
{
    unsigned char bytes[32];

    TEST_CASE("known values");
    CHECK_EQ(dsc_crc32c(0, "123456789", 9), 0xe3069283u);
    CHECK_EQ(dsc_crc32c(0, NULL, 0), 0);
    CHECK_EQ(dsc_crc32c(0x12345678u, NULL, 0), 0x12345678u);
    CHECK_EQ(dsc_crc32c_copy(0x12345678u, NULL, NULL, 0), 0x12345678u);
    /* RFC 3720, appendix B.4, lists the bytes of the value, the lowest first. */
    memset(bytes, 0, 32);
    CHECK_EQ(dsc_crc32c(0, bytes, 32), 0x8a9136aau);
    memset(bytes, 0xff, 32);
    CHECK_EQ(dsc_crc32c(0, bytes, 32), 0x62a8ab43u);
    for (int i = 0; i < 32; i++)
        bytes[i] = (unsigned char)i;
    CHECK_EQ(dsc_crc32c(0, bytes, 32), 0x46dd794eu);
    for (int i = 0; i < 32; i++)
        bytes[i] = (unsigned char)(31 - i);
    CHECK_EQ(dsc_crc32c(0, bytes, 32), 0x113fdb5cu);
}

/* Lengths near those at which the code switches loops, at every alignment. */
static void test_lengths(void)
{
    static const size_t centres[] = {0, 8, 16, 24, 256, 512, 768, 1536, 4096, 3 * 4096, 3 * 4096 + 768, 6 * 4096, 6 * 4096 + 3 * 768};
    unsigned char *bytes = test_alloc(LARGE);
    uint64_t random = 17;

    for (size_t i = 0; i < LARGE; i++)
        bytes[i] = (unsigned char)test_random(&random);
    for (size_t c = 0; c < sizeof centres / sizeof centres[0]; c++) {
        for (size_t n = centres[c] < 9 ? 0 : centres[c] - 9; n <= centres[c] + 9; n++) {
            size_t at = (size_t)test_below(&random, 64);

            TEST_CASE("%d bytes at %d", (int)n, (int)at);
            check_all(c % 2 == 0 ? 0 : (uint32_t)test_random(&random), bytes + at, n);
        }
    }
    TEST_CASE("%d bytes", LARGE);
    check_all(0, bytes, LARGE);

    uint32_t whole = dsc_crc32c(0, bytes, LARGE);

    for (int round = 0; round < 200; round++) { /* in two parts */
        size_t n = (size_t)test_below(&random, LARGE + 1);

        TEST_CASE("%d and %d bytes", (int)n, (int)(LARGE - n));
        CHECK_EQ(dsc_crc32c(dsc_crc32c(0, bytes, n), bytes + n, LARGE - n), whole);
    }
    free(bytes);
}

int main(void)
{
    test_known_values();
    test_lengths();
    if (!dsc_crc32c_has_instruction())
        printf("this processor has no instruction for CRC32C: tables only\n");
    return test_finish(__FILE__);
}
