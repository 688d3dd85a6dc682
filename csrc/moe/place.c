/* Places of slots within experts: capacity, and the counting sort by expert. One pass over integers each. */
#include "dsc/moe.h"

#include "base/fail.h"

#include <math.h>
#include <string.h>

/* *out_n = n_tokens * k, for arrays of 8 bytes an element. */
static dsc_status count_slots(int64_t n_tokens, int64_t k, int64_t n_experts, int64_t *out_n)
{
    if (n_tokens < 0 || k < 0 || n_experts < 0 || n_experts > INT32_MAX)
        return dsc_fail(DSC_EINVAL,
                        "%lld tokens, %lld choices, %lld experts: none may be negative, and experts are int32",
                        (long long)n_tokens, (long long)k, (long long)n_experts);
    if (__builtin_mul_overflow(n_tokens, k, out_n) || *out_n > INT64_MAX / 8)
        return dsc_fail(DSC_EOVERFLOW, "%lld choices of %lld tokens do not fit int64_t", (long long)k,
                        (long long)n_tokens);
    return DSC_OK;
}

static dsc_status check_present(const void *data, const char *name, int64_t n)
{
    if (data == NULL && n > 0)
        return dsc_fail(DSC_EINVAL, "%s is NULL for %lld elements", name, (long long)n);
    return DSC_OK;
}

static dsc_status check_indices(const int32_t *indices, int64_t n_slots, int64_t k, int64_t n_experts)
{
    DSC_TRY(check_present(indices, "indices", n_slots));
    for (int64_t slot = 0; slot < n_slots; slot++)
        if (indices[slot] < -1 || indices[slot] >= n_experts)
            return dsc_fail(DSC_EINVAL, "indices[%lld, %lld] is %d, must be -1 or one of %lld experts",
                            (long long)(slot / k), (long long)(slot % k), (int)indices[slot], (long long)n_experts);
    return DSC_OK;
}

static void count(const int32_t *indices, int64_t n_slots, int64_t n_experts, int64_t *counts)
{
    if (n_experts > 0)
        memset(counts, 0, (size_t)n_experts * sizeof *counts);
    for (int64_t slot = 0; slot < n_slots; slot++)
        if (indices[slot] >= 0)
            counts[indices[slot]]++;
}

/* starts[e] = number of slots of the experts before e; returns the number of all. */
static int64_t start_experts(const int64_t *counts, int64_t n_experts, int64_t *starts)
{
    int64_t n = 0;

    for (int64_t e = 0; e < n_experts; e++) {
        starts[e] = n;
        n += counts[e];
    }
    return n;
}

dsc_status dsc_moe_count(const int32_t *indices, int64_t n_tokens, int64_t k, int64_t n_experts, int64_t *out_counts)
{
    int64_t n_slots;

    DSC_TRY(count_slots(n_tokens, k, n_experts, &n_slots));
    DSC_TRY(check_indices(indices, n_slots, k, n_experts));
    DSC_TRY(check_present(out_counts, "out_counts", n_experts));
    count(indices, n_slots, n_experts, out_counts);
    return DSC_OK;
}

dsc_status dsc_moe_sort(const int32_t *indices, int64_t n_tokens, int64_t k, int64_t n_experts, const int64_t *counts,
                        int64_t *scratch, int64_t *out_order, int64_t *out_inverse)
{
    int64_t n_slots;

    DSC_TRY(count_slots(n_tokens, k, n_experts, &n_slots));
    DSC_TRY(check_indices(indices, n_slots, k, n_experts));
    DSC_TRY(check_present(counts, "counts", n_experts));
    DSC_TRY(check_present(scratch, "scratch", n_experts));
    DSC_TRY(check_present(out_order, "out_order", start_experts(counts, n_experts, scratch)));
    DSC_TRY(check_present(out_inverse, "out_inverse", n_slots));
    for (int64_t slot = 0; slot < n_slots; slot++) {
        int64_t at = indices[slot] < 0 ? -1 : scratch[indices[slot]]++;

        out_inverse[slot] = at;
        if (at >= 0)
            out_order[at] = slot;
    }
    return DSC_OK;
}

dsc_status dsc_moe_invert_check(const int64_t *order, int64_t n, const int64_t *out_inverse)
{
    if (n < 0)
        return dsc_fail(DSC_EINVAL, "n is %lld, must not be negative", (long long)n);
    DSC_TRY(check_present(order, "order", n));
    DSC_TRY(check_present(out_inverse, "out_inverse", n));
    return DSC_OK;
}

dsc_status dsc_moe_invert(const int64_t *order, int64_t n, int64_t *out_inverse)
{
    DSC_TRY(dsc_moe_invert_check(order, n, out_inverse));
    for (int64_t i = 0; i < n; i++)
        out_inverse[i] = -1;
    for (int64_t i = 0; i < n; i++) {
        if (order[i] < 0 || order[i] >= n || out_inverse[order[i]] >= 0)
            return dsc_fail(DSC_EINVAL, "order[%lld] is %lld, which makes it no permutation of %lld rows", (long long)i,
                            (long long)order[i], (long long)n);
        out_inverse[order[i]] = i;
    }
    return DSC_OK;
}

