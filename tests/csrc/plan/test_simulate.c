/* The time of collectives by closed formulas, of flows that share links by hand, and steps that wait for ever. */
#include "world.h"

#include <time.h>

static struct world world;

/* The makespan of one transfer of all ranks, alone. */
static int64_t alone(struct world *w, int32_t op, int32_t flags, int64_t n_bytes)
{
    w->step.n_programs = 0;
    w->action_begins[0] = w->transfer_begins[0] = 0;
    add_program(w);
    transfer(w, op, 0, 0, flags, n_bytes);
    CHECK_STATUS(simulate(w), DSC_OK);
    return w->times.makespan_ns;
}

/* One host: ports are all there is. */
static void test_one_host(void)
{
    static const int32_t sizes[] = {1, 2, 3, 7, 8, 64, 1024};
    const int64_t rate = 50 * GB;

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        int32_t n = sizes[i];
        int64_t n_bytes = (int64_t)n * 1000003;
        int64_t ring = n_bytes / n * (n - 1);
        int64_t latency = 2 * 300; /* two ports */

        TEST_CASE("one host of %d", (int)n);
        clear_world(&world);
        add_hosts(&world, 1, n, rate, 300, 0, 0);
        add_group(&world, 0, 0, 1, n);
        CHECK_EQ(alone(&world, DSC_PLAN_ALL_GATHER, 0, n_bytes), (n - 1) * latency + ceil_of((__int128)ring * GB, rate));
        CHECK_EQ(world.usage[0].up_bytes, ring);
        CHECK_EQ(world.usage[n - 1].down_bytes, ring);
        CHECK_EQ(world.traffic[1].inner_bytes, n * ring);
        CHECK_EQ(world.traffic[1].up_bytes, 0);
        CHECK_EQ(world.exposed_ns[0], world.times.makespan_ns);
        CHECK_EQ(world.usage[0].waited_ns, world.times.makespan_ns);
        CHECK_EQ(alone(&world, DSC_PLAN_REDUCE_SCATTER, 0, n_bytes), (n - 1) * latency + ceil_of((__int128)ring * GB, rate));
        CHECK_EQ(alone(&world, DSC_PLAN_ALL_REDUCE, 0, n_bytes), 2 * (n - 1) * latency + ceil_of((__int128)2 * ring * GB, rate));
        /* n - 1 streams share each port */
        CHECK_NEAR((double)alone(&world, DSC_PLAN_ALL_TO_ALL, 0, n_bytes), (double)(n == 1 ? 0 : latency + ceil_of((__int128)ring * GB, rate)), 64.0, 1.0);
        CHECK_EQ(alone(&world, DSC_PLAN_BROADCAST, 0, n_bytes), n == 1 ? 0 : (n - 1) * latency + ceil_of((__int128)n_bytes * GB, rate));
        CHECK_EQ(world.usage[0].down_bytes, 0);
        CHECK_EQ(world.usage[0].up_bytes, n == 1 ? 0 : n_bytes);
        CHECK_EQ(alone(&world, DSC_PLAN_ALL_REDUCE, 0, 0), 2 * (n - 1) * latency);
    }
}

/* Ranks in the order of hosts: one stream leaves each host; in the worst order, all. */
static void test_order_of_a_ring(void)
{
    const int64_t n_bytes = 64 * 1000000;
    const int64_t ring = n_bytes / 16 * 15;

    TEST_CASE("order of a ring");
    clear_world(&world);
    add_hosts(&world, 2, 8, 50 * GB, 100, 10 * GB, 1000);
    add_group(&world, 0, 0, 1, 16);
    CHECK_EQ(alone(&world, DSC_PLAN_ALL_GATHER, 0, n_bytes), 15 * 2200 + ring / 10);
    CHECK_EQ(world.traffic[1].up_bytes, ring);
    CHECK_EQ(world.traffic[2].down_bytes, ring);
    CHECK_EQ(world.traffic[0].inner_bytes, 2 * ring);
    CHECK_EQ(world.traffic[1].inner_bytes, 7 * ring);
    for (int32_t i = 0; i < 16; i++) /* every neighbour is on the other host */
        world.members[i] = i / 2 + i % 2 * 8;
    CHECK_EQ(alone(&world, DSC_PLAN_ALL_GATHER, 0, n_bytes), 15 * 2200 + 8 * ring / 10);
    CHECK_EQ(world.traffic[1].up_bytes, 8 * ring);
    CHECK_EQ(world.traffic[1].inner_bytes, 0);
}

