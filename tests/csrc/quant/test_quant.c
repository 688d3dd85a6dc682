/*
 * Quantization by groups against the formulas of dsc/quant.h in f64, and a search over all codes of a format; the same
 * bytes for every instruction set, any threads and any cut of the rows.
 */
#include "arrays.h"
#include "pool.h"

#include "dsc/quant.h"

struct format {
    int bits;
    double lowest, largest, span;
    int exponent, mantissa_bits, bias; /* mantissa_bits -1: integers */
};

static const struct format formats[] = {
    {8, -128, 127, 127.5, 6, -1, 0},
    {4, -8, 7, 7.5, 2, -1, 0},
    {8, -128, 127, 128, 6, -1, 0},
    {4, -8, 7, 8, 2, -1, 0},
    {8, -448, 448, 448, 8, 3, 7},
    {8, -57344, 57344, 57344, 15, 2, 15},
};

static const char *const names[] = {
#define DSC_QUANT(name, code_bits, lowest, largest, span, exponent, mantissa_bits, least_exponent) #name,
#include "dsc/quant_formats.inc"
#undef DSC_QUANT
};

/* A call, and the memory of its results. */
struct run {
    struct dsc_quant call;
    struct array x, y, back, scales;
    unsigned char *codes;
    int8_t *zeros;
    int64_t n_bytes, n_groups;
};

static struct run run_create(int64_t n_rows, int64_t n_cols, int64_t group, dsc_dtype dtype, int format, size_t shift)
{
    struct run run = {.n_bytes = n_rows * dsc_quant_row_bytes((dsc_quant_format)format, n_cols),
                      .n_groups = n_rows * dsc_quant_n_groups(n_cols, group)};

    run.x = array_create(dtype, n_rows * n_cols, shift);
    run.y = array_create(dtype, n_rows * n_cols, shift);
    run.back = array_create(dtype, n_rows * n_cols, shift);
    run.scales = array_create(DSC_DTYPE_F32, run.n_groups, 0);
    run.codes = test_alloc((size_t)run.n_bytes + 1);
    run.zeros = test_alloc((size_t)run.n_groups + 1);
    memset(run.codes, 0x55, (size_t)run.n_bytes + 1);
    memset(run.zeros, 0x55, (size_t)run.n_groups + 1);
    run.call = (struct dsc_quant){.n_rows = n_rows,
                                  .n_cols = n_cols,
                                  .dtype = dtype,
                                  .format = (dsc_quant_format)format,
                                  .group = group,
                                  .is_symmetric = true,
                                  .x = run.x.data,
                                  .y = run.y.data,
                                  .codes = run.codes,
                                  .scales = (float *)(void *)run.scales.data,
                                  .zero_points = run.zeros};
    return run;
}

static void run_destroy(struct run *run)
{
    CHECK_EQ(run->codes[run->n_bytes], 0x55);
    CHECK_EQ(run->zeros[run->n_groups], 0x55);
    array_destroy(&run->x);
    array_destroy(&run->y);
    array_destroy(&run->back);
    array_destroy(&run->scales);
    free(run->codes);
    free(run->zeros);
}

static void run_all(struct run *run, const struct dsc_par *par)
{
    struct dsc_quant decode = run->call;

    CHECK_STATUS(dsc_quant_fake(&run->call, par), DSC_OK);
    CHECK_STATUS(dsc_quant_quantize(&run->call, par), DSC_OK);
    decode.y = run->back.data;
    CHECK_STATUS(dsc_quant_dequantize(&decode, par), DSC_OK);
    CHECK_SAME(&run->y, &run->back);
}

/* The number of a code, and NaN or inf where the format has them. */
static double number_of(const struct format *f, int code)
{
    if (f->mantissa_bits < 0)
        return f->bits == 4 ? code - 8 : (int8_t)code;

    int magnitude = code & 0x7f;
    int exponent = magnitude >> f->mantissa_bits;
    int mantissa = magnitude & ((1 << f->mantissa_bits) - 1);
    double value = exponent == 0 ? ldexp(mantissa, 1 - f->bias - f->mantissa_bits)
                                 : ldexp(mantissa + (1 << f->mantissa_bits), exponent - f->bias - f->mantissa_bits);

    if (f->mantissa_bits == 2 ? magnitude > 0x7c : magnitude == 0x7f)
        value = NAN;
    else if (f->mantissa_bits == 2 && magnitude == 0x7c)
        value = INFINITY;
    return code & 0x80 ? -value : value;
}

