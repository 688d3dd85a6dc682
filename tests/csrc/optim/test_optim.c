/*
 * optim/optim.c, over the whole registry: dtypes, lists of tensors, threads, instruction sets, tails and refused
 * arguments. The values of a single step are checked by the test of each optimizer. This test compares one way of
 * running a step with another.
 */
#include "harness.h"

#include "pool.h"

/* Arguments with which every part of every optimizer takes effect. */
static struct dsc_optim_args busy_args(const struct dsc_optim_kind *kind)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    args.step = 3;
    args.lr = 0.01;
    args.weight_decay = 0.1;
    args.grad_scale = 0.5;
    args.lr_decay = 0.1;
    if (strcmp(dsc_optim_name(kind), "sgd") == 0) {
        args.momentum = 0.9;
        args.flags |= DSC_OPTIM_NESTEROV;
    }
    return args;
}

static void test_registry(void)
{
    static const char *const names[] = {"adam", "adamw", "lamb", "lion", "adagrad", "sgd"};
    const struct dsc_optim_kind *kind = NULL;

    for (int i = 0; i < 6; i++) {
        TEST_CASE("%s", names[i]);
        CHECK_STATUS(dsc_optim_find(names[i], &kind), DSC_OK);
        CHECK(kind == dsc_optim_at(i));
        CHECK_STR(dsc_optim_name(kind), names[i]);
        CHECK_EQ(dsc_optim_n_states(kind), i < 3 ? 2 : 1);
        CHECK_EQ(dsc_optim_needs_norms(kind), i == 2);
    }
    CHECK(dsc_optim_at(6) == NULL);
    CHECK(dsc_optim_at(-1) == NULL);
    kind = NULL;
    CHECK_ERROR(dsc_optim_find("adamx", &kind), DSC_ENOTFOUND, "adam, adamw, lamb, lion, adagrad, sgd");
    CHECK_ERROR(dsc_optim_find(NULL, &kind), DSC_EINVAL, "name");
    CHECK_ERROR(dsc_optim_find("adam", NULL), DSC_EINVAL, "out_kind");
    CHECK(kind == NULL);
}

static struct array as_f32(const struct array *from)
{
    struct array array = array_create(DSC_DTYPE_F32, from->n, 0);

    for (int64_t i = 0; i < from->n; i++)
        array_set(&array, i, array_get(from, i));
    return array;
}

static void check_rounded(const struct array *got, const struct array *wide, const char *what)
{
    struct array wanted = array_create(got->dtype, got->n, 0);

    for (int64_t i = 0; i < got->n; i++)
        array_set(&wanted, i, array_get(wide, i));
    check_same(got, &wanted, what, __FILE__, __LINE__);
    array_destroy(&wanted);
}

/*
 * A step on 16-bit storage is the f32 step on the widened values, rounded once. (Optimizers with norms are left out,
 * because they take norms of the rounded states: see test_lamb.c.)
 */
static void check_mix(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args, int64_t n, uint64_t *random)
{
    struct dsc_optim_args wide_args = *args;
    int32_t n_states = dsc_optim_n_states(kind);
    struct model model = model_create(args, n, 1);

    wide_args.param_dtype = wide_args.grad_dtype = wide_args.state_dtype = wide_args.copy_dtype = DSC_DTYPE_F32;
    model_fill(&model, strcmp(dsc_optim_name(kind), "adagrad") == 0, random);

    struct model wide = {
        .param = as_f32(&model.param),
        .grad = as_f32(&model.grad),
        .state = {as_f32(&model.state[0]), as_f32(&model.state[1])},
        .copy = as_f32(&model.copy),
    };
    struct dsc_optim_tensor tensor = model_tensor(&model, n_states);
    struct dsc_optim_tensor wide_tensor = model_tensor(&wide, n_states);

    CHECK_STATUS(dsc_optim_step(kind, args, &tensor, 1, NULL), DSC_OK);
    CHECK_STATUS(dsc_optim_step(kind, &wide_args, &wide_tensor, 1, NULL), DSC_OK);
    check_rounded(&model.param, &wide.param, "param");
    check_rounded(&model.state[0], &wide.state[0], "state[0]");
    check_rounded(&model.state[1], &wide.state[1], "state[1]");
    check_rounded(&model.copy, &model.param, "copy"); /* rounded from the stored weights */
    model_destroy(&model);
    model_destroy(&wide);
}

