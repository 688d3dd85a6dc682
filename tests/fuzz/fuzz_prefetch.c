/*
 * dsc_prefetch_plan and dsc_fetch: a plan keeps its limits and is as far ahead as they allow; ranks that use other
 * subsequences of it gather the same in the same order; any other use is served too, and a call refused by a runner
 * changes nothing.
 */
#include "fuzz.h"

#include "zero/brute_plan.h"

#define MAX_STEPS 48
#define MAX_UNITS 12
#define MAX_RECORD 256

#define REQUIRE_RULE(call)                                                                     \
    do {                                                                                       \
        const char *wrong = (call);                                                            \
        if (wrong != NULL) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, wrong);              \
            abort();                                                                           \
        }                                                                                      \
    } while (0)

struct storage {
    int32_t steps[MAX_STEPS];
    int64_t unit_elems[MAX_UNITS];
    int64_t scratch[4 * MAX_STEPS + 2 * MAX_UNITS];
    int64_t until[MAX_STEPS];
    int64_t next[MAX_STEPS];
    uint8_t keep[MAX_STEPS];
    struct dsc_fetch_unit units[MAX_UNITS];
    int32_t record_units[MAX_RECORD];
    uint8_t record_is_used[MAX_RECORD];
    struct dsc_fetch_action actions[3 * MAX_STEPS + MAX_UNITS];
    int32_t wanted[2 * MAX_STEPS];
    int32_t gathers[2 * MAX_STEPS + MAX_RECORD];
};

/* Wild numbers: only good numbers give a plan, and it keeps the rules for all sizes. */
static bool plan(struct input *input, struct storage *s, struct brute_plan *p)
{
    struct dsc_prefetch_limits limits = DSC_PREFETCH_LIMITS_INIT;
    bool is_wild = take_byte(input) % 4 == 0;
    int64_t n_steps = take_below(input, MAX_STEPS + 1);
    int32_t n_units = 1 + (int32_t)take_below(input, MAX_UNITS);
    __int128 total = 0;
    bool is_good = true;
    bool has_fit = true;

    for (int32_t u = 0; u < n_units; u++) {
        s->unit_elems[u] = is_wild ? take_wild(input) : take_byte(input);
        is_good = is_good && s->unit_elems[u] >= 0;
        total += s->unit_elems[u];
        has_fit = has_fit && total <= INT64_MAX;
    }
    for (int64_t i = 0; i < n_steps; i++) {
        s->steps[i] = is_wild ? (int32_t)(take_byte(input) % (n_units + 1)) - (take_byte(input) == 255) : take_byte(input) % n_units;
        is_good = is_good && s->steps[i] >= 0 && s->steps[i] < n_units;
    }
    limits.max_live_elems = is_wild ? take_wild(input) : take_below(input, 1500);
    limits.ahead_elems = is_wild ? take_wild(input) : take_below(input, 800);
    limits.max_reuse_elems = is_wild ? take_wild(input) : take_below(input, 800);
    is_good = is_good && has_fit && limits.max_live_elems >= 0 && limits.ahead_elems >= 0 && limits.max_reuse_elems >= 0;
    *p = (struct brute_plan){s->steps, n_steps, s->unit_elems, n_units, limits, s->until, s->next, s->keep, -7};

    dsc_status status = dsc_prefetch_plan(s->steps, n_steps, s->unit_elems, n_units, &limits, s->scratch, s->until, s->next, s->keep,
                                          &p->peak_elems);

    REQUIRE((status == DSC_OK) == is_good);
    REQUIRE(is_good || p->peak_elems == -7);
    if (is_good) {
        REQUIRE_RULE(brute_walk(p));
        REQUIRE_RULE(brute_reuse(p));
    }
    return is_good;
}

static void take(struct brute_book *book, const struct dsc_fetch *fetch, const struct storage *s, int64_t n)
{
    REQUIRE_RULE(brute_book_take(book, fetch, s->actions, n));
}

