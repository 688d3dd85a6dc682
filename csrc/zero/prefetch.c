/*
 * Makes a plan from a trace, sizes and limits: when each step's unit is gathered, and whether it stays live until its
 * next use.
 *
 * The units to keep are chosen first, as if nothing were gathered ahead. If memory is short, the unit with the farthest
 * next use leaves (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966). No two units have
 * their next use at the same step, so all ranks make the same choice.
 */
#include "dsc/fetch.h"

#include "base/fail.h"

/* The state of a unit while the plan is walked. */
enum { NOT_LIVE, LIVE, LIVE_AHEAD /* gathered, and not used yet */ };

/* out_keep while the units to keep are chosen: EVICTED units may be taken back. */
enum { RELEASED, KEPT, EVICTED };

/* Sums over prefixes of positions (a Fenwick tree). sums has n + 1 entries. */
static void add_at(int64_t *sums, int64_t n, int64_t position, int64_t elems)
{
    for (int64_t i = position + 1; i <= n; i += i & -i)
        sums[i] += elems;
}

static int64_t sum_below(const int64_t *sums, int64_t position)
{
    int64_t sum = 0;

    for (int64_t i = position; i > 0; i -= i & -i)
        sum += sums[i];
    return sum;
}

/*
 * Fills next, and sets keep to KEPT where the reuse distance allows keeping the unit until its next use. The walk marks
 * the last use so far of each unit with the unit's elements. So the sum of the marks between two uses of a unit counts
 * each unit used in between exactly once. sums: n_steps + 1 entries; last: n_units entries.
 */
static void find_reuse(const int32_t *steps, int64_t n_steps, const int64_t *unit_elems, int32_t n_units,
                       int64_t max_reuse_elems, int64_t *sums, int64_t *last, int64_t *next, uint8_t *keep)
{
    for (int64_t i = 0; i <= n_steps; i++)
        sums[i] = 0;
    for (int32_t u = 0; u < n_units; u++)
        last[u] = -1;
    for (int64_t i = 0; i < n_steps; i++) {
        int64_t elems = unit_elems[steps[i]];
        int64_t previous = last[steps[i]];

        next[i] = n_steps;
        keep[i] = RELEASED;
        last[steps[i]] = i;
        if (previous >= 0) {
            next[previous] = i;
            keep[previous] = sum_below(sums, i) - sum_below(sums, previous + 1) <= max_reuse_elems ? KEPT : RELEASED;
            add_at(sums, n_steps, previous, -elems);
        }
        add_at(sums, n_steps, i, elems);
    }
}

/*
 * The fewest elements that each step needs: its own unit, and the units that are kept across it. Stored as a segment
 * tree of maxima with addition to ranges: a node holds the maximum of its range, without the additions to its
 * ancestors. So one addition suffices for a whole range. Leaf i of n_leaves (a power of two) is node n_leaves + i.
 */
struct floor {
    int64_t *nodes; /* 2 * n_leaves */
    int64_t n_leaves;
};

