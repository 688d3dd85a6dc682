/*
 * How close does each core come to the memory bound, on each instruction set? One JSON line a measurement.
 *
 * bench [-n elements] [-t threads] [-r repeats] [-k kernel prefix] [-i isa]
 *
 * Every kernel alternates with triad, a[i] += s * b[i], in the same run and by the same threads. Triad writes only
 * lines that it has read, so it moves exactly 12 bytes an element. bound_ratio = (bytes of the kernel / bandwidth of
 * triad) / time of the kernel; at the memory bound it is 1. Case "flat" is one array of n elements, and "many" is the
 * same elements as arrays of 8192. Case "cached" is 4096 elements repeatedly in one thread, which measures arithmetic
 * instead of memory. Times are medians. spread is (third - first quartile) / median.
 */
#include "pool.h"

#include "dsc/dsc.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_REPEATS 1001
#define SMALL_ELEMS 8192
#define CACHED_ELEMS 4096
#define N_ARRAYS 5

enum array { PARAM, GRAD, STATE0, STATE1, COPY };

struct bench {
    int64_t n_elems;
    int n_repeats;
    const char *kernel_prefix;
    const char *only_isa;
    struct pool pool;
    char *arrays[N_ARRAYS]; /* n_elems f32 each */
    struct dsc_optim_tensor *tensors;
};

/* The optimizer step or flat pass that is timed. */
struct subject {
    const char *kernel;
    const char *dtypes;
    double bytes_per_elem;
    const struct dsc_optim_kind *kind; /* NULL: a flat pass */
    struct dsc_optim_args args;
    void (*flat)(const struct subject *, struct bench *, int64_t n, const struct dsc_par *par);
};

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void require(dsc_status status)
{
    if (status == DSC_OK)
        return;
    fprintf(stderr, "%s: %s\n", dsc_status_name(status), dsc_last_error());
    exit(1);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;

    return (x > y) - (x < y);
}

struct triad {
    float *a;
    const float *b;
    int64_t n;
    int64_t chunk;
};

static void triad_body(void *arg, int64_t first, int64_t last)
{
    struct triad *triad = arg;
    float *restrict a = triad->a;
    const float *restrict b = triad->b;
    int64_t end = last * triad->chunk < triad->n ? last * triad->chunk : triad->n;

    for (int64_t i = first * triad->chunk; i < end; i++)
        a[i] += 1e-9f * b[i];
}

static double time_triad_ns(struct bench *bench, int64_t n, const struct dsc_par *par)
{
    struct triad triad = {(float *)bench->arrays[PARAM], (const float *)bench->arrays[GRAD], n, 65536};
    int64_t n_chunks = (n + triad.chunk - 1) / triad.chunk;
    int64_t begin = now_ns();

    if (par == NULL)
        triad_body(&triad, 0, n_chunks);
    else
        par->run(par->ctx, n_chunks, triad_body, &triad);
    return (double)(now_ns() - begin);
}

static struct dsc_span span_of(struct bench *bench, enum array array, int64_t n, dsc_dtype dtype)
{
    return (struct dsc_span){bench->arrays[array], n, dtype};
}

static void run_sumsq(const struct subject *subject, struct bench *bench, int64_t n, const struct dsc_par *par)
{
    struct dsc_span span = span_of(bench, GRAD, n, subject->args.grad_dtype);
    double sumsq;
    int64_t n_nonfinite;

    require(dsc_flat_sumsq(&span, 1, par, &sumsq, &n_nonfinite));
}

static void run_reduce(const struct subject *subject, struct bench *bench, int64_t n, const struct dsc_par *par)
{
    struct dsc_span srcs[2] = {span_of(bench, GRAD, n, subject->args.grad_dtype), span_of(bench, COPY, n, subject->args.grad_dtype)};
    struct dsc_span acc = span_of(bench, STATE0, n, DSC_DTYPE_F32);
    double sumsq;
    int64_t n_nonfinite;

    require(dsc_flat_reduce(srcs, 2, 0.5f, false, &acc, par, &sumsq, &n_nonfinite));
}

