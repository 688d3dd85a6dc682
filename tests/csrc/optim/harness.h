/* Optimizer states for tests, and the comparison of a step with its formula in f64, element by element. */
#ifndef DSC_TEST_OPTIM_HARNESS_H
#define DSC_TEST_OPTIM_HARNESS_H

#include "arrays.h"

#include "dsc/optim.h"

/* The arrays of one tensor. */
struct model {
    struct array param;
    struct array grad;
    struct array state[DSC_OPTIM_MAX_STATES];
    struct array copy;
};

static inline struct model model_create(const struct dsc_optim_args *args, int64_t n, size_t shift_bytes)
{
    return (struct model){
        .param = array_create(args->param_dtype, n, shift_bytes),
        .grad = array_create(args->grad_dtype, n, shift_bytes),
        .state = {array_create(args->state_dtype, n, shift_bytes), array_create(args->state_dtype, n, shift_bytes)},
        .copy = array_create(args->copy_dtype, n, shift_bytes),
    };
}

/*
 * Fills the arrays with values as in the middle of a run. The second moments, and Adagrad's sum in the first slot, are
 * not negative.
 */
static inline void model_fill(struct model *model, bool is_first_positive, uint64_t *random)
{
    array_fill(&model->param, 1.0, false, random);
    array_fill(&model->grad, 0.5, false, random);
    array_fill(&model->state[0], 0.1, is_first_positive, random);
    array_fill(&model->state[1], 0.01, true, random);
    array_fill(&model->copy, 1.0, false, random);
}

static inline void model_fill_bits(struct model *model, uint64_t *random)
{
    array_fill_bits(&model->param, random);
    array_fill_bits(&model->grad, random);
    array_fill_bits(&model->state[0], random);
    array_fill_bits(&model->state[1], random);
    array_fill_bits(&model->copy, random);
}

static inline struct model model_copy(const struct model *from, size_t shift_bytes)
{
    return (struct model){
        .param = array_copy(&from->param, shift_bytes),
        .grad = array_copy(&from->grad, shift_bytes),
        .state = {array_copy(&from->state[0], shift_bytes), array_copy(&from->state[1], shift_bytes)},
        .copy = array_copy(&from->copy, shift_bytes),
    };
}

static inline void model_destroy(struct model *model)
{
    array_destroy(&model->param);
    array_destroy(&model->grad);
    array_destroy(&model->state[0]);
    array_destroy(&model->state[1]);
    array_destroy(&model->copy);
}

/* Slots past n_states are NULL, as the contract asks. */
static inline struct dsc_optim_tensor model_tensor(const struct model *model, int32_t n_states)
{
    return (struct dsc_optim_tensor){
        .n_elems = model->param.n,
        .param = model->param.data,
        .grad = model->grad.data,
        .state = {n_states > 0 ? model->state[0].data : NULL, n_states > 1 ? model->state[1].data : NULL},
        .copy = model->copy.data,
    };
}

static inline void check_models(const struct model *a, const struct model *b, const char *file, int line)
{
    check_same(&a->param, &b->param, "param", file, line);
    check_same(&a->grad, &b->grad, "grad", file, line);
    check_same(&a->state[0], &b->state[0], "state[0]", file, line);
    check_same(&a->state[1], &b->state[1], "state[1]", file, line);
    check_same(&a->copy, &b->copy, "copy", file, line);
}

#define CHECK_MODELS(a, b) check_models((a), (b), __FILE__, __LINE__)

static inline const struct dsc_optim_kind *find_kind(const char *name)
{
    const struct dsc_optim_kind *kind = NULL;

    CHECK_STATUS(dsc_optim_find(name, &kind), DSC_OK);
    if (kind == NULL)
        exit(test_finish(__FILE__));
    return kind;
}

/* One element before the step, and the formula's result. */
struct element {
    double param;
    double grad; /* times grad_scale, and its sign turned under MAXIMIZE */
    double state[DSC_OPTIM_MAX_STATES];
    /*
     * Rounding errors are measured relative to the largest term of a sum. A sum whose terms cancel is then held to the
     * precision of its terms.
     */
    double param_floor;
    double state_floor[DSC_OPTIM_MAX_STATES];
    bool is_ambiguous; /* the formula jumps within rounding error of this value */
};

typedef void formula(const struct dsc_optim_args *args, struct element *element);

#define FORMULA_ULPS 8

/* Runs several f32 steps. Each is compared with the formula applied to the f32 values before that step. */
static inline void check_formula(const char *name, const struct dsc_optim_args *first_args, formula *formula, bool is_first_positive)
{
    static const int64_t lengths[] = {1, 17, 1025, 2500};
    const struct dsc_optim_kind *kind = find_kind(name);
    int32_t n_states = dsc_optim_n_states(kind);
    int32_t isa_index = 0;
    const char *isa;
    uint64_t random = 41;

    while (next_isa(&isa_index, &isa)) {
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
            struct dsc_optim_args args = *first_args;
            struct model model = model_create(&args, lengths[l], 0);

            model_fill(&model, is_first_positive, &random);
            for (int step = 0; step < 4; step++, args.step++) {
                struct model before = model_copy(&model, 0);
                struct dsc_optim_tensor tensor = model_tensor(&model, n_states);

                TEST_CASE("%s %s step %d, %d elements", name, isa, (int)args.step, (int)lengths[l]);
                CHECK_STATUS(dsc_optim_step(kind, &args, &tensor, 1, NULL), DSC_OK);
                for (int64_t i = 0; i < lengths[l]; i++) {
                    double grad = (double)array_get(&before.grad, i) * args.grad_scale;
                    struct element e = {
                        .param = (double)array_get(&before.param, i),
                        .grad = (args.flags & DSC_OPTIM_MAXIMIZE) != 0 ? -grad : grad,
                        .state = {(double)array_get(&before.state[0], i), (double)array_get(&before.state[1], i)},
                    };

                    TEST_AT(i);
                    formula(&args, &e);
                    for (int32_t slot = 0; slot < n_states; slot++)
                        CHECK_NEAR((double)array_get(&model.state[slot], i), e.state[slot], FORMULA_ULPS, e.state_floor[slot]);
                    if (!e.is_ambiguous)
                        CHECK_NEAR((double)array_get(&model.param, i), e.param, FORMULA_ULPS, e.param_floor);
                    CHECK(array_bits(&model.copy, i) == array_bits(&model.param, i));
                }
                array_fill(&model.grad, 0.5, false, &random);
                model_destroy(&before);
            }
            model_destroy(&model);
        }
    }
}

#endif
