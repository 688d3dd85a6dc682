/*
 * Compiled once per instruction set: products of 16-bit matrices, in f32.
 *
 * Registers hold 8 lanes on every instruction set, so that all of them add in the same order.
 */
#include "cpu/wide.h"
#include "nn/table.h"

#define STEP static inline __attribute__((always_inline))

#define LANES 8
typedef float lanes __attribute__((vector_size(4 * LANES)));

STEP lanes load(const float *src)
{
    lanes x;

    memcpy(&x, src, sizeof x);
    return x;
}

STEP void store(lanes x, float *dst)
{
    memcpy(dst, &x, sizeof x);
}

/* a * b + c with one rounding. */
STEP lanes fused(lanes a, lanes b, lanes c)
{
#if defined(__AVX2__) && defined(__FMA__)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int lane = 0; lane < LANES; lane++)
        c[lane] = fmaf(a[lane], b[lane], c[lane]);
    return c;
#endif
}

STEP void widen_step(dsc_dtype dtype, const void *src, int64_t begin, float *dst, int64_t i, int64_t n)
{
    dsc_wide_store(dsc_wide_load_as(dtype, src, begin + i, n), dst + i, WIDE_LANES);
}

#define WIDEN(dtype, src, begin, n, dst) EACH_WIDE_AS(dtype, n, widen_step, src, begin, dst)

/* Elements [begin, begin + n) as f32, and zeros up to a multiple of LANES or of a register. */
static void widen(dsc_dtype dtype, const void *src, int64_t begin, int64_t n, float *dst)
{
    WITH_DTYPE(dtype, WIDEN, src, begin, n, dst);
    for (int64_t i = n; i % LANES != 0; i++)
        dst[i] = 0;
}

STEP void narrow_step(dsc_dtype dtype, const float *values, void *y, int64_t begin, int64_t i, int64_t n)
{
    dsc_wide_store_as(dtype, dsc_wide_load(values + i, n), y, begin + i, n);
}

#define NARROW(dtype, values, n, y, begin) EACH_WIDE_AS(dtype, n, narrow_step, values, y, begin)

/* The first n of `values`, rounded to elements [begin, begin + n) of y. */
static void narrow(dsc_dtype dtype, const float *values, int64_t n, void *y, int64_t begin)
{
    WITH_DTYPE(dtype, NARROW, values, n, y, begin);
}

/* The sum of 8 lanes, in halves. */
STEP float fold(const float *sums)
{
#if defined(__AVX2__)
    __m128 four = _mm_add_ps(_mm_loadu_ps(sums), _mm_loadu_ps(sums + 4));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
    float folded[LANES];

    memcpy(folded, sums, sizeof folded);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            folded[lane] += folded[lane + half];
    return folded[0];
#endif
}

/* Most columns of a panel. */
#define PANEL_COLS 256

/* Adds the bias of columns from `col`, and rounds values to the row of y. */
static void finish_row(const struct dsc_nn_product *call, int64_t batch, int64_t row, int64_t col, float *values,
                       int64_t n_cols)
{
    for (int64_t c = 0; call->bias != NULL && c < n_cols; c++)
        values[c] += dsc_element(call->dtype, call->bias, col + c);
    narrow(call->dtype, values, n_cols, call->y, (batch * call->n_rows + row) * call->n_cols + col);
}

/* A strip is a register: the 8 lanes of one column of b, or of two. */
#if defined(__AVX512F__)
#define STRIP_COLS 2
typedef float strip __attribute__((vector_size(4 * 2 * LANES)));
#else
#define STRIP_COLS 1
typedef lanes strip;
#endif

/* LANES terms of a row, for each column of a strip. */
STEP strip strip_of(const float *terms)
{
#if defined(__AVX512F__)
    return (strip)_mm512_broadcast_f32x8(_mm256_load_ps(terms));
#else
    return load(terms);
#endif
}

STEP strip load_strip(const float *src)
{
    strip x;

    memcpy(&x, src, sizeof x);
    return x;
}

STEP void store_strip(strip x, float *dst)
{
    memcpy(dst, &x, sizeof x);
}

STEP strip fused_strip(strip a, strip b, strip c)
{
#if defined(__AVX512F__)
    return (strip)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return fused(a, b, c);
#endif
}

