/* Checks a step, and numbers its transfers: by lane, by axis, and by group. */
#include "base/fail.h"
#include "plan/simulate.h"

#include <stdlib.h>

static const struct {
    const char *name;
    bool has_group;
} ops[] = {
#define OP(name, text, has_group) {text, has_group},
    DSC_PLAN_OP_MAP(OP)
#undef OP
};

bool dsc_plan_has_group(int32_t op)
{
    return ops[op].has_group;
}

const char *dsc_plan_op_name(int32_t op)
{
    return ops[op].name;
}

/* A number of a step and the range that it must lie in. */
struct field {
    const char *name;
    int64_t value;
    int64_t least;
    int64_t most;
};

static dsc_status check_fields(const char *what, int64_t number, const struct field *fields, int n)
{
    for (int i = 0; i < n; i++)
        if (fields[i].value < fields[i].least || fields[i].value > fields[i].most)
            return dsc_fail(DSC_EINVAL, "%s of %s %lld is %lld, must be in [%lld, %lld]", fields[i].name, what,
                            (long long)number, (long long)fields[i].value, (long long)fields[i].least,
                            (long long)fields[i].most);
    return DSC_OK;
}

#define CHECK_FIELDS(what, number, ...)                                     \
    DSC_TRY(check_fields(what, number, (const struct field[]){__VA_ARGS__}, \
                         (int)(sizeof((const struct field[]){__VA_ARGS__}) / sizeof(struct field))))

#define RATE(of, name)                                 \
    {                                                  \
#name, (of)->name, 0, DSC_PLAN_MAX_BYTES_PER_S \
    }
#define LATENCY(of, name)                             \
    {                                                 \
#name, (of)->name, 0, DSC_PLAN_MAX_LATENCY_NS \
    }

static dsc_status check_begins(const char *what, const int64_t *begins, int32_t n)
{
    if (begins == NULL || begins[0] != 0)
        return dsc_fail(DSC_EINVAL, "the begins of %s are missing or do not begin with 0", what);
    for (int32_t i = 0; i < n; i++)
        if (begins[i + 1] < begins[i] || begins[i + 1] > DSC_PLAN_MAX_ACTIONS)
            return dsc_fail(DSC_EINVAL, "%s of list %d begin at %lld and end at %lld", what, (int)i,
                            (long long)begins[i], (long long)begins[i + 1]);
    return DSC_OK;
}

static dsc_status check_counts(const struct dsc_plan_step *step)
{
    if (step == NULL)
        return dsc_fail(DSC_EINVAL, "step is NULL");
    CHECK_FIELDS("step", 0, {"n_ranks", step->n_ranks, 1, DSC_PLAN_MAX_RANKS},
                 {"n_nodes", step->n_nodes, 1, DSC_PLAN_MAX_NODES},
                 {"n_programs", step->n_programs, 1, DSC_PLAN_MAX_RANKS},
                 {"n_groups", step->n_groups, 0, DSC_PLAN_MAX_RANKS * DSC_PLAN_MAX_AXES},
                 {"n_axes", step->n_axes, 0, DSC_PLAN_MAX_AXES}, {"n_lanes", step->n_lanes, 1, DSC_PLAN_MAX_LANES},
                 {"n_shown", step->n_shown, 0, step->n_ranks});
    DSC_TRY(check_begins("actions", step->action_begins, step->n_programs));
    DSC_TRY(check_begins("transfers", step->transfer_begins, step->n_programs));
    DSC_TRY(check_begins("members", step->member_begins, step->n_groups));
    if (step->nodes == NULL || step->ranks == NULL ||
        (step->actions == NULL && step->action_begins[step->n_programs] > 0) ||
        (step->transfers == NULL && step->transfer_begins[step->n_programs] > 0) ||
        (step->members == NULL && step->member_begins[step->n_groups] > 0) ||
        (step->group_of == NULL && step->n_axes > 0) || (step->shown == NULL && step->n_shown > 0))
        return dsc_fail(DSC_EINVAL, "an array of the step is NULL");
    return DSC_OK;
}

