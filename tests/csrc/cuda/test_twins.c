/*
 * Compares the CUDA library with the host's loops, on an emulated device and on a real device if there is one.
 * Elementwise results must have the same bits, and sums may differ by 1e-12. The same mistake must give the same error
 * message.
 */
#include "device.h"
#include "test.h"

#include "base/half.h"
#include "dsc/flat.h"
#include "dsc/optim.h"

#define MAX_TENSORS 80
#define GUARD_BYTES 64  /* around each list; must not change */

static const dsc_dtype dtypes[] = {DSC_DTYPE_F32, DSC_DTYPE_BF16, DSC_DTYPE_F16};
static const char *const dtype_names[] = {"f32", "bf16", "f16"};

static float read_as_f32(dsc_dtype dtype, const void *data, int64_t i)
{
    if (dtype == DSC_DTYPE_F32)
        return ((const float *)data)[i];
    return dtype == DSC_DTYPE_BF16 ? dsc_bf16_to_f32(((const uint16_t *)data)[i]) : dsc_f16_to_f32(((const uint16_t *)data)[i]);
}

static void write_f32(dsc_dtype dtype, void *data, int64_t i, float value)
{
    if (dtype == DSC_DTYPE_F32)
        ((float *)data)[i] = value;
    else
        ((uint16_t *)data)[i] = dtype == DSC_DTYPE_BF16 ? dsc_f32_to_bf16(value) : dsc_f32_to_f16(value);
}

/* One operand of all tensors of a list, packed one tensor after the other, on the host and on the device. */
struct operand {
    dsc_dtype dtype;
    int64_t n_elems;
    int64_t shift_elems; /* off the alignment that memory comes with */
    size_t n_bytes;      /* with the guards */
    char *host;
    char *device;
};

/* The begin of the elements in the operand's host memory, its device memory or a copy of either. */
static char *begin_of(const struct operand *operand, char *memory)
{
    return memory + GUARD_BYTES + (size_t)operand->shift_elems * dsc_dtype_bytes(operand->dtype);
}

static struct operand make_operand(const struct device *device, dsc_dtype dtype, int64_t n_elems, int64_t shift_elems)
{
    struct operand operand = {.dtype = dtype, .n_elems = n_elems, .shift_elems = shift_elems};

    operand.n_bytes = (size_t)(n_elems + 1) * dsc_dtype_bytes(dtype) + 2 * GUARD_BYTES;
    operand.host = test_alloc(operand.n_bytes);
    operand.device = device_alloc(device, operand.n_bytes);
    memset(operand.host, 0x5a, operand.n_bytes);
    return operand;
}

static void upload(const struct device *device, const struct operand *operand)
{
    device_upload(device, operand->device, operand->host, operand->n_bytes);
}

static void free_operand(const struct device *device, struct operand *operand)
{
    free(operand->host);
    device_free(device, operand->device);
}

/* Checks for equal bits, or NaN on both sides: the processor chooses the payload of a NaN. */
static void check_same(const struct device *device, const struct operand *operand, const char *what)
{
    char *memory = test_alloc(operand->n_bytes);
    int64_t n_different = 0, first = -1;

    device_download(device, memory, operand->device, operand->n_bytes);

    const char *got = begin_of(operand, memory), *wanted = begin_of(operand, operand->host);
    size_t head_bytes = (size_t)(got - memory), tail = head_bytes + (size_t)operand->n_elems * dsc_dtype_bytes(operand->dtype);

    for (int64_t i = 0; i < operand->n_elems; i++) {
        float a = read_as_f32(operand->dtype, got, i), b = read_as_f32(operand->dtype, wanted, i);

        if (dsc_f32_bits(a) != dsc_f32_bits(b) && !(a != a && b != b) && n_different++ == 0)
            first = i;
    }
    test_report(n_different == 0, __FILE__, __LINE__, "%s: %s: %" PRId64 " of %" PRId64 " elements differ, first [%" PRId64 "]: %.9g and on the host %.9g",
                device->name, what, n_different, operand->n_elems, first, first < 0 ? 0.0 : (double)read_as_f32(operand->dtype, got, first),
                first < 0 ? 0.0 : (double)read_as_f32(operand->dtype, wanted, first));
    CHECK_BYTES(memory, operand->host, head_bytes);
    CHECK_BYTES(memory + tail, operand->host + tail, operand->n_bytes - tail);
    free(memory);
}

/* |device - host| is at most ulps units of the dtype's last place. */
static void check_near_operand(const struct device *device, const struct operand *operand, double ulps)
{
    static const double steps[] = {1, 65536, 8192};
    char *memory = test_alloc(operand->n_bytes);

    device_download(device, memory, operand->device, operand->n_bytes);
    for (int64_t i = 0; i < operand->n_elems; i++)
        CHECK_NEAR(read_as_f32(operand->dtype, begin_of(operand, memory), i),
                   read_as_f32(operand->dtype, begin_of(operand, operand->host), i), ulps * steps[operand->dtype], 1e-3);
    free(memory);
}

static const float specials[] = {0.0f,      -0.0f,     INFINITY,  -INFINITY, NAN,     1e-45f,  -1e-40f, 1.17549435e-38f,
                                 3.4e38f,   -3.4e38f,  65504.0f,  65520.0f,  6e-8f,   5.9e-5f, 1.0f,    -1.0f};

