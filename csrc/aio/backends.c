/* The backends of this build, and the choice among them for an engine. */
#include "aio/engine.h"

#include "base/fail.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define DSC_AIO_BACKEND(name) extern const struct dsc_aio_backend dsc_aio_backend_##name;
#include "aio/backends.inc"
#undef DSC_AIO_BACKEND

static const struct dsc_aio_backend *const backends[] = {
#define DSC_AIO_BACKEND(name) &dsc_aio_backend_##name,
#include "aio/backends.inc"
#undef DSC_AIO_BACKEND
};

/* The backend that a test has plugged in. */
static _Atomic(const struct dsc_aio_backend *) plugged;
static atomic_bool plugged_is_auto;

#define N_BACKENDS ((int32_t)(sizeof backends / sizeof backends[0]))

const char *dsc_aio_backend_at(int32_t index)
{
    return index >= 0 && index < N_BACKENDS ? backends[index]->name : NULL;
}

const char *dsc_aio_backend_name(const dsc_aio *aio)
{
    return aio->backend->name;
}

void dsc_aio_plug_backend(const struct dsc_aio_backend *backend, bool is_auto)
{
    atomic_store(&plugged_is_auto, false);
    atomic_store(&plugged, backend);
    atomic_store(&plugged_is_auto, is_auto && backend != NULL);
}

static dsc_status find_backend(const char *name, const struct dsc_aio_backend **out_backend)
{
    const struct dsc_aio_backend *extra = atomic_load(&plugged);
    char names[128] = "";
    size_t used = 0;

    if (extra != NULL && strcmp(extra->name, name) == 0) {
        *out_backend = extra;
        return DSC_OK;
    }
    for (int32_t i = 0; i < N_BACKENDS; i++) {
        if (strcmp(backends[i]->name, name) == 0) {
            *out_backend = backends[i];
            return DSC_OK;
        }
        if (used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, ", %s", backends[i]->name);
    }
    return dsc_fail(DSC_ENOTFOUND, "no I/O backend \"%.63s\" in this build; there are: auto%s", name, names);
}

dsc_status dsc_aio_open_backend(dsc_aio *aio, const char *name)
{
    dsc_status status = DSC_ENOTSUP;

    if (name != NULL && strcmp(name, "auto") != 0) {
        DSC_TRY(find_backend(name, &aio->backend));
        return aio->backend->open(&aio->config, &aio->state);
    }
    if (atomic_load(&plugged_is_auto)) {
        aio->backend = atomic_load(&plugged);
        status = aio->backend->open(&aio->config, &aio->state);
    }
    for (int32_t i = 0; i < N_BACKENDS && status == DSC_ENOTSUP; i++) {
        aio->backend = backends[i];
        status = aio->backend->open(&aio->config, &aio->state);
    }
    return status;
}