static dsc_status check_places(const struct dsc_plan_step *step)
{
    for (int32_t i = 0; i < step->n_nodes; i++) {
        const struct dsc_plan_node *node = &step->nodes[i];

        CHECK_FIELDS("node", i, {"parent", node->parent, i == 0 ? -1 : 0, i - 1}, RATE(node, bytes_per_s),
                     LATENCY(node, latency_ns), RATE(node, inner_bytes_per_s), RATE(node, pull_bytes_per_s),
                     LATENCY(node, pull_latency_ns), RATE(node, read_bytes_per_s), RATE(node, write_bytes_per_s),
                     LATENCY(node, file_latency_ns));
    }
    for (int32_t i = 0; i < step->n_ranks; i++) {
        const struct dsc_plan_rank *rank = &step->ranks[i];

        CHECK_FIELDS("rank", i, {"node", rank->node, 0, step->n_nodes - 1},
                     {"program", rank->program, 0, step->n_programs - 1},
                     {"slow_ppm", rank->slow_ppm, 1, DSC_PLAN_MAX_SLOW_PPM}, RATE(rank, port_bytes_per_s),
                     LATENCY(rank, port_latency_ns), RATE(rank, copy_bytes_per_s));
    }
    for (int32_t i = 0; i < step->n_shown; i++)
        CHECK_FIELDS("entry of shown", i, {"rank", step->shown[i], 0, step->n_ranks - 1});
    return DSC_OK;
}

static dsc_status check_transfer(const struct dsc_plan_step *step, int64_t number,
                                 const struct dsc_plan_transfer *transfer)
{
    CHECK_FIELDS("transfer", number, {"op", transfer->op, 0, DSC_PLAN_N_OPS - 1},
                 {"lane", transfer->lane, 0, step->n_lanes - 1}, {"amount", transfer->amount, 0, DSC_PLAN_MAX_AMOUNT});

    bool may_be_pull = ops[transfer->op].has_group;
    bool may_be_two_levels = transfer->op <= DSC_PLAN_ALL_REDUCE && (transfer->flags & DSC_PLAN_PULL) == 0;

    if (ops[transfer->op].has_group)
        CHECK_FIELDS("transfer", number, {"axis", transfer->axis, 0, step->n_axes - 1});
    if ((transfer->flags & ~((may_be_pull ? DSC_PLAN_PULL : 0) | (may_be_two_levels ? DSC_PLAN_TWO_LEVELS : 0))) != 0)
        return dsc_fail(DSC_EINVAL, "flags of transfer %lld (%s) are %d, which it cannot have", (long long)number,
                        ops[transfer->op].name, (int)transfer->flags);
    return DSC_OK;
}

/* Marks started transfers of the program with 0 in numbers, the others with -1. */
static dsc_status check_program(const struct dsc_plan_step *step, int32_t program, int32_t *numbers)
{
    int64_t begin = step->action_begins[program];
    int64_t n_transfers = step->transfer_begins[program + 1] - step->transfer_begins[program];

    for (int64_t i = 0; i < n_transfers; i++)
        numbers[i] = -1;
    for (int64_t i = begin; i < step->action_begins[program + 1]; i++) {
        const struct dsc_plan_action *action = &step->actions[i];
        bool is_run = action->kind == DSC_PLAN_RUN;

        CHECK_FIELDS(
            "action", i, {"kind", action->kind, 0, DSC_PLAN_N_ACTION_KINDS - 1},
            {is_run ? "amount" : "transfer", action->amount, 0, is_run ? DSC_PLAN_MAX_AMOUNT : n_transfers - 1});
        if (is_run)
            continue;
        if ((numbers[action->amount] >= 0) != (action->kind == DSC_PLAN_WAIT))
            return dsc_fail(DSC_EINVAL, "action %lld of program %d %s transfer %lld, which it has %sstarted",
                            (long long)(i - begin), (int)program,
                            action->kind == DSC_PLAN_WAIT ? "waits for" : "starts", (long long)action->amount,
                            action->kind == DSC_PLAN_WAIT ? "not " : "");
        numbers[action->amount] = 0;
    }
    return DSC_OK;
}

