/*
 * Compiled once per instruction set: products of 16-bit rows with a 16-bit weight, in f32.
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

/* A step of `dot_tile` adds to this many rows times this many outputs, each in a register. */
#define DOT_ROWS 4
#define DOT_OUTPUTS 3

/* Most rows of x, and most outputs, of a panel. */
#define PANEL_ROWS 64
#define PANEL_OUTPUTS 256

struct panel {
    DSC_ALIGNED float x[PANEL_ROWS][DSC_NN_DOT_COLS];
    DSC_ALIGNED float weight[DOT_OUTPUTS][DSC_NN_DOT_COLS];
    float y[PANEL_ROWS][PANEL_OUTPUTS];
};

STEP void dot_tile(int n_rows, int n_outputs, struct panel *panel, int64_t row, int64_t output, int64_t n)
{
    lanes sums[DOT_ROWS][DOT_OUTPUTS] = {{{0}}};

    for (int64_t i = 0; i < n; i += LANES) {
        lanes weight[DOT_OUTPUTS];

        for (int o = 0; o < n_outputs; o++)
            weight[o] = load(panel->weight[o] + i);
        for (int r = 0; r < n_rows; r++) {
            lanes x = load(panel->x[row + r] + i);

            for (int o = 0; o < n_outputs; o++)
                sums[r][o] = fused(x, weight[o], sums[r][o]);
        }
    }
    for (int r = 0; r < n_rows; r++) {
        for (int o = 0; o < n_outputs; o++) {
            float folded[LANES];

            store(sums[r][o], folded);
            for (int half = LANES / 2; half > 0; half /= 2)
                for (int lane = 0; lane < half; lane++)
                    folded[lane] += folded[lane + half];
            panel->y[row + r][output + o] += folded[0];
        }
    }
}

/* A function for each number of rows, so that their sums stay in registers. */
STEP void dot_rows(int n_outputs, struct panel *panel, int64_t n_rows, int64_t output, int64_t n)
{
    int64_t row = 0;

    for (; row + 4 <= n_rows; row += 4)
        dot_tile(4, n_outputs, panel, row, output, n);
    if (n_rows - row == 3)
        dot_tile(3, n_outputs, panel, row, output, n);
    else if (n_rows - row == 2)
        dot_tile(2, n_outputs, panel, row, output, n);
    else if (n_rows - row == 1)
        dot_tile(1, n_outputs, panel, row, output, n);
}

/* Asks for elements [begin, begin + n) ahead of their use: the pieces of rows are too short for the hardware to see. */
STEP void fetch(dsc_dtype dtype, const void *src, int64_t begin, int64_t n)
{
    int64_t size = dtype == DSC_DTYPE_F32 ? 4 : 2;

    for (int64_t at = 0; at < n * size; at += 64)
        __builtin_prefetch((const char *)src + begin * size + at);
}

static void add_block(const struct dsc_nn_linear *call, struct panel *panel, int64_t n_rows, int64_t output,
                      int64_t n_outputs, int64_t col, int64_t n)
{
    for (int64_t o = 0; o < n_outputs; o += DOT_OUTPUTS) {
        int64_t n_in_tile = n_outputs - o < DOT_OUTPUTS ? n_outputs - o : DOT_OUTPUTS;

        for (int64_t i = 0; i < n_in_tile; i++)
            widen(call->dtype, call->weight, (output + o + i) * call->n_cols + col, n, panel->weight[i]);
        for (int64_t i = DOT_OUTPUTS; i < 2 * DOT_OUTPUTS && o + i < n_outputs; i++)
            fetch(call->dtype, call->weight, (output + o + i) * call->n_cols + col, n);
        if (n_in_tile == 3)
            dot_rows(3, panel, n_rows, o, n);
        else if (n_in_tile == 2)
            dot_rows(2, panel, n_rows, o, n);
        else
            dot_rows(1, panel, n_rows, o, n);
    }
}

static void run_panel(const struct dsc_nn_linear *call, struct panel *panel, int64_t row, int64_t n_rows,
                      int64_t output, int64_t n_outputs)
{
    for (int64_t r = 0; r < n_rows; r++)
        memset(panel->y[r], 0, (size_t)n_outputs * sizeof(float));
    for (int64_t col = 0; col < call->n_cols; col += DSC_NN_DOT_COLS) {
        int64_t n = call->n_cols - col < DSC_NN_DOT_COLS ? call->n_cols - col : DSC_NN_DOT_COLS;

        for (int64_t r = 0; r < n_rows; r++)
            widen(call->dtype, call->x, (row + r) * call->n_cols + col, n, panel->x[r]);
        add_block(call, panel, n_rows, output, n_outputs, col, n);
    }
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t o = 0; call->bias != NULL && o < n_outputs; o++)
            panel->y[r][o] += dsc_element(call->dtype, call->bias, output + o);
        narrow(call->dtype, panel->y[r], n_outputs, call->y, (row + r) * call->n_outputs + output);
    }
}