static int code_at(const struct run *run, int64_t row, int64_t column)
{
    const unsigned char *codes = run->codes + row * dsc_quant_row_bytes(run->call.format, run->call.n_cols);

    return formats[run->call.format].bits == 4 ? codes[column / 2] >> (column % 2 * 4) & 15 : codes[column];
}

/* Rounds to `bits` significant bits, with the least exponent of a type, in f64. */
static double rounded(double x, int bits, int least_exponent)
{
    int exponent;

    frexp(x, &exponent);
    exponent = exponent - 1 < least_exponent ? least_exponent : exponent - 1;
    return ldexp(nearbyint(ldexp(x, bits - 1 - exponent)), exponent - bits + 1);
}

static double scale_in_type(dsc_quant_scale type, double scale)
{
    if (type == DSC_QUANT_SCALE_BF16)
        return rounded((float)scale, 8, -126);
    if (type == DSC_QUANT_SCALE_F16)
        return rounded((float)scale, 11, -14) > 65504 ? INFINITY : rounded((float)scale, 11, -14);
    return (float)scale;
}

/* The scale and zero point of columns [begin, end). */
static double wanted_scale(const struct run *run, int64_t row, int64_t begin, int64_t end, double *zero_point)
{
    const struct format *f = &formats[run->call.format];
    double low = 0, high = 0, largest = 0, scale;
    int exponent;

    *zero_point = 0;
    for (int64_t i = begin; i < end; i++) {
        double x = array_get(&run->x, row * run->call.n_cols + i);

        if (!isfinite(x))
            return NAN;
        low = x < low ? x : low;
        high = x > high ? x : high;
        largest = fabs(x) > largest ? fabs(x) : largest;
    }
    if (run->call.scale_type == DSC_QUANT_SCALE_E8M0) {
        frexp(largest, &exponent);
        exponent -= 1 + f->exponent;
        return largest == 0 ? 1 : ldexp(1, exponent < -100 ? -100 : exponent);
    }
    /* Quotients of f32 numbers are rounded to f64 and then to f32, which is the same as once. */
    scale = run->call.is_symmetric ? largest / f->span : (double)(float)(high - low) / (f->largest - f->lowest);
    scale = scale_in_type(run->call.scale_type, scale);
    if (!isfinite(scale))
        return NAN;
    if (scale < 0x1p-100)
        scale = 1;
    if (!run->call.is_symmetric) {
        *zero_point = nearbyint((float)(f->lowest - (double)(float)(low / scale)));
        *zero_point = fmin(fmax(*zero_point, f->lowest), f->largest);
    }
    return scale;
}

/* Distance of the nearest number of the format to x. */
static double least_distance(const struct format *f, double x)
{
    double least = INFINITY;

    for (int code = 0; code < 1 << f->bits; code++) {
        double number = number_of(f, code);

        if (isfinite(number) && fabs(number - x) < least)
            least = fabs(number - x);
    }
    return least;
}

static void check_element(const struct run *run, int64_t row, int64_t column, double scale, double zero_point)
{
    const struct format *f = &formats[run->call.format];
    double x = array_get(&run->x, row * run->call.n_cols + column);
    double t = (float)((double)(float)(x / scale) + zero_point);
    int code = code_at(run, row, column);
    double number = number_of(f, code);
    double distance;
    struct array y = {.dtype = run->call.dtype, .n = 1};
    unsigned char bytes[4];

    if (isnan(scale)) {
        CHECK(f->mantissa_bits < 0 ? number == 0 : isnan(number));
        CHECK(isnan(array_get(&run->y, row * run->call.n_cols + column)));
        return;
    }
    t = fmin(fmax(t, f->lowest), f->largest);
    distance = fabs(number - t);
    test_report(distance == least_distance(f, t), __FILE__, __LINE__, "%a is %g of scale %a, its code %d is %g", x, t, scale, code, number);
    if (code > 0 && code + 1 < 1 << f->bits && fabs(number_of(f, code ^ 1) - t) == distance) { /* a tie */
        bool is_even = f->mantissa_bits < 0 ? fmod(number, 2) == 0 : code % 2 == 0;

        test_report(is_even, __FILE__, __LINE__, "%g lies between two numbers, the odd %g was taken", t, number);
    }
    y.data = bytes;
    array_set(&y, 0, (float)((number - zero_point) * scale));
    test_report(array_get(&run->y, row * run->call.n_cols + column) == array_get(&y, 0), __FILE__, __LINE__, "%g of scale %a is %a, not %a",
                number, scale, (double)array_get(&y, 0), (double)array_get(&run->y, row * run->call.n_cols + column));
}

