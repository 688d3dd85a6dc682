/*
 * Compiled once per instruction set: products with packed codes. A tile is a few rows of x times a few rows of codes.
 * Codes become f32 in registers, so that memory delivers one byte or half a byte for a column of the weight.
 */
#include "cpu/wide.h"
#include "quant/table.h"

#define STEP static inline __attribute__((always_inline))

/* Partial sums of an element, for any width of registers. */
#define SUMS 16
#define REGISTERS (SUMS / WIDE_LANES)

/* A tile is DSC_PRODUCT_STRIP rows of codes times a row of x, or one times at most MAX_ROWS. */
#define MAX_ROWS 4
#define MAX_PAIRS (DSC_PRODUCT_STRIP > MAX_ROWS ? DSC_PRODUCT_STRIP : MAX_ROWS)

struct sums {
    wide of[REGISTERS];
};

/* Scales that a tile holds as f32, of each row of codes. */
#define SCALES 64

struct tile {
    const struct dsc_quant_product *call;
    const uint8_t *codes; /* of the tile's first row of codes */
    int64_t row_bytes;
    const void *x; /* the tile's first row of x */
};

typedef uint8_t wide_bytes __attribute__((vector_size(WIDE_LANES)));

/* WIDE_LANES codes of 8 bits to numbers. */
STEP wide numbers_of_8(const uint8_t *codes)
{
#if defined(__AVX512F__)
    wide_ints ints = (wide_ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes));
#elif defined(__AVX2__)
    wide_ints ints = (wide_ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)codes));
#else
    wide_bytes bytes;

    memcpy(&bytes, codes, sizeof bytes);

    wide_ints ints = __builtin_convertvector(bytes, wide_ints);
#endif
    return __builtin_convertvector(ints - 128, wide);
}

/* WIDE_LANES codes of 4 bits to numbers: each lane shifts its code down from the word of its eight. */
STEP wide numbers_of_4(const uint8_t *codes)
{
#if defined(__AVX512F__)
    __m512i words = _mm512_broadcast_i32x2(_mm_loadl_epi64((const __m128i *)(const void *)codes));
    wide_bits of_lane =
        (wide_bits)_mm512_permutexvar_epi32(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), words);
    const wide_bits shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
#elif WIDE_LANES == 8
    uint32_t word;

    memcpy(&word, codes, sizeof word);

    wide_bits of_lane = word - (wide_bits){0};
    const wide_bits shifts = {0, 4, 8, 12, 16, 20, 24, 28};
#else
    uint16_t word;

    memcpy(&word, codes, sizeof word);

    wide_bits of_lane = word - (wide_bits){0};
    const wide_bits shifts = {0, 4, 8, 12};
#endif
    return __builtin_convertvector((wide_ints)((of_lane >> shifts) & 15u) - 8, wide);
}

/* SUMS codes from `column` on, which lies on a byte's border. */
STEP struct sums numbers_of(int bits, const uint8_t *codes, int64_t column)
{
    struct sums numbers;

    for (int r = 0; r < REGISTERS; r++) {
        int64_t at = column + r * WIDE_LANES;

        numbers.of[r] = bits == 8 ? numbers_of_8(codes + at) : numbers_of_4(codes + (at >> 1));
    }
    return numbers;
}

STEP struct sums elements_of(dsc_dtype dtype, const void *x, int64_t i)
{
    struct sums found;

    for (int r = 0; r < REGISTERS; r++)
        found.of[r] = dsc_wide_load_as(dtype, x, i + r * WIDE_LANES, WIDE_LANES);
    return found;
}

/* n codes from any column on, and n elements; zeros up to SUMS. */
static __attribute__((noinline)) struct sums few_numbers_of(int bits, const uint8_t *codes, int64_t column, int64_t n)
{
    struct sums numbers;
    float lanes[SUMS] = {0};

    for (int64_t i = 0; i < n; i++, column++)
        lanes[i] = (float)(bits == 8 ? codes[column] - 128 : (codes[column / 2] >> (column % 2 * 4) & 15) - 8);
    memcpy(&numbers, lanes, sizeof numbers);
    return numbers;
}

static __attribute__((noinline)) struct sums few_elements_of(dsc_dtype dtype, const void *x, int64_t i, int64_t n)
{
    struct sums found;
    float lanes[SUMS] = {0};

    for (int64_t lane = 0; lane < n; lane++)
        lanes[lane] = dsc_element(dtype, x, i + lane);
    memcpy(&found, lanes, sizeof found);
    return found;
}

/* Adds columns [column, column + n), n <= SUMS, to the sums of a tile's pairs; is_whole: n is SUMS. */
STEP void add_columns(int bits, dsc_dtype dtype, int n_outputs, int n_rows, bool is_whole, const struct tile *tile,
                      int64_t column, int64_t n, struct sums sums[])
{
    for (int o = 0; o < n_outputs; o++) {
        const uint8_t *codes = tile->codes + o * tile->row_bytes;
        struct sums numbers = is_whole ? numbers_of(bits, codes, column) : few_numbers_of(bits, codes, column, n);

        for (int row = 0; row < n_rows; row++) {
            int64_t at = row * tile->call->n_cols + column;
            struct sums x = is_whole ? elements_of(dtype, tile->x, at) : few_elements_of(dtype, tile->x, at, n);

            for (int r = 0; r < REGISTERS; r++)
                sums[o * n_rows + row].of[r] = dsc_wide_fma(numbers.of[r], x.of[r], sums[o * n_rows + row].of[r]);
        }
    }
}

