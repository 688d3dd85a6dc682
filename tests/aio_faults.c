/*
 * The fault backend as a library that tests in Python load (tests/aio_faults.py). A plan takes effect at once for all
 * engines of the process, including those in use, on every thread.
 */
#include "aio/fault.c"

#include <pthread.h>

#define API __attribute__((visibility("default")))

/* The backend fails only for lack of memory, and the reader of the message would look for it in the other library. */
dsc_status dsc_fail(dsc_status status, const char *format, ...)
{
    (void)format;
    return status;
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct dsc_aio_fault_plan shared_plan;
static int64_t shared_generation;
static struct dsc_aio_fault_counts shared_counts;

struct wrapped {
    void *inner;
    int64_t generation; /* generation of inner's plan */
};

API int64_t aio_faults_plan_bytes(void)
{
    return (int64_t)sizeof shared_plan;
}

API void aio_faults_set(const struct dsc_aio_fault_plan *plan)
{
    pthread_mutex_lock(&mutex);
    shared_plan = *plan;
    shared_generation++;
    pthread_mutex_unlock(&mutex);
}

/* Since the library was loaded. */
API void aio_faults_counts(struct dsc_aio_fault_counts *out_counts)
{
    pthread_mutex_lock(&mutex);
    *out_counts = shared_counts;
    pthread_mutex_unlock(&mutex);
}

static struct state *refresh(struct wrapped *wrapped)
{
    struct state *state = wrapped->inner;

    pthread_mutex_lock(&mutex);
    if (wrapped->generation != shared_generation) {
        state->plan = shared_plan;
        state->random = shared_plan.seed;
        wrapped->generation = shared_generation;
    }
    pthread_mutex_unlock(&mutex);
    return state;
}

static dsc_status faulty_open(const struct dsc_aio_config *config, void **out_state)
{
    struct wrapped *wrapped = malloc(sizeof *wrapped);

    if (wrapped == NULL)
        return DSC_ENOMEM;
    wrapped->generation = -1;
    if (fault_open(config, &wrapped->inner) != DSC_OK) {
        free(wrapped);
        return DSC_ENOMEM;
    }
    *out_state = wrapped;
    return DSC_OK;
}

static void faulty_close(void *opaque)
{
    struct wrapped *wrapped = opaque;

    fault_close(wrapped->inner);
    free(wrapped);
}

static int64_t faulty_submit(void *opaque, struct dsc_aio_op *const *ops, int64_t n_ops)
{
    return fault_submit(refresh(opaque), ops, n_ops);
}

static int64_t faulty_reap(void *opaque, struct dsc_aio_op **out_ops, int64_t capacity, bool wait)
{
    int64_t n;

    counts = (struct dsc_aio_fault_counts){0};
    n = fault_reap(refresh(opaque), out_ops, capacity, wait);
    pthread_mutex_lock(&mutex);
    shared_counts.n_transfers += counts.n_transfers;
    shared_counts.n_short += counts.n_short;
    shared_counts.n_passing += counts.n_passing;
    shared_counts.n_failures += counts.n_failures;
    shared_counts.n_flipped += counts.n_flipped;
    pthread_mutex_unlock(&mutex);
    return n;
}

API const struct dsc_aio_backend aio_faults_backend = {
    .name = "fault",
    .open = faulty_open,
    .close = faulty_close,
    .submit = faulty_submit,
    .reap = faulty_reap,
};
