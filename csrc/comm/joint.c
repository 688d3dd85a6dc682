/*
 * Joint memory: a segment that all processes write, and a view of the segment in which writes stay private to the
 * process.
 */
#include "comm/segment.h"

#include "base/fail.h"
#include "dsc/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

struct dsc_comm_joint {
    struct dsc_process process;
    struct dsc_comm_segment *segment;
    char *view;
    int64_t n_bytes;
    char address[DSC_COMM_ADDRESS_BYTES];
};

/* The argument of the ioctl PAGEMAP_SCAN (linux/fs.h since 6.7); headers may be older than the kernel. */
struct scan {
    uint64_t size;
    uint64_t flags;
    uint64_t start;
    uint64_t end;
    uint64_t walk_end;
    uint64_t vec;
    uint64_t vec_len;
    uint64_t max_pages;
    uint64_t category_inverted;
    uint64_t category_mask;
    uint64_t category_anyof_mask;
    uint64_t return_mask;
};

struct scanned {
    uint64_t start;
    uint64_t end;
    uint64_t categories;
};

#define SCAN _IOWR('f', 16, struct scan)
#define IS_FILE ((uint64_t)1 << 2)
#define IS_PRESENT ((uint64_t)1 << 3)
#define IS_SWAPPED ((uint64_t)1 << 4)

static dsc_status map_view(struct dsc_comm_joint *joint)
{
    int64_t n_bytes = joint->segment->n_bytes - DSC_COMM_AT_ARENA;
    void *view = mmap(NULL, (size_t)n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, joint->segment->fd,
                      (off_t)DSC_COMM_AT_ARENA);

    if (view == MAP_FAILED)
        return dsc_fail(DSC_ENOMEM, "%" PRId64 " bytes of address space for a view of joint memory: %s", n_bytes,
                        strerror(errno));
    joint->view = view;
    joint->n_bytes = n_bytes;
    (void)madvise(view, (size_t)n_bytes, MADV_DONTDUMP); /* as the segment itself */
    return DSC_OK;
}

/* address: the memory to open; NULL: makes new memory. */
static dsc_status fill(struct dsc_comm_joint *joint, int64_t n_bytes, const char *address)
{
    int pidfd = -1;

    DSC_TRY(dsc_process_note(&joint->process));
    if (address == NULL)
        return dsc_comm_segment_create(0, 1, n_bytes, joint->address, &joint->segment);
    DSC_TRY(dsc_comm_segment_open(address, 0, 1, true, &joint->segment, &pidfd));
    if (pidfd >= 0)
        close(pidfd);
    return DSC_OK;
}

