/*
 * Quantised states: optim/q8.c and cpu/q8.c against a search over all codes in f64, and a step on codes against three
 * steps: read the codes, step in f32, write the codes. Covers block borders, odd addresses, special values, threads and
 * instruction sets.
 */
#include "harness.h"

#include "pool.h"

#define BLOCK DSC_Q8_BLOCK_ELEMS
/* The smallest scales that a block with a nonzero value can have. */
#define MIN_SIGNED_SCALE 0x1p-98
#define MIN_UNSIGNED_SCALE 0x1p-62

/*
 * The allowed error of a value: two roundings for each time that the root is a factor, and one rounding for each
 * product.
 */
#define VALUE_ULPS 24

/* Codes and scales of one state, with guards around both. */
struct state {
    int64_t n;
    size_t shift;
    unsigned char *memory;
    unsigned char *codes;
    struct array scales;
};

static struct state state_create(int64_t n, size_t shift)
{
    struct state state = {.n = n, .shift = shift, .memory = test_alloc((size_t)n + 2 * GUARD_BYTES + shift)};

    memset(state.memory, GUARD_BYTE, (size_t)n + 2 * GUARD_BYTES + shift);
    state.codes = state.memory + GUARD_BYTES + shift;
    state.scales = array_create(DSC_DTYPE_F32, dsc_q8_n_scales(n), shift);
    return state;
}

static struct state state_copy(const struct state *from)
{
    struct state state = state_create(from->n, from->shift);

    memcpy(state.codes, from->codes, (size_t)from->n);
    array_destroy(&state.scales);
    state.scales = array_copy(&from->scales, from->shift);
    return state;
}

static void state_destroy(struct state *state)
{
    size_t begin = GUARD_BYTES + state->shift;
    size_t n_changed = 0;

    for (size_t i = 0; i < begin + GUARD_BYTES; i++)
        n_changed += state->memory[i < begin ? i : i + (size_t)state->n] != GUARD_BYTE;
    CHECK_EQ(n_changed, 0);
    free(state->memory);
    array_destroy(&state->scales);
}

#define CHECK_STATES(a, b)                                                  \
    (CHECK_BYTES((a)->codes, (b)->codes, (size_t)(a)->n), CHECK_SAME(&(a)->scales, &(b)->scales))

static int code_at(dsc_q8_code code, const struct state *state, int64_t i)
{
    return code == DSC_Q8_SIGNED ? (int)(int8_t)state->codes[i] : (int)state->codes[i];
}

/* The formulas of dsc/optim.h in f64. */
static double value_of(dsc_q8_code code, int c, double scale)
{
    double root = code == DSC_Q8_SIGNED ? c / 127.0 : c / 255.0;

    return code == DSC_Q8_SIGNED ? copysign(pow(root, 4), root) * scale : pow(root, 8) * scale;
}

static double root_of(dsc_q8_code code, double ratio)
{
    return code == DSC_Q8_SIGNED ? copysign(127 * pow(fabs(ratio), 0.25), ratio) : 255 * pow(ratio, 0.125);
}

/* The distance, in codes, to the code with the nearest root, found by trying all codes. */
static double nearest_distance(dsc_q8_code code, double root, bool may_be_zero)
{
    double best = 1e9;

    for (int c = code == DSC_Q8_SIGNED ? -127 : 0; c <= (code == DSC_Q8_SIGNED ? 127 : 255); c++)
        if ((c != 0 || may_be_zero) && fabs(root - c) < best)
            best = fabs(root - c);
    return best;
}

static void check_codes(dsc_q8_code code, const struct array *values, const struct state *state)
{
    for (int64_t begin = 0; begin < values->n; begin += BLOCK) {
        int64_t end = begin + BLOCK < values->n ? begin + BLOCK : values->n;
        double scale = (double)array_get(&state->scales, begin / BLOCK);
        double largest = 0.0;

        for (int64_t i = begin; i < end; i++)
            largest = fmax(largest, fabs((double)array_get(values, i)));
        TEST_AT(begin);
        if (code == DSC_Q8_SIGNED)
            CHECK_NEAR(scale, largest < MIN_SIGNED_SCALE ? 0.0 : largest, 0, 0);
        else
            CHECK_NEAR(scale, largest == 0.0 ? 0.0 : fmax(largest, MIN_UNSIGNED_SCALE), 0, 0);
        for (int64_t i = begin; i < end; i++) {
            double x = (double)array_get(values, i);
            int c = code_at(code, state, i);

            TEST_AT(i);
            if (x == 0.0 || scale == 0.0) {
                CHECK_EQ(c, 0);
                continue;
            }

            double root = root_of(code, x / scale);
            double best = nearest_distance(code, root, code == DSC_Q8_SIGNED);

            /* 1e-4 of a code allows for the error of f32 roots near a tie. */
            test_report(fabs(root - c) <= best + 1e-4 && (code == DSC_Q8_SIGNED || c > 0), __FILE__, __LINE__, "%a has code %d, its root is %.6f", x, c,
                        root);
        }
    }
}

