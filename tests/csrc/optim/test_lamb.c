/*
 * optim/lamb.c against the formula of LAMB (arXiv 1904.00962, algorithm 2) in f64: in one call, in two halves, and cut
 * over ranks. Also checks the trust ratio at its bounds.
 */
#include "harness.h"

#include "base/par.h"
#include "pool.h"

/* The formula for the whole tensor in f64, in place. */
static void lamb_formula(const struct dsc_optim_args *args, int64_t n, double *param, const double *grad, double *m, double *v, double *out_ratio)
{
    double correction1 = (args->flags & DSC_OPTIM_BIAS_CORRECTION) != 0 ? 1 - pow(args->beta1, (double)args->step) : 1;
    double correction2 = (args->flags & DSC_OPTIM_BIAS_CORRECTION) != 0 ? 1 - pow(args->beta2, (double)args->step) : 1;
    double *update = test_alloc((size_t)n * sizeof *update);
    double param_sumsq = 0;
    double update_sumsq = 0;
    double ratio = 1;

    for (int64_t i = 0; i < n; i++) {
        m[i] = args->beta1 * m[i] + (1 - args->beta1) * grad[i];
        v[i] = args->beta2 * v[i] + (1 - args->beta2) * grad[i] * grad[i];
        update[i] = m[i] / correction1 / (sqrt(v[i] / correction2) + args->eps) + args->weight_decay * param[i];
        param_sumsq += param[i] * param[i];
        update_sumsq += update[i] * update[i];
    }
    if (param_sumsq > 0 && update_sumsq > 0)
        ratio = fmin(fmax(sqrt(param_sumsq / update_sumsq), args->min_coeff), args->max_coeff);
    for (int64_t i = 0; i < n; i++)
        param[i] -= args->lr * ratio * update[i];
    *out_ratio = ratio;
    free(update);
}

static double *doubles_of(const struct array *array, double scale)
{
    double *values = test_alloc((size_t)array->n * sizeof *values);

    for (int64_t i = 0; i < array->n; i++)
        values[i] = (double)array_get(array, i) * scale;
    return values;
}

/* Runs the step as `n_pieces` slices and adds up their norms, as ranks do. 0: dsc_optim_step on the whole tensor. */
static void run_step(const struct dsc_optim_args *args, const struct model *model, int64_t n_pieces, const struct dsc_par *par)
{
    const struct dsc_optim_kind *kind = find_kind("lamb");
    struct dsc_optim_tensor whole = model_tensor(model, 2);
    struct dsc_optim_tensor pieces[8];
    double sumsq[16];
    double ratios[8];
    double total[2] = {0, 0};

    if (n_pieces == 0) {
        CHECK_STATUS(dsc_optim_step(kind, args, &whole, 1, par), DSC_OK);
        return;
    }
    for (int64_t i = 0; i < n_pieces; i++) {
        int64_t begin = whole.n_elems * i / n_pieces;

        pieces[i] = whole;
        pieces[i].n_elems = whole.n_elems * (i + 1) / n_pieces - begin;
        pieces[i].param = (char *)whole.param + (size_t)begin * dsc_dtype_bytes(args->param_dtype);
        pieces[i].grad = (const char *)whole.grad + (size_t)begin * dsc_dtype_bytes(args->grad_dtype);
        for (int slot = 0; slot < 2; slot++)
            pieces[i].state[slot] = (char *)whole.state[slot] + (size_t)begin * dsc_dtype_bytes(args->state_dtype);
        pieces[i].copy = (char *)whole.copy + (size_t)begin * dsc_dtype_bytes(args->copy_dtype);
    }
    CHECK_STATUS(dsc_optim_norms(kind, args, pieces, n_pieces, par, sumsq), DSC_OK);
    for (int64_t i = 0; i < n_pieces; i++) {
        total[0] += sumsq[2 * i];
        total[1] += sumsq[2 * i + 1];
    }
    for (int64_t i = 0; i < n_pieces; i++)
        ratios[i] = dsc_optim_trust_ratio(args, total[0], total[1]);
    CHECK_STATUS(dsc_optim_apply(kind, args, pieces, n_pieces, par, ratios), DSC_OK);
}

static void check_step(const struct dsc_optim_args *args, int64_t n, int64_t n_pieces, const struct dsc_par *par, uint64_t *random)
{
    struct model model = model_create(args, n, 0);
    double ratio;

    model_fill(&model, false, random);

    double *param = doubles_of(&model.param, 1);
    double *grad = doubles_of(&model.grad, (args->flags & DSC_OPTIM_MAXIMIZE) != 0 ? -args->grad_scale : args->grad_scale);
    double *m = doubles_of(&model.state[0], 1);
    double *v = doubles_of(&model.state[1], 1);

    lamb_formula(args, n, param, grad, m, v, &ratio);
    run_step(args, &model, n_pieces, par);
    for (int64_t i = 0; i < n; i += n > 10000 ? 13 : 1) {
        double step = args->lr * ratio * (2 / (sqrt(v[i]) + args->eps) + args->weight_decay * fabs(param[i]));

        TEST_AT(i);
        CHECK_NEAR((double)array_get(&model.state[0], i), m[i], 8, 0.7);
        CHECK_NEAR((double)array_get(&model.state[1], i), v[i], 8, 1e-3);
        CHECK_NEAR((double)array_get(&model.param, i), param[i], 8, fabs(param[i]) + step);
        CHECK(array_bits(&model.copy, i) == array_bits(&model.param, i));
    }
    free(param);
    free(grad);
    free(m);
    free(v);
    model_destroy(&model);
}

