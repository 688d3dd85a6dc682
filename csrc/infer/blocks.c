/* Tables of blocks over one pool: reference counts, a stack of free blocks, copies before a shared block is
 * written, and idle blocks, whose contents somebody may ask for again. */
#include "infer/pool.h"

#include "base/fail.h"

#include <stdlib.h>
#include <string.h>

struct sequence {
    bool is_live;
    int32_t *blocks; /* each entry holds one reference to its block, or is DSC_KV_GONE */
    int32_t n_blocks;
    int32_t capacity;
    int32_t n_gone; /* entries at the front that are DSC_KV_GONE */
    int64_t n_tokens;
};

/* Neighbours of an idle block. The list is a ring around entry n_blocks; the longest idle block comes first. */
struct links {
    int32_t before;
    int32_t after;
};

struct dsc_kv_pool {
    int32_t n_blocks;
    int32_t *n_references; /* of each block */
    bool *is_kept;         /* with a keeper */
    struct links *idle;
    int32_t n_idle;
    void (*forget)(void *arg, int32_t block);
    void *keeper;
    int32_t *free; /* a stack: the block that was freed last is used first, because its memory is in use */
    int32_t n_free;
    struct sequence *sequences;
    int32_t n_sequences; /* slots */
    int32_t n_live;
    uint64_t *seen; /* by slot: the call that named the sequence last */
    uint64_t n_calls;
};

static int64_t blocks_of(int64_t n_tokens)
{
    return n_tokens / DSC_KV_TOKENS + (n_tokens % DSC_KV_TOKENS != 0);
}

dsc_status dsc_kv_open(int32_t n_blocks, struct dsc_kv_pool **out)
{
    struct dsc_kv_pool *pool;

    if (n_blocks < 0)
        return dsc_fail(DSC_EINVAL, "n_blocks is %d, must not be negative", (int)n_blocks);
    pool = calloc(1, sizeof *pool);
    if (pool != NULL) {
        pool->n_references = calloc((size_t)n_blocks + 1, sizeof *pool->n_references);
        pool->free = malloc(((size_t)n_blocks + 1) * sizeof *pool->free);
    }
    if (pool == NULL || pool->n_references == NULL || pool->free == NULL) {
        dsc_kv_close(pool);
        return dsc_fail(DSC_ENOMEM, "no memory for the numbers of %d blocks", (int)n_blocks);
    }
    pool->n_blocks = pool->n_free = n_blocks;
    for (int32_t i = 0; i < n_blocks; i++)
        pool->free[i] = n_blocks - 1 - i;
    *out = pool;
    return DSC_OK;
}

void dsc_kv_close(struct dsc_kv_pool *pool)
{
    if (pool == NULL)
        return;
    for (int32_t i = 0; i < pool->n_sequences; i++)
        free(pool->sequences[i].blocks);
    free(pool->sequences);
    free(pool->seen);
    free(pool->n_references);
    free(pool->is_kept);
    free(pool->idle);
    free(pool->free);
    free(pool);
}

static int32_t n_available(const struct dsc_kv_pool *pool)
{
    return pool->n_free + pool->n_idle;
}

void dsc_kv_count(const struct dsc_kv_pool *pool, struct dsc_kv_counts *out)
{
    *out = (struct dsc_kv_counts){pool->n_blocks, n_available(pool), pool->n_live};
}

static bool is_live(const struct dsc_kv_pool *pool, int32_t sequence)
{
    return sequence >= 0 && sequence < pool->n_sequences && pool->sequences[sequence].is_live;
}

static dsc_status check_live(const struct dsc_kv_pool *pool, int32_t i, int32_t sequence, const char *name)
{
    if (!is_live(pool, sequence))
        return dsc_fail(DSC_EINVAL, "%s[%d] is %d, which is no sequence of this pool", name, (int)i, (int)sequence);
    return DSC_OK;
}

