/* Sums of vectors in the tree of a binary counter: each block of elements goes through all merges of a call at once. */
#include "dsc/sums.h"

#include "base/fail.h"
#include "cpu/spans.h"
#include "cpu/table.h"

#include <math.h>

/* Levels of a tree of INT64_MAX leaves. */
#define MAX_LEVELS 63

/*
 * Leaves that a block takes in one pass. A node that another leaf of the pass merges has at most half of these leaves,
 * so such nodes lie on PASS_LEVELS levels and stay in the cache.
 */
#define PASS_LEAVES 64
#define PASS_LEVELS 6

int32_t dsc_tree_n_levels(int64_t n_leaves)
{
    return n_leaves <= 0 ? 0 : 64 - __builtin_clzll((unsigned long long)n_leaves);
}

static dsc_status check_levels(const float *const *levels, int32_t n_levels, int64_t n_leaves, int64_t n_elems)
{
    int32_t n_needed = dsc_tree_n_levels(n_leaves);

    if (n_levels < n_needed)
        return dsc_fail(DSC_EINVAL, "%d levels, but %lld leaves need %d", (int)n_levels, (long long)n_leaves,
                        (int)n_needed);
    if (n_elems > 0 && n_needed > 0 && levels == NULL)
        return dsc_fail(DSC_EINVAL, "levels is NULL for %d levels", (int)n_levels);
    for (int32_t level = 0; n_elems > 0 && level < n_needed; level++)
        if (levels[level] == NULL)
            return dsc_fail(DSC_EINVAL, "levels[%d] is NULL", (int)level);
    return DSC_OK;
}

struct push_job {
    const struct dsc_kernels *kernels;
    float *const *levels;
    int64_t n_before;
    const struct dsc_span *leaves;
    int64_t n_leaves;
    struct dsc_list list;
};

/* The memory of one pass over a block: nodes that a later leaf of the pass merges, and the node that moves up. */
struct pass_nodes {
    DSC_ALIGNED dsc_f32 kept[PASS_LEVELS][DSC_BLOCK_ELEMS];
    DSC_ALIGNED dsc_f32 carried[DSC_BLOCK_ELEMS];
};

/* Pushes n_leaves of the job's leaves, from first_leaf on, for n elements from begin on. */
static void push_pass(const struct push_job *job, int64_t first_leaf, int64_t n_leaves, int64_t begin, int64_t n,
                      struct pass_nodes *memory)
{
    const struct dsc_kernels *kernels = job->kernels;
    int64_t n_before = job->n_before + first_leaf;
    int64_t n_after = n_before + n_leaves;
    const dsc_f32 *nodes[MAX_LEVELS];

    for (int32_t level = 0; level < dsc_tree_n_levels(n_before); level++)
        nodes[level] = job->levels[level] + begin;
    for (int64_t n_pushed = n_before; n_pushed < n_after; n_pushed++) {
        const struct dsc_span *leaf = &job->leaves[n_pushed - job->n_before];
        const char *data = (const char *)leaf->data + (size_t)begin * dsc_dtype_bytes(leaf->dtype);
        int32_t top = __builtin_ctzll(~(unsigned long long)n_pushed);
        /* The node stays if no other leaf of this pass carries into its level. */
        bool is_staying = (n_pushed + 1) >> top == n_after >> top;
        dsc_f32 *target = is_staying ? job->levels[top] + begin : memory->kept[top];
        const dsc_f32 *node = dsc_load_f32(kernels, leaf->dtype, data, n, top == 0 ? target : memory->carried);

        for (int32_t level = 0; level < top; level++) {
            dsc_f32 *sum = level + 1 == top ? target : memory->carried;

            kernels->sum_two_f32(n, nodes[level], node, sum);
            node = sum;
        }
        if (is_staying)
            dsc_store_f32(kernels, DSC_DTYPE_F32, node, n, target); /* a leaf of f32; all else is there already */
        nodes[top] = node;
    }
}

static void push_chunks(void *arg, int64_t first, int64_t last)
{
    const struct push_job *job = arg;
    struct pass_nodes memory;

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;

        while (dsc_cursor_next(&cursor, &piece))
            for (int64_t done = 0; done < piece.n_elems; done += DSC_BLOCK_ELEMS)
                for (int64_t leaf = 0; leaf < job->n_leaves; leaf += PASS_LEAVES) {
                    int64_t n_left = job->n_leaves - leaf;

                    push_pass(job, leaf, n_left < PASS_LEAVES ? n_left : PASS_LEAVES, piece.begin + done,
                              dsc_block_of(piece.n_elems - done), &memory);
                }
    }
}

