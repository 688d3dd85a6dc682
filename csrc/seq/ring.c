/* Finds the blocks of attention between one rank's queries and another's keys: whole, masked, or skipped. */
#include "seq/seq.h"

#include "base/fail.h"

/* Tokens that lie together, all of one document. */
struct piece {
    int64_t begin;
    int64_t end;
    int64_t to_local; /* added to a global place, for the rank's own place */
};

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Pairs of i in [0, n_queries) and j in [0, n_keys) with i - j >= distance. */
static int64_t pairs_from(int64_t n_queries, int64_t n_keys, int64_t distance)
{
    /* Every query is far enough from these first keys; for the other keys i counts from j + distance. */
    int64_t n_all = most(0, least(1 - distance, n_keys));
    int64_t last = least(n_keys, n_queries - distance);
    int64_t n_some = most(0, last - n_all);
    int64_t first_term = n_queries - n_all - distance;

    return n_all * n_queries + n_some * first_term - n_some * (n_some - 1) / 2;
}

struct blocks {
    const struct dsc_seq_mask *mask;
    struct dsc_seq_block last[3]; /* blocks that may still be merged, the newest last */
    int n_last;
    struct dsc_seq_block *kept; /* NULL: counted only */
    int64_t capacity;
    int64_t n;
    int64_t n_pairs;
};

static bool are_same(int64_t a_begin, int64_t a_end, int64_t b_begin, int64_t b_end)
{
    return a_begin == b_begin && a_end == b_end;
}

/* Two whole blocks that make a larger one. */
static bool join_whole(struct dsc_seq_block *a, const struct dsc_seq_block *b)
{
    if (a->kind != DSC_SEQ_WHOLE || b->kind != DSC_SEQ_WHOLE)
        return false;
    if (are_same(a->query_begin, a->query_end, b->query_begin, b->query_end) && a->key_end == b->key_begin)
        a->key_end = b->key_end;
    else if (are_same(a->key_begin, a->key_end, b->key_begin, b->key_end) && a->query_end == b->query_begin)
        a->query_end = b->query_end;
    else
        return false;
    a->n_pairs += b->n_pairs;
    return true;
}

/* A triangle, the rectangle below it and the triangle beside that: places in between are missing on both sides alike.
 */
static bool join_causal(struct dsc_seq_block *a, const struct dsc_seq_block *below, const struct dsc_seq_block *b)
{
    if (a->kind != DSC_SEQ_CAUSAL || below->kind != DSC_SEQ_WHOLE || b->kind != DSC_SEQ_CAUSAL ||
        a->query_end != b->query_begin || a->key_end != b->key_begin ||
        !are_same(below->query_begin, below->query_end, b->query_begin, b->query_end) ||
        !are_same(below->key_begin, below->key_end, a->key_begin, a->key_end))
        return false;
    a->query_end = b->query_end;
    a->key_end = b->key_end;
    a->n_pairs += below->n_pairs + b->n_pairs;
    return true;
}

static void flush_oldest(struct blocks *blocks)
{
    if (blocks->kept != NULL && blocks->n < blocks->capacity)
        blocks->kept[blocks->n] = blocks->last[0];
    blocks->n++;
    blocks->last[0] = blocks->last[1];
    blocks->last[1] = blocks->last[2];
    blocks->n_last--;
}

static void append(struct blocks *blocks, const struct dsc_seq_block *block)
{
    struct dsc_seq_block *last = blocks->last;

    if (blocks->n_last == 3)
        flush_oldest(blocks);
    last[blocks->n_last++] = *block;
    blocks->n_pairs += block->n_pairs;
    while (blocks->n_last > 1 && join_whole(&last[blocks->n_last - 2], &last[blocks->n_last - 1]))
        blocks->n_last--;
    if (blocks->n_last == 3 && join_causal(&last[0], &last[1], &last[2]))
        blocks->n_last = 1;
}

/* The keys that queries [begin, end) may see at all: the others are cut off. */
static struct dsc_range seen_of(const struct dsc_seq_mask *mask, int64_t begin, int64_t end, const struct piece *key)
{
    struct dsc_range seen = {key->begin, key->end};

    if (mask->is_causal)
        seen.end = least(seen.end, end);
    else if (mask->window > 0)
        seen.end = least(seen.end, end + mask->window - 1);
    if (mask->window > 0)
        seen.begin = most(seen.begin, begin - mask->window + 1);
    return seen;
}