static void check_values(dsc_q8_code code, const struct state *state, const struct array *values)
{
    for (int64_t i = 0; i < values->n; i++) {
        double scale = (double)array_get(&state->scales, i / BLOCK);
        int c = code_at(code, state, i);

        TEST_AT(i);
        CHECK_NEAR((double)array_get(values, i), value_of(code, c, scale), VALUE_ULPS, 0.0);
        if (c == (code == DSC_Q8_SIGNED ? 127 : 255))
            CHECK_NEAR((double)array_get(values, i), scale, 0, 0);
    }
}

/* values -> codes -> values -> the same codes. */
static void check_round_trip(dsc_q8_code code, const struct array *values, size_t shift, struct state *out_state)
{
    struct state state = state_create(values->n, shift);
    struct state again = state_create(values->n, 0);
    struct array back = array_create(DSC_DTYPE_F32, values->n, shift);

    CHECK_STATUS(dsc_q8_quantize(code, values->n, values->data, state.codes, state.scales.data, NULL), DSC_OK);
    check_codes(code, values, &state);
    CHECK_STATUS(dsc_q8_dequantize(code, state.codes, state.scales.data, 0, values->n, back.data, NULL), DSC_OK);
    check_values(code, &state, &back);
    CHECK_STATUS(dsc_q8_quantize(code, values->n, back.data, again.codes, again.scales.data, NULL), DSC_OK);
    CHECK_STATES(&again, &state);
    array_destroy(&back);
    state_destroy(&again);
    *out_state = state;
}

/* Fills with magnitudes spread over `decades` powers of ten, like an optimizer's moments. */
static void fill_wide(struct array *values, double decades, bool is_positive, uint64_t *random)
{
    for (int64_t i = 0; i < values->n; i++) {
        double x = pow(10.0, decades * test_uniform(random));

        array_set(values, i, (float)(test_below(random, 20) == 0 ? 0.0 : !is_positive && test_below(random, 2) == 0 ? -x : x));
    }
}

static const int64_t lengths[] = {0, 1, 2, 15, 16, 17, 255, 256, 257, 511, 512, 1021, 5003};
#define N_LENGTHS_Q8 (sizeof lengths / sizeof lengths[0])

static void test_codes(const char *isa)
{
    uint64_t random = 5;

    for (dsc_q8_code code = DSC_Q8_SIGNED; code <= DSC_Q8_UNSIGNED; code++) {
        for (size_t l = 0; l < N_LENGTHS_Q8; l++) {
            struct array values = array_create(DSC_DTYPE_F32, lengths[l], l % 4);
            struct state state;

            for (int decades = 0; decades <= 36; decades += 12) {
                TEST_CASE("%s: code %d, %d elements, %d decades", isa, (int)code, (int)lengths[l], decades);
                fill_wide(&values, decades, code == DSC_Q8_UNSIGNED, &random);
                check_round_trip(code, &values, l % 3, &state);
                state_destroy(&state);
            }
            array_destroy(&values);
        }
    }
}

/* Every code at every exponent of the scale reads as the formula says, and writing the value gives the same code. */
static void test_all_codes(const char *isa)
{
    for (dsc_q8_code code = DSC_Q8_SIGNED; code <= DSC_Q8_UNSIGNED; code++) {
        int min_exponent = code == DSC_Q8_SIGNED ? -98 : -62;

        for (int exponent = min_exponent; exponent <= 127; exponent++) {
            struct state state = state_create(BLOCK, 0);
            struct state again = state_create(BLOCK, 0);
            struct array values = array_create(DSC_DTYPE_F32, BLOCK, 0);

            TEST_CASE("%s: code %d, scale 2^%d", isa, (int)code, exponent);
            for (int i = 0; i < BLOCK; i++)
                state.codes[i] = (unsigned char)(code == DSC_Q8_SIGNED && i == 128 ? 0 : i); /* no block has -128 */
            array_set(&state.scales, 0, ldexpf(exponent == min_exponent ? 1.0f : 1.37f, exponent));
            CHECK_STATUS(dsc_q8_dequantize(code, state.codes, state.scales.data, 0, BLOCK, values.data, NULL), DSC_OK);
            check_values(code, &state, &values);
            CHECK_STATUS(dsc_q8_quantize(code, BLOCK, values.data, again.codes, again.scales.data, NULL), DSC_OK);
            CHECK_STATES(&again, &state);
            array_destroy(&values);
            state_destroy(&state);
            state_destroy(&again);
        }
    }
}

