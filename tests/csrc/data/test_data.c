/*
 * data/: orders are permutations, by counting, and uniform, by chi-square; shares against a list of positions that is
 * dealt out; schedules against numbers written out by hand.
 */
#include "test.h"

#include "dsc/data.h"

static int64_t sample_at(const struct dsc_order *order, int64_t position)
{
    int64_t sample = position;

    CHECK_STATUS(dsc_order_at(order, 1, &sample, &sample), DSC_OK);
    return sample;
}

static void check_permutation(int64_t n, uint64_t seed)
{
    int64_t *samples = calloc((size_t)n + 1, sizeof *samples);
    char *is_seen = calloc((size_t)n + 1, 1);
    struct dsc_order order;

    TEST_CASE("%lld samples, seed %llu", (long long)n, (unsigned long long)seed);
    CHECK_STATUS(dsc_order_init(&order, n, seed, 3), DSC_OK);
    for (int64_t i = 0; i < n; i++)
        samples[i] = i;
    CHECK_STATUS(dsc_order_at(&order, n, samples, samples), DSC_OK);
    for (int64_t i = 0; i < n; i++) {
        CHECK(samples[i] >= 0 && samples[i] < n && !is_seen[samples[i]]);
        is_seen[samples[i]] = 1;
    }
    free(samples);
    free(is_seen);
}

static void test_orders_are_permutations(void)
{
    static const int64_t sizes[] = {100, 127, 128, 129, 1000, 4096, 4097, 100003};

    for (int64_t n = 0; n < 70; n++)
        for (uint64_t seed = 0; seed < 5; seed++)
            check_permutation(n, seed * 0x9e3779b97f4a7c15u);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        check_permutation(sizes[i], 1234);
}

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a;
    int64_t y = *(const int64_t *)b;

    return (x > y) - (x < y);
}

/* Too many samples for an array: those at 20000 positions are different, and spread over the whole. */
static void test_long_orders(void)
{
    static const int64_t sizes[] = {1000000000, INT64_C(1) << 40, (INT64_C(1) << 62) + 1, INT64_MAX};
    enum { N = 20000 };
    static int64_t samples[N];

    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        struct dsc_order order;
        int64_t n_low = 0;

        TEST_CASE("%lld samples", (long long)sizes[s]);
        CHECK_STATUS(dsc_order_init(&order, sizes[s], 7, 0), DSC_OK);
        for (int64_t i = 0; i < N; i++)
            samples[i] = i % 2 == 0 ? i : sizes[s] - i;
        CHECK_STATUS(dsc_order_at(&order, N, samples, samples), DSC_OK);
        qsort(samples, N, sizeof *samples, compare);
        for (int64_t i = 0; i < N; i++) {
            CHECK(samples[i] >= 0 && samples[i] < sizes[s] && (i == 0 || samples[i] != samples[i - 1]));
            n_low += samples[i] < sizes[s] / 2;
        }
        CHECK(n_low > N / 2 - 400 && n_low < N / 2 + 400); /* 5.6 standard deviations */
    }
}

/* counts of `n_cells` equally likely outcomes, as standard deviations of chi-square from its mean */
static double deviations(const int64_t *counts, int64_t n_cells, int64_t n_drawn)
{
    double expected = (double)n_drawn / (double)n_cells;
    double sum = 0;

    for (int64_t i = 0; i < n_cells; i++)
        sum += ((double)counts[i] - expected) * ((double)counts[i] - expected) / expected;
    return (sum - (double)(n_cells - 1)) / sqrt(2.0 * (double)(n_cells - 1));
}

