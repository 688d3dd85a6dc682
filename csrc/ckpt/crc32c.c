/* CRC32C of bytes, by the processor's instruction or by tables. */
#include "ckpt/crc32c.h"

#include "dsc/ckpt.h"

#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#define HAVE_INSTRUCTION 1
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#define CRC_OF_8(crc, word) ((uint32_t)__builtin_ia32_crc32di((crc), (word)))
#define CRC_OF_1(crc, byte) __builtin_ia32_crc32qi((crc), (byte))
#elif defined(__aarch64__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#include <arm_acle.h>
#include <sys/auxv.h>
#define HAVE_INSTRUCTION 1
#define WITH_INSTRUCTION __attribute__((target("+crc")))
#define CRC_OF_8(crc, word) __crc32cd((crc), (word))
#define CRC_OF_1(crc, byte) __crc32cb((crc), (byte))
#define HWCAP_BIT_CRC32 (1ul << 7) /* HWCAP_CRC32 of asm/hwcap.h */
#else
#define HAVE_INSTRUCTION 0
#endif

/* 0x1edc6f41 with its bits in reverse: bit 31 of a value is the coefficient of x^0. */
#define POLYNOMIAL UINT32_C(0x82f63b78)

/*
 * Bytes of each of the three streams. Three long streams stay in the first-level cache, for dsc_crc32c_copy; the short
 * ones serve the rest.
 */
#define LONG_BYTES 4096
#define SHORT_BYTES 256
#define LINE_BYTES 64 /* of a cache line; both lengths are multiples of it */
/* A count and a branch for each word would take more time than the instructions themselves. */
#define UNROLLED _Pragma("GCC unroll 8")

/* Linear maps of 32 bits, one byte of the argument at a time. */
struct shift {
    uint32_t of[4][256];
};

/* Written once under once, then only read. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static uint32_t slices[8][256]; /* slices[k][b]: the register after byte b and k zero bytes */
static struct shift shift_long; /* maps a register to its value after LONG_BYTES zero bytes */
static struct shift shift_short;
static uint32_t powers[64]; /* powers[k]: x^(8 * 2^k) */
static bool has_instruction;

uint32_t dsc_crc32c_multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;

    for (int bit = 31; bit >= 0; bit--) { /* the coefficients of a from x^0 up; b is multiplied by x each time */
        product ^= b & (0 - (a >> bit & 1));
        b = b >> 1 ^ (POLYNOMIAL & (0 - (b & 1)));
    }
    return product;
}

/* As dsc_crc32c_power, once `powers` is filled. */
static uint32_t power_of(uint64_t n_bytes)
{
    uint32_t power = UINT32_C(1) << 31; /* x^0 */

    for (int k = 0; n_bytes != 0; k++, n_bytes >>= 1)
        if ((n_bytes & 1) != 0)
            power = dsc_crc32c_multiply(power, powers[k]);
    return power;
}

static void init_shift(struct shift *shift, size_t n_bytes)
{
    uint32_t power = power_of(n_bytes);

    for (int byte = 0; byte < 4; byte++)
        for (uint32_t value = 0; value < 256; value++)
            shift->of[byte][value] = dsc_crc32c_multiply(value << 8 * byte, power);
}

static void init(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;

        for (int bit = 0; bit < 8; bit++)
            crc = (crc & 1) != 0 ? crc >> 1 ^ POLYNOMIAL : crc >> 1;
        slices[0][byte] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            slices[k][byte] = slices[k - 1][byte] >> 8 ^ slices[0][slices[k - 1][byte] & 0xff];
    powers[0] = UINT32_C(1) << 23; /* x^8 */
    for (int k = 1; k < 64; k++)
        powers[k] = dsc_crc32c_multiply(powers[k - 1], powers[k - 1]);
    init_shift(&shift_long, LONG_BYTES);
    init_shift(&shift_short, SHORT_BYTES);
#if defined(__x86_64__)
    __builtin_cpu_init();
    has_instruction = __builtin_cpu_supports("sse4.2") != 0;
#elif HAVE_INSTRUCTION
    has_instruction = (getauxval(AT_HWCAP) & HWCAP_BIT_CRC32) != 0;
#endif
}

uint32_t dsc_crc32c_power(uint64_t n_bytes)
{
    pthread_once(&once, init);
    return power_of(n_bytes);
}