static void run_scale(const struct subject *subject, struct bench *bench, int64_t n, const struct dsc_par *par)
{
    struct dsc_span span = span_of(bench, GRAD, n, subject->args.grad_dtype);

    require(dsc_flat_scale(&span, 1, 1.0f, par));
}

static void run_narrow(const struct subject *subject, struct bench *bench, int64_t n, const struct dsc_par *par)
{
    struct dsc_span src = span_of(bench, PARAM, n, DSC_DTYPE_F32);
    struct dsc_span dst = span_of(bench, COPY, n, subject->args.grad_dtype);

    require(dsc_flat_cast(&src, &dst, par));
}

static void run_widen(const struct subject *subject, struct bench *bench, int64_t n, const struct dsc_par *par)
{
    struct dsc_span src = span_of(bench, COPY, n, subject->args.grad_dtype);
    struct dsc_span dst = span_of(bench, STATE0, n, DSC_DTYPE_F32);

    require(dsc_flat_cast(&src, &dst, par));
}

/* Runs the subject once over n elements, in tensors of tensor_elems elements. */
static void run_subject(const struct subject *subject, struct bench *bench, int64_t n, int64_t tensor_elems, const struct dsc_par *par)
{
    int64_t n_tensors = 0;

    if (subject->kind == NULL) {
        subject->flat(subject, bench, n, par);
        return;
    }
    for (int64_t begin = 0; begin < n; begin += tensor_elems, n_tensors++) {
        size_t begin_bytes = (size_t)begin * sizeof(float);

        bench->tensors[n_tensors] = (struct dsc_optim_tensor){
            .n_elems = n - begin < tensor_elems ? n - begin : tensor_elems,
            .param = bench->arrays[PARAM] + begin_bytes,
            .grad = bench->arrays[GRAD] + (size_t)begin * dsc_dtype_bytes(subject->args.grad_dtype),
            .state = {bench->arrays[STATE0] + (size_t)begin * dsc_dtype_bytes(subject->args.state_dtype),
                      bench->arrays[STATE1] + (size_t)begin * dsc_dtype_bytes(subject->args.state_dtype)},
            .copy = subject->args.copy_dtype == DSC_DTYPE_F32
                        ? NULL
                        : bench->arrays[COPY] + (size_t)begin * dsc_dtype_bytes(subject->args.copy_dtype),
        };
    }
    require(dsc_optim_step(subject->kind, &subject->args, bench->tensors, n_tensors, par));
}

static void measure(const struct subject *subject, struct bench *bench, const char *case_name, int64_t n, int64_t tensor_elems,
                    const struct dsc_par *par)
{
    static double times[MAX_REPEATS];
    static double triads[MAX_REPEATS];
    int n_repeats = bench->n_repeats;
    int64_t n_inner = par == NULL ? 64 : 1; /* a cached run is too short for the clock */

    run_subject(subject, bench, n, tensor_elems, par);
    for (int i = 0; i < n_repeats; i++) {
        triads[i] = time_triad_ns(bench, n, par);

        int64_t begin = now_ns();

        for (int64_t j = 0; j < n_inner; j++)
            run_subject(subject, bench, n, tensor_elems, par);
        times[i] = (double)(now_ns() - begin) / (double)n_inner;
    }
    qsort(times, (size_t)n_repeats, sizeof times[0], compare);
    qsort(triads, (size_t)n_repeats, sizeof triads[0], compare);

    double median_ns = times[n_repeats / 2];
    double bytes = subject->bytes_per_elem * (double)n;
    double triad_gbps = 12.0 * (double)n / triads[n_repeats / 2];

    printf("{\"kernel\": \"%s\", \"dtypes\": \"%s\", \"isa\": \"%s\", \"case\": \"%s\", \"elems\": %" PRId64 ", \"threads\": %d, "
           "\"repeats\": %d, \"ns_per_elem\": %.4f, \"spread\": %.3f, \"bytes\": %.0f, \"gbps\": %.2f",
           subject->kernel, subject->dtypes, dsc_cpu_isa_name(), case_name, n, par == NULL ? 1 : bench->pool.n_threads, n_repeats,
           median_ns / (double)n, (times[3 * n_repeats / 4] - times[n_repeats / 4]) / median_ns, bytes, bytes / median_ns);
    if (par != NULL)
        printf(", \"triad_gbps\": %.2f, \"bound_ratio\": %.3f", triad_gbps, bytes / triad_gbps / median_ns);
    printf("}\n");
    fflush(stdout);
}

