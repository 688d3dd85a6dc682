/*
 * Opens an accelerator: finds it in the registry, loads its library, and checks that the table is complete and fits
 * this build.
 */
#include "dsc/accel.h"

#include "base/fail.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#define DSC_ACCEL_BUILTIN(name, entry) const struct dsc_accel *entry(dsc_accel_report *report);
#define DSC_ACCEL_LIBRARY(name, file, key)
#include "dsc/accelerators.inc"
#undef DSC_ACCEL_BUILTIN
#undef DSC_ACCEL_LIBRARY

struct entry {
    const char *name;
    dsc_accel_entry builtin; /* NULL: in a library */
    const char *file;        /* NULL: built in */
};

static const struct entry entries[] = {
#define DSC_ACCEL_BUILTIN(name, entry) {#name, entry, NULL},
#define DSC_ACCEL_LIBRARY(name, file, key) {#name, NULL, file},
#include "dsc/accelerators.inc"
#undef DSC_ACCEL_BUILTIN
#undef DSC_ACCEL_LIBRARY
};

#define N_ENTRIES ((int)(sizeof entries / sizeof entries[0]))

static void report(const char *sentence)
{
    (void)dsc_fail(DSC_EDEVICE, "%s", sentence); /* for the sentence; the status comes back through the hook */
}

static dsc_status find(const char *name, const struct entry **out_entry)
{
    char names[128] = "";
    size_t used = 0;

    for (int i = 0; i < N_ENTRIES; i++) {
        if (strcmp(entries[i].name, name) == 0) {
            *out_entry = &entries[i];
            return DSC_OK;
        }
        if (used < sizeof names)
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i == 0 ? "" : ", ", entries[i].name);
    }
    return dsc_fail(DSC_ENOTFOUND, "no accelerator \"%.63s\"; there are: %s", name, names);
}

/* The first hook that is missing; NULL for a complete table. */
static const char *missing_hook(const struct dsc_accel *accel)
{
#define RETURN_IF_MISSING(hook) \
    if (accel->hook == NULL)    \
    return #hook
    RETURN_IF_MISSING(device_count);
    RETURN_IF_MISSING(optim_step);
    RETURN_IF_MISSING(optim_norms);
    RETURN_IF_MISSING(optim_apply);
    RETURN_IF_MISSING(muon_momentum);
    RETURN_IF_MISSING(muon_apply);
    RETURN_IF_MISSING(flat_sumsq);
    RETURN_IF_MISSING(flat_reduce);
    RETURN_IF_MISSING(flat_scale);
    RETURN_IF_MISSING(flat_cast);
#define DSC_NN_CALL(name) RETURN_IF_MISSING(nn_##name);
#include "dsc/nn_calls.inc"
#undef DSC_NN_CALL
    RETURN_IF_MISSING(cross_entropy_rows);
    RETURN_IF_MISSING(cross_entropy_grad);
#define DSC_MOE_CALL(name) RETURN_IF_MISSING(moe_##name);
#include "dsc/moe_calls.inc"
#undef DSC_MOE_CALL
    RETURN_IF_MISSING(moe_invert);
#define DSC_QUANT_CALL(name) RETURN_IF_MISSING(quant_##name);
#include "dsc/quant_calls.inc"
#undef DSC_QUANT_CALL
#undef RETURN_IF_MISSING
    return NULL;
}

static dsc_status check_table(const char *name, const struct dsc_accel *accel)
{
    if (accel == NULL)
        return dsc_fail(DSC_ENOTSUP, "accelerator %s: its library gave no table", name);
    /* abi and size come first in every version of the table; nothing else may be read before they are known to match.
     */
    if (accel->abi != DSC_ACCEL_ABI || accel->size != sizeof *accel)
        return dsc_fail(
            DSC_ENOTSUP,
            "accelerator %s: its library has ABI %u of %u bytes, this build needs %u of %u bytes; build both from one source",
            name, (unsigned)accel->abi, (unsigned)accel->size, (unsigned)DSC_ACCEL_ABI, (unsigned)sizeof *accel);

    const char *missing = missing_hook(accel);

    if (missing != NULL)
        return dsc_fail(DSC_ENOTSUP, "accelerator %s: its table lacks %s", name, missing);
    return DSC_OK;
}

static dsc_status check_devices(const char *name, const struct dsc_accel *accel)
{
    int32_t n_devices = 0;

    DSC_TRY(accel->device_count(&n_devices));
    if (n_devices < 1)
        return dsc_fail(DSC_ENOTSUP, "accelerator %s: there is a driver, but no device", name);
    return DSC_OK;
}

/* Loading a library twice gives the same handle, and so the same table. */
static dsc_status load(const struct entry *entry, const char *library_dir, void **out_library,
                       dsc_accel_entry *out_entry)
{
    char path[PATH_MAX];
    int n_bytes = snprintf(path, sizeof path, "%s%s%s", library_dir == NULL ? "" : library_dir,
                           library_dir == NULL ? "" : "/", entry->file);

    if (n_bytes < 0 || (size_t)n_bytes >= sizeof path)
        return dsc_fail(DSC_EINVAL, "accelerator %s: library_dir is longer than a path may be (%d bytes)", entry->name,
                        PATH_MAX);

    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (library == NULL)
        return dsc_fail(DSC_ENOTSUP, "accelerator %s: %s", entry->name, dlerror());

    void *symbol = dlsym(library, DSC_ACCEL_ENTRY);

    if (symbol == NULL) {
        dlclose(library);
        return dsc_fail(DSC_ENOTSUP, "accelerator %s: %s does not export %s", entry->name, path, DSC_ACCEL_ENTRY);
    }
    memcpy(out_entry, &symbol, sizeof symbol); /* ISO C has no cast from a data pointer to a function pointer */
    *out_library = library;
    return DSC_OK;
}

dsc_status dsc_accel_open(const char *name, const char *library_dir, const struct dsc_accel **out_accel)
{
    const struct entry *entry = NULL;
    dsc_accel_entry get_table;
    const struct dsc_accel *accel;
    void *library = NULL;
    dsc_status status;

    if (name == NULL || out_accel == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", name == NULL ? "name" : "out_accel");
    DSC_TRY(find(name, &entry));
    get_table = entry->builtin;
    if (get_table == NULL)
        DSC_TRY(load(entry, library_dir, &library, &get_table));

    accel = get_table(report);
    if ((status = check_table(name, accel)) != DSC_OK || (status = check_devices(name, accel)) != DSC_OK) {
        if (library != NULL)
            dlclose(library);
        return status;
    }
    *out_accel = accel;
    return DSC_OK;
}
