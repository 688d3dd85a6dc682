/*
 * infer/schedule.c: any calls in any order, with any numbers. Each answer is the naive model's, a refused call changes
 * nothing, and when no more requests come all end within the bound, with each block free again.
 */
#include "fuzz.h"

#include "schedule_model.h"

#include "dsc/schedule.h"

struct server {
    struct dsc_schedule *schedule;
    struct schedule_model model;
    bool is_planned;
    int32_t n_rows; /* of the plan */
};

static int64_t take_number(struct input *input, int64_t n)
{
    return take_byte(input) == 255 ? take_wild(input) : take_below(input, n);
}

static void check_counts(const struct server *server)
{
    struct dsc_schedule_counts counts;

    dsc_schedule_count(server->schedule, &counts);
    REQUIRE(counts.n_running == model_n_running(&server->model));
    REQUIRE(counts.n_waiting == server->model.n - counts.n_running);
    REQUIRE(counts.n_free_blocks == server->model.n_blocks - model_n_held(&server->model));
    REQUIRE(counts.n_free_blocks >= 0 && counts.n_put_back == server->model.n_put_back);
}

static void add(struct server *server, struct input *input)
{
    struct schedule_model *model = &server->model;
    int64_t n_tokens = take_number(input, 80);
    int64_t most = take_number(input, 160);
    int64_t n_found = take_number(input, 8) == 0 ? take_number(input, 80) : 0;
    int32_t number = -7;
    dsc_status wanted = DSC_OK;

    if (model->n == MODEL_MAX_LIVE)
        return;
    if (n_tokens < 1 || most <= n_tokens || n_found < 0 || n_found >= n_tokens)
        wanted = DSC_EINVAL;
    else if (most - 1 > (int64_t)model->n_blocks * DSC_KV_TOKENS)
        wanted = DSC_ENOSPC;
    REQUIRE(dsc_schedule_add(server->schedule, n_tokens, most, n_found, &number) == wanted);
    REQUIRE(wanted == DSC_OK ? number >= 0 && model_find(model, number) < 0 : number == -7);
    if (wanted == DSC_OK)
        model->requests[model->n++] =
            (struct model_request){.number = number, .n_known = n_tokens, .n_found = n_found, .most = most};
}

static void end(struct server *server, struct input *input)
{
    int32_t number = (int32_t)take_number(input, MODEL_MAX_LIVE);
    int32_t i = model_find(&server->model, number);

    if (i < 0) {
        REQUIRE(dsc_schedule_end(server->schedule, number) == DSC_EINVAL);
    } else if (server->n_rows > 0) {
        REQUIRE(dsc_schedule_end(server->schedule, number) == DSC_ESTATE);
    } else {
        REQUIRE(dsc_schedule_end(server->schedule, number) == DSC_OK);
        model_remove(&server->model, i);
    }
}

static void plan(struct server *server, int64_t budget)
{
    struct schedule_model *model = &server->model;
    struct dsc_schedule_step step = {-7, NULL, -7, NULL};
    int32_t put_back[MODEL_MAX_LIVE];
    bool is_full = false;

    for (int32_t i = 0; i < model->n; i++)
        is_full = is_full || model->requests[i].n_known == model->requests[i].most;
    if (budget < 0 || server->n_rows > 0 || is_full) {
        REQUIRE(dsc_schedule_plan(server->schedule, budget, &step) == (budget < 0 ? DSC_EINVAL : DSC_ESTATE));
        REQUIRE(step.n_rows == -7);
        return;
    }
    REQUIRE(dsc_schedule_plan(server->schedule, budget, &step) == DSC_OK);
    REQUIRE(step.n_put_back == model_plan(model, budget, put_back));
    for (int32_t i = 0; i < step.n_put_back; i++)
        REQUIRE(step.put_back[i] == put_back[i]);
    server->n_rows = 0;
    for (int32_t i = 0; i < model->n; i++) {
        const struct model_request *request = &model->requests[i];

        if (request->n_planned == 0)
            continue;
        REQUIRE(server->n_rows < step.n_rows && step.rows[server->n_rows].number == request->number);
        REQUIRE(step.rows[server->n_rows].begin == request->n_computed);
        REQUIRE(step.rows[server->n_rows].n_tokens == request->n_planned);
        server->n_rows++;
    }
    REQUIRE(step.n_rows == server->n_rows && step.n_rows <= model->most_rows);
    REQUIRE((step.n_rows > 0) == (model->n > 0 && budget > 0));
    server->is_planned = true;
}

