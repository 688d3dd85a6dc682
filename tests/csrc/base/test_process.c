/* base/process.c: a record tells its process from forked descendants at any depth, also if a child made the record. */
#include "test.h"

#include "dsc/process.h"

#include <sys/wait.h>
#include <unistd.h>

static bool is_refused(const struct dsc_process *process)
{
    char number[32];

    snprintf(number, sizeof number, "process %lld,", (long long)process->pid);
    return !dsc_process_is_this(process) && dsc_process_check(process, "this thing") == DSC_ESTATE && strstr(dsc_last_error(), number) != NULL &&
           strstr(dsc_last_error(), "this thing") != NULL;
}

/* The exit code of a child that runs the body, or 100 if a signal ended it. */
static int in_child(bool (*body)(const struct dsc_process *parent), const struct dsc_process *parent)
{
    int status = -1;
    pid_t child;

    fflush(NULL);
    child = fork();
    if (child == 0)
        _exit(body(parent) ? 0 : 1);
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
        return 100;
    return WEXITSTATUS(status);
}

static bool grandchild(const struct dsc_process *parent)
{
    return is_refused(parent);
}

static bool child(const struct dsc_process *parent)
{
    struct dsc_process own = {0, 0};

    return is_refused(parent) && dsc_process_note(&own) == DSC_OK && dsc_process_is_this(&own) && own.pid == getpid() &&
           dsc_process_check(&own, "mine") == DSC_OK && in_child(grandchild, &own) == 0 && in_child(grandchild, parent) == 0 && dsc_process_is_this(&own);
}

int main(void)
{
    struct dsc_process process;

    CHECK_STATUS(dsc_process_note(&process), DSC_OK);
    CHECK_EQ(process.pid, getpid());
    CHECK(dsc_process_is_this(&process));
    CHECK_STATUS(dsc_process_check(&process, "this thing"), DSC_OK);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(in_child(child, &process), 0);
    CHECK(dsc_process_is_this(&process));
    return test_finish(__FILE__);
}
