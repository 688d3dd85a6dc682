/* Samples of a step: whatever the numbers, samples are in the epoch and different at different positions, ranks share a round in turn, and difficulties stay in their limits and do not fall. */
#include "fuzz.h"

#include "dsc/data.h"

#define MOST 64

static void check_order(struct input *input)
{
    int64_t n_samples = take_byte(input) % 2 == 0 ? take_below(input, MOST) : take_wild(input);
    uint64_t seed = (uint64_t)take_wild(input);
    uint64_t epoch = (uint64_t)take_wild(input);
    struct dsc_order order;
    int64_t positions[2];
    int64_t samples[2];

    if (dsc_order_init(&order, n_samples, seed, epoch) != DSC_OK) {
        REQUIRE(n_samples < 0);
        return;
    }
    positions[0] = take_wild(input);
    positions[1] = n_samples == 0 ? 0 : n_samples - 1 - take_below(input, n_samples < MOST ? n_samples : MOST);
    if (dsc_order_at(&order, 2, positions, samples) != DSC_OK) {
        REQUIRE(positions[0] < 0 || positions[0] >= n_samples);
        return;
    }
    for (int i = 0; i < 2; i++)
        REQUIRE(samples[i] >= 0 && samples[i] < n_samples);
    REQUIRE((samples[0] == samples[1]) == (positions[0] == positions[1]));
}

static void check_shares(struct input *input)
{
    bool is_wild = take_byte(input) % 4 == 0;
    int64_t run = 1 + take_below(input, MOST / 8);
    struct dsc_shares shares = {
        .n_samples = is_wild ? take_wild(input) : take_below(input, 1000),
        .n_ranks = is_wild ? take_wild(input) : take_below(input, 10),
        .batch = run * take_below(input, 8) + (take_byte(input) % 16 == 0),
        .run = run,
        .drop_last = take_byte(input) % 2 == 0,
    };
    int64_t position = is_wild ? take_wild(input) : take_below(input, 1100);
    int64_t rank = is_wild ? take_wild(input) : take_below(input, 10);
    int64_t positions[MOST];
    int64_t n_rounds;
    int64_t n_after;
    int64_t n;
    int64_t next;

    if (dsc_shares_round(&shares, position, rank, positions, &n, &next) != DSC_OK)
        return;
    REQUIRE(n >= 0 && n <= shares.batch);
    for (int64_t i = 0; i < n; i++)
        REQUIRE(positions[i] >= 0 && positions[i] < shares.n_samples);
    REQUIRE(n % shares.run == 0);
    for (int64_t i = 1; i < n; i++) {
        uint64_t skip = i % shares.run != 0 ? 1 : (uint64_t)((shares.n_ranks - 1) * shares.run + 1);

        REQUIRE(positions[i] == (int64_t)(((uint64_t)positions[i - 1] + skip) % (uint64_t)shares.n_samples));
    }
    REQUIRE(next <= shares.n_samples && (n == 0 ? next == shares.n_samples : next > position));
    REQUIRE(dsc_shares_rounds(&shares, position, &n_rounds) == DSC_OK);
    REQUIRE(dsc_shares_rounds(&shares, next, &n_after) == DSC_OK);
    REQUIRE(n_rounds == n_after + (n > 0));
}

static void check_draw(struct input *input)
{
    int64_t n_pools = take_below(input, 5);
    int64_t n = take_below(input, MOST);
    uint64_t seed = (uint64_t)take_wild(input);
    uint64_t step = (uint64_t)take_wild(input);
    int64_t sizes[4];
    int64_t cursors[4];
    int64_t before[4];
    int64_t pools[MOST];
    int64_t indices[MOST];
    int64_t moved = 0;

    for (int i = 0; i < 4; i++) {
        sizes[i] = take_byte(input) % 4 == 0 ? take_wild(input) : 1 + take_below(input, 100);
        before[i] = cursors[i] = take_byte(input) % 4 == 0 ? take_wild(input) : take_below(input, 100);
    }
    if (dsc_draw(n_pools, sizes, cursors, seed, step, n, pools, indices) != DSC_OK) {
        REQUIRE(memcmp(before, cursors, sizeof before) == 0);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        REQUIRE(pools[i] >= 0 && pools[i] < n_pools && indices[i] >= 0 && indices[i] < sizes[pools[i]]);
    for (int64_t i = 0; i < n_pools; i++)
        moved += cursors[i] - before[i];
    REQUIRE(moved == n);
}

static void check_curriculum(struct input *input)
{
    struct dsc_curriculum curriculum = {
        .min = take_wild(input),
        .max = take_wild(input),
        .n_steps = take_wild(input),
        .multiple = take_wild(input),
        .degree = (double)take_below(input, 40) / 8,
    };
    int64_t step = take_wild(input);
    int64_t before;
    int64_t after;

    if (dsc_curriculum_check(&curriculum) != DSC_OK || step < 0 || step == INT64_MAX)
        return;
    before = dsc_curriculum_at(&curriculum, step);
    after = dsc_curriculum_at(&curriculum, step + 1);
    REQUIRE(curriculum.min <= before && before <= after && after <= curriculum.max);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};

    check_order(&input);
    check_shares(&input);
    check_draw(&input);
    check_curriculum(&input);
    return 0;
}