/* Fills with values of the magnitude that training has. With has_specials, one value in eight is special. */
static void fill_random(const struct operand *operand, uint64_t *seed, double scale, double middle, bool has_specials)
{
    for (int64_t i = 0; i <= operand->n_elems; i++) {
        float value = (float)(test_uniform(seed) * scale + middle);

        if (has_specials && test_below(seed, 8) == 0)
            value = specials[test_below(seed, sizeof specials / sizeof specials[0])];
        write_f32(operand->dtype, operand->host + GUARD_BYTES, i, value);
    }
}

/* A list of tensors with its operands. The list exists twice: over host memory and over device memory. */
struct list {
    int64_t n_tensors;
    int64_t n_elems[MAX_TENSORS];
    struct operand param, grad, state[DSC_OPTIM_MAX_STATES], copy;
    struct dsc_optim_tensor on_host[MAX_TENSORS], on_device[MAX_TENSORS];
};

/* copy_every: 0 no copies, 1 all tensors have one, 2 every other tensor. */
static void place(struct list *list, bool is_on_device, int copy_every, struct dsc_optim_tensor *out_tensors)
{
#define AT(operand) (begin_of(&list->operand, is_on_device ? list->operand.device : list->operand.host) + \
                     (size_t)offset * dsc_dtype_bytes(list->operand.dtype))
    int64_t offset = 0;

    for (int64_t i = 0; i < list->n_tensors; i++) {
        out_tensors[i] = (struct dsc_optim_tensor){.n_elems = list->n_elems[i]};
        if (list->n_elems[i] == 0)
            continue;
        out_tensors[i].param = AT(param);
        out_tensors[i].grad = AT(grad);
        out_tensors[i].state[0] = AT(state[0]);
        out_tensors[i].state[1] = AT(state[1]);
        out_tensors[i].copy = copy_every > 0 && i % copy_every == 0 ? AT(copy) : NULL;
        offset += list->n_elems[i];
    }
#undef AT
}

static struct operand *operands_of(struct list *list, int i)
{
    struct operand *operands[] = {&list->param, &list->grad, &list->state[0], &list->state[1], &list->copy};

    return i < 5 ? operands[i] : NULL;
}

/* Bit i of shifted moves operand i off its alignment. */
#define ALL_SHIFTED 31u

static void make_list(const struct device *device, struct list *list, const int64_t *sizes, int64_t n_tensors, unsigned shifted,
                      const struct dsc_optim_args *args, int copy_every, bool has_specials)
{
    uint64_t seed = 7;
    int64_t n_elems = 0;

    list->n_tensors = n_tensors;
    for (int64_t i = 0; i < n_tensors; i++)
        n_elems += list->n_elems[i] = sizes[i];
    list->param = make_operand(device, args->param_dtype, n_elems, shifted >> 0 & 1);
    list->grad = make_operand(device, args->grad_dtype, n_elems, shifted >> 1 & 1);
    list->state[0] = make_operand(device, args->state_dtype, n_elems, shifted >> 2 & 1);
    list->state[1] = make_operand(device, args->state_dtype, n_elems, shifted >> 3 & 1);
    list->copy = make_operand(device, args->copy_dtype, n_elems, shifted >> 4 & 1);
    fill_random(&list->param, &seed, 1.0, 0.0, has_specials);
    fill_random(&list->grad, &seed, 0.1, 0.0, has_specials);
    fill_random(&list->state[0], &seed, 0.1, 0.0, false);
    fill_random(&list->state[1], &seed, 0.004, 0.005, false); /* a second moment is positive */
    for (int i = 0; operands_of(list, i) != NULL; i++)
        upload(device, operands_of(list, i));
    place(list, false, copy_every, list->on_host);
    place(list, true, copy_every, list->on_device);
}

static void free_list(const struct device *device, struct list *list)
{
    for (int i = 0; operands_of(list, i) != NULL; i++)
        free_operand(device, operands_of(list, i));
}

static void check_list(const struct device *device, struct list *list)
{
    static const char *const names[] = {"param", "grad", "state[0]", "state[1]", "copy"};

    for (int i = 0; operands_of(list, i) != NULL; i++)
        check_same(device, operands_of(list, i), names[i]);
}

static struct dsc_optim_args some_args(int64_t step)
{
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;

    args.step = step;
    args.lr = 0.01;
    args.weight_decay = 0.1;
    args.lr_decay = 0.01;
    args.grad_scale = 0.37;
    return args;
}

static const int64_t hard_sizes[] = {0, 1, 3, 4, 5, 0, 255, 256, 1023, 1025, 4095, 4096, 4097, 8191, 16384, 0};
#define N_HARD ((int64_t)(sizeof hard_sizes / sizeof hard_sizes[0]))
static const int64_t short_sizes[] = {1, 0, 131, 5};
#define N_SHORT ((int64_t)(sizeof short_sizes / sizeof short_sizes[0]))

