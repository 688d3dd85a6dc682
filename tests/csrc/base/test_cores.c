/* base/cores.c: the processors of NUMA nodes and of this process. The test writes the kernel's files into a folder. */
#include "test.h"

#include "base/cores.h"

#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[PATH_MAX];

/* Writes text into root/path, making the folders on the way. */
static void put(const char *path, const char *text)
{
    char full[2 * PATH_MAX];
    FILE *file;

    snprintf(full, sizeof full, "%s/%s", root, path);
    for (char *p = full + strlen(root) + 1; (p = strchr(p, '/')) != NULL; p++) {
        *p = '\0';
        mkdir(full, 0700);
        *p = '/';
    }
    file = fopen(full, "w");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0) {
        perror(full);
        exit(1);
    }
}

static void new_root(void)
{
    const char *parent = getenv("TMPDIR");

    snprintf(root, sizeof root, "%s/dsc_cores_XXXXXX", parent != NULL ? parent : "/tmp");
    if (mkdtemp(root) == NULL) {
        perror(root);
        exit(1);
    }
}

static void remove_root(void)
{
    char command[PATH_MAX + 16];

    snprintf(command, sizeof command, "rm -rf '%s'", root);
    CHECK_EQ(system(command), 0);
}

static struct dsc_cores cores_from(int32_t first, int32_t last)
{
    struct dsc_cores cores = {0};

    for (int32_t i = first; i <= last; i++)
        CPU_SET_S((size_t)i, sizeof cores.bits, &cores.bits.set);
    return cores;
}

static void check_near(const struct dsc_cores *cores, int32_t thread, int32_t n_threads, int32_t n_wanted, int32_t one_of_them)
{
    struct dsc_cores near;

    TEST_CASE("thread %d of %d", thread, n_threads);
    dsc_cores_near(root, cores, thread, n_threads, &near);
    CHECK_EQ(dsc_cores_count(&near), n_wanted);
    CHECK(CPU_ISSET_S((size_t)one_of_them, sizeof near.bits, &near.bits.set));
}

static void test_nodes(void)
{
    struct dsc_cores cores = cores_from(2, 13);

    new_root();
    check_near(&cores, 3, 4, 12, 2); /* no file tells the nodes */
    put("sys/devices/system/node/node0/cpulist", "0-3,8-11\n");
    put("sys/devices/system/node/node2/cpulist", "4-7,12-15\n"); /* a gap in the numbers, and processors that are not ours */
    put("sys/devices/system/node/node3/cpulist", "\n");          /* memory only */
    for (int32_t thread = 0; thread < 12; thread++)
        check_near(&cores, thread, 12, 6, thread < 6 ? 2 : 12);
    check_near(&cores, 0, 2, 6, 11);
    check_near(&cores, 1, 2, 6, 7);
    check_near(&cores, 0, 1, 6, 4);  /* one thread, in the middle */
    check_near(&cores, 63, 64, 6, 4); /* more threads than processors */
    cores = cores_from(8, 11);
    check_near(&cores, 3, 4, 4, 8);
    remove_root();
}

static void test_this_process(void)
{
    struct dsc_cores own;
    cpu_set_t set;

    TEST_CASE("this process");
    dsc_cores_of(getpid(), &own);
    CHECK_EQ(sched_getaffinity(0, sizeof set, &set), 0);
    CHECK_EQ(dsc_cores_count(&own), CPU_COUNT(&set));
    for (int32_t i = 0; i < CPU_SETSIZE; i++)
        CHECK_EQ(!CPU_ISSET_S((size_t)i, sizeof own.bits, &own.bits.set), !CPU_ISSET(i, &set));
    dsc_cores_of(-1, &own); /* a process that does not exist: all online processors */
    CHECK_EQ(dsc_cores_count(&own), sysconf(_SC_NPROCESSORS_ONLN));
}

int main(void)
{
    test_nodes();
    test_this_process();
    return test_finish(__FILE__);
}
