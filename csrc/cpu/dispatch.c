/* Asks the processor once, and picks the table of kernels that the calls use. */
#include "base/fail.h"
#include "cpu/table.h"
#include "dsc/kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

struct isa {
    const char *name;
    const struct dsc_kernels *kernels;
    bool is_runnable;
};

#define ISA_ENTRY(isa, is_runnable) {#isa, &DSC_K_OF(kernels, isa), false},
static struct isa isas[] = {DSC_ISA_MAP(ISA_ENTRY)};
#undef ISA_ENTRY
#define N_ISAS ((int32_t)(sizeof isas / sizeof isas[0]))

#define ISA_UNKNOWN (-1)
#define ISA_AUTOMATIC (-2)

/* Written once under once, then only read. */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int32_t automatic_isa;

static _Atomic int32_t forced_isa = ISA_AUTOMATIC;

static int32_t find_isa(const char *name)
{
    for (int32_t i = 0; i < N_ISAS; i++)
        if (strcmp(isas[i].name, name) == 0 && isas[i].is_runnable)
            return i;
    return ISA_UNKNOWN;
}

static void detect(void)
{
    int32_t i = 0;

#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
#define ASK(isa, runnable) isas[i++].is_runnable = (runnable);
    DSC_ISA_MAP(ASK)
#undef ASK
    for (i = 0; i < N_ISAS; i++) /* the map is ordered, best last */
        if (isas[i].is_runnable)
            automatic_isa = i;
}

/* Names that a caller may ask for: "scalar, avx2". */
static const char *runnable_names(char *text, size_t text_bytes)
{
    size_t used = 0;

    text[0] = '\0';
    for (int32_t i = 0; i < N_ISAS; i++)
        if (isas[i].is_runnable && used < text_bytes)
            used += (size_t)snprintf(text + used, text_bytes - used, "%s%s", used == 0 ? "" : ", ", isas[i].name);
    return text;
}

static const struct isa *current_isa(void)
{
    pthread_once(&once, detect);

    int32_t isa = atomic_load_explicit(&forced_isa, memory_order_relaxed);

    return &isas[isa == ISA_AUTOMATIC ? automatic_isa : isa];
}

int32_t dsc_isa_index(void)
{
    return (int32_t)(current_isa() - isas);
}

const struct dsc_kernels *dsc_kernels_get(void)
{
    return current_isa()->kernels;
}

const char *dsc_cpu_isa_name(void)
{
    return current_isa()->name;
}

const char *dsc_cpu_isa_at(int32_t i, bool *out_is_runnable)
{
    pthread_once(&once, detect);
    if (i < 0 || i >= N_ISAS)
        return NULL;
    if (out_is_runnable != NULL)
        *out_is_runnable = isas[i].is_runnable;
    return isas[i].name;
}

dsc_status dsc_cpu_isa_force(const char *name)
{
    pthread_once(&once, detect);

    int32_t isa = name == NULL ? ISA_AUTOMATIC : find_isa(name);
    char names[64];

    if (isa == ISA_UNKNOWN)
        return dsc_fail(DSC_ENOTSUP,
                        "instruction set \"%.63s\" is not built or not runnable on this processor; use one of: %s",
                        name, runnable_names(names, sizeof names));
    atomic_store_explicit(&forced_isa, isa, memory_order_relaxed);
    return DSC_OK;
}