/* The row of a lane or of an axis in its lists, or -1. */
static int64_t row_of(const struct dsc_plan_step *step, int32_t program, const struct dsc_plan_transfer *transfer,
                      bool is_axis)
{
    if (is_axis)
        return ops[transfer->op].has_group ? (int64_t)program * step->n_axes + transfer->axis : -1;
    return (transfer->flags & DSC_PLAN_PULL) != 0 ? -1 : (int64_t)program * step->n_lanes + transfer->lane;
}

/* Sorts the starts of all programs into rows. begins has been zeroed, and has an entry more than there are rows. */
static void sort_starts(const struct dsc_plan_step *step, int64_t n_rows, bool is_axis, int64_t *begins,
                        int32_t *sorted, int32_t *numbers)
{
    for (int filled = 0; filled < 2; filled++) {
        for (int32_t program = 0; program < step->n_programs; program++)
            for (int64_t i = step->action_begins[program]; i < step->action_begins[program + 1]; i++) {
                int64_t transfer = step->transfer_begins[program] + step->actions[i].amount;
                int64_t row = -1;

                if (step->actions[i].kind == DSC_PLAN_START)
                    row = row_of(step, program, &step->transfers[transfer], is_axis);
                if (row < 0)
                    continue;
                if (filled)
                    sorted[begins[row]] = (int32_t)step->actions[i].amount;
                begins[filled ? row : row + 1]++;
            }
        if (!filled)
            for (int64_t row = 0; row < n_rows; row++)
                begins[row + 1] += begins[row];
    }
    for (int64_t row = n_rows; row > 0; row--) /* filling has moved each begin to the next one */
        begins[row] = begins[row - 1];
    begins[0] = 0;
    for (int64_t row = 0; is_axis && row < n_rows; row++)
        for (int64_t i = begins[row]; i < begins[row + 1]; i++)
            numbers[step->transfer_begins[row / step->n_axes] + sorted[i]] = (int32_t)(i - begins[row]);
}

static void index_places(struct plan_index *index)
{
    const struct dsc_plan_step *step = index->step;

    for (int32_t i = 0; i < step->n_nodes; i++) {
        const struct dsc_plan_node *node = &step->nodes[i];

        index->depths[i] = i == 0 ? 0 : index->depths[node->parent] + 1;
        index->read_nodes[i] = node->read_bytes_per_s > 0 ? i : i == 0 ? -1 : index->read_nodes[node->parent];
        index->write_nodes[i] = node->write_bytes_per_s > 0 ? i : i == 0 ? -1 : index->write_nodes[node->parent];
        index->capacities[plan_of_node(step, i, PLAN_LINK_UP)] = node->bytes_per_s;
        index->capacities[plan_of_node(step, i, PLAN_LINK_DOWN)] = node->bytes_per_s;
        index->capacities[plan_of_node(step, i, PLAN_INNER)] = node->inner_bytes_per_s;
        index->capacities[plan_of_node(step, i, PLAN_READ)] = node->read_bytes_per_s;
        index->capacities[plan_of_node(step, i, PLAN_WRITTEN)] = node->write_bytes_per_s;
    }
    for (int32_t i = 0; i < step->n_ranks; i++) {
        index->capacities[plan_of_rank(i, PLAN_PORT_UP)] = step->ranks[i].port_bytes_per_s;
        index->capacities[plan_of_rank(i, PLAN_PORT_DOWN)] = step->ranks[i].port_bytes_per_s;
        index->capacities[plan_of_rank(i, PLAN_COPIED)] = step->ranks[i].copy_bytes_per_s;
    }
}