/* LANES elements from `begin` on, and as many a stride further if a strip has two columns. */
STEP strip widen_strip(dsc_dtype dtype, const void *src, int64_t begin, int64_t stride)
{
#if defined(__AVX512F__)
    if (dtype == DSC_DTYPE_F32) {
        const float *low = (const float *)src + begin;

        return (strip)_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(low)), _mm256_loadu_ps(low + stride),
                                         1);
    }

    const dsc_half *low = (const dsc_half *)src + begin;
    __m128i first = _mm_loadu_si128((const __m128i *)(const void *)low);
    __m128i second = _mm_loadu_si128((const __m128i *)(const void *)(low + stride));
    __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);

    if (dtype == DSC_DTYPE_F16)
        return (strip)_mm512_cvtph_ps(both);
    return (strip)_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16);
#else
    strip x;

    (void)stride;
#if WIDE_LANES == LANES
    x = (strip)dsc_wide_load_as(dtype, src, begin, LANES);
#else
    for (int lane = 0; lane < LANES; lane++)
        x[lane] = dsc_element(dtype, src, begin + lane);
#endif
    return x;
#endif
}

/* The same for the last n elements of each column, and zeros. */
STEP strip widen_rest(dsc_dtype dtype, const void *src, int64_t begin, int64_t stride, int64_t n)
{
    float rest[STRIP_COLS][LANES] = {{0}};
    strip x;

    for (int c = 0; c < STRIP_COLS; c++)
        for (int64_t t = 0; t < n; t++)
            rest[c][t] = dsc_element(dtype, src, begin + c * stride + t);
    memcpy(&x, rest, sizeof x);
    return x;
}

/*
 * A few rows: memory delivers a column faster than it could be widened into a buffer and read again. So a step widens
 * terms of some columns in registers, and uses them for each row. Each sum
 * adds as in many_tile.
 */
#define STEP_ROWS 8
#define MOST_STRIPS 8

struct few {
    DSC_ALIGNED float a[DSC_NN_FEW_ROWS][DSC_NN_DOT_TERMS];
    float y[DSC_NN_FEW_ROWS][PANEL_COLS];
};

/*
 * n_rows rows times n_strips strips of columns, which are constants after inlining. begin: the element of b at the
 * first column and term. stride: from a column to the next. Sums of n_cols columns are kept.
 */
STEP void few_tile(int n_rows, int n_strips, dsc_dtype dtype, const void *b, int64_t begin, int64_t stride,
                   int64_t n_terms, struct few *few, int64_t row, int64_t col, int n_cols)
{
    strip sums[STEP_ROWS][MOST_STRIPS] = {{{0}}};
    const int64_t size = dtype == DSC_DTYPE_F32 ? 4 : 2, per_line = 64 / size;

    for (int64_t line = 0; line < n_terms; line += per_line) {
        int64_t end = n_terms - line < per_line ? n_terms : line + per_line;

        /* The next columns are asked for at the speed at which these are used. */
        for (int c = 0; c < (row == 0 ? n_strips * STRIP_COLS : 0); c++)
            __builtin_prefetch((const char *)b + (begin + (n_strips * STRIP_COLS + c) * stride + line) * size);
        for (int64_t t = line; t < end; t += LANES) {
            strip x[MOST_STRIPS];

#pragma GCC unroll 8
            for (int i = 0; i < n_strips; i++) {
                int64_t at = begin + i * STRIP_COLS * stride + t;

                x[i] = n_terms - t >= LANES ? widen_strip(dtype, b, at, stride)
                                            : widen_rest(dtype, b, at, stride, n_terms - t);
            }
#pragma GCC unroll 8
            for (int r = 0; r < n_rows; r++) {
                strip a = strip_of(few->a[row + r] + t);

#pragma GCC unroll 8
                for (int i = 0; i < n_strips; i++)
                    sums[r][i] = fused_strip(a, x[i], sums[r][i]);
            }
        }
    }
    for (int r = 0; r < n_rows; r++)
        for (int c = 0; c < n_cols; c++) {
            float found[STRIP_COLS][LANES];

            memcpy(found, &sums[r][c / STRIP_COLS], sizeof found);
            few->y[row + r][col + c] += fold(found[c % STRIP_COLS]);
        }
}

