/*
 * A fake accelerator library. The FAKE_ macro that it is compiled with names its one fault; with FAKE_good it has none.
 */
#include "dsc/accel.h"

#include <string.h>

const struct dsc_accel *dsc_accel_entry_point(dsc_accel_report *report);
const struct dsc_accel *other_entry_point(dsc_accel_report *report);

#ifdef FAKE_broken_device
static dsc_accel_report *keep_report;
#endif

static dsc_status device_count(int32_t *out_n_devices)
{
#ifdef FAKE_broken_device
    (void)out_n_devices;
    keep_report("fake: the device is on fire");
    return DSC_EDEVICE;
#elif defined(FAKE_no_device)
    *out_n_devices = 0;
    return DSC_OK;
#else
    *out_n_devices = 2;
    return DSC_OK;
#endif
}

static dsc_status refuse(void)
{
    return DSC_ENOTSUP;
}

static struct dsc_accel table;

static void fill(void)
{
    /* All hooks have the same size. Only device_count is called through this table. */
    dsc_status (*const hook)(void) = refuse;
    char *hooks = (char *)&table.device_count;

    for (char *at = hooks; at < (char *)(&table + 1); at += sizeof hook)
        memcpy(at, &hook, sizeof hook);
    table.abi = DSC_ACCEL_ABI;
    table.size = sizeof table;
    table.name = "fake";
    table.device_count = device_count;
#if defined(FAKE_old_abi)
    table.abi = DSC_ACCEL_ABI + 1;
#elif defined(FAKE_other_size)
    table.size = sizeof table - 8;
#elif defined(FAKE_no_hook)
    table.flat_cast = NULL;
#endif
}

#ifdef FAKE_no_entry
#define ENTRY other_entry_point
#else
#define ENTRY dsc_accel_entry_point
#endif

DSC_API const struct dsc_accel *ENTRY(dsc_accel_report *report)
{
#ifdef FAKE_broken_device
    keep_report = report;
#else
    (void)report;
#endif
    fill();
#ifdef FAKE_no_table
    return NULL;
#else
    return &table;
#endif
}