static void commit(struct server *server)
{
    int32_t wanted[MODEL_MAX_LIVE];
    const int32_t *ready = NULL;
    int32_t n_ready = -7;

    if (!server->is_planned) {
        REQUIRE(dsc_schedule_commit(server->schedule, &n_ready, &ready) == DSC_ESTATE);
        REQUIRE(n_ready == -7);
        return;
    }
    REQUIRE(dsc_schedule_commit(server->schedule, &n_ready, &ready) == DSC_OK);
    REQUIRE(n_ready == (server->n_rows > 0 ? model_commit(&server->model, wanted) : 0));
    for (int32_t i = 0; i < n_ready; i++)
        REQUIRE(ready[i] == wanted[i]);
    server->is_planned = false;
    server->n_rows = 0;
}

static void abort_plan(struct server *server)
{
    REQUIRE(dsc_schedule_abort(server->schedule) == (server->is_planned ? DSC_OK : DSC_ESTATE));
    server->is_planned = false;
    server->n_rows = 0;
}

static void end_full(struct server *server)
{
    struct schedule_model *model = &server->model;

    for (int32_t i = 0; i < model->n; i++)
        if (model->requests[i].n_known == model->requests[i].most) {
            REQUIRE(dsc_schedule_end(server->schedule, model->requests[i].number) == DSC_OK);
            model_remove(model, i--);
        }
}

static void finish(struct server *server, int64_t budget)
{
    struct dsc_schedule_counts counts;
    int64_t n_steps = 0;

    if (server->n_rows > 0)
        abort_plan(server);
    end_full(server);
    for (int32_t i = 0; i < server->model.n; i++) {
        const struct model_request *request = &server->model.requests[i];

        n_steps += (request->n_known + budget - 1) / budget + request->most - request->n_known - 1;
    }
    for (; server->model.n > 0; n_steps--) {
        REQUIRE(n_steps > 0);
        plan(server, budget);
        commit(server);
        end_full(server);
        check_counts(server);
    }
    dsc_schedule_count(server->schedule, &counts);
    REQUIRE(counts.n_free_blocks == server->model.n_blocks);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static struct server server;
    struct input input = {data, n_bytes};
    int64_t n_blocks = take_number(&input, 12);
    int64_t most_rows = take_number(&input, 12);

    memset(&server, 0, sizeof server);
    server.model.n_blocks = (int32_t)n_blocks;
    server.model.most_rows = (int32_t)most_rows;
    if ((int32_t)n_blocks < 0 || (int32_t)most_rows < 1) {
        REQUIRE(dsc_schedule_open((int32_t)n_blocks, (int32_t)most_rows, &server.schedule) == DSC_EINVAL);
        REQUIRE(server.schedule == NULL);
        return 0;
    }
    REQUIRE(dsc_schedule_open((int32_t)n_blocks, (int32_t)most_rows, &server.schedule) == DSC_OK);
    while (input.n_left > 0) {
        switch (take_byte(&input) % 8) {
        case 0:
        case 1:
            add(&server, &input);
            break;
        case 2:
            end(&server, &input);
            break;
        case 3:
            abort_plan(&server);
            break;
        case 4:
            plan(&server, take_number(&input, 40));
            break;
        default: /* a whole step: most programs do nothing else */
            plan(&server, 1 + take_below(&input, 40));
            commit(&server);
            end_full(&server);
        }
        check_counts(&server);
    }
    if (server.model.n_blocks <= 12) /* requests of a larger pool may have 2^35 tokens */
        finish(&server, 1 + take_below(&input, 40));
    dsc_schedule_close(server.schedule);
    return 0;
}
