/*
 * dsc_moe_place, dsc_moe_sort and the choice of experts: each accepted call is what a search over all slots or experts
 * finds; wild numbers are refused or harmless.
 */
#include "fuzz.h"

#include "dsc/moe.h"

#include <math.h>

#define MAX_TOKENS 24
#define MAX_K 4
#define MAX_EXPERTS 12
#define MAX_SLOTS (MAX_TOKENS * MAX_K)

static void check_place(const struct dsc_moe_place *call)
{
    for (int64_t i = 0; i < call->n_tokens * call->k; i++) {
        int64_t n_before = 0;
        int64_t n_kept_before = 0;

        for (int64_t other = 0; other < call->n_tokens * call->k; other++) {
            bool is_before = other < i;

            if (call->order == DSC_MOE_BY_CHOICE && other % call->k != i % call->k)
                is_before = other % call->k < i % call->k;
            if (call->order == DSC_MOE_BY_PRIORITY && call->priority[other] != call->priority[i])
                is_before = call->priority[other] > call->priority[i];
            n_before += call->indices[other] == call->indices[i] && is_before;
            n_kept_before += call->kept[other] == call->indices[i] && other < i;
        }
        if (call->indices[i] < 0 || (call->capacity >= 0 && n_before >= call->capacity))
            REQUIRE(call->kept[i] == -1 && call->locations[i] == 0);
        else
            REQUIRE(call->kept[i] == call->indices[i] &&
                    call->locations[i] == (call->order == DSC_MOE_BY_PRIORITY ? n_kept_before : n_before));
    }
}

static void fuzz_places(struct input *input)
{
    int32_t indices[MAX_SLOTS];
    int32_t kept[MAX_SLOTS];
    int32_t locations[MAX_SLOTS];
    float priority[MAX_SLOTS];
    int64_t counts[MAX_EXPERTS];
    int64_t scratch[MAX_EXPERTS + MAX_SLOTS];
    int64_t order[MAX_SLOTS];
    int64_t inverse[MAX_SLOTS];
    struct dsc_moe_place call = {.n_tokens = take_below(input, MAX_TOKENS + 1),
                                 .k = take_below(input, MAX_K + 1),
                                 .n_experts = take_below(input, MAX_EXPERTS + 1),
                                 .capacity = take_below(input, 9) - 2,
                                 .order = (int32_t)take_below(input, 4),
                                 .indices = indices,
                                 .priority = priority,
                                 .scratch = scratch,
                                 .kept = kept,
                                 .locations = locations,
                                 .counts = counts};
    int64_t n = call.n_tokens * call.k;
    int64_t at = 0;
    bool is_good = call.capacity >= -1 && call.order < 3;

    for (int64_t i = 0; i < n; i++) {
        indices[i] = (int32_t)(take_byte(input) % (call.n_experts + 1)) - 1;
        priority[i] = (float)(take_byte(input) % 4);
    }
    if (n > 0 && take_byte(input) % 8 == 0) {
        indices[n - 1] = (int32_t)take_wild(input);
        is_good = is_good && indices[n - 1] >= -1 && indices[n - 1] < call.n_experts;
    }
    REQUIRE((dsc_moe_place(&call) == DSC_OK) == is_good);
    if (!is_good)
        return;
    check_place(&call);
    REQUIRE(dsc_moe_sort(indices, call.n_tokens, call.k, call.n_experts, counts, scratch, order, inverse) == DSC_OK);
    for (int64_t e = 0; e < call.n_experts; e++)
        for (int64_t i = 0; i < n; i++)
            if (indices[i] == e) {
                REQUIRE(order[at] == i && inverse[i] == at);
                at++;
            }
}

static void fuzz_route(struct input *input)
{
    static float scratch[3 * 64 * MAX_EXPERTS];
    float logits[MAX_EXPERTS];
    int32_t chosen[MAX_EXPERTS];
    struct dsc_moe_route call = {.n_tokens = 1,
                                 .n_experts = take_below(input, MAX_EXPERTS + 1),
                                 .k = take_below(input, MAX_EXPERTS + 2),
                                 .score = (int32_t)take_below(input, 3),
                                 .n_groups = 1,
                                 .n_limited_groups = 1,
                                 .logits = logits,
                                 .scratch = scratch,
                                 .indices = chosen};
    int64_t wanted = -1;
    int64_t bad = -2;
    bool is_good = call.k <= call.n_experts && call.score < 2;

    for (int64_t e = 0; e < call.n_experts; e++) {
        uint8_t byte = take_byte(input);

        logits[e] = byte == 255 ? NAN : byte == 254 ? INFINITY : byte == 253 ? -INFINITY : (float)(byte % 16) - 8;
        if (byte >= 254 && wanted < 0)
            wanted = e;
    }
    REQUIRE((dsc_moe_route(&call, NULL, &bad) == DSC_OK) == is_good);
    REQUIRE(bad == (is_good ? wanted : -2));
    if (!is_good || wanted >= 0)
        return;
    for (int64_t j = 0; j < call.k; j++) {
        int64_t n_better = 0;

        for (int64_t e = 0; e < call.n_experts; e++)
            n_better += logits[e] > logits[chosen[j]] || (logits[e] == logits[chosen[j]] && e < chosen[j]);
        REQUIRE(n_better == j);
    }
}

static void fuzz_wild(struct input *input)
{
    int32_t index = 0;
    int64_t numbers[4] = {0};
    int64_t n_tokens = take_wild(input);
    int64_t k = take_wild(input);

    if (n_tokens >= 0 && n_tokens <= 1 && k >= 0 && k <= 1)
        return;
    /* More slots than memory: only calls that are refused by their sizes. */
    if (n_tokens > 0 && k > 0 && n_tokens <= INT64_MAX / 8 / k)
        return;
    if (n_tokens >= 0 && k >= 0 && (n_tokens == 0 || k == 0))
        return;
    REQUIRE(dsc_moe_count(&index, n_tokens, k, 1, numbers) != DSC_OK);
    REQUIRE(dsc_moe_sort(&index, n_tokens, k, 1, numbers, numbers + 1, numbers + 2, numbers + 3) != DSC_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};

    switch (take_byte(&input) % 3) {
    case 0:
        fuzz_places(&input);
        break;
    case 1:
        fuzz_route(&input);
        break;
    default:
        fuzz_wild(&input);
    }
    return 0;
}
