/*
 * seq/ring.c: the blocks of every pair of ranks against a table that says for each pair of tokens whether one sees the
 * other. Also checks the work of each rank.
 */
#include "test.h"

#include "dsc/seq.h"

#define MAX_TOKENS 96
#define MAX_RANKS 8
#define MAX_BLOCKS 1024

struct rank {
    struct dsc_seq_run runs[MAX_TOKENS];
    int64_t n_runs;
    int64_t places[MAX_TOKENS]; /* positions of the rank's tokens in the whole sequence */
    int64_t n_tokens;
};

static struct rank ranks[MAX_RANKS];

static void place(const struct dsc_seq_cut *cut)
{
    for (int32_t r = 0; r < cut->n_ranks; r++) {
        struct rank *rank = &ranks[r];

        CHECK_STATUS(dsc_seq_runs_of(cut, r, MAX_TOKENS, rank->runs, &rank->n_runs, &rank->n_tokens), DSC_OK);
        for (int64_t i = 0; i < rank->n_runs; i++)
            for (int64_t t = 0; t < rank->runs[i].n_tokens; t++)
                rank->places[rank->runs[i].local_begin + t] = rank->runs[i].begin + t;
    }
}

static bool sees(const struct dsc_seq_mask *mask, const int64_t *ends, int64_t n_documents, int64_t query, int64_t key)
{
    for (int64_t i = 0; i < n_documents; i++)
        if ((query < ends[i]) != (key < ends[i]))
            return false;
    if (mask->is_causal && key > query)
        return false;
    return mask->window == 0 || llabs(query - key) < mask->window;
}

/* Whether a block's kind computes the pair (i, j). */
static bool computes(const struct dsc_seq_mask *mask, const struct dsc_seq_block *block, int64_t i, int64_t j)
{
    if (block->kind == DSC_SEQ_WHOLE)
        return true;
    if (block->kind == DSC_SEQ_CAUSAL)
        return j <= i;

    int64_t distance = i + block->shift - j;

    return (!mask->is_causal || distance >= 0) && (mask->window == 0 || llabs(distance) < mask->window);
}

static int64_t check_pair(const struct dsc_seq_mask *mask, const struct dsc_seq_cut *cut, int32_t of_queries, int32_t of_keys)
{
    static struct dsc_seq_block blocks[MAX_BLOCKS];
    static int n_computed[MAX_TOKENS][MAX_TOKENS];
    const struct rank *queries = &ranks[of_queries];
    const struct rank *keys = &ranks[of_keys];
    int64_t n_counted = -1;
    int64_t n_pairs = -1;
    int64_t n = -1;
    int64_t work = 0;

    CHECK_STATUS(dsc_seq_blocks_of(mask, cut->document_ends, cut->n_documents, cut->n_tokens, queries->runs, queries->n_runs, keys->runs,
                                   keys->n_runs, 0, NULL, &n_counted, &n_pairs),
                 DSC_OK);
    CHECK(n_counted <= MAX_BLOCKS);
    CHECK_STATUS(dsc_seq_blocks_of(mask, cut->document_ends, cut->n_documents, cut->n_tokens, queries->runs, queries->n_runs, keys->runs,
                                   keys->n_runs, n_counted, blocks, &n, &n_pairs),
                 DSC_OK);
    CHECK_EQ(n, n_counted);
    memset(n_computed, 0, sizeof n_computed);
    for (int64_t b = 0; b < n; b++) {
        const struct dsc_seq_block *block = &blocks[b];
        int64_t found = 0;

        CHECK(0 <= block->query_begin && block->query_begin < block->query_end && block->query_end <= queries->n_tokens);
        CHECK(0 <= block->key_begin && block->key_begin < block->key_end && block->key_end <= keys->n_tokens);
        CHECK(block->kind != DSC_SEQ_CAUSAL || block->query_end - block->query_begin == block->key_end - block->key_begin);
        CHECK(block->kind != DSC_SEQ_BAND || mask->tile == 0 || block->query_end - block->query_begin <= mask->tile);
        for (int64_t i = 0; i < block->query_end - block->query_begin; i++) {
            int64_t of_row = 0;

            for (int64_t j = 0; j < block->key_end - block->key_begin; j++)
                if (computes(mask, block, i, j)) {
                    n_computed[block->query_begin + i][block->key_begin + j]++;
                    of_row++;
                }
            CHECK(of_row > 0);
            found += of_row;
        }
        CHECK_EQ(block->n_pairs, found);
        work += found;
    }
    CHECK_EQ(work, n_pairs);
    for (int64_t i = 0; i < queries->n_tokens; i++)
        for (int64_t j = 0; j < keys->n_tokens; j++)
            CHECK_EQ(n_computed[i][j], sees(mask, cut->document_ends, cut->n_documents, queries->places[i], keys->places[j]));
    if (n > 0)
        CHECK_ERROR(dsc_seq_blocks_of(mask, cut->document_ends, cut->n_documents, cut->n_tokens, queries->runs, queries->n_runs, keys->runs,
                                      keys->n_runs, n - 1, blocks, &n, &n_pairs),
                    DSC_EINVAL, "do not fit");
    return n;
}