/* Hosts in racks: bytes that turn around at a node share its inner rate. */
static void test_inner_rate(void)
{
    const int64_t n_bytes = 8 * 1000000;
    const int64_t ring = n_bytes / 8 * 7;

    TEST_CASE("inner rate");
    clear_world(&world);
    add_hosts(&world, 1, 8, 50 * GB, 100, 0, 0);
    add_group(&world, 0, 0, 1, 8);
    world.nodes[1].inner_bytes_per_s = 80 * GB;
    CHECK_EQ(alone(&world, DSC_PLAN_REDUCE_SCATTER, 0, n_bytes), 7 * 200 + 8 * ring / 80);
    world.nodes[1].inner_bytes_per_s = 0;
    world.ranks[3].port_bytes_per_s = 1 * GB; /* one slow port */
    CHECK_EQ(alone(&world, DSC_PLAN_REDUCE_SCATTER, 0, n_bytes), 7 * 200 + ring);
    for (int32_t i = 0; i < 8; i++)
        world.ranks[i].port_bytes_per_s = 0; /* no limit anywhere: only latency */
    CHECK_EQ(alone(&world, DSC_PLAN_REDUCE_SCATTER, 0, n_bytes), 7 * 200);
    CHECK_EQ(world.usage[5].up_bytes, ring);
}

/* All pairs, one by one, against the counted streams: bytes on every link, and the longest way. */
static void test_all_to_all_by_pairs(void)
{
    uint64_t state = 5;

    for (int round = 0; round < 50; round++) {
        static int64_t up[MAX_WORLD_NODES];
        static int64_t down[MAX_WORLD_NODES];
        static int64_t inner[MAX_WORLD_NODES];
        int64_t longest = 0;
        int32_t n_nodes = (int32_t)(1 + test_below(&state, 9));
        int32_t n = (int32_t)(2 + test_below(&state, 17));
        int64_t slice = 1 + test_below(&state, 1000);

        TEST_CASE("all-to-all by pairs, round %d", round);
        clear_world(&world);
        for (int32_t i = 0; i < n_nodes; i++)
            add_node(&world, i == 0 ? -1 : (int32_t)test_below(&state, i), 0, test_below(&state, 100));
        for (int32_t i = 0; i < n; i++)
            add_rank(&world, (int32_t)test_below(&state, n_nodes), 0, 0, test_below(&state, 100));
        add_group(&world, 0, 0, 1, n);
        memset(up, 0, sizeof up);
        memset(down, 0, sizeof down);
        memset(inner, 0, sizeof inner);
        for (int32_t a = 0; a < n; a++)
            for (int32_t b = 0; b < n; b++) {
                bool is_above_a[MAX_WORLD_NODES] = {false};
                int64_t ns = world.ranks[a].port_latency_ns + world.ranks[b].port_latency_ns;
                int32_t top = world.ranks[b].node;

                if (a == b)
                    continue;
                for (int32_t v = world.ranks[a].node; v >= 0; v = world.nodes[v].parent)
                    is_above_a[v] = true;
                for (; !is_above_a[top]; top = world.nodes[top].parent) {
                    down[top] += slice;
                    ns += world.nodes[top].latency_ns;
                }
                for (int32_t v = world.ranks[a].node; v != top; v = world.nodes[v].parent) {
                    up[v] += slice;
                    ns += world.nodes[v].latency_ns;
                }
                inner[top] += slice;
                longest = ns > longest ? ns : longest;
            }
        CHECK_EQ(alone(&world, DSC_PLAN_ALL_TO_ALL, 0, slice * n), longest);
        for (int32_t i = 0; i < n_nodes; i++) {
            TEST_AT(i);
            CHECK_EQ(world.traffic[i].up_bytes, up[i]);
            CHECK_EQ(world.traffic[i].down_bytes, down[i]);
            CHECK_EQ(world.traffic[i].inner_bytes, inner[i]);
        }
    }
}

static int64_t flows_ns(int64_t n_bytes, int64_t parts, int64_t rate)
{
    return ceil_of((__int128)n_bytes * parts * GB, rate);
}

