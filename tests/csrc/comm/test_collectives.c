/*
 * All operations over ranks that are threads of one process, against plain loops over the same inputs. Types, lengths
 * and places are random with a seed. Ranks differ in the place of their data (in the arena or not) and in the number of
 * requests in flight. Neither may change a result.
 */
#include "comm/ranks.h"

#include <pthread.h>

#include "dsc/flat.h"

enum { MAX_IN_FLIGHT = 4 };

static const int64_t LENGTHS[] = {0, 1, 2, 3, 15, 16, 17, 1023, 4097, 16384, 16385, 100003, 131072, 300007, 700001};

static int64_t length_of(uint64_t *random, size_t bytes)
{
    if (test_below(random, 2) == 0)
        return LENGTHS[test_below(random, (int64_t)(sizeof LENGTHS / sizeof *LENGTHS))];
    return test_below(random, (int64_t)((size_t)1 << (4 + test_below(random, 17))) / (int64_t)bytes + 1);
}

/* Aborts on a failure: ranks are threads, and the counters of test.h are not safe for threads. */
static void must(dsc_status status)
{
    if (status != DSC_OK) {
        fprintf(stderr, "%s\n", dsc_last_error());
        exit(1);
    }
}

static size_t bytes_of(dsc_comm_type type)
{
    static const size_t BYTES[] = {4, 2, 2, 8, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 16, 1, 1, 1, 1, 1, 1, 1, 2, 4, 8, 16};

    return BYTES[type];
}

/* Fills in the inputs of a rank in one case. Every rank can compute the inputs of all ranks in this way. */
static void fill(uint64_t seed, int32_t rank, dsc_comm_type type, void *data, int64_t n_elems)
{
    uint64_t random = seed * 1000003u + (uint64_t)rank;
    unsigned char *bytes = data;

    if (type == DSC_COMM_F32 || type == DSC_COMM_BF16) {
        for (int64_t i = 0; i < n_elems; i++) {
            float value = (float)test_uniform(&random) * (test_below(&random, 50) == 0 ? 1e30f : 1.0f);
            uint32_t bits;

            memcpy(&bits, &value, sizeof bits);
            if (type == DSC_COMM_F32)
                memcpy(bytes + 4 * i, &bits, 4);
            else
                memcpy(bytes + 2 * i, (unsigned char *)&bits + 2, 2);
        }
        return;
    }
    if (type == DSC_COMM_F64) {
        for (int64_t i = 0; i < n_elems; i++) {
            double value = test_uniform(&random);

            memcpy(bytes + 8 * i, &value, 8);
        }
        return;
    }
    for (size_t i = 0; i < (size_t)n_elems * bytes_of(type); i++)
        /* f16: exponents that are neither NaN nor inf */
        bytes[i] = (unsigned char)(test_random(&random) & (type == DSC_COMM_F16 && i % 2 == 1 ? 0xbfu : 0xffu));
}

struct case_of_test {
    struct dsc_comm_call call;
    unsigned char *wanted;
    unsigned char *got;
    size_t n_wanted;
    unsigned char *data;
    dsc_comm_block *block;
    unsigned char *out;
    dsc_comm_request *request;
    int64_t in_splits[DSC_COMM_MAX_RANKS];
    int64_t out_splits[DSC_COMM_MAX_RANKS];
};

#define COMBINE(ctype)                                                                                                                                                                       \
    do {                                                                                                                                                                                     \
        for (int64_t i = 0; i < n_elems; i++) {                                                                                                                                              \
            ctype a;                                                                                                                                                                         \
                                                                                                                                                                                             \
            memcpy(&a, inputs[0] + (size_t)i * sizeof a, sizeof a);                                                                                                                          \
            for (int32_t rank = 1; rank < n_ranks; rank++) {                                                                                                                                 \
                ctype b;                                                                                                                                                                     \
                                                                                                                                                                                             \
                memcpy(&b, inputs[rank] + (size_t)i * sizeof b, sizeof b);                                                                                                                   \
                a = combine == DSC_COMM_SUM ? (ctype)((uint64_t)a + (uint64_t)b)                                                                        \
                    : combine == DSC_COMM_MAX ? (a > b ? a : b)                                                                                                                              \
                    : combine == DSC_COMM_MIN ? (a < b ? a : b)                                                                                                                              \
                                              : (ctype)((uint64_t)a * (uint64_t)b);                                                                     \
            }                                                                                                                                                                                \
            memcpy(out + (size_t)i * sizeof a, &a, sizeof a);                                                                                                                                \
        }                                                                                                                                                                                    \
    } while (0)

