/* Opening accelerators: by name, from libraries that are missing or have one fault each, and without a device. */
#include "folder.h"
#include "test.h"

#include "dsc/accel.h"

static void test_arguments(void)
{
    const struct dsc_accel *accel = NULL;
    char long_dir[PATH_MAX + 1];

    memset(long_dir, 'x', PATH_MAX);
    long_dir[PATH_MAX] = '\0';
    CHECK_ERROR(dsc_accel_open(NULL, NULL, &accel), DSC_EINVAL, "name");
    CHECK_ERROR(dsc_accel_open("host", NULL, NULL), DSC_EINVAL, "out_accel");
    CHECK_ERROR(dsc_accel_open("abacus", NULL, &accel), DSC_ENOTFOUND, "host, cuda");
    CHECK_ERROR(dsc_accel_open("cuda", long_dir, &accel), DSC_EINVAL, "library_dir");
    CHECK(accel == NULL);
}

static void test_host(void)
{
    const struct dsc_accel *first = NULL, *second = NULL;
    int32_t n_devices = 0;

    if (!CHECK_STATUS(dsc_accel_open("host", NULL, &first), DSC_OK))
        return;
    CHECK_STATUS(dsc_accel_open("host", "/nowhere", &second), DSC_OK);
    CHECK(first == second);
    CHECK_STR(first->name, "host");
    CHECK_EQ(first->abi, DSC_ACCEL_ABI);
    CHECK_EQ(first->size, sizeof *first);
    CHECK_STATUS(first->device_count(&n_devices), DSC_OK);
    CHECK_EQ(n_devices, 1);
}

/* Opening fails: out_accel stays untouched, and the error message holds the word. */
static void check_refused(const char *folder, dsc_status status, const char *word)
{
    const struct dsc_accel *accel = NULL;

    TEST_CASE("%s", folder);
    CHECK_ERROR(dsc_accel_open("cuda", test_beside(folder), &accel), status, word);
    CHECK(accel == NULL);
    TEST_CASE("%s", "");
}

static void test_libraries(void)
{
    const struct dsc_accel *first = NULL, *second = NULL;
    int32_t n_devices = 0;
    char next_abi[32];

    snprintf(next_abi, sizeof next_abi, "ABI %u", DSC_ACCEL_ABI + 1);
    check_refused("no_such_folder", DSC_ENOTSUP, "libdsc_cuda.so");
    check_refused("no_entry", DSC_ENOTSUP, "does not export " DSC_ACCEL_ENTRY);
    check_refused("no_table", DSC_ENOTSUP, "no table");
    check_refused("old_abi", DSC_ENOTSUP, next_abi);
    check_refused("other_size", DSC_ENOTSUP, "bytes");
    check_refused("no_hook", DSC_ENOTSUP, "flat_cast");
    check_refused("no_device", DSC_ENOTSUP, "no device");
    check_refused("broken_device", DSC_EDEVICE, "on fire");

    if (!CHECK_STATUS(dsc_accel_open("cuda", test_beside("good"), &first), DSC_OK))
        return;
    CHECK_STATUS(dsc_accel_open("cuda", test_beside("good"), &second), DSC_OK);
    CHECK(first == second);
    CHECK_STATUS(first->device_count(&n_devices), DSC_OK);
    CHECK_EQ(n_devices, 2);
}

/* The real library loads on a machine without a driver, and says that there is no driver. With a device it opens. */
static void test_real_library(void)
{
    const struct dsc_accel *accel = NULL;
    const char *dir = test_beside("../../..");
    char file[PATH_MAX + 32];

    snprintf(file, sizeof file, "%s/libdsc_cuda.so", dir);
    if (access(file, R_OK) != 0) {
        printf("%s is not built: not tried\n", file);
        return;
    }

    dsc_status status = dsc_accel_open("cuda", dir, &accel);

    if (status == DSC_OK) {
        CHECK_STR(accel->name, "cuda");
        return;
    }
    CHECK_EQ(status, DSC_ENOTSUP);
    CHECK(strstr(dsc_last_error(), "device") != NULL);
    printf("the CUDA library loads; %s\n", dsc_last_error());
}

int main(void)
{
    test_arguments();
    test_host();
    test_libraries();
    test_real_library();
    return test_finish(__FILE__);
}
