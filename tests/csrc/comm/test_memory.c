/*
 * The memory left in the machine, in a control group and in the groups around it, read from files in the kernel's
 * format.
 */
#include "test.h"

#include "comm/memory.h"

#include <sys/stat.h>
#include <unistd.h>

static char root[] = "/tmp/dsc_memory_XXXXXX";

static void make_folder(const char *name)
{
    char path[256];

    snprintf(path, sizeof path, "%s/%s", root, name);
    if (mkdir(path, 0700) != 0)
        exit(1);
}

static void write_file(const char *name, const char *text)
{
    char path[256];

    snprintf(path, sizeof path, "%s/%s", root, name);

    FILE *file = fopen(path, "we");

    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0)
        exit(1);
}

static void remove_all(void)
{
    char command[64];

    snprintf(command, sizeof command, "rm -r %s", root);
    if (system(command) != 0)
        exit(1);
}

int main(void)
{
    if (mkdtemp(root) == NULL)
        return 1;
    CHECK_EQ(dsc_comm_available_bytes(root), INT64_MAX);
    make_folder("proc");
    make_folder("proc/self");
    write_file("proc/meminfo", "MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    300 kB\nSwapFree:         50 kB\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 350 * 1024);
    write_file("proc/self/cgroup", "12:memory:/old\n0::/outer/inner\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 350 * 1024);
    make_folder("sys");
    make_folder("sys/fs");
    make_folder("sys/fs/cgroup");
    make_folder("sys/fs/cgroup/outer");
    make_folder("sys/fs/cgroup/outer/inner");
    write_file("sys/fs/cgroup/outer/inner/memory.max", "max\n");
    write_file("sys/fs/cgroup/outer/inner/memory.current", "5000\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 350 * 1024);
    write_file("sys/fs/cgroup/outer/memory.max", "200000\n");
    write_file("sys/fs/cgroup/outer/memory.current", "150000\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 50000);
    write_file("sys/fs/cgroup/outer/memory.stat", "anon 120000\nfile 30000\ninactive_file 20000\nactive_file 8000\ninactive_file_x 7\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 78000);
    write_file("sys/fs/cgroup/outer/inner/memory.max", "5100\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 100);
    write_file("sys/fs/cgroup/outer/inner/memory.max", "4000\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 0);
    write_file("proc/meminfo", "");
    CHECK_EQ(dsc_comm_available_bytes(root), 0);

    /* Control groups of version 1, alone and beside version 2, with a path that exists only on the host. */
    write_file("proc/self/cgroup", "12:memory_x:/jobs\n11:cpu,memory:/jobs/one\n");
    CHECK_EQ(dsc_comm_available_bytes(root), INT64_MAX);
    make_folder("sys/fs/cgroup/memory");
    write_file("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    write_file("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
    CHECK_EQ(dsc_comm_available_bytes(root), INT64_MAX);
    write_file("sys/fs/cgroup/memory/memory.limit_in_bytes", "70000\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 69000);
    write_file("sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 300\ntotal_active_file 200\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 69500);
    make_folder("sys/fs/cgroup/memory/jobs");
    write_file("sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "5000\n");
    write_file("sys/fs/cgroup/memory/jobs/memory.usage_in_bytes", "4000\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 1000);
    write_file("proc/self/cgroup", "11:cpu,memory:/jobs/one\n0::/outer\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 1000);
    write_file("sys/fs/cgroup/outer/memory.max", "150000\n");
    write_file("sys/fs/cgroup/outer/memory.stat", "");
    CHECK_EQ(dsc_comm_available_bytes(root), 0);
    write_file("sys/fs/cgroup/outer/memory.max", "150700\n");
    CHECK_EQ(dsc_comm_available_bytes(root), 700);
    write_file("proc/self/cgroup", "no colon\n1:one\n10:cpuset:/\n");
    CHECK_EQ(dsc_comm_available_bytes(root), INT64_MAX);
    remove_all();
    CHECK(dsc_comm_available_bytes("") > 0 && dsc_comm_available_bytes("") < INT64_MAX);
    return test_finish(__FILE__);
}
