/*
 * Computes a tensor-parallel rank's elements of one dimension: assigns heads and grains to ranks, and lists the runs.
 */
#include "dsc/tp.h"

#include "base/check.h"
#include "base/fail.h"
#include "base/share.h"

/* Grains [begin, end), counted through all blocks, and the ranks that hold them. */
struct share {
    struct dsc_range grains;
    int64_t per_block;
    int32_t first_copy;
    int32_t n_copies;
};

/* The index of the range that holds rank, if n ranges divide n_ranks ranks evenly. */
static int64_t holder_of(int64_t n_ranks, int64_t n, int64_t rank)
{
    int64_t each = n_ranks / n;
    int64_t more = n_ranks % n;

    return rank < more * (each + 1) ? rank / (each + 1) : more + (rank - more * (each + 1)) / each;
}

dsc_status dsc_tp_heads_of(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, int32_t rank,
                           struct dsc_tp_heads *out_heads)
{
    if (out_heads == NULL)
        return dsc_fail(DSC_EINVAL, "out_heads is NULL");
    DSC_TRY(dsc_check_shared_heads(n_heads, n_key_heads, n_ranks, rank));

    int64_t group = n_heads / n_key_heads;

    if (n_key_heads >= n_ranks) {
        struct dsc_range keys = dsc_even(n_key_heads, n_ranks, rank);

        *out_heads = (struct dsc_tp_heads){keys.begin * group, keys.end * group, keys.begin, keys.end, rank, 1};
        return DSC_OK;
    }

    int64_t key = holder_of(n_ranks, n_key_heads, rank);
    struct dsc_range sharers = dsc_even(n_ranks, n_key_heads, key);
    int64_t n_sharers = sharers.end - sharers.begin;

    /* The first key heads have the most ranks, so the check gives the same result on all ranks. */
    if (group < (n_ranks + n_key_heads - 1) / n_key_heads)
        return dsc_fail(DSC_EINVAL,
                        "%lld query heads over %lld key heads: a key head's %lld do not reach for %lld ranks",
                        (long long)n_heads, (long long)n_key_heads, (long long)group,
                        (long long)((n_ranks + n_key_heads - 1) / n_key_heads));

    struct dsc_range queries = dsc_even(group, n_sharers, rank - sharers.begin);

    *out_heads = (struct dsc_tp_heads){key * group + queries.begin, key * group + queries.end, key, key + 1,
                                       (int32_t)sharers.begin,      (int32_t)n_sharers};
    return DSC_OK;
}

static dsc_status check_part(const struct dsc_tp_dim *dim, int64_t i)
{
    const struct dsc_tp_part *part = &dim->parts[i];
    bool is_heads = part->kind == DSC_TP_QUERIES || part->kind == DSC_TP_KEYS;
    int64_t n_heads = part->kind == DSC_TP_QUERIES ? dim->n_heads : dim->n_key_heads;
    int64_t n_grains;

    if (part->kind < DSC_TP_WHOLE || part->kind > DSC_TP_KEYS)
        return dsc_fail(DSC_EINVAL, "parts[%lld].kind is %d, which is no dsc_tp_kind", (long long)i, (int)part->kind);
    if (part->n_elems < 0 || part->grain_elems < 1)
        return dsc_fail(DSC_EINVAL, "parts[%lld] has %lld elements in grains of %lld", (long long)i,
                        (long long)part->n_elems, (long long)part->grain_elems);
    if (!is_heads)
        return DSC_OK;
    if (part->n_elems % part->grain_elems != 0)
        return dsc_fail(DSC_EINVAL, "parts[%lld] has %lld elements, no multiple of a head of %lld", (long long)i,
                        (long long)part->n_elems, (long long)part->grain_elems);
    if (__builtin_mul_overflow(part->n_elems / part->grain_elems, dim->n_blocks, &n_grains) || n_grains != n_heads)
        return dsc_fail(DSC_EINVAL, "parts[%lld] has %lld heads in each of %lld blocks, must have %lld in all",
                        (long long)i, (long long)(part->n_elems / part->grain_elems), (long long)dim->n_blocks,
                        (long long)n_heads);
    return DSC_OK;
}

/* Also checks that no offset and no count below overflows. */
static dsc_status check_dim(const struct dsc_tp_dim *dim)
{
    int64_t block = 0;
    int64_t all;

    if (dim == NULL || (dim->parts == NULL && dim->n_parts > 0))
        return dsc_fail(DSC_EINVAL, "%s is NULL", dim == NULL ? "dim" : "parts");
    if (dim->n_parts < 0 || dim->n_blocks < 0 || dim->n_blocks > DSC_TP_MAX_BLOCKS)
        return dsc_fail(DSC_EINVAL, "%lld parts in %lld blocks: blocks are 0 to %d", (long long)dim->n_parts,
                        (long long)dim->n_blocks, DSC_TP_MAX_BLOCKS);
    for (int64_t i = 0; i < dim->n_parts; i++) {
        DSC_TRY(check_part(dim, i));
        if (__builtin_add_overflow(block, dim->parts[i].n_elems, &block))
            return dsc_fail(DSC_EOVERFLOW, "the sizes of %lld parts do not fit int64_t", (long long)dim->n_parts);
    }
    if (__builtin_mul_overflow(block, dim->n_blocks, &all))
        return dsc_fail(DSC_EOVERFLOW, "%lld blocks of %lld elements do not fit int64_t", (long long)dim->n_blocks,
                        (long long)block);
    return DSC_OK;
}