static void test_specials(const char *isa)
{
    static const float specials[] = {0.0f, -0.0f, 0x1p-149f, 0x1p-126f, 0x1.fffffep-127f, 0x1p-98f, 0x1.fffffep-99f, 0x1p-62f, 0x1.8p-63f, 1.0f, 0x1.fffffep127f, 0x1p127f};
    enum { N = sizeof specials / sizeof specials[0] };

    for (dsc_q8_code code = DSC_Q8_SIGNED; code <= DSC_Q8_UNSIGNED; code++) {
        struct array values = array_create(DSC_DTYPE_F32, 3 * BLOCK + 5, 0);
        struct state state;

        /* Each value alone in a block of zeros, and together with each other value. */
        for (int a = 0; a < N; a++) {
            for (int b = 0; b < N; b++) {
                TEST_CASE("%s: code %d, %a beside %a", isa, (int)code, (double)specials[a], (double)specials[b]);
                for (int64_t i = 0; i < values.n; i++)
                    array_set(&values, i, 0.0f);
                array_set(&values, 3, specials[a]);
                array_set(&values, BLOCK + 255, code == DSC_Q8_SIGNED ? -specials[a] : specials[a]);
                array_set(&values, BLOCK + 254, specials[b]);
                array_set(&values, 3 * BLOCK + 4, specials[b]);
                check_round_trip(code, &values, 1, &state);
                CHECK_EQ(array_bits(&state.scales, 2), 0);
                state_destroy(&state);
            }
        }
        /* An infinity or NaN spoils the block that holds it, and no other block. */
        for (int kind = 0; kind < 2; kind++) {
            struct array back = array_create(DSC_DTYPE_F32, values.n, 0);

            TEST_CASE("%s: code %d, %s", isa, (int)code, kind == 0 ? "NaN" : "inf");
            for (int64_t i = 0; i < values.n; i++)
                array_set(&values, i, 0.5f);
            array_set(&values, BLOCK + 7, kind == 0 ? NAN : INFINITY);
            state = state_create(values.n, 0);
            CHECK_STATUS(dsc_q8_quantize(code, values.n, values.data, state.codes, state.scales.data, NULL), DSC_OK);
            CHECK_STATUS(dsc_q8_dequantize(code, state.codes, state.scales.data, 0, values.n, back.data, NULL), DSC_OK);
            for (int64_t i = 0; i < values.n; i++) {
                TEST_AT(i);
                CHECK(i / BLOCK == 1 ? isnan(array_get(&back, i)) : array_get(&back, i) == 0.5f);
            }
            array_destroy(&back);
            state_destroy(&state);
        }
        array_destroy(&values);
    }
}

/* Converting a range gives the same result as that range of the whole. */
static void test_ranges(void)
{
    enum { N = 3 * BLOCK + 77 };
    struct array values = array_create(DSC_DTYPE_F32, N, 0);
    struct array whole = array_create(DSC_DTYPE_F32, N, 0);
    struct state state = state_create(N, 0);
    uint64_t random = 9;

    TEST_CASE("ranges");
    fill_wide(&values, 3, true, &random);
    CHECK_STATUS(dsc_q8_quantize(DSC_Q8_UNSIGNED, N, values.data, state.codes, state.scales.data, NULL), DSC_OK);
    CHECK_STATUS(dsc_q8_dequantize(DSC_Q8_UNSIGNED, state.codes, state.scales.data, 0, N, whole.data, NULL), DSC_OK);
    for (int round = 0; round < 300; round++) {
        int64_t begin = test_below(&random, N);
        int64_t n = test_below(&random, N - begin + 1);
        struct array part = array_create(DSC_DTYPE_F32, n, 0);

        CHECK_STATUS(dsc_q8_dequantize(DSC_Q8_UNSIGNED, state.codes, state.scales.data, begin, n, part.data, NULL), DSC_OK);
        CHECK_BYTES(part.data, whole.data + 4 * begin, (size_t)n * 4);
        array_destroy(&part);
    }
    array_destroy(&values);
    array_destroy(&whole);
    state_destroy(&state);
}

