/*
 * seq/cut.c: the runs of every rank against a table of owners that is filled token by token, documents, and refused
 * arguments.
 */
#include "test.h"

#include "dsc/seq.h"

#define MAX_TOKENS 400
#define MAX_RANKS 12
#define MAX_DOCUMENTS 32

/*
 * The share of a token as the header defines it: sizes differ by at most one token, and the larger shares come first.
 */
static int32_t share_of(int64_t token, int64_t n_tokens, int64_t n_shares)
{
    int64_t end = 0;

    for (int64_t share = 0; share < n_shares; share++) {
        end += n_tokens / n_shares + (share < n_tokens % n_shares);
        if (token < end)
            return (int32_t)share;
    }
    return -1;
}

static int32_t part_of(const struct dsc_seq_cut *cut, int64_t token)
{
    int32_t n_parts = cut->n_ranks / cut->n_inner;

    if (cut->order == DSC_SEQ_CONTIGUOUS)
        return share_of(token, cut->n_tokens, n_parts);
    if (cut->order == DSC_SEQ_ZIGZAG) {
        int32_t stripe = share_of(token, cut->n_tokens, 2 * n_parts);

        return stripe < n_parts ? stripe : 2 * n_parts - 1 - stripe;
    }
    for (int64_t i = 0; i < cut->n_documents; i++)
        if (token < cut->document_ends[i])
            return cut->document_parts[i];
    return -1;
}

static void check_cut(const struct dsc_seq_cut *cut)
{
    static int32_t owner[MAX_TOKENS];
    static int64_t local[MAX_TOKENS];
    int64_t n_of_part[MAX_RANKS] = {0};
    int64_t seen[MAX_RANKS] = {0};
    int32_t n_parts = cut->n_ranks / cut->n_inner;
    int64_t least = INT64_MAX;
    int64_t most = 0;

    for (int64_t t = 0; t < cut->n_tokens; t++)
        n_of_part[part_of(cut, t)]++;
    for (int64_t t = 0; t < cut->n_tokens; t++) {
        int32_t part = part_of(cut, t);
        int32_t inner = share_of(seen[part], n_of_part[part], cut->n_inner);

        owner[t] = part * cut->n_inner + inner;
        local[t] = seen[part]++;
        for (int32_t i = 0; i < inner; i++)
            local[t] -= n_of_part[part] / cut->n_inner + (i < n_of_part[part] % cut->n_inner);
    }
    for (int32_t rank = 0; rank < cut->n_ranks; rank++) {
        struct dsc_seq_run runs[MAX_TOKENS];
        int64_t n = -1;
        int64_t n_tokens = -1;
        int64_t n_counted = -1;
        int64_t found = 0;
        int64_t end = -1;

        CHECK_STATUS(dsc_seq_runs_of(cut, rank, 0, NULL, &n_counted, &n_tokens), DSC_OK);
        CHECK_STATUS(dsc_seq_runs_of(cut, rank, n_counted, runs, &n, &n_tokens), DSC_OK);
        CHECK_EQ(n, n_counted);
        for (int64_t i = 0; i < n; i++) {
            CHECK(runs[i].n_tokens > 0 && runs[i].begin > end); /* neighbours would be one run */
            CHECK_EQ(runs[i].local_begin, found);
            for (int64_t t = 0; t < runs[i].n_tokens; t++) {
                TEST_AT(runs[i].begin + t);
                CHECK_EQ(owner[runs[i].begin + t], rank);
                CHECK_EQ(local[runs[i].begin + t], runs[i].local_begin + t);
            }
            found += runs[i].n_tokens;
            end = runs[i].begin + runs[i].n_tokens;
        }
        CHECK_EQ(found, n_tokens);
        least = n_tokens < least ? n_tokens : least;
        most = n_tokens > most ? n_tokens : most;
        if (n > 0)
            CHECK_ERROR(dsc_seq_runs_of(cut, rank, n - 1, runs, &n, &n_tokens), DSC_EINVAL, "do not fit");
    }
    if (cut->order != DSC_SEQ_DOCUMENTS && (cut->n_inner == 1 || cut->n_tokens % n_parts == 0))
        CHECK(most - least <= 1);

    int64_t n_all = 0;

    for (int32_t rank = 0; rank < cut->n_ranks; rank++) {
        int64_t n = 0;
        int64_t n_tokens = 0;

        CHECK_STATUS(dsc_seq_runs_of(cut, rank, 0, NULL, &n, &n_tokens), DSC_OK);
        n_all += n_tokens;
    }
    CHECK_EQ(n_all, cut->n_tokens);
}

