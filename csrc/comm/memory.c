/* Reads what the kernel tells of free memory: a refusal that is foreseen has a sentence, and is no killed process. */
#include "comm/memory.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

/* The numbers that follow two words at the beginning of lines, added up; false when neither is there. */
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

/* False when the file is not there, or says "max". */
static bool read_number(const char *path, int64_t *out_number)
{
    FILE *file = fopen(path, "re");
    bool is_read = file != NULL && fscanf(file, "%" SCNd64, out_number) == 1;

    if (file != NULL)
        fclose(file);
    return is_read;
}

/* What one control group leaves; INT64_MAX when it has no limit. */
static int64_t left_in_group(const char *folder)
{
    char path[PATH_MAX + 32];
    int64_t limit = 0;
    int64_t used = 0;
    int64_t files = 0;

    snprintf(path, sizeof path, "%s/memory.max", folder);
    if (!read_number(path, &limit))
        return INT64_MAX;
    snprintf(path, sizeof path, "%s/memory.current", folder);
    if (!read_number(path, &used))
        return INT64_MAX;
    snprintf(path, sizeof path, "%s/memory.stat", folder);
    (void)read_sum(path, "inactive_file", "active_file", &files);

    int64_t left = limit - used + files;

    return left > 0 ? left : 0;
}

/* Of the group that this process is in, and of all that hold that one. */
static int64_t left_in_groups(const char *root)
{
    char path[PATH_MAX];
    char line[PATH_MAX];
    int64_t least = INT64_MAX;
    int base_bytes = snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = base_bytes < (int)sizeof path ? fopen(path, "re") : NULL;
    bool is_found = false;

    while (file != NULL && !is_found && fgets(line, sizeof line, file) != NULL)
        is_found = strncmp(line, "0::", 3) == 0;
    if (file != NULL)
        fclose(file);
    if (!is_found)
        return INT64_MAX;
    line[strcspn(line, "\n")] = '\0';
    base_bytes = snprintf(path, sizeof path, "%s/sys/fs/cgroup", root);
    if (snprintf(path + base_bytes, sizeof path - (size_t)base_bytes, "%s", line + 3) >= (int)sizeof path - base_bytes)
        return INT64_MAX;
    for (;;) {
        int64_t left = left_in_group(path);
        char *slash = strrchr(path + base_bytes, '/');

        least = left < least ? left : least;
        if (slash == NULL)
            return least;
        *slash = '\0';
    }
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