/* H hosts with k ranks each: rings inside, and each rank's slice to each other host. */
static void test_two_levels(void)
{
    for (int32_t hosts = 1; hosts <= 5; hosts++)
        for (int32_t k = 1; k <= 8; k++) {
            int32_t n = hosts * k;
            int64_t slice = 5040 * 100;
            int64_t inside_bytes = slice * n / k * (k - 1);
            int64_t inside = (k - 1) * 200 + flows_ns(inside_bytes, 1, 40 * GB);
            int64_t crossing = flows_ns(slice, (int64_t)k * (hosts - 1), 5 * GB);
            int64_t between = 2200 + crossing;
            bool has_two = hosts > 1 && k > 1;
            int64_t ring = (n - 1) * (hosts > 1 ? 2200 : 200) + flows_ns(slice * (n - 1), 1, hosts > 1 ? 5 * GB : 40 * GB);

            TEST_CASE("two levels: %d hosts of %d", (int)hosts, (int)k);
            clear_world(&world);
            add_hosts(&world, hosts, k, 40 * GB, 100, 5 * GB, 1000);
            add_group(&world, 0, 0, 1, n);
            if (n == 1)
                ring = 0;
            CHECK_NEAR((double)alone(&world, DSC_PLAN_ALL_GATHER, DSC_PLAN_TWO_LEVELS, slice * n), (double)(has_two ? inside + between : ring), 2.0, 1e7);
            if (has_two) {
                CHECK_EQ(world.traffic[1].up_bytes, slice * k * (hosts - 1));
                CHECK_EQ(world.traffic[1].down_bytes, slice * k * (hosts - 1));
                CHECK_EQ(world.traffic[0].inner_bytes, slice * n * (hosts - 1));
                CHECK_EQ(world.traffic[1].inner_bytes, k * inside_bytes);
                CHECK_EQ(world.usage[0].up_bytes, inside_bytes + slice * (hosts - 1));
            }
            CHECK_NEAR((double)alone(&world, DSC_PLAN_REDUCE_SCATTER, DSC_PLAN_TWO_LEVELS, slice * n), (double)(has_two ? inside + between : ring), 2.0, 1e7);
            if (has_two)
                CHECK_NEAR((double)alone(&world, DSC_PLAN_ALL_REDUCE, DSC_PLAN_TWO_LEVELS, slice * n), (double)(2 * (inside + between)), 2.0, 1e7);
        }
}

/* Hosts of 4 and 2 ranks: a host sends the slices that the other host needs, in equal parts. */
static void test_unequal_hosts(void)
{
    const int64_t slice = 1000000;

    TEST_CASE("unequal hosts");
    clear_world(&world);
    add_node(&world, -1, 0, 0);
    add_node(&world, 0, 4 * GB, 0);
    add_node(&world, 0, 4 * GB, 0);
    for (int32_t i = 0; i < 6; i++)
        add_rank(&world, i < 4 ? 1 : 2, 0, 8 * GB, 0);
    add_group(&world, 0, 0, 1, 6);
    /* Inside, the host of 4 moves 6 * 3 / 4 slices a port, the host of 2 moves 6 / 2. Between, the link of the host of 4
     * carries 4 slices to 2 ranks. */
    CHECK_EQ(alone(&world, DSC_PLAN_ALL_GATHER, DSC_PLAN_TWO_LEVELS, 6 * slice), 4 * slice / 4 + 6 * slice * 3 / 4 / 8);
    CHECK_EQ(world.traffic[1].up_bytes, 4 * slice);
    CHECK_EQ(world.traffic[2].up_bytes, 2 * slice);
    CHECK_EQ(world.usage[0].up_bytes, slice + 6 * slice * 3 / 4);
    CHECK_EQ(world.usage[0].down_bytes, slice / 2 + 6 * slice * 3 / 4);
    CHECK_EQ(world.usage[5].down_bytes, 2 * slice + 6 * slice / 2);
    CHECK_EQ(alone(&world, DSC_PLAN_REDUCE_SCATTER, DSC_PLAN_TWO_LEVELS, 6 * slice), 4 * slice / 4 + 6 * slice * 3 / 4 / 8);
    CHECK_EQ(world.traffic[1].up_bytes, 2 * slice);
    CHECK_EQ(world.traffic[2].up_bytes, 4 * slice);
    CHECK_EQ(world.usage[0].up_bytes, slice / 2 + 6 * slice * 3 / 4);
    CHECK_EQ(world.usage[5].up_bytes, 2 * slice + 6 * slice / 2);
}