static void measure_cases(const struct subject *subject, struct bench *bench)
{
    if (bench->kernel_prefix != NULL && strncmp(subject->kernel, bench->kernel_prefix, strlen(bench->kernel_prefix)) != 0)
        return;
    measure(subject, bench, "cached", CACHED_ELEMS, CACHED_ELEMS, NULL);
    measure(subject, bench, "flat", bench->n_elems, bench->n_elems, &bench->pool.par);
    if (subject->kind != NULL)
        measure(subject, bench, "many", bench->n_elems, SMALL_ELEMS, &bench->pool.par);
}

static const char *const dtype_names[] = {"f32", "bf16", "f16"};

/*
 * Measures three mixes of dtypes: f32 throughout; f32 masters with 16-bit gradient and copy; and the second mix with
 * bf16 moments.
 */
static void measure_optimizer(const struct dsc_optim_kind *kind, struct bench *bench)
{
    static const dsc_dtype mixes[][3] = {
        {DSC_DTYPE_F32, DSC_DTYPE_F32, DSC_DTYPE_F32},
        {DSC_DTYPE_BF16, DSC_DTYPE_F32, DSC_DTYPE_BF16},
        {DSC_DTYPE_F16, DSC_DTYPE_F32, DSC_DTYPE_F16},
        {DSC_DTYPE_BF16, DSC_DTYPE_BF16, DSC_DTYPE_BF16},
    };

    for (size_t i = 0; i < sizeof mixes / sizeof mixes[0]; i++) {
        struct subject subject = {.kernel = dsc_optim_name(kind), .kind = kind, .args = DSC_OPTIM_ARGS_INIT};
        char dtypes[64];
        double n_states = dsc_optim_n_states(kind);

        subject.args.grad_dtype = mixes[i][0];
        subject.args.state_dtype = mixes[i][1];
        subject.args.copy_dtype = mixes[i][2];
        subject.args.step = 10;
        subject.args.weight_decay = 0.01;
        if (strcmp(subject.kernel, "sgd") == 0)
            subject.args.momentum = 0.9;
        subject.bytes_per_elem = 8.0 + (double)dsc_dtype_bytes(mixes[i][0]) + 2.0 * n_states * (double)dsc_dtype_bytes(mixes[i][1]);
        if (dsc_optim_needs_norms(kind)) /* the second pass reads parameter and states again */
            subject.bytes_per_elem += 4.0 + n_states * (double)dsc_dtype_bytes(mixes[i][1]);
        if (mixes[i][2] != DSC_DTYPE_F32)
            subject.bytes_per_elem += (double)dsc_dtype_bytes(mixes[i][2]);
        snprintf(dtypes, sizeof dtypes, "param f32 grad %s state %s copy %s", dtype_names[mixes[i][0]], dtype_names[mixes[i][1]],
                 mixes[i][2] == DSC_DTYPE_F32 ? "none" : dtype_names[mixes[i][2]]);
        subject.dtypes = dtypes;
        measure_cases(&subject, bench);
    }
}