static void test_formula(void)
{
    static const int64_t lengths[] = {1, 17, 1025, 2500, 70001};
    uint64_t random = 43;
    struct pool pool;
    int32_t isa_index = 0;
    const char *isa;

    pool_init(&pool, 3, 1);
    while (next_isa(&isa_index, &isa)) {
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
            for (int64_t n_pieces = 0; n_pieces <= 8; n_pieces += 4) {
                struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

                TEST_CASE("%s: %d elements in %d pieces", isa, (int)lengths[l], (int)n_pieces);
                args.eps = 1e-6;
                check_step(&args, lengths[l], n_pieces, &pool.par, &random);
                args.lr = 0.02;
                args.weight_decay = 0.1;
                args.step = 50;
                args.grad_scale = 0.25;
                args.flags |= DSC_OPTIM_MAXIMIZE;
                check_step(&args, lengths[l], n_pieces, &pool.par, &random);
                args.flags = 0;
                args.max_coeff = 0.05; /* the clamp acts */
                check_step(&args, lengths[l], n_pieces, &pool.par, &random);
            }
        }
    }
    pool_clear(&pool);
}

/*
 * Norms are taken of the states as stored. With 16-bit states, the norms and the apply half must use the same update.
 */
static void test_stored_states(void)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    const struct dsc_optim_kind *kind = find_kind("lamb");
    uint64_t random = 47;
    double sumsq[2];
    double wanted = 0;

    TEST_CASE("stored states");
    args.state_dtype = DSC_DTYPE_BF16;
    args.flags = 0;

    struct model model = model_create(&args, 3000, 0);
    struct dsc_optim_tensor tensor = model_tensor(&model, 2);

    model_fill(&model, false, &random);
    CHECK_STATUS(dsc_optim_norms(kind, &args, &tensor, 1, NULL, sumsq), DSC_OK);
    for (int64_t i = 0; i < 3000; i++) {
        double update = (double)array_get(&model.state[0], i) / (sqrt((double)array_get(&model.state[1], i)) + args.eps);

        wanted += update * update;
    }
    test_report(fabs(sumsq[1] - wanted) < 1e-6 * wanted, __FILE__, __LINE__, "sum of update^2: %.9g and %.9g", sumsq[1], wanted);
    model_destroy(&model);
}

/*
 * A list of more tensors than a group holds, some empty, some across chunk borders, gives the result of one call a
 * tensor.
 */
static void test_many_tensors(void)
{
    enum { N = 1300 };
    const struct dsc_optim_kind *kind = find_kind("lamb");
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    struct model *models = test_alloc(N * sizeof *models);
    struct model *alone = test_alloc(N * sizeof *alone);
    struct dsc_optim_tensor *tensors = test_alloc(N * sizeof *tensors);
    uint64_t random = 53;
    struct pool pool;

    TEST_CASE("many tensors");
    pool_init(&pool, 4, 1);
    for (int i = 0; i < N; i++) {
        models[i] = model_create(&args, i % 5 == 0 ? 0 : 1 + test_below(&random, 60), 0);
        model_fill(&models[i], false, &random);
        alone[i] = model_copy(&models[i], 0);
        tensors[i] = model_tensor(&models[i], 2);
    }
    CHECK_STATUS(dsc_optim_step(kind, &args, tensors, N, &pool.par), DSC_OK);
    for (int i = 0; i < N; i++) {
        struct dsc_optim_tensor tensor = model_tensor(&alone[i], 2);

        CHECK_STATUS(dsc_optim_step(kind, &args, &tensor, 1, NULL), DSC_OK);
        CHECK_MODELS(&models[i], &alone[i]);
        model_destroy(&models[i]);
        model_destroy(&alone[i]);
    }
    pool_clear(&pool);
    free(models);
    free(alone);
    free(tensors);
}

/*
 * Compares norms with f64 for tensors cut by a chunk border after the first or before the last element, and for a
 * tensor of whole chunks.
 */