static void test_dtypes(void)
{
    const struct dsc_optim_kind *kind;
    uint64_t random = 61;

    for (int32_t k = 0; (kind = dsc_optim_at(k)) != NULL; k++) {
        for (int mix = 0; mix < 81 && !dsc_optim_needs_norms(kind); mix++) {
            struct dsc_optim_args args = busy_args(kind);

            args.param_dtype = (dsc_dtype)(mix % 3);
            args.grad_dtype = (dsc_dtype)(mix / 3 % 3);
            args.state_dtype = (dsc_dtype)(mix / 9 % 3);
            args.copy_dtype = (dsc_dtype)(mix / 27);
            TEST_CASE("%s: param %s grad %s state %s copy %s", dsc_optim_name(kind), dtype_names[args.param_dtype],
                      dtype_names[args.grad_dtype], dtype_names[args.state_dtype], dtype_names[args.copy_dtype]);
            check_mix(kind, &args, mix % 4 == 0 ? 2100 : 131, &random);
        }
    }
}

/* Every instruction set gives the bits of the first one, on any bit patterns, at every length and at odd addresses. */
static void test_isas(void)
{
    const struct dsc_optim_kind *kind;
    uint64_t random = 67;

    for (int32_t k = 0; (kind = dsc_optim_at(k)) != NULL; k++) {
        for (int l = 0; l < N_LENGTHS; l++) {
            for (int variant = 0; variant < 3; variant++) {
                struct dsc_optim_args args = busy_args(kind);
                int32_t isa_index = 0;
                const char *isa;
                struct model first = {0};
                bool is_first = true;

                if (variant == 1)
                    args.grad_dtype = args.copy_dtype = args.state_dtype = DSC_DTYPE_BF16;
                else if (variant == 2)
                    args.grad_dtype = args.copy_dtype = DSC_DTYPE_F16;

                struct model start = model_create(&args, awkward_lengths[l], 0);

                if (l % 2 == 0)
                    model_fill(&start, true, &random);
                else
                    model_fill_bits(&start, &random);
                while (next_isa(&isa_index, &isa)) {
                    struct model model = model_copy(&start, (size_t)((isa_index + l) % 4));
                    struct dsc_optim_tensor tensor = model_tensor(&model, dsc_optim_n_states(kind));

                    TEST_CASE("%s on %s, %d elements, variant %d", dsc_optim_name(kind), isa, (int)awkward_lengths[l], variant);
                    CHECK_STATUS(dsc_optim_step(kind, &args, &tensor, 1, NULL), DSC_OK);
                    if (is_first) {
                        first = model;
                        is_first = false;
                        continue;
                    }
                    CHECK_MODELS(&model, &first);
                    model_destroy(&model);
                }
                model_destroy(&first);
                model_destroy(&start);
            }
        }
    }
}

/* A list of tensors of all sizes gives the same bits with 1 to 8 threads, and with one call a tensor. */
static void test_lists(void)
{
    enum { N = 60 };
    const struct dsc_optim_kind *kind;
    uint64_t random = 71;

    for (int32_t k = 0; (kind = dsc_optim_at(k)) != NULL; k++) {
        struct dsc_optim_args args = busy_args(kind);
        struct model start[N];
        struct model wanted[N];
        struct dsc_optim_tensor tensors[N];
        int32_t n_states = dsc_optim_n_states(kind);

        args.grad_dtype = args.copy_dtype = DSC_DTYPE_BF16;
        for (int i = 0; i < N; i++) {
            start[i] = model_create(&args, i % 6 == 1 ? 0 : i % 20 == 7 ? 33000 + i : 1 + test_below(&random, 500), 0);
            model_fill(&start[i], true, &random);
            wanted[i] = model_copy(&start[i], 0);
            tensors[i] = model_tensor(&wanted[i], n_states);
        }
        TEST_CASE("%s: list", dsc_optim_name(kind));
        CHECK_STATUS(dsc_optim_step(kind, &args, tensors, N, NULL), DSC_OK);
        for (int n_threads = 2; n_threads <= 8; n_threads += 3) {
            struct model models[N];
            struct pool pool;

            pool_init(&pool, n_threads, 1);
            for (int i = 0; i < N; i++) {
                models[i] = model_copy(&start[i], 0);
                tensors[i] = model_tensor(&models[i], n_states);
            }
            CHECK_STATUS(dsc_optim_step(kind, &args, tensors, N, &pool.par), DSC_OK);
            for (int i = 0; i < N; i++) {
                TEST_CASE("%s: %d threads, tensor %d", dsc_optim_name(kind), n_threads, i);
                CHECK_MODELS(&models[i], &wanted[i]);
                model_destroy(&models[i]);
            }
            pool_clear(&pool);
        }
        for (int i = 0; i < N && !dsc_optim_needs_norms(kind); i++) {
            struct model alone = model_copy(&start[i], 0);
            struct dsc_optim_tensor tensor = model_tensor(&alone, n_states);

            TEST_CASE("%s: tensor %d alone", dsc_optim_name(kind), i);
            CHECK_STATUS(dsc_optim_step(kind, &args, &tensor, 1, NULL), DSC_OK);
            CHECK_MODELS(&alone, &wanted[i]);
            model_destroy(&alone);
        }
        for (int i = 0; i < N; i++) {
            model_destroy(&start[i]);
            model_destroy(&wanted[i]);
        }
    }
}

