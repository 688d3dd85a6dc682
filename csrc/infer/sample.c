/*
 * The choice of a token without a sort of the vocabulary. The largest logit of each group of words comes from the one
 * read of the row. The k-th largest of these maxima is a bound: top_k looks only into groups that reach it. The
 * thresholds themselves come from histograms of the logits' bits, of counts for top_k and of probabilities for top_p.
 */
#include "dsc/sample.h"

#include "base/fail.h"
#include "base/par.h"
#include "cpu/table.h"

#include <float.h>
#include <math.h>
#include <string.h>

#define GROUP 256    /* words of one maximum; divides DSC_BLOCK_ELEMS */
#define MAX_SLOTS 16 /* rows in work at a time, since each needs scratch */
#define MAX_BITS 11  /* bits that index a histogram */
#define UNIFORM_STEP 0x1p-24

/* Scratch of one row in work. */
struct slot {
    float *logits; /* a copy as f32, where the row is of another dtype or has a penalty */
    float *weights;
    float *picked; /* logits that top_k keeps */
    int32_t *words;
    float *maxima; /* of each group */
};

enum fault { NO_FAULT, HAS_NAN, HAS_INF, ALL_EXCLUDED };

/* Results stay here until all rows are known to be good. */
struct row_state {
    int64_t first_earlier;
    int64_t place; /* the token, or the place of the fault */
    float log_prob;
    int32_t fault;
};

struct job {
    const struct dsc_sample_rows *rows;
    const struct dsc_kernels *kernels;
    struct row_state *states;
    char *slots;
    int64_t n_slots;
    const uint64_t *seeds; /* NULL: no token is drawn */
    const int64_t *positions;
    float *probabilities; /* NULL: not wanted */
};

/* The words that are left, in the order of the vocabulary. */
struct kept {
    int64_t n;
    const dsc_f32 *logits;
    const int32_t *words; /* NULL: all words */
    float *weights;       /* each probability over the largest one */
    double sum;           /* of the weights */
};

static int64_t block_of(int64_t n_left)
{
    return n_left < DSC_BLOCK_ELEMS ? n_left : DSC_BLOCK_ELEMS;
}

static int64_t groups_of(int64_t n_words)
{
    return n_words / GROUP + (n_words % GROUP != 0);
}

static size_t slot_bytes(int64_t n_words)
{
    size_t n_elems = 4 * (size_t)n_words + (size_t)groups_of(n_words);

    return (n_elems + n_elems % 2) * sizeof(float);
}

static int64_t slots_of(int64_t n_rows)
{
    return n_rows < MAX_SLOTS ? n_rows : MAX_SLOTS;
}

size_t dsc_sample_scratch_bytes(int64_t n_rows, int64_t n_words)
{
    if (n_rows < 0 || n_words < 0)
        return 0;
    return (size_t)n_rows * sizeof(struct row_state) + (size_t)slots_of(n_rows) * slot_bytes(n_words);
}

static struct slot slot_at(const struct job *job, int64_t i)
{
    size_t n_words = (size_t)job->rows->n_words;
    char *memory = job->slots + (size_t)i * slot_bytes(job->rows->n_words);
    float *floats = (float *)(void *)memory;

    return (struct slot){floats, floats + n_words, floats + 2 * n_words, (int32_t *)(void *)(floats + 3 * n_words),
                         floats + 4 * n_words};
}

