/* Makes, opens, checks and unmaps segments. */
#include "comm/segment.h"

#include "base/fail.h"
#include "comm/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u
#endif

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define LAYOUT                                                                                        \
    ((uint32_t)(DSC_COMM_SMALL_BYTES ^ (DSC_COMM_LANE_BYTES << 1) ^ sizeof(struct dsc_comm_control) ^ \
                (sizeof(struct dsc_comm_mailbox) << 2)))

/* The parts of an address. */
struct place {
    uint64_t host;      /* derived from the kernel's boot id */
    uint64_t namespace; /* of process numbers */
    int32_t pid;
    int32_t fd;
    int64_t n_bytes;
    uint8_t token[16];
};

/*
 * The segments that this process has made. Ends of one process that are peers share one mapping of a segment. The lock
 * is held for a few instructions, and during fork().
 */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static struct dsc_comm_segment *own_segments;
static int handler_error; /* written once under once */

static void take_lock(void)
{
    pthread_mutex_lock(&lock);
}

static void give_lock(void)
{
    pthread_mutex_unlock(&lock);
}

static void handle_forks(void)
{
    handler_error = pthread_atfork(take_lock, give_lock, give_lock);
}

uint64_t dsc_comm_hash_of(const char *text)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a */

    for (; *text != '\0'; text++)
        hash = (hash ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    return hash;
}

static dsc_status find_host(uint64_t *out_host, uint64_t *out_namespace)
{
    const char *path = "/proc/sys/kernel/random/boot_id";
    char text[64];
    FILE *file = fopen(path, "re");
    bool is_read = file != NULL && fgets(text, sizeof text, file) != NULL;
    struct stat about;

    if (file != NULL)
        fclose(file);
    if (!is_read)
        return dsc_fail(DSC_ENOTSUP, "%s cannot be read: /proc is needed for memory between processes", path);
    if (stat("/proc/self/ns/pid", &about) != 0)
        return dsc_fail(DSC_ENOTSUP,
                        "/proc/self/ns/pid cannot be read (%s): /proc is needed for memory between processes",
                        strerror(errno));
    *out_host = dsc_comm_hash_of(text);
    *out_namespace = (uint64_t)about.st_ino;
    return DSC_OK;
}

static dsc_status make_file(int64_t n_bytes, int *out_fd)
{
    struct rlimit limit;

    /* Beyond the limit the kernel would also send a signal. */
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < (uint64_t)n_bytes)
        return dsc_fail(DSC_ENOSPC,
                        "%" PRId64 " bytes of address space are asked for shared memory, files may have %" PRIu64
                        " (ulimit -f)",
                        n_bytes, (uint64_t)limit.rlim_cur);

    int fd = memfd_create("deepspeed_c", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);

    if (fd < 0 && errno == EINVAL) /* a kernel before 6.3 */
        fd = memfd_create("deepspeed_c", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return dsc_fail(errno == ENOMEM || errno == EMFILE || errno == ENFILE ? DSC_ENOMEM : DSC_ENOTSUP,
                        "memfd_create: %s", strerror(errno));
    if (fchmod(fd, 0600) != 0 || ftruncate(fd, (off_t)n_bytes) != 0 || fcntl(fd, F_ADD_SEALS, SEALS) != 0) {
        dsc_status status =
            dsc_fail(DSC_ENOTSUP, "shared memory of %" PRId64 " bytes of address space: %s", n_bytes, strerror(errno));

        close(fd);
        return status;
    }
    *out_fd = fd;
    return DSC_OK;
}

/* Rounded up to a huge page. */
static int64_t default_arena(void)
{
    int64_t n_pages = sysconf(_SC_PHYS_PAGES);
    int64_t n_bytes = 2 * (n_pages > 0 ? n_pages : 1 << 20) * (int64_t)sysconf(_SC_PAGESIZE);

    return n_bytes;
}

static dsc_status map_file(struct dsc_comm_segment *segment, int fd)
{
    int access = PROT_READ | (segment->writes ? PROT_WRITE : 0);
    void *base = mmap(NULL, (size_t)segment->n_bytes, access, MAP_SHARED | MAP_NORESERVE, fd, 0);

    if (base == MAP_FAILED)
        return dsc_fail(DSC_ENOMEM, "%" PRId64 " bytes of address space for shared memory: %s", segment->n_bytes,
                        strerror(errno));
    segment->base = base;
    /* Otherwise a core dump would go through the whole address space of each rank's segment. */
    (void)madvise(segment->base, (size_t)segment->n_bytes, MADV_DONTDUMP);
    /* A hint, for systems that allow it. */
    (void)madvise(segment->base + DSC_COMM_AT_ARENA, (size_t)(segment->n_bytes - DSC_COMM_AT_ARENA), MADV_HUGEPAGE);
    return DSC_OK;
}