/*
 * Two messages share the link of a host until the shorter one ends; a third, with a slow port, leaves the rest of its
 * share to them.
 */
static void test_sharing(void)
{
    TEST_CASE("sharing");
    clear_world(&world);
    add_node(&world, -1, 0, 0);
    add_node(&world, 0, 10 * GB, 0);
    add_node(&world, 0, 0, 0);
    for (int32_t i = 0; i < 6; i++)
        add_rank(&world, i < 3 ? 1 : 2, i % 3, 0, 0);
    for (int32_t i = 0; i < 3; i++) {
        add_program(&world);
        transfer(&world, DSC_PLAN_MESSAGE, 0, 0, 0, (i + 1) * 10000000);
        add_group(&world, 0, i, 3, 2);
    }
    world.step.n_shown = 3;
    for (int32_t i = 0; i < 3; i++)
        world.shown[i] = i;
    world.ranks[2].port_bytes_per_s = 1 * GB; /* 30 MB: 30 ms, 1 GB/s is taken from the link meanwhile */
    CHECK_STATUS(simulate(&world), DSC_OK);
    /* 4.5 GB/s each: 10 MB in 2,222,223 ns. Then 9 GB/s for the other 10 MB of the second. */
    CHECK_NEAR((double)world.transfer_spans[0].end_ns, 2222222.3, 1.0, 16777216.0);
    CHECK_NEAR((double)world.transfer_spans[1].end_ns, 3333333.4, 1.0, 16777216.0);
    CHECK_EQ(world.transfer_spans[2].end_ns, 30000000);
    CHECK_EQ(world.transfer_spans[2].begin_ns, 0);
    CHECK_EQ(world.traffic[1].up_bytes, 60000000);
    CHECK_EQ(world.times.makespan_ns, 30000000);
}

/* Lanes: in order within one, beside each other otherwise; copies share the rank's rate, files the node's. */
static void test_lanes(void)
{
    int64_t first;
    int64_t second;

    TEST_CASE("lanes");
    clear_world(&world);
    add_hosts(&world, 1, 2, GB, 0, 0, 0);
    world.nodes[0].read_bytes_per_s = GB;
    world.nodes[1].write_bytes_per_s = GB;
    world.nodes[0].file_latency_ns = 70;
    world.ranks[0].copy_bytes_per_s = world.ranks[1].copy_bytes_per_s = GB;
    world.step.n_shown = 1;
    add_program(&world);
    first = begin(&world, DSC_PLAN_WORK, 0, 0, 0, 500);
    second = begin(&world, DSC_PLAN_WORK, 0, 0, 0, 300);
    begin(&world, DSC_PLAN_COPY, 0, 1, 0, 400);
    begin(&world, DSC_PLAN_COPY, 0, 2, 0, 200);
    begin(&world, DSC_PLAN_READ, 0, 3, 0, 1000);
    begin(&world, DSC_PLAN_WRITE, 0, 3, 0, 1000);
    act(&world, DSC_PLAN_RUN, 100);
    act(&world, DSC_PLAN_WAIT, second);
    act(&world, DSC_PLAN_WAIT, first);
    CHECK_STATUS(simulate(&world), DSC_OK);
    CHECK_EQ(world.transfer_spans[first].end_ns, 500);
    CHECK_EQ(world.transfer_spans[second].begin_ns, 500);
    CHECK_EQ(world.transfer_spans[second].end_ns, 800);
    CHECK_EQ(world.transfer_spans[2].end_ns, 600);
    CHECK_EQ(world.transfer_spans[3].end_ns, 400); /* 200 bytes at half the rate */
    CHECK_EQ(world.transfer_spans[4].end_ns, 2070); /* both ranks read */
    CHECK_EQ(world.transfer_spans[5].end_ns, 4070);
    CHECK_EQ(world.exposed_ns[second], 700);
    CHECK_EQ(world.exposed_ns[first], 0);
    CHECK_EQ(world.usage[0].end_ns, 800);
    CHECK_EQ(world.usage[0].busy_ns, 100);
    CHECK_EQ(world.usage[0].copied_bytes, 600);
    CHECK_EQ(world.traffic[0].read_bytes, 2000);
    CHECK_EQ(world.traffic[1].written_bytes, 2000);
    CHECK_EQ(world.times.makespan_ns, 4070);
}