/* A number in the order of the logits. Both zeros have the same one. */
static uint32_t key_of(float logit)
{
    float unsigned_zero = logit + 0.0f;
    uint32_t bits;

    memcpy(&bits, &unsigned_zero, sizeof bits);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

struct threshold {
    uint32_t key;
    double above; /* sum of the weights above the key */
};

/*
 * Finds the largest key such that the weights at this key and above add up to `wanted`, and key 0, below all logits,
 * if all weights are less. Without weights each logit counts 1.
 */
static struct threshold find_threshold(int64_t n, const dsc_f32 *logits, const float *weights, double wanted)
{
    static const int widths[] = {MAX_BITS, MAX_BITS, 32 - 2 * MAX_BITS};
    struct threshold found = {0, 0};
    int shift = 32;

    for (int level = 0; level < 3; level++) {
        double sums[1 << MAX_BITS] = {0};
        uint32_t mask = (1u << widths[level]) - 1;
        uint32_t bin = mask;

        shift -= widths[level];
        for (int64_t i = 0; i < n; i++) {
            uint32_t key = key_of(logits[i]) >> shift;

            if (level == 0 || key >> widths[level] == found.key)
                sums[key & mask] += weights == NULL ? 1 : (double)weights[i];
        }
        while (bin > 0 && found.above + sums[bin] < wanted)
            found.above += sums[bin--];
        found.key = found.key << widths[level] | bin;
    }
    return found;
}

/* Penalties in f64, since a quotient in f32 can be inf. */
static float penalise(float logit, double penalty)
{
    double changed = logit < 0 ? (double)logit * penalty : (double)logit / penalty;

    if (!isfinite(logit))
        return logit;
    return (float)(changed > FLT_MAX ? FLT_MAX : changed < -FLT_MAX ? -FLT_MAX : changed);
}

/* The row as f32, penalties applied. */
static const dsc_f32 *load_row(const struct job *job, int64_t row, const struct slot *slot)
{
    const struct dsc_sample_rows *rows = job->rows;
    int64_t n_words = rows->n_words;
    size_t n_bytes = dsc_dtype_bytes(rows->dtype);
    const char *data = (const char *)rows->logits + (size_t)(row * n_words) * n_bytes;
    double penalty = rows->rules[row].repetition_penalty;
    int64_t n_earlier = rows->n_earlier == NULL || penalty == 1 ? 0 : rows->n_earlier[row];
    const int64_t *earlier = rows->earlier + job->states[row].first_earlier;

    if (rows->dtype == DSC_DTYPE_F32 && n_earlier == 0)
        return (const dsc_f32 *)(const void *)data;
    for (int64_t i = 0; i < n_words; i += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(n_words - i);
        const dsc_f32 *loaded =
            dsc_load_f32(job->kernels, rows->dtype, data + (size_t)i * n_bytes, n, slot->logits + i);

        if (loaded != slot->logits + i)
            memcpy(slot->logits + i, loaded, (size_t)n * sizeof(float));
    }
    for (int64_t i = 0; i < n_earlier; i++) {
        float scratch[1];
        float logit = *dsc_load_f32(job->kernels, rows->dtype, data + (size_t)earlier[i] * n_bytes, 1, scratch);

        slot->logits[earlier[i]] = penalise(logit, penalty);
    }
    return slot->logits;
}

/* Finds the maxima, and what is wrong with the row. The first place of a fault is searched for only if there is one. */
static float find_maxima(const struct job *job, const dsc_f32 *logits, float *maxima, struct row_state *state)
{
    int64_t n_words = job->rows->n_words;
    float max = -INFINITY;
    int64_t first_nan = -1;

    for (int64_t begin = 0; begin < n_words; begin += DSC_BLOCK_ELEMS) {
        int64_t end = begin + block_of(n_words - begin);
        int64_t n_nonfinite = 0;
        double unused = 0;

        for (int64_t i = begin; i < end; i += GROUP) {
            maxima[i / GROUP] = -INFINITY;
            job->kernels->max_f32(end - i < GROUP ? end - i : GROUP, logits + i, &maxima[i / GROUP]);
            max = maxima[i / GROUP] > max ? maxima[i / GROUP] : max;
        }
        job->kernels->sumsq_f32(end - begin, logits + begin, &unused, &n_nonfinite);
        for (int64_t i = begin; i < end && n_nonfinite > 0 && first_nan < 0; i++)
            if (isnan(logits[i]))
                first_nan = i;
    }
    state->fault = first_nan >= 0 ? HAS_NAN : max == INFINITY ? HAS_INF : max == -INFINITY ? ALL_EXCLUDED : NO_FAULT;
    state->place = first_nan >= 0 ? first_nan : 0;
    while (state->fault == HAS_INF && logits[state->place] != INFINITY)
        state->place++;
    return max;
}

static int64_t first_largest(const dsc_f32 *logits, const float *maxima, float max)
{
    int64_t word = 0;

    while (maxima[word / GROUP] != max)
        word += GROUP;
    while (logits[word] != max)
        word++;
    return word;
}

/* Keeps the k largest logits and all equals of the k-th. */
static void keep_top_k(int64_t k, const struct slot *slot, struct kept *kept)
{
    int64_t n_groups = groups_of(kept->n);
    uint32_t least = k <= n_groups ? find_threshold(n_groups, slot->maxima, NULL, (double)k).key : 0;
    int64_t n_found = 0;
    int64_t n = 0;

    for (int64_t group = 0; group < n_groups; group++) {
        int64_t end = (group + 1) * GROUP < kept->n ? (group + 1) * GROUP : kept->n;

        if (key_of(slot->maxima[group]) < least)
            continue;
        for (int64_t i = group * GROUP; i < end; i++) {
            slot->picked[n_found] = kept->logits[i];
            slot->words[n_found] = (int32_t)i;
            n_found += key_of(kept->logits[i]) >= least;
        }
    }
    least = find_threshold(n_found, slot->picked, NULL, (double)k).key;
    for (int64_t i = 0; i < n_found; i++) {
        slot->picked[n] = slot->picked[i];
        slot->words[n] = slot->words[i];
        n += key_of(slot->picked[i]) >= least;
    }
    kept->n = n;
    kept->logits = slot->picked;
    kept->words = slot->words;
}

static double sum_of(const struct dsc_kernels *kernels, int64_t n, const float *weights)
{
    double sum = 0;

    for (int64_t i = 0; i < n; i += DSC_BLOCK_ELEMS)
        kernels->sum_f32(block_of(n - i), weights + i, &sum);
    return sum;
}

/* How often a logit's distance to the largest one counts. Finite, so that a distance of 0 stays 0. */
static double inverse_of(double temperature)
{
    return 1 / temperature < DBL_MAX ? 1 / temperature : DBL_MAX;
}

/* Fills the weights and their sum. Distances come first: the quotient of a logit itself can be inf. */
static void weigh(const struct dsc_kernels *kernels, double temperature, float max, struct kept *kept)
{
    double inverse = inverse_of(temperature);

    for (int64_t begin = 0; begin < kept->n; begin += DSC_BLOCK_ELEMS) {
        int64_t n = block_of(kept->n - begin);
        const dsc_f32 *restrict logits = kept->logits + begin;
        float *restrict weights = kept->weights + begin;

        for (int64_t i = 0; i < n; i++)
            weights[i] = (float)(((double)logits[i] - (double)max) * inverse);
        kernels->exp_f32(n, weights, 0, weights);
    }
    kept->sum = sum_of(kernels, kept->n, kept->weights);
}

/* Applies top_p and min_p. */
static void keep_probable(const struct job *job, const struct dsc_sample_rules *rules, const struct slot *slot,
                          struct kept *kept)
{
    double wanted = rules->top_p * kept->sum;
    struct threshold least = {0, 0};
    int64_t n = 0;

    if (rules->top_p == 1 && rules->min_p == 0)
        return;
    if (rules->top_p < 1)
        least = find_threshold(kept->n, kept->logits, kept->weights, wanted);
    for (int64_t i = 0; i < kept->n; i++) {
        uint32_t key = key_of(kept->logits[i]);
        float weight = kept->weights[i];

        if (key < least.key || (double)weight < rules->min_p || (key == least.key && least.above >= wanted))
            continue;
        if (key == least.key)
            least.above += (double)weight;
        kept->weights[n] = weight;
        slot->words[n++] = kept->words == NULL ? (int32_t)i : kept->words[i];
    }
    kept->n = n;
    kept->words = slot->words;
    kept->sum = sum_of(job->kernels, n, kept->weights);
}

/* The first entry whose weight and those before it add up to more than target, which is less than the sum of all. */
static int64_t draw(const struct dsc_kernels *kernels, const struct kept *kept, double target)
{
    double before = 0;
    int64_t begin = 0;
    int64_t last = 0;

    while (begin + DSC_BLOCK_ELEMS < kept->n) {
        double sum = before;

        kernels->sum_f32(DSC_BLOCK_ELEMS, kept->weights + begin, &sum);
        if (sum > target)
            break;
        before = sum;
        begin += DSC_BLOCK_ELEMS;
    }
    /* Within a block the order of the sum is another: if it rounds to less, the last entry is meant. */
    for (int64_t i = begin; i < begin + block_of(kept->n - begin) && before <= target; i++) {
        before += (double)kept->weights[i];
        if (kept->weights[i] > 0)
            last = i;
    }
    return last;
}

static double uniform(const struct dsc_kernels *kernels, uint64_t seed, int64_t position)
{
    float words[2];

    /* A counter has four words. Two of them are 48 bits, so that a rare word of a large vocabulary has its share. */
    kernels->uniform_f32(2, seed, 4 * (uint64_t)position, words);
    return (double)words[0] + (double)words[1] * UNIFORM_STEP;
}

static void write_probabilities(const struct kept *kept, int64_t n_words, float *out)
{
    memset(out, 0, (size_t)n_words * sizeof *out);
    for (int64_t i = 0; i < kept->n; i++)
        out[kept->words == NULL ? i : kept->words[i]] = (float)((double)kept->weights[i] / kept->sum);
}

static void do_row(const struct job *job, int64_t row, const struct slot *slot)
{
    const struct dsc_sample_rules *rules = &job->rows->rules[row];
    struct row_state *state = &job->states[row];
    const dsc_f32 *logits = load_row(job, row, slot);
    float max = find_maxima(job, logits, slot->maxima, state);
    struct kept kept = {.n = job->rows->n_words, .logits = logits, .weights = slot->weights};

    if (state->fault != NO_FAULT || (job->seeds == NULL && job->probabilities == NULL))
        return;
    if (rules->temperature == 0) {
        slot->words[0] = (int32_t)first_largest(logits, slot->maxima, max);
        slot->weights[0] = 1;
        kept.n = 1;
        kept.words = slot->words;
        kept.sum = 1;
    } else {
        if (rules->top_k > 0 && rules->top_k < kept.n)
            keep_top_k(rules->top_k, slot, &kept);
        weigh(job->kernels, rules->temperature, max, &kept);
        keep_probable(job, rules, slot, &kept);
    }
    if (job->probabilities != NULL)
        write_probabilities(&kept, job->rows->n_words, job->probabilities + row * job->rows->n_words);
    if (job->seeds != NULL) {
        double u = uniform(job->kernels, job->seeds[row], job->positions[row]);
        int64_t i = draw(job->kernels, &kept, u * kept.sum);
        double distance = 0;

        state->place = kept.words == NULL ? i : kept.words[i];
        if (rules->temperature > 0)
            distance = ((double)logits[state->place] - (double)max) * inverse_of(rules->temperature);
        state->log_prob = (float)(distance - log(kept.sum));
    }
}

static void do_slots(void *arg, int64_t first, int64_t last)
{
    const struct job *job = arg;

    for (int64_t i = first; i < last; i++) {
        struct slot slot = slot_at(job, i);

        for (int64_t row = i; row < job->rows->n_rows; row += job->n_slots)
            do_row(job, row, &slot);
    }
}

static dsc_status check_rules(int64_t row, const struct dsc_sample_rules *rules)
{
    const struct {
        const char *name;
        double value;
        bool is_good;
        const char *range;
    } checks[] = {
        {"temperature", rules->temperature, rules->temperature >= 0 && isfinite(rules->temperature),
         "must be finite and not negative"},
        {"top_p", rules->top_p, rules->top_p > 0 && rules->top_p <= 1, "must be above 0 and at most 1"},
        {"min_p", rules->min_p, rules->min_p >= 0 && rules->min_p <= 1, "must be from 0 to 1"},
        {"repetition_penalty", rules->repetition_penalty,
         rules->repetition_penalty > 0 && isfinite(rules->repetition_penalty), "must be finite and above 0"},
    };

    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++)
        if (!checks[i].is_good)
            return dsc_fail(DSC_EINVAL, "%s of row %lld is %g, %s", checks[i].name, (long long)row, checks[i].value,
                            checks[i].range);
    if (rules->top_k < 0)
        return dsc_fail(DSC_EINVAL, "top_k of row %lld is %lld, must not be negative", (long long)row,
                        (long long)rules->top_k);
    return DSC_OK;
}

