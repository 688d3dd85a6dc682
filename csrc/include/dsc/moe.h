/*
 * Mixtures of experts: which experts a token goes to, its place within them, and its rows on the way there and back.
 *
 * A *slot* is one choice of one token: slot t * k + j is choice j of token t. Experts are int32_t numbers, and -1 marks
 * a slot without an expert. Rows lie dense, one after the other; sizes and places are int64_t. Nothing here allocates.
 * Results have the same bits for any number of threads and any instruction set. Any thread may call anything.
 */
#ifndef DSC_MOE_H
#define DSC_MOE_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum dsc_moe_score {
    DSC_MOE_SOFTMAX = 0,
    DSC_MOE_SIGMOID = 1,
};

/*
 * The choice of experts. Values are the logits themselves without a bias, since both scores grow with the logit, and
 * score + bias with one (DeepSeek-V3, arXiv 2412.19437). Equal values go to the lower expert.
 *
 * With n_limited_groups < n_groups, a token may only choose within its n_limited_groups best groups of n_experts /
 * n_groups neighbouring experts. A group is as good as the sum of its two largest score + bias, or its only one; of
 * equally good groups, the lower one is better.
 */
struct dsc_moe_route {
    int64_t n_tokens;
    int64_t n_experts;
    int64_t k;        /* 0 to the number of experts in n_limited_groups groups */
    int32_t score;    /* enum dsc_moe_score */
    int64_t n_groups; /* divides n_experts */
    int64_t n_limited_groups;
    const float *logits; /* [n_tokens, n_experts] */
    const float *bias;   /* [n_experts], or NULL; neither NaN nor +inf */
    float *scratch;      /* dsc_moe_route_scratch_elems() */
    int32_t *indices;    /* [n_tokens, k], best first */
};

/* Elements of the scratch of a call with these sizes. */
DSC_API int64_t dsc_moe_route_scratch_elems(int64_t n_tokens, int64_t n_experts);

/*
 * Sets *out_bad to -1, or to token * n_experts + expert of the first logit that is NaN or +inf and so has no score:
 * then the indices mean nothing. A logit of -inf has the score 0.
 */
DSC_API dsc_status dsc_moe_route(const struct dsc_moe_route *call, const struct dsc_par *par, int64_t *out_bad);

/* Fills out with n numbers in [0, 1), multiples of 2^-24, of Philox4x32-7: word offset + i of the seed, offset >= 0. */
DSC_API dsc_status dsc_moe_uniform(int64_t n, uint64_t seed, int64_t offset, const struct dsc_par *par, float *out);

/* Counts the slots of each expert. Fails for an index that is neither -1 nor an expert, before anything is written. */
DSC_API dsc_status dsc_moe_count(const int32_t *indices, int64_t n_tokens, int64_t k, int64_t n_experts,
                                 int64_t *out_counts);

enum dsc_moe_order {
    DSC_MOE_BY_CHOICE = 0,   /* all first choices before all second choices (GShard, arXiv 2006.16668) */
    DSC_MOE_BY_TOKEN = 1,    /* slot by slot */
    DSC_MOE_BY_PRIORITY = 2, /* an expert keeps its slots of the largest priority; equal ones: the earlier slot */
};

/* Places within experts. At most capacity slots of an expert are kept; their places count from 0. */
struct dsc_moe_place {
    int64_t n_tokens;
    int64_t k;
    int64_t n_experts;
    int64_t capacity;       /* -1: nothing is dropped */
    int32_t order;          /* enum dsc_moe_order; by priority, the kept slots are numbered slot by slot */
    const int32_t *indices; /* [n_tokens, k] */
    const float *priority;  /* [n_tokens, k], no NaN; NULL unless order is by priority */
    int64_t *scratch;       /* n_experts elements, and n_tokens * k more if order is by priority */
    int32_t *kept;          /* [n_tokens, k]: indices, -1 where the slot is dropped; not the array of indices */
    int32_t *locations;     /* [n_tokens, k]; 0 for a slot that is not kept */
    int64_t *counts;        /* [n_experts], before slots are dropped */
};

