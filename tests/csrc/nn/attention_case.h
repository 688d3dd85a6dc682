/*
 * One call of attention with its operands, and the formula in f64 over all pairs of tokens. The test and the fuzz
 * target share this.
 */
#ifndef DSC_TEST_ATTENTION_CASE_H
#define DSC_TEST_ATTENTION_CASE_H

#include "dsc/nn.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* Whether a query sees a key: an independent definition, pair by pair. */
static inline bool attention_sees(const struct dsc_nn_attention *call, int64_t batch, int64_t query, int64_t key)
{
    int64_t position = query + call->n_keys - call->n_queries;
    int64_t distance = position - key;

    if (call->is_causal && distance < 0)
        return false;
    if (call->window > 0 && (distance < 0 ? -distance : distance) >= call->window)
        return false;
    if (call->documents != NULL) {
        int32_t own = call->documents[batch * call->n_keys + position];

        return own >= 0 && own == call->documents[batch * call->n_keys + key];
    }
    return true;
}

/* The score of a query and a key, and its derivative with respect to the raw score. */
static inline double attention_score(const struct dsc_nn_attention *call, int64_t batch, int64_t head, int64_t query, int64_t key, double product,
                                     double *slope)
{
    double score = (double)call->scale * product;
    double distance = (double)(query + call->n_keys - call->n_queries - key);

    *slope = call->scale;
    if (call->soft_cap > 0) {
        double t = tanh(score / call->soft_cap);

        score = call->soft_cap * t;
        *slope *= 1 - t * t;
    }
    if (call->slopes != NULL)
        score -= (double)call->slopes[batch * call->slopes_stride + head] * fabs(distance);
    return score;
}

#endif