static void check_run(const struct run *run)
{
    int64_t of_row = dsc_quant_n_groups(run->call.n_cols, run->call.group);

    for (int64_t g = 0; g < run->n_groups; g++) {
        int64_t row = g / of_row, begin = g % of_row * run->call.group, end = begin + run->call.group;
        double zero_point, wanted;

        end = end < run->call.n_cols ? end : run->call.n_cols;
        wanted = wanted_scale(run, row, begin, end, &zero_point);
        TEST_AT(g);
        CHECK_NEAR(array_get(&run->scales, g), wanted, 0, 0);
        if (!run->call.is_symmetric)
            CHECK_EQ(run->zeros[g], isnan(wanted) ? 0 : (int64_t)zero_point);
        for (int64_t i = begin; i < end; i++)
            check_element(run, row, i, wanted, zero_point);
    }
}

/* Values of many magnitudes; some groups are zeros, and with has_specials some have NaN, inf and the ends of f32. */
static void fill(struct array *x, bool has_specials, uint64_t *random)
{
    double scale = 1;

    for (int64_t i = 0; i < x->n; i++) {
        if (i % 37 == 0)
            scale = test_below(random, 4) == 0 ? 0 : ldexp(1, (int)test_below(random, 20) - 14);
        array_set(x, i, (float)(scale * test_uniform(random)));
    }
    for (int64_t i = 0; has_specials && i < x->n; i += 97) {
        static const uint32_t specials[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f7fffff, 0xff7fffff, 0x00000001, 0x80800000, 0x80000000};

        array_set(x, i, dsc_f32_from_bits(specials[test_below(random, 8)]));
    }
}

static void test_formulas(const struct dsc_par *par)
{
    static const int64_t sizes[][3] = {{0, 5, 2},   {3, 0, 4},     {1, 1, 1},     {3, 7, 3},    {2, 8, 8},     {5, 17, 16},
                                       {2, 64, 64}, {3, 130, 64},  {7, 33, 1},    {1, 100, 32}, {2, 1000, 65}, {2, 129, 1000},
                                       {211, 3, 2}, {3, 4097, 257}};
    uint64_t random = 1;

    for (int format = 0; format < DSC_QUANT_FORMAT_COUNT; format++)
        for (int kind = 0; kind < 5; kind++)
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
                for (dsc_dtype dtype = DSC_DTYPE_F32; dtype < DSC_DTYPE_COUNT; dtype++) {
                    struct run run = run_create(sizes[s][0], sizes[s][1], sizes[s][2], dtype, format, s % 3);

                    TEST_CASE("%s, kind %d, %s, %d x %d by %d", names[format], kind, dtype_names[dtype], (int)sizes[s][0],
                              (int)sizes[s][1], (int)sizes[s][2]);
                    run.call.is_symmetric = kind < 4;
                    run.call.scale_type = kind < 4 ? (dsc_quant_scale)kind : (dsc_quant_scale)(s % 3);
                    fill(&run.x, s % 2 == 1, &random);
                    if (run.call.is_symmetric || formats[format].mantissa_bits < 0) {
                        run_all(&run, par);
                        check_run(&run);
                    }
                    run_destroy(&run);
                }
}

static void check_equal(const struct run *a, const struct run *b)
{
    CHECK_BYTES(a->codes, b->codes, (size_t)a->n_bytes);
    CHECK_BYTES(a->zeros, b->zeros, a->call.is_symmetric ? 0 : (size_t)a->n_groups);
    CHECK_SAME(&a->scales, &b->scales);
    CHECK_SAME(&a->y, &b->y);
}