/* A pass as one rank has it: which steps it uses comes from the input. */
static void run_rank(struct input *input, struct storage *s, const struct brute_plan *p, struct dsc_fetch *fetch, struct dsc_trace *record,
                     const uint8_t *is_live)
{
    const struct dsc_fetch_plan view = {s->steps, s->until, s->next, s->keep, p->n_steps};
    int64_t capacity = 3 * p->n_steps + p->n_units;
    int64_t n_wanted = brute_gathers(p, is_live, s->wanted);
    int32_t keep_unit = (int32_t)take_below(input, p->n_units + 1) - 1;
    struct brute_book book;
    int64_t n = 0;

    REQUIRE(dsc_fetch_begin(fetch, &view, is_live, record) == DSC_OK);
    brute_book_begin(&book, is_live, p->n_units, s->gathers, 2 * MAX_STEPS);
    for (int64_t i = 0; i < p->n_steps; i++)
        if (take_byte(input) % 2 == 0) {
            REQUIRE(dsc_fetch_use(fetch, s->steps[i], capacity, s->actions, &n) == DSC_OK);
            take(&book, fetch, s, n);
            REQUIRE(book.is_live[s->steps[i]]);
        }
    REQUIRE(dsc_fetch_end(fetch, keep_unit, capacity, s->actions, &n) == DSC_OK);
    take(&book, fetch, s, n);
    for (int32_t u = 0; u < p->n_units; u++)
        REQUIRE(!book.is_live[u] || u == keep_unit);
    REQUIRE(fetch->n_unexpected == 0 && record->n_steps == p->n_steps);
    REQUIRE(book.n_gathers == n_wanted && memcmp(s->gathers, s->wanted, (size_t)n_wanted * sizeof *s->wanted) == 0);
    for (int64_t i = 0; i < p->n_steps; i++)
        REQUIRE(record->units[i] == s->steps[i]);
}

/* Anything, until the input ends. */
static void run_wild(struct input *input, struct storage *s, const struct brute_plan *p, struct dsc_fetch *fetch, struct dsc_trace *record)
{
    const struct dsc_fetch_plan view = {s->steps, s->until, s->next, s->keep, p->n_steps};
    int64_t capacity = 3 * p->n_steps + p->n_units;
    uint8_t may_drop[MAX_UNITS] = {0};
    uint8_t scratch[MAX_UNITS];
    struct brute_book book;
    int64_t n = 0;

    REQUIRE(dsc_fetch_begin(fetch, &view, NULL, record) == DSC_OK);
    brute_book_begin(&book, NULL, p->n_units, s->gathers, 2 * MAX_STEPS + MAX_RECORD);
    while (input->n_left > 0) {
        int32_t unit = (int32_t)(take_byte(input) % (p->n_units + 2)) - 1;
        int64_t room = take_byte(input) % 8 == 0 ? take_byte(input) % 8 : capacity;
        dsc_status status = dsc_fetch_use(fetch, unit, room, s->actions, &n);
        bool is_unit = unit >= 0 && unit < p->n_units;

        if (status == DSC_EOVERFLOW)
            break;
        REQUIRE(status == DSC_OK || !is_unit || room < capacity);
        take(&book, fetch, s, status == DSC_OK ? n : 0);
        REQUIRE(status == DSC_OK ? is_unit && book.is_live[unit] : status == DSC_EINVAL);
    }
    /* The record's capacity is the only limit: when it is full, the end is refused and the pass is aborted. */
    if (dsc_fetch_end(fetch, -1, capacity, s->actions, &n) != DSC_OK)
        REQUIRE(dsc_fetch_abort(fetch, capacity, s->actions, &n) == DSC_OK && record->n_steps == 0);
    else
        REQUIRE(record->n_steps == p->n_steps + fetch->n_unexpected);
    take(&book, fetch, s, n);
    REQUIRE(fetch->n_live == 0 && !fetch->is_active);
    REQUIRE(dsc_trace_prune(record, may_drop, p->n_units, scratch) == DSC_OK);
    for (int64_t i = 1; i < record->n_steps; i++)
        REQUIRE(record->units[i] != record->units[i - 1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    static struct storage s;
    uint8_t is_live[MAX_UNITS] = {0};
    struct brute_plan p;
    struct dsc_fetch fetch;
    struct dsc_trace record;

    if (!plan(&input, &s, &p))
        return 0;
    REQUIRE(dsc_fetch_init(&fetch, s.unit_elems, p.n_units, s.units) == DSC_OK);
    REQUIRE(dsc_trace_init(&record, s.record_units, s.record_is_used, MAX_RECORD) == DSC_OK);
    if (take_byte(&input) % 2 == 0)
        for (int32_t u = 0; u < p.n_units; u++)
            is_live[u] = take_byte(&input) % 3 == 0;
    for (int rank = 0; rank < 3; rank++)
        run_rank(&input, &s, &p, &fetch, &record, is_live);
    run_wild(&input, &s, &p, &fetch, &record);
    return 0;
}