static void measure_flat(struct bench *bench)
{
    static const struct {
        const char *kernel;
        void (*run)(const struct subject *, struct bench *, int64_t n, const struct dsc_par *par);
        double f32_arrays;  /* passes over f32 data; a write without a read counts once */
        double grad_arrays; /* passes over data of the varying dtype */
    } passes[] = {
        {"flat_sumsq", run_sumsq, 0, 1}, {"flat_reduce2", run_reduce, 1, 2}, {"flat_scale", run_scale, 0, 2},
        {"flat_narrow", run_narrow, 1, 1}, {"flat_widen", run_widen, 1, 1},
    };

    for (size_t i = 0; i < sizeof passes / sizeof passes[0]; i++) {
        for (int dtype = 0; dtype < DSC_DTYPE_COUNT; dtype++) {
            struct subject subject = {
                .kernel = passes[i].kernel, .dtypes = dtype_names[dtype], .args = DSC_OPTIM_ARGS_INIT, .flat = passes[i].run};

            subject.args.grad_dtype = (dsc_dtype)dtype;
            subject.bytes_per_elem = 4.0 * passes[i].f32_arrays + (double)dsc_dtype_bytes((dsc_dtype)dtype) * passes[i].grad_arrays;
            measure_cases(&subject, bench);
        }
    }
}

static int64_t number(const char *text, int64_t low, int64_t high)
{
    char *end;
    long long value = strtoll(text, &end, 10);

    if (*end != '\0' || end == text || value < low || value > high) {
        fprintf(stderr, "\"%s\" is not a number from %lld to %lld\n", text, (long long)low, (long long)high);
        exit(2);
    }
    return value;
}

int main(int argc, char **argv)
{
    struct bench bench = {.n_elems = 16 << 20, .n_repeats = 11};
    int64_t n_threads = sysconf(_SC_NPROCESSORS_ONLN);
    int option;

    while ((option = getopt(argc, argv, "n:t:r:k:i:")) != -1) {
        switch (option) {
        case 'n':
            bench.n_elems = number(optarg, CACHED_ELEMS, INT64_C(1) << 40);
            break;
        case 't':
            n_threads = number(optarg, 1, POOL_MAX_THREADS);
            break;
        case 'r':
            bench.n_repeats = (int)number(optarg, 1, MAX_REPEATS);
            break;
        case 'k':
            bench.kernel_prefix = optarg;
            break;
        case 'i':
            bench.only_isa = optarg;
            break;
        default:
            return 2;
        }
    }
    if (n_threads > POOL_MAX_THREADS)
        n_threads = POOL_MAX_THREADS;
    pool_init(&bench.pool, (int)n_threads, 0);
    for (int i = 0; i < N_ARRAYS; i++) {
        size_t n_bytes = (size_t)bench.n_elems * sizeof(float);

        bench.arrays[i] = aligned_alloc(4096, (n_bytes + 4095) / 4096 * 4096);
        if (bench.arrays[i] == NULL) {
            fprintf(stderr, "no memory for %zu bytes\n", n_bytes);
            return 1;
        }
        memset(bench.arrays[i], 0, n_bytes); /* zeros are valid in every dtype, and adding them changes nothing */
    }
    bench.tensors = malloc((size_t)(bench.n_elems / SMALL_ELEMS + 1) * sizeof *bench.tensors);
    if (bench.tensors == NULL)
        return 1;

    bool is_runnable;
    const char *isa;

    for (int32_t i = 0; (isa = dsc_cpu_isa_at(i, &is_runnable)) != NULL; i++) {
        if (!is_runnable || (bench.only_isa != NULL && strcmp(isa, bench.only_isa) != 0))
            continue;
        require(dsc_cpu_isa_force(isa));
        measure_flat(&bench);
        for (int32_t kind = 0; dsc_optim_at(kind) != NULL; kind++)
            measure_optimizer(dsc_optim_at(kind), &bench);
    }
    for (int i = 0; i < N_ARRAYS; i++)
        free(bench.arrays[i]);
    free(bench.tensors);
    pool_clear(&bench.pool);
    return 0;
}
