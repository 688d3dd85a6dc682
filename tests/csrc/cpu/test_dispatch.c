/* cpu/dispatch.c: the tables, the choice of the fastest instruction set, and forcing a given one. */
#include "test.h"


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

static void test_best(void)
{
    const char *best = NULL;
    const char *name;
    bool is_runnable;

    for (int32_t i = 0; (name = dsc_cpu_isa_at(i, &is_runnable)) != NULL; i++)
        if (is_runnable)
            best = name; /* the sets are listed from the slowest to the fastest */
    CHECK_STR(dsc_cpu_isa_name(), best);
}

int main(void)
{
    CHECK_STATUS(dsc_cpu_isa_force(NULL), DSC_OK); /* the runner may have forced a set */
    test_best();
    test_tables();
    test_force();
    return test_finish(__FILE__);
}