/*
 * Strips of a step: enough sums to hide the time of one, and no more than registers hold beside the strips and a row's
 * terms: 32 of AVX-512, 16 of AVX2.
 */
#if defined(__AVX512F__)
#define FEW_STRIPS(n_rows) ((n_rows) == 1 ? 8 : (n_rows) == 8 ? 3 : 4)
#else
#define FEW_STRIPS(n_rows) ((n_rows) == 1 ? 8 : (n_rows) == 2 ? 4 : (n_rows) == 4 ? 3 : 1)
#endif

/* All columns of a block, for a constant number of rows. */
STEP void few_cols(int n_rows, dsc_dtype dtype, const struct dsc_nn_product *call, int64_t begin, int64_t n_cols,
                   int64_t n_terms, struct few *few, int64_t row)
{
    const int n_at_once = STRIP_COLS * FEW_STRIPS(n_rows);
    int64_t stride = call->b_col, col = 0;

    for (; col + n_at_once <= n_cols; col += n_at_once)
        few_tile(n_rows, FEW_STRIPS(n_rows), dtype, call->b, begin + col * stride, stride, n_terms, few, row, col,
                 n_at_once);
    for (; col < n_cols; col += STRIP_COLS) {
        bool is_lone = col + STRIP_COLS > n_cols; /* its strip has the same column twice */

        few_tile(n_rows, 1, dtype, call->b, begin + col * stride, is_lone ? 0 : stride, n_terms, few, row, col,
                 is_lone ? 1 : STRIP_COLS);
    }
}

#define FEW_COLS_AS(dtype, call, n_rows, ...)      \
    do {                                           \
        if ((n_rows) <= 1)                         \
            few_cols(1, dtype, call, __VA_ARGS__); \
        else if ((n_rows) <= 2)                    \
            few_cols(2, dtype, call, __VA_ARGS__); \
        else if ((n_rows) <= 4)                    \
            few_cols(4, dtype, call, __VA_ARGS__); \
        else                                       \
            few_cols(8, dtype, call, __VA_ARGS__); \
    } while (0)

/* Rows from `row` on, n_rows of them, at most DSC_NN_FEW_ROWS, and n_cols columns, at most PANEL_COLS. */
static void run_few(const struct dsc_nn_product *call, struct few *few, int64_t batch, int64_t row, int64_t n_rows,
                    int64_t col, int64_t n_cols)
{
    int64_t a = batch * call->a_batch + row * call->a_row, b = batch * call->b_batch + col * call->b_col;

    memset(few->y, 0, sizeof few->y);
    for (int64_t term = 0; term < call->n_terms; term += DSC_NN_DOT_TERMS) {
        int64_t n = call->n_terms - term < DSC_NN_DOT_TERMS ? call->n_terms - term : DSC_NN_DOT_TERMS;

        for (int64_t r = 0; r < n_rows; r++)
            widen(call->dtype, call->a, a + r * call->a_row + term, n, few->a[r]);
        for (int64_t r = n_rows; r < DSC_NN_FEW_ROWS && (r & (r - 1)) != 0;
             r++) /* a tile of more rows than there are */
            memset(few->a[r], 0, (size_t)(n + LANES - 1) / LANES * LANES * sizeof(float));
        for (int64_t r = 0; r < n_rows; r += STEP_ROWS)
            WITH_DTYPE(call->dtype, FEW_COLS_AS, call, n_rows - r, b + term, n_cols, n, few, r);
    }
    for (int64_t r = 0; r < n_rows; r++)
        finish_row(call, batch, row + r, col, few->y[r], n_cols);
}

/*
 * Many rows: a panel holds rows of a as f32 in the second-level cache, and the columns of one tile in the first. Rows
 * go through in groups. The first group widens the columns that the others use: its conversions and stores run beside
 * multiplications, on units of their own. A tile needs no more registers than there are: 32 of AVX-512, 16 of AVX2.
 */
#define MANY_STRIPS 4
#define MANY_COLS (MANY_STRIPS * STRIP_COLS)
#if defined(__AVX512F__)
#define MANY_ROWS 6
#else
#define MANY_ROWS 3
#endif
#define STRIP_LANES (STRIP_COLS * LANES)

