/*
 * Gathers and releases of weights in every schedule: each table is proved, gathers as little as an exhaustive search,
 * and any change of its gathers is found.
 */
#include "test.h"

#include "dsc/pipe.h"

#define MAX_RANKS 4
#define MAX_STAGES (MAX_RANKS * 3)
#define MAX_UNITS (MAX_STAGES * 3)
#define MAX_ACTIONS (1 << 16)

struct lists {
    struct dsc_pipe_table table;
    int64_t begins[MAX_RANKS + 1];
    int32_t rank_of[MAX_STAGES];
    struct dsc_pipe_action actions[MAX_ACTIONS];
};

static struct lists computed;
static struct lists bare;
static struct lists full;
static struct lists changed;

static void point(struct lists *lists)
{
    lists->table.actions = lists->actions;
    lists->table.begins = lists->begins;
    lists->table.rank_of = lists->rank_of;
}

/* Makes the lists of a schedule with sends and receives, in `bare`. */
static bool make_bare(const char *schedule, const struct dsc_pipe_shape *shape)
{
    struct dsc_pipe_traits traits;
    int64_t n;

    CHECK_STATUS(dsc_pipe_traits_of(schedule, &traits), DSC_OK);
    computed.table = (struct dsc_pipe_table){.n_ranks = shape->n_ranks,
                                             .n_stages = shape->n_ranks * shape->n_virtual,
                                             .n_micro_batches = shape->n_micro_batches,
                                             .has_backward = traits.has_backward,
                                             .limit_elements = -1};
    for (int32_t rank = 0; rank < shape->n_ranks; rank++) {
        int64_t begin = computed.begins[rank];

        CHECK_STATUS(dsc_pipe_build(schedule, shape, rank, MAX_ACTIONS - begin, computed.actions + begin, &n), DSC_OK);
        computed.begins[rank + 1] = begin + n;
    }
    for (int32_t stage = 0; stage < computed.table.n_stages; stage++) {
        CHECK_STATUS(dsc_pipe_rank_of(schedule, shape, stage, &computed.rank_of[stage]), DSC_OK);
        bare.rank_of[stage] = full.rank_of[stage] = computed.rank_of[stage];
    }
    point(&computed);
    bare.table = computed.table;
    point(&bare);
    return CHECK_STATUS(dsc_pipe_add_comm(&computed.table, MAX_ACTIONS, bare.actions, bare.begins), DSC_OK);
}

/* Adds gathers to `bare`, in `full`. */
static dsc_status add_gathers(const struct dsc_pipe_unit *units, int32_t n_units, int64_t limit, int32_t ahead)
{
    dsc_status status;

    bare.table.units = units;
    bare.table.n_units = n_units;
    bare.table.limit_elements = limit;
    status = dsc_pipe_add_gathers(&bare.table, ahead, MAX_ACTIONS, full.actions, full.begins);
    full.table = bare.table;
    point(&full);
    return status;
}

static bool computes(const struct dsc_pipe_action *action)
{
    return action->kind <= DSC_PIPE_WEIGHT;
}

static bool has_unit(const struct dsc_pipe_action *action)
{
    return action->kind == DSC_PIPE_GATHER || action->kind == DSC_PIPE_RELEASE;
}

/* Elements of the stages of a rank, and the most that one computation needs. */
static void need_of(const struct dsc_pipe_table *table, int32_t rank, int64_t *out_total, int64_t *out_most)
{
    *out_total = 0;
    *out_most = 0;
    for (int32_t stage = 0; stage < table->n_stages; stage++) {
        int64_t n = 0;

        if (table->rank_of[stage] != rank)
            continue;
        for (int32_t i = 0; i < table->n_units; i++)
            n += table->units[i].stage == stage ? table->units[i].numel : 0;
        *out_total += n;
        *out_most = n > *out_most ? n : *out_most;
    }
}

static int64_t gathered_by(const struct dsc_pipe_table *table, int32_t rank, int64_t *out_n)
{
    int64_t elements = 0;

    *out_n = 0;
    for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++) {
        int32_t unit = 0;

        if (table->actions[i].kind != DSC_PIPE_GATHER)
            continue;
        while (table->units[unit].stage != table->actions[i].stage)
            unit++;
        elements += table->units[unit + table->actions[i].micro_batch].numel;
        ++*out_n;
    }
    return elements;
}