static void test_every_pair_once(void)
{
    const int64_t windows[] = {0, 1, 2, 7, 30, 200};
    uint64_t random = 21;

    for (int round = 0; round < 700; round++) {
        int64_t ends[MAX_TOKENS];
        int32_t parts[MAX_TOKENS];
        int64_t order[MAX_TOKENS];
        int64_t part_tokens[MAX_RANKS];
        struct dsc_seq_mask mask = {round % 2, windows[test_below(&random, 6)], test_below(&random, 3) * 5};
        struct dsc_seq_cut cut = {.n_tokens = test_below(&random, MAX_TOKENS),
                                  .n_ranks = (int32_t)(1 + test_below(&random, MAX_RANKS)),
                                  .n_inner = 1,
                                  .order = round / 2 % 3,
                                  .document_ends = ends,
                                  .document_parts = parts};

        if (cut.order == DSC_SEQ_DOCUMENTS || round % 5 == 0) {
            int64_t end = 0;

            while (end < cut.n_tokens)
                ends[cut.n_documents++] = end += 1 + test_below(&random, round % 3 ? 5 : 40) % (cut.n_tokens - end);
        }
        TEST_CASE("round %d: %d tokens, %d ranks, order %d, %d documents, causal %d, window %d, tile %d", round, (int)cut.n_tokens,
                  (int)cut.n_ranks, (int)cut.order, (int)cut.n_documents, (int)mask.is_causal, (int)mask.window, (int)mask.tile);
        CHECK_STATUS(dsc_seq_deal(ends, cut.n_documents, cut.n_ranks, order, part_tokens, parts), DSC_OK);
        place(&cut);
        for (int32_t a = 0; a < cut.n_ranks; a++)
            for (int32_t b = 0; b < cut.n_ranks; b++) {
                int64_t n = check_pair(&mask, &cut, a, b);

                CHECK(cut.order != DSC_SEQ_DOCUMENTS || a == b || n == 0); /* no rank needs another's keys */
            }
    }
}

/* Zigzag order needs one call of attention a hop, which is its purpose. */
static void test_zigzag_is_one_block_a_hop(void)
{
    struct dsc_seq_mask mask = {.is_causal = true};
    struct dsc_seq_cut cut = {.n_tokens = 80, .n_ranks = 5, .n_inner = 1, .order = DSC_SEQ_ZIGZAG};

    place(&cut);
    for (int32_t a = 0; a < 5; a++)
        for (int32_t b = 0; b < 5; b++) {
            struct dsc_seq_block block[2];
            int64_t n;
            int64_t n_pairs;

            TEST_CASE("ranks %d and %d", (int)a, (int)b);
            CHECK_STATUS(dsc_seq_blocks_of(&mask, NULL, 0, 80, ranks[a].runs, ranks[a].n_runs, ranks[b].runs, ranks[b].n_runs, 2, block, &n, &n_pairs), DSC_OK);
            CHECK_EQ(n, 1);
            CHECK_EQ(block->kind, a == b ? DSC_SEQ_CAUSAL : DSC_SEQ_WHOLE);
            CHECK_EQ(block->query_begin, a < b ? 8 : 0);
            CHECK_EQ(block->key_end, a > b ? 8 : 16);
            CHECK_EQ(n_pairs, a == b ? 16 * 17 / 2 : 8 * 16);
        }
}

/*
 * The work of every rank is within 2 % of the mean. In contiguous order the last of four ranks has 1.75 times the mean.
 */