static bool is_whole(const struct dsc_seq_mask *mask, struct dsc_range query, struct dsc_range key)
{
    if (mask->window > 0 && query.end - 1 - key.begin >= mask->window)
        return false;
    return mask->is_causal ? key.end - 1 <= query.begin : mask->window == 0 || key.end - 1 - query.begin < mask->window;
}

static void fill(struct blocks *blocks, const struct piece *queries, const struct piece *keys, struct dsc_range query,
                 struct dsc_range key)
{
    const struct dsc_seq_mask *mask = blocks->mask;
    int64_t n_queries = query.end - query.begin;
    int64_t n_keys = key.end - key.begin;
    int64_t shift = query.begin - key.begin;
    struct dsc_seq_block block = {.kind = DSC_SEQ_BAND,
                                  .query_begin = query.begin + queries->to_local,
                                  .query_end = query.end + queries->to_local,
                                  .key_begin = key.begin + keys->to_local,
                                  .key_end = key.end + keys->to_local,
                                  .shift = shift};

    if (is_whole(mask, query, key))
        block.kind = DSC_SEQ_WHOLE;
    else if (mask->is_causal && shift == 0 && n_queries == n_keys && (mask->window == 0 || n_keys <= mask->window))
        block.kind = DSC_SEQ_CAUSAL;
    block.n_pairs = n_queries * n_keys;
    if (block.kind != DSC_SEQ_WHOLE) {
        int64_t nearest = mask->is_causal ? 0 : 1 - mask->window; /* without is_causal the window has two sides */

        block.n_pairs = pairs_from(n_queries, n_keys, nearest - shift);
        if (mask->window > 0)
            block.n_pairs -= pairs_from(n_queries, n_keys, mask->window - shift);
    }
    append(blocks, &block);
}

/* The queries [begin, end) of a piece with the keys of another, both of one document. */
static void cross(struct blocks *blocks, const struct piece *queries, const struct piece *keys, int64_t begin,
                  int64_t end)
{
    const struct dsc_seq_mask *mask = blocks->mask;
    struct dsc_range key = seen_of(mask, begin, end, keys);

    if (key.begin >= key.end)
        return;
    if (mask->is_causal)
        begin = most(begin, key.begin);
    else if (mask->window > 0)
        begin = most(begin, key.begin - mask->window + 1);
    if (mask->window > 0)
        end = least(end, key.end - 1 + mask->window);
    if (begin < end)
        fill(blocks, queries, keys, (struct dsc_range){begin, end}, key);
}

/* The same in tiles, if a mask of its own would be needed for it as one. */
static void cross_in_tiles(struct blocks *blocks, const struct piece *queries, const struct piece *keys)
{
    const struct dsc_seq_mask *mask = blocks->mask;
    int64_t n = queries->end - queries->begin;
    struct dsc_range query = {queries->begin, queries->end};
    bool is_triangle = mask->is_causal && queries->begin == keys->begin && queries->end == keys->end &&
                       (mask->window == 0 || n <= mask->window);

    if (mask->tile == 0 || is_triangle || is_whole(mask, query, (struct dsc_range){keys->begin, keys->end})) {
        cross(blocks, queries, keys, queries->begin, queries->end);
        return;
    }
    for (int64_t begin = queries->begin; begin < queries->end; begin += mask->tile)
        cross(blocks, queries, keys, begin, least(begin + mask->tile, queries->end));
}

struct documents {
    const int64_t *ends;
    int64_t n;
    int64_t n_tokens;
};

/* The first document that ends after a token, from document at on. */
static int64_t document_of(const struct documents *documents, int64_t at, int64_t token)
{
    while (at < documents->n && documents->ends[at] <= token)
        at++;
    return at;
}

static int64_t end_of(const struct documents *documents, int64_t document)
{
    return document < documents->n ? documents->ends[document] : documents->n_tokens;
}