/* Pairs of first samples over seeds, and over epochs: n (n - 1) equally likely ones. */
static void test_orders_are_uniform(void)
{
    enum { DRAWN = 40000, LARGEST = 9 };

    for (int64_t n = 3; n <= LARGEST; n++) {
        int64_t by_seed[LARGEST * LARGEST] = {0};
        int64_t by_epoch[LARGEST * LARGEST] = {0};

        TEST_CASE("%lld samples", (long long)n);
        for (int64_t i = 0; i < DRAWN; i++) {
            struct dsc_order order;
            int64_t first;
            int64_t second;

            CHECK_STATUS(dsc_order_init(&order, n, (uint64_t)i, 0), DSC_OK);
            first = sample_at(&order, 0);
            second = sample_at(&order, n - 1);
            by_seed[first * (n - 1) + second - (second > first)]++;
            CHECK_STATUS(dsc_order_init(&order, n, 42, (uint64_t)i), DSC_OK);
            first = sample_at(&order, 0);
            second = sample_at(&order, n - 1);
            by_epoch[first * (n - 1) + second - (second > first)]++;
        }
        CHECK(deviations(by_seed, n * (n - 1), DRAWN) < 4);
        CHECK(deviations(by_epoch, n * (n - 1), DRAWN) < 4);
    }
}

/* A seed's next epoch is not the next seed's epoch, and positions next to each other are not samples next to each other. */
static void test_orders_differ(void)
{
    struct dsc_order a;
    struct dsc_order b;
    int64_t n_equal = 0;
    int64_t n_next = 0;

    CHECK_STATUS(dsc_order_init(&a, 10007, 5, 1), DSC_OK);
    CHECK_STATUS(dsc_order_init(&b, 10007, 6, 0), DSC_OK);
    for (int64_t i = 0; i < 10006; i++) {
        n_equal += sample_at(&a, i) == sample_at(&b, i);
        n_next += sample_at(&a, i) + 1 == sample_at(&a, i + 1);
    }
    CHECK(n_equal < 10 && n_next < 10); /* 1 expected */
}

/* All rounds of an epoch from `start`, against the list start, start + 1, ... that is dealt out in runs. */
static void check_shares(struct dsc_shares shares, int64_t start)
{
    int64_t round = shares.n_ranks * shares.batch;
    int64_t deal = shares.n_ranks * shares.run;
    int64_t position = start;
    int64_t n_rounds;
    int64_t wanted_rounds;

    TEST_CASE("%lld samples, %lld ranks, batch %lld, run %lld, drop %d, from %lld", (long long)shares.n_samples,
              (long long)shares.n_ranks, (long long)shares.batch, (long long)shares.run, shares.drop_last,
              (long long)start);
    CHECK_STATUS(dsc_shares_rounds(&shares, start, &n_rounds), DSC_OK);
    for (wanted_rounds = 0; position < shares.n_samples; wanted_rounds++) {
        int64_t left = shares.n_samples - position;
        int64_t dealt[64];
        int64_t taken = left < round ? left : round;
        int64_t n_deals = (taken + deal - 1) / deal;

        if (left < round && shares.drop_last)
            break;
        for (int64_t rank = 0; rank < shares.n_ranks; rank++) {
            int64_t positions[16];
            int64_t n = -1;
            int64_t next = -1;

            CHECK_STATUS(dsc_shares_round(&shares, position, rank, positions, &n, &next), DSC_OK);
            CHECK_EQ(n, n_deals * shares.run);
            CHECK_EQ(next, position + taken);
            for (int64_t i = 0; i < n; i++)
                dealt[i / shares.run * deal + rank * shares.run + i % shares.run] = positions[i];
        }
        CHECK(n_deals * deal < taken + deal);
        for (int64_t i = 0; i < n_deals * deal; i++)
            CHECK_EQ(dealt[i], (position + i) % shares.n_samples);
        position += taken;
    }
    CHECK_EQ(n_rounds, wanted_rounds);
    for (int64_t rank = 0; rank < shares.n_ranks; rank++) {
        int64_t n = -1;
        int64_t next = -1;

        CHECK_STATUS(dsc_shares_round(&shares, position, rank, NULL, &n, &next), DSC_OK);
        CHECK_EQ(n, 0);
        CHECK_EQ(next, shares.n_samples);
    }
}

