/* ckpt/exchange.c: two names are swapped, or the call fails with a reason. */
#include "test.h"

#include "dsc/ckpt.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[] = "/tmp/dsc-exchange-XXXXXX";

static const char *in_folder(char *text, const char *name)
{
    snprintf(text, 128, "%s/%s", folder, name);
    return text;
}

static ino_t inode_of(const char *path)
{
    struct stat info;

    return CHECK_EQ(stat(path, &info), 0) ? info.st_ino : 0;
}

int main(void)
{
    char a[128];
    char b[128];

    if (mkdtemp(folder) == NULL) {
        printf("no temporary folder: %s\n", strerror(errno));
        return TEST_SKIPPED;
    }
    in_folder(a, "a");
    in_folder(b, "b");
    TEST_CASE("a folder and a file");
    CHECK_EQ(mkdir(a, 0700), 0);
    CHECK_EQ(dsc_exchange_paths(a, b), -ENOENT);

    int fd = open(b, O_CREAT | O_WRONLY | O_EXCL, 0600);

    CHECK(fd >= 0);
    CHECK_EQ(close(fd), 0);

    ino_t inode_a = inode_of(a);
    ino_t inode_b = inode_of(b);
    int result = dsc_exchange_paths(a, b);

    if (result == -ENOSYS || result == -EINVAL || result == -ENOTSUP) {
        CHECK_EQ(inode_of(a), inode_a); /* a failed exchange has changed nothing */
        printf("this file system cannot exchange names\n");
    } else if (CHECK_EQ(result, 0)) {
        CHECK_EQ(inode_of(a), inode_b);
        CHECK_EQ(inode_of(b), inode_a);
        CHECK_EQ(dsc_exchange_paths(a, b), 0);
        CHECK_EQ(inode_of(a), inode_a);
    }
    CHECK_EQ(unlink(b), 0);
    CHECK_EQ(rmdir(a), 0);
    CHECK_EQ(rmdir(folder), 0);
    return test_finish(__FILE__);
}
