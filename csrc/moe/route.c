/* The choice of experts: the k best values of each token, within its best groups if groups are limited. */
#include "dsc/moe.h"

#include "base/fail.h"
#include "base/par.h"
#include "nn/table.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* Each chunk of tokens has its own scratch, so there are few. */
#define MAX_CHUNKS 64
#define LANES 16

struct job {
    const struct dsc_moe_route *call;
    const struct dsc_kernels *kernels;
    int64_t tokens_per_chunk;
    int64_t first_bad; /* written by atomics */
};

static int64_t tokens_of_chunk(int64_t n_tokens, int64_t n_experts)
{
    int64_t most = n_tokens / MAX_CHUNKS + (n_tokens % MAX_CHUNKS != 0);
    int64_t least = n_experts > 0 ? DSC_MIN_CHUNK_ELEMS / 4 / n_experts : n_tokens;

    if (least < 1)
        least = 1;
    return most > least ? most : least;
}

/* Scores, goodness of groups, and values that are not chosen yet. */
int64_t dsc_moe_route_scratch_elems(int64_t n_tokens, int64_t n_experts)
{
    return n_tokens > 0 ? 3 * MAX_CHUNKS * n_experts : 0;
}

static bool is_limited(const struct dsc_moe_route *call)
{
    return call->n_limited_groups < call->n_groups;
}

/* The first logit that is NaN or +inf; -1 if there is none. */
static int64_t find_bad(const float *row, int64_t n)
{
    int32_t n_bad = 0;

    for (int64_t e = 0; e < n; e++)
        n_bad |= !(row[e] <= FLT_MAX);
    if (n_bad == 0)
        return -1;
    for (int64_t e = 0;; e++)
        if (!(row[e] <= FLT_MAX))
            return e;
}

