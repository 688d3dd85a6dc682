/*
 * The devices that the CUDA library's tests run on: an emulated device with host memory, and a real device through the
 * driver.
 */
#ifndef DSC_TEST_DEVICE_H
#define DSC_TEST_DEVICE_H

#include "../accel/folder.h"
#include "emulator/control.h"
#include "test.h"

#include "dsc/accel.h"

#include <dlfcn.h>

struct device {
    const char *name;
    const struct dsc_accel *accel;
    struct dsc_emulator *emulator; /* NULL for a real one */
};

/* The driver's functions that the tests use (cuda.h, driver API; stable since CUDA 3.2). */
struct driver {
    int (*init)(unsigned flags);
    int (*retain)(void **context, int device);
    int (*set_current)(void *context);
    int (*alloc)(unsigned long long *pointer, size_t n_bytes);
    int (*release)(unsigned long long pointer);
    int (*upload)(unsigned long long dst, const void *src, size_t n_bytes);
    int (*download)(void *dst, unsigned long long src, size_t n_bytes);
    int (*synchronize)(void);
};

static struct driver driver;

static inline void driver_check(int result, const char *what)
{
    if (result != 0) {
        fprintf(stderr, "CUDA driver: %s failed with %d\n", what, result);
        exit(1);
    }
}

static inline bool driver_open(void)
{
    static const char *const names[] = {"cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc_v2", "cuMemFree_v2",
                                        "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2", "cuCtxSynchronize"};
    void *functions[sizeof names / sizeof names[0]];
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *context;

    if (library == NULL)
        return false;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if ((functions[i] = dlsym(library, names[i])) == NULL)
            return false;
    memcpy(&driver, functions, sizeof driver);
    driver_check(driver.init(0), "cuInit");
    driver_check(driver.retain(&context, 0), "cuDevicePrimaryCtxRetain");
    driver_check(driver.set_current(context), "cuCtxSetCurrent");
    return true;
}

/*
 * Opens the emulated device (is_real false) or the real one. Prints the reason and returns false when there is no
 * device.
 */
static inline bool device_open(bool is_real, struct device *out_device)
{
    const struct dsc_accel *accel;
    char file[PATH_MAX + 32];

    if (dsc_accel_open("cuda", test_beside(is_real ? "../../.." : "emulated"), &accel) != DSC_OK) {
        printf("%s device: %s\n", is_real ? "real" : "emulated", dsc_last_error());
        return false;
    }
    if (is_real && !driver_open()) {
        printf("real device: libcuda.so.1 lacks what the tests need\n");
        return false;
    }
    out_device->name = is_real ? "real" : "emulated";
    out_device->accel = accel;
    out_device->emulator = NULL;
    if (!is_real) {
        snprintf(file, sizeof file, "%s/libdsc_cuda.so", test_beside("emulated"));
        out_device->emulator = dlsym(dlopen(file, RTLD_NOW), "dsc_emulator");
    }
    return true;
}

static inline void *device_alloc(const struct device *device, size_t n_bytes)
{
    unsigned long long pointer;

    if (device->emulator != NULL)
        return test_alloc(n_bytes);
    driver_check(driver.alloc(&pointer, n_bytes > 0 ? n_bytes : 1), "cuMemAlloc");
    return (void *)(uintptr_t)pointer;
}

static inline void device_free(const struct device *device, void *data)
{
    if (device->emulator != NULL)
        free(data);
    else
        driver_check(driver.release((uintptr_t)data), "cuMemFree");
}

static inline void device_upload(const struct device *device, void *dst, const void *src, size_t n_bytes)
{
    if (device->emulator != NULL)
        memcpy(dst, src, n_bytes);
    else
        driver_check(driver.upload((uintptr_t)dst, src, n_bytes), "cuMemcpyHtoD");
}

/* Waits for all enqueued work. */
static inline void device_download(const struct device *device, void *dst, const void *src, size_t n_bytes)
{
    if (device->emulator != NULL) {
        memcpy(dst, src, n_bytes);
        return;
    }
    driver_check(driver.synchronize(), "cuCtxSynchronize");
    driver_check(driver.download(dst, (uintptr_t)src, n_bytes), "cuMemcpyDtoH");
}

/* Runs the tests of a program on the emulated device, and on a real one where there is one. Returns main's exit code. */
static inline int device_run_tests(const char *file, void (*test)(const struct device *device))
{
    struct device device;
    int n_devices = 0;

    for (int is_real = 0; is_real < 2; is_real++) {
        if (!device_open(is_real != 0, &device))
            continue;
        n_devices++;
        test(&device);
    }
    return n_devices == 0 ? TEST_SKIPPED : test_finish(file);
}

#endif