/* Most rows of a panel. */
#define PANEL_ROWS 96

/* Without the last terms, all rows would begin in the same set of a cache. */
#define PANEL_TERMS (DSC_NN_DOT_TERMS + 16)

struct panel {
    DSC_ALIGNED float a[PANEL_ROWS][PANEL_TERMS];
    DSC_ALIGNED float b[DSC_NN_DOT_TERMS / LANES][MANY_STRIPS][STRIP_LANES];
    DSC_ALIGNED float y[PANEL_ROWS][PANEL_COLS];
};

/* Where a panel's columns lie in memory: element `begin` is at the first column and term. */
struct source {
    const void *b;
    int64_t begin;
    int64_t stride; /* from a column to the next */
};

typedef int32_t strip_lanes __attribute__((vector_size(4 * STRIP_LANES)));
typedef float many_sums __attribute__((vector_size(4 * MANY_COLS)));

/* The sums of the 8 lanes of each column, in halves as in `fold`. */
STEP many_sums fold_many(const strip sums[MANY_STRIPS])
{
    many_sums found;
#if STRIP_COLS == 2
    const strip_lanes low4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}, high4 = low4 + 4;
    const strip_lanes low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, high2 = low2 + 2;
    const strip_lanes next = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    const strip_lanes in_order = {0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14};
    strip first = __builtin_shuffle(sums[0], sums[1], low4) + __builtin_shuffle(sums[0], sums[1], high4);
    strip second = __builtin_shuffle(sums[2], sums[3], low4) + __builtin_shuffle(sums[2], sums[3], high4);
#else
    const strip_lanes low4 = {0, 1, 2, 3, 8, 9, 10, 11}, high4 = low4 + 4;
    const strip_lanes low2 = {0, 1, 8, 9, 4, 5, 12, 13}, high2 = low2 + 2;
    const strip_lanes next = {1, 0, 3, 2, 5, 4, 7, 6};
    const strip_lanes in_order = {0, 2, 4, 6, 0, 2, 4, 6};
    strip first = __builtin_shuffle(sums[0], sums[2], low4) + __builtin_shuffle(sums[0], sums[2], high4);
    strip second = __builtin_shuffle(sums[1], sums[3], low4) + __builtin_shuffle(sums[1], sums[3], high4);
#endif
    strip two = __builtin_shuffle(first, second, low2) + __builtin_shuffle(first, second, high2);
    strip one = __builtin_shuffle(two + __builtin_shuffle(two, next), in_order);

    memcpy(&found, &one, sizeof found);
    return found;
}

/* Terms [t, t + n) of the tile's columns, widened into the panel. n is at most LANES. */
STEP strip widen_into(struct panel *panel, dsc_dtype dtype, const struct source *source, int i, int64_t t, int64_t n)
{
    int64_t at = source->begin + i * STRIP_COLS * source->stride + t;
    strip x = n == LANES ? widen_strip(dtype, source->b, at, source->stride)
                         : widen_rest(dtype, source->b, at, source->stride, n);

    store_strip(x, panel->b[t / LANES][i]);
    return x;
}

/* Adds products of LANES terms from t on. With a source, the columns are read from it, and n terms are left there. */
STEP void many_step(int n_rows, dsc_dtype dtype, const struct source *source, struct panel *panel, int64_t row,
                    int64_t t, int64_t n, strip sums[MANY_ROWS][MANY_STRIPS])
{
    strip a[MANY_ROWS];

#pragma GCC unroll 8
    for (int r = 0; r < n_rows; r++)
        a[r] = strip_of(panel->a[row + r] + t);
#pragma GCC unroll 8
    for (int i = 0; i < MANY_STRIPS; i++) {
        strip x = source != NULL ? widen_into(panel, dtype, source, i, t, n) : load_strip(panel->b[t / LANES][i]);

#pragma GCC unroll 8
        for (int r = 0; r < n_rows; r++)
            sums[r][i] = fused_strip(a[r], x, sums[r][i]);
    }
}

