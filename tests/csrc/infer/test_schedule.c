/* infer/schedule.c against a naive model that counts everything anew at each step, and against a pool of blocks. */
#include "test.h"

#include "dsc/infer.h"
#include "dsc/schedule.h"

#include <limits.h>

#define MAX_LIVE 64
#define MAX_TOKENS (64 * DSC_KV_TOKENS)

struct model_request {
    int32_t number;
    bool is_running;
    int64_t n_known;
    int64_t n_computed;
    int64_t n_found;
    int64_t most;
    int64_t n_reserved; /* in tokens: it holds their blocks */
    int64_t n_planned;
    int64_t deadline; /* of n_steps: it has ended before */
    int32_t sequence; /* in the pool */
};

struct model {
    struct dsc_schedule *schedule;
    struct dsc_kv_pool *pool;
    int32_t n_blocks;
    int32_t most_rows;
    int64_t budget;                          /* of a step, at least */
    struct model_request requests[MAX_LIVE]; /* by arrival */
    int32_t n;
    int64_t n_put_back;
    int64_t n_steps; /* committed */
    int64_t n_ended;
    int64_t n_cancelled;
    int64_t n_aborted;
};

static int64_t blocks_of(int64_t n_tokens)
{
    return (n_tokens + DSC_KV_TOKENS - 1) / DSC_KV_TOKENS;
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t held_by_all(const struct model *model)
{
    int64_t n_held = 0;

    for (int32_t i = 0; i < model->n; i++)
        n_held += model->requests[i].is_running ? blocks_of(model->requests[i].n_reserved) : 0;
    return n_held;
}

static int32_t n_running(const struct model *model)
{
    int32_t n = 0;

    for (int32_t i = 0; i < model->n; i++)
        n += model->requests[i].is_running;
    return n;
}

/* Whether request i may hold blocks for so many tokens: all blocks that are held stay held, and the first request's are
 * reserved to its end. */
static bool may_hold(const struct model *model, int32_t i, int64_t n_tokens)
{
    int64_t n_used = held_by_all(model);
    const struct model_request *first = &model->requests[0];

    n_used += blocks_of(n_tokens) - (model->requests[i].is_running ? blocks_of(model->requests[i].n_reserved) : 0);
    if (i > 0)
        n_used += blocks_of(first->most - 1) - (first->is_running ? blocks_of(first->n_reserved) : 0);
    return n_used <= model->n_blocks;
}

/* Drops the request's sequence of the pool, and gives it an empty one. */
static void empty_sequence(struct model *model, int32_t i)
{
    CHECK_STATUS(dsc_kv_drop(model->pool, 1, &model->requests[i].sequence), DSC_OK);
    CHECK_STATUS(dsc_kv_add(model->pool, 1, &model->requests[i].sequence), DSC_OK);
}

static void check_counts(const struct model *model)
{
    struct dsc_schedule_counts counts;
    struct dsc_kv_counts blocks;

    dsc_schedule_count(model->schedule, &counts);
    dsc_kv_count(model->pool, &blocks);
    CHECK_EQ(counts.n_running, n_running(model));
    CHECK_EQ(counts.n_waiting, model->n - n_running(model));
    CHECK_EQ(counts.n_free_blocks, model->n_blocks - held_by_all(model));
    CHECK_EQ(counts.n_put_back, model->n_put_back);
    CHECK(counts.n_free_blocks >= 0 && blocks.n_free >= counts.n_free_blocks);
}

/* Plans by the rules of the header, one after the other. Returns how many requests went back, youngest first. */
static int32_t expect_plan(struct model *model, int64_t budget, int32_t *put_back)
{
    int32_t n_put_back = 0;

    for (int32_t i = 0; i < model->n; i++)
        model->requests[i].n_planned = 0;
    for (int pass = 0; pass < 3; pass++) { /* decoding requests, begun prompts, waiting requests */
        for (int32_t i = 0; i < model->n; i++) {
            struct model_request *request = &model->requests[i];
            bool is_decoding = request->n_computed > 0 && request->n_known - request->n_computed == 1;
            int64_t n_found = request->n_computed == 0 ? request->n_found : 0;
            int64_t n_rest = request->n_known - request->n_computed - n_found;

            if (request->n_planned > 0 || budget == 0 || (pass == 0 && !is_decoding) ||
                (pass < 2 && !request->is_running))
                continue;
            while (pass == 0 && request->is_running && blocks_of(request->n_known) > blocks_of(request->n_reserved) &&
                   !may_hold(model, i, request->n_known)) {
                int32_t youngest = model->n - 1;

                while (!model->requests[youngest].is_running)
                    youngest--;
                CHECK(youngest > 0);
                model->requests[youngest].is_running = false;
                model->requests[youngest].n_computed = model->requests[youngest].n_found = 0;
                put_back[n_put_back++] = model->requests[youngest].number;
                model->n_put_back++;
            }
            if (pass == 2) {
                int64_t n_wanted = smaller(request->n_known + 1, request->most - 1);

                if (n_put_back > 0 || n_running(model) == model->most_rows || !may_hold(model, i, n_wanted))
                    break;
                request->is_running = true;
                request->n_reserved = n_wanted;
            }
            if (!request->is_running)
                continue;
            if (request->n_known > request->n_reserved)
                request->n_reserved = request->n_known;
            request->n_planned = n_found + smaller(n_rest, budget);
            budget -= smaller(n_rest, budget);
        }
    }
    return n_put_back;
}

static int32_t find(const struct model *model, int32_t number)
{
    for (int32_t i = 0; i < model->n; i++)
        if (model->requests[i].number == number)
            return i;
    CHECK_EQ(number, -1);
    return 0;
}

/* Puts the planned tokens into a pool of as many blocks: they must fit. */
static void run_in_pool(struct model *model, const struct dsc_schedule_step *step)
{
    struct dsc_kv_copy copies[1];
    int32_t n_copies;

    for (int32_t i = 0; i < step->n_put_back; i++)
        empty_sequence(model, find(model, step->put_back[i]));
    for (int32_t i = 0; i < step->n_rows; i++) {
        const struct model_request *request = &model->requests[find(model, step->rows[i].number)];

        CHECK_STATUS(dsc_kv_grow(model->pool, 1, &request->sequence, &step->rows[i].n_tokens, copies, &n_copies),
                     DSC_OK);
    }
}

static void remove_request(struct model *model, int32_t i)
{
    CHECK_STATUS(dsc_schedule_end(model->schedule, model->requests[i].number), DSC_OK);
    CHECK_STATUS(dsc_kv_drop(model->pool, 1, &model->requests[i].sequence), DSC_OK);
    memmove(model->requests + i, model->requests + i + 1, (size_t)(--model->n - i) * sizeof *model->requests);
}

/* Plans a step, compares it with the model's, and commits or aborts it. */
static void step(struct model *model, uint64_t *random)
{
    struct dsc_schedule_step found = {-1, NULL, -1, NULL};
    int64_t budget = model->budget + (test_below(random, 3) == 0 ? test_below(random, 40) : 0);
    int32_t put_back[MAX_LIVE];
    int32_t n_put_back = expect_plan(model, budget, put_back);
    int32_t n_rows = 0;
    int32_t n_ready = -1;
    const int32_t *ready = NULL;

    CHECK_STATUS(dsc_schedule_plan(model->schedule, budget, &found), DSC_OK);
    CHECK_EQ(found.n_put_back, n_put_back);
    for (int32_t i = 0; i < smaller(n_put_back, found.n_put_back); i++)
        CHECK_EQ(found.put_back[i], put_back[i]);
    for (int32_t i = 0; i < model->n; i++) {
        const struct model_request *request = &model->requests[i];

        if (request->n_planned == 0)
            continue;
        if (CHECK(n_rows < found.n_rows)) {
            CHECK_EQ(found.rows[n_rows].number, request->number);
            CHECK_EQ(found.rows[n_rows].begin, request->n_computed);
            CHECK_EQ(found.rows[n_rows].n_tokens, request->n_planned);
        }
        n_rows++;
    }
    CHECK_EQ(found.n_rows, n_rows);
    CHECK(n_rows <= model->most_rows);
    CHECK_EQ(n_rows > 0, model->n > 0 && budget > 0); /* no deadlock */
    run_in_pool(model, &found);
    if (n_rows > 0) {
        CHECK_ERROR(dsc_schedule_plan(model->schedule, 1, &found), DSC_ESTATE, "commit or abort it first");
        CHECK_ERROR(dsc_schedule_end(model->schedule, model->requests[0].number), DSC_ESTATE, "within a step");
    }
    if (test_below(random, 16) == 0) {
        CHECK_STATUS(dsc_schedule_abort(model->schedule), DSC_OK);
        for (int32_t i = 0; i < model->n; i++)
            if (model->requests[i].n_planned > 0)
                CHECK_STATUS(dsc_kv_cut(model->pool, 1, &model->requests[i].sequence, &model->requests[i].n_computed),
                             DSC_OK);
        model->n_aborted++;
        return;
    }
    CHECK_STATUS(dsc_schedule_commit(model->schedule, &n_ready, &ready), DSC_OK);
    model->n_steps += n_rows > 0;
    n_rows = 0;
    for (int32_t i = 0; i < model->n; i++) {
        struct model_request *request = &model->requests[i];

        request->n_computed += request->n_planned;
        if (request->n_planned == 0 || request->n_computed < request->n_known)
            continue;
        request->n_known++;
        if (CHECK(n_rows < n_ready))
            CHECK_EQ(ready[n_rows], request->number);
        n_rows++;
    }
    CHECK_EQ(n_ready, n_rows);
    CHECK_ERROR(dsc_schedule_commit(model->schedule, &n_ready, &ready), DSC_ESTATE, "no plan");
    CHECK_ERROR(dsc_schedule_abort(model->schedule), DSC_ESTATE, "no plan");
    for (int32_t i = 0; i < model->n; i++) {
        CHECK(model->n_steps <= model->requests[i].deadline); /* no starvation */
        if (model->requests[i].n_known == model->requests[i].most) {
            CHECK_ERROR(dsc_schedule_plan(model->schedule, 1, &found), DSC_ESTATE, "end it first");
            remove_request(model, i--);
            model->n_ended++;
        }
    }
}

static void add(struct model *model, uint64_t *random)
{
    struct model_request *request = &model->requests[model->n];
    int64_t most_fitting = (int64_t)model->n_blocks * DSC_KV_TOKENS + 1;
    int64_t n_tokens = 1 + test_below(random, test_below(random, 4) == 0 ? most_fitting : 20);
    int64_t most = n_tokens + 1 + test_below(random, test_below(random, 4) == 0 ? most_fitting : 40);
    int64_t n_found = test_below(random, 4) == 0 ? test_below(random, n_tokens) : 0;
    int32_t number = -7;
    dsc_status status = dsc_schedule_add(model->schedule, n_tokens, most, n_found, &number);

    CHECK_EQ(status, most > most_fitting ? DSC_ENOSPC : DSC_OK);
    if (status != DSC_OK) {
        CHECK_EQ(number, -7);
        return;
    }
    *request = (struct model_request){.number = number, .n_known = n_tokens, .n_found = n_found, .most = most};
    for (int32_t i = 0; i < model->n; i++)
        CHECK(model->requests[i].number != number);
    CHECK(number >= 0 && number < MAX_LIVE);
    CHECK_STATUS(dsc_kv_add(model->pool, 1, &request->sequence), DSC_OK);
    request->deadline = (model->n > 0 ? request[-1].deadline : model->n_steps) +
                        (n_tokens + model->budget - 1) / model->budget + most - n_tokens - 1;
    model->n++;
}

static void begin(struct model *model, int32_t n_blocks, uint64_t *random)
{
    memset(model, 0, sizeof *model);
    model->n_blocks = n_blocks;
    model->most_rows = 1 + (int32_t)test_below(random, test_below(random, 2) == 0 ? 4 : MAX_LIVE);
    model->budget = 1 + test_below(random, test_below(random, 2) == 0 ? 4 : 100);
    CHECK_STATUS(dsc_schedule_open(n_blocks, model->most_rows, &model->schedule), DSC_OK);
    CHECK_STATUS(dsc_kv_open(n_blocks, &model->pool), DSC_OK);
}

/* Everything ends, and each block is free again. */
static void finish(struct model *model, uint64_t *random)
{
    struct dsc_kv_counts blocks;
    struct dsc_schedule_counts counts;

    while (model->n > 0 && test_n_failures == 0)
        step(model, random);
    check_counts(model);
    dsc_kv_count(model->pool, &blocks);
    dsc_schedule_count(model->schedule, &counts);
    CHECK_EQ(blocks.n_free, model->n_blocks);
    CHECK_EQ(counts.n_free_blocks, model->n_blocks);
    dsc_kv_close(model->pool);
    dsc_schedule_close(model->schedule);
}

static void test_against_a_naive_model(void)
{
    static struct model model;
    uint64_t random = 5;
    int64_t n_put_back = 0;

    for (int32_t n_blocks = 0; n_blocks <= 50; n_blocks++) {
        begin(&model, n_blocks, &random);
        for (int i = 0; i < 1500; i++) {
            TEST_CASE("%d blocks, %d rows, budget %d, step %d", (int)n_blocks, (int)model.most_rows, (int)model.budget,
                      i);
            while (model.n < MAX_LIVE && test_below(&random, 8) < 3)
                add(&model, &random);
            if (model.n > 0 && test_below(&random, 12) == 0)
                remove_request(&model, (int32_t)test_below(&random, model.n));
            step(&model, &random);
            check_counts(&model);
        }
        n_put_back += model.n_put_back;
        finish(&model, &random);
    }
    TEST_CASE("all pools");
    CHECK(n_put_back > 500);
}

static void test_wrong_numbers(void)
{
    struct dsc_schedule *schedule = NULL;
    struct dsc_schedule_step step;
    const int32_t *ready;
    int32_t n_ready;
    int32_t number = -7;

    TEST_CASE("wrong numbers");
    CHECK_ERROR(dsc_schedule_open(-1, 1, &schedule), DSC_EINVAL, "n_blocks is -1");
    CHECK_ERROR(dsc_schedule_open(1, 0, &schedule), DSC_EINVAL, "most_rows is 0");
    CHECK_STATUS(dsc_schedule_open(2, INT32_MAX, &schedule), DSC_OK);
    CHECK_ERROR(dsc_schedule_add(schedule, 0, 5, 0, &number), DSC_EINVAL, "n_tokens is 0");
    CHECK_ERROR(dsc_schedule_add(schedule, 5, 5, 0, &number), DSC_EINVAL, "most_tokens is 5");
    CHECK_ERROR(dsc_schedule_add(schedule, 5, INT64_MIN, 0, &number), DSC_EINVAL, "most_tokens is -");
    CHECK_ERROR(dsc_schedule_add(schedule, 5, 6, 5, &number), DSC_EINVAL, "n_found is 5");
    CHECK_ERROR(dsc_schedule_add(schedule, 5, 6, -1, &number), DSC_EINVAL, "n_found is -1");
    CHECK_ERROR(dsc_schedule_add(schedule, 1, 34, 0, &number), DSC_ENOSPC, "needs 3 blocks");
    CHECK_ERROR(dsc_schedule_add(schedule, 1, INT64_MAX, 0, &number), DSC_ENOSPC, "there are 2");
    CHECK_ERROR(dsc_schedule_end(schedule, 0), DSC_EINVAL, "no request");
    CHECK_ERROR(dsc_schedule_end(schedule, -1), DSC_EINVAL, "no request");
    CHECK_ERROR(dsc_schedule_plan(schedule, -1, &step), DSC_EINVAL, "budget is -1");
    CHECK_ERROR(dsc_schedule_commit(schedule, &n_ready, &ready), DSC_ESTATE, "no plan");
    CHECK_EQ(number, -7);
    CHECK_STATUS(dsc_schedule_plan(schedule, 5, &step), DSC_OK);
    CHECK_EQ(step.n_rows + step.n_put_back, 0);
    CHECK_STATUS(dsc_schedule_add(schedule, 1, 33, 0, &number), DSC_OK);
    CHECK_STATUS(dsc_schedule_plan(schedule, 0, &step), DSC_OK);
    CHECK_EQ(step.n_rows, 0);
    CHECK_STATUS(dsc_schedule_commit(schedule, &n_ready, &ready), DSC_OK);
    CHECK_EQ(n_ready, 0);
    CHECK_STATUS(dsc_schedule_end(schedule, number), DSC_OK);
    CHECK_ERROR(dsc_schedule_end(schedule, number), DSC_EINVAL, "no request");
    dsc_schedule_close(schedule);
    dsc_schedule_close(NULL);
}

int main(void)
{
    test_against_a_naive_model();
    test_wrong_numbers();
    return test_finish(__FILE__);
}
