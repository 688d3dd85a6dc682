/*
 * The choice of the next token of a sequence, from the logits of a language model.
 *
 * The rules change a row of logits x in this order, which is the order of transformers' logits processors:
 *   repetition_penalty  x / penalty where x >= 0, else x * penalty, for each word that the row already has, once
 *                       (arXiv 1909.05858). A result beyond f32 becomes the largest f32 of its sign
 *   temperature         x / temperature. 0: the first of the largest logits has probability 1
 *   top_k               keeps the k largest logits and all equals of the k-th. 0: all
 *   top_p               keeps the fewest words, from the largest on, whose probabilities add up to top_p or more
 *                       (arXiv 1904.09751). Of equal logits it keeps the first ones. 1: all
 *   min_p               keeps the words with at least min_p times the probability of the most probable word
 *                       (arXiv 2407.01082). 0: all
 * The softmax of the logits that are left is the row's distribution. -inf is a logit, of a word that is never chosen.
 *
 * A row's result depends on its own logits, rules, earlier words, seed and position alone: its bits are the same for
 * any other rows, any thread count and any instruction set.
 */
#ifndef DSC_SAMPLE_H
#define DSC_SAMPLE_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct dsc_sample_rules {
    double temperature;        /* finite, >= 0 */
    double top_p;              /* in (0, 1] */
    double min_p;              /* in [0, 1] */
    double repetition_penalty; /* finite, > 0 */
    int64_t top_k;             /* >= 0 */
};

/* Rules that change nothing. */
#define DSC_SAMPLE_RULES_INIT \
    {                         \
        1, 1, 0, 1, 0         \
    }

/* Positions are below this. */
#define DSC_SAMPLE_MAX_POSITION (INT64_C(1) << 62)

struct dsc_sample_rows {
    int64_t n_rows;
    int64_t n_words; /* 1 to INT32_MAX */
    dsc_dtype dtype;
    const void *logits;                   /* [n_rows, n_words] */
    const struct dsc_sample_rules *rules; /* [n_rows] */
    const int64_t *n_earlier;             /* [n_rows]; NULL: no row has earlier words */
    const int64_t *earlier;               /* the earlier words of row 0, then those of row 1, ... */
    void *scratch;                        /* dsc_sample_scratch_bytes() bytes, aligned to 8 */
};

/* 0 for negative sizes. */
DSC_API size_t dsc_sample_scratch_bytes(int64_t n_rows, int64_t n_words);

/*
 * Draws one word of each row: out_tokens and out_log_probs are [n_rows], and the latter is the logarithm of the word's
 * probability in the row's distribution. The random number of a row comes from counter positions[i] of the generator
 * with key seeds[i] (cpu/philox.h).
 *
 * DSC_EINVAL, and nothing is written, for a rule out of its range, an earlier word or a position that there is not, a
 * row with NaN or +inf, whose first place the sentence names, and a row of -inf alone.
 */
DSC_API dsc_status dsc_sample_tokens(const struct dsc_sample_rows *rows, const uint64_t *seeds,
                                     const int64_t *positions, int64_t *out_tokens, float *out_log_probs,
                                     const struct dsc_par *par);

/* Writes the distributions, [n_rows, n_words]. Fails as dsc_sample_tokens does. */
DSC_API dsc_status dsc_sample_probabilities(const struct dsc_sample_rows *rows, float *out, const struct dsc_par *par);

#ifdef __cplusplus
}
#endif
#endif