static dsc_status make(int64_t n_bytes, const char *address, dsc_comm_joint **out_joint)
{
    struct dsc_comm_joint *joint = calloc(1, sizeof *joint);

    if (joint == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for joint memory");

    dsc_status status = fill(joint, n_bytes, address);

    if (status == DSC_OK)
        status = map_view(joint);
    if (status != DSC_OK) {
        dsc_comm_segment_drop(joint->segment);
        free(joint);
        return status;
    }
    *out_joint = joint;
    return DSC_OK;
}

dsc_status dsc_comm_joint_create(int64_t n_bytes, dsc_comm_joint **out_joint)
{
    if (n_bytes < 1)
        return dsc_fail(DSC_EINVAL, "n_bytes is %" PRId64 ", must be positive", n_bytes);
    return make(n_bytes, NULL, out_joint);
}

const char *dsc_comm_joint_address(const dsc_comm_joint *joint)
{
    return joint->address;
}

dsc_status dsc_comm_joint_open(const char *address, dsc_comm_joint **out_joint)
{
    if (address == NULL)
        return dsc_fail(DSC_EINVAL, "address is NULL");
    return make(0, address, out_joint);
}

static dsc_status check_part(const dsc_comm_joint *joint, int64_t offset, int64_t n_bytes)
{
    DSC_TRY(dsc_process_check(&joint->process, "this joint memory"));
    if (offset < 0 || n_bytes < 0 || offset > joint->n_bytes || n_bytes > joint->n_bytes - offset)
        return dsc_fail(DSC_EINVAL, "a part of %" PRId64 " bytes from %" PRId64 " on, joint memory has %" PRId64,
                        n_bytes, offset, joint->n_bytes);
    return DSC_OK;
}

dsc_status dsc_comm_joint_commit(dsc_comm_joint *joint, int64_t offset, int64_t n_bytes)
{
    DSC_TRY(check_part(joint, offset, n_bytes));
    if (n_bytes == 0)
        return DSC_OK;
    return dsc_comm_segment_commit(joint->segment, DSC_COMM_AT_ARENA + offset, n_bytes, "joint memory");
}

dsc_status dsc_comm_joint_discard(dsc_comm_joint *joint, int64_t offset, int64_t n_bytes)
{
    DSC_TRY(check_part(joint, offset, n_bytes));

    int64_t page = sysconf(_SC_PAGESIZE);
    int64_t begin = (offset + page - 1) / page * page;
    int64_t end = (offset + n_bytes) / page * page;

    if (begin < end &&
        madvise(joint->segment->base + DSC_COMM_AT_ARENA + begin, (size_t)(end - begin), MADV_REMOVE) != 0)
        return dsc_fail(DSC_EIO, "%" PRId64 " bytes of joint memory cannot be returned: %s", end - begin,
                        strerror(errno));
    return DSC_OK;
}

/*
 * Finds up to max runs of pages of the view from begin to end that are private to this process. Returns their number;
 * *out_next: where the search goes on, end if it is over. If the kernel does not tell, all pages count as private.
 */
static int find_own_pages(const char *begin, const char *end, struct scanned *out_runs, int max, const char **out_next)
{
    struct scan scan = {
        .size = sizeof scan,
        .start = (uint64_t)(uintptr_t)begin,
        .end = (uint64_t)(uintptr_t)end,
        .vec = (uint64_t)(uintptr_t)out_runs,
        .vec_len = (uint64_t)max,
        .category_inverted = IS_FILE,
        .category_mask = IS_FILE,
        .category_anyof_mask = IS_PRESENT | IS_SWAPPED,
        .return_mask = IS_PRESENT,
    };
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    int n = fd < 0 ? -1 : ioctl(fd, SCAN, &scan);

    if (fd >= 0)
        close(fd);
    if (n < 0) {
        *out_runs = (struct scanned){(uint64_t)(uintptr_t)begin, (uint64_t)(uintptr_t)end, 0};
        *out_next = end;
        return 1;
    }
    *out_next = n < max ? end : begin + (scan.walk_end - scan.start);
    return n;
}

dsc_status dsc_comm_joint_find_write(const dsc_comm_joint *joint, int64_t *out_at)
{
    DSC_TRY(dsc_process_check(&joint->process, "this joint memory"));

    const char *data = joint->segment->base + DSC_COMM_AT_ARENA;
    const char *end = joint->view + joint->n_bytes;

    for (const char *next = joint->view; next < end;) {
        struct scanned runs[64];
        int n = find_own_pages(next, end, runs, 64, &next);

        for (int i = 0; i < n; i++) {
            int64_t begin = (int64_t)(runs[i].start - (uint64_t)(uintptr_t)joint->view);
            int64_t n_bytes = (int64_t)(runs[i].end - runs[i].start);

            if (memcmp(joint->view + begin, data + begin, (size_t)n_bytes) == 0)
                continue;
            while (joint->view[begin] == data[begin])
                begin++;
            *out_at = begin;
            return DSC_OK;
        }
    }
    *out_at = -1;
    return DSC_OK;
}

/* Whether any page of the view is private to this process; true if the kernel does not tell. */
static bool has_own_pages(const dsc_comm_joint *joint)
{
    struct scanned run;
    const char *next = NULL;

    return find_own_pages(joint->view, joint->view + joint->n_bytes, &run, 1, &next) > 0;
}

dsc_status dsc_comm_joint_forget(dsc_comm_joint *joint)
{
    DSC_TRY(dsc_process_check(&joint->process, "this joint memory"));
    /* Each dropped page costs a fault when it is read again. A look at the page table costs a tenth of that. */
    if (!has_own_pages(joint))
        return DSC_OK;
    if (madvise(joint->view, (size_t)joint->n_bytes, MADV_DONTNEED) != 0)
        return dsc_fail(DSC_ENOTSUP,
                        "what this process has written to %" PRId64
                        " bytes of joint memory cannot be forgotten: %s; are its pages locked (mlockall)?",
                        joint->n_bytes, strerror(errno));
    return DSC_OK;
}

void *dsc_comm_joint_data(const dsc_comm_joint *joint)
{
    return joint->segment->base + DSC_COMM_AT_ARENA;
}

void *dsc_comm_joint_view(const dsc_comm_joint *joint)
{
    return joint->view;
}

int64_t dsc_comm_joint_bytes(const dsc_comm_joint *joint)
{
    return joint->n_bytes;
}

void dsc_comm_joint_destroy(dsc_comm_joint *joint)
{
    if (joint == NULL || !dsc_process_is_this(&joint->process))
        return;
    munmap(joint->view, (size_t)joint->n_bytes);
    dsc_comm_segment_drop(joint->segment);
    free(joint);
}