static int64_t max_of(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static struct floor floor_of(const int32_t *steps, int64_t n_steps, const int64_t *unit_elems, int64_t *nodes)
{
    struct floor floor = {.nodes = nodes, .n_leaves = 1};

    while (floor.n_leaves < n_steps)
        floor.n_leaves *= 2;
    for (int64_t i = 0; i < floor.n_leaves; i++)
        nodes[floor.n_leaves + i] = i < n_steps ? unit_elems[steps[i]] : 0;
    for (int64_t i = floor.n_leaves - 1; i > 0; i--)
        nodes[i] = max_of(nodes[2 * i], nodes[2 * i + 1]);
    return floor;
}

/* The maximum over the node's steps, [low, low + n), within [begin, end); 0 for none. */
static int64_t floor_max(const struct floor *floor, int64_t node, int64_t low, int64_t n, int64_t begin, int64_t end)
{
    if (end <= low || low + n <= begin)
        return 0;
    if (begin <= low && low + n <= end)
        return floor->nodes[node];

    int64_t added = floor->nodes[node] - max_of(floor->nodes[2 * node], floor->nodes[2 * node + 1]);

    return added + max_of(floor_max(floor, 2 * node, low, n / 2, begin, end),
                          floor_max(floor, 2 * node + 1, low + n / 2, n / 2, begin, end));
}

static void floor_add(struct floor *floor, int64_t node, int64_t low, int64_t n, int64_t begin, int64_t end,
                      int64_t elems)
{
    if (end <= low || low + n <= begin)
        return;
    if (begin <= low && low + n <= end) {
        floor->nodes[node] += elems;
        return;
    }

    int64_t added = floor->nodes[node] - max_of(floor->nodes[2 * node], floor->nodes[2 * node + 1]);

    floor_add(floor, 2 * node, low, n / 2, begin, end, elems);
    floor_add(floor, 2 * node + 1, low + n / 2, n / 2, begin, end, elems);
    floor->nodes[node] = added + max_of(floor->nodes[2 * node], floor->nodes[2 * node + 1]);
}

/* Steps with kept units, as a binary heap: the farthest next use is first. */
static void push_kept(int64_t *heap, int64_t *n_heap, const int64_t *next, int64_t step)
{
    int64_t i = (*n_heap)++;

    for (; i > 0 && next[heap[(i - 1) / 2]] < next[step]; i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = step;
}

static int64_t pop_farthest(int64_t *heap, int64_t *n_heap, const int64_t *next)
{
    int64_t farthest = heap[0];
    int64_t step = heap[--*n_heap];
    int64_t i = 0;

    for (int64_t child = 1; child < *n_heap; child = 2 * i + 1) {
        if (child + 1 < *n_heap && next[heap[child + 1]] > next[heap[child]])
            child++;
        if (next[heap[child]] <= next[step])
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = step;
    return farthest;
}

/*
 * Sets keep from KEPT to EVICTED until the units kept across each step, and its own unit, fit into max_live_elems. A
 * unit whose time is over stays in the heap, behind all that are still kept. heap: n_steps entries; last: n_units.
 */
static void evict_farthest(const int32_t *steps, int64_t n_steps, const int64_t *unit_elems, int32_t n_units,
                           int64_t max_live_elems, const int64_t *next, int64_t *heap, int64_t *last, uint8_t *keep)
{
    int64_t kept_elems = 0; /* of units kept across step i */
    int64_t n_heap = 0;

    for (int32_t u = 0; u < n_units; u++)
        last[u] = -1;
    for (int64_t i = 0; i < n_steps; i++) {
        int64_t elems = unit_elems[steps[i]];
        int64_t previous = last[steps[i]];

        if (previous >= 0 && previous < i - 1 && keep[previous] == KEPT)
            kept_elems -= elems;
        if (i > 0 && keep[i - 1] == KEPT && next[i - 1] > i) {
            kept_elems += unit_elems[steps[i - 1]];
            push_kept(heap, &n_heap, next, i - 1);
        }
        while (kept_elems > max_live_elems - elems && n_heap > 0 && next[heap[0]] > i) {
            int64_t farthest = pop_farthest(heap, &n_heap, next);

            keep[farthest] = EVICTED;
            kept_elems -= unit_elems[steps[farthest]];
        }
        last[steps[i]] = i;
    }
}

/* Keeps evicted units, from left to right, where there is room for them after all. There is none if sizes are equal. */
static void fill_room(const int32_t *steps, int64_t n_steps, const int64_t *unit_elems, int64_t max_live_elems,
                      const int64_t *next, int64_t *nodes, uint8_t *keep)
{
    struct floor floor = floor_of(steps, n_steps, unit_elems, nodes);

    for (int64_t i = 0; i < n_steps; i++)
        if (keep[i] == KEPT)
            floor_add(&floor, 1, 0, floor.n_leaves, i + 1, next[i], unit_elems[steps[i]]);
    for (int64_t i = 0; i < n_steps; i++) {
        int64_t elems = unit_elems[steps[i]];

        if (keep[i] != EVICTED)
            continue;
        keep[i] = RELEASED;
        if (elems <= max_live_elems - floor_max(&floor, 1, 0, floor.n_leaves, i + 1, next[i])) {
            keep[i] = KEPT;
            floor_add(&floor, 1, 0, floor.n_leaves, i + 1, next[i], elems);
        }
    }
}

static dsc_status check_plan_args(const int32_t *steps, int64_t n_steps, const int64_t *unit_elems, int32_t n_units,
                                  const struct dsc_prefetch_limits *limits, const int64_t *scratch)
{
    int64_t total = 0;

    if (n_steps < 0 || n_units < 0)
        return dsc_fail(DSC_EINVAL, "n_steps is %lld and n_units is %d, neither may be negative", (long long)n_steps,
                        (int)n_units);
    if (steps == NULL && n_steps > 0)
        return dsc_fail(DSC_EINVAL, "steps is NULL for %lld steps", (long long)n_steps);
    if (unit_elems == NULL && n_units > 0)
        return dsc_fail(DSC_EINVAL, "unit_elems is NULL for %d units", (int)n_units);
    if (scratch == NULL && (n_steps > 0 || n_units > 0))
        return dsc_fail(DSC_EINVAL, "scratch is NULL for %lld steps and %d units", (long long)n_steps, (int)n_units);
    if (limits == NULL)
        return dsc_fail(DSC_EINVAL, "limits is NULL");
    if (limits->size != sizeof *limits)
        return dsc_fail(DSC_EINVAL, "limits.size is %u, this library expects %u; start from DSC_PREFETCH_LIMITS_INIT",
                        (unsigned)limits->size, (unsigned)sizeof *limits);
    if (limits->max_live_elems < 0 || limits->ahead_elems < 0 || limits->max_reuse_elems < 0)
        return dsc_fail(
            DSC_EINVAL, "max_live_elems is %lld, ahead_elems %lld and max_reuse_elems %lld; none may be negative",
            (long long)limits->max_live_elems, (long long)limits->ahead_elems, (long long)limits->max_reuse_elems);
    for (int32_t u = 0; u < n_units; u++) {
        if (unit_elems[u] < 0)
            return dsc_fail(DSC_EINVAL, "unit_elems[%d] is %lld, must not be negative", (int)u,
                            (long long)unit_elems[u]);
        if (__builtin_add_overflow(total, unit_elems[u], &total))
            return dsc_fail(DSC_EOVERFLOW, "the elements of units 0 to %d together do not fit int64_t", (int)u);
    }
    for (int64_t i = 0; i < n_steps; i++)
        if (steps[i] < 0 || steps[i] >= n_units)
            return dsc_fail(DSC_EINVAL, "steps[%lld] is %d, must be 0 to %d", (long long)i, (int)steps[i],
                            (int)n_units - 1);
    return DSC_OK;
}

/*
 * Why no limit is broken later: a unit that is live at a step was live at the previous step, or its gather is issued at
 * this step. Every gather is checked when it is issued, except the gather of the step itself. That gather is issued at
 * its own step only if nothing has been gathered ahead, so the only live units are then the units kept across the step.
 * It is enough that these units and the step's own unit fit, and the choice of units to keep sees to this. Sums of
 * distinct units fit int64_t, since the sum of all does.
 *
 * Why no unit is gathered more often than if nothing were gathered ahead: a gather ahead is for a unit that is not live
 * and is not used before that step, so the step needs a gather in any case. It takes memory that is free, and the units
 * to keep stay.
 */
dsc_status dsc_prefetch_plan(const int32_t *steps, int64_t n_steps, const int64_t *unit_elems, int32_t n_units,
                             const struct dsc_prefetch_limits *limits, int64_t *scratch, int64_t *out_until,
                             int64_t *out_next, uint8_t *out_keep, int64_t *out_peak_elems)
{
    DSC_TRY(check_plan_args(steps, n_steps, unit_elems, n_units, limits, scratch));
    if (out_peak_elems == NULL)
        return dsc_fail(DSC_EINVAL, "out_peak_elems is NULL");
    if (n_steps > 0 && (out_until == NULL || out_next == NULL || out_keep == NULL))
        return dsc_fail(DSC_EINVAL, "an output array is NULL for %lld steps", (long long)n_steps);
    *out_peak_elems = 0;
    if (n_steps == 0)
        return DSC_OK;

    int64_t *states = scratch;
    int64_t *last = scratch + n_units;
    int64_t *rest = scratch + 2 * (int64_t)n_units; /* the sums, the heap and the tree, one after another: the tree has
                                                       2 * n_leaves < 4 * n_steps entries */

    find_reuse(steps, n_steps, unit_elems, n_units, limits->max_reuse_elems, rest, last, out_next, out_keep);
    evict_farthest(steps, n_steps, unit_elems, n_units, limits->max_live_elems, out_next, rest, last, out_keep);
    fill_room(steps, n_steps, unit_elems, limits->max_live_elems, out_next, rest, out_keep);

    int64_t live_elems = 0;
    int64_t ahead_elems = 0;
    int64_t issued = 0;

    for (int32_t u = 0; u < n_units; u++)
        states[u] = NOT_LIVE;
    for (int64_t i = 0; i < n_steps; i++) {
        int32_t own = steps[i];

        if (issued == i) {
            issued++;
            if (states[own] == NOT_LIVE)
                live_elems += unit_elems[own];
        } else if (states[own] == LIVE_AHEAD) {
            ahead_elems -= unit_elems[own];
        }
        states[own] = LIVE;
        for (; issued < n_steps; issued++) {
            int32_t unit = steps[issued];

            if (states[unit] != NOT_LIVE)
                continue;
            if (unit_elems[unit] > limits->ahead_elems - ahead_elems ||
                unit_elems[unit] > limits->max_live_elems - live_elems)
                break;
            states[unit] = LIVE_AHEAD;
            ahead_elems += unit_elems[unit];
            live_elems += unit_elems[unit];
        }
        out_until[i] = issued;
        *out_peak_elems = max_of(*out_peak_elems, live_elems);

        if (out_next[i] < issued)
            out_keep[i] = KEPT;
        if (out_keep[i] == RELEASED) {
            states[own] = NOT_LIVE;
            live_elems -= unit_elems[own];
        }
    }
    return DSC_OK;
}