/*
 * The fewest elements that a rank can gather: the cheapest path through all sets of live units, from computation to
 * computation. Knows nothing of gaps and next uses.
 */
static int64_t fewest(const struct dsc_pipe_table *table, int32_t rank)
{
    int32_t units[12];
    int32_t n = 0;
    static int64_t cost[1 << 12];
    static int64_t next[1 << 12];
    static int64_t size[1 << 12];

    for (int32_t i = 0; i < table->n_units; i++)
        if (table->rank_of[table->units[i].stage] == rank)
            units[n++] = i;
    for (int32_t set = 0; set < 1 << n; set++) {
        size[set] = 0;
        cost[set] = set == 0 ? 0 : INT64_MAX;
        for (int32_t i = 0; i < n; i++)
            size[set] += set >> i & 1 ? table->units[units[i]].numel : 0;
    }
    for (int64_t a = table->begins[rank]; a < table->begins[rank + 1]; a++) {
        int32_t needed = 0;

        if (!computes(&table->actions[a]))
            continue;
        for (int32_t i = 0; i < n; i++)
            needed |= table->units[units[i]].stage == table->actions[a].stage ? 1 << i : 0;
        for (int32_t to = 0; to < 1 << n; to++) {
            next[to] = INT64_MAX;
            if ((to & needed) != needed || (table->limit_elements >= 0 && size[to] > table->limit_elements))
                continue;
            for (int32_t from = 0; from < 1 << n; from++)
                if (cost[from] != INT64_MAX && cost[from] + size[to & ~from] < next[to])
                    next[to] = cost[from] + size[to & ~from];
        }
        memcpy(cost, next, sizeof cost);
    }

    int64_t least = INT64_MAX;

    for (int32_t set = 0; set < 1 << n; set++)
        least = cost[set] < least ? cost[set] : least;
    return least;
}

/* Live elements of a rank when its computation number j runs. */
static int64_t live_at(const struct dsc_pipe_table *table, int32_t rank, int64_t j)
{
    int64_t live = 0;
    int64_t n = 0;

    for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++) {
        const struct dsc_pipe_action *action = &table->actions[i];
        int32_t unit = 0;

        if (computes(action) && n++ == j)
            break;
        if (!has_unit(action))
            continue;
        while (table->units[unit].stage != action->stage)
            unit++;
        live += (action->kind == DSC_PIPE_GATHER ? 1 : -1) * table->units[unit + action->micro_batch].numel;
    }
    return live;
}

/*
 * A gather is at most `ahead` computations before its use. If it could be earlier, the limit has no room for it there,
 * or an earlier gather or its own release stands there.
 */
static void check_places(const struct dsc_pipe_table *table, int32_t rank, int32_t ahead)
{
    int64_t released_at[MAX_UNITS];
    int64_t last = 0;
    int64_t j = 0;

    for (int i = 0; i < MAX_UNITS; i++)
        released_at[i] = 0;
    for (int64_t i = table->begins[rank]; i < table->begins[rank + 1]; i++) {
        const struct dsc_pipe_action *action = &table->actions[i];
        int64_t use = j;
        int32_t unit = 0;

        j += computes(action) ? 1 : 0;
        if (!has_unit(action))
            continue;
        while (table->units[unit].stage != action->stage)
            unit++;
        unit += action->micro_batch;
        if (action->kind == DSC_PIPE_RELEASE) {
            released_at[unit] = j;
            continue;
        }
        for (int64_t k = i + 1; !computes(&table->actions[k]) || table->actions[k].stage != action->stage; k++)
            use += computes(&table->actions[k]) ? 1 : 0;
        CHECK(use - j <= ahead);
        if (use - j < ahead && j > last && j > released_at[unit] && table->limit_elements >= 0)
            CHECK(live_at(table, rank, j - 1) + table->units[unit].numel > table->limit_elements);
        last = j;
    }
}

/* Without its gathers and releases, the table is the one that it was made of. */
static void check_rest(void)
{
    int64_t n = 0;

    for (int32_t rank = 0; rank < full.table.n_ranks; rank++) {
        for (int64_t i = full.begins[rank]; i < full.begins[rank + 1]; i++)
            if (!has_unit(&full.actions[i])) {
                CHECK(memcmp(&full.actions[i], &bare.actions[n], sizeof *full.actions) == 0);
                n++;
            }
        CHECK_EQ(n, bare.begins[rank + 1]);
    }
}

