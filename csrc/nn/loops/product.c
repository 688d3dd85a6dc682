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

/* A step of `dot_tile` adds to this many rows times this many columns, each in a register. */
#define DOT_ROWS 4
#define DOT_COLS 3

/* Most rows and columns of a panel. */
#define PANEL_ROWS 64
#define PANEL_COLS 256

struct panel {
    DSC_ALIGNED float a[PANEL_ROWS][DSC_NN_DOT_TERMS];
    DSC_ALIGNED float b[DOT_COLS][DSC_NN_DOT_TERMS];
    float y[PANEL_ROWS][PANEL_COLS];
};

STEP void dot_tile(int n_rows, int n_cols, struct panel *panel, int64_t row, int64_t col, int64_t n_terms)
{
    lanes sums[DOT_ROWS][DOT_COLS] = {{{0}}};

    for (int64_t t = 0; t < n_terms; t += LANES) {
        lanes b[DOT_COLS];

        for (int c = 0; c < n_cols; c++)
            b[c] = load(panel->b[c] + t);
        for (int r = 0; r < n_rows; r++) {
            lanes a = load(panel->a[row + r] + t);

            for (int c = 0; c < n_cols; c++)
                sums[r][c] = fused(a, b[c], sums[r][c]);
        }
    }
    for (int r = 0; r < n_rows; r++) {
        for (int c = 0; c < n_cols; c++) {
            float folded[LANES];

            store(sums[r][c], folded);
            for (int half = LANES / 2; half > 0; half /= 2)
                for (int lane = 0; lane < half; lane++)
                    folded[lane] += folded[lane + half];
            panel->y[row + r][col + c] += folded[0];
        }
    }
}

/* A function for each number of rows, so that their sums stay in registers. */
STEP void dot_rows(int n_cols, struct panel *panel, int64_t n_rows, int64_t col, int64_t n_terms)
{
    int64_t row = 0;

    for (; row + 4 <= n_rows; row += 4)
        dot_tile(4, n_cols, panel, row, col, n_terms);
    if (n_rows - row == 3)
        dot_tile(3, n_cols, panel, row, col, n_terms);
    else if (n_rows - row == 2)
        dot_tile(2, n_cols, panel, row, col, n_terms);
    else if (n_rows - row == 1)
        dot_tile(1, n_cols, panel, row, col, n_terms);
}

/* Asks for elements [begin, begin + n) ahead of their use: the pieces of rows are too short for the hardware to see. */
STEP void fetch(dsc_dtype dtype, const void *src, int64_t begin, int64_t n)
{
    int64_t size = dtype == DSC_DTYPE_F32 ? 4 : 2;

    for (int64_t at = 0; at < n * size; at += 64)
        __builtin_prefetch((const char *)src + begin * size + at);
}

/* begin: the element of b at the first column and term. */
static void add_block(const struct dsc_nn_product *call, struct panel *panel, int64_t n_rows, int64_t begin,
                      int64_t n_cols, int64_t n_terms)
{
    for (int64_t c = 0; c < n_cols; c += DOT_COLS) {
        int64_t n_in_tile = n_cols - c < DOT_COLS ? n_cols - c : DOT_COLS;

        for (int64_t i = 0; i < n_in_tile; i++)
            widen(call->dtype, call->b, begin + (c + i) * call->b_col, n_terms, panel->b[i]);
        for (int64_t i = DOT_COLS; i < 2 * DOT_COLS && c + i < n_cols; i++)
            fetch(call->dtype, call->b, begin + (c + i) * call->b_col, n_terms);
        if (n_in_tile == 3)
            dot_rows(3, panel, n_rows, c, n_terms);
        else if (n_in_tile == 2)
            dot_rows(2, panel, n_rows, c, n_terms);
        else
            dot_rows(1, panel, n_rows, c, n_terms);
    }
}

/* Adds the bias of columns from `col`, and rounds values to the row of y. */
static void finish_row(const struct dsc_nn_product *call, int64_t batch, int64_t row, int64_t col, float *values,
                       int64_t n_cols)
{
    for (int64_t c = 0; call->bias != NULL && c < n_cols; c++)
        values[c] += dsc_element(call->dtype, call->bias, col + c);
    narrow(call->dtype, values, n_cols, call->y, (batch * call->n_rows + row) * call->n_cols + col);
}

static void run_panel(const struct dsc_nn_product *call, struct panel *panel, int64_t batch, int64_t row,
                      int64_t n_rows, int64_t col, int64_t n_cols)
{
    int64_t a = batch * call->a_batch + row * call->a_row, b = batch * call->b_batch + col * call->b_col;

    for (int64_t r = 0; r < n_rows; r++)
        memset(panel->y[r], 0, (size_t)n_cols * sizeof(float));
    for (int64_t term = 0; term < call->n_terms; term += DSC_NN_DOT_TERMS) {
        int64_t n = call->n_terms - term < DSC_NN_DOT_TERMS ? call->n_terms - term : DSC_NN_DOT_TERMS;

        for (int64_t r = 0; r < n_rows; r++)
            widen(call->dtype, call->a, a + r * call->a_row + term, n, panel->a[r]);
        add_block(call, panel, n_rows, b + term, n_cols, n);
    }
    for (int64_t r = 0; r < n_rows; r++)
        finish_row(call, batch, row + r, col, panel->y[r], n_cols);
}

void DSC_K(nn_dot_product)(const struct dsc_nn_product *call, int64_t batch, int64_t row, int64_t end_row, int64_t col,
                           int64_t end_col)
{
    struct panel panel;

    for (int64_t r = row; r < end_row; r += PANEL_ROWS)
        for (int64_t c = col; c < end_col; c += PANEL_COLS)
            run_panel(call, &panel, batch, r, end_row - r < PANEL_ROWS ? end_row - r : PANEL_ROWS, c,
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
