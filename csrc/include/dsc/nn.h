/*
 * Operators of neural networks on rows of elements, forward and backward: norms with residual, activations with bias,
 * gated activations, dropout with bias and residual, rotary positions, softmax with a mask, attention, products with a
 * weight.
 *
 * Elements are f32, bf16 or f16; each is computed in f32 and rounded once. Sums over a row are held in f64; softmax and
 * the gradients of norms first sum groups of four elements in f32. Sums over rows (gradients of weights) are held in
 * f32 within a chunk of rows and in f64 over chunks. Results have the same bits for any thread count and any
 * instruction set. Inputs and outputs of a call must not overlap unless the call allows it. Rows are dense: row i
 * begins at element i * n_cols.
 */
#ifndef DSC_NN_H
#define DSC_NN_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows of a call are summed in at most this many chunks. */
#define DSC_NN_MAX_PARTIALS 64

/*
 * Number of f32 elements of scratch for a backward with sums over rows: one partial sum for each chunk, for each of
 * n_sums results of n_cols elements. 0 for negative sizes. Overflow is not checked: sizes that fit memory do not
 * overflow.
 */
DSC_API int64_t dsc_nn_scratch_elems(int64_t n_rows, int64_t n_cols, int64_t n_sums);

/*
 * Layer norm (arXiv 1607.06450) and RMS norm (arXiv 1910.07467), with the residual connection before them:
 *   sum = x + residual            (rounded to dtype; x where there is no residual)
 *   y = (sum - mean) * rstd * weight + bias,   rstd = 1 / sqrt(var + eps)          is_rms: mean = 0, var = mean(sum^2)
 */
struct dsc_nn_norm {
    int64_t n_rows;
    int64_t n_cols;         /* > 0 */
    dsc_dtype dtype;        /* of x, residual, sum, y */
    dsc_dtype weight_dtype; /* of weight and bias */
    bool is_rms;
    float eps; /* >= 0 */
    const void *x;
    const void *residual; /* may be NULL */
    const void *weight;   /* [n_cols]; may be NULL: 1 */
    const void *bias;     /* [n_cols]; may be NULL: 0 */
    void *sum;            /* [n_rows, n_cols]; NULL only without residual; may be x or residual */
    void *y;
    float *mean; /* [n_rows]; NULL with is_rms */
    float *rstd; /* [n_rows] */
};

DSC_API dsc_status dsc_nn_norm(const struct dsc_nn_norm *norm, const struct dsc_par *par);

/*
 * The gradients of dsc_nn_norm. dx is the gradient of sum, and so of both x and the residual. dsum (may be NULL) is the
 * gradient that `sum` itself received; it is added to dx.
 */
struct dsc_nn_norm_grad {
    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype;
    dsc_dtype weight_dtype;
    bool is_rms;
    const void *sum;
    const void *weight; /* may be NULL */
    const void *dy;
    const void *dsum; /* may be NULL */
    const float *mean;
    const float *rstd;
    void *dx;       /* may be dy or dsum */
    void *dweight;  /* may be NULL */
    void *dbias;    /* may be NULL */
    float *scratch; /* dsc_nn_scratch_elems(n_rows, n_cols, number of non-NULL results among dweight and dbias) */
};

DSC_API dsc_status dsc_nn_norm_grad(const struct dsc_nn_norm_grad *grad, const struct dsc_par *par);

typedef enum dsc_nn_act {
#define DSC_NN_ACT(name) DSC_NN_ACT_##name,
#include "dsc/activations.inc"
#undef DSC_NN_ACT
    DSC_NN_ACT_COUNT
} dsc_nn_act;

/* Finds an activation by its name. DSC_EINVAL lists the known names. */
DSC_API dsc_status dsc_nn_act_find(const char *name, dsc_nn_act *out_act);

/* y = act(x + bias). */
struct dsc_nn_bias_act {
    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype; /* of everything */
    dsc_nn_act act;
    const void *x;
    const void *bias; /* [n_cols]; may be NULL */
    void *y;          /* may be x */
};

DSC_API dsc_status dsc_nn_bias_act(const struct dsc_nn_bias_act *call, const struct dsc_par *par);

/* dx = dy * act'(x + bias), dbias = the sum of dx over rows. */
struct dsc_nn_bias_act_grad {
    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype;
    dsc_nn_act act;
    const void *x;
    const void *bias; /* may be NULL */
    const void *dy;
    void *dx;       /* may be dy */
    void *dbias;    /* may be NULL */
    float *scratch; /* dsc_nn_scratch_elems(n_rows, n_cols, 1) with dbias */
};

