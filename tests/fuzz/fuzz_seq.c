/* csrc/seq: each token and each query head has one rank, in every order; wild numbers are refused or harmless. */
#include "fuzz.h"

#include "dsc/seq.h"

#define MAX_RANKS 12
#define MAX_DOCUMENTS 12
#define MAX_TOKENS 512

static void check_cut(const struct dsc_seq_cut *cut)
{
    static int32_t n_owners[MAX_TOKENS];
    struct dsc_seq_run runs[MAX_DOCUMENTS + 2];

    memset(n_owners, 0, sizeof n_owners);
    for (int32_t rank = 0; rank < cut->n_ranks; rank++) {
        int64_t n;
        int64_t n_tokens;
        int64_t local = 0;
        int64_t end = -1;

        REQUIRE(dsc_seq_runs_of(cut, rank, MAX_DOCUMENTS + 2, runs, &n, &n_tokens) == DSC_OK);
        for (int64_t i = 0; i < n; i++) {
            REQUIRE(runs[i].n_tokens > 0 && runs[i].begin > end && runs[i].local_begin == local);
            local += runs[i].n_tokens;
            end = runs[i].begin + runs[i].n_tokens;
            REQUIRE(end <= cut->n_tokens);
            for (int64_t t = runs[i].begin; t < end; t++)
                n_owners[t]++;
        }
        REQUIRE(local == n_tokens);
    }
    for (int64_t t = 0; t < cut->n_tokens; t++)
        REQUIRE(n_owners[t] == 1);
}

/* Each pair that is visible is computed once: their number over all pairs of ranks equals the whole sequence's. */
static void check_blocks(struct input *input, const struct dsc_seq_cut *cut)
{
    struct dsc_seq_mask mask = {take_byte(input) % 2, take_below(input, 50), take_below(input, 9)};
    struct dsc_seq_run runs[MAX_RANKS][MAX_DOCUMENTS + 2];
    int64_t n_runs[MAX_RANKS];
    int64_t n_tokens;
    int64_t n;
    int64_t n_pairs;
    int64_t n_all = 0;
    int64_t begin = 0;

    for (int32_t rank = 0; rank < cut->n_ranks; rank++)
        REQUIRE(dsc_seq_runs_of(cut, rank, MAX_DOCUMENTS + 2, runs[rank], &n_runs[rank], &n_tokens) == DSC_OK);
    for (int32_t a = 0; a < cut->n_ranks; a++)
        for (int32_t b = 0; b < cut->n_ranks; b++) {
            REQUIRE(dsc_seq_blocks_of(&mask, cut->document_ends, cut->n_documents, cut->n_tokens, runs[a], n_runs[a], runs[b], n_runs[b], 0,
                                      NULL, &n, &n_pairs) == DSC_OK);
            n_all += n_pairs;
        }
    for (int64_t i = 0; i < (cut->n_documents > 0 ? cut->n_documents : 1); i++) {
        int64_t end = cut->n_documents > 0 ? cut->document_ends[i] : cut->n_tokens;

        for (int64_t query = begin; query < end; query++)
            for (int64_t key = begin; key < (mask.is_causal ? query + 1 : end); key++)
                n_all -= mask.window == 0 || llabs(query - key) < mask.window;
        begin = end;
    }
    REQUIRE(n_all == 0);
}

static void check_heads(struct input *input)
{
    int64_t n_key_heads = 1 + take_below(input, 9);
    int64_t n_heads = n_key_heads * (1 + take_below(input, 9));
    int32_t n_ranks = (int32_t)(1 + take_below(input, n_heads));
    int64_t next = 0;

    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct dsc_seq_heads heads;
        int64_t keys[81];

        REQUIRE(dsc_seq_heads_of(n_heads, n_key_heads, n_ranks, rank, &heads) == DSC_OK);
        REQUIRE(heads.query_begin == next && heads.query_end > next);
        REQUIRE(dsc_seq_keys_of(n_heads, n_key_heads, n_ranks, rank, 81, keys) == DSC_OK);
        for (int64_t head = next; head < heads.query_end; head++)
            REQUIRE(heads.key_begin + keys[(head - next) / heads.group] == head * n_key_heads / n_heads);
        next = heads.query_end;
    }
    REQUIRE(next == n_heads);
}

