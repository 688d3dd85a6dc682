/* Plans of a server's steps: one list of requests by arrival. The first n_running of them hold blocks. */
#include "dsc/schedule.h"

#include "base/fail.h"
#include "dsc/infer.h"

#include <stdlib.h>

#define NONE (-1)

struct request {
    bool is_live;
    int32_t before; /* in the order of arrival */
    int32_t after;  /* likewise; of a number that is not in use: the next such number */
    int32_t n_held; /* blocks; 0 while it waits */
    int64_t n_known;
    int64_t n_computed;
    int64_t n_planned; /* tokens of its row in the present plan */
    int64_t n_found;
    int64_t most;
};

struct dsc_schedule {
    int32_t n_blocks;
    int32_t most_rows;
    struct request *requests; /* by number */
    int32_t capacity;         /* of requests and, up to most_rows, of the three arrays below */
    int32_t n_numbers;        /* numbers that were ever in use */
    int32_t unused;           /* a list of ended numbers */
    struct dsc_schedule_row *rows;
    int32_t *put_back;
    int32_t *ready;
    int32_t oldest;
    int32_t youngest;
    int32_t next; /* the oldest request that waits */
    int32_t n_live;
    int32_t n_running;
    int32_t n_free;
    int32_t n_full; /* requests that have all their tokens */
    int32_t n_rows; /* rows of the present plan: the oldest requests have them */
    bool is_planned;
    int64_t n_put_back;
};

/* The blocks of n_tokens of a request, which never exceed a pool. */
static int32_t blocks_of(int64_t n_tokens)
{
    return (int32_t)(n_tokens / DSC_KV_TOKENS + (n_tokens % DSC_KV_TOKENS != 0));
}