static struct dsc_optim_args args_of(const struct dsc_optim_kind *kind, int64_t step)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    args.step = step;
    args.lr = 0.01;
    args.weight_decay = 0.1;
    args.grad_scale = 0.5;
    args.grad_dtype = args.copy_dtype = DSC_DTYPE_BF16;
    if (strcmp(dsc_optim_name(kind), "sgd") == 0)
        args.momentum = 0.9;
    return args;
}

/* A tensor with its states as codes. */
struct quantised {
    struct model model; /* state: f32 */
    struct state state[DSC_OPTIM_MAX_STATES];
};

static struct quantised quantised_create(const struct dsc_optim_kind *kind, int64_t n, size_t shift, uint64_t *random)
{
    struct dsc_optim_args args = args_of(kind, 1);
    struct quantised q = {.model = model_create(&args, n, shift)};

    model_fill(&q.model, false, random);
    for (int slot = 0; slot < DSC_OPTIM_MAX_STATES; slot++) {
        q.state[slot] = state_create(n, shift);
        CHECK_STATUS(dsc_q8_quantize(slot == 0 ? DSC_Q8_SIGNED : DSC_Q8_UNSIGNED, n, q.model.state[slot].data, q.state[slot].codes,
                                     q.state[slot].scales.data, NULL),
                     DSC_OK);
    }
    return q;
}

static struct quantised quantised_copy(const struct quantised *from)
{
    return (struct quantised){
        .model = model_copy(&from->model, 0),
        .state = {state_copy(&from->state[0]), state_copy(&from->state[1])},
    };
}

static void quantised_destroy(struct quantised *q)
{
    model_destroy(&q->model);
    state_destroy(&q->state[0]);
    state_destroy(&q->state[1]);
}

static struct dsc_optim_tensor quantised_tensor(const struct quantised *q, int32_t n_states)
{
    struct dsc_optim_tensor tensor = model_tensor(&q->model, n_states);

    for (int32_t slot = 0; slot < n_states; slot++) {
        tensor.state[slot] = q->state[slot].codes;
        tensor.state_scale[slot] = q->state[slot].scales.data;
    }
    return tensor;
}

/* The expected result of a step on codes: codes read, an f32 step, codes written. */
static void step_in_parts(const struct dsc_optim_kind *kind, struct dsc_optim_args args, struct quantised *q)
{
    int32_t n_states = dsc_optim_n_states(kind);
    struct dsc_optim_tensor tensor = model_tensor(&q->model, n_states);
    int64_t n = q->model.param.n;

    for (int32_t slot = 0; slot < n_states; slot++)
        CHECK_STATUS(dsc_q8_dequantize(dsc_optim_q8_code(kind, slot), q->state[slot].codes, q->state[slot].scales.data, 0, n,
                                       q->model.state[slot].data, NULL),
                     DSC_OK);
    CHECK_STATUS(dsc_optim_step(kind, &args, &tensor, 1, NULL), DSC_OK);
    for (int32_t slot = 0; slot < n_states; slot++)
        CHECK_STATUS(dsc_q8_quantize(dsc_optim_q8_code(kind, slot), n, q->model.state[slot].data, q->state[slot].codes,
                                     q->state[slot].scales.data, NULL),
                     DSC_OK);
}

static void check_quantised(const struct quantised *a, const struct quantised *b)
{
    CHECK_SAME(&a->model.param, &b->model.param);
    CHECK_SAME(&a->model.copy, &b->model.copy);
    for (int slot = 0; slot < DSC_OPTIM_MAX_STATES; slot++)
        CHECK_STATES(&a->state[slot], &b->state[slot]);
}