static void run_steps(const struct device *device, const char *kind, struct dsc_optim_args args, const int64_t *sizes, int64_t n_tensors,
                      unsigned shifted, int copy_every, bool has_specials)
{
    static struct list list;
    const struct dsc_optim_kind *found;
    double *scratch = device_alloc(device, DSC_ACCEL_SCRATCH_ELEMS * sizeof *scratch);

    if (!CHECK_STATUS(dsc_optim_find(kind, &found), DSC_OK))
        return;
    make_list(device, &list, sizes, n_tensors, shifted, &args, copy_every, has_specials);
    for (int step = 0; step < 2; step++, args.step++) {
        CHECK_STATUS(dsc_optim_step(found, &args, list.on_host, n_tensors, NULL), DSC_OK);
        CHECK_STATUS(device->accel->optim_step(kind, &args, list.on_device, n_tensors, scratch, NULL), DSC_OK);
    }
    if (dsc_optim_needs_norms(found)) { /* the order of sums affects the ratio's last place */
        check_same(device, &list.state[0], "state[0]");
        check_same(device, &list.state[1], "state[1]");
        check_near_operand(device, &list.param, 2.0);
        if (copy_every == 1)
            check_near_operand(device, &list.copy, 2.0);
    } else {
        check_list(device, &list);
    }
    free_list(device, &list);
    device_free(device, scratch);
}

/* All 81 combinations of dtypes. */
static void test_dtypes(const struct device *device, const char *kind)
{
    struct dsc_optim_args args = some_args(3);

    args.momentum = strcmp(kind, "sgd") == 0 ? 0.9 : 0.0;
    for (int i = 0; i < 81; i++) {
        args.param_dtype = dtypes[i % 3];
        args.grad_dtype = dtypes[i / 3 % 3];
        args.state_dtype = dtypes[i / 9 % 3];
        args.copy_dtype = dtypes[i / 27];
        TEST_CASE("%s %s: param %s, grad %s, state %s, copy %s", device->name, kind, dtype_names[args.param_dtype],
                  dtype_names[args.grad_dtype], dtype_names[args.state_dtype], dtype_names[args.copy_dtype]);
        run_steps(device, kind, args, short_sizes, N_SHORT, i % 2 ? ALL_SHIFTED : 0, 1, false);
    }
}

/*
 * Awkward sizes, aligned and not, from the first step on, with and without copies and special values. The dtypes
 * include combinations with a specialised kernel and one combination without.
 */
static void test_sizes(const struct device *device, const char *kind)
{
    const struct {
        dsc_dtype grad, copy, state;
    } cases[] = {{DSC_DTYPE_F32, DSC_DTYPE_F32, DSC_DTYPE_F32},
                 {DSC_DTYPE_BF16, DSC_DTYPE_BF16, DSC_DTYPE_F32},
                 {DSC_DTYPE_F16, DSC_DTYPE_F16, DSC_DTYPE_BF16}};
    static const unsigned shifts[] = {0, 1, 2, 4, 8, 16, ALL_SHIFTED};
    const bool is_lamb = strcmp(kind, "lamb") == 0;

    for (int i = 0; i < 14; i++) {
        struct dsc_optim_args args = some_args(1);

        args.grad_dtype = cases[i % 3].grad;
        args.copy_dtype = cases[i % 3].copy;
        args.state_dtype = cases[i % 3].state;
        args.momentum = strcmp(kind, "sgd") == 0 && i % 4 != 3 ? 0.9 : 0.0;
        args.flags = (i % 2 ? DSC_OPTIM_MAXIMIZE : 0) | (i % 4 < 2 ? DSC_OPTIM_BIAS_CORRECTION : 0) |
                     (args.momentum > 0.0 && i % 4 == 1 ? DSC_OPTIM_NESTEROV : 0);
        args.dampening = args.momentum > 0.0 && i % 4 == 2 ? 0.5 : 0.0;
        TEST_CASE("%s %s: hard sizes, case %d", device->name, kind, i);
        run_steps(device, kind, args, hard_sizes, N_HARD, shifts[i % 7], i / 3 % 3, i % 4 == 0 && !is_lamb);
    }
}

/* More tensors than a launch has pieces. */
static void test_many(const struct device *device, const char *kind)
{
    int64_t sizes[MAX_TENSORS];

    for (int i = 0; i < MAX_TENSORS; i++)
        sizes[i] = i * 7 % 23;
    TEST_CASE("%s %s: many tensors", device->name, kind);
    run_steps(device, kind, some_args(1), sizes, MAX_TENSORS, 0, 1, false);
    run_steps(device, kind, some_args(1), sizes, 0, 0, 1, false);
}

static void test_optimizers(const struct device *device)
{
    const struct dsc_optim_kind *kind;

    for (int32_t i = 0; (kind = dsc_optim_at(i)) != NULL; i++) {
        test_dtypes(device, dsc_optim_name(kind));
        test_sizes(device, dsc_optim_name(kind));
        test_many(device, dsc_optim_name(kind));
    }
}

/*
 * The two halves of a step with norms: the sums are close, the moments are equal, and equal ratios give equal weights.
 */