/* Whether slot a is dropped before slot b. */
static bool is_worse(const float *priority, int64_t a, int64_t b)
{
    return priority[a] < priority[b] || (priority[a] == priority[b] && a > b);
}

/* Lets the slot at i sink until none below it is worse: the worst of the heap is at its top. */
static void sink(const float *priority, int64_t *heap, int64_t n, int64_t i)
{
    int64_t slot = heap[i];

    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && is_worse(priority, heap[child + 1], heap[child]))
            child++;
        if (!is_worse(priority, heap[child], slot))
            break;
        heap[i] = heap[child];
    }
    heap[i] = slot;
}

/* Moves the capacity best of n slots to the front. */
static void select_best(const float *priority, int64_t *slots, int64_t n, int64_t capacity)
{
    for (int64_t i = capacity / 2 - 1; i >= 0; i--)
        sink(priority, slots, capacity, i);
    for (int64_t i = capacity; capacity > 0 && i < n; i++)
        if (is_worse(priority, slots[0], slots[i])) {
            int64_t dropped = slots[0];

            slots[0] = slots[i];
            slots[i] = dropped;
            sink(priority, slots, capacity, 0);
        }
}

/* Sets kept, without places. */
static void keep_by_priority(const struct dsc_moe_place *call, int64_t n_slots)
{
    int64_t *ends = call->scratch;
    int64_t *slots = call->scratch + call->n_experts;

    start_experts(call->counts, call->n_experts, ends);
    for (int64_t slot = 0; slot < n_slots; slot++) {
        call->kept[slot] = call->indices[slot];
        if (call->indices[slot] >= 0)
            slots[ends[call->indices[slot]]++] = slot;
    }
    for (int64_t e = 0; e < call->n_experts; e++) {
        int64_t n = call->counts[e];
        int64_t *mine = slots + ends[e] - n;

        if (call->capacity < 0 || n <= call->capacity)
            continue;
        select_best(call->priority, mine, n, call->capacity);
        for (int64_t i = call->capacity; i < n; i++)
            call->kept[mine[i]] = -1;
    }
}

/* Gives the slot the next place of its expert. */
static void place_slot(const struct dsc_moe_place *call, const int32_t *indices, int64_t slot, int64_t *n_placed)
{
    int32_t e = indices[slot];
    bool is_kept = e >= 0 && (call->capacity < 0 || n_placed[e] < call->capacity);

    call->locations[slot] = is_kept ? (int32_t)n_placed[e]++ : 0;
    call->kept[slot] = is_kept ? e : -1;
}

dsc_status dsc_moe_place(const struct dsc_moe_place *call)
{
    int64_t n_slots;
    bool has_priority = call->order == DSC_MOE_BY_PRIORITY;

    DSC_TRY(count_slots(call->n_tokens, call->k, call->n_experts, &n_slots));
    if (n_slots > INT32_MAX)
        return dsc_fail(DSC_EOVERFLOW, "%lld slots, but locations are int32", (long long)n_slots);
    if (call->order < DSC_MOE_BY_CHOICE || call->order > DSC_MOE_BY_PRIORITY)
        return dsc_fail(DSC_EINVAL, "order is %d, which is no dsc_moe_order", (int)call->order);
    if (call->capacity < -1)
        return dsc_fail(DSC_EINVAL, "capacity is %lld, must be -1 (nothing is dropped) or at least 0",
                        (long long)call->capacity);
    DSC_TRY(check_indices(call->indices, n_slots, call->k, call->n_experts));
    DSC_TRY(check_present(call->scratch, "scratch", call->n_experts));
    DSC_TRY(check_present(call->kept, "kept", n_slots));
    DSC_TRY(check_present(call->locations, "locations", n_slots));
    DSC_TRY(check_present(call->counts, "counts", call->n_experts));
    if (has_priority)
        DSC_TRY(check_present(call->priority, "priority", n_slots));
    for (int64_t slot = 0; has_priority && slot < n_slots; slot++)
        if (isnan(call->priority[slot]))
            return dsc_fail(DSC_EINVAL, "priority[%lld, %lld] is nan, which has no order", (long long)(slot / call->k),
                            (long long)(slot % call->k));

    count(call->indices, n_slots, call->n_experts, call->counts);
    if (has_priority)
        keep_by_priority(call, n_slots);
    if (call->n_experts > 0)
        memset(call->scratch, 0, (size_t)call->n_experts * sizeof *call->scratch);
    if (call->order == DSC_MOE_BY_CHOICE) {
        for (int64_t j = 0; j < call->k; j++)
            for (int64_t token = 0; token < call->n_tokens; token++)
                place_slot(call, call->indices, token * call->k + j, call->scratch);
    } else {
        for (int64_t slot = 0; slot < n_slots; slot++)
            place_slot(call, has_priority ? call->kept : call->indices, slot, call->scratch);
    }
    return DSC_OK;
}