/* A slow rank holds up the group; the others wait as long as it runs longer. */
static void test_slow_rank(void)
{
    TEST_CASE("slow rank");
    clear_world(&world);
    add_hosts(&world, 1, 4, GB, 0, 0, 0);
    add_group(&world, 0, 0, 1, 4);
    world.ranks[2].slow_ppm = 1500000;
    add_program(&world);
    act(&world, DSC_PLAN_RUN, 1001);
    transfer(&world, DSC_PLAN_ALL_REDUCE, 0, 0, 0, 4000);
    CHECK_STATUS(simulate(&world), DSC_OK);
    CHECK_EQ(world.usage[2].busy_ns, 1502); /* 1501.5, rounded up */
    CHECK_EQ(world.times.makespan_ns, 1502 + 6000);
    CHECK_EQ(world.usage[0].waited_ns, 501 + 6000);
    CHECK_EQ(world.usage[2].waited_ns, 6000);
}

/* A pull is done by each rank, inside its wait, after the last start. */
static void test_pulls(void)
{
    TEST_CASE("pulls");
    clear_world(&world);
    add_hosts(&world, 1, 3, GB, 0, 0, 0);
    world.nodes[1].pull_bytes_per_s = 2 * GB;
    world.nodes[1].pull_latency_ns = 50;
    add_group(&world, 0, 0, 1, 3);
    for (int32_t i = 0; i < 3; i++) {
        int64_t pull;

        world.ranks[i].program = i;
        add_program(&world);
        act(&world, DSC_PLAN_RUN, 100 * i);
        pull = begin(&world, DSC_PLAN_ALL_GATHER, 0, 0, DSC_PLAN_PULL, 3000);
        act(&world, DSC_PLAN_RUN, 150);
        act(&world, DSC_PLAN_WAIT, pull);
        act(&world, DSC_PLAN_WAIT, pull);
    }
    CHECK_STATUS(simulate(&world), DSC_OK);
    CHECK_EQ(world.usage[0].end_ns, 200 + 50 + 1000);
    CHECK_EQ(world.usage[1].end_ns, 250 + 50 + 1000);
    CHECK_EQ(world.usage[2].end_ns, 350 + 50 + 1000);
    CHECK_EQ(world.exposed_ns[0], 50 + 50 + 1000);
    CHECK_EQ(world.exposed_ns[2], 50 + 1000);
    CHECK_EQ(world.traffic[1].inner_bytes, 6000);
    CHECK_EQ(world.usage[0].up_bytes, 0);
}

static void test_messages(void)
{
    TEST_CASE("messages");
    for (int flags = 0; flags <= DSC_PLAN_PULL; flags++) {
        int64_t message;

        clear_world(&world);
        add_hosts(&world, 1, 2, GB, 20, 0, 0);
        world.nodes[1].pull_bytes_per_s = GB;
        add_group(&world, 0, 1, -1, 2); /* rank 1 sends to rank 0 */
        world.ranks[1].program = 1;
        add_program(&world);
        act(&world, DSC_PLAN_RUN, 700); /* the sender is earlier: a flow is there already */
        transfer(&world, DSC_PLAN_MESSAGE, 0, 0, flags, 500);
        transfer(&world, DSC_PLAN_MESSAGE, 0, 0, flags, 500);
        add_program(&world);
        message = begin(&world, DSC_PLAN_MESSAGE, 0, 0, flags, 500);
        act(&world, DSC_PLAN_WAIT, message);
        act(&world, DSC_PLAN_RUN, 300);
        transfer(&world, DSC_PLAN_MESSAGE, 0, 0, flags, 500);
        CHECK_STATUS(simulate(&world), DSC_OK);
        CHECK_EQ(world.usage[1].end_ns, flags == 0 ? 540 + 300 + 540 : 300);
        CHECK_EQ(world.usage[0].end_ns, flags == 0 ? 1380 : 700 + 500 + 500);
        CHECK_EQ(world.exposed_ns[0], flags == 0 ? 0 : 500);
    }
}