/* n_rows is a constant after inlining, and so is whether there is a source, and its dtype. */
STEP void many_tile(int n_rows, dsc_dtype dtype, const struct source *source, struct panel *panel, int64_t row,
                    int64_t col, int64_t n_terms)
{
    strip sums[MANY_ROWS][MANY_STRIPS] = {{{0}}};
    const int64_t size = dtype == DSC_DTYPE_F32 ? 4 : 2, n_whole = source != NULL ? n_terms / LANES * LANES : n_terms;

    for (int64_t t = 0; t < n_whole; t += LANES) {
        /* The next tile's columns are asked for at the speed at which these are used. */
        for (int c = 0; c < (source != NULL && t * size % 64 == 0 ? MANY_COLS : 0); c++)
            __builtin_prefetch((const char *)source->b + (source->begin + (MANY_COLS + c) * source->stride + t) * size,
                               0, 2);
        many_step(n_rows, dtype, source, panel, row, t, LANES, sums);
    }
    if (n_whole < n_terms)
        many_step(n_rows, dtype, source, panel, row, n_whole, n_terms - n_whole, sums);
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; r++) {
        many_sums y;

        memcpy(&y, panel->y[row + r] + col, sizeof y);
        y += fold_many(sums[r]);
        memcpy(panel->y[row + r] + col, &y, sizeof y);
    }
}

/* Rows from `row` on, of columns that the panel holds. A function for each number of rows, as in `few_cols`. */
static void many_rows(struct panel *panel, int64_t row, int64_t n_rows, int64_t col, int64_t n_terms)
{
    for (; row + MANY_ROWS <= n_rows; row += MANY_ROWS)
        many_tile(MANY_ROWS, DSC_DTYPE_F32, NULL, panel, row, col, n_terms);
#if MANY_ROWS > 3
    if (n_rows - row == 5)
        many_tile(5, DSC_DTYPE_F32, NULL, panel, row, col, n_terms);
    else if (n_rows - row == 4)
        many_tile(4, DSC_DTYPE_F32, NULL, panel, row, col, n_terms);
    else if (n_rows - row == 3)
        many_tile(3, DSC_DTYPE_F32, NULL, panel, row, col, n_terms);
    else
#endif
        if (n_rows - row == 2)
        many_tile(2, DSC_DTYPE_F32, NULL, panel, row, col, n_terms);
    else if (n_rows - row == 1)
        many_tile(1, DSC_DTYPE_F32, NULL, panel, row, col, n_terms);
}

#define FIRST_ROWS_AS(dtype, source, panel, col, n_terms) many_tile(MANY_ROWS, dtype, source, panel, 0, col, n_terms)

/* The first MANY_ROWS rows, of columns that the panel does not hold yet. */
static void first_rows(dsc_dtype dtype, const struct source *source, struct panel *panel, int64_t col, int64_t n_terms)
{
    WITH_DTYPE(dtype, FIRST_ROWS_AS, source, panel, col, n_terms);
}

/* Widens the last columns, fewer than MANY_COLS; the others are zeros, whose sums nobody reads. */
static void widen_last(dsc_dtype dtype, const struct source *source, struct panel *panel, int64_t n_cols,
                       int64_t n_terms)
{
    DSC_ALIGNED float terms[DSC_NN_DOT_TERMS];

    memset(panel->b, 0, sizeof panel->b);
    for (int64_t c = 0; c < n_cols; c++) {
        widen(dtype, source->b, source->begin + c * source->stride, n_terms, terms);
        for (int64_t t = 0; t < n_terms; t += LANES)
            store(load(terms + t), panel->b[t / LANES][c / STRIP_COLS] + c % STRIP_COLS * LANES);
    }
}

/* A block of terms: n_rows rows of the panel times n_cols columns. */
static void add_block(dsc_dtype dtype, struct source source, struct panel *panel, int64_t n_rows, int64_t n_cols,
                      int64_t n_terms)
{
    for (int64_t c = 0; c < n_cols; c += MANY_COLS, source.begin += MANY_COLS * source.stride) {
        if (n_rows >= MANY_ROWS && n_cols - c >= MANY_COLS) {
            first_rows(dtype, &source, panel, c, n_terms);
            many_rows(panel, MANY_ROWS, n_rows, c, n_terms);
        } else {
            widen_last(dtype, &source, panel, n_cols - c < MANY_COLS ? n_cols - c : MANY_COLS, n_terms);
            many_rows(panel, 0, n_rows, c, n_terms);
        }
    }
}