static void try_wild(struct input *input)
{
    int64_t ends[3] = {take_wild(input), take_wild(input), take_wild(input)};
    int32_t parts[3] = {(int32_t)take_wild(input), (int32_t)take_wild(input), (int32_t)take_wild(input)};
    struct dsc_seq_cut cut = {.n_tokens = take_wild(input),
                              .n_ranks = (int32_t)take_wild(input),
                              .n_inner = (int32_t)take_wild(input),
                              .order = (int32_t)(take_below(input, 5) - 1),
                              .document_ends = ends,
                              .document_parts = parts,
                              .n_documents = take_below(input, 4)};
    struct dsc_seq_widths widths = {take_wild(input), take_wild(input)};
    int64_t tokens[8];
    int64_t sent[8];
    struct dsc_seq_heads heads = {.group = -7};
    struct dsc_seq_run runs[8];
    int64_t n = -7;
    int64_t n_tokens = -7;

    struct dsc_seq_mask mask = {take_byte(input) % 2, take_wild(input), take_wild(input)};
    struct dsc_seq_run wild[2] = {{0, take_wild(input), take_wild(input)}, {take_wild(input), take_wild(input), take_wild(input)}};
    struct dsc_seq_block blocks[4];

    if (mask.tile > 0 && mask.tile < INT64_C(1) << 20)
        mask.tile = 0; /* as many blocks as tiles: slow, not wrong */
    if (dsc_seq_blocks_of(&mask, ends, take_below(input, 4), take_wild(input), wild, 2, wild, 1, 4, blocks, &n, &n_tokens) != DSC_OK)
        REQUIRE(n == -7 && n_tokens == -7);
    n = n_tokens = -7;
    if (dsc_seq_runs_of(&cut, (int32_t)take_wild(input), 8, runs, &n, &n_tokens) != DSC_OK)
        REQUIRE(n == -7 && n_tokens == -7);
    if (dsc_seq_heads_of(take_wild(input), take_wild(input), (int32_t)take_wild(input), (int32_t)take_wild(input), &heads) != DSC_OK)
        REQUIRE(heads.group == -7);
    for (int i = 0; i < 8; i++) {
        tokens[i] = take_wild(input);
        sent[i] = -7;
    }
    if (dsc_seq_exchange_of(take_wild(input), take_wild(input), &widths, tokens, 1 + (int32_t)take_below(input, 8), 0, sent, NULL, NULL, NULL) != DSC_OK)
        REQUIRE(sent[0] == -7);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    int64_t ends[MAX_DOCUMENTS];
    int32_t parts[MAX_DOCUMENTS];
    int64_t order[MAX_DOCUMENTS];
    int64_t part_tokens[MAX_RANKS];
    int64_t end = 0;

    if (take_byte(&input) % 2) {
        try_wild(&input);
        return 0;
    }

    struct dsc_seq_cut cut = {.n_inner = (int32_t)(1 + take_below(&input, 3)),
                              .order = (int32_t)take_below(&input, 3),
                              .document_ends = ends,
                              .document_parts = parts,
                              .n_documents = take_below(&input, MAX_DOCUMENTS + 1)};

    cut.n_ranks = cut.n_inner * (int32_t)(1 + take_below(&input, MAX_RANKS / cut.n_inner));
    for (int64_t i = 0; i < cut.n_documents; i++)
        ends[i] = end += 1 + take_below(&input, 40);
    cut.n_tokens = cut.n_documents > 0 || cut.order == DSC_SEQ_DOCUMENTS ? end : take_below(&input, MAX_TOKENS);
    REQUIRE(dsc_seq_deal(ends, cut.n_documents, cut.n_ranks / cut.n_inner, order, part_tokens, parts) == DSC_OK);
    check_cut(&cut);
    check_blocks(&input, &cut);
    check_heads(&input);
    return 0;
}