DSC_API dsc_status dsc_nn_bias_act_grad(const struct dsc_nn_bias_act_grad *call, const struct dsc_par *par);

/*
 * Gated linear units (arXiv 2002.05202): y = act(gate) * up. Rows of gate and up begin in_stride elements apart
 * (>= n_cols), so that both may lie in one tensor [n_rows, 2 * n_cols].
 */
struct dsc_nn_gated {
    int64_t n_rows;
    int64_t n_cols;
    int64_t in_stride;
    dsc_dtype dtype;
    dsc_nn_act act;
    const void *gate;
    const void *up;
    void *y; /* [n_rows, n_cols] */
};

DSC_API dsc_status dsc_nn_gated(const struct dsc_nn_gated *call, const struct dsc_par *par);

/* dgate = dy * up * act'(gate), dup = dy * act(gate). Both have the strides of gate and up, and may be gate and up. */
struct dsc_nn_gated_grad {
    int64_t n_rows;
    int64_t n_cols;
    int64_t in_stride;
    dsc_dtype dtype;
    dsc_nn_act act;
    const void *gate;
    const void *up;
    const void *dy;
    void *dgate;
    void *dup;
};

DSC_API dsc_status dsc_nn_gated_grad(const struct dsc_nn_gated_grad *call, const struct dsc_par *par);

/*
 * y = residual + keep * (x + bias) / (1 - p). Each element is kept with probability 1 - p; p is rounded to a multiple
 * of 2^-16. Philox4x32-7 (Salmon et al., SC 2011) with seed generates a sequence of 16-bit halves, the low half of each
 * word first, and the half at index i decides whether element i is kept. The backward generates the sequence again, so
 * no mask is stored.
 */
struct dsc_nn_dropout {
    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype;
    float p; /* [0, 1]; 0 keeps all elements, 1 keeps none */
    uint64_t seed;
    const void *x;
    const void *bias;     /* [n_cols]; may be NULL */
    const void *residual; /* may be NULL */
    void *y;              /* may be x or residual */
};

DSC_API dsc_status dsc_nn_dropout(const struct dsc_nn_dropout *call, const struct dsc_par *par);

/* dx = keep * dy / (1 - p), dbias = the sum of dx over rows. The gradient of the residual is dy. */
struct dsc_nn_dropout_grad {
    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype;
    float p;
    uint64_t seed;
    const void *dy;
    void *dx;       /* may be dy */
    void *dbias;    /* may be NULL */
    float *scratch; /* dsc_nn_scratch_elems(n_rows, n_cols, 1) with dbias */
};

DSC_API dsc_status dsc_nn_dropout_grad(const struct dsc_nn_dropout_grad *call, const struct dsc_par *par);

/*
 * Rotary positions (arXiv 2104.09864) on [n_batch, n_tokens, n_heads, head_dim], whose first three dimensions have any
 * strides. The first rotary_dim elements of each head are rotated in pairs: (i, i + rotary_dim / 2), or (2 i, 2 i + 1)
 * with is_interleaved. The tables have the cosine and sine of each angle. The other elements are copied. is_inverse
 * rotates back, which is the gradient.
 */
struct dsc_nn_rotary {
    int64_t n_batch;
    int64_t n_tokens;
    int64_t n_heads;
    int64_t head_dim;
    int64_t rotary_dim; /* even, <= head_dim */
    dsc_dtype dtype;
    bool is_interleaved;
    bool is_inverse;
    const void *x;
    int64_t x_strides[3]; /* of batch, token, head, in elements */
    const float *cos;     /* [rotary_dim / 2] a token */
    const float *sin;
    int64_t table_strides[2]; /* of batch, token, in elements; 0: the same for all */
    void *y;                  /* may be x, with the same strides */
    int64_t y_strides[3];
};

DSC_API dsc_status dsc_nn_rotary(const struct dsc_nn_rotary *call, const struct dsc_par *par);

typedef enum dsc_nn_mask {
    DSC_NN_MASK_NONE = 0,
    DSC_NN_MASK_ADD = 1, /* elements of the scores' dtype, added to the scores */
    DSC_NN_MASK_KEEP = 2 /* bytes: 0 leaves the element out */
} dsc_nn_mask;

/*
 * y = softmax(scale * x + mask) over the last dimension of [n_batch, n_heads, n_queries, n_keys]; x and y are dense.
 * With is_causal query i sees the keys up to i + n_keys - n_queries. A row that sees no key is 0, not NaN.
 */