static void write_address(const struct place *place, char *address)
{
    int n = snprintf(address, DSC_COMM_ADDRESS_BYTES, "dsc%u:%016" PRIx64 ":%" PRIu64 ":%d:%d:%" PRId64 ":",
                     DSC_COMM_VERSION, place->host, place->namespace, (int)place->pid, (int)place->fd, place->n_bytes);

    for (size_t i = 0; i < sizeof place->token; i++)
        n += snprintf(address + n, (size_t)(DSC_COMM_ADDRESS_BYTES - n), "%02x", place->token[i]);
}

static dsc_status read_address(const char *address, int32_t rank, struct place *place)
{
    char written[DSC_COMM_ADDRESS_BYTES];
    char token[33];
    unsigned version = 0;
    int pid = 0;
    int fd = 0;
    int end = 0;

    if (address == NULL)
        return dsc_fail(DSC_EINVAL, "the address of rank %d is NULL", (int)rank);

    int n = sscanf(address, "dsc%u:%16" SCNx64 ":%20" SCNu64 ":%9d:%9d:%19" SCNd64 ":%32[0-9a-f]%n", &version,
                   &place->host, &place->namespace, &pid, &fd, &place->n_bytes, token, &end);

    if (n >= 1 && version != DSC_COMM_VERSION)
        return dsc_fail(DSC_ENOTSUP, "rank %d speaks version %u of the protocol, this rank version %u", (int)rank,
                        version, DSC_COMM_VERSION);
    if (n != 7 || strlen(token) != 32 || address[end] != '\0' || pid < 1 || fd < 0 ||
        place->n_bytes <= DSC_COMM_AT_ARENA)
        return dsc_fail(DSC_EINVAL, "\"%.200s\" is no address of rank %d", address, (int)rank);
    place->pid = pid;
    place->fd = fd;
    for (size_t i = 0; i < sizeof place->token; i++) {
        unsigned byte = 0;

        (void)sscanf(token + 2 * i, "%2x", &byte);
        place->token[i] = (uint8_t)byte;
    }
    write_address(place, written);
    /* Refuses signs, blanks and leading zeros, which a parser of numbers would accept. */
    if (strcmp(written, address) != 0)
        return dsc_fail(DSC_EINVAL, "\"%.200s\" is no address of rank %d", address, (int)rank);
    return DSC_OK;
}

static dsc_status fill(struct dsc_comm_segment *segment, int32_t rank, int32_t n_ranks, char *address)
{
    struct place place = {.pid = segment->pid, .fd = segment->fd, .n_bytes = segment->n_bytes};

    DSC_TRY(find_host(&place.host, &place.namespace));
    if (getrandom(place.token, sizeof place.token, 0) != (ssize_t)sizeof place.token)
        return dsc_fail(DSC_ENOTSUP, "getrandom: %s", strerror(errno));
    DSC_TRY(dsc_comm_segment_commit(segment, 0, DSC_COMM_AT_LANES, "control words"));
    DSC_TRY(map_file(segment, segment->fd));

    struct dsc_comm_header *header = (struct dsc_comm_header *)(void *)segment->base;

    *header = (struct dsc_comm_header){
        .magic = DSC_COMM_MAGIC,
        .version = DSC_COMM_VERSION,
        .layout = LAYOUT,
        .rank = rank,
        .n_ranks = n_ranks,
        .n_bytes = segment->n_bytes,
    };
    memcpy(header->token, place.token, sizeof place.token);
    memcpy(segment->token, place.token, sizeof place.token);
    write_address(&place, address);
    return DSC_OK;
}

dsc_status dsc_comm_segment_create(int32_t rank, int32_t n_ranks, int64_t arena_bytes, char *address,
                                   struct dsc_comm_segment **out_segment)
{
    int64_t wanted = arena_bytes > 0 ? arena_bytes : default_arena();
    int64_t huge = (int64_t)2 << 20;

    pthread_once(&once, handle_forks);
    if (handler_error != 0)
        return dsc_fail(DSC_ENOMEM, "no memory to make shared memory safe to fork (errno %d)", handler_error);
    if (wanted > ((int64_t)1 << 46))
        return dsc_fail(DSC_EINVAL, "arena_bytes is %" PRId64 ", must be at most %" PRId64, wanted, (int64_t)1 << 46);

    struct dsc_comm_segment *segment = calloc(1, sizeof *segment);