/* Adds columns [begin, end) of one group to the totals. is_even: they begin and end at multiples of SUMS. */
STEP void add_group(int bits, dsc_dtype dtype, int n_outputs, int n_rows, bool is_even, const struct tile *tile,
                    int64_t begin, int64_t end, const float *scales, struct sums totals[])
{
    struct sums sums[MAX_PAIRS] = {{{{0}}}};
    int64_t column = begin;

    if (is_even || bits == 8 || begin % 2 == 0)
        for (; column + SUMS <= end; column += SUMS)
            add_columns(bits, dtype, n_outputs, n_rows, true, tile, column, SUMS, sums);
    for (; !is_even && column < end; column += SUMS)
        add_columns(bits, dtype, n_outputs, n_rows, false, tile, column, end - column < SUMS ? end - column : SUMS,
                    sums);
    for (int o = 0; o < n_outputs; o++) {
        wide scale = dsc_wide_all(scales[o * SCALES]);

        for (int pair = o * n_rows; pair < (o + 1) * n_rows; pair++)
            for (int r = 0; r < REGISTERS; r++)
                totals[pair].of[r] = dsc_wide_fma(sums[pair].of[r], scale, totals[pair].of[r]);
    }
}

static float folded(const struct sums *sums)
{
    float lanes[SUMS];

    memcpy(lanes, sums, sizeof lanes);
    for (int half = SUMS / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

/* Scales of n groups from g on as f32, by row of codes. */
static __attribute__((noinline)) void load_scales(const struct dsc_quant_product *call, int64_t output, int n_outputs,
                                                  int64_t g, int64_t n, float scales[DSC_PRODUCT_STRIP * SCALES])
{
    int64_t n_groups = dsc_quant_n_groups(call->n_cols, call->group);

    for (int o = 0; o < n_outputs; o++)
        for (int64_t i = 0; i < n; i++)
            scales[o * SCALES + i] = dsc_element(call->scale_dtype, call->scales, (output + o) * n_groups + g + i);
}

static __attribute__((noinline)) void store(const struct dsc_quant_product *call, int64_t row, int64_t output,
                                            const struct sums *total)
{
    float value = folded(total);

    if (call->bias != NULL)
        value += dsc_element(call->bias_dtype, call->bias, output);
    dsc_put_element(call->dtype, value, call->y, row * call->n_outputs + output);
}

STEP void run_tile(int bits, dsc_dtype dtype, int n_outputs, int n_rows, bool is_even,
                   const struct dsc_quant_product *call, int64_t row, int64_t output)
{
    int64_t row_bytes = bits == 8 ? 4 * ((call->n_cols + 3) / 4) : 4 * ((call->n_cols + 7) / 8);
    const struct tile tile = {
        .call = call,
        .codes = (const uint8_t *)call->codes + output * row_bytes,
        .row_bytes = row_bytes,
        .x = (const char *)call->x + (size_t)(row * call->n_cols) * (dtype == DSC_DTYPE_F32 ? 4 : 2),
    };
    struct sums totals[MAX_PAIRS] = {{{{0}}}};
    float scales[DSC_PRODUCT_STRIP * SCALES];
    int64_t n_groups = dsc_quant_n_groups(call->n_cols, call->group);
    int64_t begin = 0;

    for (int64_t g = 0; g < n_groups; g++) {
        int64_t end = call->n_cols - begin < call->group ? call->n_cols : begin + call->group;

        if (g % SCALES == 0)
            load_scales(call, output, n_outputs, g, n_groups - g < SCALES ? n_groups - g : SCALES, scales);
        add_group(bits, dtype, n_outputs, n_rows, is_even, &tile, begin, end, scales + g % SCALES, totals);
        begin = end;
    }
    for (int o = 0; o < n_outputs; o++)
        for (int i = 0; i < n_rows; i++)
            store(call, row + i, output + o, &totals[o * n_rows + i]);
}

/* All rows of x times a few rows of codes, which stay in the cache. */
STEP void run_strip(dsc_dtype dtype, int bits, const struct dsc_quant_product *call, int64_t first, int64_t last)
{
    bool is_even = call->n_cols % SUMS == 0 && (call->group % SUMS == 0 || call->group >= call->n_cols);
    int64_t row = 0;

    for (; is_even && row + MAX_ROWS <= call->n_rows; row += MAX_ROWS)
        for (int64_t output = first; output < last; output++)
            run_tile(bits, dtype, 1, MAX_ROWS, true, call, row, output);
    for (; is_even && last - first == DSC_PRODUCT_STRIP && row < call->n_rows; row++)
        run_tile(bits, dtype, DSC_PRODUCT_STRIP, 1, true, call, row, first);
    for (; row < call->n_rows; row++)
        for (int64_t output = first; output < last; output++)
            run_tile(bits, dtype, 1, 1, false, call, row, output);
}

#define RUN_STRIP(dtype, bits, call, first, last) run_strip(dtype, bits, call, first, last)

void DSC_K(quant_product)(const struct dsc_quant_product *call, int64_t first, int64_t last)
{
    for (int64_t output = first; output < last; output += DSC_PRODUCT_STRIP) {
        int64_t end = last - output < DSC_PRODUCT_STRIP ? last : output + DSC_PRODUCT_STRIP;

        if (call->bits == 8)
            WITH_DTYPE(call->dtype, RUN_STRIP, 8, call, output, end);
        else
            WITH_DTYPE(call->dtype, RUN_STRIP, 4, call, output, end);
    }
}