/* Each is a sequence, and none is named twice. */
static dsc_status check_sequences(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences)
{
    if (n < 0)
        return dsc_fail(DSC_EINVAL, "n is %d, must not be negative", (int)n);
    pool->n_calls++;
    for (int32_t i = 0; i < n; i++) {
        DSC_TRY(check_live(pool, i, sequences[i], "sequences"));
        if (pool->seen[sequences[i]] == pool->n_calls)
            return dsc_fail(DSC_EINVAL, "sequences[%d] is %d, which an earlier entry names too", (int)i,
                            (int)sequences[i]);
        pool->seen[sequences[i]] = pool->n_calls;
    }
    return DSC_OK;
}

/* Makes room for n_sequences slots. */
static dsc_status reserve_slots(struct dsc_kv_pool *pool, int32_t n_sequences)
{
    struct sequence *sequences;
    uint64_t *seen;

    if (n_sequences <= pool->n_sequences)
        return DSC_OK;
    sequences = realloc(pool->sequences, (size_t)n_sequences * sizeof *sequences);
    if (sequences != NULL)
        pool->sequences = sequences;
    seen = realloc(pool->seen, (size_t)n_sequences * sizeof *seen);
    if (seen != NULL)
        pool->seen = seen;
    if (sequences == NULL || seen == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %d sequences", (int)n_sequences);
    memset(sequences + pool->n_sequences, 0, (size_t)(n_sequences - pool->n_sequences) * sizeof *sequences);
    memset(seen + pool->n_sequences, 0, (size_t)(n_sequences - pool->n_sequences) * sizeof *seen);
    pool->n_sequences = n_sequences;
    return DSC_OK;
}

/* Makes room for n_blocks entries of a table. */
static dsc_status reserve_entries(struct sequence *sequence, int32_t n_blocks)
{
    int32_t capacity = sequence->capacity < 8 ? 8 : sequence->capacity;
    int32_t *blocks;

    if (n_blocks <= sequence->capacity)
        return DSC_OK;
    while (capacity < n_blocks)
        capacity = capacity > INT32_MAX / 2 ? INT32_MAX : 2 * capacity;
    blocks = realloc(sequence->blocks, (size_t)capacity * sizeof *blocks);
    if (blocks == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a table of %d blocks", (int)n_blocks);
    sequence->blocks = blocks;
    sequence->capacity = capacity;
    return DSC_OK;
}

dsc_status dsc_kv_add(struct dsc_kv_pool *pool, int32_t n, int32_t *out_sequences)
{
    int32_t n_added = 0;

    if (n < 0 || n > INT32_MAX - pool->n_live)
        return dsc_fail(DSC_EINVAL, "n is %d beside %d sequences", (int)n, (int)pool->n_live);
    DSC_TRY(reserve_slots(pool, pool->n_live + n));
    for (int32_t i = 0; n_added < n; i++) {
        if (pool->sequences[i].is_live)
            continue;
        pool->sequences[i].is_live = true;
        pool->sequences[i].n_blocks = pool->sequences[i].n_gone = 0;
        pool->sequences[i].n_tokens = 0;
        out_sequences[n_added++] = i;
    }
    pool->n_live += n;
    return DSC_OK;
}

static bool is_kept(const struct dsc_kv_pool *pool, int32_t block)
{
    return pool->forget != NULL && pool->is_kept[block];
}

static void link_idle(struct dsc_kv_pool *pool, int32_t block)
{
    struct links *ring = pool->idle;
    int32_t last = ring[pool->n_blocks].before;

    ring[block] = (struct links){last, pool->n_blocks};
    ring[last].after = ring[pool->n_blocks].before = block;
    pool->n_idle++;
}

static void unlink_idle(struct dsc_kv_pool *pool, int32_t block)
{
    struct links *ring = pool->idle;

    ring[ring[block].before].after = ring[block].after;
    ring[ring[block].after].before = ring[block].before;
    pool->n_idle--;
}

static void release(struct dsc_kv_pool *pool, int32_t block)
{
    if (block == DSC_KV_GONE || --pool->n_references[block] > 0)
        return;
    if (is_kept(pool, block))
        link_idle(pool, block);
    else
        pool->free[pool->n_free++] = block;
}

static int32_t take(struct dsc_kv_pool *pool)
{
    int32_t block;

    if (pool->n_free > 0) {
        block = pool->free[--pool->n_free];
    } else {
        block = pool->idle[pool->n_blocks].after;
        unlink_idle(pool, block);
        pool->is_kept[block] = false;
        pool->forget(pool->keeper, block);
    }
    pool->n_references[block] = 1;
    return block;
}

/* Whether a sequence that writes to one of its blocks needs a copy of it. Somebody may ask for a kept block's contents,
 * which are those of a full block. */
static bool needs_copy(const struct dsc_kv_pool *pool, int32_t block)
{
    return pool->n_references[block] > 1 || is_kept(pool, block);
}

static void release_from(struct dsc_kv_pool *pool, struct sequence *sequence, int32_t n_blocks)
{
    while (sequence->n_blocks > n_blocks)
        release(pool, sequence->blocks[--sequence->n_blocks]);
}

dsc_status dsc_kv_drop(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences)
{
    DSC_TRY(check_sequences(pool, n, sequences));
    for (int32_t i = 0; i < n; i++) {
        struct sequence *sequence = &pool->sequences[sequences[i]];

        release_from(pool, sequence, 0);
        sequence->is_live = false;
    }
    pool->n_live -= n;
    return DSC_OK;
}

/* The block into which the sequence's next token goes, if it has one already; else DSC_KV_GONE. */
static int32_t open_block(const struct sequence *sequence)
{
    return sequence->n_tokens % DSC_KV_TOKENS == 0 ? DSC_KV_GONE : sequence->blocks[sequence->n_blocks - 1];
}

/* The number of blocks that all of it takes: new ones, and copies of shared ones. */
static dsc_status count_needed(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, const int64_t *n_tokens,
                               int64_t *out_needed)
{
    int64_t needed = 0;

    for (int32_t i = 0; i < n; i++) {
        const struct sequence *sequence = &pool->sequences[sequences[i]];

        if (n_tokens[i] < 0)
            return dsc_fail(DSC_EINVAL, "n_tokens[%d] is %lld, must not be negative", (int)i, (long long)n_tokens[i]);
        if (n_tokens[i] > (int64_t)INT32_MAX * DSC_KV_TOKENS - sequence->n_tokens)
            return dsc_fail(DSC_EOVERFLOW, "n_tokens[%d] is %lld, more than a table can name", (int)i,
                            (long long)n_tokens[i]);
        needed += blocks_of(sequence->n_tokens + n_tokens[i]) - sequence->n_blocks;
    }
    /* Each copy takes one reference from the shared block, so the last of its sequences finds it unshared. */
    for (int32_t i = 0; i < n; i++) {
        int32_t block = open_block(&pool->sequences[sequences[i]]);

        if (n_tokens[i] > 0 && block != DSC_KV_GONE) {
            needed += needs_copy(pool, block);
            pool->n_references[block]--;
        }
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t block = open_block(&pool->sequences[sequences[i]]);

        if (n_tokens[i] > 0 && block != DSC_KV_GONE)
            pool->n_references[block]++;
    }
    *out_needed = needed;
    return DSC_OK;
}

dsc_status dsc_kv_grow(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, const int64_t *n_tokens,
                       struct dsc_kv_copy *copies, int32_t *out_n_copies)
{
    int64_t needed = 0;
    int32_t n_copies = 0;

    DSC_TRY(check_sequences(pool, n, sequences));
    DSC_TRY(count_needed(pool, n, sequences, n_tokens, &needed));
    if (needed > n_available(pool))
        return dsc_fail(DSC_ENOSPC, "%lld blocks of %d tokens are needed, and %d of %d are free", (long long)needed,
                        DSC_KV_TOKENS, (int)n_available(pool), (int)pool->n_blocks);
    for (int32_t i = 0; i < n; i++) {
        struct sequence *sequence = &pool->sequences[sequences[i]];

        DSC_TRY(reserve_entries(sequence, (int32_t)blocks_of(sequence->n_tokens + n_tokens[i])));
    }
    for (int32_t i = 0; i < n; i++) {
        struct sequence *sequence = &pool->sequences[sequences[i]];
        int32_t block = open_block(sequence);

        if (n_tokens[i] > 0 && block != DSC_KV_GONE && needs_copy(pool, block)) {
            int32_t own = take(pool);

            release(pool, block);
            sequence->blocks[sequence->n_blocks - 1] = own;
            copies[n_copies++] = (struct dsc_kv_copy){block, own};
        }
        sequence->n_tokens += n_tokens[i];
        while (sequence->n_blocks < blocks_of(sequence->n_tokens))
            sequence->blocks[sequence->n_blocks++] = take(pool);
    }
    *out_n_copies = n_copies;
    return DSC_OK;
}

dsc_status dsc_kv_cut(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, const int64_t *n_tokens)
{
    DSC_TRY(check_sequences(pool, n, sequences));
    for (int32_t i = 0; i < n; i++) {
        const struct sequence *sequence = &pool->sequences[sequences[i]];

        if (n_tokens[i] < 0 || n_tokens[i] > sequence->n_tokens)
            return dsc_fail(DSC_EINVAL, "n_tokens[%d] is %lld, must be 0 to %lld", (int)i, (long long)n_tokens[i],
                            (long long)sequence->n_tokens);
        if (n_tokens[i] > 0 && n_tokens[i] < (int64_t)sequence->n_gone * DSC_KV_TOKENS)
            return dsc_fail(DSC_ESTATE, "n_tokens[%d] is %lld, and the blocks of the first %lld tokens are gone",
                            (int)i, (long long)n_tokens[i], (long long)sequence->n_gone * DSC_KV_TOKENS);
    }
    for (int32_t i = 0; i < n; i++) {
        struct sequence *sequence = &pool->sequences[sequences[i]];

        release_from(pool, sequence, (int32_t)blocks_of(n_tokens[i]));
        sequence->n_tokens = n_tokens[i];
        if (sequence->n_gone > sequence->n_blocks)
            sequence->n_gone = sequence->n_blocks;
    }
    return DSC_OK;
}

dsc_status dsc_kv_slide(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, const int64_t *first)
{
    DSC_TRY(check_sequences(pool, n, sequences));
    for (int32_t i = 0; i < n; i++)
        if (first[i] < 0)
            return dsc_fail(DSC_EINVAL, "first[%d] is %lld, must not be negative", (int)i, (long long)first[i]);
    for (int32_t i = 0; i < n; i++) {
        struct sequence *sequence = &pool->sequences[sequences[i]];
        int64_t end = first[i] < sequence->n_tokens ? first[i] : sequence->n_tokens;

        for (; sequence->n_gone < end / DSC_KV_TOKENS; sequence->n_gone++) {
            release(pool, sequence->blocks[sequence->n_gone]);
            sequence->blocks[sequence->n_gone] = DSC_KV_GONE;
        }
    }
    return DSC_OK;
}

dsc_status dsc_kv_assign(struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, const int32_t *sources)
{
    struct sequence *found;

    DSC_TRY(check_sequences(pool, n, sequences));
    for (int32_t i = 0; i < n; i++)
        DSC_TRY(check_live(pool, i, sources[i], "sources"));
    found = calloc((size_t)n + 1, sizeof *found);
    if (found == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %d tables", (int)n);
    for (int32_t i = 0; i < n; i++) {
        const struct sequence *source = &pool->sequences[sources[i]];

        if (reserve_entries(&found[i], source->n_blocks) != DSC_OK) {
            while (i > 0)
                free(found[--i].blocks);
            free(found);
            return dsc_fail(DSC_ENOMEM, "no memory for a table of %d blocks", (int)source->n_blocks);
        }
        if (source->n_blocks > 0)
            memcpy(found[i].blocks, source->blocks, (size_t)source->n_blocks * sizeof *found[i].blocks);
        found[i].is_live = true;
        found[i].n_blocks = source->n_blocks;
        found[i].n_gone = source->n_gone;
        found[i].n_tokens = source->n_tokens;
    }
    for (int32_t i = 0; i < n; i++)
        for (int32_t j = found[i].n_gone; j < found[i].n_blocks; j++)
            pool->n_references[found[i].blocks[j]]++;
    for (int32_t i = 0; i < n; i++) {
        struct sequence *sequence = &pool->sequences[sequences[i]];

        release_from(pool, sequence, 0);
        free(sequence->blocks);
        *sequence = found[i];
    }
    free(found);
    return DSC_OK;
}

dsc_status dsc_kv_tables(const struct dsc_kv_pool *pool, int32_t n, const int32_t *sequences, int64_t n_columns,
                         int32_t *out)
{
    for (int32_t i = 0; i < n; i++) {
        DSC_TRY(check_live(pool, i, sequences[i], "sequences"));
        if (pool->sequences[sequences[i]].n_blocks > n_columns)
            return dsc_fail(DSC_EINVAL, "sequences[%d] has %d blocks, and a row has %lld columns", (int)i,
                            (int)pool->sequences[sequences[i]].n_blocks, (long long)n_columns);
    }
    for (int32_t i = 0; i < n; i++) {
        const struct sequence *sequence = &pool->sequences[sequences[i]];

        for (int64_t j = 0; j < n_columns; j++)
            out[i * n_columns + j] = j < sequence->n_blocks ? sequence->blocks[j] : DSC_KV_GONE;
    }
    return DSC_OK;
}

dsc_status dsc_kv_set_keeper(struct dsc_kv_pool *pool, void (*forget)(void *arg, int32_t block), void *arg)
{
    int32_t end = pool->n_blocks;

    if (pool->forget != NULL)
        return dsc_fail(DSC_ESTATE, "the pool serves an index of prefixes already");
    free(pool->is_kept);
    free(pool->idle);
    pool->is_kept = calloc((size_t)end + 1, sizeof *pool->is_kept);
    pool->idle = calloc((size_t)end + 1, sizeof *pool->idle);
    if (pool->is_kept == NULL || pool->idle == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the marks of %d blocks", (int)end);
    pool->idle[end] = (struct links){end, end};
    pool->forget = forget;
    pool->keeper = arg;
    return DSC_OK;
}

void dsc_kv_clear_keeper(struct dsc_kv_pool *pool)
{
    while (pool->n_idle > 0) {
        int32_t block = pool->idle[pool->n_blocks].after;

        unlink_idle(pool, block);
        pool->free[pool->n_free++] = block;
    }
    pool->forget = NULL;
}

void dsc_kv_keep(struct dsc_kv_pool *pool, int32_t block)
{
    pool->is_kept[block] = true;
}

dsc_status dsc_kv_check_live(const struct dsc_kv_pool *pool, int32_t sequence)
{
    return check_live(pool, 0, sequence, "sequences");
}

int64_t dsc_kv_n_full(const struct dsc_kv_pool *pool, int32_t sequence)
{
    return pool->sequences[sequence].n_tokens / DSC_KV_TOKENS;
}

int32_t dsc_kv_block(const struct dsc_kv_pool *pool, int32_t sequence, int64_t i)
{
    return pool->sequences[sequence].blocks[i];
}

dsc_status dsc_kv_reserve(struct dsc_kv_pool *pool, int32_t sequence, int64_t n)
{
    struct sequence *grown = &pool->sequences[sequence];

    if (n > INT32_MAX - grown->n_blocks)
        return dsc_fail(DSC_EOVERFLOW, "%lld more blocks are more than a table can name", (long long)n);
    return reserve_entries(grown, grown->n_blocks + (int32_t)n);
}

void dsc_kv_attach(struct dsc_kv_pool *pool, int32_t sequence, int64_t n, const int32_t *blocks)
{
    struct sequence *grown = &pool->sequences[sequence];

    for (int64_t i = 0; i < n; i++) {
        int32_t block = blocks[i];

        grown->blocks[grown->n_blocks++] = block;
        if (block == DSC_KV_GONE)
            grown->n_gone++;
        else if (pool->n_references[block]++ == 0)
            unlink_idle(pool, block);
    }
    grown->n_tokens += n * DSC_KV_TOKENS;
}