static void test_norms(const struct device *device, bool has_specials)
{
    static struct list list;
    struct dsc_optim_args args = some_args(2);
    const struct dsc_optim_kind *lamb;
    double host_sumsq[2 * MAX_TENSORS], sumsq[2 * MAX_TENSORS], again[2 * MAX_TENSORS], ratios[MAX_TENSORS];
    double *scratch = device_alloc(device, DSC_ACCEL_SCRATCH_ELEMS * sizeof *scratch);
    double *on_device = device_alloc(device, sizeof sumsq);

    TEST_CASE("%s norms%s", device->name, has_specials ? ", special values" : "");
    args.grad_dtype = DSC_DTYPE_BF16;
    args.state_dtype = DSC_DTYPE_BF16;
    args.copy_dtype = DSC_DTYPE_F16;
    CHECK_STATUS(dsc_optim_find("lamb", &lamb), DSC_OK);
    make_list(device, &list, hard_sizes, N_HARD, 0, &args, 1, has_specials);
    CHECK_STATUS(dsc_optim_norms(lamb, &args, list.on_host, N_HARD, NULL, host_sumsq), DSC_OK);
    CHECK_STATUS(device->accel->optim_norms("lamb", &args, list.on_device, N_HARD, on_device, scratch, NULL), DSC_OK);
    device_download(device, sumsq, on_device, 2 * N_HARD * sizeof *sumsq);
    check_list(device, &list);
    for (int64_t i = 0; i < 2 * N_HARD; i++)
        test_report((isnan(sumsq[i]) && isnan(host_sumsq[i])) || fabs(sumsq[i] - host_sumsq[i]) <= 1e-12 * host_sumsq[i], __FILE__, __LINE__,
                    "sumsq[%d]: %.17g and on the host %.17g", (int)i, sumsq[i], host_sumsq[i]);

    for (int64_t i = 0; i < N_HARD; i++)
        ratios[i] = 0.5 + 0.1 * (double)i;
    device_upload(device, on_device, ratios, N_HARD * sizeof *ratios);
    CHECK_STATUS(dsc_optim_apply(lamb, &args, list.on_host, N_HARD, NULL, ratios), DSC_OK);
    CHECK_STATUS(device->accel->optim_apply("lamb", &args, list.on_device, N_HARD, on_device, NULL), DSC_OK);
    check_list(device, &list);

    /*
     * Repeated runs give the same bits. The norms are of the same memory: with beta 0 the moments do not change after
     * the first run.
     */
    args.beta1 = args.beta2 = 0.0;
    for (int run = 0; run < 3; run++) {
        CHECK_STATUS(device->accel->optim_norms("lamb", &args, list.on_device, N_HARD, on_device, scratch, NULL), DSC_OK);
        device_download(device, again, on_device, 2 * N_HARD * sizeof *again);
        if (run == 1)
            memcpy(sumsq, again, sizeof sumsq);
    }
    CHECK_BYTES(again, sumsq, 2 * N_HARD * sizeof *again);
    free_list(device, &list);
    device_free(device, on_device);
    device_free(device, scratch);
}

static void test_muon(const struct device *device)
{
    static struct list list;

    for (int i = 0; i < 27; i++) {
        struct dsc_optim_args args = some_args(1 + i % 2);

        args.momentum = 0.95;
        args.flags = i % 2 ? DSC_OPTIM_NESTEROV : 0;
        args.grad_dtype = dtypes[i % 3];
        args.state_dtype = dtypes[i / 3 % 3];
        args.copy_dtype = args.param_dtype = dtypes[i / 9];
        TEST_CASE("%s muon: grad %s, state %s, update and param %s", device->name, dtype_names[args.grad_dtype], dtype_names[args.state_dtype],
                  dtype_names[args.copy_dtype]);
        make_list(device, &list, i % 5 ? short_sizes : hard_sizes, i % 5 ? N_SHORT : N_HARD, (unsigned)i & ALL_SHIFTED, &args, 1, i % 4 == 0);
        CHECK_STATUS(dsc_muon_momentum(&args, list.on_host, list.n_tensors, NULL), DSC_OK);
        CHECK_STATUS(device->accel->muon_momentum(&args, list.on_device, list.n_tensors, NULL), DSC_OK);
        check_list(device, &list);
        CHECK_STATUS(dsc_muon_apply(&args, list.on_host, list.n_tensors, NULL), DSC_OK);
        CHECK_STATUS(device->accel->muon_apply(&args, list.on_device, list.n_tensors, NULL), DSC_OK);
        check_list(device, &list);
        free_list(device, &list);
    }
}

/* Spans of all dtypes and awkward sizes in one list that is longer than a launch takes. */
#define N_SPANS 180

static void test_sumsq(const struct device *device, bool has_specials)
{
    struct operand operands[N_SPANS];
    struct dsc_span on_host[N_SPANS], on_device[N_SPANS];
    double sumsq = 0.0, before[2] = {3.0, 5.0}, out[2], again[2];
    int64_t n_nonfinite = 0;
    uint64_t seed = 3;
    double *scratch = device_alloc(device, DSC_ACCEL_SCRATCH_ELEMS * sizeof *scratch);
    double *stats = device_alloc(device, sizeof out);

    TEST_CASE("%s sumsq%s", device->name, has_specials ? ", special values" : "");
    for (int i = 0; i < N_SPANS; i++) {
        int64_t n = i == 0 ? 70001 : hard_sizes[i % N_HARD] / (i < 20 ? 1 : 16);

        operands[i] = make_operand(device, dtypes[i % 3], n, i % 2);
        fill_random(&operands[i], &seed, 2.0, 0.0, has_specials);
        upload(device, &operands[i]);
        on_host[i] = (struct dsc_span){begin_of(&operands[i], operands[i].host), n, dtypes[i % 3]};
        on_device[i] = (struct dsc_span){begin_of(&operands[i], operands[i].device), n, dtypes[i % 3]};
    }
    CHECK_STATUS(dsc_flat_sumsq(on_host, N_SPANS, NULL, &sumsq, &n_nonfinite), DSC_OK);
    for (int run = 0; run < 2; run++) {
        device_upload(device, stats, before, sizeof before);
        CHECK_STATUS(device->accel->flat_sumsq(on_device, N_SPANS, stats, scratch, NULL), DSC_OK);
        device_download(device, run == 0 ? out : again, stats, sizeof out);
    }
    CHECK_BYTES(out, again, sizeof out);
    CHECK_EQ(out[1], 5 + n_nonfinite);
    CHECK_EQ(n_nonfinite > 0, has_specials);
    test_report(fabs(out[0] - 3.0 - sumsq) <= 1e-12 * (sumsq + 3.0), __FILE__, __LINE__, "sum of squares %.17g and on the host %.17g", out[0] - 3.0,
                sumsq);

    CHECK_STATUS(device->accel->flat_sumsq(on_device, 0, stats, scratch, NULL), DSC_OK);
    device_download(device, again, stats, sizeof again);
    CHECK_BYTES(out, again, sizeof out);
    for (int i = 0; i < N_SPANS; i++)
        free_operand(device, &operands[i]);
    device_free(device, scratch);
    device_free(device, stats);
}