static void test_work(void)
{
    const int64_t lengths[] = {1000, 1024, 4099, 131072, DSC_SEQ_MAX_TOKENS};

    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int32_t n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks++)
            for (int32_t order = DSC_SEQ_CONTIGUOUS; order <= DSC_SEQ_ZIGZAG; order++) {
                struct dsc_seq_mask mask = {.is_causal = true};
                struct dsc_seq_cut cut = {.n_tokens = lengths[i], .n_ranks = n_ranks, .n_inner = 1, .order = order};
                double all = (double)lengths[i] * (double)(lengths[i] + 1) / 2;
                double sum = 0;
                double work[MAX_RANKS] = {0};

                TEST_CASE("%d tokens, %d ranks, order %d", (int)lengths[i], (int)n_ranks, (int)order);
                for (int32_t a = 0; a < n_ranks; a++)
                    for (int32_t b = 0; b < n_ranks; b++) {
                        struct dsc_seq_run queries[2];
                        struct dsc_seq_run keys[2];
                        int64_t n[3];
                        int64_t n_tokens;
                        int64_t n_pairs;

                        CHECK_STATUS(dsc_seq_runs_of(&cut, a, 2, queries, &n[0], &n_tokens), DSC_OK);
                        CHECK_STATUS(dsc_seq_runs_of(&cut, b, 2, keys, &n[1], &n_tokens), DSC_OK);
                        CHECK_STATUS(dsc_seq_blocks_of(&mask, NULL, 0, lengths[i], queries, n[0], keys, n[1], 0, NULL, &n[2], &n_pairs), DSC_OK);
                        work[a] += (double)n_pairs;
                        sum += (double)n_pairs;
                    }
                CHECK(fabs(sum / all - 1) < 1e-12);
                for (int32_t a = 0; a < n_ranks && order == DSC_SEQ_ZIGZAG; a++)
                    CHECK(fabs(work[a] * n_ranks / all - 1) < 0.02);
                if (order == DSC_SEQ_CONTIGUOUS && n_ranks == 4)
                    CHECK(fabs(work[3] * 4 / all - 1.75) < 0.01);
            }
}

static void test_bad_input(void)
{
    struct dsc_seq_mask mask = {.is_causal = true};
    struct dsc_seq_run runs[2] = {{0, 0, 4}, {4, 6, 2}};
    struct dsc_seq_run bad[2];
    int64_t n = -7;
    int64_t n_pairs = -7;

#define REFUSED(change, word)                                                                                          \
    memcpy(bad, runs, sizeof bad);                                                                                     \
    change;                                                                                                            \
    CHECK_ERROR(dsc_seq_blocks_of(&mask, NULL, 0, 8, runs, 2, bad, 2, 0, NULL, &n, &n_pairs), DSC_EINVAL, word)
    REFUSED(bad[1].begin = 3, "run 1 of keys");
    REFUSED(bad[1].n_tokens = 3, "run 1 of keys");
    REFUSED(bad[1].n_tokens = INT64_MAX, "run 1 of keys");
    REFUSED(bad[1].begin = INT64_MAX, "run 1 of keys");
    REFUSED(bad[1].local_begin = 3, "run 1 of keys");
    REFUSED(bad[0].n_tokens = 0, "run 0 of keys");
    REFUSED(bad[0].begin = -1, "run 0 of keys");
#undef REFUSED
    CHECK_ERROR(dsc_seq_blocks_of(&mask, NULL, 0, 8, NULL, 1, runs, 2, 0, NULL, &n, &n_pairs), DSC_EINVAL, "queries");
    CHECK_ERROR(dsc_seq_blocks_of(NULL, NULL, 0, 8, runs, 2, runs, 2, 0, NULL, &n, &n_pairs), DSC_EINVAL, "mask");
    CHECK_ERROR(dsc_seq_blocks_of(&mask, NULL, 3, 8, runs, 2, runs, 2, 0, NULL, &n, &n_pairs), DSC_EINVAL, "documents");
    mask.window = -1;
    CHECK_ERROR(dsc_seq_blocks_of(&mask, NULL, 0, 8, runs, 2, runs, 2, 0, NULL, &n, &n_pairs), DSC_EINVAL, "window of -1");
    CHECK(n == -7 && n_pairs == -7);
}

int main(void)
{
    test_every_pair_once();
    test_zigzag_is_one_block_a_hop();
    test_work();
    test_bad_input();
    return test_finish(__FILE__);
}