static struct share share_of(const struct dsc_tp_dim *dim, const struct dsc_tp_part *part,
                             const struct dsc_tp_heads *heads, int32_t n_ranks, int32_t rank)
{
    struct share share = {.per_block = part->n_elems / part->grain_elems + (part->n_elems % part->grain_elems != 0),
                          .first_copy = rank,
                          .n_copies = 1};

    switch (part->kind) {
    case DSC_TP_WHOLE:
        share.grains = (struct dsc_range){0, share.per_block * dim->n_blocks};
        share.first_copy = 0;
        share.n_copies = n_ranks;
        break;
    case DSC_TP_COLUMNS:
        share.grains = dsc_even(share.per_block * dim->n_blocks, n_ranks, rank);
        break;
    case DSC_TP_QUERIES:
        share.grains = (struct dsc_range){heads->query_begin, heads->query_end};
        break;
    default:
        share.grains = (struct dsc_range){heads->key_begin, heads->key_end};
        share.first_copy = heads->first_copy;
        share.n_copies = heads->n_copies;
    }
    return share;
}

/* The elements of one part that lie in one block, relative to the part. */
static struct dsc_range in_block(const struct dsc_tp_part *part, const struct share *share, int64_t block)
{
    int64_t first = block * share->per_block;
    int64_t begin = share->grains.begin > first ? share->grains.begin - first : 0;
    int64_t end = share->grains.end - first;
    struct dsc_range elems = {0, 0};

    if (end > share->per_block)
        end = share->per_block;
    if (begin >= end)
        return elems;
    elems.begin = begin * part->grain_elems;
    elems.end = end == share->per_block ? part->n_elems : end * part->grain_elems;
    return elems;
}

/* The runs found so far: always counted, and stored if there is an array. */
struct runs {
    struct dsc_tp_run *kept;
    int64_t capacity;
    int64_t n;
    int64_t local_elems;
    int64_t logical_end;
};

static void append(struct runs *runs, int64_t logical, int64_t n_elems)
{
    if (runs->n > 0 && runs->logical_end == logical) {
        if (runs->kept != NULL && runs->n <= runs->capacity)
            runs->kept[runs->n - 1].n_elems += n_elems;
    } else {
        if (runs->kept != NULL && runs->n < runs->capacity)
            runs->kept[runs->n] = (struct dsc_tp_run){runs->local_elems, logical, n_elems};
        runs->n++;
    }
    runs->local_elems += n_elems;
    runs->logical_end = logical + n_elems;
}

static void walk(const struct dsc_tp_dim *dim, const struct dsc_tp_heads *heads, int32_t n_ranks, int32_t rank,
                 struct runs *runs)
{
    int64_t logical = 0;

    for (int64_t block = 0; block < dim->n_blocks; block++) {
        for (int64_t i = 0; i < dim->n_parts; i++) {
            struct share share = share_of(dim, &dim->parts[i], heads, n_ranks, rank);
            struct dsc_range elems = in_block(&dim->parts[i], &share, block);

            if (elems.begin < elems.end)
                append(runs, logical + elems.begin, elems.end - elems.begin);
            logical += dim->parts[i].n_elems;
        }
    }
}

dsc_status dsc_tp_runs_of(const struct dsc_tp_dim *dim, int32_t n_ranks, int32_t rank, int64_t capacity,
                          struct dsc_tp_run *out_runs, int64_t *out_n_runs, int32_t *out_first_copy,
                          int32_t *out_n_copies)
{
    struct dsc_tp_heads heads = {0};
    bool has_heads = false;
    int32_t first_copy = rank;
    int32_t n_copies = -1;

    if (out_n_runs == NULL || out_first_copy == NULL || out_n_copies == NULL)
        return dsc_fail(DSC_EINVAL, "an out_ pointer is NULL");
    DSC_TRY(dsc_check_rank(n_ranks, rank));
    DSC_TRY(check_dim(dim));
    for (int64_t i = 0; i < dim->n_parts; i++)
        has_heads |= dim->parts[i].kind == DSC_TP_QUERIES || dim->parts[i].kind == DSC_TP_KEYS;
    if (has_heads)
        DSC_TRY(dsc_tp_heads_of(dim->n_heads, dim->n_key_heads, n_ranks, rank, &heads));
    for (int64_t i = 0; i < dim->n_parts; i++) {
        struct share share = share_of(dim, &dim->parts[i], &heads, n_ranks, rank);

        /* A part counts even if this rank has nothing of it, because ranks with copies may have some of it. */
        if (share.per_block == 0 || dim->n_blocks == 0)
            continue;
        if (n_copies < 0 || (share.first_copy == first_copy && share.n_copies == n_copies)) {
            first_copy = share.first_copy;
            n_copies = share.n_copies;
        } else {
            first_copy = rank;
            n_copies = 0;
        }
    }

    struct runs count = {0};

    walk(dim, &heads, n_ranks, rank, &count);
    if (out_runs != NULL && count.n > capacity)
        return dsc_fail(DSC_EINVAL, "%lld runs do not fit %lld entries", (long long)count.n, (long long)capacity);

    struct runs kept = {.kept = out_runs, .capacity = capacity};

    if (out_runs != NULL)
        walk(dim, &heads, n_ranks, rank, &kept);
    *out_n_runs = count.n;
    *out_first_copy = first_copy;
    *out_n_copies = n_copies < 0 ? 1 : n_copies;
    return DSC_OK;
}