#define MAX_SRCS 481

static void run_reduce(const struct device *device, dsc_dtype from, dsc_dtype to, int n_srcs, int64_t n, bool is_accumulating, bool is_aliased,
                       bool has_stats, double *scratch, double *stats)
{
    static struct operand srcs[MAX_SRCS];
    static struct dsc_span on_host[MAX_SRCS], on_device[MAX_SRCS];
    const float scale = n_srcs % 2 ? 1.0f : 1.0f / (float)n_srcs;
    double zeros[2] = {0.0, 0.0}, out[2], sumsq = 0.0;
    int64_t n_nonfinite = 0;
    uint64_t seed = 5;
    struct operand own = make_operand(device, to, n, n % 5 == 1);
    struct operand *acc = is_aliased ? &srcs[0] : &own;

    TEST_CASE("%s reduce: %d x %d of %s into %s, %s%s", device->name, n_srcs, (int)n, dtype_names[from], dtype_names[to],
              is_accumulating ? "accumulated" : "set", is_aliased ? ", in place" : "");
    fill_random(&own, &seed, 1.0, 0.0, false);
    upload(device, &own);
    for (int i = 0; i < n_srcs; i++) {
        srcs[i] = make_operand(device, from, n, n % 2 == 1 && i == n_srcs - 1);
        fill_random(&srcs[i], &seed, 1.0, 0.0, n_srcs == 3);
        upload(device, &srcs[i]);
        on_host[i] = (struct dsc_span){begin_of(&srcs[i], srcs[i].host), n, from};
        on_device[i] = (struct dsc_span){begin_of(&srcs[i], srcs[i].device), n, from};
    }

    const struct dsc_span acc_on_host = {begin_of(acc, acc->host), n, to}, acc_on_device = {begin_of(acc, acc->device), n, to};

    device_upload(device, stats, zeros, sizeof zeros);
    CHECK_STATUS(dsc_flat_reduce(on_host, n_srcs, scale, is_accumulating, &acc_on_host, NULL, &sumsq, &n_nonfinite), DSC_OK);
    CHECK_STATUS(device->accel->flat_reduce(on_device, n_srcs, scale, is_accumulating, &acc_on_device, has_stats ? stats : NULL,
                                            has_stats ? scratch : NULL, NULL),
                 DSC_OK);
    check_same(device, acc, "acc");
    device_download(device, out, stats, sizeof out);
    CHECK_EQ(out[1], has_stats ? n_nonfinite : 0);
    test_report(fabs(out[0] - (has_stats ? sumsq : 0.0)) <= 1e-12 * sumsq, __FILE__, __LINE__, "sum of squares %.17g and on the host %.17g", out[0],
                sumsq);
    for (int i = 0; i < n_srcs; i++)
        free_operand(device, &srcs[i]);
    free_operand(device, &own);
}

static void test_reduce(const struct device *device)
{
    static const int64_t sizes[] = {0, 1, 3, 4, 256, 4097, 32771};
    double *scratch = device_alloc(device, DSC_ACCEL_SCRATCH_ELEMS * sizeof *scratch);
    double *stats = device_alloc(device, 2 * sizeof *stats);
    struct dsc_span srcs[MAX_SRCS], acc = {scratch, 1, DSC_DTYPE_F32};

    for (int i = 0; i < 9; i++)
        for (int j = 0; j < 7; j++) {
            run_reduce(device, dtypes[i % 3], dtypes[i / 3], 1 + (i + j) % 4, sizes[j], (i + j) % 2, false, j % 3 != 0, scratch, stats);
            if (i % 3 == i / 3)
                run_reduce(device, dtypes[i / 3], dtypes[i / 3], 2, sizes[j], false, true, true, scratch, stats);
        }
    run_reduce(device, DSC_DTYPE_BF16, DSC_DTYPE_F32, 480, 100, false, false, true, scratch, stats);

    TEST_CASE("%s reduce: one source too many", device->name);
    for (int i = 0; i < MAX_SRCS; i++)
        srcs[i] = acc;
    CHECK_ERROR(device->accel->flat_reduce(srcs, MAX_SRCS, 1.0f, false, &acc, NULL, NULL, NULL), DSC_ENOTSUP, "481 sources, at most 480");
    device_free(device, scratch);
    device_free(device, stats);
}