/* Little-endian on every machine. */
static inline uint32_t load_4(const unsigned char *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

uint32_t dsc_crc32c_by_table(uint32_t crc, const void *data, size_t n_bytes)
{
    const unsigned char *p = data;

    pthread_once(&once, init);
    crc = ~crc;
    for (; n_bytes >= 8; n_bytes -= 8, p += 8) {
        uint32_t low = crc ^ load_4(p);
        uint32_t high = load_4(p + 4);

        crc = slices[7][low & 0xff] ^ slices[6][low >> 8 & 0xff] ^ slices[5][low >> 16 & 0xff] ^ slices[4][low >> 24] ^
              slices[3][high & 0xff] ^ slices[2][high >> 8 & 0xff] ^ slices[1][high >> 16 & 0xff] ^
              slices[0][high >> 24];
    }
    for (; n_bytes > 0; n_bytes--, p++)
        crc = crc >> 8 ^ slices[0][(crc ^ *p) & 0xff];
    return ~crc;
}

bool dsc_crc32c_has_instruction(void)
{
    pthread_once(&once, init);
    return has_instruction;
}

#if HAVE_INSTRUCTION

static inline uint32_t apply(const struct shift *shift, uint32_t crc)
{
    return shift->of[0][crc & 0xff] ^ shift->of[1][crc >> 8 & 0xff] ^ shift->of[2][crc >> 16 & 0xff] ^
           shift->of[3][crc >> 24];
}

static inline uint64_t load_8(const unsigned char *p)
{
    uint64_t word;

    memcpy(&word, p, sizeof word);
    return word;
}

/*
 * 3 * n_bytes at p, n_bytes being shift's. The instruction has a latency of three cycles and a throughput of one, so
 * three registers run side by side: the second third's begins at 0, and shifting the first third's over it gives the
 * register of both (CRCs are linear).
 */
WITH_INSTRUCTION static inline uint32_t crc_of_thirds(uint32_t crc, const unsigned char *p, size_t n_bytes,
                                                      const struct shift *shift)
{
    uint32_t second = 0;
    uint32_t third = 0;

    for (const unsigned char *end = p + n_bytes; p < end; p += LINE_BYTES) {
        /* The next three streams, a line at a time: the processor's own prefetcher begins anew in each page. */
        __builtin_prefetch(p + 3 * n_bytes);
        __builtin_prefetch(p + 4 * n_bytes);
        __builtin_prefetch(p + 5 * n_bytes);
        UNROLLED
        for (int i = 0; i < LINE_BYTES; i += 8) {
            crc = CRC_OF_8(crc, load_8(p + i));
            second = CRC_OF_8(second, load_8(p + n_bytes + i));
            third = CRC_OF_8(third, load_8(p + 2 * n_bytes + i));
        }
    }
    return apply(shift, apply(shift, crc) ^ second) ^ third;
}

WITH_INSTRUCTION uint32_t dsc_crc32c_by_instruction(uint32_t crc, const void *data, size_t n_bytes)
{
    const unsigned char *p = data;

    pthread_once(&once, init);
    crc = ~crc;
    for (; n_bytes >= 3 * LONG_BYTES; n_bytes -= 3 * LONG_BYTES, p += 3 * LONG_BYTES)
        crc = crc_of_thirds(crc, p, LONG_BYTES, &shift_long);
    for (; n_bytes >= 3 * SHORT_BYTES; n_bytes -= 3 * SHORT_BYTES, p += 3 * SHORT_BYTES)
        crc = crc_of_thirds(crc, p, SHORT_BYTES, &shift_short);
    for (; n_bytes >= 8; n_bytes -= 8, p += 8)
        crc = CRC_OF_8(crc, load_8(p));
    for (; n_bytes > 0; n_bytes--, p++)
        crc = CRC_OF_1(crc, *p);
    return ~crc;
}

#else

uint32_t dsc_crc32c_by_instruction(uint32_t crc, const void *data, size_t n_bytes)
{
    return dsc_crc32c_by_table(crc, data, n_bytes);
}

#endif

uint32_t dsc_crc32c(uint32_t crc, const void *data, size_t n_bytes)
{
    return dsc_crc32c_has_instruction() ? dsc_crc32c_by_instruction(crc, data, n_bytes)
                                        : dsc_crc32c_by_table(crc, data, n_bytes);
}

uint32_t dsc_crc32c_copy(uint32_t crc, void *into, const void *from, size_t n_bytes)
{
    const unsigned char *p = from;
    unsigned char *out = into;

    while (n_bytes > 0) {
        size_t n = n_bytes < 3 * LONG_BYTES ? n_bytes : 3 * LONG_BYTES;

        crc = dsc_crc32c(crc, p, n);
        memcpy(out, p, n); /* from the first-level cache */
        p += n;
        out += n;
        n_bytes -= n;
    }
    return crc;
}