static void test_cut_tensors(void)
{
    static const int64_t lengths[] = {DSC_MIN_CHUNK_ELEMS - 1, DSC_MIN_CHUNK_ELEMS + 2, 3 * DSC_MIN_CHUNK_ELEMS, DSC_MIN_CHUNK_ELEMS - 2, 2, 5, 0};
    enum { N = sizeof lengths / sizeof lengths[0] };
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    struct model models[N];
    struct dsc_optim_tensor tensors[N];
    double sumsq[2 * N];
    uint64_t random = 57;
    struct pool pool;

    pool_init(&pool, 3, 1);
    args.flags = 0;
    for (int i = 0; i < N; i++) {
        models[i] = model_create(&args, lengths[i], 0);
        model_fill(&models[i], false, &random);
        tensors[i] = model_tensor(&models[i], 2);
        sumsq[2 * i] = sumsq[2 * i + 1] = -7;
    }
    CHECK_STATUS(dsc_optim_norms(find_kind("lamb"), &args, tensors, N, &pool.par, sumsq), DSC_OK);
    for (int i = 0; i < N; i++) {
        double param_sumsq = 0;
        double update_sumsq = 0;

        for (int64_t e = 0; e < lengths[i]; e++) {
            double param = (double)array_get(&models[i].param, e);
            double update = (double)array_get(&models[i].state[0], e) / (sqrt((double)array_get(&models[i].state[1], e)) + args.eps);

            param_sumsq += param * param;
            update_sumsq += update * update;
        }
        TEST_CASE("cut tensors: %d", i);
        test_report(fabs(sumsq[2 * i] - param_sumsq) <= 1e-12 * param_sumsq, __FILE__, __LINE__, "param: %.17g and %.17g", sumsq[2 * i], param_sumsq);
        test_report(fabs(sumsq[2 * i + 1] - update_sumsq) <= 1e-6 * update_sumsq, __FILE__, __LINE__, "update: %.9g and %.9g", sumsq[2 * i + 1],
                    update_sumsq);
        model_destroy(&models[i]);
    }
    pool_clear(&pool);
}

static void test_trust_ratio(void)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    TEST_CASE("trust ratio");
    CHECK(dsc_optim_trust_ratio(&args, 4, 1) == 2);
    CHECK(dsc_optim_trust_ratio(&args, 0, 1) == 1);
    CHECK(dsc_optim_trust_ratio(&args, 4, 0) == 1);
    CHECK(dsc_optim_trust_ratio(&args, 1e-12, 1) == args.min_coeff);
    CHECK(dsc_optim_trust_ratio(&args, 1e12, 1) == args.max_coeff);
    CHECK(isnan(dsc_optim_trust_ratio(&args, (double)NAN, 1)));
}

static void test_errors(void)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    float x[5][2] = {{1, 2}, {3, 4}, {5, 6}, {7, 8}, {9, 10}};
    float before[5][2];
    struct dsc_optim_tensor tensor = {.n_elems = 2, .param = x[0], .grad = x[1], .state = {x[2], x[3]}, .copy = x[4]};
    double sumsq[2] = {-7, -7};
    double ratio = 1;
    const struct dsc_optim_kind *lamb = find_kind("lamb");

    TEST_CASE("errors");
    memcpy(before, x, sizeof x);
    CHECK(dsc_optim_needs_norms(lamb));
    CHECK_ERROR(dsc_optim_norms(find_kind("adam"), &args, &tensor, 1, NULL, sumsq), DSC_ENOTSUP, "adam");
    CHECK_ERROR(dsc_optim_apply(find_kind("sgd"), &args, &tensor, 1, NULL, &ratio), DSC_ENOTSUP, "sgd");
    CHECK_ERROR(dsc_optim_norms(NULL, &args, &tensor, 1, NULL, sumsq), DSC_EINVAL, "kind");
    CHECK_ERROR(dsc_optim_norms(lamb, &args, &tensor, 1, NULL, NULL), DSC_EINVAL, "out_sumsq");
    CHECK_ERROR(dsc_optim_apply(lamb, &args, &tensor, 1, NULL, NULL), DSC_EINVAL, "ratios");
    args.max_coeff = 0.001;
    CHECK_ERROR(dsc_optim_norms(lamb, &args, &tensor, 1, NULL, sumsq), DSC_EINVAL, "max_coeff");
    args.max_coeff = 10;
    tensor.state[1] = NULL;
    CHECK_ERROR(dsc_optim_norms(lamb, &args, &tensor, 1, NULL, sumsq), DSC_EINVAL, "state[1]");
    CHECK_ERROR(dsc_optim_apply(lamb, &args, &tensor, 1, NULL, &ratio), DSC_EINVAL, "state[1]");
    tensor.state[1] = x[3];
    tensor.grad = NULL;
    CHECK_ERROR(dsc_optim_norms(lamb, &args, &tensor, 1, NULL, sumsq), DSC_EINVAL, "grad");
    CHECK_BYTES(x, before, sizeof x);
    CHECK(sumsq[0] == -7);
    /* The apply half reads no gradient, and the norms half writes no weight. */
    CHECK_STATUS(dsc_optim_apply(lamb, &args, &tensor, 1, NULL, &ratio), DSC_OK);
    CHECK_STATUS(dsc_optim_norms(lamb, &args, NULL, 0, NULL, NULL), DSC_OK);
}

int main(void)
{
    test_formula();
    test_stored_states();
    test_many_tensors();
    test_cut_tensors();
    test_trust_ratio();
    test_errors();
    return test_finish(__FILE__);
}