/* out = the combination of the ranks' inputs, computed element by element. */
static void combine_plainly(dsc_comm_type type, dsc_comm_combine combine, double scale, unsigned char *const *inputs, int32_t n_ranks, int64_t n_elems, unsigned char *out)
{
    switch (type) {
    case DSC_COMM_F64:
        for (int64_t i = 0; i < n_elems; i++) {
            double a;

            memcpy(&a, inputs[0] + 8 * i, 8);
            for (int32_t rank = 1; rank < n_ranks; rank++) {
                double b;

                memcpy(&b, inputs[rank] + 8 * i, 8);
                a = combine == DSC_COMM_SUM ? a + b : combine == DSC_COMM_PROD ? a * b : combine == DSC_COMM_MAX ? (a > b ? a : b) : (a < b ? a : b);
            }
            a *= scale;
            memcpy(out + 8 * i, &a, 8);
        }
        return;
    case DSC_COMM_I8:
        COMBINE(int8_t);
        return;
    case DSC_COMM_I16:
        COMBINE(int16_t);
        return;
    case DSC_COMM_I32:
        COMBINE(int32_t);
        return;
    case DSC_COMM_I64:
        COMBINE(int64_t);
        return;
    case DSC_COMM_U8:
        COMBINE(uint8_t);
        return;
    default:
        break;
    }
    /* The 16-bit conversions are tested in tests/csrc/base/test_half.c. */
    float *sum = test_alloc((size_t)n_elems * sizeof *sum);
    float *one = test_alloc((size_t)n_elems * sizeof *one);
    struct dsc_span wide = {one, n_elems, DSC_DTYPE_F32};

    for (int32_t rank = 0; rank < n_ranks; rank++) {
        struct dsc_span narrow = {inputs[rank], n_elems, (dsc_dtype)type};

        must(dsc_flat_cast(&narrow, &wide, NULL));
        for (int64_t i = 0; i < n_elems; i++)
            sum[i] = rank == 0                  ? one[i]
                     : combine == DSC_COMM_SUM  ? sum[i] + one[i]
                     : combine == DSC_COMM_PROD ? sum[i] * one[i]
                     : combine == DSC_COMM_MAX  ? (sum[i] > one[i] ? sum[i] : one[i])
                                                : (sum[i] < one[i] ? sum[i] : one[i]);
    }
    for (int64_t i = 0; i < n_elems; i++)
        sum[i] *= (float)scale;

    struct dsc_span from = {sum, n_elems, DSC_DTYPE_F32};
    struct dsc_span to = {out, n_elems, (dsc_dtype)type};

    must(dsc_flat_cast(&from, &to, NULL));
    free(sum);
    free(one);
}

/* Memory for the data of this rank, inside or outside the arena, at an even or odd address. */
static unsigned char *place(struct case_of_test *self, dsc_comm *comm, uint64_t *own_random, size_t n_bytes)
{
    if (test_below(own_random, 2) == 0) {
        must(dsc_comm_block_create(comm, (int64_t)n_bytes + 1, &self->block));
        return (unsigned char *)dsc_comm_block_data(self->block) + test_below(own_random, 2);
    }
    self->data = test_alloc(n_bytes + 1);
    return self->data + test_below(own_random, 2);
}

static unsigned char **inputs_of(uint64_t seed, dsc_comm_type type, int32_t n_ranks, int64_t n_elems)
{
    unsigned char **inputs = test_alloc((size_t)n_ranks * sizeof *inputs);

    for (int32_t rank = 0; rank < n_ranks; rank++) {
        inputs[rank] = test_alloc((size_t)n_elems * bytes_of(type));
        fill(seed, rank, type, inputs[rank], n_elems);
    }
    return inputs;
}

static void free_inputs(unsigned char **inputs, int32_t n_ranks)
{
    for (int32_t rank = 0; rank < n_ranks; rank++)
        free(inputs[rank]);
    free(inputs);
}