static void test_every_token_has_one_rank(void)
{
    const int64_t lengths[] = {0, 1, 2, 3, 7, 8, 31, 64, 97, 384};

    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int32_t n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks++)
            for (int32_t n_inner = 1; n_inner <= n_ranks; n_inner++)
                for (int32_t order = DSC_SEQ_CONTIGUOUS; order <= DSC_SEQ_ZIGZAG && n_ranks % n_inner == 0; order++) {
                    struct dsc_seq_cut cut = {.n_tokens = lengths[i], .n_ranks = n_ranks, .n_inner = n_inner, .order = order};

                    TEST_CASE("%d tokens, %d ranks in rows of %d, order %d", (int)lengths[i], (int)n_ranks, (int)n_inner, (int)order);
                    check_cut(&cut);
                }
}

static void test_documents(void)
{
    uint64_t random = 3;

    for (int round = 0; round < 300; round++) {
        int64_t ends[MAX_DOCUMENTS];
        int64_t order[MAX_DOCUMENTS];
        int64_t part_tokens[MAX_RANKS];
        int32_t parts[MAX_DOCUMENTS];
        int64_t n = test_below(&random, MAX_DOCUMENTS);
        int32_t n_ranks = (int32_t)(1 + test_below(&random, MAX_RANKS));
        int64_t expected[MAX_RANKS] = {0};
        bool is_dealt[MAX_DOCUMENTS] = {false};
        int32_t n_inner = n_ranks % 2 == 0 && round % 2 ? 2 : 1;
        int32_t n_parts = n_ranks / n_inner;
        int64_t end = 0;

        TEST_CASE("round %d: %d documents, %d ranks", round, (int)n, (int)n_ranks);
        for (int64_t i = 0; i < n; i++)
            ends[i] = end += 1 + test_below(&random, 11);
        CHECK_STATUS(dsc_seq_deal(ends, n, n_parts, order, part_tokens, parts), DSC_OK);
        for (int64_t dealt = 0; dealt < n; dealt++) {
            int64_t longest = -1;
            int64_t length = 0;
            int32_t least = 0;

            for (int64_t i = 0; i < n; i++) {
                int64_t n_tokens = ends[i] - (i > 0 ? ends[i - 1] : 0);

                if (!is_dealt[i] && n_tokens > length) {
                    longest = i;
                    length = n_tokens;
                }
            }
            for (int32_t part = 1; part < n_parts; part++)
                least = expected[part] < expected[least] ? part : least;
            is_dealt[longest] = true;
            CHECK_EQ(parts[longest], least);
            expected[least] += length;
        }
        for (int32_t part = 0; part < n_parts; part++)
            CHECK_EQ(part_tokens[part], expected[part]);

        struct dsc_seq_cut cut = {end, n_ranks, n_inner, DSC_SEQ_DOCUMENTS, ends, parts, n};

        check_cut(&cut);
    }
}

/* The example drawn in the header. */
static void test_zigzag_by_hand(void)
{
    const int64_t expected[4][2][3] = {
        {{0, 0, 2}, {2, 14, 2}}, {{0, 2, 2}, {2, 12, 2}}, {{0, 4, 2}, {2, 10, 2}}, {{0, 6, 4}, {0, 0, 0}}};

    for (int32_t rank = 0; rank < 4; rank++) {
        struct dsc_seq_cut cut = {.n_tokens = 16, .n_ranks = 4, .n_inner = 1, .order = DSC_SEQ_ZIGZAG};
        struct dsc_seq_run runs[2] = {{0}};
        int64_t n;
        int64_t n_tokens;

        TEST_CASE("rank %d", (int)rank);
        CHECK_STATUS(dsc_seq_runs_of(&cut, rank, 2, runs, &n, &n_tokens), DSC_OK);
        CHECK_EQ(n, rank == 3 ? 1 : 2);
        CHECK_EQ(n_tokens, 4);
        for (int i = 0; i < 2; i++) {
            CHECK_EQ(runs[i].local_begin, expected[rank][i][0]);
            CHECK_EQ(runs[i].begin, expected[rank][i][1]);
            CHECK_EQ(runs[i].n_tokens, expected[rank][i][2]);
        }
    }
}