static void test_shares(void)
{
    for (int64_t n = 0; n < 24; n++)
        for (int64_t ranks = 1; ranks <= 5; ranks++)
            for (int64_t batch = 1; batch <= 6; batch++)
                for (int64_t run = 1; run <= batch; run++)
                    for (int64_t start = 0; batch % run == 0 && start <= n; start += 1 + n / 5) {
                        check_shares((struct dsc_shares){n, ranks, batch, run, false}, start);
                        check_shares((struct dsc_shares){n, ranks, batch, run, true}, start);
                    }
    check_shares((struct dsc_shares){2, 13, 3, 1, false}, 0); /* more ranks than samples: each has one */
    check_shares((struct dsc_shares){2, 13, 4, 4, false}, 0); /* and a whole batch */
}

/* Whole batches: batch k from a position on is the same for any number of ranks, up to the end of the epoch. */
static void test_whole_batches(void)
{
    enum { BATCH = 3 };
    static const int64_t worlds[] = {1, 2, 3, 4, 6};

    for (int64_t n = 1; n < 60; n++)
        for (size_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
            for (int drop_last = 0; drop_last < 2; drop_last++) {
                struct dsc_shares shares = {n, worlds[w], BATCH, BATCH, drop_last != 0};
                int64_t position = 0;

                TEST_CASE("%lld samples, %lld ranks, drop %d", (long long)n, (long long)worlds[w], drop_last);
                for (int64_t k = 0; position < n; k++) {
                    int64_t rank = k % worlds[w];
                    int64_t positions[BATCH];
                    int64_t got;
                    int64_t next;

                    CHECK_STATUS(dsc_shares_round(&shares, position, rank, positions, &got, &next), DSC_OK);
                    if (got == 0) {
                        CHECK(drop_last && (k + worlds[w]) * BATCH > n);
                        break;
                    }
                    CHECK_EQ(got, BATCH);
                    for (int64_t i = 0; i < BATCH; i++)
                        CHECK_EQ(positions[i], (k * BATCH + i) % n);
                    if (rank == worlds[w] - 1)
                        position = next;
                }
            }
}

/*
 * Pools of 3, 1 and 40 samples: over many steps each is drawn by its share, and each pool's samples come equally often,
 * give or take one.
 */
static void test_pools(void)
{
    enum { N = 32, STEPS = 400, MOST = 40 };
    static const int64_t sizes[] = {3, 1, MOST};
    int64_t cursors[3] = {0};
    int64_t counts[3][MOST] = {{0}};
    int64_t pools[N];
    int64_t indices[N];

    for (uint64_t step = 0; step < STEPS; step++) {
        CHECK_STATUS(dsc_draw(3, sizes, cursors, 11, step, N, pools, indices), DSC_OK);
        for (int64_t i = 0; i < N; i++) {
            CHECK(pools[i] >= 0 && pools[i] < 3 && indices[i] >= 0 && indices[i] < sizes[pools[i]]);
            counts[pools[i]][indices[i]]++;
        }
    }
    for (int64_t pool = 0; pool < 3; pool++) {
        double share = (double)cursors[pool] / (N * STEPS) * 44;

        TEST_CASE("pool %lld: %lld drawn", (long long)pool, (long long)cursors[pool]);
        CHECK(share > 0.8 * (double)sizes[pool] && share < 1.2 * (double)sizes[pool]);
        for (int64_t i = 0; i < sizes[pool]; i++)
            CHECK(counts[pool][i] - cursors[pool] / sizes[pool] >= 0 && counts[pool][i] - cursors[pool] / sizes[pool] <= 1);
    }
    /* A step drawn again from its cursors is the same, in parts too. */
    int64_t again[3];
    int64_t parts[N];

    memcpy(again, cursors, sizeof again);
    CHECK_STATUS(dsc_draw(3, sizes, cursors, 11, STEPS, N, pools, indices), DSC_OK);
    CHECK_STATUS(dsc_draw(3, sizes, again, 11, STEPS, N, pools, parts), DSC_OK);
    CHECK_BYTES(indices, parts, sizeof parts);
    CHECK_BYTES(again, cursors, sizeof again);
}

static void test_schedules(void)
{
    static const int64_t difficulties[] = {1, 2, 3};
    static const int64_t last_steps[] = {5, 10};
    struct dsc_curriculum linear = {.min = 64, .max = 1024, .n_steps = 1000, .multiple = 8, .degree = 1};
    struct dsc_curriculum root = {.min = 10, .max = 110, .n_steps = 100, .multiple = 1, .degree = 2};
    struct dsc_curriculum odd = {.min = 3, .max = 100, .n_steps = 10, .multiple = 8, .degree = 1};
    struct dsc_curriculum discrete = {
        .kind = DSC_CURRICULUM_DISCRETE, .n_steps = 2, .difficulties = difficulties, .last_steps = last_steps};

    CHECK_STATUS(dsc_curriculum_check(&linear), DSC_OK);
    CHECK_EQ(dsc_curriculum_at(&linear, 0), 64);
    CHECK_EQ(dsc_curriculum_at(&linear, 8), 64);  /* 71.68 */
    CHECK_EQ(dsc_curriculum_at(&linear, 9), 72);  /* 72.64 */
    CHECK_EQ(dsc_curriculum_at(&linear, 500), 544);
    CHECK_EQ(dsc_curriculum_at(&linear, 999), 1016); /* 1023.04 */
    CHECK_EQ(dsc_curriculum_at(&linear, 1000), 1024);
    CHECK_EQ(dsc_curriculum_at(&linear, INT64_MAX), 1024);
    CHECK_STATUS(dsc_curriculum_check(&root), DSC_OK);
    CHECK_EQ(dsc_curriculum_at(&root, 25), 60);
    CHECK_EQ(dsc_curriculum_at(&root, 1), 20);
    CHECK_STATUS(dsc_curriculum_check(&odd), DSC_OK);
    CHECK_EQ(dsc_curriculum_at(&odd, 0), 3); /* no multiple of 8 is at or below it */
    CHECK_EQ(dsc_curriculum_at(&odd, 10), 96);
    CHECK_EQ(dsc_curriculum_at(&odd, 11), 100); /* 109.7, 104 */
    CHECK_EQ(dsc_curriculum_at(&odd, INT64_MAX), 100);
    CHECK_STATUS(dsc_curriculum_check(&discrete), DSC_OK);
    for (int64_t step = 0; step < 20; step++)
        CHECK_EQ(dsc_curriculum_at(&discrete, step), step <= 5 ? 1 : step <= 10 ? 2 : 3);
}

static void check_refused(struct dsc_curriculum c, dsc_status status, const char *text)
{
    TEST_CASE("%s", text);
    CHECK_ERROR(dsc_curriculum_check(&c), status, text);
}

static void test_bad_input(void)
{
    static const int64_t down[] = {3, 2};
    static const int64_t steps[] = {5, 5};
    static const int64_t up[] = {1, 2, 3};
    struct dsc_curriculum fine = {.min = 1, .max = 9, .n_steps = 4, .multiple = 1, .degree = 1};
    struct dsc_curriculum c;
    struct dsc_order order;
    int64_t outside[] = {0, 7};
    int64_t n = 0;
    int64_t next = 0;

    CHECK_STATUS(dsc_order_init(&order, -1, 0, 0), DSC_EINVAL);
    CHECK_STATUS(dsc_order_init(&order, 7, 0, 0), DSC_OK);
    CHECK_STATUS(dsc_order_at(&order, 2, outside, outside), DSC_EINVAL);
    CHECK(outside[0] == 0 && outside[1] == 7 && strstr(dsc_last_error(), "position 7 is not in an epoch of 7") != NULL);
    CHECK_STATUS(dsc_order_at(&order, 1, NULL, outside), DSC_EINVAL);
    CHECK_STATUS(dsc_order_at(&order, -1, outside, outside), DSC_EINVAL);
    CHECK_STATUS(dsc_shares_rounds(&(struct dsc_shares){-1, 1, 1, 1, false}, 0, &n), DSC_EINVAL);
    CHECK_STATUS(dsc_shares_rounds(&(struct dsc_shares){1, 0, 1, 1, false}, 0, &n), DSC_EINVAL);
    CHECK_STATUS(dsc_shares_rounds(&(struct dsc_shares){1, 1, 0, 1, false}, 0, &n), DSC_EINVAL);
    CHECK_ERROR(dsc_shares_rounds(&(struct dsc_shares){1, 1, 4, 0, false}, 0, &n), DSC_EINVAL, "runs of 0 positions");
    CHECK_ERROR(dsc_shares_rounds(&(struct dsc_shares){1, 1, 4, 3, false}, 0, &n), DSC_EINVAL, "runs of 3 positions in batches of 4");
    CHECK_ERROR(dsc_shares_rounds(&(struct dsc_shares){1, 1, 4, 8, false}, 0, &n), DSC_EINVAL, "runs of 8 positions");
    CHECK_STATUS(dsc_shares_rounds(&(struct dsc_shares){1, 1, 1, 1, false}, -1, &n), DSC_EINVAL);
    CHECK_STATUS(dsc_shares_rounds(&(struct dsc_shares){1, INT64_MAX / 2, 3, 1, false}, 0, &n), DSC_EOVERFLOW);
    CHECK_STATUS(dsc_shares_round(&(struct dsc_shares){4, 2, 1, 1, false}, 0, 2, outside, &n, &next), DSC_EINVAL);
    CHECK_STATUS(dsc_shares_round(&(struct dsc_shares){4, 2, 1, 1, false}, 0, -1, outside, &n, &next), DSC_EINVAL);

    CHECK_ERROR(dsc_draw(0, outside, outside, 0, 0, 1, outside, outside), DSC_EINVAL, "0 pools");
    CHECK_ERROR(dsc_draw(2, (const int64_t[]){1, 0}, (int64_t[]){0, 0}, 0, 0, 1, outside, outside), DSC_EINVAL, "pool 1 has 0");
    CHECK_ERROR(dsc_draw(2, (const int64_t[]){INT64_MAX, 1}, (int64_t[]){0, 0}, 0, 0, 1, outside, outside), DSC_EOVERFLOW, "pools");
    CHECK_ERROR(dsc_draw(1, (const int64_t[]){2}, (int64_t[]){INT64_MAX}, 0, 0, 1, outside, outside), DSC_EINVAL, "drawn");

    c = fine, c.kind = DSC_CURRICULUM_COUNT, check_refused(c, DSC_EINVAL, "kind is 2");
    c = fine, c.max = 0, check_refused(c, DSC_EINVAL, "max_difficulty is 0, below min_difficulty 1");
    c = fine, c.max = INT64_MAX, check_refused(c, DSC_EOVERFLOW, "2^53");
    c = fine, c.n_steps = 0, check_refused(c, DSC_EINVAL, "total_curriculum_step is 0");
    c = fine, c.multiple = 0, check_refused(c, DSC_EINVAL, "difficulty_step is 0");
    c = fine, c.degree = NAN, check_refused(c, DSC_EINVAL, "root_degree is nan");
    c = (struct dsc_curriculum){.kind = DSC_CURRICULUM_DISCRETE, .n_steps = 1, .difficulties = down, .last_steps = steps};
    check_refused(c, DSC_EINVAL, "difficulty goes down, from 3 to 2 at entry 1");
    c = (struct dsc_curriculum){.kind = DSC_CURRICULUM_DISCRETE, .n_steps = 2, .difficulties = up, .last_steps = steps};
    check_refused(c, DSC_EINVAL, "max_step is 5 at entry 1");
    c.last_steps = NULL, check_refused(c, DSC_EINVAL, "max_step is NULL");
}

int main(void)
{
    test_orders_are_permutations();
    test_long_orders();
    test_orders_are_uniform();
    test_orders_differ();
    test_shares();
    test_whole_batches();
    test_pools();
    test_schedules();
    test_bad_input();
    return test_finish(__FILE__);
}