DSC_API dsc_status dsc_moe_place(const struct dsc_moe_place *call);

/*
 * A stable counting sort of the slots that have an expert. counts come from dsc_moe_count for the same indices, and
 * their sum is the length of out_order. scratch: n_experts elements. out_order[i] is a slot; out_inverse [n_tokens, k]
 * is the place of each slot in out_order, or -1.
 */
DSC_API dsc_status dsc_moe_sort(const int32_t *indices, int64_t n_tokens, int64_t k, int64_t n_experts,
                                const int64_t *counts, int64_t *scratch, int64_t *out_order, int64_t *out_inverse);

/* out_inverse[order[i]] = i. Fails, with out_inverse overwritten, unless order is a permutation of 0 .. n - 1. */
DSC_API dsc_status dsc_moe_invert(const int64_t *order, int64_t n, int64_t *out_inverse);
DSC_API dsc_status dsc_moe_invert_check(const int64_t *order, int64_t n, const int64_t *out_inverse);

/*
 * rows[i] = x[order[i] / k]. With k = 1 it permutes rows. The gradient of x is dsc_moe_combine without weights; the
 * gradient of a permutation is this call with the inverse.
 */
struct dsc_moe_gather {
    int64_t n_tokens;
    int64_t n_slots;
    int64_t k;      /* > 0 unless n_slots is 0 */
    int64_t n_cols; /* > 0 */
    dsc_dtype dtype;
    const void *x;          /* [n_tokens, n_cols] */
    const int64_t *order;   /* [n_slots], each in [0, n_tokens * k) */
    const int64_t *inverse; /* [n_tokens, k] to check order against, or NULL */
    void *rows;             /* [n_slots, n_cols] */
};

DSC_API dsc_status dsc_moe_gather(const struct dsc_moe_gather *call, const struct dsc_par *par);

/*
 * out[t] = sum over j of weights[t, j] * rows[inverse[t, j]], in f32 in the order of j, rounded once. A slot of place
 * -1 adds nothing.
 */
struct dsc_moe_combine {
    int64_t n_tokens;
    int64_t n_slots;
    int64_t k;
    int64_t n_cols; /* > 0 */
    dsc_dtype dtype;
    const void *rows;       /* [n_slots, n_cols] */
    const int64_t *inverse; /* [n_tokens, k], each in [-1, n_slots) */
    const float *weights;   /* [n_tokens, k]; NULL: all 1 */
    void *out;              /* [n_tokens, n_cols] */
};

DSC_API dsc_status dsc_moe_combine(const struct dsc_moe_combine *call, const struct dsc_par *par);

/*
 * The gradients: drows[inverse[t, j]] = weights[t, j] * dout[t], and dweights[t, j] = dout[t] . rows[inverse[t, j]],
 * summed in f64. A row without a slot has the gradient 0. Fails if two slots have the same row.
 */
struct dsc_moe_combine_grad {
    int64_t n_tokens;
    int64_t n_slots;
    int64_t k;
    int64_t n_cols; /* > 0 */
    dsc_dtype dtype;
    const void *dout;       /* [n_tokens, n_cols] */
    const void *rows;       /* [n_slots, n_cols] */
    const int64_t *inverse; /* [n_tokens, k] */
    const float *weights;   /* [n_tokens, k]; NULL: all 1 */
    int64_t *scratch;       /* [n_slots] */
    void *drows;            /* [n_slots, n_cols] */
    float *dweights;        /* [n_tokens, k]; NULL: not wanted */
};

DSC_API dsc_status dsc_moe_combine_grad(const struct dsc_moe_combine_grad *call, const struct dsc_par *par);

/*
 * The checks of the calls above that read no array: sizes, dtypes and missing pointers. They serve callers that run
 * the call on a device. The calls themselves check the contents of order and inverse too.
 */
#define DSC_MOE_CALL(name) DSC_API dsc_status dsc_moe_##name##_check(const struct dsc_moe_##name *call);
#include "dsc/moe_calls.inc"
#undef DSC_MOE_CALL

#ifdef __cplusplus
}
#endif
#endif