/* The simulation of `full` agrees with its lists, and without time for gathers it takes as long as `bare`. */
static void check_simulation(void)
{
    struct dsc_pipe_cost costs[MAX_STAGES];
    struct dsc_pipe_usage usage[MAX_RANKS];
    static struct dsc_pipe_unit slow[MAX_UNITS];
    struct dsc_pipe_table whole = bare.table;
    int64_t plain = -1;
    int64_t makespan = -2;
    int64_t link_ns = 0;

    for (int32_t stage = 0; stage < full.table.n_stages; stage++)
        costs[stage] = (struct dsc_pipe_cost){100, 110, 90, 1, 1};
    whole.n_units = 0;
    CHECK_STATUS(dsc_pipe_simulate(&whole, costs, 3, NULL, usage, &plain), DSC_OK);
    CHECK_STATUS(dsc_pipe_simulate(&full.table, costs, 3, NULL, usage, &makespan), DSC_OK);
    CHECK_EQ(makespan, plain);
    for (int32_t i = 0; i < full.table.n_units; i++) {
        slow[i] = full.table.units[i];
        slow[i].gather_ns = 7;
    }
    full.table.units = slow;
    CHECK_STATUS(dsc_pipe_simulate(&full.table, costs, 3, NULL, usage, &makespan), DSC_OK);
    for (int32_t rank = 0; rank < full.table.n_ranks; rank++) {
        int64_t n;

        CHECK_EQ(gathered_by(&full.table, rank, &n), usage[rank].gathered_elements);
        CHECK_EQ(usage[rank].n_gathers, n);
        CHECK_EQ(usage[rank].link_ns, 7 * n);
        if (full.table.limit_elements >= 0)
            CHECK(usage[rank].peak_live_elements <= full.table.limit_elements);
        link_ns += usage[rank].link_ns;
    }
    CHECK(makespan >= plain && makespan <= plain + link_ns);
    full.table.units = bare.table.units;
}

static int64_t random_below(uint64_t *seed, int64_t n)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((*seed >> 33) % (uint64_t)n);
}

/* Units by stage; each stage has none to most_units. `equal` elements each, or a random number if it is 0. */
static int32_t make_units(struct dsc_pipe_unit *units, int32_t n_stages, int32_t most_units, int64_t equal,
                          uint64_t *seed)
{
    int32_t n = 0;

    for (int32_t stage = 0; stage < n_stages; stage++)
        for (int64_t i = random_below(seed, most_units + 1); i > 0; i--)
            units[n++] = (struct dsc_pipe_unit){stage, equal > 0 ? equal : random_below(seed, 9), 0};
    return n;
}

/* Every limit from the least that a computation needs to all units of a rank. */
static void test_all_limits(void)
{
    static const int32_t micro_batches[] = {1, 2, 3, 5, 8};
    struct dsc_pipe_unit units[MAX_UNITS];
    int64_t gathered = 0;
    int64_t best = 0;
    uint64_t seed = 7;
    const char *name;

    for (int32_t i = 0; (name = dsc_pipe_schedule_name(i)) != NULL; i++)
        for (int32_t p = 1; p <= MAX_RANKS; p++)
            for (int32_t v = 1; v <= 3; v++)
                for (size_t k = 0; k < sizeof micro_batches / sizeof *micro_batches; k++)
                    for (int32_t is_equal = 0; is_equal < 2; is_equal++) {
                        struct dsc_pipe_shape shape = {p, v, micro_batches[k]};
                        int64_t least = 0;
                        int64_t most = 0;

                        if (dsc_pipe_check(name, &shape) != DSC_OK || !make_bare(name, &shape))
                            continue;

                        int32_t n_units = make_units(units, p * v, v == 3 ? 2 : 3, is_equal ? 2 : 0, &seed);

                        bare.table.units = units;
                        bare.table.n_units = n_units;
                        for (int32_t rank = 0; rank < p; rank++) {
                            int64_t total, need;

                            need_of(&bare.table, rank, &total, &need);
                            least = need > least ? need : least;
                            most = total > most ? total : most;
                        }
                        for (int64_t limit = least; limit <= most; limit++) {
                            int32_t ahead = (int32_t)random_below(&seed, 4);

                            TEST_CASE("%s, %d ranks, %d stages each, %d micro-batches, %d units, limit %d, ahead %d",
                                      name, p, v, micro_batches[k], n_units, (int)limit, ahead);
                            if (!CHECK_STATUS(add_gathers(units, n_units, limit, ahead), DSC_OK))
                                continue;
                            CHECK_STATUS(dsc_pipe_verify(&full.table), DSC_OK);
                            check_rest();
                            check_simulation();
                            for (int32_t rank = 0; rank < p; rank++) {
                                int64_t n, total, need;
                                int64_t wanted = fewest(&full.table, rank);
                                int64_t got = gathered_by(&full.table, rank, &n);

                                check_places(&full.table, rank, ahead);
                                need_of(&full.table, rank, &total, &need);
                                CHECK(got >= wanted);
                                if (is_equal || limit >= total)
                                    CHECK_EQ(got, wanted);
                                if (limit >= total)
                                    CHECK_EQ(got, total);
                                gathered += is_equal ? 0 : got;
                                best += is_equal ? 0 : wanted;
                            }
                        }
                    }
    TEST_CASE("units of random sizes: %d elements gathered, at best %d", (int)gathered, (int)best);
    CHECK(gathered * 100 <= best * 105);
}

