/* The heads of each rank where ranks exchange tokens for heads, and the number of elements that travel. */
#include "seq/seq.h"

#include "base/fail.h"

static int64_t gcd(int64_t a, int64_t b)
{
    while (b != 0) {
        int64_t rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

dsc_status dsc_seq_heads_of(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, int32_t rank,
                            struct dsc_seq_heads *out_heads)
{
    if (out_heads == NULL)
        return dsc_fail(DSC_EINVAL, "out_heads is NULL");
    DSC_TRY(dsc_check_shared_heads(n_heads, n_key_heads, n_ranks, rank));

    int64_t group = n_heads / n_key_heads;
    struct dsc_range queries = dsc_even(n_heads, n_ranks, rank);
    int64_t key_begin = queries.begin / group;
    int64_t key_end = (queries.end - 1) / group + 1;
    int64_t shared = queries.end - queries.begin;

    /* The first and the last key head may have fewer queries here than those between them. */
    if (key_end - key_begin > 1) {
        shared = gcd((key_begin + 1) * group - queries.begin, queries.end - (key_end - 1) * group);
        if (key_end - key_begin > 2)
            shared = gcd(shared, group);
    }
    *out_heads = (struct dsc_seq_heads){queries.begin, queries.end, key_begin, key_end, shared};
    return DSC_OK;
}

dsc_status dsc_seq_keys_of(int64_t n_heads, int64_t n_key_heads, int32_t n_ranks, int32_t rank, int64_t capacity,
                           int64_t *out_keys)
{
    struct dsc_seq_heads heads;

    if (out_keys == NULL)
        return dsc_fail(DSC_EINVAL, "out_keys is NULL");
    DSC_TRY(dsc_seq_heads_of(n_heads, n_key_heads, n_ranks, rank, &heads));

    int64_t n_groups = (heads.query_end - heads.query_begin) / heads.group;

    if (n_groups > capacity)
        return dsc_fail(DSC_EINVAL, "%lld groups do not fit %lld entries", (long long)n_groups, (long long)capacity);
    for (int64_t i = 0; i < n_groups; i++)
        out_keys[i] = (heads.query_begin + i * heads.group) / (n_heads / n_key_heads) - heads.key_begin;
    return DSC_OK;
}

/* tokens * (queries * query_width + keys * key_width), or false where that does not fit. */
static bool elems_of(int64_t tokens, int64_t queries, int64_t query_width, int64_t keys, int64_t key_width,
                     int64_t *out_elems)
{
    int64_t of_queries;
    int64_t of_keys;
    int64_t each;

    return !__builtin_mul_overflow(queries, query_width, &of_queries) &&
           !__builtin_mul_overflow(keys, key_width, &of_keys) && !__builtin_add_overflow(of_queries, of_keys, &each) &&
           !__builtin_mul_overflow(each, tokens, out_elems);
}

static void put(int64_t *array, int32_t i, int64_t value)
{
    if (array != NULL)
        array[i] = value;
}

/* Elements sent to one peer, received from it, returned to it, got back from it. */
static dsc_status exchange_with(const struct dsc_seq_heads *own, const struct dsc_seq_heads *theirs,
                                const struct dsc_seq_widths *widths, int64_t own_tokens, int64_t their_tokens,
                                int64_t *out_elems)
{
    int64_t key_width;

    if (__builtin_add_overflow(widths->query, widths->value, &key_width) ||
        !elems_of(own_tokens, theirs->query_end - theirs->query_begin, widths->query,
                  theirs->key_end - theirs->key_begin, key_width, &out_elems[0]) ||
        !elems_of(their_tokens, own->query_end - own->query_begin, widths->query, own->key_end - own->key_begin,
                  key_width, &out_elems[1]) ||
        !elems_of(their_tokens, own->query_end - own->query_begin, widths->value, 0, 0, &out_elems[2]) ||
        !elems_of(own_tokens, theirs->query_end - theirs->query_begin, widths->value, 0, 0, &out_elems[3]))
        return dsc_fail(DSC_EOVERFLOW, "heads of %lld and %lld elements for %lld and %lld tokens do not fit int64_t",
                        (long long)widths->query, (long long)widths->value, (long long)own_tokens,
                        (long long)their_tokens);
    return DSC_OK;
}

dsc_status dsc_seq_exchange_of(int64_t n_heads, int64_t n_key_heads, const struct dsc_seq_widths *widths,
                               const int64_t *tokens, int32_t n_ranks, int32_t rank, int64_t *out_sent,
                               int64_t *out_received, int64_t *out_returned, int64_t *out_got)
{
    struct dsc_seq_heads own;

    if (widths == NULL || tokens == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", widths == NULL ? "widths" : "tokens");
    if (widths->query < 0 || widths->value < 0)
        return dsc_fail(DSC_EINVAL, "heads of %lld and %lld elements: neither must be negative",
                        (long long)widths->query, (long long)widths->value);
    DSC_TRY(dsc_seq_heads_of(n_heads, n_key_heads, n_ranks, rank, &own));
    for (int pass = 0; pass < 2; pass++)
        for (int32_t peer = 0; peer < n_ranks; peer++) {
            struct dsc_seq_heads theirs;
            int64_t elems[4] = {0};

            if (tokens[peer] < 0 || tokens[peer] > DSC_SEQ_MAX_TOKENS)
                return dsc_fail(DSC_EINVAL, "tokens[%d] is %lld, must be 0 to %lld", (int)peer, (long long)tokens[peer],
                                (long long)DSC_SEQ_MAX_TOKENS);
            DSC_TRY(dsc_seq_heads_of(n_heads, n_key_heads, n_ranks, peer, &theirs));
            DSC_TRY(exchange_with(&own, &theirs, widths, tokens[rank], tokens[peer], elems));
            if (pass == 0)
                continue;
            put(out_sent, peer, elems[0]);
            put(out_received, peer, elems[1]);
            put(out_returned, peer, elems[2]);
            put(out_got, peer, elems[3]);
        }
    return DSC_OK;
}
