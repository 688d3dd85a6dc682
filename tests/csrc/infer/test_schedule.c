/* infer/schedule.c against a naive model, and its plans in a pool of as many blocks. */
#include "test.h"

#include "schedule_model.h"

#include "dsc/infer.h"
#include "dsc/schedule.h"

struct server {
    struct dsc_schedule *schedule;
    struct dsc_kv_pool *pool;
    struct schedule_model model; /* the deadline of a request: it ends in this many n_steps */
    int64_t budget;              /* tokens of the smallest step */
    int64_t n_steps;             /* committed */
    int64_t n_ended;
    int64_t n_aborted;
};

static void check_counts(const struct server *server)
{
    const struct schedule_model *model = &server->model;
    struct dsc_schedule_counts counts;
    struct dsc_kv_counts blocks;

    dsc_schedule_count(server->schedule, &counts);
    dsc_kv_count(server->pool, &blocks);
    CHECK_EQ(counts.n_running, model_n_running(model));
    CHECK_EQ(counts.n_waiting, model->n - model_n_running(model));
    CHECK_EQ(counts.n_free_blocks, model->n_blocks - model_n_held(model));
    CHECK_EQ(counts.n_put_back, model->n_put_back);
    CHECK(counts.n_free_blocks >= 0 && blocks.n_free >= counts.n_free_blocks);
}

/* Puts the planned tokens into the pool: they must fit. */
static void run_in_pool(struct server *server, const struct dsc_schedule_step *step)
{
    struct dsc_kv_copy copies[1];
    int32_t n_copies;

    for (int32_t i = 0; i < step->n_put_back; i++) {
        int32_t *sequence = &server->model.requests[model_find(&server->model, step->put_back[i])].sequence;

        CHECK_STATUS(dsc_kv_drop(server->pool, 1, sequence), DSC_OK);
        CHECK_STATUS(dsc_kv_add(server->pool, 1, sequence), DSC_OK);
    }
    for (int32_t i = 0; i < step->n_rows; i++) {
        const struct dsc_schedule_row *row = &step->rows[i];
        const int32_t *sequence = &server->model.requests[model_find(&server->model, row->number)].sequence;

        CHECK_STATUS(dsc_kv_grow(server->pool, 1, sequence, &row->n_tokens, copies, &n_copies), DSC_OK);
    }
}

static void remove_request(struct server *server, int32_t i)
{
    CHECK_STATUS(dsc_schedule_end(server->schedule, server->model.requests[i].number), DSC_OK);
    CHECK_STATUS(dsc_kv_drop(server->pool, 1, &server->model.requests[i].sequence), DSC_OK);
    model_remove(&server->model, i);
}

/* Whether the plan is the model's. */
static bool plans_as_the_model(struct server *server, int64_t budget, const struct dsc_schedule_step *found)
{
    int32_t put_back[MODEL_MAX_LIVE];
    bool is_good = CHECK_EQ(found->n_put_back, model_plan(&server->model, budget, put_back));
    int32_t n_rows = 0;

    for (int32_t i = 0; is_good && i < found->n_put_back; i++)
        is_good = CHECK_EQ(found->put_back[i], put_back[i]);
    for (int32_t i = 0; is_good && i < server->model.n; i++) {
        const struct model_request *request = &server->model.requests[i];

        if (request->n_planned == 0)
            continue;
        is_good = CHECK(n_rows < found->n_rows) && CHECK_EQ(found->rows[n_rows].number, request->number) &&
                  CHECK_EQ(found->rows[n_rows].begin, request->n_computed) &&
                  CHECK_EQ(found->rows[n_rows].n_tokens, request->n_planned);
        n_rows++;
    }
    return is_good && CHECK_EQ(found->n_rows, n_rows);
}

static void abort_step(struct server *server)
{
    CHECK_STATUS(dsc_schedule_abort(server->schedule), DSC_OK);
    for (int32_t i = 0; i < server->model.n; i++) {
        struct model_request *request = &server->model.requests[i];

        if (request->n_planned > 0)
            CHECK_STATUS(dsc_kv_cut(server->pool, 1, &request->sequence, &request->n_computed), DSC_OK);
    }
    server->n_aborted++;
}

static void commit_step(struct server *server)
{
    struct schedule_model *model = &server->model;
    struct dsc_schedule_step step;
    int32_t wanted[MODEL_MAX_LIVE];
    const int32_t *ready = NULL;
    int32_t n_ready = -1;
    int32_t n_late = 0;

    CHECK_STATUS(dsc_schedule_commit(server->schedule, &n_ready, &ready), DSC_OK);
    if (CHECK_EQ(n_ready, model_commit(model, wanted)))
        for (int32_t i = 0; i < n_ready; i++)
            CHECK_EQ(ready[i], wanted[i]);
    CHECK_ERROR(dsc_schedule_commit(server->schedule, &n_ready, &ready), DSC_ESTATE, "no plan");
    CHECK_ERROR(dsc_schedule_abort(server->schedule), DSC_ESTATE, "no plan");
    server->n_steps++;
    for (int32_t i = 0; i < model->n; i++) {
        n_late += server->n_steps > model->requests[i].deadline;
        if (model->requests[i].n_known == model->requests[i].most) {
            CHECK_ERROR(dsc_schedule_plan(server->schedule, 1, &step), DSC_ESTATE, "end it first");
            remove_request(server, i--);
            server->n_ended++;
        }
    }
    CHECK_EQ(n_late, 0); /* no starvation */
}