/* With a limit for all units: a gather for each before its stage's first computation, a release after the last. */
static void test_all_stay(void)
{
    static const struct dsc_pipe_unit units[] = {{0, 5, 0}, {0, 6, 0}, {1, 7, 0}, {2, 1, 0}, {3, 4, 0}, {3, 0, 0}};
    const char *name;

    for (int32_t i = 0; (name = dsc_pipe_schedule_name(i)) != NULL; i++)
        for (int32_t v = 1; v <= 2; v++) {
            struct dsc_pipe_shape shape = {4 / v, v, 8};

            TEST_CASE("%s, %d stages a rank", name, v);
            if (dsc_pipe_check(name, &shape) != DSC_OK || !make_bare(name, &shape))
                continue;
            CHECK_STATUS(add_gathers(units, 6, -1, 1), DSC_OK);
            CHECK_STATUS(dsc_pipe_verify(&full.table), DSC_OK);
            CHECK_EQ(full.begins[4 / v] - bare.begins[4 / v], 12);
            for (int32_t rank = 0; rank < 4 / v; rank++)
                for (int64_t a = full.begins[rank]; a < full.begins[rank + 1]; a++)
                    for (int64_t b = full.begins[rank]; b < full.begins[rank + 1]; b++)
                        if (has_unit(&full.actions[a]) && computes(&full.actions[b]) &&
                            full.actions[a].stage == full.actions[b].stage)
                            CHECK((full.actions[a].kind == DSC_PIPE_GATHER) == (a < b));
        }
}

/* With a limit for one stage: its units come and go with each uninterrupted run of its computations. */
static void test_one_stage_stays(void)
{
    struct dsc_pipe_unit units[8];
    const char *name;

    for (int32_t i = 0; i < 8; i++)
        units[i] = (struct dsc_pipe_unit){i / 2, 3 + 2 * (i % 2), 0};
    for (int32_t i = 0; (name = dsc_pipe_schedule_name(i)) != NULL; i++) {
        struct dsc_pipe_shape shape = {2, 2, 6};

        TEST_CASE("%s", name);
        if (dsc_pipe_check(name, &shape) != DSC_OK || !make_bare(name, &shape))
            continue;
        CHECK_STATUS(add_gathers(units, 8, 8, 3), DSC_OK);
        CHECK_STATUS(dsc_pipe_verify(&full.table), DSC_OK);
        for (int32_t rank = 0; rank < 2; rank++) {
            int64_t n_runs = 0;
            int64_t n;
            int32_t last = -1;

            for (int64_t a = computed.begins[rank]; a < computed.begins[rank + 1]; a++) {
                n_runs += computed.actions[a].stage != last;
                last = computed.actions[a].stage;
            }
            CHECK_EQ(gathered_by(&full.table, rank, &n), 8 * n_runs);
            CHECK_EQ(n, 2 * n_runs);
        }
        CHECK_ERROR(add_gathers(units, 8, 7, 1), DSC_EINVAL, "stage 0 of rank 0 needs 8 live elements, the limit is 7");
    }
}

