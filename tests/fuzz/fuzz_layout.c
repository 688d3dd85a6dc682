/* dsc_layout_plan and dsc_shard_fragments: a plan that is accepted puts every element in one rank's fragment; a plan of wild numbers is refused or harmless. */
#include "fuzz.h"

#include "dsc/zero.h"

#define MAX_PARAMS 32

static void check_fragments(const int64_t *sizes, int64_t n_params, const int64_t *bucket_of, const int64_t *offset, const int64_t *begin,
                            const int64_t *slice, int64_t n_buckets, int32_t n_ranks)
{
    int64_t n_owned[MAX_PARAMS] = {0}; /* the next element of each parameter: ranks own increasing runs */

    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct dsc_fragment fragments[MAX_PARAMS];
        int64_t n = -1;
        int64_t shard_end = 0;
        int64_t shard_elems = 0;

        for (int64_t b = 0; b < n_buckets; b++)
            shard_elems += slice[b];
        REQUIRE(dsc_shard_fragments(sizes, n_params, bucket_of, offset, begin, slice, n_buckets, n_ranks, rank, MAX_PARAMS, fragments, &n) == DSC_OK);
        REQUIRE(n >= 0 && n <= n_params);
        for (int64_t f = 0; f < n; f++) {
            int64_t param = fragments[f].param;

            REQUIRE(fragments[f].n_elems > 0);
            REQUIRE(fragments[f].param_begin_elems == n_owned[param]);
            REQUIRE(fragments[f].flat_begin_elems == offset[param] + n_owned[param]);
            REQUIRE(fragments[f].shard_begin_elems >= shard_end);
            shard_end = fragments[f].shard_begin_elems + fragments[f].n_elems;
            n_owned[param] += fragments[f].n_elems;
        }
        REQUIRE(shard_end <= shard_elems);
    }
    for (int64_t i = 0; i < n_params; i++)
        REQUIRE(n_owned[i] == sizes[i]);
}

static void fuzz_plan(struct input *input, bool is_wild)
{
    int64_t sizes[MAX_PARAMS];
    int64_t bucket_of[MAX_PARAMS];
    int64_t offset[MAX_PARAMS];
    int64_t begin[MAX_PARAMS];
    int64_t slice[MAX_PARAMS];
    int64_t n_buckets = -7;
    int64_t flat_elems = -7;
    int64_t n_params = take_below(input, MAX_PARAMS + 1);
    int32_t n_ranks = (int32_t)(1 + take_below(input, 64));
    int64_t bucket_elems = is_wild ? take_wild(input) : 1 + take_below(input, 5000);
    int64_t align = is_wild ? take_wild(input) : INT64_C(1) << take_below(input, 9);

    for (int64_t i = 0; i < n_params; i++)
        sizes[i] = is_wild ? take_wild(input) : take_below(input, 2000);

    dsc_status status = dsc_layout_plan(sizes, n_params, n_ranks, bucket_elems, align, MAX_PARAMS, bucket_of, offset, begin, slice, &n_buckets, &flat_elems);

    if (status != DSC_OK) {
        REQUIRE(is_wild && n_buckets == -7 && flat_elems == -7);
        return;
    }
    REQUIRE(n_buckets >= (n_params > 0) && n_buckets <= n_params);
    REQUIRE(n_buckets == 0 || begin[n_buckets - 1] + n_ranks * slice[n_buckets - 1] == flat_elems);
    for (int64_t i = 0; i < n_params; i++) {
        int64_t b = bucket_of[i];

        REQUIRE(offset[i] % align == 0 && offset[i] >= begin[b] && offset[i] + sizes[i] <= begin[b] + n_ranks * slice[b]);
        REQUIRE(i == 0 || offset[i] >= offset[i - 1] + sizes[i - 1]);
    }
    check_fragments(sizes, n_params, bucket_of, offset, begin, slice, n_buckets, n_ranks);
}

/* A plan straight from the input, as a damaged file might hold it. */
static void fuzz_shard(struct input *input)
{
    int64_t arrays[5][MAX_PARAMS];
    int64_t n_params = take_below(input, MAX_PARAMS + 1);
    int64_t n_buckets = take_below(input, MAX_PARAMS + 1);
    int32_t n_ranks = (int32_t)take_wild(input);
    int32_t rank = (int32_t)take_below(input, 8);
    struct dsc_fragment fragments[MAX_PARAMS];
    int64_t n = -7;

    for (int64_t i = 0; i < MAX_PARAMS; i++)
        for (int a = 0; a < 5; a++)
            arrays[a][i] = a == 1 ? take_below(input, n_buckets + 1) : take_wild(input);
    if (dsc_shard_fragments(arrays[0], n_params, arrays[1], arrays[2], arrays[3], arrays[4], n_buckets, n_ranks, rank, MAX_PARAMS, fragments, &n) != DSC_OK) {
        REQUIRE(n == -7);
        return;
    }
    for (int64_t f = 0; f < n; f++)
        REQUIRE(fragments[f].n_elems > 0 && fragments[f].param_begin_elems + fragments[f].n_elems <= arrays[0][fragments[f].param]);
}

static void fuzz_range(struct input *input)
{
    int64_t n_elems = take_wild(input);
    int32_t n_ranks = (int32_t)take_wild(input);
    int32_t rank = (int32_t)take_wild(input);
    int64_t begin = -7;
    int64_t end = -7;
    int64_t next = -7;

    if (dsc_shard_range_of(n_elems, n_ranks, rank, &begin, &end) != DSC_OK) {
        REQUIRE((n_elems < 0 || rank < 0 || rank >= n_ranks) && begin == -7 && end == -7);
        return;
    }
    REQUIRE(0 <= begin && begin <= end && end <= n_elems && (rank > 0 || begin == 0));
    REQUIRE(end - begin == n_elems / n_ranks || end - begin == n_elems / n_ranks + 1);
    REQUIRE(rank < n_ranks - 1 || end == n_elems);
    if (rank < n_ranks - 1) {
        REQUIRE(dsc_shard_range_of(n_elems, n_ranks, rank + 1, &next, &begin) == DSC_OK);
        REQUIRE(next == end);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};

    switch (take_byte(&input) % 4) {
    case 0:
        fuzz_plan(&input, false);
        break;
    case 1:
        fuzz_plan(&input, true);
        break;
    case 2:
        fuzz_shard(&input);
        break;
    default:
        fuzz_range(&input);
    }
    return 0;
}