/* Every instruction set, and threads, give the same bytes; groups of any size. */
static void test_same_bits(const struct dsc_par *par)
{
    static const int64_t sizes[][3] = {{3, 1000, 65}, {2, 70001, 63}, {1, 200003, 200003}, {2, 100001, 70001}, {300, 129, 43}};
    uint64_t random = 2;

    for (int format = 0; format < DSC_QUANT_FORMAT_COUNT; format++)
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (int kind = 0; kind < 4; kind++) {
                dsc_dtype dtype = (dsc_dtype)((s + (size_t)kind) % DSC_DTYPE_COUNT);
                struct run first = run_create(sizes[s][0], sizes[s][1], sizes[s][2], dtype, format, 1);
                const char *isa;
                int isa_index = 0;

                first.call.is_symmetric = kind < 2 || formats[format].mantissa_bits >= 0;
                first.call.is_stochastic = kind % 2 == 1;
                first.call.seed = 0x123456789abcdef0u;
                first.call.offset = 5 * kind;
                fill(&first.x, kind == 0, &random);
                CHECK_STATUS(dsc_cpu_isa_force("scalar"), DSC_OK);
                run_all(&first, NULL);
                while (next_isa(&isa_index, &isa)) {
                    struct run run = run_create(sizes[s][0], sizes[s][1], sizes[s][2], dtype, format, 2);

                    TEST_CASE("%s on %s, kind %d, size %d", names[format], isa, kind, (int)s);
                    memcpy(run.x.data, first.x.data, (size_t)run.x.n * dsc_dtype_bytes(dtype));
                    run.call.is_symmetric = first.call.is_symmetric;
                    run.call.is_stochastic = first.call.is_stochastic;
                    run.call.seed = first.call.seed;
                    run.call.offset = first.call.offset;
                    run_all(&run, par);
                    check_equal(&first, &run);
                    run_destroy(&run);
                }
                run_destroy(&first);
            }
}

/* Random rounding takes one of the two neighbours, and its mean is the value. A part of the rows gives their numbers. */
static void test_stochastic(void)
{
    enum { N = 1 << 14 };
    static const double values[] = {0.25, -0.7, 3.14159, 100.0, -0.001};

    for (int format = 0; format < DSC_QUANT_FORMAT_COUNT; format++)
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            const struct format *f = &formats[format];
            double value = fmin(fmax(values[v], f->lowest), f->largest), below = -INFINITY, above = INFINITY, sum = 0;
            struct run run = run_create(1, N, N, DSC_DTYPE_F32, format, 0), part;

            TEST_CASE("%s, %g", names[format], value);
            value = (float)value;
            for (int64_t i = 0; i < N; i++)
                array_set(&run.x, i, (float)value);
            array_set(&run.scales, 0, 1.0f);
            run.call.has_scales = true;
            run.call.is_stochastic = true;
            run.call.seed = 7 + v;
            run_all(&run, NULL);
            for (int code = 0; code < 1 << f->bits; code++) {
                double number = number_of(f, code);

                below = isfinite(number) && number <= value && number > below ? number : below;
                above = isfinite(number) && number >= value && number < above ? number : above;
            }
            for (int64_t i = 0; i < N; i++) {
                double y = array_get(&run.y, i);

                TEST_AT(i);
                test_report(y == below || y == above, __FILE__, __LINE__, "%g became %g, neither %g nor %g", value, y, below, above);
                sum += y;
            }
            test_report(fabs(sum / N - value) <= 5 * (above - below) / sqrt(4.0 * N), __FILE__, __LINE__, "the mean of %g is %g", value, sum / N);
            part = run_create(1, 1003, 1003, DSC_DTYPE_F32, format, 0);
            for (int64_t i = 0; i < part.x.n; i++)
                array_set(&part.x, i, (float)value);
            array_set(&part.scales, 0, 1.0f);
            part.call.has_scales = part.call.is_stochastic = true;
            part.call.seed = run.call.seed;
            part.call.offset = 5003;
            run_all(&part, NULL);
            CHECK_BYTES(part.y.data, run.y.data + 5003 * sizeof(float), 1003 * sizeof(float));
            run_destroy(&part);
            run_destroy(&run);
        }
}