/* random is the same on all ranks, own_random is not. */
static void make_reduction(struct case_of_test *self, dsc_comm *comm, int32_t rank, int32_t n_ranks, uint64_t *random, uint64_t *own_random)
{
    struct dsc_comm_call *call = &self->call;
    bool is_scatter = call->op == DSC_COMM_REDUCE_SCATTER;

    call->type = (dsc_comm_type)test_below(random, DSC_COMM_U8 + 1);
    call->out_type = call->type;
    call->combine = is_scatter ? DSC_COMM_SUM : (dsc_comm_combine)test_below(random, DSC_COMM_N_COMBINES);
    call->scale = call->type <= (is_scatter ? DSC_COMM_F16 : DSC_COMM_F64) && test_below(random, 2) ? 0.37 : 1.0;
    call->n_elems = length_of(random, bytes_of(call->type));
    if (is_scatter)
        call->n_elems = call->n_elems / n_ranks * n_ranks;

    uint64_t seed = test_random(random);
    size_t bytes = bytes_of(call->type);
    unsigned char **inputs = inputs_of(seed, call->type, n_ranks, call->n_elems);
    unsigned char *whole = test_alloc((size_t)call->n_elems * bytes);

    combine_plainly(call->type, call->combine, call->scale, inputs, n_ranks, call->n_elems, whole);
    call->data = place(self, comm, own_random, (size_t)call->n_elems * bytes);
    memcpy(call->data, inputs[rank], (size_t)call->n_elems * bytes);
    free_inputs(inputs, n_ranks);
    self->wanted = whole;
    self->n_wanted = (size_t)call->n_elems * bytes;
    self->got = call->data;
    if (!is_scatter)
        return;
    self->n_wanted /= (size_t)n_ranks;
    memmove(whole, whole + (size_t)rank * self->n_wanted, self->n_wanted);
    self->got = (unsigned char *)call->data + (size_t)rank * self->n_wanted;
    if (test_below(own_random, 2) == 0)
        self->got = self->out = test_alloc(self->n_wanted);
    call->out = self->got;
}

static void make_copy(struct case_of_test *self, dsc_comm *comm, int32_t rank, int32_t n_ranks, uint64_t *random, uint64_t *own_random)
{
    struct dsc_comm_call *call = &self->call;

    call->type = (dsc_comm_type)test_below(random, DSC_COMM_N_TYPES);
    call->src = (int32_t)test_below(random, n_ranks);
    call->n_elems = length_of(random, bytes_of(call->type));
    if (call->op == DSC_COMM_ALL_GATHER)
        call->n_elems = call->n_elems / n_ranks * n_ranks;

    uint64_t seed = test_random(random);
    size_t n_bytes = (size_t)call->n_elems * bytes_of(call->type);
    size_t n_slice = n_bytes / (size_t)n_ranks;
    unsigned char **inputs = inputs_of(seed, call->type, n_ranks, call->n_elems);

    self->wanted = test_alloc(n_bytes);
    self->n_wanted = n_bytes;
    for (int32_t i = 0; i < n_ranks && call->op == DSC_COMM_ALL_GATHER; i++)
        memcpy(self->wanted + (size_t)i * n_slice, inputs[i] + (size_t)i * n_slice, n_slice);
    if (call->op == DSC_COMM_BROADCAST)
        memcpy(self->wanted, inputs[call->src], n_bytes);
    call->data = self->got = place(self, comm, own_random, n_bytes);
    memcpy(call->data, inputs[rank], n_bytes);
    free_inputs(inputs, n_ranks);
}

static void make_all_to_all(struct case_of_test *self, dsc_comm *comm, int32_t rank, int32_t n_ranks, uint64_t *random, uint64_t *own_random)
{
    struct dsc_comm_call *call = &self->call;
    int64_t splits[DSC_COMM_MAX_RANKS][DSC_COMM_MAX_RANKS];
    int64_t n_in[DSC_COMM_MAX_RANKS] = {0};
    int64_t n_out = 0;

    call->type = (dsc_comm_type)test_below(random, DSC_COMM_N_TYPES);
    size_t bytes = bytes_of(call->type);
    for (int32_t from = 0; from < n_ranks; from++)
        for (int32_t to = 0; to < n_ranks; to++) {
            splits[from][to] = length_of(random, bytes) / n_ranks;
            n_in[from] += splits[from][to];
        }
    for (int32_t i = 0; i < n_ranks; i++) {
        self->in_splits[i] = splits[rank][i];
        self->out_splits[i] = splits[i][rank];
        n_out += splits[i][rank];
    }
    call->in_splits = self->in_splits;
    call->out_splits = self->out_splits;

    uint64_t seed = test_random(random);

    self->n_wanted = (size_t)n_out * bytes;
    self->wanted = test_alloc(self->n_wanted);
    unsigned char *to = self->wanted;
    for (int32_t from = 0; from < n_ranks; from++) {
        unsigned char *input = test_alloc((size_t)n_in[from] * bytes);
        size_t at = 0;

        fill(seed, from, call->type, input, n_in[from]);
        for (int32_t i = 0; i < rank; i++)
            at += (size_t)splits[from][i] * bytes;
        memcpy(to, input + at, (size_t)splits[from][rank] * bytes);
        to += (size_t)splits[from][rank] * bytes;
        if (from == rank) {
            call->data = place(self, comm, own_random, (size_t)n_in[from] * bytes);
            memcpy(call->data, input, (size_t)n_in[from] * bytes);
        }
        free(input);
    }
    call->out = self->got = self->out = test_alloc(self->n_wanted);
}