/* Checks the earlier words of a row, and moves *first behind them. */
static dsc_status check_earlier(const struct dsc_sample_rows *rows, int64_t row, int64_t *first)
{
    int64_t n = rows->n_earlier == NULL ? 0 : rows->n_earlier[row];

    if (n < 0)
        return dsc_fail(DSC_EINVAL, "n_earlier of row %lld is %lld, must not be negative", (long long)row,
                        (long long)n);
    if (n > 0 && rows->earlier == NULL)
        return dsc_fail(DSC_EINVAL, "earlier is NULL, and row %lld has %lld earlier words", (long long)row,
                        (long long)n);
    for (int64_t i = 0; i < n; i++)
        if (rows->earlier[*first + i] < 0 || rows->earlier[*first + i] >= rows->n_words)
            return dsc_fail(DSC_EINVAL, "earlier word %lld of row %lld is %lld, and there are %lld words", (long long)i,
                            (long long)row, (long long)rows->earlier[*first + i], (long long)rows->n_words);
    *first += n;
    return DSC_OK;
}

static dsc_status check_rows(const struct dsc_sample_rows *rows)
{
    int64_t first = 0;

    if (rows->n_rows < 0 || rows->n_words < 1 || rows->n_words > INT32_MAX)
        return dsc_fail(DSC_EINVAL, "%lld rows of %lld words; 0 rows or more of 1 to %lld words are supported",
                        (long long)rows->n_rows, (long long)rows->n_words, (long long)INT32_MAX);
    if (dsc_dtype_bytes(rows->dtype) == 0)
        return dsc_fail(DSC_EINVAL, "dtype is %d, which is no dsc_dtype", (int)rows->dtype);
    if (rows->n_rows > 0 && (rows->logits == NULL || rows->rules == NULL || rows->scratch == NULL))
        return dsc_fail(DSC_EINVAL, "%s is NULL",
                        rows->logits == NULL  ? "logits"
                        : rows->rules == NULL ? "rules"
                                              : "scratch");
    for (int64_t row = 0; row < rows->n_rows; row++) {
        DSC_TRY(check_rules(row, &rows->rules[row]));
        DSC_TRY(check_earlier(rows, row, &first));
    }
    return DSC_OK;
}