static void test_scale(const struct device *device)
{
    struct operand operands[N_SPANS];
    struct dsc_span on_host[N_SPANS], on_device[N_SPANS];
    uint64_t seed = 9;

    TEST_CASE("%s scale", device->name);
    for (int i = 0; i < N_SPANS; i++) {
        int64_t n = hard_sizes[i % N_HARD] / (i < 16 ? 1 : 16);

        operands[i] = make_operand(device, dtypes[i % 3], n, i % 2);
        fill_random(&operands[i], &seed, 2.0, 0.0, true);
        upload(device, &operands[i]);
        on_host[i] = (struct dsc_span){begin_of(&operands[i], operands[i].host), n, dtypes[i % 3]};
        on_device[i] = (struct dsc_span){begin_of(&operands[i], operands[i].device), n, dtypes[i % 3]};
    }
    CHECK_STATUS(dsc_flat_scale(on_host, N_SPANS, 0.3f, NULL), DSC_OK);
    CHECK_STATUS(device->accel->flat_scale(on_device, N_SPANS, 0.3f, NULL), DSC_OK);
    for (int i = 0; i < N_SPANS; i++) {
        check_same(device, &operands[i], "span");
        free_operand(device, &operands[i]);
    }
}

/*
 * Casts every half in both formats, and as many f32 values with random bits. The payloads of NaNs must also equal the
 * host's, so bytes are compared.
 */
static void test_cast(const struct device *device)
{
    enum { N = 65536 + 3 };
    uint64_t seed = 11;

    for (int i = 0; i < 9; i++) {
        struct operand src = make_operand(device, dtypes[i % 3], N, i % 2), dst = make_operand(device, dtypes[i / 3], N, i % 4 == 2);
        char *got = test_alloc(dst.n_bytes);

        TEST_CASE("%s cast: %s to %s", device->name, dtype_names[src.dtype], dtype_names[dst.dtype]);
        for (int64_t j = 0; j < N; j++) {
            if (src.dtype == DSC_DTYPE_F32)
                ((uint32_t *)(void *)(src.host + GUARD_BYTES))[j] = (uint32_t)test_random(&seed);
            else
                ((uint16_t *)(void *)(src.host + GUARD_BYTES))[j] = (uint16_t)j;
        }
        upload(device, &src);
        upload(device, &dst);

        const struct dsc_span from = {begin_of(&src, src.host), N, src.dtype}, to = {begin_of(&dst, dst.host), N, dst.dtype};
        const struct dsc_span from_device = {begin_of(&src, src.device), N, src.dtype},
                              to_device = {begin_of(&dst, dst.device), N, dst.dtype};

        CHECK_STATUS(dsc_flat_cast(&from, &to, NULL), DSC_OK);
        CHECK_STATUS(device->accel->flat_cast(&from_device, &to_device, NULL), DSC_OK);
        device_download(device, got, dst.device, dst.n_bytes);
        CHECK_BYTES(got, dst.host, dst.n_bytes);
        free(got);
        free_operand(device, &src);
        free_operand(device, &dst);
    }
}

/* The same mistake gets the same status and the same sentence from host and device, and nothing is launched. */
static void check_same_refusal(dsc_status host, const char *host_sentence, dsc_status status)
{
    CHECK_EQ(status, host);
    CHECK(host != DSC_OK);
    CHECK_STR(dsc_last_error(), host_sentence);
}

#define SAME_REFUSAL(host_call, device_call)                              \
    do {                                                                  \
        dsc_status host_status = (host_call);                             \
        char sentence[512];                                               \
        snprintf(sentence, sizeof sentence, "%s", dsc_last_error());      \
        TEST_CASE("%s: the host says: %.200s", device->name, sentence);   \
        check_same_refusal(host_status, sentence, (device_call)); \
    } while (0)

static void refuse_args(const struct device *device, const char *kind, struct dsc_optim_args args, struct dsc_optim_tensor *tensor)
{
    const struct dsc_optim_kind *found;

    CHECK_STATUS(dsc_optim_find(kind, &found), DSC_OK);
    SAME_REFUSAL(dsc_optim_step(found, &args, tensor, 1, NULL), device->accel->optim_step(kind, &args, tensor, 1, NULL, NULL));
}

