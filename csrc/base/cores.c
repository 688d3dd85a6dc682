/* Processors by affinity mask, control group and NUMA node, as Linux tells them. */
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

/* The file's first line, without its end; false when there is none. */
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

/* ceil(quota / period); INT32_MAX for a quota that limits nothing. */
static int32_t processors_of(long long quota, long long period)
{
    if (quota <= 0 || period <= 0 || quota / period >= INT32_MAX)
        return INT32_MAX;
    return (int32_t)(quota / period + (quota % period != 0));
}

/* The limit that one group itself has. */
static int32_t quota_of_group(const char *folder, bool is_version_2)
{
    char path[PATH_MAX];
    char line[64];
    long long quota = -1;
    long long period = -1;

    if (is_version_2) { /* "200000 100000", or "max 100000" */
        if (snprintf(path, sizeof path, "%s/cpu.max", folder) < (int)sizeof path && read_line(path, line, sizeof line) &&
            sscanf(line, "%lld %lld", &quota, &period) == 2)
            return processors_of(quota, period);
        return INT32_MAX;
    }
    if (snprintf(path, sizeof path, "%s/cpu.cfs_quota_us", folder) < (int)sizeof path && read_line(path, line, sizeof line))
        quota = strtoll(line, NULL, 10);
    if (snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder) < (int)sizeof path && read_line(path, line, sizeof line))
        period = strtoll(line, NULL, 10);
    return processors_of(quota, period);
}

/* The least limit of the group and of those above it. In a container the group's path may be the host's: what is not there limits nothing. */
static int32_t quota_of_path(const char *root, const char *mount, const char *group, bool is_version_2)
{
    char folder[PATH_MAX];
    int n_mount = snprintf(folder, sizeof folder, "%s%s", root, mount);
    int32_t least = INT32_MAX;

    if (snprintf(folder, sizeof folder, "%s%s%s", root, mount, group) >= (int)sizeof folder)
        folder[n_mount] = '\0';
    for (;;) {
        int32_t quota = quota_of_group(folder, is_version_2);
        char *last = strrchr(folder, '/');

        if (quota < least)
            least = quota;
        if (last == NULL || last < folder + n_mount)
            return least;
        *last = '\0';
    }
}

/* Whether "cpu" is one of a,b,c. */
static bool names_cpu(const char *controllers)
{
    const char *end;

    for (const char *name = controllers;; name = end + 1) {
        end = strchr(name, ',');
        if (end == NULL)
            return strcmp(name, "cpu") == 0;
        if (end - name == 3 && strncmp(name, "cpu", 3) == 0)
            return true;
    }
}

int32_t dsc_cores_quota(const char *root)
{
    char path[PATH_MAX];
    char line[PATH_MAX];
    int32_t least = INT32_MAX;

    if (snprintf(path, sizeof path, "%s/proc/self/cgroup", root) >= (int)sizeof path)
        return least;

    FILE *file = fopen(path, "re");

    if (file == NULL)
        return least;
    while (fgets(line, sizeof line, file) != NULL) { /* number:controllers:group; version 2 has no controllers there */
        char *controllers = strchr(line, ':');
        char *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        int32_t quota = INT32_MAX;

        if (group == NULL)
            continue;
        *group++ = '\0';
        controllers++;
        group[strcspn(group, "\n")] = '\0';
        if (controllers[0] == '\0')
            quota = quota_of_path(root, "/sys/fs/cgroup", group, true);
        else if (names_cpu(controllers))
            quota = quota_of_path(root, "/sys/fs/cgroup/cpu", group, false);
        if (quota < least)
            least = quota;
    }
    fclose(file);
    return least;
}

int32_t dsc_cores_fair_part(int32_t n_own, int32_t n_launcher, int32_t n_quota, int32_t n_ranks)
{
    int32_t n_shared = n_quota < n_launcher ? n_quota : n_launcher;
    int32_t n_fair = n_shared / n_ranks > 1 ? n_shared / n_ranks : 1;

    return n_own < n_fair ? n_own : n_fair;
}

/* Adds to node the processors of a kernel's list, as in 0-3,8, that are in cores. */
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

void dsc_cores_near(const char *root, const struct dsc_cores *cores, int32_t thread, int32_t n_threads, struct dsc_cores *out_near)
{
    int64_t n_cores = dsc_cores_count(cores);
    /* The middle of the thread's part of the processors, as they stand node after node. */
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