/* Counts hosts, and finds the lowest node above all ranks. */
static void place_group(struct plan_index *index, struct plan_group *group)
{
    const struct dsc_plan_step *step = index->step;

    group->root = step->ranks[group->members[0]].node;
    for (int32_t i = 0; i < group->n; i++) {
        int32_t node = step->ranks[group->members[i]].node;
        int32_t n = ++index->node_counts[node];

        group->n_hosts += n == 1;
        group->most_on_host = n > group->most_on_host ? n : group->most_on_host;
        while (node != group->root)
            if (index->depths[node] >= index->depths[group->root])
                node = step->nodes[node].parent;
            else
                group->root = step->nodes[group->root].parent;
    }
    for (int32_t i = 0; i < group->n; i++)
        index->node_counts[step->ranks[group->members[i]].node] = 0;
}

/* Reads group_of: each group lies on one axis, and each of its ranks names it there. */
static dsc_status index_groups(struct plan_index *index)
{
    const struct dsc_plan_step *step = index->step;

    for (int32_t i = 0; i < step->n_groups; i++) {
        index->groups[i].axis = -1;
        index->groups[i].members = step->members + step->member_begins[i];
    }
    for (int32_t rank = 0; rank < step->n_ranks; rank++)
        for (int32_t axis = 0; axis < step->n_axes; axis++) {
            int32_t number = step->group_of[(int64_t)rank * step->n_axes + axis];
            struct plan_group *group = &index->groups[number < 0 ? 0 : number];

            if (number < -1 || number >= step->n_groups)
                return dsc_fail(DSC_EINVAL, "the group of rank %d on axis %d is %d of %d groups", (int)rank, (int)axis,
                                (int)number, (int)step->n_groups);
            if (number < 0)
                continue;
            if (group->axis >= 0 && group->axis != axis)
                return dsc_fail(DSC_EINVAL, "group %d is on axes %d and %d", (int)number, (int)group->axis, (int)axis);
            group->axis = axis;
            group->n++; /* until it is compared with its members */
        }
    for (int32_t i = 0; i < step->n_groups; i++) {
        struct plan_group *group = &index->groups[i];
        int64_t n = step->member_begins[i + 1] - step->member_begins[i];

        if (group->n != n || n == 0)
            return dsc_fail(DSC_EINVAL, "group %d has %lld members, and %d ranks name it", (int)i, (long long)n,
                            (int)group->n);
        for (int64_t j = 0; j < n; j++) {
            int32_t rank = group->members[j];

            if (rank < 0 || rank >= step->n_ranks || step->group_of[(int64_t)rank * step->n_axes + group->axis] != i)
                return dsc_fail(DSC_EINVAL, "member %lld of group %d is rank %d, which does not name it", (long long)j,
                                (int)i, (int)rank);
            if (index->rank_marks[rank] == i + 1)
                return dsc_fail(DSC_EINVAL, "rank %d is a member of group %d twice", (int)rank, (int)i);
            index->rank_marks[rank] = i + 1;
        }
        place_group(index, group);
    }
    return DSC_OK;
}

/* Compares the transfers that two ranks of a group start. */
static dsc_status compare(const struct plan_index *index, int32_t number, int32_t first, int32_t second)
{
    const struct dsc_plan_step *step = index->step;
    const struct plan_group *group = &index->groups[number];
    int64_t rows[2] = {(int64_t)step->ranks[first].program * step->n_axes + group->axis,
                       (int64_t)step->ranks[second].program * step->n_axes + group->axis};
    int64_t n[2];

    for (int i = 0; i < 2; i++)
        n[i] = index->axis_begins[rows[i] + 1] - index->axis_begins[rows[i]];
    for (int64_t k = 0; k < n[0] && k < n[1]; k++) {
        const struct dsc_plan_transfer *a = plan_transfer(step, first, plan_kth(index, first, group->axis, k));
        const struct dsc_plan_transfer *b = plan_transfer(step, second, plan_kth(index, second, group->axis, k));

        if (a->op != b->op || a->amount != b->amount || a->flags != b->flags)
            return dsc_fail(DSC_EINVAL,
                            "transfer %lld of group %d is %s of %lld bytes (flags %d) on rank %d, and %s of %lld bytes "
                            "(flags %d) on rank %d",
                            (long long)k, (int)number, ops[a->op].name, (long long)a->amount, (int)a->flags, (int)first,
                            ops[b->op].name, (long long)b->amount, (int)b->flags, (int)second);
    }
    if (n[0] != n[1])
        return dsc_fail(DSC_EINVAL, "rank %d starts %lld transfers of group %d, and rank %d starts %lld", (int)first,
                        (long long)n[0], (int)number, (int)second, (long long)n[1]);
    return DSC_OK;
}

