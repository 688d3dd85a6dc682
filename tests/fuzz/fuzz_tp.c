/*
 * dsc_tp_runs_of: an accepted call gives each element to one rank, or to the number of ranks set by the copies; wild
 * numbers are refused or harmless.
 */
#include "fuzz.h"

#include "dsc/tp.h"

#define MAX_PARTS 4
#define MAX_RANKS 9
#define MAX_ELEMS 8192
#define MAX_RUNS 1024

static void check_dim(const struct dsc_tp_dim *dim, int32_t n_ranks)
{
    static int n_owners[MAX_ELEMS];
    static struct dsc_tp_run runs[MAX_RANKS][MAX_RUNS];
    int64_t n[MAX_RANKS];
    int32_t first[MAX_RANKS];
    int32_t copies[MAX_RANKS];
    int64_t all = 0;
    int n_refused = 0;

    for (int64_t i = 0; i < dim->n_parts; i++)
        all += dim->parts[i].n_elems * dim->n_blocks;
    if (all > MAX_ELEMS)
        return;
    memset(n_owners, 0, sizeof n_owners);
    for (int32_t rank = 0; rank < n_ranks; rank++) {
        int64_t local = 0;
        int64_t end = 0;

        if (dsc_tp_runs_of(dim, n_ranks, rank, MAX_RUNS, runs[rank], &n[rank], &first[rank], &copies[rank]) != DSC_OK) {
            n_refused++;
            continue;
        }
        for (int64_t i = 0; i < n[rank]; i++) {
            REQUIRE(runs[rank][i].local_begin_elems == local && runs[rank][i].logical_begin_elems >= end && runs[rank][i].n_elems > 0);
            local += runs[rank][i].n_elems;
            end = runs[rank][i].logical_begin_elems + runs[rank][i].n_elems;
            REQUIRE(end <= all);
            for (int64_t e = runs[rank][i].logical_begin_elems; e < end; e++)
                n_owners[e]++;
        }
    }
    REQUIRE(n_refused == 0 || n_refused == n_ranks); /* ranks agree */
    if (n_refused > 0)
        return;
    for (int64_t e = 0; e < all; e++)
        REQUIRE(n_owners[e] >= 1);
    for (int32_t rank = 0; rank < n_ranks; rank++)
        for (int64_t i = 0; i < n[rank] && copies[rank] > 0; i++)
            for (int64_t e = 0; e < runs[rank][i].n_elems; e++)
                REQUIRE(n_owners[runs[rank][i].logical_begin_elems + e] == copies[rank]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    struct dsc_tp_part parts[MAX_PARTS];
    bool is_wild = take_byte(&input) % 2;
    int32_t n_ranks = (int32_t)(1 + take_below(&input, MAX_RANKS));
    int64_t n_key_heads = is_wild ? take_wild(&input) : 1 + take_below(&input, 8);
    int64_t n_heads = is_wild ? take_wild(&input) : n_key_heads * (1 + take_below(&input, 8));
    int64_t n_blocks = is_wild ? take_wild(&input) : take_byte(&input) % 2 ? n_key_heads : 1;
    int64_t n_parts = take_below(&input, MAX_PARTS + 1);
    int64_t head = 1 + take_below(&input, 9);

    for (int64_t i = 0; i < n_parts; i++) {
        int32_t kind = (int32_t)take_below(&input, 4);
        int64_t n_in_block = (kind == DSC_TP_QUERIES ? n_heads : n_key_heads) / (is_wild || n_blocks == 0 ? 1 : n_blocks);

        if (is_wild)
            parts[i] = (struct dsc_tp_part){(int32_t)take_wild(&input), take_wild(&input), take_wild(&input)};
        else if (kind == DSC_TP_QUERIES || kind == DSC_TP_KEYS)
            parts[i] = (struct dsc_tp_part){kind, n_in_block * head, head};
        else
            parts[i] = (struct dsc_tp_part){kind, take_below(&input, 40), 1 + take_below(&input, 9)};
    }

    struct dsc_tp_dim dim = {parts, n_parts, n_blocks, n_heads, n_key_heads};

    if (is_wild) {
        struct dsc_tp_run runs[8];
        int64_t n = -7;
        int32_t first = -7;
        int32_t copies = -7;

        if (dsc_tp_runs_of(&dim, (int32_t)take_wild(&input), (int32_t)take_wild(&input), 8, runs, &n, &first, &copies) != DSC_OK)
            REQUIRE(n == -7 && first == -7 && copies == -7);
        return 0;
    }
    check_dim(&dim, n_ranks);
    return 0;
}