static void test_deadlocks(void)
{
    int64_t first;
    int64_t second;

    TEST_CASE("deadlocks");
    clear_world(&world);
    add_hosts(&world, 1, 2, GB, 0, 0, 0);
    add_group(&world, 0, 0, 1, 2);
    add_group(&world, 1, 0, 1, 2);
    world.ranks[1].program = 1;
    add_program(&world);
    transfer(&world, DSC_PLAN_ALL_REDUCE, 0, 0, 0, 8);
    transfer(&world, DSC_PLAN_ALL_GATHER, 1, 0, 0, 8);
    add_program(&world);
    transfer(&world, DSC_PLAN_ALL_GATHER, 1, 0, 0, 8);
    transfer(&world, DSC_PLAN_ALL_REDUCE, 0, 0, 0, 8);
    CHECK_ERROR(simulate(&world), DSC_EINVAL, "rank 0 waits for ever at action 1, for transfer 0 (all-reduce): rank 1 has not started it");
    CHECK_EQ(world.times.makespan_ns, -1);

    world.step.n_programs = 0;
    world.action_begins[0] = world.transfer_begins[0] = 0;
    for (int32_t i = 0; i < 2; i++) {
        add_program(&world);
        first = begin(&world, i == 0 ? DSC_PLAN_ALL_REDUCE : DSC_PLAN_ALL_GATHER, i, 0, 0, 8);
        second = begin(&world, i == 0 ? DSC_PLAN_ALL_GATHER : DSC_PLAN_ALL_REDUCE, 1 - i, 0, 0, 8);
        if (i == 0) {
            act(&world, DSC_PLAN_WAIT, second);
            act(&world, DSC_PLAN_WAIT, first);
        }
    }
    CHECK_ERROR(simulate(&world), DSC_EINVAL, "rank 0 waits for ever at action 2, for transfer 1 (all-gather): transfer 0 is before it on lane 0");
    world.action_begins[2] -= 2; /* without the waits of program 0, the same two never begin */
    world.actions[2] = world.actions[4];
    world.actions[3] = world.actions[5];
    world.action_begins[1] -= 2;
    CHECK_ERROR(simulate(&world), DSC_EINVAL, "transfer 0 (all-reduce) of rank 0 never begins: rank 1 has other transfers before it on its lane");
}

static void fill_refused(void)
{
    clear_world(&world);
    add_hosts(&world, 1, 3, GB, 0, 0, 0);
    add_group(&world, 0, 0, 1, 3);
    world.ranks[2].program = 1;
    for (int32_t i = 0; i < 2; i++) {
        add_program(&world);
        transfer(&world, DSC_PLAN_ALL_REDUCE, 0, 0, 0, 8);
    }
}