    if (segment == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a segment");
    segment->n_bytes = DSC_COMM_AT_ARENA + (wanted + huge - 1) / huge * huge;
    segment->pid = getpid();
    segment->is_own = true;
    segment->writes = true;
    atomic_init(&segment->n_users, 1);

    dsc_status status = make_file(segment->n_bytes, &segment->fd);

    if (status != DSC_OK)
        goto free_segment;
    if ((status = fill(segment, rank, n_ranks, address)) != DSC_OK)
        goto close_file;
    take_lock();
    segment->next = own_segments;
    own_segments = segment;
    give_lock();
    *out_segment = segment;
    return DSC_OK;

close_file:
    if (segment->base != NULL)
        munmap(segment->base, (size_t)segment->n_bytes);
    close(segment->fd);
free_segment:
    free(segment);
    return status;
}

/* Finds the segment of this process that has the token, and adds a user; NULL if there is none. */
static struct dsc_comm_segment *find_own(const uint8_t *token)
{
    struct dsc_comm_segment *segment;

    take_lock();
    for (segment = own_segments; segment != NULL; segment = segment->next)
        if (memcmp(segment->token, token, sizeof segment->token) == 0) {
            dsc_comm_segment_hold(segment);
            break;
        }
    give_lock();
    return segment;
}

static dsc_status check_place(const struct place *place, int32_t rank)
{
    uint64_t host = 0;
    uint64_t namespace = 0;

    DSC_TRY(find_host(&host, &namespace));
    if (host != place->host)
        return dsc_fail(DSC_ENOTSUP, "rank %d runs on another host", (int)rank);
    if (namespace != place->namespace)
        return dsc_fail(DSC_ENOTSUP, "rank %d runs in another PID namespace (%" PRIu64 ", this rank in %" PRIu64 ")",
                        (int)rank, place->namespace, namespace);
    return DSC_OK;
}

static dsc_status check_header(const struct dsc_comm_header *header, const struct place *place, int32_t rank,
                               int32_t n_ranks)
{
    int pid = (int)place->pid;

    if (header->magic != DSC_COMM_MAGIC)
        return dsc_fail(DSC_EPEER, "what process %d shows for rank %d is no segment", pid, (int)rank);
    if (header->version != DSC_COMM_VERSION || header->layout != LAYOUT)
        return dsc_fail(DSC_ENOTSUP,
                        "the segment of rank %d (process %d) is of version %u and layout %u, this build's of %u and %u",
                        (int)rank, pid, header->version, header->layout, DSC_COMM_VERSION, LAYOUT);
    if (memcmp(header->token, place->token, sizeof place->token) != 0)
        return dsc_fail(DSC_EPEER, "the segment of rank %d (process %d) has another token than its address", (int)rank,
                        pid);
    if (header->rank != rank || header->n_ranks != n_ranks)
        return dsc_fail(DSC_EPEER, "the segment of process %d is that of rank %d of %d, not of rank %d of %d", pid,
                        (int)header->rank, (int)header->n_ranks, (int)rank, (int)n_ranks);
    if (header->n_bytes != place->n_bytes)
        return dsc_fail(DSC_EPEER,
                        "the segment of rank %d (process %d) has %" PRId64 " bytes, its address says %" PRId64,
                        (int)rank, pid, header->n_bytes, place->n_bytes);
    return DSC_OK;
}

/* Checks everything that the file itself can tell, before its memory is touched. */
static dsc_status check_file(int fd, const struct place *place, int32_t rank, int32_t n_ranks)
{
    int pid = (int)place->pid;
    struct dsc_comm_header header;
    struct stat about;

    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode))
        return dsc_fail(DSC_EPEER, "what process %d shows for rank %d is no memory", pid, (int)rank);
    if (about.st_uid != geteuid())
        return dsc_fail(DSC_ENOTSUP, "the segment of rank %d (process %d) belongs to user %u, this rank to user %u",
                        (int)rank, pid, (unsigned)about.st_uid, (unsigned)geteuid());
    if (about.st_size != place->n_bytes)
        return dsc_fail(DSC_EPEER,
                        "the segment of rank %d (process %d) has %" PRId64 " bytes, its address says %" PRId64,
                        (int)rank, pid, (int64_t)about.st_size, place->n_bytes);

    int seals = fcntl(fd, F_GET_SEALS);

    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW))
        return dsc_fail(DSC_EPEER, "the length of the segment of rank %d (process %d) is not sealed", (int)rank, pid);
    if (pread(fd, &header, sizeof header, 0) != (ssize_t)sizeof header)
        return dsc_fail(DSC_EPEER, "the segment of rank %d (process %d) cannot be read", (int)rank, pid);
    return check_header(&header, place, rank, n_ranks);
}

