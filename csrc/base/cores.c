/* Reads the processors of a process and their NUMA nodes from Linux. */
#include "base/cores.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_NODES 1024

static bool has_core(const struct dsc_cores *cores, int32_t core)
{
    return CPU_ISSET_S((size_t)core, sizeof cores->bits, &cores->bits.set);
}

static void add_core(struct dsc_cores *cores, int32_t core)
{
    CPU_SET_S((size_t)core, sizeof cores->bits, &cores->bits.set);
}

void dsc_cores_of(pid_t pid, struct dsc_cores *out_cores)
{
    memset(out_cores, 0, sizeof *out_cores);
    if (sched_getaffinity(pid, sizeof out_cores->bits, &out_cores->bits.set) == 0)
        return;

    long n_online = sysconf(_SC_NPROCESSORS_ONLN);

    for (int32_t i = 0; i < (n_online > 0 ? n_online : 1) && i < DSC_CORES_MAX; i++)
        add_core(out_cores, i);
}

int32_t dsc_cores_count(const struct dsc_cores *cores)
{
    return CPU_COUNT_S(sizeof cores->bits, &cores->bits.set);
}

/* Reads the first line of a file, without the newline; false if there is none. */
static bool read_line(const char *path, char *line, int line_bytes)
{
    FILE *file = fopen(path, "re");
    bool is_read = file != NULL && fgets(line, line_bytes, file) != NULL;

    if (file != NULL)
        fclose(file);
    if (is_read)
        line[strcspn(line, "\n")] = '\0';
    return is_read;
}

/* Adds to node the processors that are in cores and in a list in the kernel's format, for example 0-3,8. */
static void add_listed(const char *list, const struct dsc_cores *cores, struct dsc_cores *node)
{
    for (const char *p = list; *p != '\0'; p += *p == ',') {
        char *end;
        long first = strtol(p, &end, 10);
        long last = first;

        if (end == p)
            return;
        if (*end == '-')
            last = strtol(end + 1, &end, 10);
        for (long i = first; i >= 0 && i <= last && i < DSC_CORES_MAX; i++)
            if (has_core(cores, (int32_t)i))
                add_core(node, (int32_t)i);
        p = end;
    }
}

void dsc_cores_near(const char *root, const struct dsc_cores *cores, int32_t thread, int32_t n_threads,
                    struct dsc_cores *out_near)
{
    int64_t n_cores = dsc_cores_count(cores);
    /* The middle of the thread's share of the processors, with processors ordered by node. */
    int64_t wanted = (2 * (int64_t)thread + 1) * n_cores / (2 * (int64_t)n_threads);
    char path[PATH_MAX];
    char list[16384];

    *out_near = *cores;
    for (int32_t i = 0; i < MAX_NODES; i++) {
        struct dsc_cores node = {0};

        if (snprintf(path, sizeof path, "%s/sys/devices/system/node/node%d/cpulist", root, i) >= (int)sizeof path)
            return;
        if (!read_line(path, list, sizeof list))
            continue; /* numbers may have gaps */
        add_listed(list, cores, &node);
        wanted -= dsc_cores_count(&node);
        if (wanted < 0) {
            *out_near = node;
            return;
        }
    }
}
