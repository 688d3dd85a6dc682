/* The atomic swap of two names: Linux has it as a flag of renameat2. */
#include "dsc/ckpt.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXCHANGE (1u << 1) /* RENAME_EXCHANGE of linux/fs.h */

int dsc_exchange_paths(const char *a, const char *b)
{
#ifdef SYS_renameat2 /* not every libc has the wrapper */
    return syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, EXCHANGE) == 0 ? 0 : -errno;
#else
    (void)a;
    (void)b;
    return -ENOSYS;
#endif
}
