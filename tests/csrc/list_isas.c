/*
 * Prints the instruction sets that this build contains and this processor runs, one a line. The test runners loop over
 * them.
 */
#include "dsc/kernels.h"

#include <stdio.h>

int main(void)
{
    bool is_runnable;
    const char *name;

    for (int32_t i = 0; (name = dsc_cpu_isa_at(i, &is_runnable)) != NULL; i++)
        if (is_runnable)
            puts(name);
    return 0;
}