/* Checks that the group can carry out the transfers of its first rank. */
static dsc_status check_group(const struct plan_index *index, int32_t number)
{
    const struct dsc_plan_step *step = index->step;
    const struct plan_group *group = &index->groups[number];
    int32_t first = group->members[0];
    int64_t row = (int64_t)step->ranks[first].program * step->n_axes + group->axis;

    for (int64_t i = index->axis_begins[row]; i < index->axis_begins[row + 1]; i++) {
        const struct dsc_plan_transfer *transfer = plan_transfer(step, first, index->by_axis[i]);

        if (transfer->op == DSC_PLAN_MESSAGE && group->n != 2)
            return dsc_fail(DSC_EINVAL, "rank %d starts a message in group %d of %d ranks, must be 2", (int)first,
                            (int)number, (int)group->n);
        if ((transfer->flags & DSC_PLAN_PULL) != 0 && group->n > 1 && step->nodes[group->root].pull_bytes_per_s == 0)
            return dsc_fail(DSC_EINVAL, "group %d pulls, but pull_bytes_per_s of node %d, above its ranks, is 0",
                            (int)number, (int)group->root);
    }
    return DSC_OK;
}

static dsc_status check_starts(struct plan_index *index)
{
    const struct dsc_plan_step *step = index->step;

    for (int32_t rank = 0; rank < step->n_ranks; rank++) {
        const struct dsc_plan_rank *place = &step->ranks[rank];

        index->first_transfer[rank + 1] = index->first_transfer[rank] + step->transfer_begins[place->program + 1] -
                                          step->transfer_begins[place->program];
        for (int32_t axis = 0; axis < step->n_axes; axis++) {
            int64_t row = (int64_t)place->program * step->n_axes + axis;

            if (index->axis_begins[row + 1] > index->axis_begins[row] &&
                step->group_of[(int64_t)rank * step->n_axes + axis] < 0)
                return dsc_fail(DSC_EINVAL, "rank %d starts a transfer on axis %d, and has no group there", (int)rank,
                                (int)axis);
        }
        for (int32_t lane = 0; lane < step->n_lanes; lane++) {
            int64_t row = (int64_t)place->program * step->n_lanes + lane;

            for (int64_t i = index->lane_begins[row]; i < index->lane_begins[row + 1]; i++) {
                int32_t op = plan_transfer(step, rank, index->by_lane[i])->op;

                if ((op == DSC_PLAN_READ && index->read_nodes[place->node] < 0) ||
                    (op == DSC_PLAN_WRITE && index->write_nodes[place->node] < 0))
                    return dsc_fail(DSC_EINVAL, "rank %d starts a %s, and no node above it has a file for that",
                                    (int)rank, ops[op].name);
            }
        }
    }
    if (index->first_transfer[step->n_ranks] > DSC_PLAN_MAX_ACTIONS)
        return dsc_fail(DSC_EINVAL, "the ranks have %lld transfers, the most is %lld",
                        (long long)index->first_transfer[step->n_ranks], (long long)DSC_PLAN_MAX_ACTIONS);
    for (int32_t i = 0; i < step->n_groups; i++) {
        struct plan_group *group = &index->groups[i];
        int32_t first = group->members[0];
        int64_t row = (int64_t)step->ranks[first].program * step->n_axes + group->axis;

        for (int32_t j = 1; j < group->n; j++)
            if (step->ranks[group->members[j]].program != step->ranks[group->members[j - 1]].program)
                DSC_TRY(compare(index, i, first, group->members[j]));
        DSC_TRY(check_group(index, i));
        group->first_instance = index->n_instances;
        index->n_instances += index->axis_begins[row + 1] - index->axis_begins[row];
    }
    return DSC_OK;
}