static void make_case(struct case_of_test *self, dsc_comm *comm, int32_t rank, int32_t n_ranks, uint64_t *random, uint64_t *own_random)
{
    *self = (struct case_of_test){.call = {.op = (dsc_comm_op)test_below(random, DSC_COMM_N_OPS), .scale = 1.0}};
    if (self->call.op == DSC_COMM_ALL_REDUCE || self->call.op == DSC_COMM_REDUCE_SCATTER)
        make_reduction(self, comm, rank, n_ranks, random, own_random);
    else if (self->call.op == DSC_COMM_ALL_TO_ALL)
        make_all_to_all(self, comm, rank, n_ranks, random, own_random);
    else if (self->call.op != DSC_COMM_BARRIER)
        make_copy(self, comm, rank, n_ranks, random, own_random);
}

/* Ranks check in turn. */
static pthread_mutex_t checking = PTHREAD_MUTEX_INITIALIZER;

static void finish_case(struct case_of_test *self, int32_t rank, int32_t n_ranks, int64_t number)
{
    dsc_status status = dsc_comm_wait(self->request, NULL, NULL);

    pthread_mutex_lock(&checking);
    TEST_CASE("case %" PRId64 ", rank %d of %d: %s of %" PRId64 " of type %d, combine %d, scale %g", number, (int)rank, (int)n_ranks, dsc_comm_op_text(self->call.op), self->call.n_elems,
              (int)self->call.type, (int)self->call.combine, self->call.scale);
    CHECK_STATUS(status, DSC_OK);
    CHECK(dsc_comm_is_done(self->request));
    CHECK_STATUS(dsc_comm_release(self->request), DSC_OK);
    CHECK_BYTES(self->got, self->wanted, self->n_wanted);
    pthread_mutex_unlock(&checking);
    free(self->data);
    free(self->out);
    free(self->wanted);
    dsc_comm_block_destroy(self->block);
}

static void random_cases(dsc_comm *comm, int32_t rank, int32_t n_ranks, void *arg)
{
    int64_t n_cases = *(int64_t *)arg;
    uint64_t random = (uint64_t)n_ranks;
    uint64_t own_random = (uint64_t)rank + 77;
    struct case_of_test cases[MAX_IN_FLIGHT];

    for (int64_t number = 0; number < n_cases;) {
        int64_t n_in_flight = 1 + test_below(&own_random, MAX_IN_FLIGHT);

        if (n_in_flight > n_cases - number)
            n_in_flight = n_cases - number;
        for (int64_t i = 0; i < n_in_flight; i++) {
            make_case(&cases[i], comm, rank, n_ranks, &random, &own_random);
            must(dsc_comm_submit(comm, &cases[i].call, &cases[i].request));
        }
        for (int64_t i = 0; i < n_in_flight; i++)
            finish_case(&cases[i], rank, n_ranks, number + i);
        number += n_in_flight;
    }
}

int main(void)
{
#ifdef __SANITIZE_THREAD__ /* a case takes twenty times as long here */
    static const int32_t N_RANKS[] = {2, 3, 5};
#else
    static const int32_t N_RANKS[] = {1, 2, 3, 4, 7, 16};
#endif

    alarm(LIMIT_SECONDS);
    if (dsc_pool_resize(3) != DSC_OK)
        return 1;
    for (size_t i = 0; i < sizeof N_RANKS / sizeof *N_RANKS; i++) {
        int64_t n_cases = N_RANKS[i] > 4 ? 12 : 60;

        run_threads(N_RANKS[i], random_cases, &n_cases);
    }
    if (dsc_pool_resize(1) != DSC_OK)
        return 1;
    return test_finish(__FILE__);
}