/* A step without a copy gives the same weights and states, and the copy's memory is not touched. */
static void test_no_copy(void)
{
    const struct dsc_optim_kind *kind;
    uint64_t random = 73;

    for (int32_t k = 0; (kind = dsc_optim_at(k)) != NULL; k++) {
        struct dsc_optim_args args = busy_args(kind);
        struct model with = model_create(&args, 1300, 0);

        model_fill(&with, true, &random);

        struct model without = model_copy(&with, 0);
        struct array copy = array_copy(&with.copy, 0);
        struct dsc_optim_tensor tensor = model_tensor(&with, dsc_optim_n_states(kind));

        TEST_CASE("%s: no copy", dsc_optim_name(kind));
        CHECK_STATUS(dsc_optim_step(kind, &args, &tensor, 1, NULL), DSC_OK);
        tensor = model_tensor(&without, dsc_optim_n_states(kind));
        tensor.copy = NULL;
        CHECK_STATUS(dsc_optim_step(kind, &args, &tensor, 1, NULL), DSC_OK);
        CHECK_SAME(&with.param, &without.param);
        CHECK_SAME(&with.state[0], &without.state[0]);
        CHECK_SAME(&without.copy, &copy);
        array_destroy(&copy);
        model_destroy(&with);
        model_destroy(&without);
    }
}

static void check_refused(const struct dsc_optim_kind *kind, const struct dsc_optim_args *args, const struct dsc_optim_tensor *bad,
                          int64_t n_tensors, dsc_status status, const char *word)
{
    struct dsc_optim_args good_args = busy_args(kind);
    uint64_t random = 79;
    struct model model = model_create(&good_args, 40, 0);

    model_fill(&model, true, &random);

    struct model before = model_copy(&model, 0);
    struct dsc_optim_tensor tensors[2] = {model_tensor(&model, dsc_optim_n_states(kind)), {0}};

    /* The first tensor is good. It must stay unchanged when the second tensor is refused. */
    if (bad != NULL)
        tensors[1] = *bad;
    TEST_CASE("%s: %s", dsc_optim_name(kind), word);
    CHECK_ERROR(dsc_optim_step(kind, args, tensors, n_tensors, NULL), status, word);
    CHECK_MODELS(&model, &before);
    model_destroy(&model);
    model_destroy(&before);
}

