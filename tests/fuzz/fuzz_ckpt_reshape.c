/* dsc_reshape_plan: a plan that is accepted moves each wanted element once, from the lowest piece that has it; wild numbers are refused or harmless. */
#include "fuzz.h"

#include "dsc/ckpt.h"

#define MAX_DIMS 4
#define MAX_PIECES 8
#define NUMBERS (2 * MAX_DIMS + 2)
#define MAX_ELEMS 256
#define MAX_RUNS (3 * MAX_PIECES * MAX_ELEMS)

static int64_t box_elems(const int64_t *part, int32_t n_dims)
{
    int64_t n = 1;

    for (int32_t d = 0; d < n_dims; d++)
        n *= part[n_dims + d];
    return n;
}

/* The position in a piece's range of element number `element` of the wanted range; -1 when the piece lacks it. */
static int64_t find(const int64_t *piece, const int64_t *wanted, int32_t n_dims, int64_t element)
{
    int64_t position = 0;
    int64_t stride = 1;

    element += wanted[2 * n_dims];
    for (int32_t d = n_dims - 1; d >= 0; d--) {
        int64_t index = wanted[d] + element % wanted[n_dims + d] - piece[d];

        element /= wanted[n_dims + d];
        if (index < 0 || index >= piece[n_dims + d])
            return -1;
        position += index * stride;
        stride *= piece[n_dims + d];
    }
    position -= piece[2 * n_dims];
    return position >= 0 && position < piece[2 * n_dims + 1] ? position : -1;
}

static void take_part(struct input *input, const int64_t *shape, int32_t n_dims, int64_t *part)
{
    for (int32_t d = 0; d < n_dims; d++) {
        part[d] = take_below(input, shape[d] + 1);
        part[n_dims + d] = take_below(input, shape[d] - part[d] + 1);
    }

    int64_t n_elems = box_elems(part, n_dims);

    part[2 * n_dims] = take_below(input, n_elems + 1);
    part[2 * n_dims + 1] = take_below(input, n_elems - part[2 * n_dims] + 1);
}

static void check_plan(const int64_t *pieces, int64_t n_pieces, const int64_t *wanted, int32_t n_dims, const struct dsc_reshape_run *runs, int64_t n_runs)
{
    bool is_there[MAX_ELEMS] = {false};
    int64_t n_elems = 0;

    for (int64_t r = 0; r < n_runs; r++) {
        REQUIRE(runs[r].n_elems > 0 && runs[r].piece >= 0 && runs[r].piece < n_pieces);
        n_elems += runs[r].n_elems;
        for (int64_t k = 0; k < runs[r].n_elems; k++) {
            int64_t element = runs[r].dst_elem + k;

            REQUIRE(element >= 0 && element < wanted[2 * n_dims + 1] && !is_there[element]);
            is_there[element] = true;
            for (int64_t i = 0; i <= runs[r].piece; i++)
                REQUIRE(find(pieces + i * (2 * n_dims + 2), wanted, n_dims, element) == (i == runs[r].piece ? runs[r].src_elem + k : -1));
        }
    }
    REQUIRE(n_elems == wanted[2 * n_dims + 1]);
}

static void fuzz_small(struct input *input)
{
    static struct dsc_reshape_run runs[MAX_RUNS];
    int64_t shape[MAX_DIMS];
    int64_t pieces[MAX_PIECES * NUMBERS];
    int64_t wanted[NUMBERS];
    int32_t n_dims = (int32_t)take_below(input, MAX_DIMS + 1);
    int64_t n_pieces = take_below(input, MAX_PIECES + 1);
    int64_t n_needed = -7;
    int64_t n_runs = -7;
    int64_t missing = -1;

    for (int32_t d = 0; d < n_dims; d++)
        shape[d] = take_below(input, 5); /* at most 4^4 elements */
    for (int64_t i = 0; i < n_pieces; i++)
        take_part(input, shape, n_dims, pieces + i * (2 * n_dims + 2));
    take_part(input, shape, n_dims, wanted);
    for (int64_t element = wanted[2 * n_dims + 1] - 1; element >= 0; element--) {
        bool is_held = false;

        for (int64_t i = 0; i < n_pieces; i++)
            is_held = is_held || find(pieces + i * (2 * n_dims + 2), wanted, n_dims, element) >= 0;
        if (!is_held)
            missing = element;
    }
    REQUIRE(dsc_reshape_plan(shape, n_dims, pieces, n_pieces, wanted, 0, NULL, &n_needed) == DSC_OK);
    REQUIRE(n_needed >= 0 && n_needed <= MAX_RUNS);
    if (dsc_reshape_plan(shape, n_dims, pieces, n_pieces, wanted, n_needed, runs, &n_runs) != DSC_OK) {
        REQUIRE(missing >= 0 && n_runs == -7);
        return;
    }
    REQUIRE(missing < 0 && n_runs <= n_needed);
    check_plan(pieces, n_pieces, wanted, n_dims, runs, n_runs);
}

/* As a damaged manifest might have it. */
static void fuzz_wild(struct input *input)
{
    static struct dsc_reshape_run runs[1024];
    int64_t numbers[MAX_DIMS + (1 + MAX_PIECES) * NUMBERS];
    int32_t n_dims = (int32_t)take_below(input, MAX_DIMS + 1);
    int64_t n_pieces = take_below(input, MAX_PIECES + 1);
    int64_t n_runs = -7;
    const int64_t *wanted = numbers + MAX_DIMS;

    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        numbers[i] = take_wild(input);
    if (dsc_reshape_plan(numbers, n_dims, wanted + NUMBERS, n_pieces, wanted, 0, NULL, &n_runs) != DSC_OK || n_runs > 1024)
        return;
    REQUIRE(n_runs >= 0);
    if (dsc_reshape_plan(numbers, n_dims, wanted + NUMBERS, n_pieces, wanted, 1024, runs, &n_runs) != DSC_OK)
        return;

    int64_t n_elems = 0;

    for (int64_t r = 0; r < n_runs; r++)
        n_elems += runs[r].n_elems;
    REQUIRE(n_elems == wanted[2 * n_dims + 1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};

    if (take_byte(&input) % 3 == 2)
        fuzz_wild(&input);
    else
        fuzz_small(&input);
    return 0;
}