static void test_refused_args(const struct device *device, struct dsc_optim_tensor *tensor)
{
    const struct {
        const char *kind;
        size_t offset;
        double value;
    } fields[] = {
        {"adam", offsetof(struct dsc_optim_args, lr), -1.0},          {"adam", offsetof(struct dsc_optim_args, lr), (double)NAN},
        {"adamw", offsetof(struct dsc_optim_args, beta1), 1.0},       {"lion", offsetof(struct dsc_optim_args, beta2), -0.1},
        {"adagrad", offsetof(struct dsc_optim_args, eps), -1.0},      {"sgd", offsetof(struct dsc_optim_args, momentum), -0.5},
        {"adagrad", offsetof(struct dsc_optim_args, lr_decay), -1.0}, {"lamb", offsetof(struct dsc_optim_args, max_coeff), 0.001},
        {"lamb", offsetof(struct dsc_optim_args, min_coeff), -1.0},   {"lion", offsetof(struct dsc_optim_args, weight_decay), 1e39},
        {"adam", offsetof(struct dsc_optim_args, grad_scale), (double)INFINITY},
    };
    struct dsc_optim_args args;

    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        args = some_args(1);
        memcpy((char *)&args + fields[i].offset, &fields[i].value, sizeof(double));
        refuse_args(device, fields[i].kind, args, tensor);
    }
    args = some_args(0);
    refuse_args(device, "adam", args, tensor);
    args = some_args(1);
    args.size -= 8;
    refuse_args(device, "adam", args, tensor);
    args = some_args(1);
    args.flags = 1u << 9;
    refuse_args(device, "adam", args, tensor);
    args.flags = DSC_OPTIM_NESTEROV;
    refuse_args(device, "lion", args, tensor);
    refuse_args(device, "sgd", args, tensor);
    args = some_args(1);
    args.state_dtype = DSC_DTYPE_COUNT;
    refuse_args(device, "adam", args, tensor);
    /* Only the host supports these. */
    args = some_args(1);
    args.flags = DSC_OPTIM_STATE_Q8;
    CHECK_ERROR(device->accel->optim_step("adam", &args, tensor, 1, NULL, NULL), DSC_ENOTSUP, "8 bits are for the host");
}

static void test_refused_tensors(const struct device *device, const struct dsc_optim_tensor *good)
{
    const struct dsc_optim_args args = some_args(1);
    const struct dsc_optim_kind *adam;
    struct dsc_optim_tensor tensor;

    CHECK_STATUS(dsc_optim_find("adam", &adam), DSC_OK);
    for (int i = 0; i < 5; i++) {
        tensor = *good;
        if (i == 0)
            tensor.param = NULL;
        else if (i == 1)
            tensor.grad = NULL;
        else if (i < 4)
            tensor.state[i - 2] = NULL;
        else
            tensor.n_elems = -1;
        SAME_REFUSAL(dsc_optim_step(adam, &args, &tensor, 1, NULL), device->accel->optim_step("adam", &args, &tensor, 1, NULL, NULL));
    }
    SAME_REFUSAL(dsc_optim_step(adam, &args, NULL, 1, NULL), device->accel->optim_step("adam", &args, NULL, 1, NULL, NULL));
    SAME_REFUSAL(dsc_optim_step(adam, &args, good, -1, NULL), device->accel->optim_step("adam", &args, good, -1, NULL, NULL));
    tensor = *good;
    tensor.copy = NULL;
    SAME_REFUSAL(dsc_muon_momentum(&args, &tensor, 1, NULL), device->accel->muon_momentum(&args, &tensor, 1, NULL));
}

static void test_refused_spans(const struct device *device, void *data)
{
    const struct dsc_span good = {data, 4, DSC_DTYPE_F32}, null = {NULL, 4, DSC_DTYPE_F32}, negative = {data, -1, DSC_DTYPE_F32};
    const struct dsc_span other[] = {good, {data, 3, DSC_DTYPE_F32}}, mixed[] = {good, {data, 4, DSC_DTYPE_BF16}};

    SAME_REFUSAL(dsc_flat_scale(&null, 1, 1.0f, NULL), device->accel->flat_scale(&null, 1, 1.0f, NULL));
    SAME_REFUSAL(dsc_flat_scale(&negative, 1, 1.0f, NULL), device->accel->flat_scale(&negative, 1, 1.0f, NULL));
    SAME_REFUSAL(dsc_flat_scale(NULL, 1, 1.0f, NULL), device->accel->flat_scale(NULL, 1, 1.0f, NULL));
    SAME_REFUSAL(dsc_flat_scale(&good, -1, 1.0f, NULL), device->accel->flat_scale(&good, -1, 1.0f, NULL));
    SAME_REFUSAL(dsc_flat_scale(&good, 1, NAN, NULL), device->accel->flat_scale(&good, 1, NAN, NULL));
    SAME_REFUSAL(dsc_flat_cast(&good, &other[1], NULL), device->accel->flat_cast(&good, &other[1], NULL));
    SAME_REFUSAL(dsc_flat_cast(NULL, &good, NULL), device->accel->flat_cast(NULL, &good, NULL));
    SAME_REFUSAL(dsc_flat_reduce(&good, 0, 1.0f, false, &good, NULL, NULL, NULL),
                 device->accel->flat_reduce(&good, 0, 1.0f, false, &good, NULL, NULL, NULL));
    SAME_REFUSAL(dsc_flat_reduce(&good, 1, 1.0f, false, NULL, NULL, NULL, NULL),
                 device->accel->flat_reduce(&good, 1, 1.0f, false, NULL, NULL, NULL, NULL));
    SAME_REFUSAL(dsc_flat_reduce(other, 2, 1.0f, false, &good, NULL, NULL, NULL),
                 device->accel->flat_reduce(other, 2, 1.0f, false, &good, NULL, NULL, NULL));
    SAME_REFUSAL(dsc_flat_reduce(mixed, 2, 1.0f, false, &good, NULL, NULL, NULL),
                 device->accel->flat_reduce(mixed, 2, 1.0f, false, &good, NULL, NULL, NULL));
    SAME_REFUSAL(dsc_flat_reduce(&good, 1, INFINITY, false, &good, NULL, NULL, NULL),
                 device->accel->flat_reduce(&good, 1, INFINITY, false, &good, NULL, NULL, NULL));
}

