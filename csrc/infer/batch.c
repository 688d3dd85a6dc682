/* New tokens of sequences of any lengths, behind one another: their places, and the blocks that they take. */
#include "dsc/infer.h"

#include "base/fail.h"

static int64_t blocks_of(int64_t n_tokens)
{
    return n_tokens / DSC_KV_TOKENS + (n_tokens % DSC_KV_TOKENS != 0);
}

dsc_status dsc_kv_batch_count(const struct dsc_kv_batch *batch, int64_t max_tokens, struct dsc_kv_batch_counts *out)
{
    struct dsc_kv_batch_counts counts = {.long_row = -1};

    if (batch->n_rows < 0)
        return dsc_fail(DSC_EINVAL, "n_rows is %d, must not be negative", (int)batch->n_rows);
    if (max_tokens < 0 || max_tokens > INT32_MAX)
        return dsc_fail(DSC_EINVAL, "max_tokens is %lld, must be 0 to %d", (long long)max_tokens, INT32_MAX);
    for (int32_t i = 0; i < batch->n_rows; i++)
        if (batch->n_seen[i] < 0 || batch->n_new[i] < 0)
            return dsc_fail(DSC_EINVAL, "row %d has %lld new tokens behind %lld, must not be negative", (int)i,
                            (long long)batch->n_new[i], (long long)batch->n_seen[i]);
    for (int32_t i = 0; i < batch->n_rows; i++) {
        int64_t n_seen = batch->n_seen[i];
        int64_t n_blocks;

        /* The difference cannot overflow, and no sum can after it. */
        if (batch->n_new[i] > max_tokens - n_seen) {
            counts.long_row = i;
            break;
        }
        n_blocks = blocks_of(n_seen + batch->n_new[i]);
        counts.n_tokens += batch->n_new[i];
        counts.n_blocks += n_blocks - blocks_of(n_seen);
        counts.n_columns = n_blocks > counts.n_columns ? n_blocks : counts.n_columns;
    }
    *out = counts;
    return DSC_OK;
}

void dsc_kv_batch_place(const struct dsc_kv_batch *batch, const int64_t *tokens, int64_t n_words,
                        const struct dsc_kv_batch_places *out, struct dsc_kv_wrong_token *out_wrong)
{
    struct dsc_kv_wrong_token wrong = {-1, -1};
    int64_t at = 0;

    for (int32_t i = 0; i < batch->n_rows; i++) {
        int64_t end = at + batch->n_new[i];

        for (int64_t position = batch->n_seen[i]; at < end; at++, position++) {
            out->positions[at] = position;
            if (wrong.index < 0 && (tokens[at] < 0 || tokens[at] >= n_words))
                wrong = (struct dsc_kv_wrong_token){at, i};
        }
        out->last[i] = end - 1;
        out->n_keys[i] = batch->n_seen[i] + batch->n_new[i];
    }
    *out_wrong = wrong;
}