static dsc_status open_file(const struct place *place, int32_t rank, int32_t n_ranks, struct dsc_comm_segment *segment)
{
    char path[64];

    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)place->pid, (int)place->fd);

    /* The descriptor may have been reused for anything, for example a pipe without a writer. */
    int fd = open(path, (segment->writes ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);

    if (fd < 0 && (errno == EACCES || errno == EPERM))
        return dsc_fail(DSC_ENOTSUP,
                        "the memory of rank %d (process %d) may not be opened: %s is another user's, or protected (%s)",
                        (int)rank, (int)place->pid, path, strerror(errno));
    if (fd < 0)
        return dsc_fail(DSC_EPEER, "the segment of rank %d (process %d) is not there: %s: %s", (int)rank,
                        (int)place->pid, path, strerror(errno));

    dsc_status status = check_file(fd, place, rank, n_ranks);

    if (status == DSC_OK)
        status = map_file(segment, fd);
    if (status == DSC_OK && segment->writes)
        segment->fd = fd;
    else
        close(fd);
    return status;
}

static dsc_status open_other(const struct place *place, int32_t rank, int32_t n_ranks, bool writes,
                             struct dsc_comm_segment **out_segment, int *out_pidfd)
{
    /* The process is opened before the file: the file's token then proves that this is the process of the address. */
    int pidfd = (int)syscall(SYS_pidfd_open, place->pid, 0);

    if (pidfd < 0 && errno == ESRCH)
        return dsc_fail(DSC_EPEER, "rank %d (process %d) has ended", (int)rank, (int)place->pid);
    if (pidfd < 0)
        return dsc_fail(DSC_ENOTSUP, "process %d of rank %d cannot be watched: pidfd_open: %s", (int)place->pid,
                        (int)rank, strerror(errno));

    struct dsc_comm_segment *segment = calloc(1, sizeof *segment);
    dsc_status status = DSC_OK;

    if (segment == NULL) {
        status = dsc_fail(DSC_ENOMEM, "no memory for a segment");
        goto close_pidfd;
    }
    segment->n_bytes = place->n_bytes;
    segment->pid = place->pid;
    segment->fd = -1;
    segment->writes = writes;
    atomic_init(&segment->n_users, 1);
    if ((status = open_file(place, rank, n_ranks, segment)) != DSC_OK)
        goto free_segment;
    *out_segment = segment;
    *out_pidfd = pidfd;
    return DSC_OK;

free_segment:
    free(segment);
close_pidfd:
    close(pidfd);
    return status;
}

dsc_status dsc_comm_segment_open(const char *address, int32_t rank, int32_t n_ranks, bool writes,
                                 struct dsc_comm_segment **out_segment, int *out_pidfd)
{
    struct place place;

    DSC_TRY(read_address(address, rank, &place));
    DSC_TRY(check_place(&place, rank));
    if (place.pid != getpid())
        return open_other(&place, rank, n_ranks, writes, out_segment, out_pidfd);

    struct dsc_comm_segment *segment = find_own(place.token);

    if (segment == NULL)
        return dsc_fail(DSC_EPEER, "this process has no segment of rank %d with that token", (int)rank);

    dsc_status status =
        check_header((const struct dsc_comm_header *)(const void *)segment->base, &place, rank, n_ranks);

    if (status != DSC_OK) {
        dsc_comm_segment_drop(segment);
        return status;
    }
    *out_segment = segment;
    *out_pidfd = -1;
    return DSC_OK;
}

void dsc_comm_segment_hold(struct dsc_comm_segment *segment)
{
    atomic_fetch_add_explicit(&segment->n_users, 1, memory_order_relaxed);
}

void dsc_comm_segment_drop(struct dsc_comm_segment *segment)
{
    if (segment == NULL)
        return;
    take_lock(); /* so that nobody finds the segment while it is freed */
    if (atomic_fetch_sub_explicit(&segment->n_users, 1, memory_order_acq_rel) > 1) {
        give_lock();
        return;
    }
    for (struct dsc_comm_segment **at = &own_segments; *at != NULL; at = &(*at)->next)
        if (*at == segment) {
            *at = segment->next;
            break;
        }
    give_lock();
    munmap(segment->base, (size_t)segment->n_bytes);
    if (segment->fd >= 0)
        close(segment->fd);
    free(segment);
}

dsc_status dsc_comm_segment_commit(const struct dsc_comm_segment *segment, int64_t offset, int64_t n_bytes,
                                   const char *what)
{
    int64_t available = dsc_comm_available_bytes("");
    int result;

    if (n_bytes > available)
        return dsc_fail(DSC_ENOMEM, "%s: %" PRId64 " bytes of shared memory are asked for, %" PRId64 " are available",
                        what, n_bytes, available);
    do
        result = fallocate(segment->fd, 0, (off_t)offset, (off_t)n_bytes);
    while (result != 0 && errno == EINTR);
    if (result != 0)
        return dsc_fail(errno == ENOSPC || errno == ENOMEM ? DSC_ENOMEM : DSC_ENOTSUP,
                        "%s: %" PRId64 " bytes of shared memory are refused (%s), %" PRId64 " are available", what,
                        n_bytes, strerror(errno), available);
    return DSC_OK;
}