/* The job of rows that have been checked. */
static struct job job_of(const struct dsc_sample_rows *rows)
{
    struct job job = {.rows = rows, .kernels = dsc_kernels_get(), .states = rows->scratch};
    int64_t first = 0;

    job.n_slots = slots_of(rows->n_rows);
    job.slots = (char *)rows->scratch + (size_t)rows->n_rows * sizeof(struct row_state);
    for (int64_t row = 0; row < rows->n_rows; row++) {
        job.states[row].first_earlier = first;
        first += rows->n_earlier == NULL ? 0 : rows->n_earlier[row];
    }
    return job;
}

/* Does the rows, and names the first bad one. */
static dsc_status run(struct job *job, const struct dsc_par *par)
{
    dsc_par_run(par, job->n_slots, do_slots, job);
    for (int64_t row = 0; row < job->rows->n_rows; row++) {
        const struct row_state *state = &job->states[row];

        if (state->fault == ALL_EXCLUDED)
            return dsc_fail(DSC_EINVAL, "all logits of row %lld are -inf: no word can be chosen", (long long)row);
        if (state->fault != NO_FAULT)
            return dsc_fail(DSC_EINVAL, "logit %lld of row %lld is %s", (long long)state->place, (long long)row,
                            state->fault == HAS_NAN ? "NaN" : "inf");
    }
    return DSC_OK;
}