static void run_panel(const struct dsc_nn_product *call, struct panel *panel, int64_t batch, int64_t row,
                      int64_t n_rows, int64_t col, int64_t n_cols)
{
    int64_t a = batch * call->a_batch + row * call->a_row, b = batch * call->b_batch + col * call->b_col;

    for (int64_t r = 0; r < n_rows; r++)
        memset(panel->y[r], 0, sizeof panel->y[r]);
    for (int64_t term = 0; term < call->n_terms; term += DSC_NN_DOT_TERMS) {
        int64_t n = call->n_terms - term < DSC_NN_DOT_TERMS ? call->n_terms - term : DSC_NN_DOT_TERMS;

        for (int64_t r = 0; r < n_rows; r++)
            widen(call->dtype, call->a, a + r * call->a_row + term, n, panel->a[r]);
        add_block(call->dtype, (struct source){call->b, b + term, call->b_col}, panel, n_rows, n_cols, n);
    }
    for (int64_t r = 0; r < n_rows; r++)
        finish_row(call, batch, row + r, col, panel->y[r], n_cols);
}

void DSC_K(nn_dot_product)(const struct dsc_nn_product *call, int64_t batch, int64_t row, int64_t end_row, int64_t col,
                           int64_t end_col)
{
    int64_t n_rows = end_row - row, n_panels = (n_rows + PANEL_ROWS - 1) / PANEL_ROWS;
    int64_t step = ((n_rows + n_panels - 1) / n_panels + MANY_ROWS - 1) / MANY_ROWS * MANY_ROWS;
    struct panel panel;
    struct few few;

    if (n_rows <= DSC_NN_FEW_ROWS) {
        for (int64_t c = col; c < end_col; c += PANEL_COLS)
            run_few(call, &few, batch, row, n_rows, c, end_col - c < PANEL_COLS ? end_col - c : PANEL_COLS);
        return;
    }
    for (int64_t r = row; r < end_row; r += step)
        for (int64_t c = col; c < end_col; c += PANEL_COLS)
            run_panel(call, &panel, batch, r, end_row - r < step ? end_row - r : step, c,
                      end_col - c < PANEL_COLS ? end_col - c : PANEL_COLS);
}

/* Rows and columns of a step of `outer_tile`. */
#define OUTER_ROWS 6
#define OUTER_COLS (2 * LANES)

/* Most rows (a multiple of OUTER_ROWS) and columns of a block. */
#define BLOCK_ROWS 96
#define BLOCK_COLS 128

struct block {
    DSC_ALIGNED float a[BLOCK_ROWS * DSC_NN_OUTER_TERMS]; /* by row, or by term */
    DSC_ALIGNED float b[BLOCK_COLS / OUTER_COLS][DSC_NN_OUTER_TERMS][OUTER_COLS];
    DSC_ALIGNED float y[BLOCK_ROWS][BLOCK_COLS];
};

STEP void outer_tile(const float *a, int64_t a_row, int64_t a_term, float (*b)[OUTER_COLS], int64_t n_terms,
                     float (*y)[BLOCK_COLS])
{
    lanes sums[OUTER_ROWS][2] = {{{0}}};

    for (int64_t t = 0; t < n_terms; t++) {
        lanes low = load(b[t]), high = load(b[t] + LANES);

        for (int r = 0; r < OUTER_ROWS; r++) {
            lanes x = a[r * a_row + t * a_term] - (lanes){0};

            sums[r][0] = fused(x, low, sums[r][0]);
            sums[r][1] = fused(x, high, sums[r][1]);
        }
    }
    for (int r = 0; r < OUTER_ROWS; r++) {
        store(load(y[r]) + sums[r][0], y[r]);
        store(load(y[r] + LANES) + sums[r][1], y[r] + LANES);
    }
}

/*
 * Widens the block's part of a, n_rows by n_terms from element `begin`; zeros up to OUTER_ROWS.
 */