static void walk(struct blocks *blocks, const struct documents *documents, const struct dsc_seq_run *queries,
                 int64_t n_query_runs, const struct dsc_seq_run *keys, int64_t n_key_runs)
{
    int64_t document = 0;
    int64_t first_key = 0;

    for (int64_t i = 0; i < n_query_runs; i++) {
        int64_t end = queries[i].begin + queries[i].n_tokens;
        struct piece query = {queries[i].begin, queries[i].begin, queries[i].local_begin - queries[i].begin};

        for (; query.begin < end; query.begin = query.end) {
            document = document_of(documents, document, query.begin);

            int64_t document_begin = document > 0 ? documents->ends[document - 1] : 0;
            int64_t document_end = end_of(documents, document);

            query.end = least(end, document_end);
            while (first_key < n_key_runs && keys[first_key].begin + keys[first_key].n_tokens <= document_begin)
                first_key++;
            for (int64_t j = first_key; j < n_key_runs && keys[j].begin < document_end; j++) {
                struct piece key = {most(keys[j].begin, document_begin),
                                    least(keys[j].begin + keys[j].n_tokens, document_end),
                                    keys[j].local_begin - keys[j].begin};

                if (blocks->mask->is_causal && key.begin >= query.end)
                    break;
                cross_in_tiles(blocks, &query, &key);
            }
        }
    }
    while (blocks->n_last > 0)
        flush_oldest(blocks);
}

static dsc_status check_runs(const char *name, const struct dsc_seq_run *runs, int64_t n_runs, int64_t n_tokens)
{
    int64_t end = 0;
    int64_t local = 0;

    if (n_runs < 0 || (n_runs > 0 && runs == NULL))
        return dsc_fail(DSC_EINVAL, "%lld runs of %s, and they are %s", (long long)n_runs, name,
                        runs == NULL ? "NULL" : "set");
    for (int64_t i = 0; i < n_runs; i++) {
        if (runs[i].n_tokens < 1 || runs[i].begin < end || runs[i].n_tokens > n_tokens - runs[i].begin ||
            runs[i].local_begin != local)
            return dsc_fail(DSC_EINVAL,
                            "run %lld of %s has %lld tokens from %lld on, at %lld of the rank: must begin at %lld or "
                            "later, at %lld of the rank, and end within %lld tokens",
                            (long long)i, name, (long long)runs[i].n_tokens, (long long)runs[i].begin,
                            (long long)runs[i].local_begin, (long long)end, (long long)local, (long long)n_tokens);
        end = runs[i].begin + runs[i].n_tokens;
        local += runs[i].n_tokens;
    }
    return DSC_OK;
}

dsc_status dsc_seq_blocks_of(const struct dsc_seq_mask *mask, const int64_t *document_ends, int64_t n_documents,
                             int64_t n_tokens, const struct dsc_seq_run *queries, int64_t n_query_runs,
                             const struct dsc_seq_run *keys, int64_t n_key_runs, int64_t capacity,
                             struct dsc_seq_block *out_blocks, int64_t *out_n_blocks, int64_t *out_n_pairs)
{
    if (mask == NULL || out_n_blocks == NULL || out_n_pairs == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", mask == NULL ? "mask" : "an out_ pointer");
    if (mask->window < 0 || mask->window > DSC_SEQ_MAX_TOKENS || mask->tile < 0 || mask->tile > DSC_SEQ_MAX_TOKENS)
        return dsc_fail(DSC_EINVAL, "a window of %lld tokens in tiles of %lld: both must be 0 to %lld",
                        (long long)mask->window, (long long)mask->tile, (long long)DSC_SEQ_MAX_TOKENS);
    DSC_TRY(seq_check_documents(document_ends, n_documents, n_tokens));
    DSC_TRY(check_runs("queries", queries, n_query_runs, n_tokens));
    DSC_TRY(check_runs("keys", keys, n_key_runs, n_tokens));

    struct documents documents = {document_ends, n_documents, n_tokens};
    struct blocks count = {.mask = mask};
    struct blocks kept = {.mask = mask, .kept = out_blocks, .capacity = capacity};

    walk(&count, &documents, queries, n_query_runs, keys, n_key_runs);
    if (out_blocks != NULL && count.n > capacity)
        return dsc_fail(DSC_EINVAL, "%lld blocks do not fit %lld entries", (long long)count.n, (long long)capacity);
    if (out_blocks != NULL)
        walk(&kept, &documents, queries, n_query_runs, keys, n_key_runs);
    *out_n_blocks = count.n;
    *out_n_pairs = count.n_pairs;
    return DSC_OK;
}