/* With a given scale a float8 format is a conversion of every number: numbers of the format stay, others saturate. */
static void test_given_scales(void)
{
    for (int format = DSC_QUANT_FORMAT_e4m3; format < DSC_QUANT_FORMAT_COUNT; format++) {
        const struct format *f = &formats[format];
        struct run run = run_create(1, 256, 256, DSC_DTYPE_F32, format, 0);

        TEST_CASE("%s", names[format]);
        for (int code = 0; code < 256; code++)
            array_set(&run.x, code, (float)number_of(f, code));
        array_set(&run.scales, 0, 1.0f);
        run.call.has_scales = true;
        run_all(&run, NULL);
        for (int code = 0; code < 256; code++) {
            double number = number_of(f, code);

            TEST_AT(code);
            if (isnan(number))
                CHECK_EQ(run.codes[code], 0x7f);
            else if (isinf(number))
                CHECK(array_get(&run.y, code) == (number > 0 ? f->largest : f->lowest));
            else
                CHECK_EQ(run.codes[code], code);
        }
        run_destroy(&run);
    }
}

static void test_refusals(void)
{
    float x[8] = {0}, scales[8];
    int8_t codes[8], zeros[8];
    struct dsc_quant good = {.n_rows = 1, .n_cols = 8, .group = 4, .is_symmetric = true, .x = x, .y = x, .codes = codes, .scales = scales, .zero_points = zeros};
    struct dsc_quant bad = good;
    dsc_quant_format format;

#define REFUSED(field, value, status, word)                              \
    do {                                                                 \
        bad = good;                                                      \
        bad.field = (value);                                             \
        CHECK_ERROR(dsc_quant_quantize(&bad, NULL), (status), (word));   \
    } while (0)

    CHECK_STATUS(dsc_quant_quantize(&good, NULL), DSC_OK);
    REFUSED(n_rows, -1, DSC_EINVAL, "negative");
    REFUSED(n_cols, -1, DSC_EINVAL, "negative");
    REFUSED(n_rows, INT64_MAX / 2, DSC_EOVERFLOW, "int64_t");
    REFUSED(group, 0, DSC_EINVAL, "group is 0");
    REFUSED(dtype, (dsc_dtype)9, DSC_EINVAL, "dtype is 9");
    REFUSED(format, (dsc_quant_format)9, DSC_EINVAL, "format is 9");
    REFUSED(scale_type, (dsc_quant_scale)9, DSC_EINVAL, "scale_type is 9");
    REFUSED(x, NULL, DSC_EINVAL, "x is NULL");
    REFUSED(codes, NULL, DSC_EINVAL, "codes is NULL");
    REFUSED(scales, NULL, DSC_EINVAL, "scales is NULL");
    good.is_symmetric = false;
    REFUSED(zero_points, NULL, DSC_EINVAL, "zero_points is NULL");
    REFUSED(format, DSC_QUANT_FORMAT_e4m3, DSC_EINVAL, "e4m3 has no zero points");
    REFUSED(scale_type, DSC_QUANT_SCALE_E8M0, DSC_EINVAL, "powers of two");
    good.is_stochastic = true;
    REFUSED(offset, -1, DSC_EINVAL, "offset is -1");
    REFUSED(offset, INT64_MAX - 3, DSC_EINVAL, "offset");
    bad = good;
    bad.y = NULL;
    CHECK_ERROR(dsc_quant_fake(&bad, NULL), DSC_EINVAL, "y is NULL");
    CHECK_ERROR(dsc_quant_dequantize(&bad, NULL), DSC_EINVAL, "y is NULL");
    CHECK_ERROR(dsc_quant_find("int3", &format), DSC_ENOTFOUND,
                "int8, int4, int8_over_256, int4_over_16, e4m3, e5m2");
    CHECK_STATUS(dsc_quant_find("e5m2", &format), DSC_OK);
    CHECK_EQ(format, DSC_QUANT_FORMAT_e5m2);
    CHECK_EQ(dsc_quant_row_bytes(DSC_QUANT_FORMAT_int4, 9), 8);
    CHECK_EQ(dsc_quant_row_bytes(DSC_QUANT_FORMAT_int4, -1), 0);
    CHECK_EQ(dsc_quant_n_groups(9, 4), 3);
    CHECK_EQ(dsc_quant_n_groups(9, 0), 0);
}

int main(void)
{
    struct pool pool;

    pool_init(&pool, 3, 1);
    test_formulas(&pool.par);
    test_same_bits(&pool.par);
    test_stochastic();
    test_given_scales();
    test_refusals();
    pool_clear(&pool);
    return test_finish(__FILE__);
}