static void widen_a(const struct dsc_nn_product *call, struct block *block, int64_t begin, int64_t n_rows,
                    int64_t n_terms)
{
    if (call->a_term == 1) {
        for (int64_t r = 0; r < n_rows; r++)
            widen(call->dtype, call->a, begin + r * call->a_row, n_terms, block->a + r * DSC_NN_OUTER_TERMS);
        for (int64_t r = n_rows; r % OUTER_ROWS != 0; r++)
            memset(block->a + r * DSC_NN_OUTER_TERMS, 0, DSC_NN_OUTER_TERMS * sizeof(float));
    } else {
        for (int64_t t = 0; t < n_terms; t++) {
            widen(call->dtype, call->a, begin + t * call->a_term, n_rows, block->a + t * BLOCK_ROWS);
            for (int64_t r = n_rows; r % OUTER_ROWS != 0; r++)
                block->a[t * BLOCK_ROWS + r] = 0;
        }
    }
}

STEP void widen_strip_step(dsc_dtype dtype, const void *src, int64_t begin, struct block *block, int64_t t, int64_t i,
                           int64_t n)
{
    dsc_wide_store(dsc_wide_load_as(dtype, src, begin + i, n), block->b[i / OUTER_COLS][t] + i % OUTER_COLS,
                   WIDE_LANES);
}

/* Elements [begin, begin + n), over row t of the strips of the block's b. */
#define WIDEN_STRIPS(dtype, src, begin, n, block, t) EACH_WIDE_AS(dtype, n, widen_strip_step, src, begin, block, t)

static void widen_b(const struct dsc_nn_product *call, struct block *block, int64_t begin, int64_t n_cols,
                    int64_t n_terms)
{
    /* The last strip's columns past the end are computed, and not stored. */
    for (int64_t t = 0; n_cols % OUTER_COLS != 0 && t < n_terms; t++)
        memset(block->b[n_cols / OUTER_COLS][t], 0, OUTER_COLS * sizeof(float));
    for (int64_t t = 0; t < n_terms; t++)
        WITH_DTYPE(call->dtype, WIDEN_STRIPS, call->b, begin + t * call->b_term, n_cols, block, t);
}

static void run_block(const struct dsc_nn_product *call, struct block *block, int64_t batch, int64_t row,
                      int64_t n_rows, int64_t col, int64_t n_cols)
{
    bool is_by_row = call->a_term == 1;
    int64_t a_row = is_by_row ? DSC_NN_OUTER_TERMS : 1, a_term = is_by_row ? 1 : BLOCK_ROWS;
    int64_t a = batch * call->a_batch + row * call->a_row, b = batch * call->b_batch + col;

    for (int64_t r = 0; r < n_rows || r % OUTER_ROWS != 0; r++)
        memset(block->y[r], 0, sizeof block->y[r]);
    for (int64_t term = 0; term < call->n_terms; term += DSC_NN_OUTER_TERMS) {
        int64_t n = call->n_terms - term < DSC_NN_OUTER_TERMS ? call->n_terms - term : DSC_NN_OUTER_TERMS;

        widen_a(call, block, a + term * call->a_term, n_rows, n);
        widen_b(call, block, b + term * call->b_term, n_cols, n);
        for (int64_t c = 0; c < n_cols; c += OUTER_COLS)
            for (int64_t r = 0; r < n_rows; r += OUTER_ROWS)
                outer_tile(block->a + r * a_row, a_row, a_term, block->b[c / OUTER_COLS], n,
                           (float(*)[BLOCK_COLS]) & block->y[r][c]);
    }
    for (int64_t r = 0; r < n_rows; r++)
        finish_row(call, batch, row + r, col, block->y[r], n_cols);
}

void DSC_K(nn_outer_product)(const struct dsc_nn_product *call, int64_t batch, int64_t row, int64_t end_row,
                             int64_t col, int64_t end_col)
{
    struct block block;

    for (int64_t r = row; r < end_row; r += BLOCK_ROWS)
        for (int64_t c = col; c < end_col; c += BLOCK_COLS)
            run_block(call, &block, batch, r, end_row - r < BLOCK_ROWS ? end_row - r : BLOCK_ROWS, c,
                      end_col - c < BLOCK_COLS ? end_col - c : BLOCK_COLS);
}