dsc_status dsc_tree_push(float *const *levels, int32_t n_levels, int64_t n_before, const struct dsc_span *leaves,
                         int64_t n_leaves, int64_t n_elems, const struct dsc_par *par)
{
    struct push_job job = {.levels = levels, .n_before = n_before, .leaves = leaves, .n_leaves = n_leaves};
    int64_t n_after = 0;

    if (n_before < 0)
        return dsc_fail(DSC_EINVAL, "n_before is %lld, must not be negative", (long long)n_before);
    if (n_elems < 0)
        return dsc_fail(DSC_EINVAL, "n_elems is %lld, must not be negative", (long long)n_elems);
    DSC_TRY(dsc_check_spans(leaves, n_leaves, "leaves"));
    for (int64_t i = 0; i < n_leaves; i++)
        if (leaves[i].n_elems != n_elems)
            return dsc_fail(DSC_EINVAL, "leaves[%lld] has %lld elements, levels have %lld", (long long)i,
                            (long long)leaves[i].n_elems, (long long)n_elems);
    if (__builtin_add_overflow(n_before, n_leaves, &n_after))
        return dsc_fail(DSC_EOVERFLOW, "%lld leaves and %lld more are more than int64_t counts", (long long)n_before,
                        (long long)n_leaves);
    DSC_TRY(check_levels((const float *const *)levels, n_levels, n_after, n_elems));
    if (n_leaves == 0)
        return DSC_OK;
    DSC_TRY(dsc_list_init(&job.list, &n_elems, sizeof n_elems, 1));
    job.kernels = dsc_kernels_get();
    dsc_par_run(par, job.list.n_chunks, push_chunks, &job);
    return DSC_OK;
}

struct sum_job {
    const struct dsc_kernels *kernels;
    const float *const *levels;
    int64_t n_leaves;
    float scale;
    const struct dsc_span *out;
    struct dsc_list list;
};

static void sum_block(const struct sum_job *job, int64_t begin, int64_t n)
{
    const struct dsc_kernels *kernels = job->kernels;
    char *out = (char *)job->out->data + (size_t)begin * dsc_dtype_bytes(job->out->dtype);
    DSC_ALIGNED dsc_f32 scratch[DSC_BLOCK_ELEMS];
    dsc_f32 *sum = job->out->dtype == DSC_DTYPE_F32 ? (dsc_f32 *)(void *)out : scratch;
    const dsc_f32 *so_far = NULL;

    for (int32_t level = 0; level < dsc_tree_n_levels(job->n_leaves); level++) {
        const dsc_f32 *node = job->levels[level] + begin;

        if ((job->n_leaves >> level & 1) == 0)
            continue;
        if (so_far == NULL) {
            so_far = node;
            continue;
        }
        kernels->sum_two_f32(n, node, so_far, sum);
        so_far = sum;
    }
    if (job->scale != 1.0f) {
        dsc_store_f32(kernels, DSC_DTYPE_F32, so_far, n, sum); /* a single node */
        kernels->scale_f32(n, job->scale, sum);
        so_far = sum;
    }
    dsc_store_f32(kernels, job->out->dtype, so_far, n, out);
}

static void sum_chunks(void *arg, int64_t first, int64_t last)
{
    const struct sum_job *job = arg;

    for (int64_t chunk = first; chunk < last; chunk++) {
        struct dsc_cursor cursor = dsc_list_chunk(&job->list, chunk);
        struct dsc_piece piece;

        while (dsc_cursor_next(&cursor, &piece))
            for (int64_t done = 0; done < piece.n_elems; done += DSC_BLOCK_ELEMS)
                sum_block(job, piece.begin + done, dsc_block_of(piece.n_elems - done));
    }
}

dsc_status dsc_tree_sum(const float *const *levels, int32_t n_levels, int64_t n_leaves, float scale,
                        const struct dsc_span *out, const struct dsc_par *par)
{
    struct sum_job job = {.levels = levels, .n_leaves = n_leaves, .scale = scale, .out = out};

    if (n_leaves < 1)
        return dsc_fail(DSC_EINVAL, "n_leaves is %lld, must be at least 1", (long long)n_leaves);
    if (!isfinite(scale))
        return dsc_fail(DSC_EINVAL, "scale is %g, must be finite", (double)scale);
    if (out == NULL)
        return dsc_fail(DSC_EINVAL, "out is NULL");
    DSC_TRY(dsc_check_span(out, "out", 0));
    DSC_TRY(check_levels(levels, n_levels, n_leaves, out->n_elems));
    DSC_TRY(dsc_list_of_spans(&job.list, out, 1));
    job.kernels = dsc_kernels_get();
    dsc_par_run(par, job.list.n_chunks, sum_chunks, &job);
    return DSC_OK;
}