static void step(struct server *server, uint64_t *random)
{
    struct dsc_schedule_step found = {-1, NULL, -1, NULL};
    int64_t budget = server->budget + (test_below(random, 3) == 0 ? test_below(random, 40) : 0);

    CHECK_STATUS(dsc_schedule_plan(server->schedule, budget, &found), DSC_OK);
    if (!plans_as_the_model(server, budget, &found))
        return;
    CHECK(found.n_rows <= server->model.most_rows);
    CHECK_EQ(found.n_rows > 0, server->model.n > 0); /* no deadlock */
    run_in_pool(server, &found);
    if (found.n_rows == 0)
        return;
    CHECK_ERROR(dsc_schedule_plan(server->schedule, 1, &found), DSC_ESTATE, "commit or abort it first");
    CHECK_ERROR(dsc_schedule_end(server->schedule, server->model.requests[0].number), DSC_ESTATE, "within a step");
    if (test_below(random, 16) == 0)
        abort_step(server);
    else
        commit_step(server);
}

static void add(struct server *server, uint64_t *random)
{
    struct schedule_model *model = &server->model;
    struct model_request *request = &model->requests[model->n];
    int64_t most_fitting = (int64_t)model->n_blocks * DSC_KV_TOKENS + 1;
    int64_t n_tokens = 1 + test_below(random, test_below(random, 4) == 0 ? most_fitting : 20);
    int64_t most = n_tokens + 1 + test_below(random, test_below(random, 4) == 0 ? most_fitting : 40);
    int64_t n_found = test_below(random, 4) == 0 ? test_below(random, n_tokens) : 0;
    int32_t number = -7;
    dsc_status status = dsc_schedule_add(server->schedule, n_tokens, most, n_found, &number);

    CHECK_EQ(status, most > most_fitting ? DSC_ENOSPC : DSC_OK);
    if (status != DSC_OK) {
        CHECK_EQ(number, -7);
        return;
    }
    CHECK(model_find(model, number) < 0 && number >= 0 && number < MODEL_MAX_LIVE);
    *request = (struct model_request){.number = number, .n_known = n_tokens, .n_found = n_found, .most = most};
    CHECK_STATUS(dsc_kv_add(server->pool, 1, &request->sequence), DSC_OK);
    request->deadline = (model->n > 0 ? request[-1].deadline : server->n_steps) +
                        (n_tokens + server->budget - 1) / server->budget + most - n_tokens - 1;
    model->n++;
}

static void begin(struct server *server, int32_t n_blocks, uint64_t *random)
{
    memset(server, 0, sizeof *server);
    server->model.n_blocks = n_blocks;
    server->model.most_rows = 1 + (int32_t)test_below(random, test_below(random, 2) == 0 ? 4 : MODEL_MAX_LIVE);
    server->budget = 1 + test_below(random, test_below(random, 2) == 0 ? 4 : 100);
    CHECK_STATUS(dsc_schedule_open(n_blocks, server->model.most_rows, &server->schedule), DSC_OK);
    CHECK_STATUS(dsc_kv_open(n_blocks, &server->pool), DSC_OK);
}

/* Everything ends, and each block is free again. */
static void finish(struct server *server, uint64_t *random)
{
    struct dsc_kv_counts blocks;
    struct dsc_schedule_counts counts;

    while (server->model.n > 0 && test_n_failures == 0)
        step(server, random);
    check_counts(server);
    dsc_kv_count(server->pool, &blocks);
    dsc_schedule_count(server->schedule, &counts);
    CHECK_EQ(blocks.n_free, server->model.n_blocks);
    CHECK_EQ(counts.n_free_blocks, server->model.n_blocks);
    dsc_kv_close(server->pool);
    dsc_schedule_close(server->schedule);
}

/* Arrivals, cancelled requests and failed steps in pools of 0 to 50 blocks. */
static void test_a_million_steps(void)
{
    static struct server server;
    uint64_t random = 5;
    int64_t n_steps = 0;
    int64_t n_put_back = 0;
    int64_t n_ended = 0;
    int64_t n_aborted = 0;

    for (int32_t run = 0; run < 4 * 51; run++) {
        int64_t n_arriving = 1 + test_below(&random, 24); /* in 64 steps, and more in bursts */

        begin(&server, run % 51, &random);
        for (int i = 0; i < 5000; i++) {
            TEST_CASE("run %d of %d blocks, %d rows, budget %d, step %d", (int)run, (int)server.model.n_blocks,
                      (int)server.model.most_rows, (int)server.budget, i);
            while (server.model.n < MODEL_MAX_LIVE && test_below(&random, 64) < n_arriving)
                add(&server, &random);
            if (server.model.n > 0 && test_below(&random, 12) == 0)
                remove_request(&server, (int32_t)test_below(&random, server.model.n));
            step(&server, &random);
            check_counts(&server);
        }
        finish(&server, &random);
        n_steps += server.n_steps;
        n_put_back += server.model.n_put_back;
        n_ended += server.n_ended;
        n_aborted += server.n_aborted;
    }
    TEST_CASE("all runs: %d steps, %d times put back, %d ended, %d aborted", (int)n_steps, (int)n_put_back,
              (int)n_ended, (int)n_aborted);
    CHECK(n_steps > 800000 && n_put_back > 3000 && n_ended > 20000 && n_aborted > 50000);
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
    test_a_million_steps();
    test_wrong_numbers();
    return test_finish(__FILE__);
}