/* Reads lists of actions as text, one a rank, into `changed`. Stage s lies on rank s % n_ranks. */
static void read_lists(const char *const *texts, int32_t n_ranks, const struct dsc_pipe_unit *units, int32_t n_units,
                       int64_t limit)
{
    int64_t n = 0;

    for (int32_t rank = 0; rank < n_ranks; rank++) {
        char copy[2048];

        changed.begins[rank] = n;
        snprintf(copy, sizeof copy, "%s", texts[rank]);
        for (char *word = strtok(copy, " "); word != NULL; word = strtok(NULL, " "))
            CHECK_STATUS(dsc_pipe_parse(word, &changed.actions[n++]), DSC_OK);
    }
    changed.begins[n_ranks] = n;
    for (int32_t stage = 0; stage < 2 * n_ranks; stage++)
        changed.rank_of[stage] = stage % n_ranks;
    changed.table = (struct dsc_pipe_table){.n_ranks = n_ranks,
                                            .n_stages = 2 * n_ranks,
                                            .n_micro_batches = 2,
                                            .has_backward = true,
                                            .units = units,
                                            .n_units = n_units,
                                            .limit_elements = limit};
    point(&changed);
}

/* Interleaved, 2 ranks with 2 stages each and 2 micro-batches; 8 elements at most. */
static const struct dsc_pipe_unit some_units[] = {{0, 3, 0}, {0, 2, 0}, {1, 4, 0}, {2, 6, 0}, {3, 5, 0}, {3, 3, 0}};
static const char *const some_lists[2] = {
    "0G0 0G1 0F0 0SEND_F0 0F1 0R0 0SEND_F1 2G0 2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 2RECV_B0 2B0 2SEND_B0 "
    "2RECV_B1 2B1 2R0 2SEND_B1 0G0 0RECV_B0 0B0 0RECV_B1 0B1 0R0 0R1 ",
    "1G0 1RECV_F0 1RECV_F1 1F0 1SEND_F0 3RECV_F0 1F1 1R0 1SEND_F1 3G0 3G1 3RECV_F1 3F0 3B0 3SEND_B0 3F1 1RECV_B0 3B1 "
    "3R0 3R1 3SEND_B1 1G0 1RECV_B1 1B0 1SEND_B0 1B1 1R0 1SEND_B1 ",
};

/* A change of one list: the first `from` becomes `to`, and the sentence of the proof has `says`. */
static const struct {
    int32_t rank;
    const char *from;
    const char *to;
    const char *says;
} mistakes[] = {
    {0, "0G0 0G1 0F0", "0G1 0F0", "0F0, action 1 of its list, before a unit that it needs is live: unit 0 of stage 0"},
    {0, "0G0 0G1 0F0", "0G0 0F0", "0F0, action 1 of its list, before a unit that it needs is live: unit 1 of stage 0"},
    {0, "0G0 0G1 0F0", "0G0 0F0 0G1", "0F0, action 1 of its list, before a unit that it needs is live: unit 1"},
    {0, "0G0 0G1 0F0", "0G0 0G0 0G1 0F0", "0G0, action 1 of its list, of a unit that is live"},
    {0, "0F1 0R0", "0G1 0F1 0R0", "0G1, action 4 of its list, of a unit that is live"},
    {0, "0F1 0R0", "0F1", "rank 0 holds 11 elements from 2G0, action 6 of its list; the limit is 8"},
    {0, "0R0 0SEND_F1 2G0", "0SEND_F1 2G0 0R0", "rank 0 holds 11 elements from 2G0"},
    {0, "0F1 0R0", "0F1 0R0 0R0", "0R0, action 6 of its list, of a unit that is not live"},
    {0, "0SEND_F1 2G0", "0SEND_F1", "2F0, action 8 of its list, before a unit that it needs is live: unit 0 of stage 2"},
    {0, "0F1 0R0", "0R0 0F1", "0F1, action 5 of its list, before a unit that it needs is live: unit 0"},
    {0, "2B1 2R0", "2R0 2B1", "2B1, action 19 of its list, before"},
    {0, "2B1 2R0", "2B1", "rank 0 holds 11 elements from 0G0"},
    {0, "2B1 2R0", "2B1 0R1 2R0", "0B0, action 24 of its list, before a unit that it needs is live: unit 1"},
    {0, "2B0 2SEND_B0", "2B0 2R0 2SEND_B0", "2B1"},
    {0, "2SEND_B1 0G0", "2SEND_B1", "0B0"},
    {0, "0B1 0R0 0R1", "0B1 0R0", "rank 0 never releases unit 1 of stage 0"},
    {0, "0B1 0R0 0R1", "0B1 0R0 0R1 2G0", "rank 0 never releases unit 0 of stage 2"},
    {0, "0B1 0R0 0R1", "0B1 0R0 0R1 2G0 2R0", "2R0, action 29 of its list, of a unit that was gathered for no computation"},
    {1, "1R0 1SEND_F1", "1R0 1G0 1R0 1SEND_F1", "1R0, action 9 of its list, of a unit that was gathered for no computation"},
    {1, "3G0 3G1", "3G0 3G0", "3G0, action 10 of its list, of a unit that is live"},
    {1, "3G0 3G1", "3G0", "3F0, action 11 of its list, before a unit that it needs is live: unit 1 of stage 3"},
    {1, "3F0 3B0 3SEND_B0 3F1", "3F0 3B0 3R1 3SEND_B0 3F1 3G1", "3F1"},
    {1, "3R0 3R1 3SEND_B1", "3R1 3SEND_B1", "rank 1 holds 9 elements from 1G0"},
    {1, "1G0 1RECV_B1 1B0", "1RECV_B1 1B0 1G0", "1B0"},
    {1, "1B1 1R0", "1B1 1R0 1R0", "1R0, action 27 of its list, of a unit that is not live"},
    {1, "1B1 1R0", "1R0 1B1", "1B1"},
    {1, "1B1 1R0", "1B1 0R0", "on stage 0, which lies on rank 0"},
    {1, "1B1 1R0", "1B1 1R1", "kind 9, stage 1 of 4, unit 1 of 1"},
    {1, "1G0 1RECV_F0", "1G0 3G0 1RECV_F0", "rank 1 holds 9 elements from 3G0"},
};