static void test_bad_args(void)
{
    const struct dsc_optim_kind *kind;

    for (int32_t k = 0; (kind = dsc_optim_at(k)) != NULL; k++) {
        const struct dsc_optim_args good = busy_args(kind);
        const char *name = dsc_optim_name(kind);
        bool has_betas = strcmp(name, "sgd") != 0 && strcmp(name, "adagrad") != 0;
        struct dsc_optim_args args;

#define REFUSED(change, word)                                              \
    do {                                                                   \
        args = good;                                                       \
        change;                                                            \
        check_refused(kind, &args, NULL, 1, DSC_EINVAL, word);             \
    } while (0)
        REFUSED(args.size -= 8, "args.size");
        REFUSED(args.flags |= 1u << 9, "args.flags");
        REFUSED(args.param_dtype = DSC_DTYPE_COUNT, "args.param_dtype");
        REFUSED(args.grad_dtype = (dsc_dtype)17, "args.grad_dtype");
        REFUSED(args.state_dtype = DSC_DTYPE_COUNT, "args.state_dtype");
        REFUSED(args.copy_dtype = DSC_DTYPE_COUNT, "args.copy_dtype");
        REFUSED(args.step = 0, "args.step");
        REFUSED(args.lr = (double)NAN, "args.lr");
        REFUSED(args.lr = -0.1, "args.lr");
        REFUSED(args.lr = 1e39, "args.lr"); /* finite, but not in f32 */
        REFUSED(args.beta1 = INFINITY, "args.beta1");
        REFUSED(args.beta2 = (double)NAN, "args.beta2");
        REFUSED(args.eps = (double)NAN, "args.eps");
        REFUSED(args.weight_decay = -1, "args.weight_decay");
        REFUSED(args.momentum = INFINITY, "args.momentum");
        REFUSED(args.dampening = (double)NAN, "args.dampening");
        REFUSED(args.lr_decay = INFINITY, "args.lr_decay");
        REFUSED(args.min_coeff = (double)NAN, "args.min_coeff");
        REFUSED(args.max_coeff = INFINITY, "args.max_coeff");
        REFUSED(args.grad_scale = INFINITY, "args.grad_scale");
        if (has_betas) {
            REFUSED(args.beta1 = 1, "args.beta1");
            REFUSED(args.beta2 = -0.1, "args.beta2");
            REFUSED(args.flags |= DSC_OPTIM_NESTEROV, "DSC_OPTIM_NESTEROV");
        }
        if (strcmp(name, "sgd") == 0) {
            REFUSED(args.momentum = 0, "momentum > 0");
            REFUSED(args.dampening = 0.5, "dampening 0");
            REFUSED(args.momentum = -0.5, "args.momentum");
        }
        if (strcmp(name, "adagrad") == 0) {
            REFUSED(args.eps = -1, "args.eps");
            REFUSED(args.lr_decay = -1, "args.lr_decay");
        }
#undef REFUSED
        check_refused(kind, NULL, NULL, 1, DSC_EINVAL, "args");
        check_refused(kind, &good, NULL, -1, DSC_EINVAL, "n_tensors");
    }
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    TEST_CASE("NULL");
    CHECK_ERROR(dsc_optim_step(NULL, &args, NULL, 0, NULL), DSC_EINVAL, "kind");
    CHECK_ERROR(dsc_optim_step(find_kind("adam"), &args, NULL, 1, NULL), DSC_EINVAL, "tensors");
    CHECK_STATUS(dsc_optim_step(find_kind("adam"), &args, NULL, 0, NULL), DSC_OK);
}

static void test_bad_tensors(void)
{
    const struct dsc_optim_kind *kind;

    for (int32_t k = 0; (kind = dsc_optim_at(k)) != NULL; k++) {
        const struct dsc_optim_args args = busy_args(kind);
        float x[5][4];
        const struct dsc_optim_tensor good = {
            .n_elems = 4, .param = x[0], .grad = x[1], .state = {x[2], dsc_optim_n_states(kind) > 1 ? x[3] : NULL}, .copy = x[4]};
        struct dsc_optim_tensor bad;

#define REFUSED(change, status, word)                          \
    do {                                                       \
        bad = good;                                            \
        change;                                                \
        check_refused(kind, &args, &bad, 2, status, word);     \
    } while (0)
        REFUSED(bad.n_elems = -1, DSC_EINVAL, "tensors[1].n_elems");
        REFUSED(bad.param = NULL, DSC_EINVAL, "tensors[1].param");
        REFUSED(bad.grad = NULL, DSC_EINVAL, "tensors[1].grad");
        REFUSED(bad.state[0] = NULL, DSC_EINVAL, "tensors[1].state[0]");
        if (dsc_optim_n_states(kind) > 1)
            REFUSED(bad.state[1] = NULL, DSC_EINVAL, "tensors[1].state[1]");
        REFUSED(bad.n_elems = INT64_MAX, DSC_EOVERFLOW, "2 tensors");
#undef REFUSED
    }
}

int main(void)
{
    test_registry();
    test_dtypes();
    test_isas();
    test_lists();
    test_no_copy();
    test_bad_args();
    test_bad_tensors();
    return test_finish(__FILE__);
}