static void test_refused(void)
{
    TEST_CASE("refused");
#define REFUSED(change, status, word) (fill_refused(), (change), CHECK_ERROR(simulate(&world), status, word))
    REFUSED(world.transfers[1].amount = 16, DSC_EINVAL, "transfer 0 of group 0 is all-reduce of 8 bytes (flags 0) on rank 0, and all-reduce of 16 bytes (flags 0) on rank 2");
    REFUSED(world.transfers[1].op = DSC_PLAN_ALL_GATHER, DSC_EINVAL, "all-gather of 8 bytes");
    REFUSED(world.step.n_ranks = 2, DSC_EINVAL, "group 0 has 3 members, and 2 ranks name it");
    REFUSED(world.members[2] = 0, DSC_EINVAL, "rank 0 is a member of group 0 twice");
    REFUSED(world.group_of[0] = -1, DSC_EINVAL, "group 0 has 3 members, and 2");
    REFUSED(world.group_of[1] = 0, DSC_EINVAL, "group 0 is on axes 0 and 1");
    REFUSED(world.group_of[0] = 1, DSC_EINVAL, "group of rank 0 on axis 0 is 1 of 1");
    REFUSED(world.transfers[0].axis = 1, DSC_EINVAL, "rank 0 starts a transfer on axis 1, and has no group there");
    REFUSED(world.transfers[0].axis = 4, DSC_EINVAL, "axis of transfer 0 is 4, must be in [0, 3]");
    REFUSED(world.transfers[0].lane = 4, DSC_EINVAL, "lane of transfer 0 is 4");
    REFUSED(world.transfers[0].flags = DSC_PLAN_PULL | DSC_PLAN_TWO_LEVELS, DSC_EINVAL, "flags of transfer 0 (all-reduce) are 3");
    REFUSED((world.transfers[0].flags = world.transfers[1].flags = DSC_PLAN_PULL), DSC_EINVAL, "pull_bytes_per_s of node 1");
    REFUSED((world.transfers[0].op = world.transfers[1].op = DSC_PLAN_MESSAGE), DSC_EINVAL, "rank 0 starts a message in group 0 of 3 ranks");
    REFUSED(world.transfers[0].op = DSC_PLAN_READ, DSC_EINVAL, "rank 0 starts a read, and no node");
    REFUSED(world.actions[0].kind = DSC_PLAN_WAIT, DSC_EINVAL, "action 0 of program 0 waits for transfer 0, which it has not started");
    REFUSED(world.actions[1].kind = DSC_PLAN_START, DSC_EINVAL, "action 1 of program 0 starts transfer 0, which it has started");
    REFUSED(world.actions[3].amount = 1, DSC_EINVAL, "transfer of action 3 is 1, must be in [0, 0]");
    REFUSED(world.actions[3].kind = 3, DSC_EINVAL, "kind of action 3 is 3");
    REFUSED(world.nodes[1].parent = 1, DSC_EINVAL, "parent of node 1 is 1, must be in [0, 0]");
    REFUSED(world.nodes[0].parent = 0, DSC_EINVAL, "parent of node 0 is 0");
    REFUSED(world.ranks[1].slow_ppm = 0, DSC_EINVAL, "slow_ppm of rank 1 is 0");
    REFUSED(world.ranks[1].port_bytes_per_s = -1, DSC_EINVAL, "port_bytes_per_s of rank 1 is -1");
    REFUSED(world.step.n_lanes = 0, DSC_EINVAL, "n_lanes of step 0 is 0");
    REFUSED((world.step.n_shown = 2), DSC_EINVAL, "rank 0 is shown twice");
    REFUSED((world.step.nodes = NULL), DSC_EINVAL, "NULL");
    REFUSED((world.actions[0] = (struct dsc_plan_action){DSC_PLAN_RUN, DSC_PLAN_MAX_AMOUNT},
             world.actions[1] = (struct dsc_plan_action){DSC_PLAN_RUN, DSC_PLAN_MAX_AMOUNT},
             world.actions[2] = world.actions[0], world.actions[3] = world.actions[0],
             world.ranks[0].slow_ppm = world.ranks[2].slow_ppm = DSC_PLAN_MAX_SLOW_PPM, world.ranks[1].slow_ppm = DSC_PLAN_MAX_SLOW_PPM),
            DSC_OK, "");
    REFUSED((world.transfers[0].amount = world.transfers[1].amount = DSC_PLAN_MAX_AMOUNT, world.ranks[0].port_bytes_per_s = 1), DSC_EOVERFLOW, "the step takes more than");
    CHECK_STATUS(dsc_plan_simulate(NULL, &world.times), DSC_EINVAL);
    CHECK_STATUS(dsc_plan_simulate(&world.step, NULL), DSC_EINVAL);
}

/*
 * Random steps of collectives alone: a rank that is slower in its computations never ends the step earlier, and twice
 * the bytes at twice the rates take the same time.
 */
static void test_slower_and_scaled(void)
{
    uint64_t state = 11;

    for (int round = 0; round < 200; round++) {
        int32_t hosts = (int32_t)(1 + test_below(&state, 4));
        int32_t k = (int32_t)(1 + test_below(&state, 5));
        int64_t n_bytes = 1;
        int64_t makespan_ns;

        TEST_CASE("slower and scaled, round %d", round);
        clear_world(&world);
        for (int32_t i = 2; i <= hosts * k; i++) /* every part is a whole number of bytes */
            n_bytes = n_bytes % i == 0 ? n_bytes : n_bytes * i;
        add_hosts(&world, hosts, k, (1 + test_below(&state, 50)) * GB, test_below(&state, 500), (1 + test_below(&state, 50)) * GB,
                  test_below(&state, 5000));
        for (int32_t i = 0; i < hosts; i++)
            add_group(&world, 0, i * k, 1, k);
        for (int32_t i = 0; i < k; i++)
            add_group(&world, 1, i, k, hosts);
        add_program(&world);
        for (int i = 0; i < 12; i++) {
            act(&world, DSC_PLAN_RUN, test_below(&state, 3000));
            transfer(&world, (int32_t)test_below(&state, DSC_PLAN_BROADCAST + 1), i % 2, 0, 0, n_bytes * (1 + test_below(&state, 1 + 100000 / n_bytes)) % DSC_PLAN_MAX_AMOUNT);
        }
        CHECK_STATUS(simulate(&world), DSC_OK);
        makespan_ns = world.times.makespan_ns;
        for (int64_t i = 0; i < world.transfer_begins[1]; i++)
            world.transfers[i].amount *= 2;
        for (int32_t i = 0; i < world.step.n_ranks; i++)
            world.ranks[i].port_bytes_per_s *= 2;
        for (int32_t i = 0; i < world.step.n_nodes; i++)
            world.nodes[i].bytes_per_s *= 2;
        CHECK_STATUS(simulate(&world), DSC_OK);
        /* Rates are rounded down to 1/4096 byte/s: both times may be later by a ns for each transfer. */
        test_report(llabs(world.times.makespan_ns - makespan_ns) <= 24, __FILE__, __LINE__, "%" PRId64 " ns and %" PRId64 " ns",
                    world.times.makespan_ns, makespan_ns);
        makespan_ns = world.times.makespan_ns;
        world.ranks[test_below(&state, hosts * k)].slow_ppm = 1000000 + test_below(&state, 2000000);
        CHECK_STATUS(simulate(&world), DSC_OK);
        test_report(world.times.makespan_ns >= makespan_ns, __FILE__, __LINE__, "slower: %" PRId64 " ns, before: %" PRId64 " ns",
                    world.times.makespan_ns, makespan_ns);
    }
}