struct dsc_nn_softmax {
    int64_t n_batch;
    int64_t n_heads;
    int64_t n_queries;
    int64_t n_keys;
    dsc_dtype dtype;
    float scale;
    bool is_causal;
    dsc_nn_mask mask_kind;
    const void *mask;
    int64_t mask_strides[3]; /* of batch, head, query, in elements; 0: the same for all. Keys are dense. */
    const void *x;
    void *y; /* may be x */
};

DSC_API dsc_status dsc_nn_softmax(const struct dsc_nn_softmax *call, const struct dsc_par *par);

/* dx = scale * y * (dy - sum(y * dy)). */
struct dsc_nn_softmax_grad {
    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype;
    float scale;
    const void *y;
    const void *dy;
    void *dx; /* may be dy */
};

DSC_API dsc_status dsc_nn_softmax_grad(const struct dsc_nn_softmax_grad *call, const struct dsc_par *par);

/* What the backward of a row needs to know of the forward: maxima and logarithms of sums, of the scaled scores. */
struct dsc_nn_divergence_row {
    float student_max;
    float student_log_sum; /* of the sum of e^(score - max); -inf if all scores are -inf */
    float teacher_max;
    float teacher_log_sum;
    float of_student; /* the sum of q log(q / m) */
};

/*
 * Generalized Jensen-Shannon divergence of two distributions (arXiv 2306.13649, equation 1), for each row:
 *   p = softmax(scale * teacher),  q = softmax(scale * student),  m = beta p + (1 - beta) q
 *   loss = beta KL(p || m) + (1 - beta) KL(q || m);   beta 0: KL(p || q), beta 1: KL(q || p)
 * A term whose p (or q) is 0 is 0. The loss of a row that is not counted is 0, and the row is not read. Everything is
 * computed in f32 and summed in f64, block by block: no array of n_cols elements is made.
 */
struct dsc_nn_divergence {
    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype; /* of student */
    dsc_dtype teacher_dtype;
    float beta;  /* [0, 1] */
    float scale; /* > 0 */
    const void *student;
    const void *teacher;
    const uint8_t *is_counted; /* [n_rows]; may be NULL: all are */
    float *losses;             /* [n_rows] */
    struct dsc_nn_divergence_row *rows;
};

DSC_API dsc_status dsc_nn_divergence(const struct dsc_nn_divergence *call, const struct dsc_par *par);

/* dstudent = dlosses * the derivative of the row's loss; 0 in rows that are not counted. */
struct dsc_nn_divergence_grad {
    int64_t n_rows;
    int64_t n_cols;
    dsc_dtype dtype; /* of student and dstudent */
    dsc_dtype teacher_dtype;
    float beta;
    float scale;
    const void *student;
    const void *teacher;
    const uint8_t *is_counted;
    const struct dsc_nn_divergence_row *rows;
    const float *dlosses; /* [n_rows] */
    void *dstudent;       /* may be student */
};

DSC_API dsc_status dsc_nn_divergence_grad(const struct dsc_nn_divergence_grad *call, const struct dsc_par *par);

/*
 * The argument checks of the calls in dsc/nn_calls.inc as functions: dsc_nn_norm_check and so on. They serve callers
 * that run the call itself elsewhere (dsc/accel.h).
 */
#define DSC_NN_CALL(name) DSC_API dsc_status dsc_nn_##name##_check(const struct dsc_nn_##name *call);
#include "dsc/nn_calls.inc"
#undef DSC_NN_CALL

/* [batch, heads, tokens, dim] of a call's dtype; dim is dense. */
struct dsc_nn_heads {
    void *data;         /* only read where an operand is an input */
    int64_t strides[3]; /* of batch, head, token, in elements; 0: the same for all */
};

#define DSC_NN_MAX_HEAD_DIM 256

/*
 * Attention whose mask is a rule, in memory that grows with the number of tokens and not with its square (blocks and an
 * online softmax: arXiv 1805.02867, 2205.14135):
 *   s[i, j] = bend(scale * q[i] k[j]) - slope * |p(i) - j|,   p(i) = i + n_keys - n_queries
 *   bend(x) = soft_cap * tanh(x / soft_cap); x itself where soft_cap is 0
 *   out[i]  = sum_j exp(s[i, j] - lse[i]) v[j],   lse[i] = log(sum_j exp(s[i, j]) + exp(sink))
 * over the keys j that query i sees:
 *   is_causal: j <= p(i);  window > 0: |p(i) - j| < window;  documents: p(i)'s and j's are the same and >= 0.
 * Blocks that no query sees are not computed. Each head of k and v serves n_heads / n_kv_heads heads of q, in order.
 * For a query that sees no key, out is 0 and, without a sink, lse is -inf. Products are summed in f32 with fused
 * operations, in the order of the elements; distances are exact up to 2^24 tokens.
 */