static void test_mistakes(void)
{
    struct dsc_pipe_cost costs[4] = {{0}};
    struct dsc_pipe_usage usage[2];
    int64_t makespan;

    TEST_CASE("without mistakes");
    read_lists(some_lists, 2, some_units, 6, 8);
    CHECK_STATUS(dsc_pipe_verify(&changed.table), DSC_OK);
    for (size_t i = 0; i < sizeof mistakes / sizeof *mistakes; i++) {
        const char *texts[2] = {some_lists[0], some_lists[1]};
        const char *at = strstr(texts[mistakes[i].rank], mistakes[i].from);
        char text[2048];

        TEST_CASE("mistake %d: %s becomes %s", (int)i, mistakes[i].from, mistakes[i].to);
        if (!CHECK(at != NULL))
            continue;
        snprintf(text, sizeof text, "%.*s%s%s", (int)(at - texts[mistakes[i].rank]), texts[mistakes[i].rank],
                 mistakes[i].to, at + strlen(mistakes[i].from));
        texts[mistakes[i].rank] = text;
        read_lists(texts, 2, some_units, 6, 8);
        CHECK_ERROR(dsc_pipe_verify(&changed.table), DSC_EINVAL, mistakes[i].says);
        CHECK_ERROR(dsc_pipe_simulate(&changed.table, costs, 0, NULL, usage, &makespan), DSC_EINVAL, mistakes[i].says);
    }
}