/* 128 hosts of 8: n_rounds of a gather inside hosts, a sum over all ranks, and a sum between equal ranks of hosts. */
static void fill_large(int32_t n_rounds)
{
    int64_t inside = 0;
    int64_t between = 0;

    clear_world(&world);
    add_hosts(&world, 128, 8, 400 * GB, 1000, 400 * GB, 2000);
    for (int32_t i = 0; i < 128; i++)
        add_group(&world, 0, 8 * i, 1, 8);
    for (int32_t i = 0; i < 8; i++)
        add_group(&world, 1, i, 8, 128);
    add_group(&world, 2, 0, 1, 1024);
    add_program(&world);
    for (int32_t i = 0; i < n_rounds; i++) {
        inside = begin(&world, DSC_PLAN_ALL_GATHER, 0, 0, 0, 64 * 1000000);
        between = begin(&world, DSC_PLAN_REDUCE_SCATTER, 1, 1, 0, 16 * 1000000);
        for (int32_t j = 0; j < 4; j++)
            act(&world, DSC_PLAN_RUN, 100000);
        act(&world, DSC_PLAN_WAIT, inside);
        transfer(&world, DSC_PLAN_ALL_REDUCE, 2, 2, 0, 4 * 1024 * 1000);
        act(&world, DSC_PLAN_RUN, 1000);
    }
    act(&world, DSC_PLAN_WAIT, between);
}

static void test_large(void)
{
    int64_t makespan_ns;
    clock_t begun = clock();

    TEST_CASE("1,024 ranks");
    fill_large(200);
    CHECK_STATUS(simulate(&world), DSC_OK);
    makespan_ns = world.times.makespan_ns;
    printf("1,024 ranks, %d transfers each: %.3f s\n", 600, (double)(clock() - begun) / CLOCKS_PER_SEC);
    for (int32_t i = 1; i < 1024; i++)
        CHECK_EQ(world.usage[i].end_ns, world.usage[0].end_ns);
    CHECK_EQ(world.usage[77].up_bytes, 200 * (INT64_C(56000000) + 16000000 / 128 * 127 + INT64_C(2) * 4000 * 1023));
    CHECK_EQ(world.usage[77].busy_ns, 200 * 401000);
    world.ranks[500].slow_ppm = 1100000;
    begun = clock();
    CHECK_STATUS(simulate(&world), DSC_OK);
    printf("one of them slow: %.3f s\n", (double)(clock() - begun) / CLOCKS_PER_SEC);
    CHECK(world.times.makespan_ns > makespan_ns);
}

int main(void)
{
    test_one_host();
    test_order_of_a_ring();
    test_inner_rate();
    test_all_to_all_by_pairs();
    test_two_levels();
    test_unequal_hosts();
    test_sharing();
    test_lanes();
    test_slow_rank();
    test_pulls();
    test_messages();
    test_deadlocks();
    test_refused();
    test_slower_and_scaled();
    test_large();
    clear_world(&world);
    return test_finish(__FILE__);
}