struct dsc_nn_attention {
    int64_t n_batch;
    int64_t n_heads;
    int64_t n_kv_heads; /* divides n_heads */
    int64_t n_queries;
    int64_t n_keys;
    int64_t head_dim;  /* of q and k, 1 to DSC_NN_MAX_HEAD_DIM */
    int64_t value_dim; /* of v and out, likewise */
    dsc_dtype dtype;
    bool is_causal;
    int64_t window; /* 0: none */
    float scale;
    float soft_cap; /* 0: none */
    struct dsc_nn_heads q;
    struct dsc_nn_heads k;
    struct dsc_nn_heads v;
    const float *slopes;      /* [n_batch, n_heads]; may be NULL (ALiBi, arXiv 2108.12409) */
    int64_t slopes_stride;    /* of batch; 0: the same for all */
    const float *sinks;       /* [n_heads]; may be NULL */
    const int32_t *documents; /* [n_batch, n_keys], dense; may be NULL. n_queries <= n_keys then */
    struct dsc_nn_heads out;
    float *lse; /* [n_batch, n_heads, n_queries] */
};

DSC_API dsc_status dsc_nn_attention(const struct dsc_nn_attention *call, const struct dsc_par *par);

/* The gradients of attention. Operands and results (out, lse) of the forward are read again. */
struct dsc_nn_attention_grad {
    struct dsc_nn_attention forward;
    struct dsc_nn_heads dout;
    const float *dlse; /* [n_batch, n_heads, n_queries]; may be NULL */
    struct dsc_nn_heads dq;
    struct dsc_nn_heads dk;
    struct dsc_nn_heads dv;
    float *dsinks;  /* [n_heads]; may be NULL */
    float *scratch; /* dsc_nn_attention_scratch_elems(&forward) */
};

/* Number of f32 elements of scratch for the gradients: a few times the elements of q. 0 for invalid sizes. */
DSC_API int64_t dsc_nn_attention_scratch_elems(const struct dsc_nn_attention *forward);

DSC_API dsc_status dsc_nn_attention_grad(const struct dsc_nn_attention_grad *call, const struct dsc_par *par);

/*
 * Products of matrices:   y = a b + bias,   one for each of n_batches
 *
 * For processors whose own products of 16-bit elements are slow. Operands are widened to f32 tile by tile, into buffers
 * that stay in the second-level cache, so that memory delivers 16 bits for an element; no whole f32 copy is made.
 *
 * Operands have strides, in elements. Either the terms of a sum lie one behind the other in both operands (a_term and
 * b_term are 1: a layer with its weight [n_cols, n_terms]), or the columns of b do (b_col is 1), and then the terms or
 * the rows of a (a_term or a_row is 1: the gradients of such a layer). The stride of a dimension with at most one
 * element may be anything.
 *
 * Everything is computed in f32, in one order. Where terms lie one behind the other: within a block of DSC_NN_DOT_TERMS
 * terms, term i adds to sum i % 8 of 8 (one rounding for product and sum), and the sums are folded in halves.
 * Otherwise: within a block of DSC_NN_OUTER_TERMS terms, the products add up in order. The blocks add up in order; then
 * bias. So an element has the same bits for any n_rows, any n_batches, any thread count and any instruction set.
 */
#define DSC_NN_DOT_TERMS 1024
#define DSC_NN_OUTER_TERMS 128

struct dsc_nn_product {
    int64_t n_batches;
    int64_t n_rows;  /* of a and y */
    int64_t n_terms; /* columns of a, rows of b */
    int64_t n_cols;  /* of b and y */
    dsc_dtype dtype; /* the dtype of operands and results */
    const void *a;
    int64_t a_batch;
    int64_t a_row;
    int64_t a_term;
    const void *b;
    int64_t b_batch;
    int64_t b_term;
    int64_t b_col;
    const void *bias; /* [n_cols]; may be NULL */
    void *y;          /* [n_batches, n_rows, n_cols]; overlaps no operand */
};

/* DSC_EINVAL for strides that are neither. */
DSC_API dsc_status dsc_nn_product(const struct dsc_nn_product *call, const struct dsc_par *par);

/*
 * n products at once, of at most DSC_NN_MAX_PRODUCTS: layers with one input, say. Threads are woken once for all. No
 * result is an operand of another product. A bad product among them fails the call before anything is written.
 */
#define DSC_NN_MAX_PRODUCTS 8

DSC_API dsc_status dsc_nn_products(int32_t n, const struct dsc_nn_product *calls, const struct dsc_par *par);

#ifdef __cplusplus
}
#endif
#endif
