/*
 * dsc_optim_step on any arguments: a refused call changes nothing, and a step over a list of tensors gives the same
 * bits as separate steps. Every buffer has exactly its tensor's bytes, so that the address sanitizer catches accesses
 * beyond them.
 */
#include "fuzz.h"

#include "dsc/optim.h"

#define MAX_TENSORS 3
#define MAX_ELEMS 300 /* more than one block of scales */
#define N_BUFFERS 7   /* buffers of a tensor: param, grad, two states, their scales, copy */

struct buffer {
    uint8_t *bytes;
    size_t n_bytes;
};

static void *make(struct buffer *buffer, struct input *input, size_t n_bytes, bool is_float)
{
    buffer->n_bytes = n_bytes;
    buffer->bytes = malloc(n_bytes > 0 ? n_bytes : 1);
    REQUIRE(buffer->bytes != NULL);
    for (size_t i = 0; i < n_bytes; i++)
        buffer->bytes[i] = take_byte(input);
    /* Scales are not negative. */
    for (size_t i = 3; is_float && i < n_bytes; i += 4)
        buffer->bytes[i] &= 0x7f;
    return buffer->bytes;
}

static void make_tensor(struct input *input, const struct dsc_optim_args *args, struct dsc_optim_tensor *tensor, struct buffer *buffers)
{
    const bool is_q8 = (args->flags & DSC_OPTIM_STATE_Q8) != 0;
    const int64_t n = take_below(input, MAX_ELEMS);
    const size_t n_scales = (size_t)dsc_q8_n_scales(n) * sizeof(float);

    *tensor = (struct dsc_optim_tensor){.n_elems = n};
    tensor->param = make(&buffers[0], input, (size_t)n * dsc_dtype_bytes(args->param_dtype), false);
    tensor->grad = make(&buffers[1], input, (size_t)n * dsc_dtype_bytes(args->grad_dtype), false);
    for (int s = 0; s < DSC_OPTIM_MAX_STATES; s++) {
        tensor->state[s] = make(&buffers[2 + s], input, (size_t)n * (is_q8 ? 1 : dsc_dtype_bytes(args->state_dtype)), false);
        tensor->state_scale[s] = make(&buffers[4 + s], input, is_q8 ? n_scales : 0, true);
    }
    tensor->copy = make(&buffers[6], input, (size_t)n * dsc_dtype_bytes(args->copy_dtype), false);
    switch (take_byte(input)) { /* now and then something is missing */
    case 1:
        tensor->n_elems = -1 - n;
        break;
    case 2:
        tensor->param = NULL;
        break;
    case 3:
        tensor->grad = NULL;
        break;
    case 4:
        tensor->state[0] = NULL;
        break;
    case 5:
        tensor->state[1] = NULL;
        break;
    case 6:
        tensor->state_scale[0] = NULL;
        break;
    case 7:
        tensor->copy = NULL;
        break;
    default:
        break;
    }
}

/* Mostly in the range that is allowed; otherwise any bits. */
static double take_number(struct input *input, double scale)
{
    uint8_t kind = take_byte(input);
    int64_t bits;
    double value;

    if (kind < 250)
        return scale * kind / 256;
    bits = take_wild(input);
    memcpy(&value, &bits, sizeof value);
    return value;
}

static dsc_dtype take_dtype(struct input *input)
{
    uint8_t kind = take_byte(input);

    return kind == 255 ? (dsc_dtype)take_wild(input) : (dsc_dtype)(kind % DSC_DTYPE_COUNT);
}

static void save(const struct buffer *buffers, struct buffer *copies, int n)
{
    for (int i = 0; i < n; i++) {
        copies[i].n_bytes = buffers[i].n_bytes;
        copies[i].bytes = malloc(buffers[i].n_bytes > 0 ? buffers[i].n_bytes : 1);
        REQUIRE(copies[i].bytes != NULL);
        memcpy(copies[i].bytes, buffers[i].bytes, buffers[i].n_bytes);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct input input = {data, n_bytes};
    struct dsc_optim_args args = DSC_OPTIM_ARGS_INIT;
    struct dsc_optim_tensor tensors[MAX_TENSORS];
    struct buffer buffers[MAX_TENSORS * N_BUFFERS];
    struct buffer before[MAX_TENSORS * N_BUFFERS];
    const struct dsc_optim_kind *kind = dsc_optim_at(take_byte(&input) % 6);
    int n_tensors = take_byte(&input) % (MAX_TENSORS + 1);
    uint8_t flags = take_byte(&input);

    REQUIRE(kind != NULL);
    args.flags = flags & (DSC_OPTIM_BIAS_CORRECTION | DSC_OPTIM_NESTEROV | DSC_OPTIM_MAXIMIZE | DSC_OPTIM_STATE_Q8);
    args.flags |= flags == 255 ? (uint32_t)take_wild(&input) : 0;
    args.size += flags == 254;
    args.param_dtype = take_dtype(&input);
    args.grad_dtype = take_dtype(&input);
    args.state_dtype = take_dtype(&input);
    args.copy_dtype = take_dtype(&input);
    args.step = take_byte(&input) < 250 ? 1 + take_byte(&input) : take_wild(&input);
    args.lr = take_number(&input, 1);
    args.beta1 = take_number(&input, 1);
    args.beta2 = take_number(&input, 1);
    args.eps = take_number(&input, 1e-3);
    args.weight_decay = take_number(&input, 1);
    args.momentum = take_number(&input, 1);
    args.dampening = take_byte(&input) % 2 == 0 ? 0 : take_number(&input, 1);
    args.lr_decay = take_number(&input, 1);
    args.min_coeff = take_number(&input, 0.1);
    args.max_coeff = 0.1 + take_number(&input, 10);
    args.grad_scale = take_number(&input, 4);
    for (int i = 0; i < n_tensors; i++)
        make_tensor(&input, &args, &tensors[i], &buffers[i * N_BUFFERS]);

    int n_buffers = n_tensors * N_BUFFERS;

    save(buffers, before, n_buffers);

    dsc_status status = dsc_optim_step(kind, &args, tensors, n_tensors, NULL);

    for (int i = 0; i < n_buffers && status != DSC_OK; i++)
        REQUIRE(memcmp(buffers[i].bytes, before[i].bytes, before[i].n_bytes) == 0);
    if (status == DSC_OK) {
        struct buffer after[MAX_TENSORS * N_BUFFERS];

        save(buffers, after, n_buffers);
        for (int i = 0; i < n_buffers; i++)
            memcpy(buffers[i].bytes, before[i].bytes, before[i].n_bytes);
        for (int i = n_tensors - 1; i >= 0; i--)
            REQUIRE(dsc_optim_step(kind, &args, &tensors[i], 1, NULL) == DSC_OK);
        for (int i = 0; i < n_buffers; i++) {
            REQUIRE(memcmp(buffers[i].bytes, after[i].bytes, after[i].n_bytes) == 0);
            free(after[i].bytes);
        }
    }
    for (int i = 0; i < n_buffers; i++) {
        free(buffers[i].bytes);
        free(before[i].bytes);
    }
    return 0;
}