static void test_bad_input(void)
{
    struct dsc_seq_cut cut = {.n_tokens = 10, .n_ranks = 4, .n_inner = 1, .order = DSC_SEQ_ZIGZAG};
    const int64_t ends[] = {4, 4, 10};
    const int64_t short_ends[] = {4, 9};
    const int32_t parts[] = {0, 4};
    int64_t order[3];
    int64_t part_tokens[3];
    int32_t dealt[3] = {-7, -7, -7};
    int64_t n = -7;
    int64_t n_tokens = -7;
    struct dsc_seq_cut bad;

#define REFUSED(change, status, word)                                                                                  \
    bad = cut;                                                                                                         \
    change;                                                                                                            \
    CHECK_ERROR(dsc_seq_runs_of(&bad, 1, 0, NULL, &n, &n_tokens), status, word)
    REFUSED(bad.n_tokens = -1, DSC_EINVAL, "n_tokens is -1");
    REFUSED(bad.n_tokens = DSC_SEQ_MAX_TOKENS + 1, DSC_EINVAL, "n_tokens");
    REFUSED(bad.n_ranks = 0, DSC_EINVAL, "n_ranks is 0");
    REFUSED(bad.n_ranks = 1, DSC_EINVAL, "rank is 1");
    REFUSED(bad.n_inner = 3, DSC_EINVAL, "n_inner is 3");
    REFUSED(bad.n_inner = 0, DSC_EINVAL, "n_inner is 0");
    REFUSED(bad.order = 3, DSC_EINVAL, "order is 3");
    REFUSED(bad.order = DSC_SEQ_DOCUMENTS, DSC_EINVAL, "no document");
    REFUSED((bad.document_ends = ends, bad.n_documents = 3), DSC_EINVAL, "document 1 ends at 4");
    REFUSED((bad.document_ends = short_ends, bad.n_documents = 2), DSC_EINVAL, "ends at 9");
    REFUSED(bad.n_documents = 2, DSC_EINVAL, "NULL");
    REFUSED((bad.n_tokens = 9, bad.document_ends = short_ends, bad.n_documents = 2, bad.order = DSC_SEQ_DOCUMENTS), DSC_EINVAL, "document_parts");
    REFUSED((bad.n_tokens = 9, bad.document_ends = short_ends, bad.n_documents = 2, bad.order = DSC_SEQ_DOCUMENTS, bad.document_parts = parts),
            DSC_EINVAL, "part 4");
#undef REFUSED
    CHECK_ERROR(dsc_seq_runs_of(NULL, 0, 0, NULL, &n, &n_tokens), DSC_EINVAL, "cut");
    CHECK_ERROR(dsc_seq_runs_of(&cut, 0, 0, NULL, NULL, &n_tokens), DSC_EINVAL, "NULL");
    CHECK_ERROR(dsc_seq_deal(ends, 3, 3, order, part_tokens, dealt), DSC_EINVAL, "document 1");
    CHECK_ERROR(dsc_seq_deal(short_ends, 2, 3, NULL, part_tokens, dealt), DSC_EINVAL, "NULL");
    CHECK_ERROR(dsc_seq_deal(short_ends, 2, 0, order, part_tokens, dealt), DSC_EINVAL, "n_ranks is 0");
    CHECK(n == -7 && n_tokens == -7 && dealt[0] == -7);
}

int main(void)
{
    test_every_token_has_one_rank();
    test_documents();
    test_zigzag_by_hand();
    test_bad_input();
    return test_finish(__FILE__);
}