void DSC_K(nn_linear)(const struct dsc_nn_linear *call, int64_t row, int64_t end_row, int64_t output,
                      int64_t end_output)
{
    struct panel panel;

    for (int64_t r = row; r < end_row; r += PANEL_ROWS)
        for (int64_t o = output; o < end_output; o += PANEL_OUTPUTS)
            run_panel(call, &panel, r, end_row - r < PANEL_ROWS ? end_row - r : PANEL_ROWS, o,
                      end_output - o < PANEL_OUTPUTS ? end_output - o : PANEL_OUTPUTS);
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

/* Widens the block's part of a: terms [term, term + n_terms), rows [row, row + n_rows), zeros up to OUTER_ROWS. */
static void widen_a(const struct dsc_nn_outer_sum *sum, struct block *block, int64_t row, int64_t n_rows, int64_t term,
                    int64_t n_terms)
{
    if (sum->a_term == 1) {
        for (int64_t r = 0; r < n_rows; r++)
            widen(sum->dtype, sum->a, (row + r) * sum->a_row + term, n_terms, block->a + r * DSC_NN_OUTER_TERMS);
        for (int64_t r = n_rows; r % OUTER_ROWS != 0; r++)
            memset(block->a + r * DSC_NN_OUTER_TERMS, 0, DSC_NN_OUTER_TERMS * sizeof(float));
    } else {
        for (int64_t t = 0; t < n_terms; t++) {
            widen(sum->dtype, sum->a, (term + t) * sum->a_term + row, n_rows, block->a + t * BLOCK_ROWS);
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

static void widen_b(const struct dsc_nn_outer_sum *sum, struct block *block, int64_t col, int64_t n_cols, int64_t term,
                    int64_t n_terms)
{
    /* The last strip's columns past the end are computed, and not stored. */
    for (int64_t t = 0; n_cols % OUTER_COLS != 0 && t < n_terms; t++)
        memset(block->b[n_cols / OUTER_COLS][t], 0, OUTER_COLS * sizeof(float));
    for (int64_t t = 0; t < n_terms; t++)
        WITH_DTYPE(sum->dtype, WIDEN_STRIPS, sum->b, (term + t) * sum->n_cols + col, n_cols, block, t);
}

static void run_block(const struct dsc_nn_outer_sum *sum, struct block *block, int64_t row, int64_t n_rows, int64_t col,
                      int64_t n_cols)
{
    bool is_by_row = sum->a_term == 1;
    int64_t a_row = is_by_row ? DSC_NN_OUTER_TERMS : 1, a_term = is_by_row ? 1 : BLOCK_ROWS;

    memset(block->y, 0, sizeof block->y);
    for (int64_t term = 0; term < sum->n_terms; term += DSC_NN_OUTER_TERMS) {
        int64_t n = sum->n_terms - term < DSC_NN_OUTER_TERMS ? sum->n_terms - term : DSC_NN_OUTER_TERMS;

        widen_a(sum, block, row, n_rows, term, n);
        widen_b(sum, block, col, n_cols, term, n);
        for (int64_t c = 0; c < n_cols; c += OUTER_COLS)
            for (int64_t r = 0; r < n_rows; r += OUTER_ROWS)
                outer_tile(block->a + r * a_row, a_row, a_term, block->b[c / OUTER_COLS], n,
                           (float(*)[BLOCK_COLS]) & block->y[r][c]);
    }
    for (int64_t r = 0; r < n_rows; r++)
        narrow(sum->dtype, block->y[r], n_cols, sum->y, (row + r) * sum->n_cols + col);
}

void DSC_K(nn_outer_sum)(const struct dsc_nn_outer_sum *sum, int64_t row, int64_t end_row, int64_t col, int64_t end_col)
{
    struct block block;

    for (int64_t r = row; r < end_row; r += BLOCK_ROWS)
        for (int64_t c = col; c < end_col; c += BLOCK_COLS)
            run_block(sum, &block, r, end_row - r < BLOCK_ROWS ? end_row - r : BLOCK_ROWS, c,
                      end_col - c < BLOCK_COLS ? end_col - c : BLOCK_COLS);
}

void DSC_K(nn_column_sums)(int64_t n_rows, int64_t n_cols, dsc_dtype dtype, const void *x, int64_t col, int64_t end_col,
                           void *y)
{
    DSC_ALIGNED float row[BLOCK_COLS], sums[BLOCK_COLS], totals[BLOCK_COLS];

    for (int64_t c = col; c < end_col; c += BLOCK_COLS) {
        int64_t n = end_col - c < BLOCK_COLS ? end_col - c : BLOCK_COLS;

        memset(totals, 0, sizeof totals);
        for (int64_t first = 0; first < n_rows; first += DSC_NN_OUTER_TERMS) {
            int64_t last = n_rows - first < DSC_NN_OUTER_TERMS ? n_rows : first + DSC_NN_OUTER_TERMS;

            memset(sums, 0, sizeof sums);
            for (int64_t r = first; r < last; r++) {
                widen(dtype, x, r * n_cols + c, n, row);
                for (int64_t i = 0; i < n; i++)
                    sums[i] += row[i];
            }
            for (int64_t i = 0; i < n; i++)
                totals[i] += sums[i];
        }
        narrow(dtype, totals, n, y, c);
    }
}