/* Arguments that a device refuses and the host accepts. */
static void test_refused_here(const struct device *device, const struct dsc_optim_tensor *tensor, double *f64)
{
    const struct dsc_optim_args args = some_args(1);
    const struct dsc_span span = {tensor->param, 4, DSC_DTYPE_F32};
    float on_stack[4] = {0};
    const struct dsc_span host_span = {on_stack, 4, DSC_DTYPE_F32};

    TEST_CASE("%s: refused", device->name);
    CHECK_ERROR(device->accel->optim_step("adam9", &args, tensor, 1, NULL, NULL), DSC_ENOTFOUND, "adam, adamw, lamb");
    CHECK_ERROR(device->accel->optim_step(NULL, &args, tensor, 1, NULL, NULL), DSC_EINVAL, "kind");
    CHECK_ERROR(device->accel->optim_step("adam", NULL, tensor, 1, NULL, NULL), DSC_EINVAL, "args");
    CHECK_ERROR(device->accel->optim_step("lamb", &args, tensor, 1, NULL, NULL), DSC_EINVAL, "scratch");
    CHECK_ERROR(device->accel->optim_norms("lamb", &args, tensor, 1, f64, NULL, NULL), DSC_EINVAL, "scratch");
    CHECK_ERROR(device->accel->optim_norms("lamb", &args, tensor, 1, NULL, f64, NULL), DSC_EINVAL, "out_sumsq");
    CHECK_ERROR(device->accel->optim_apply("lamb", &args, tensor, 1, NULL, NULL), DSC_EINVAL, "ratios");
    CHECK_ERROR(device->accel->optim_norms("adam", &args, tensor, 1, f64, f64, NULL), DSC_ENOTSUP, "adam needs no norms");
    CHECK_ERROR(device->accel->flat_sumsq(&span, 1, NULL, f64, NULL), DSC_EINVAL, "out");
    CHECK_ERROR(device->accel->flat_sumsq(&span, 1, f64, NULL, NULL), DSC_EINVAL, "scratch");
    CHECK_ERROR(device->accel->flat_reduce(&span, 1, 1.0f, false, &span, f64, NULL, NULL), DSC_EINVAL, "scratch");
    if (device->emulator != NULL)
        device->emulator->host_pointer = on_stack;
    CHECK_ERROR(device->accel->flat_scale(&host_span, 1, 1.0f, NULL), DSC_EINVAL, "host memory");
}

static void test_refusals(const struct device *device)
{
    float *data = device_alloc(device, 64);
    double *f64 = device_alloc(device, 64);
    struct dsc_optim_tensor tensor = {.n_elems = 4, .param = data, .grad = data, .state = {data, data}, .copy = data};
    int64_t n_launches = device->emulator == NULL ? 0 : device->emulator->n_launches;

    test_refused_args(device, &tensor);
    test_refused_tensors(device, &tensor);
    test_refused_spans(device, data);
    test_refused_here(device, &tensor, f64);
    if (device->emulator != NULL)
        CHECK_EQ(device->emulator->n_launches, n_launches);
    device_free(device, data);
    device_free(device, f64);
}

/* Faults that the test can provoke on an emulated device only: launches that fail and devices that vanish. */
static void test_faults(const struct device *device)
{
    struct dsc_emulator *emulator = device->emulator;
    float data[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    const struct dsc_span span = {data, 4, DSC_DTYPE_F32};
    int32_t n_devices = -1;

    TEST_CASE("%s", "faults");
    emulator->fail_at_launch = (int32_t)emulator->n_launches + 1;
    CHECK_ERROR(device->accel->flat_scale(&span, 1, 2.0f, NULL), DSC_EDEVICE, "flat_scale: unspecified launch failure (cudaErrorLaunchFailure)");
    CHECK_STATUS(device->accel->flat_scale(&span, 1, 2.0f, NULL), DSC_OK);
    CHECK_EQ(data[3], 8);

    CHECK_STATUS(device->accel->device_count(&n_devices), DSC_OK);
    CHECK_EQ(n_devices, 1);
    emulator->n_devices = 0;
    CHECK_STATUS(device->accel->device_count(&n_devices), DSC_OK);
    CHECK_EQ(n_devices, 0);
    emulator->driver_version = 11080;
    CHECK_ERROR(device->accel->device_count(&n_devices), DSC_ENOTSUP, "the driver (for CUDA 11.8) is too old");
    emulator->driver_version = 0;
    CHECK_ERROR(device->accel->device_count(&n_devices), DSC_ENOTSUP, "no NVIDIA driver");
    emulator->driver_version = 12000;
    emulator->n_devices = 1;
    CHECK(emulator->max_param_bytes <= 4096);
    printf("emulated: %lld launches, %lld blocks, at most %d bytes of parameters\n", (long long)emulator->n_launches,
           (long long)emulator->n_blocks, (int)emulator->max_param_bytes);
}

static void test_device(const struct device *device)
{
    test_optimizers(device);
    test_norms(device, false);
    test_norms(device, true);
    test_muon(device);
    test_sumsq(device, false);
    test_sumsq(device, true);
    test_reduce(device);
    test_scale(device);
    test_cast(device);
    test_refusals(device);
    if (device->emulator != NULL)
        test_faults(device);
}

int main(void)
{
    return device_run_tests(__FILE__, test_device);
}
