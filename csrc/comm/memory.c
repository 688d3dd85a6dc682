/* Reads the kernel's numbers of free memory, so that a lack of memory gives a sentence, not a killed process. */
#include "comm/memory.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

/* Sums the numbers on all lines that begin with one of two names; false if there is no such line. */
static bool read_sum(const char *path, const char *a, const char *b, int64_t *out_sum)
{
    FILE *file = fopen(path, "re");
    bool is_found = false;
    char line[256];

    *out_sum = 0;
    if (file == NULL)
        return false;
    while (fgets(line, sizeof line, file) != NULL) {
        int64_t value = 0;
        size_t n = strcspn(line, ": ");

        if ((strncmp(line, a, n) != 0 || a[n] != '\0') && (strncmp(line, b, n) != 0 || b[n] != '\0'))
            continue;
        if (sscanf(line + n, "%*[: ]%" SCNd64, &value) != 1)
            continue;
        is_found = true;
        *out_sum += value;
    }
    fclose(file);
    return is_found;
}

/* False if the file does not exist or says "max". */
static bool read_number(const char *path, int64_t *out_number)
{
    FILE *file = fopen(path, "re");
    bool is_read = file != NULL && fscanf(file, "%" SCNd64, out_number) == 1;

    if (file != NULL)
        fclose(file);
    return is_read;
}

/* File names and keys of one version of control groups. */
struct version {
    const char *mount; /* below the root */
    const char *limit;
    const char *used;
    const char *files[2]; /* in memory.stat */
};

static const struct version version_1 = {
    .mount = "/sys/fs/cgroup/memory",
    .limit = "memory.limit_in_bytes",
    .used = "memory.usage_in_bytes",
    .files = {"total_inactive_file", "total_active_file"},
};

static const struct version version_2 = {
    .mount = "/sys/fs/cgroup",
    .limit = "memory.max",
    .used = "memory.current",
    .files = {"inactive_file", "active_file"},
};

/* Version 1 reports no limit as the largest number of whole pages. */
#define LEAST_WITHOUT_LIMIT (INT64_C(1) << 62)

/* Bytes that one control group still allows; INT64_MAX when it has no limit. */
static int64_t left_in_group(const struct version *version, const char *folder)
{
    char path[PATH_MAX + 32];
    int64_t limit = 0;
    int64_t used = 0;
    int64_t files = 0;

    snprintf(path, sizeof path, "%s/%s", folder, version->limit);
    if (!read_number(path, &limit) || limit >= LEAST_WITHOUT_LIMIT)
        return INT64_MAX;
    snprintf(path, sizeof path, "%s/%s", folder, version->used);
    if (!read_number(path, &used))
        return INT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    (void)read_sum(path, version->files[0], version->files[1], &files);

    int64_t left = limit - used + files;

    return left > 0 ? left : 0;
}

/*
 * Bytes that a group and all groups above it still allow, up to the mount point. In a container the path may be the
 * host's: a missing folder limits nothing.
 */
static int64_t left_upwards(const struct version *version, const char *root, const char *group)
{
    char path[PATH_MAX];
    int64_t least = INT64_MAX;
    int base_bytes = snprintf(path, sizeof path, "%s%s", root, version->mount);

    if (base_bytes >= (int)sizeof path ||
        snprintf(path + base_bytes, sizeof path - (size_t)base_bytes, "%s", group) >= (int)sizeof path - base_bytes)
        return INT64_MAX;
    for (;;) {
        int64_t left = left_in_group(version, path);
        char *slash = strrchr(path + base_bytes, '/');

        least = left < least ? left : least;
        if (slash == NULL)
            return least;
        *slash = '\0';
    }
}

/* Whether the comma-separated list of controllers has the memory controller. */
static bool names_memory(const char *controllers, size_t n_bytes)
{
    static const char name[] = "memory";

    for (size_t i = 0; i < n_bytes;) {
        size_t n = 0;

        while (i + n < n_bytes && controllers[i + n] != ',')
            n++;
        if (n == sizeof name - 1 && strncmp(controllers + i, name, n) == 0)
            return true;
        i += n + 1;
    }
    return false;
}

/*
 * Bytes that this process's control groups still allow. The file has a line for each group: a number, controllers (none
 * in version 2) and a path.
 */
static int64_t left_in_groups(const char *root)
{
    char path[PATH_MAX];
    char line[PATH_MAX];
    int64_t least = INT64_MAX;
    int n_bytes = snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = n_bytes < (int)sizeof path ? fopen(path, "re") : NULL;

    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        const char *controllers = strchr(line, ':');
        const char *group = controllers == NULL ? NULL : strchr(controllers + 1, ':');
        const struct version *version = NULL;

        line[strcspn(line, "\n")] = '\0';
        if (group != NULL && group == controllers + 1)
            version = &version_2;
        else if (group != NULL && names_memory(controllers + 1, (size_t)(group - controllers - 1)))
            version = &version_1;
        if (version != NULL) {
            int64_t left = left_upwards(version, root, group + 1);

            least = left < least ? left : least;
        }
    }
    if (file != NULL)
        fclose(file);
    return least;
}

int64_t dsc_comm_available_bytes(const char *root)
{
    char path[PATH_MAX];
    int64_t n_kib = 0;
    int64_t in_groups = left_in_groups(root);

    if (snprintf(path, sizeof path, "%s/proc/meminfo", root) >= (int)sizeof path ||
        !read_sum(path, "MemAvailable", "SwapFree", &n_kib))
        return in_groups;
    return n_kib * 1024 < in_groups ? n_kib * 1024 : in_groups;
}