static void report_bad(struct job *job, int64_t at)
{
    int64_t seen = __atomic_load_n(&job->first_bad, __ATOMIC_RELAXED);

    while ((seen < 0 || at < seen) &&
           !__atomic_compare_exchange_n(&job->first_bad, &seen, at, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

/* scores = score(row) + bias. */
static void score_row(const struct job *job, const float *row, float *scores)
{
    const struct dsc_moe_route *call = job->call;
    const struct dsc_kernels *kernels = job->kernels;
    int64_t n = call->n_experts;

    if (call->score == DSC_MOE_SIGMOID) {
        for (int64_t e = 0; e < n; e++)
            scores[e] = -fabsf(row[e]);
        kernels->exp_f32(n, (const dsc_f32 *)scores, 0.0f, (dsc_f32 *)scores);
        for (int64_t e = 0; e < n; e++)
            scores[e] = (row[e] >= 0.0f ? 1.0f : scores[e]) / (1.0f + scores[e]);
    } else {
        float largest = -INFINITY;
        double sum = 0.0;

        kernels->max_f32(n, (const dsc_f32 *)row, &largest);
        kernels->exp_f32(n, (const dsc_f32 *)row, largest == -INFINITY ? 0.0f : largest, (dsc_f32 *)scores);
        kernels->sum_f32(n, (const dsc_f32 *)scores, &sum);
        /* A token whose logits are all -inf has scores of 0. */
        for (int64_t e = 0; e < n; e++)
            scores[e] = sum > 0.0 ? scores[e] / (float)sum : 0.0f;
    }
    if (call->bias != NULL)
        for (int64_t e = 0; e < n; e++)
            scores[e] += call->bias[e];
}

/* Of two numbers, the second may be NaN. */
static inline float larger(float a, float b)
{
    return b > a ? b : a;
}

/* The largest of the numbers left, [lane], [lane + LANES], ...; two at a time, because each waits for the last. */
static float largest_of_lane(const float *left, int64_t n, int64_t lane)
{
    float even = -INFINITY;
    float odd = -INFINITY;
    int64_t e = lane;

    for (; e + LANES < n; e += 2 * LANES) {
        even = larger(even, left[e]);
        odd = larger(odd, left[e + LANES]);
    }
    return larger(larger(even, odd), e < n ? left[e] : -INFINITY);
}

static float largest_of_lanes(const float most[LANES])
{
    float of_four[4];

    for (int i = 0; i < 4; i++)
        of_four[i] = larger(larger(most[i], most[4 + i]), larger(most[8 + i], most[12 + i]));
    return larger(larger(of_four[0], of_four[1]), larger(of_four[2], of_four[3]));
}

/*
 * Chooses the k largest numbers, equal ones in order, and replaces them by NaN, which no comparison chooses. Expert e
 * belongs to lane e % LANES: after each choice only its lane is searched again.
 */
static void choose(float *left, int64_t n, int64_t k, int32_t *chosen)
{
    float most[LANES];
    int64_t e = 0;

    for (int64_t lane = 0; lane < LANES; lane++)
        most[lane] = -INFINITY;
    for (; e + LANES <= n; e += LANES)
        for (int64_t lane = 0; lane < LANES; lane++)
            most[lane] = larger(most[lane], left[e + lane]);
    for (; e < n; e++)
        most[e % LANES] = larger(most[e % LANES], left[e]);
    for (int64_t j = 0; j < k; j++) {
        float best = largest_of_lanes(most);
        int64_t at = n;

        /* The lowest expert with this number may be in any lane; a lane of -inf may have none left. */
        for (int64_t lane = 0; lane < LANES; lane++)
            for (e = lane; most[lane] == best && e < at; e += LANES)
                if (left[e] == best)
                    at = e;
        chosen[j] = (int32_t)at;
        left[at] = NAN;
        most[at % LANES] = largest_of_lane(left, n, at % LANES);
    }
}

static float two_best(const float *values, int64_t n)
{
    float best = -INFINITY;
    float second = -INFINITY;

    for (int64_t i = 0; i < n; i++) {
        if (values[i] > best) {
            second = best;
            best = values[i];
        } else if (values[i] > second) {
            second = values[i];
        }
    }
    return n > 1 ? best + second : best;
}

/* Replaces the values of closed groups by NaN. The goodness of an open group becomes NaN, which is its mark. */
static void close_groups(const struct dsc_moe_route *call, const float *scores, float *goodness, float *values)
{
    int64_t n_each = call->n_experts / call->n_groups;

    for (int64_t g = 0; g < call->n_groups; g++)
        goodness[g] = two_best(scores + g * n_each, n_each);
    for (int64_t i = 0; i < call->n_limited_groups; i++) {
        int64_t best = -1;

        for (int64_t g = 0; g < call->n_groups; g++)
            if (!isnan(goodness[g]) && (best < 0 || goodness[g] > goodness[best]))
                best = g;
        goodness[best] = NAN;
    }
    for (int64_t g = 0; g < call->n_groups; g++)
        for (int64_t e = g * n_each; !isnan(goodness[g]) && e < (g + 1) * n_each; e++)
            values[e] = NAN;
}

static void route_chunks(void *arg, int64_t first, int64_t last)
{
    struct job *job = arg;
    const struct dsc_moe_route *call = job->call;

    for (int64_t chunk = first; chunk < last; chunk++) {
        float *scores = call->scratch + 3 * chunk * call->n_experts;
        int64_t begin = chunk * job->tokens_per_chunk;
        int64_t end = begin + job->tokens_per_chunk < call->n_tokens ? begin + job->tokens_per_chunk : call->n_tokens;

        for (int64_t token = begin; token < end; token++) {
            const float *row = call->logits + token * call->n_experts;
            float *left = scores + 2 * call->n_experts;
            int32_t *chosen = call->indices + token * call->k;
            int64_t bad = find_bad(row, call->n_experts);

            if (bad >= 0) {
                report_bad(job, token * call->n_experts + bad);
                break;
            }
            if (call->k == 0)
                continue;
            if (call->bias != NULL || is_limited(call))
                score_row(job, row, scores);
            memcpy(left, call->bias != NULL ? scores : row, (size_t)call->n_experts * sizeof *left);
            if (is_limited(call))
                close_groups(call, scores, scores + call->n_experts, left);
            choose(left, call->n_experts, call->k, chosen);
        }
    }
}

static dsc_status check(const struct dsc_moe_route *call)
{
    int64_t n_logits;

    if (call->n_tokens < 0 || call->n_experts < 0 || call->n_experts > INT32_MAX)
        return dsc_fail(DSC_EINVAL, "%lld tokens and %lld experts: neither may be negative, and experts are int32",
                        (long long)call->n_tokens, (long long)call->n_experts);
    if (__builtin_mul_overflow(call->n_tokens, call->n_experts, &n_logits) || n_logits > INT64_MAX / 4)
        return dsc_fail(DSC_EOVERFLOW, "the logits of %lld tokens for %lld experts do not fit int64_t",
                        (long long)call->n_tokens, (long long)call->n_experts);
    if (call->score != DSC_MOE_SOFTMAX && call->score != DSC_MOE_SIGMOID)
        return dsc_fail(DSC_EINVAL, "score is %d, which is no dsc_moe_score", (int)call->score);
    if (call->n_groups < 1 || call->n_experts % call->n_groups != 0)
        return dsc_fail(DSC_EINVAL, "n_groups is %lld, must divide %lld experts", (long long)call->n_groups,
                        (long long)call->n_experts);
    if (call->n_limited_groups < 1 || call->n_limited_groups > call->n_groups)
        return dsc_fail(DSC_EINVAL, "n_limited_groups is %lld, must be 1 to %lld", (long long)call->n_limited_groups,
                        (long long)call->n_groups);
    if (call->k < 0 || call->k > call->n_experts / call->n_groups * call->n_limited_groups)
        return dsc_fail(DSC_EINVAL, "k is %lld, must be 0 to %lld, the experts that a token may choose",
                        (long long)call->k, (long long)(call->n_experts / call->n_groups * call->n_limited_groups));
    if (n_logits > 0 && (call->logits == NULL || call->scratch == NULL || (call->indices == NULL && call->k > 0)))
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld tokens",
                        call->logits == NULL    ? "logits"
                        : call->scratch == NULL ? "scratch"
                                                : "indices",
                        (long long)call->n_tokens);
    for (int64_t e = 0; call->bias != NULL && e < call->n_experts; e++)
        if (!(call->bias[e] <= FLT_MAX))
            return dsc_fail(DSC_EINVAL, "bias[%lld] is %g, must be a number below infinity", (long long)e,
                            (double)call->bias[e]);
    return DSC_OK;
}

dsc_status dsc_moe_route(const struct dsc_moe_route *call, const struct dsc_par *par, int64_t *out_bad)
{
    DSC_TRY(check(call));

    struct job job = {
        .call = call,
        .kernels = dsc_kernels_get(),
        .tokens_per_chunk = tokens_of_chunk(call->n_tokens, call->n_experts),
        .first_bad = -1,
    };

    if (call->n_tokens > 0 && call->n_experts > 0)
        dsc_par_run(par, (call->n_tokens - 1) / job.tokens_per_chunk + 1, route_chunks, &job);
    *out_bad = job.first_bad;
    return DSC_OK;
}

#define UNIFORM_CHUNK (8 * DSC_BLOCK_ELEMS)

struct uniform_job {
    const struct dsc_kernels *kernels;
    int64_t n;
    uint64_t seed;
    uint64_t offset;
    float *out;
};

static void uniform_chunks(void *arg, int64_t first, int64_t last)
{
    const struct uniform_job *job = arg;

    for (int64_t at = first * UNIFORM_CHUNK; at < job->n && at < last * UNIFORM_CHUNK; at += UNIFORM_CHUNK) {
        int64_t n = job->n - at < UNIFORM_CHUNK ? job->n - at : UNIFORM_CHUNK;

        job->kernels->uniform_f32(n, job->seed, job->offset + (uint64_t)at, (dsc_f32 *)(job->out + at));
    }
}

dsc_status dsc_moe_uniform(int64_t n, uint64_t seed, int64_t offset, const struct dsc_par *par, float *out)
{
    int64_t end;

    if (n < 0 || offset < 0 || __builtin_add_overflow(n, offset, &end))
        return dsc_fail(DSC_EINVAL, "%lld numbers from %lld on: neither may be negative, and the last must fit int64_t",
                        (long long)n, (long long)offset);
    if (n > 0 && out == NULL)
        return dsc_fail(DSC_EINVAL, "out is NULL for %lld numbers", (long long)n);

    struct uniform_job job = {dsc_kernels_get(), n, seed, (uint64_t)offset, out};

    if (n > 0)
        dsc_par_run(par, (n - 1) / UNIFORM_CHUNK + 1, uniform_chunks, &job);
    return DSC_OK;
}