/* Each gather and each release of a table is left out, written twice, or exchanged with the computation beside it. */
static void test_every_change(void)
{
    struct dsc_pipe_unit units[8];
    const char *name;

    for (int32_t i = 0; i < 8; i++)
        units[i] = (struct dsc_pipe_unit){i / 2, 1 + i, 0};
    for (int32_t s = 0; (name = dsc_pipe_schedule_name(s)) != NULL; s++) {
        struct dsc_pipe_shape shape = {2, 2, 5};

        if (dsc_pipe_check(name, &shape) != DSC_OK || !make_bare(name, &shape))
            continue;
        CHECK_STATUS(add_gathers(units, 8, 17, 1), DSC_OK);
        changed = full;
        point(&changed);
        for (int32_t rank = 0; rank < 2; rank++)
            for (int64_t i = full.begins[rank]; i < full.begins[rank + 1]; i++) {
                int64_t n_after = full.begins[2] - i - 1;
                int64_t use = i + 1;

                if (!has_unit(&full.actions[i]))
                    continue;
                TEST_CASE("%s, rank %d", name, rank);
                TEST_AT(i - full.begins[rank]);
                memcpy(&changed.actions[i], &full.actions[i + 1], (size_t)n_after * sizeof *changed.actions);
                for (int32_t r = rank + 1; r <= 2; r++)
                    changed.begins[r] = full.begins[r] - 1;
                CHECK_STATUS(dsc_pipe_verify(&changed.table), DSC_EINVAL);
                memcpy(&changed.actions[i + 1], &full.actions[i], (size_t)(n_after + 1) * sizeof *changed.actions);
                changed.actions[i] = full.actions[i];
                for (int32_t r = rank + 1; r <= 2; r++)
                    changed.begins[r] = full.begins[r] + 1;
                CHECK_STATUS(dsc_pipe_verify(&changed.table), DSC_EINVAL);
                memcpy(changed.begins, full.begins, sizeof full.begins);
                memcpy(changed.actions, full.actions, (size_t)full.begins[2] * sizeof *full.actions);
                if (full.actions[i].kind == DSC_PIPE_RELEASE)
                    for (use = i - 1; !computes(&full.actions[use]); use--)
                        continue;
                else
                    while (!computes(&full.actions[use]) || full.actions[use].stage != full.actions[i].stage)
                        use++;
                changed.actions[i] = full.actions[use];
                changed.actions[use] = full.actions[i];
                CHECK_STATUS(dsc_pipe_verify(&changed.table), DSC_EINVAL);
                memcpy(changed.actions, full.actions, (size_t)full.begins[2] * sizeof *full.actions);
                CHECK_STATUS(dsc_pipe_verify(&changed.table), DSC_OK);
            }
    }
}

/* Times by hand: one rank with two stages, gathers of 30 ns, computations of 100. */
static void test_times(void)
{
    static const struct dsc_pipe_unit units[] = {{0, 3, 30}, {0, 2, 30}, {1, 4, 30}};
    static const struct dsc_pipe_cost costs[2] = {{100, 60, 40, 1, 0}, {100, 60, 40, 1, 0}};
    static const char *const late[] = {"0G0 0G1 0F0 0F1 0R0 0R1 1G0 1F0 1B0 1F1 1B1 1R0 0G0 0G1 0B0 0B1 0R0 0R1"};
    static const char *const early[] = {"0G0 0G1 1G0 0F0 0F1 1F0 1B0 1F1 1B1 1R0 0B0 0B1 0R0 0R1"};
    struct dsc_pipe_span spans[32];
    struct dsc_pipe_usage usage[1];
    int64_t makespan = -7;

    TEST_CASE("late");
    read_lists(late, 1, units, 3, 5);
    CHECK_STATUS(dsc_pipe_verify(&changed.table), DSC_OK);
    CHECK_STATUS(dsc_pipe_simulate(&changed.table, costs, 0, spans, usage, &makespan), DSC_OK);
    CHECK_EQ(makespan, 800 + 60 + 30 + 60);
    CHECK_EQ(usage[0].busy_ns, 800);
    CHECK_EQ(usage[0].link_ns, 150);
    CHECK_EQ(usage[0].n_gathers, 5);
    CHECK_EQ(usage[0].gathered_elements, 14);
    CHECK_EQ(usage[0].peak_live_elements, 5);
    CHECK_EQ(spans[0].begin_ns, 0);
    CHECK_EQ(spans[1].begin_ns, 30);
    CHECK_EQ(spans[1].end_ns, 60);
    CHECK_EQ(spans[2].begin_ns, 60);
    CHECK_EQ(spans[4].begin_ns, 260);
    CHECK_EQ(spans[4].end_ns, 260);
    CHECK_EQ(spans[7].begin_ns, 290);
    TEST_CASE("early");
    read_lists(early, 1, units, 3, 9);
    CHECK_STATUS(dsc_pipe_verify(&changed.table), DSC_OK);
    CHECK_STATUS(dsc_pipe_simulate(&changed.table, costs, 0, spans, usage, &makespan), DSC_OK);
    CHECK_EQ(makespan, 800 + 60);
    CHECK_EQ(spans[2].begin_ns, 60);
    CHECK_EQ(spans[2].end_ns, 90);
    CHECK_EQ(spans[3].begin_ns, 60);
    CHECK_EQ(usage[0].peak_live_elements, 9);
}

