/* Rates of flows that share links: max-min fair between streams, by filling up one link after the other. */
#include "base/fail.h"
#include "plan/simulate.h"

#include <stdlib.h>

dsc_status dsc_plan_open_sharing(const int64_t *capacities, int32_t n_links, struct plan_sharing *out)
{
    out->capacities = capacities;
    out->n_links = n_links;
    out->links = calloc((size_t)n_links, sizeof *out->links);
    out->touched = calloc((size_t)n_links, sizeof *out->touched);
    out->mark = 1;
    if (out->links == NULL || out->touched == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %d links", (int)n_links);
    return DSC_OK;
}

void dsc_plan_close_sharing(struct plan_sharing *sharing)
{
    for (int32_t i = 0; sharing->links != NULL && i < sharing->n_links; i++)
        free(sharing->links[i].flows);
    free(sharing->links);
    free(sharing->flows);
    free(sharing->free_flows);
    free(sharing->touched);
    free(sharing->concerned);
}

static dsc_status grow(struct plan_sharing *sharing)
{
    int32_t capacity = sharing->capacity == 0 ? 64 : 2 * sharing->capacity;
    struct plan_flow *flows = realloc(sharing->flows, (size_t)capacity * sizeof *flows);
    int32_t *free_flows = realloc(sharing->free_flows, (size_t)capacity * sizeof *free_flows);
    int32_t *concerned = realloc(sharing->concerned, (size_t)capacity * sizeof *concerned);

    sharing->flows = flows != NULL ? flows : sharing->flows;
    sharing->free_flows = free_flows != NULL ? free_flows : sharing->free_flows;
    sharing->concerned = concerned != NULL ? concerned : sharing->concerned;
    if (flows == NULL || free_flows == NULL || concerned == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %d flows", (int)capacity);
    sharing->capacity = capacity;
    return DSC_OK;
}

dsc_status dsc_plan_take_flow(struct plan_sharing *sharing, int32_t *out_flow)
{
    if (sharing->n_free > 0) {
        *out_flow = sharing->free_flows[--sharing->n_free];
        return DSC_OK;
    }
    if (sharing->n_flows == sharing->capacity)
        DSC_TRY(grow(sharing));
    *out_flow = sharing->n_flows++;
    sharing->flows[*out_flow] = (struct plan_flow){.work = 0};
    return DSC_OK;
}

void dsc_plan_drop_flow(struct plan_sharing *sharing, int32_t flow)
{
    sharing->free_flows[sharing->n_free++] = flow;
}

static void touch(struct plan_sharing *sharing, int32_t link)
{
    if (sharing->links[link].mark == sharing->mark)
        return;
    sharing->links[link].mark = sharing->mark;
    sharing->touched[sharing->n_touched++] = link;
}

static dsc_status add_to_link(struct plan_link *link, int32_t flow)
{
    if (link->n_flows == link->capacity) {
        int32_t capacity = link->capacity == 0 ? 4 : 2 * link->capacity;
        int32_t *flows = realloc(link->flows, (size_t)capacity * sizeof *flows);

        if (flows == NULL)
            return dsc_fail(DSC_ENOMEM, "no memory for %d flows on a link", (int)capacity);
        link->flows = flows;
        link->capacity = capacity;
    }
    link->flows[link->n_flows++] = flow;
    return DSC_OK;
}

dsc_status dsc_plan_join(struct plan_sharing *sharing, int32_t flow, const struct plan_load *loads, int32_t n_loads,
                         __int128 work, int64_t now_ns)
{
    struct plan_flow *joined = &sharing->flows[flow];

    joined->loads = loads;
    joined->n_loads = n_loads;
    joined->work = work;
    joined->rate = 0;
    joined->since_ns = now_ns;
    joined->mark = 0;
    for (int32_t i = 0; i < n_loads; i++) {
        DSC_TRY(add_to_link(&sharing->links[loads[i].resource], flow));
        touch(sharing, loads[i].resource);
    }
    return DSC_OK;
}

void dsc_plan_leave(struct plan_sharing *sharing, int32_t flow)
{
    struct plan_flow *left = &sharing->flows[flow];

    left->version++;
    for (int32_t i = 0; i < left->n_loads; i++) {
        struct plan_link *link = &sharing->links[left->loads[i].resource];
        int32_t at = 0;

        while (link->flows[at] != flow)
            at++;
        link->flows[at] = link->flows[--link->n_flows];
        touch(sharing, left->loads[i].resource);
    }
}

/* Collects the flows on touched links, the other links of these flows, their other flows, and so on. */
static void spread(struct plan_sharing *sharing)
{
    sharing->n_concerned = 0;
    for (int32_t i = 0; i < sharing->n_touched; i++) {
        struct plan_link *link = &sharing->links[sharing->touched[i]];

        link->parts = 0;
        link->is_changed = false;
        link->left = (__int128)sharing->capacities[sharing->touched[i]] * PLAN_RATE_UNITS * PLAN_STREAM;
        for (int32_t j = 0; j < link->n_flows; j++) {
            struct plan_flow *flow = &sharing->flows[link->flows[j]];

            if (flow->mark == sharing->mark)
                continue;
            flow->mark = sharing->mark;
            flow->is_fixed = false;
            sharing->concerned[sharing->n_concerned++] = link->flows[j];
            for (int32_t k = 0; k < flow->n_loads; k++)
                touch(sharing, flow->loads[k].resource);
        }
    }
    for (int32_t i = 0; i < sharing->n_concerned; i++) {
        const struct plan_flow *flow = &sharing->flows[sharing->concerned[i]];

        for (int32_t k = 0; k < flow->n_loads; k++)
            sharing->links[flow->loads[k].resource].parts += flow->loads[k].parts;
    }
}

/* Computes the shares of links that have changed, forgets those without flows, and returns the least share. */
static __int128 least_share(struct plan_sharing *sharing, bool is_first)
{
    const struct plan_link *last = NULL; /* equal links follow one another: most divisions are repeated */
    __int128 least = -1;
    int32_t n = 0;

    for (int32_t i = 0; i < sharing->n_touched; i++) {
        struct plan_link *link = &sharing->links[sharing->touched[i]];

        if (link->parts == 0)
            continue;
        sharing->touched[n++] = sharing->touched[i];
        if (is_first || link->is_changed) {
            if (last != NULL && last->left == link->left && last->parts == link->parts) {
                link->share = last->share;
            } else {
                link->share = link->left / link->parts;
                link->share = link->share < 1 ? 1 : link->share;
            }
            link->is_changed = false;
            last = link;
        }
        if (least < 0 || link->share < least)
            least = link->share;
    }
    sharing->n_touched = n;
    return least;
}

static void fix(struct plan_sharing *sharing, struct plan_flow *flow, __int128 rate, int64_t now_ns)
{
    flow->is_fixed = true;
    for (int32_t k = 0; k < flow->n_loads; k++) {
        struct plan_link *link = &sharing->links[flow->loads[k].resource];

        link->left -= rate * flow->loads[k].parts;
        link->parts -= flow->loads[k].parts;
        link->is_changed = true;
    }
    if (flow->rate == rate)
        return;
    flow->work -= flow->rate * (now_ns - flow->since_ns);
    flow->since_ns = now_ns;
    flow->rate = rate;
    flow->version++;
    flow->mark = 0; /* tells that the rate is another */
}

void dsc_plan_share(struct plan_sharing *sharing, int64_t now_ns)
{
    __int128 rate;
    int32_t n_changed = 0;

    if (sharing->n_touched == 0) {
        sharing->n_concerned = 0;
        return;
    }
    spread(sharing);
    for (bool is_first = true; (rate = least_share(sharing, is_first)) >= 0; is_first = false)
        for (int32_t i = 0; i < sharing->n_touched; i++) {
            const struct plan_link *link = &sharing->links[sharing->touched[i]];

            if (link->share != rate)
                continue;
            for (int32_t j = 0; link->parts > 0 && j < link->n_flows; j++)
                if (!sharing->flows[link->flows[j]].is_fixed)
                    fix(sharing, &sharing->flows[link->flows[j]], rate, now_ns);
        }
    for (int32_t i = 0; i < sharing->n_concerned; i++)
        if (sharing->flows[sharing->concerned[i]].mark == 0)
            sharing->concerned[n_changed++] = sharing->concerned[i];
    sharing->n_concerned = n_changed;
    sharing->n_touched = 0;
    if (sharing->mark == INT32_MAX) {
        for (int32_t i = 0; i < sharing->n_links; i++)
            sharing->links[i].mark = 0;
        for (int32_t i = 0; i < sharing->n_flows; i++)
            sharing->flows[i].mark = 0;
        sharing->mark = 0;
    }
    sharing->mark++;
}