static void *zeros(int64_t n, size_t bytes)
{
    return calloc((size_t)n + 1, bytes);
}

dsc_status dsc_plan_make_index(const struct dsc_plan_step *step, struct plan_index *out)
{
    DSC_TRY(check_counts(step));
    DSC_TRY(check_places(step));

    int64_t n_transfers = step->transfer_begins[step->n_programs];
    int64_t n_lane_rows = (int64_t)step->n_programs * step->n_lanes;
    int64_t n_axis_rows = (int64_t)step->n_programs * step->n_axes;

    out->step = step;
    out->groups = zeros(step->n_groups, sizeof *out->groups);
    out->capacities = zeros(plan_n_resources(step), sizeof *out->capacities);
    out->depths = zeros(step->n_nodes, sizeof *out->depths);
    out->read_nodes = zeros(step->n_nodes, sizeof *out->read_nodes);
    out->write_nodes = zeros(step->n_nodes, sizeof *out->write_nodes);
    out->node_counts = zeros(step->n_nodes, sizeof *out->node_counts);
    out->rank_marks = zeros(step->n_ranks, sizeof *out->rank_marks);
    out->first_transfer = zeros(step->n_ranks, sizeof *out->first_transfer);
    out->numbers = zeros(n_transfers, sizeof *out->numbers);
    out->by_lane = zeros(n_transfers, sizeof *out->by_lane);
    out->by_axis = zeros(n_transfers, sizeof *out->by_axis);
    out->lane_begins = zeros(n_lane_rows, sizeof *out->lane_begins);
    out->axis_begins = zeros(n_axis_rows, sizeof *out->axis_begins);
    if (out->groups == NULL || out->capacities == NULL || out->depths == NULL || out->read_nodes == NULL ||
        out->write_nodes == NULL || out->node_counts == NULL || out->rank_marks == NULL ||
        out->first_transfer == NULL || out->numbers == NULL || out->by_lane == NULL || out->by_axis == NULL ||
        out->lane_begins == NULL || out->axis_begins == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for the index of %d ranks and %lld transfers", (int)step->n_ranks,
                        (long long)n_transfers);
    for (int64_t i = 0; i < n_transfers; i++)
        DSC_TRY(check_transfer(step, i, &step->transfers[i]));
    for (int32_t i = 0; i < step->n_programs; i++)
        DSC_TRY(check_program(step, i, out->numbers + step->transfer_begins[i]));
    sort_starts(step, n_lane_rows, false, out->lane_begins, out->by_lane, out->numbers);
    sort_starts(step, n_axis_rows, true, out->axis_begins, out->by_axis, out->numbers);
    index_places(out);
    DSC_TRY(index_groups(out));
    return check_starts(out);
}

void dsc_plan_clear_index(struct plan_index *index)
{
    for (int32_t i = 0; index->groups != NULL && i < index->step->n_groups; i++)
        for (int shape = 0; shape < PLAN_N_SHAPES; shape++)
            free(index->groups[i].routes[shape].loads);
    free(index->groups);
    free(index->capacities);
    free(index->depths);
    free(index->read_nodes);
    free(index->write_nodes);
    free(index->node_counts);
    free(index->rank_marks);
    free(index->first_transfer);
    free(index->numbers);
    free(index->by_lane);
    free(index->by_axis);
    free(index->lane_begins);
    free(index->axis_begins);
}