/*
 * The lists of a schedule in words. Gathers run beside the computation before their use if the limit has room, and
 * beside the wait for a message. Unit 1 of stage 0 fits beside stage 2 and stays.
 */
static void test_words(void)
{
    TEST_CASE("words");
    make_bare("interleaved", &(struct dsc_pipe_shape){2, 2, 2});
    CHECK_STATUS(add_gathers(some_units, 6, 8, 1), DSC_OK);
    for (int32_t rank = 0; rank < 2; rank++) {
        char text[2048] = "";
        size_t n = 0;

        for (int64_t i = full.begins[rank]; i < full.begins[rank + 1]; i++) {
            CHECK_STATUS(dsc_pipe_format(&full.actions[i], sizeof text - n, text + n), DSC_OK);
            n += strlen(text + n);
            text[n++] = ' ';
            text[n] = '\0';
        }
        CHECK_STR(text, some_lists[rank]);
    }
}

static void test_refusals(void)
{
    static const struct dsc_pipe_unit units[] = {{0, 3, 0}, {1, 2, 0}};
    struct dsc_pipe_unit wrong[2];
    int64_t begins[3] = {-7, -7, -7};
    struct dsc_pipe_action actions[64];

    TEST_CASE("refusals");
    make_bare("1f1b", &(struct dsc_pipe_shape){2, 1, 2});
    CHECK_STATUS(add_gathers(units, 2, 3, 1), DSC_OK);
    CHECK_ERROR(dsc_pipe_add_gathers(&full.table, 1, 64, actions, begins), DSC_EINVAL, "gathers or releases: action 0");
    CHECK_ERROR(dsc_pipe_add_comm(&full.table, 64, actions, begins), DSC_EINVAL, "gathers or releases");
    CHECK_ERROR(dsc_pipe_add_gathers(&bare.table, -1, 64, actions, begins), DSC_EINVAL, "ahead is -1");
    memset(actions, 1, sizeof actions);
    CHECK_ERROR(dsc_pipe_add_gathers(&bare.table, 1, 19, actions, begins), DSC_ENOSPC, "room for 19 actions of 20");
    CHECK_EQ(actions[0].kind, 0x01010101);
    CHECK_EQ(begins[0], -7);
    CHECK_STATUS(dsc_pipe_add_gathers(&bare.table, 1, 0, NULL, begins), DSC_OK);
    CHECK_EQ(begins[2], 20);
    CHECK_ERROR(add_gathers(units, 2, 2, 1), DSC_EINVAL, "stage 0 of rank 0 needs 3 live elements, the limit is 2");
    CHECK_ERROR(add_gathers(units, 2, -2, 1), DSC_EINVAL, "limit_elements is -2");
    CHECK_ERROR(add_gathers(NULL, 2, -1, 1), DSC_EINVAL, "units is NULL");
    CHECK_ERROR(add_gathers(units, -1, -1, 1), DSC_EINVAL, "-1 units");
    for (int i = 0; i < 4; i++) {
        wrong[0] = units[i == 0];
        wrong[1] = units[i != 0];
        wrong[1].stage += i == 1;
        wrong[1].numel = i == 2 ? -1 : 2;
        wrong[1].gather_ns = i == 3 ? -1 : 2;
        TEST_CASE("wrong unit %d", i);
        CHECK_ERROR(add_gathers(wrong, 2, -1, 1), DSC_EINVAL, i < 2 ? "unit 1 is of stage" : "unit 0 of stage 1 has");
    }
    TEST_CASE("units that are not gathered");
    bare.table.units = units;
    bare.table.n_units = 2;
    CHECK_ERROR(dsc_pipe_verify(&bare.table), DSC_EINVAL, "0F0");
    bare.table.n_units = 0;
    CHECK_STATUS(dsc_pipe_verify(&bare.table), DSC_OK);
    CHECK_STATUS(add_gathers(NULL, 0, 0, 1), DSC_OK);
    CHECK_EQ(full.begins[2], bare.begins[2]);
}

int main(void)
{
    test_all_limits();
    test_all_stay();
    test_one_stage_stays();
    test_mistakes();
    test_every_change();
    test_times();
    test_words();
    test_refusals();
    return test_finish(__FILE__);
}
