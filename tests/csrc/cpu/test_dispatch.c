/* cpu/dispatch.c: the tables, forcing one, and what DSC_CPU_ISA may and may not name. Each reading of the variable is in a process of its own. */
#include "test.h"

#include "dsc/flat.h"

#include <sys/wait.h>
#include <unistd.h>

static bool is_isa(const char *name)
{
    bool is_runnable;
    const char *other;

    for (int32_t i = 0; (other = dsc_cpu_isa_at(i, &is_runnable)) != NULL; i++)
        if (strcmp(other, name) == 0)
            return is_runnable;
    return false;
}

static void test_tables(void)
{
    bool is_runnable = false;

    CHECK_STR(dsc_cpu_isa_at(0, &is_runnable), "scalar");
    CHECK(is_runnable);
    CHECK(dsc_cpu_isa_at(0, NULL) != NULL);
    CHECK(dsc_cpu_isa_at(-1, NULL) == NULL);
    CHECK(dsc_cpu_isa_at(100, NULL) == NULL);
}

static void test_force(void)
{
    const char *automatic = dsc_cpu_isa_name();

    CHECK(automatic != NULL && is_isa(automatic));
    CHECK_STATUS(dsc_cpu_isa_force("scalar"), DSC_OK);
    CHECK_STR(dsc_cpu_isa_name(), "scalar");
    CHECK_ERROR(dsc_cpu_isa_force("mmx"), DSC_ENOTSUP, "scalar");
    CHECK_STR(dsc_cpu_isa_name(), "scalar");
    CHECK_STATUS(dsc_cpu_isa_force(NULL), DSC_OK);
    CHECK_STR(dsc_cpu_isa_name(), automatic);
}

/* Runs body in a child, before which nothing has asked for a table; its exit code is its verdict. */
static void check_child(const char *request, int (*body)(void))
{
    pid_t child = fork();
    int status = -1;

    if (child == 0) {
        setenv("DSC_CPU_ISA", request, 1);
        _exit(body());
    }
    CHECK(child > 0);
    CHECK_EQ(waitpid(child, &status, 0), child);
    TEST_CASE("DSC_CPU_ISA=%s", request);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
}

static int unknown_request(void)
{
    float x = 1.0f;
    struct dsc_span span = {&x, 1, DSC_DTYPE_F32};

    CHECK(dsc_cpu_isa_name() == NULL);
    CHECK_ERROR(dsc_flat_scale(&span, 1, 2.0f, NULL), DSC_ENOTSUP, "DSC_CPU_ISA=quantum");
    CHECK_EQ(x, 1);
    CHECK_STATUS(dsc_cpu_isa_force("scalar"), DSC_OK);
    CHECK_STATUS(dsc_flat_scale(&span, 1, 2.0f, NULL), DSC_OK);
    CHECK_EQ(x, 2);
    return test_n_failures > 0;
}

static int scalar_request(void)
{
    CHECK_STR(dsc_cpu_isa_name(), "scalar");
    return test_n_failures > 0;
}

static int empty_request(void)
{
    const char *best = NULL;
    const char *name;
    bool is_runnable;

    for (int32_t i = 0; (name = dsc_cpu_isa_at(i, &is_runnable)) != NULL; i++)
        if (is_runnable)
            best = name; /* the walk is from the slowest to the fastest */
    CHECK_STR(dsc_cpu_isa_name(), best);
    return test_n_failures > 0;
}

int main(void)
{
    check_child("quantum", unknown_request);
    check_child("scalar", scalar_request);
    check_child("", empty_request);
    test_case[0] = '\0';
    test_tables();
    test_force();
    return test_finish(__FILE__);
}
