/*
 * Helpers for C test programs: checks that print both operands with file and line, seeded random numbers, and the exit
 * codes 0 (passed), 1 (failed) and 77 (skipped). A failed check does not end the program: test_finish() gives the exit
 * code.
 */
#ifndef DSC_TEST_H
#define DSC_TEST_H

#include "dsc/kernels.h"
#include "dsc/status.h"
#include "dsc/types.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TEST_SKIPPED 77
#define TEST_MAX_SHOWN 20 /* failures that are printed; the rest is counted */

static _Atomic long test_n_checks;
static _Atomic long test_n_failures;

/*
 * The state of the loops around a check, printed with each failure. TEST_AT records the innermost loop at no cost.
 */
static char test_case[256];
static int64_t test_at = -1;

#define TEST_CASE(...) ((void)(snprintf(test_case, sizeof test_case, __VA_ARGS__), test_at = -1))
#define TEST_AT(i) ((void)(test_at = (i)))

__attribute__((format(printf, 4, 5))) static inline bool test_report(bool is_good, const char *file, int line, const char *format, ...)
{
    test_n_checks++;
    if (is_good)
        return true;
    if (test_n_failures++ < TEST_MAX_SHOWN) {
        va_list args;

        va_start(args, format);
        fprintf(stderr, "%s:%d: ", file, line);
        vfprintf(stderr, format, args);
        fprintf(stderr, " (%s", test_case);
        if (test_at >= 0)
            fprintf(stderr, ", at %" PRId64, test_at);
        fprintf(stderr, ")\n");
        va_end(args);
    }
    return false;
}

#define CHECK(condition) test_report((condition), __FILE__, __LINE__, "%s is false", #condition)

#define CHECK_EQ(a, b)                                                                                                         \
    test_check_eq((int64_t)(a), (int64_t)(b), #a, #b, __FILE__, __LINE__)

#define CHECK_STR(a, b) test_check_str((a), (b), #a, #b, __FILE__, __LINE__)

/* If the status is not the expected one, dsc_last_error() is printed with it. */
#define CHECK_STATUS(call, expected) test_check_status((call), (expected), #call, __FILE__, __LINE__)

/* The call fails with the status, and its error message contains the word. */
#define CHECK_ERROR(call, expected, word)                                                                                      \
    (CHECK_STATUS(call, expected),                                                                                             \
     test_report(strstr(dsc_last_error(), (word)) != NULL, __FILE__, __LINE__, "\"%s\" does not name \"%s\"", dsc_last_error(), (word)))

/* |got - wanted| in units of the last place of an f32 of max(|wanted|, floor) is at most ulps. Both NaN, or the same inf, is equal. */
#define CHECK_NEAR(got, wanted, ulps, floor) test_check_near((got), (wanted), (ulps), (floor), #got, #wanted, __FILE__, __LINE__)

/* The same bytes. */
#define CHECK_BYTES(a, b, n_bytes) test_check_bytes((a), (b), (n_bytes), #a, #b, __FILE__, __LINE__)

static inline bool test_check_eq(int64_t a, int64_t b, const char *a_text, const char *b_text, const char *file, int line)
{
    return test_report(a == b, file, line, "%s == %s: %" PRId64 " and %" PRId64, a_text, b_text, a, b);
}

static inline bool test_check_str(const char *a, const char *b, const char *a_text, const char *b_text, const char *file, int line)
{
    bool is_equal = a != NULL && b != NULL && strcmp(a, b) == 0;

    return test_report(is_equal, file, line, "%s == %s: \"%s\" and \"%s\"", a_text, b_text, a ? a : "(null)", b ? b : "(null)");
}

static inline bool test_check_status(dsc_status got, dsc_status wanted, const char *text, const char *file, int line)
{
    return test_report(got == wanted, file, line, "%s: %s and not %s (\"%s\")", text, dsc_status_name(got), dsc_status_name(wanted),
                       dsc_last_error());
}

static inline double test_ulp_of(double value)
{
    int exponent;

    frexp(value, &exponent);
    return ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

static inline bool test_check_near(double got, double wanted, double ulps, double floor, const char *got_text, const char *wanted_text,
                                   const char *file, int line)
{
    double scale = fabs(wanted) > floor ? fabs(wanted) : floor;
    bool is_near = (isnan(got) && isnan(wanted)) || got == wanted || fabs(got - wanted) <= ulps * test_ulp_of(scale);

    return test_report(is_near, file, line, "%s near %s: %.9g and %.9g, %.3g ulps apart, %.3g allowed", got_text, wanted_text, got, wanted,
                       fabs(got - wanted) / test_ulp_of(scale), ulps);
}

static inline bool test_check_bytes(const void *a, const void *b, size_t n_bytes, const char *a_text, const char *b_text, const char *file,
                                    int line)
{
    size_t i = 0;

    while (i < n_bytes && ((const unsigned char *)a)[i] == ((const unsigned char *)b)[i])
        i++;
    return test_report(i == n_bytes, file, line, "%s and %s: byte %zu of %zu is 0x%02x and 0x%02x", a_text, b_text, i, n_bytes,
                       i < n_bytes ? ((const unsigned char *)a)[i] : 0u, i < n_bytes ? ((const unsigned char *)b)[i] : 0u);
}

/* splitmix64: the same numbers on every machine. */
static inline uint64_t test_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* In [0, n). */
static inline int64_t test_below(uint64_t *state, int64_t n)
{
    return (int64_t)(test_random(state) % (uint64_t)n);
}

/* In [-1, 1). */
static inline double test_uniform(uint64_t *state)
{
    return (double)(int64_t)(test_random(state) >> 11) * 0x1p-52 - 1.0;
}

/* The runner names the instruction set in DSC_CPU_ISA; the cores read no environment. */
__attribute__((constructor)) static void test_choose_isa(void)
{
    const char *isa = getenv("DSC_CPU_ISA");

    if (isa != NULL && isa[0] != '\0' && dsc_cpu_isa_force(isa) != DSC_OK) {
        fprintf(stderr, "%s\n", dsc_last_error());
        exit(1);
    }
}

static inline void *test_alloc(size_t n_bytes)
{
    void *memory = malloc(n_bytes > 0 ? n_bytes : 1);

    if (memory == NULL) {
        fprintf(stderr, "no memory for %zu bytes\n", n_bytes);
        exit(1);
    }
    return memory;
}

/* Prints the count, and gives main's exit code. */
static inline int test_finish(const char *file)
{
    if (test_n_failures > 0)
        fprintf(stderr, "%s: %ld of %ld checks failed\n", file, (long)test_n_failures, (long)test_n_checks);
    else
        printf("%s: %ld checks\n", file, test_n_checks);
    return test_n_failures > 0 ? 1 : 0;
}

#endif