/* A list of tensors whose blocks straddle the borders of chunks, on all instruction sets and with 1 to 8 threads. */
static void test_steps(const char *isa)
{
    static const int64_t sizes[] = {257, 0, 1, 33000, 255, 7, 256, 65537, 300, 31, 40961};
    enum { N = sizeof sizes / sizeof sizes[0] };
    const struct dsc_optim_kind *kind;
    int n_kinds = 0;

    for (int32_t k = 0; (kind = dsc_optim_at(k)) != NULL; k++) {
        struct quantised start[N];
        struct dsc_optim_tensor tensors[N];
        int32_t n_states = dsc_optim_n_states(kind);
        uint64_t random = 71;

        if (dsc_optim_q8_code(kind, 0) == DSC_Q8_NONE)
            continue;
        n_kinds++;
        for (int i = 0; i < N; i++)
            start[i] = quantised_create(kind, sizes[i], (size_t)i % 3, &random);
        for (int step = 1; step <= 3; step++) {
            struct dsc_optim_args args = args_of(kind, step);
            struct quantised wanted[N];

            for (int i = 0; i < N; i++) {
                wanted[i] = quantised_copy(&start[i]);
                step_in_parts(kind, args, &wanted[i]);
            }
            args.flags |= DSC_OPTIM_STATE_Q8;
            args.state_dtype = DSC_DTYPE_BF16; /* not looked at */
            for (int n_threads = 1; n_threads <= 8; n_threads += n_threads == 1 ? 1 : 3) {
                struct quantised models[N];
                struct pool pool;

                pool_init(&pool, n_threads, 1);
                for (int i = 0; i < N; i++) {
                    models[i] = quantised_copy(&start[i]);
                    tensors[i] = quantised_tensor(&models[i], n_states);
                }
                CHECK_STATUS(dsc_optim_step(kind, &args, tensors, N, n_threads == 1 ? NULL : &pool.par), DSC_OK);
                for (int i = 0; i < N; i++) {
                    TEST_CASE("%s, %s: step %d, %d threads, tensor %d", isa, dsc_optim_name(kind), step, n_threads, i);
                    check_quantised(&models[i], &wanted[i]);
                    quantised_destroy(&models[i]);
                }
                pool_clear(&pool);
            }
            for (int i = 0; i < N; i++) {
                quantised_destroy(&start[i]);
                start[i] = wanted[i];
            }
        }
        for (int i = 0; i < N; i++)
            quantised_destroy(&start[i]);
    }
    CHECK_EQ(n_kinds, 4);
}

static void test_threads(void)
{
    enum { N = 300007 };
    struct array values = array_create(DSC_DTYPE_F32, N, 0);
    struct array back = array_create(DSC_DTYPE_F32, N, 0);
    struct array wanted_back = array_create(DSC_DTYPE_F32, N, 0);
    struct state state = state_create(N, 0);
    struct state wanted = state_create(N, 0);
    uint64_t random = 3;
    struct pool pool;

    TEST_CASE("threads");
    fill_wide(&values, 4, true, &random);
    pool_init(&pool, 5, 1);
    CHECK_STATUS(dsc_q8_quantize(DSC_Q8_UNSIGNED, N, values.data, wanted.codes, wanted.scales.data, NULL), DSC_OK);
    CHECK_STATUS(dsc_q8_quantize(DSC_Q8_UNSIGNED, N, values.data, state.codes, state.scales.data, &pool.par), DSC_OK);
    CHECK_STATES(&state, &wanted);
    CHECK_STATUS(dsc_q8_dequantize(DSC_Q8_UNSIGNED, state.codes, state.scales.data, 0, N, wanted_back.data, NULL), DSC_OK);
    CHECK_STATUS(dsc_q8_dequantize(DSC_Q8_UNSIGNED, state.codes, state.scales.data, 0, N, back.data, &pool.par), DSC_OK);
    CHECK_SAME(&back, &wanted_back);
    /* One negative value anywhere is refused, and nothing is written. */
    array_set(&values, 299999, -1e-30f);
    CHECK_ERROR(dsc_q8_quantize(DSC_Q8_UNSIGNED, N, values.data, state.codes, state.scales.data, &pool.par), DSC_EINVAL, "values[299999]");
    CHECK_STATES(&state, &wanted);
    pool_clear(&pool);
    array_destroy(&values);
    array_destroy(&back);
    array_destroy(&wanted_back);
    state_destroy(&state);
    state_destroy(&wanted);
}