dsc_status dsc_schedule_open(int32_t n_blocks, int32_t most_rows, struct dsc_schedule **out)
{
    struct dsc_schedule *schedule;

    if (n_blocks < 0)
        return dsc_fail(DSC_EINVAL, "n_blocks is %d, must not be negative", (int)n_blocks);
    if (most_rows < 1)
        return dsc_fail(DSC_EINVAL, "most_rows is %d, must be 1 or more", (int)most_rows);
    schedule = calloc(1, sizeof *schedule);
    if (schedule == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a schedule");
    schedule->n_blocks = schedule->n_free = n_blocks;
    schedule->most_rows = most_rows;
    schedule->unused = schedule->oldest = schedule->youngest = schedule->next = NONE;
    *out = schedule;
    return DSC_OK;
}

void dsc_schedule_close(struct dsc_schedule *schedule)
{
    if (schedule == NULL)
        return;
    free(schedule->requests);
    free(schedule->rows);
    free(schedule->put_back);
    free(schedule->ready);
    free(schedule);
}

void dsc_schedule_count(const struct dsc_schedule *schedule, struct dsc_schedule_counts *out)
{
    *out = (struct dsc_schedule_counts){schedule->n_live - schedule->n_running, schedule->n_running, schedule->n_free,
                                        schedule->n_put_back};
}

/* Makes room for one more number. Arrays that grew before another one could not are only longer than they must be. */
static dsc_status reserve_number(struct dsc_schedule *schedule)
{
    int32_t capacity = schedule->capacity;
    size_t n_rows;
    struct request *requests;
    struct dsc_schedule_row *rows;
    int32_t *put_back;
    int32_t *ready;

    if (schedule->unused != NONE || schedule->n_numbers < capacity)
        return DSC_OK;
    if (capacity == INT32_MAX)
        return dsc_fail(DSC_EOVERFLOW, "there are %d requests, and no number is left", (int)capacity);
    capacity = capacity < 8 ? 8 : capacity > INT32_MAX / 2 ? INT32_MAX : 2 * capacity;
    n_rows = (size_t)(capacity < schedule->most_rows ? capacity : schedule->most_rows);
    if ((requests = realloc(schedule->requests, (size_t)capacity * sizeof *requests)) != NULL)
        schedule->requests = requests;
    if ((rows = realloc(schedule->rows, n_rows * sizeof *rows)) != NULL)
        schedule->rows = rows;
    if ((put_back = realloc(schedule->put_back, n_rows * sizeof *put_back)) != NULL)
        schedule->put_back = put_back;
    if ((ready = realloc(schedule->ready, n_rows * sizeof *ready)) != NULL)
        schedule->ready = ready;
    if (requests == NULL || rows == NULL || put_back == NULL || ready == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for %d requests", (int)capacity);
    schedule->capacity = capacity;
    return DSC_OK;
}

static int32_t take_number(struct dsc_schedule *schedule)
{
    int32_t number = schedule->unused;

    if (number == NONE)
        return schedule->n_numbers++;
    schedule->unused = schedule->requests[number].after;
    return number;
}

dsc_status dsc_schedule_add(struct dsc_schedule *schedule, int64_t n_tokens, int64_t most_tokens, int64_t n_found,
                            int32_t *out_number)
{
    int32_t number;

    if (n_tokens < 1)
        return dsc_fail(DSC_EINVAL, "n_tokens is %lld, must be 1 or more", (long long)n_tokens);
    if (most_tokens <= n_tokens)
        return dsc_fail(DSC_EINVAL, "most_tokens is %lld, must be more than the %lld of n_tokens",
                        (long long)most_tokens, (long long)n_tokens);
    if (n_found < 0 || n_found >= n_tokens)
        return dsc_fail(DSC_EINVAL, "n_found is %lld, must be 0 or more and less than the %lld of n_tokens",
                        (long long)n_found, (long long)n_tokens);
    if (most_tokens - 1 > (int64_t)schedule->n_blocks * DSC_KV_TOKENS)
        return dsc_fail(DSC_ENOSPC, "a request of %lld tokens needs %lld blocks of %d tokens, and there are %d",
                        (long long)most_tokens, (long long)((most_tokens - 2) / DSC_KV_TOKENS + 1), DSC_KV_TOKENS,
                        (int)schedule->n_blocks);
    DSC_TRY(reserve_number(schedule));
    number = take_number(schedule);
    schedule->requests[number] = (struct request){.is_live = true,
                                                  .before = schedule->youngest,
                                                  .after = NONE,
                                                  .n_known = n_tokens,
                                                  .n_found = n_found,
                                                  .most = most_tokens};
    if (schedule->youngest == NONE)
        schedule->oldest = number;
    else
        schedule->requests[schedule->youngest].after = number;
    schedule->youngest = number;
    if (schedule->next == NONE)
        schedule->next = number;
    schedule->n_live++;
    *out_number = number;
    return DSC_OK;
}

static bool is_full(const struct request *request)
{
    return request->n_known == request->most;
}

dsc_status dsc_schedule_end(struct dsc_schedule *schedule, int32_t number)
{
    struct request *request;

    if (number < 0 || number >= schedule->n_numbers || !schedule->requests[number].is_live)
        return dsc_fail(DSC_EINVAL, "number is %d, which is no request of this schedule", (int)number);
    if (schedule->n_rows > 0)
        return dsc_fail(DSC_ESTATE, "request %d cannot end within a step; commit or abort the plan first", (int)number);
    request = &schedule->requests[number];
    if (request->n_held > 0)
        schedule->n_running--;
    schedule->n_free += request->n_held;
    schedule->n_full -= is_full(request);
    if (schedule->next == number)
        schedule->next = request->after;
    if (request->before == NONE)
        schedule->oldest = request->after;
    else
        schedule->requests[request->before].after = request->after;
    if (request->after == NONE)
        schedule->youngest = request->before;
    else
        schedule->requests[request->after].before = request->before;
    schedule->n_live--;
    request->is_live = false;
    request->after = schedule->unused;
    schedule->unused = number;
    return DSC_OK;
}

/* Blocks that the request may take; below 0 where the protected one needs more than there are. */
static int32_t n_available(const struct dsc_schedule *schedule, int32_t number)
{
    const struct request *oldest = &schedule->requests[schedule->oldest];

    if (number == schedule->oldest)
        return schedule->n_free;
    return schedule->n_free - (blocks_of(oldest->most - 1) - oldest->n_held);
}

static void hold(struct dsc_schedule *schedule, struct request *request, int32_t n_blocks)
{
    schedule->n_free -= n_blocks - request->n_held;
    request->n_held = n_blocks;
}

/* The youngest running request goes back. Returns its number. */
static int32_t put_back(struct dsc_schedule *schedule)
{
    int32_t number = schedule->next == NONE ? schedule->youngest : schedule->requests[schedule->next].before;
    struct request *request = &schedule->requests[number];

    hold(schedule, request, 0);
    request->n_computed = request->n_found = 0;
    schedule->next = number;
    schedule->n_running--;
    schedule->n_put_back++;
    return number;
}

/* Gives a running request blocks for all its known tokens. False where it went back itself. */
static bool grow(struct dsc_schedule *schedule, int32_t number, struct dsc_schedule_step *step)
{
    struct request *request = &schedule->requests[number];
    int32_t n_blocks = blocks_of(request->n_known);

    if (n_blocks <= request->n_held)
        return true;
    while (n_blocks - request->n_held > n_available(schedule, number)) {
        int32_t victim = put_back(schedule);

        schedule->put_back[step->n_put_back++] = victim;
        if (victim == number)
            return false;
    }
    hold(schedule, request, n_blocks);
    return true;
}

/* Whether a running request may still take a block that is not reserved for it. */
static bool may_grow(const struct dsc_schedule *schedule, int32_t number)
{
    const struct request *request = &schedule->requests[number];

    return number != schedule->oldest && request->n_held < blocks_of(request->most - 1);
}

/* Lets the next request run, if there is one and its blocks are there, beside one for each of n_growing requests. */
static bool admit(struct dsc_schedule *schedule, int32_t n_growing)
{
    int32_t number = schedule->next;
    struct request *request = number == NONE ? NULL : &schedule->requests[number];
    int32_t n_blocks;

    if (request == NULL || schedule->n_running == schedule->most_rows)
        return false;
    n_blocks = blocks_of(request->n_known + 1 < request->most ? request->n_known + 1 : request->n_known);
    if (n_blocks > n_available(schedule, number) - n_growing)
        return false;
    hold(schedule, request, n_blocks);
    schedule->next = request->after;
    schedule->n_running++;
    return true;
}

/* Adds a row with as many tokens of a running request as the budget allows. Returns the rest of the budget. */
static int64_t add_row(struct dsc_schedule *schedule, int32_t number, int64_t budget, struct dsc_schedule_step *step)
{
    struct request *request = &schedule->requests[number];
    int64_t n_found = request->n_computed == 0 ? request->n_found : 0;
    int64_t n_paid = request->n_known - request->n_computed - n_found;

    n_paid = n_paid < budget ? n_paid : budget;
    request->n_planned = n_found + n_paid;
    schedule->rows[step->n_rows++] = (struct dsc_schedule_row){number, request->n_computed, request->n_planned};
    return budget - n_paid;
}

static int32_t find_full(const struct dsc_schedule *schedule)
{
    int32_t number = schedule->oldest;

    while (!is_full(&schedule->requests[number]))
        number = schedule->requests[number].after;
    return number;
}

dsc_status dsc_schedule_plan(struct dsc_schedule *schedule, int64_t budget, struct dsc_schedule_step *out)
{
    struct dsc_schedule_step step = {0, schedule->rows, 0, schedule->put_back};
    int32_t number = schedule->oldest;
    int32_t n_growing = 0;

    if (budget < 0)
        return dsc_fail(DSC_EINVAL, "budget is %lld, must not be negative", (long long)budget);
    if (schedule->n_rows > 0)
        return dsc_fail(DSC_ESTATE, "the last plan has %d rows; commit or abort it first", (int)schedule->n_rows);
    if (schedule->n_full > 0)
        return dsc_fail(DSC_ESTATE, "request %d has all its tokens; end it first", (int)find_full(schedule));
    while (number != schedule->next && budget > 0 && grow(schedule, number, &step)) {
        n_growing += may_grow(schedule, number);
        budget = add_row(schedule, number, budget, &step);
        number = schedule->requests[number].after;
    }
    /* A request that went back has no row in the same plan. */
    while (budget > 0 && step.n_put_back == 0 && admit(schedule, n_growing)) {
        n_growing += may_grow(schedule, number);
        budget = add_row(schedule, number, budget, &step);
        number = schedule->requests[number].after;
    }
    schedule->n_rows = step.n_rows;
    schedule->is_planned = true;
    *out = step;
    return DSC_OK;
}

static dsc_status check_planned(const struct dsc_schedule *schedule)
{
    if (!schedule->is_planned)
        return dsc_fail(DSC_ESTATE, "there is no plan; make one first");
    return DSC_OK;
}

dsc_status dsc_schedule_commit(struct dsc_schedule *schedule, int32_t *out_n, const int32_t **out_numbers)
{
    int32_t number = schedule->oldest;
    int32_t n = 0;

    DSC_TRY(check_planned(schedule));
    for (int32_t i = 0; i < schedule->n_rows; i++) {
        struct request *request = &schedule->requests[number];

        request->n_computed += request->n_planned;
        if (request->n_computed == request->n_known) {
            request->n_known++;
            schedule->n_full += is_full(request);
            schedule->ready[n++] = number;
        }
        number = request->after;
    }
    schedule->n_rows = 0;
    schedule->is_planned = false;
    *out_n = n;
    *out_numbers = schedule->ready;
    return DSC_OK;
}

dsc_status dsc_schedule_abort(struct dsc_schedule *schedule)
{
    DSC_TRY(check_planned(schedule));
    schedule->n_rows = 0;
    schedule->is_planned = false;
    return DSC_OK;
}