dsc_status dsc_sample_tokens(const struct dsc_sample_rows *rows, const uint64_t *seeds, const int64_t *positions,
                             int64_t *out_tokens, float *out_log_probs, const struct dsc_par *par)
{
    struct job job;

    DSC_TRY(check_rows(rows));
    if (rows->n_rows == 0)
        return DSC_OK;
    if (seeds == NULL || positions == NULL || out_tokens == NULL || out_log_probs == NULL)
        return dsc_fail(DSC_EINVAL, "seeds, positions, out_tokens or out_log_probs is NULL");
    for (int64_t row = 0; row < rows->n_rows; row++)
        if (positions[row] < 0 || positions[row] >= DSC_SAMPLE_MAX_POSITION)
            return dsc_fail(DSC_EINVAL, "position of row %lld is %lld, must be from 0 to 2^62 - 1", (long long)row,
                            (long long)positions[row]);
    job = job_of(rows);
    job.seeds = seeds;
    job.positions = positions;
    DSC_TRY(run(&job, par));
    for (int64_t row = 0; row < rows->n_rows; row++) {
        out_tokens[row] = job.states[row].place;
        out_log_probs[row] = job.states[row].log_prob;
    }
    return DSC_OK;
}

dsc_status dsc_sample_probabilities(const struct dsc_sample_rows *rows, float *out, const struct dsc_par *par)
{
    struct job job;

    DSC_TRY(check_rows(rows));
    if (rows->n_rows == 0)
        return DSC_OK;
    if (out == NULL)
        return dsc_fail(DSC_EINVAL, "out is NULL");
    job = job_of(rows);
    DSC_TRY(run(&job, par)); /* finds faults, before anything is written */
    job.probabilities = out;
    return run(&job, par);
}