static void test_refused(void)
{
    float values[4] = {1, 2, 3, 4};
    float scales[1] = {1};
    unsigned char codes[4] = {1, 2, 3, 4};
    const struct dsc_optim_kind *adam = find_kind("adam");
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    struct dsc_optim_tensor tensor = {.n_elems = 4, .param = values, .grad = values, .state = {codes, codes}, .state_scale = {scales, NULL}};

    TEST_CASE("refused");
    CHECK_EQ(dsc_q8_n_scales(0), 0);
    CHECK_EQ(dsc_q8_n_scales(1), 1);
    CHECK_EQ(dsc_q8_n_scales(256), 1);
    CHECK_EQ(dsc_q8_n_scales(257), 2);
    CHECK_EQ(dsc_q8_n_scales(INT64_MAX), (int64_t)1 << 55);
    CHECK_EQ(dsc_optim_q8_code(adam, 0), DSC_Q8_SIGNED);
    CHECK_EQ(dsc_optim_q8_code(adam, 1), DSC_Q8_UNSIGNED);
    CHECK_EQ(dsc_optim_q8_code(adam, 2), DSC_Q8_NONE);
    CHECK_EQ(dsc_optim_q8_code(adam, -1), DSC_Q8_NONE);
    CHECK_EQ(dsc_optim_q8_code(find_kind("lion"), 1), DSC_Q8_NONE);
    CHECK_EQ(dsc_optim_q8_code(find_kind("lamb"), 0), DSC_Q8_NONE);
    CHECK_EQ(dsc_optim_q8_code(find_kind("adagrad"), 0), DSC_Q8_NONE);

    CHECK_ERROR(dsc_q8_quantize(DSC_Q8_NONE, 4, values, codes, scales, NULL), DSC_EINVAL, "code is 0");
    CHECK_ERROR(dsc_q8_quantize((dsc_q8_code)3, 4, values, codes, scales, NULL), DSC_EINVAL, "code is 3");
    CHECK_ERROR(dsc_q8_quantize(DSC_Q8_SIGNED, -1, values, codes, scales, NULL), DSC_EINVAL, "n_elems is -1");
    CHECK_ERROR(dsc_q8_quantize(DSC_Q8_SIGNED, 4, NULL, codes, scales, NULL), DSC_EINVAL, "values is NULL");
    CHECK_ERROR(dsc_q8_quantize(DSC_Q8_SIGNED, 4, values, NULL, scales, NULL), DSC_EINVAL, "codes is NULL");
    CHECK_ERROR(dsc_q8_quantize(DSC_Q8_SIGNED, 4, values, codes, NULL, NULL), DSC_EINVAL, "scales is NULL");
    CHECK_ERROR(dsc_q8_dequantize(DSC_Q8_SIGNED, codes, scales, -1, 1, values, NULL), DSC_EINVAL, "begin is -1");
    CHECK_STATUS(dsc_q8_quantize(DSC_Q8_SIGNED, 0, NULL, NULL, NULL, NULL), DSC_OK);
    CHECK_STATUS(dsc_q8_dequantize(DSC_Q8_SIGNED, NULL, NULL, 0, 0, NULL, NULL), DSC_OK);

    args.flags |= DSC_OPTIM_STATE_Q8;
    CHECK_ERROR(dsc_optim_step(adam, &args, &tensor, 1, NULL), DSC_EINVAL, "state_scale[1]");
    tensor.state_scale[0] = NULL;
    CHECK_ERROR(dsc_optim_step(adam, &args, &tensor, 1, NULL), DSC_EINVAL, "state_scale[0]");
    CHECK_ERROR(dsc_optim_step(find_kind("lamb"), &args, &tensor, 1, NULL), DSC_ENOTSUP, "lamb");
    CHECK_ERROR(dsc_optim_step(find_kind("adagrad"), &args, &tensor, 1, NULL), DSC_ENOTSUP, "adagrad");
    CHECK_ERROR(dsc_muon_momentum(&args, &tensor, 1, NULL), DSC_ENOTSUP, "muon");
    /* SGD without momentum has no state, so it needs no scale. */
    CHECK_STATUS(dsc_optim_step(find_kind("sgd"), &args, &(struct dsc_optim_tensor){.n_elems = 1, .param = values, .grad = &values[1]}, 1, NULL),
                 DSC_OK);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(codes[i], i + 1);
}

int main(void)
{
    int32_t isa_index = 0;
    const char *isa;

    while (next_isa(&isa_index, &isa)) {
        test_codes(isa);
        test_all_codes(isa);
        test_specials(isa);
        test_steps(isa);
    }
    test_ranges();
    test_threads();
    test_refused();
    return test_finish(__FILE__);
}
