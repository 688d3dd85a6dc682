/*
 * Segments and their arena: every false statement in an address is refused with a message that names the fault. Each
 * block has its own pages and returns them to the system. A request for more memory than available fails with both
 * numbers.
 */
#include "comm/ranks.h"

#include "comm/segment.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* Replaces one part of an address between colons. With NULL the address ends before that part. */
static void replace_part(const char *address, int32_t part, const char *by, char *changed)
{
    char copy[DSC_COMM_ADDRESS_BYTES];
    char *rest = copy;
    int32_t i = 0;

    snprintf(copy, sizeof copy, "%s", address);
    changed[0] = '\0';
    for (char *word; (word = strsep(&rest, ":")) != NULL; i++) {
        if (i > 0)
            strcat(changed, ":");
        strcat(changed, i == part ? by : word);
    }
}

enum { VERSION, HOST, NAMESPACE, PID, FD, BYTES, TOKEN };

struct end {
    dsc_comm *comm;
    const char *addresses[2];
};

static struct end open_end(int32_t rank, int32_t n_ranks)
{
    struct dsc_comm_config config = config_of(rank, n_ranks);
    struct end end = {0};

    if (!CHECK_STATUS(dsc_comm_create(&config, &end.comm), DSC_OK))
        exit(test_finish(__FILE__));
    return end;
}

static void test_addresses(void)
{
    struct end own = open_end(0, 2);
    struct end other = open_end(1, 2);
    const char *address = dsc_comm_address(other.comm);
    char changed[2 * DSC_COMM_ADDRESS_BYTES];
    const struct {
        int32_t part;
        const char *by;
        dsc_status status;
        const char *word;
    } CASES[] = {
        {VERSION, "dsc2", DSC_ENOTSUP, "version 2"},
        {VERSION, "other", DSC_EINVAL, "no address"},
        {HOST, "0123456789abcdef", DSC_ENOTSUP, "rank 1 runs on another host"},
        {NAMESPACE, "12345", DSC_ENOTSUP, "rank 1 runs in another PID namespace (12345"},
        {NAMESPACE, "", DSC_EINVAL, "no address"},
        {PID, "0", DSC_EINVAL, "no address"},
        {PID, "999999999", DSC_EPEER, "999999999"},
        {FD, "-1", DSC_EINVAL, "no address"},
        {BYTES, "12", DSC_EINVAL, "no address"},
        {BYTES, "99999999999999999999", DSC_EINVAL, "no address"},
        {TOKEN, "00000000000000000000000000000000", DSC_EPEER, "token"},
        {TOKEN, "0000", DSC_EINVAL, "no address"},
        {TOKEN, "00000000000000000000000000000000:", DSC_EINVAL, "no address"},
        {TOKEN, "0000000000000000000000000000000g", DSC_EINVAL, "no address"},
    };

    own.addresses[0] = dsc_comm_address(own.comm);
    own.addresses[1] = changed;
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        replace_part(address, CASES[i].part, CASES[i].by, changed);
        TEST_CASE("address %zu: %.200s", i, changed);
        CHECK_ERROR(dsc_comm_attach(own.comm, own.addresses), CASES[i].status, CASES[i].word);
    }
    TEST_CASE("addresses");
    own.addresses[1] = NULL;
    CHECK_ERROR(dsc_comm_attach(own.comm, own.addresses), DSC_EINVAL, "rank 1 is NULL");
    own.addresses[1] = own.addresses[0];
    CHECK_ERROR(dsc_comm_attach(own.comm, own.addresses), DSC_EPEER, "rank 0 of 2, not of rank 1 of 2");
    CHECK_ERROR(barrier(own.comm), DSC_ESTATE, "not attached");
    own.addresses[1] = address;
    CHECK_STATUS(dsc_comm_attach(own.comm, own.addresses), DSC_OK); /* a failed attach may be retried */
    CHECK_ERROR(dsc_comm_attach(own.comm, own.addresses), DSC_ESTATE, "already");
    dsc_comm_destroy(own.comm);
    dsc_comm_destroy(other.comm);
}

/* A segment shown by another process under an address: `spoil` damages it, then this rank attaches. */
struct spoiled {
    const char *name;
    void (*spoil)(struct dsc_comm_header *header, char *address);
    dsc_status status;
    const char *word;
};

static void spoil_nothing(struct dsc_comm_header *header, char *address)
{
    (void)header;
    (void)address;
}

static void spoil_magic(struct dsc_comm_header *header, char *address)
{
    (void)address;
    header->magic++;
}

static void spoil_version(struct dsc_comm_header *header, char *address)
{
    (void)address;
    header->version = 7;
}

static void spoil_layout(struct dsc_comm_header *header, char *address)
{
    (void)address;
    header->layout++;
}

static void spoil_token(struct dsc_comm_header *header, char *address)
{
    (void)address;
    header->token[3]++;
}

static void spoil_rank(struct dsc_comm_header *header, char *address)
{
    (void)address;
    header->n_ranks = 3;
}

static void spoil_length(struct dsc_comm_header *header, char *address)
{
    (void)address;
    header->n_bytes--;
}

/* Makes the address name another file descriptor of the process and leaves its other parts. */
static void show_fd(char *address, int fd)
{
    char copy[2 * DSC_COMM_ADDRESS_BYTES];
    char number[16];

    snprintf(number, sizeof number, "%d", fd);
    replace_part(address, FD, number, copy);
    strcpy(address, copy);
}

/*
 * Shows the same bytes in a file that is not sealed against shrinking. A read past the end of a shrunk file would kill
 * the reader.
 */
static void show_unsealed(struct dsc_comm_header *header, char *address)
{
    int fd = memfd_create("x", MFD_ALLOW_SEALING);

    if (fd < 0 || ftruncate(fd, header->n_bytes) != 0 || pwrite(fd, header, sizeof *header, 0) < 0)
        _exit(3);
    show_fd(address, fd);
}

static void show_short(struct dsc_comm_header *header, char *address)
{
    int fd = memfd_create("x", MFD_ALLOW_SEALING);

    if (fd < 0 || ftruncate(fd, 4096) != 0 || pwrite(fd, header, sizeof *header, 0) < 0)
        _exit(3);
    show_fd(address, fd);
}

static void show_pipe(struct dsc_comm_header *header, char *address)
{
    int fds[2];

    (void)header;
    if (pipe(fds) != 0)
        _exit(3);
    show_fd(address, fds[0]);
}

static void show_closed(struct dsc_comm_header *header, char *address)
{
    (void)header;
    show_fd(address, 1000);
}

static const struct spoiled SPOILED[] = {
    {"nothing", spoil_nothing, DSC_OK, ""},
    {"magic", spoil_magic, DSC_EPEER, "is no segment"},
    {"version", spoil_version, DSC_ENOTSUP, "version 7"},
    {"layout", spoil_layout, DSC_ENOTSUP, "layout"},
    {"token", spoil_token, DSC_EPEER, "another token"},
    {"rank", spoil_rank, DSC_EPEER, "rank 1 of 3, not of rank 1 of 2"},
    {"length", spoil_length, DSC_EPEER, "its address says"},
    {"unsealed", show_unsealed, DSC_EPEER, "not sealed"},
    {"short", show_short, DSC_EPEER, "4096"},
    {"pipe", show_pipe, DSC_EPEER, "no memory"},
    {"closed", show_closed, DSC_EPEER, "not there"},
};

static void *mapping_of(const dsc_comm *comm)
{
    char line[512];
    FILE *file = fopen("/proc/self/maps", "re");
    void *base = NULL;

    (void)comm;
    while (file != NULL && base == NULL && fgets(line, sizeof line, file) != NULL)
        if (strstr(line, "memfd:deepspeed_c") != NULL)
            base = (void *)(uintptr_t)strtoull(line, NULL, 16);
    if (file != NULL)
        fclose(file);
    return base;
}

static int show(struct meeting *meeting, int32_t rank, int32_t n_ranks, void *arg)
{
    const struct spoiled *spoiled = arg;
    struct dsc_comm_config config = config_of(rank, n_ranks);
    dsc_comm *comm = NULL;

    if (dsc_comm_create(&config, &comm) != DSC_OK)
        return 1;
    strcpy(meeting->addresses[rank], dsc_comm_address(comm));
    spoiled->spoil(mapping_of(comm), meeting->addresses[rank]);
    meeting->n_there = 1;
    while (meeting->n_there == 1)
        usleep(500);
    return 0;
}

static void test_spoiled(void)
{
    for (size_t i = 0; i < sizeof SPOILED / sizeof *SPOILED; i++) {
        struct meeting *meeting = new_meeting();
        pid_t pid = fork_rank(show, meeting, 1, 2, (void *)(uintptr_t)&SPOILED[i]);
        struct end own = open_end(0, 2);

        TEST_CASE("spoiled %s", SPOILED[i].name);
        while (meeting->n_there == 0)
            usleep(500);
        own.addresses[0] = dsc_comm_address(own.comm);
        own.addresses[1] = meeting->addresses[1];
        CHECK_ERROR(dsc_comm_attach(own.comm, own.addresses), SPOILED[i].status, SPOILED[i].word);
        meeting->n_there = 2;
        CHECK_EQ(ending_of(pid), 0);
        dsc_comm_destroy(own.comm);
        munmap(meeting, sizeof *meeting);
    }
}

/* A process cannot attach to a segment of another user: a child that runs as user nobody tries. */
static void test_other_user(void)
{
    struct end other = open_end(1, 2);

    TEST_CASE("another user");
    if (geteuid() != 0) {
        dsc_comm_destroy(other.comm);
        return; /* only root can become another user */
    }

    pid_t pid = fork();

    if (pid == 0) {
        struct dsc_comm_config config = config_of(0, 2);
        dsc_comm *own = NULL;
        const char *addresses[2] = {NULL, dsc_comm_address(other.comm)};

        if (setresgid(65534, 65534, 65534) != 0 || setresuid(65534, 65534, 65534) != 0 || dsc_comm_create(&config, &own) != DSC_OK)
            _exit(1);
        addresses[0] = dsc_comm_address(own);
        if (dsc_comm_attach(own, addresses) != DSC_ENOTSUP || strstr(dsc_last_error(), "rank 1") == NULL || strstr(dsc_last_error(), "user") == NULL) {
            fprintf(stderr, "%s\n", dsc_last_error());
            _exit(2);
        }
        _exit(0);
    }
    CHECK_EQ(ending_of(pid), 0);
    dsc_comm_destroy(other.comm);
}

/* The number of 512-byte blocks that the segments of this process use. */
static int64_t blocks_in_use(void)
{
    int64_t n = 0;

    for (int fd = 0; fd < 64; fd++) {
        char path[64];
        char name[128];
        struct stat about;

        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(path, name, sizeof name - 1);
        if (length < 0)
            continue;
        name[length] = '\0';
        if (strstr(name, "memfd:deepspeed_c") != NULL && fstat(fd, &about) == 0)
            n += about.st_blocks;
    }
    return n;
}

static void test_blocks(void)
{
    enum { N_BLOCKS = 40 };

    struct end end = open_end(0, 1);
    dsc_comm_block *blocks[N_BLOCKS] = {0};
    int64_t sizes[N_BLOCKS];
    int64_t n_before = blocks_in_use();
    uint64_t random = 11;
    int64_t page = sysconf(_SC_PAGESIZE);

    for (int32_t i = 0; i < 2000; i++) {
        int64_t k = test_below(&random, N_BLOCKS);

        TEST_CASE("blocks, step %d", (int)i);
        if (blocks[k] != NULL) {
            const unsigned char *data = dsc_comm_block_data(blocks[k]);

            CHECK(sizes[k] == 0 || (data[0] == (unsigned char)k && data[sizes[k] - 1] == (unsigned char)k));
            dsc_comm_block_destroy(blocks[k]);
            blocks[k] = NULL;
            continue;
        }
        sizes[k] = test_below(&random, 100000);
        CHECK_STATUS(dsc_comm_block_create(end.comm, sizes[k], &blocks[k]), DSC_OK);

        unsigned char *data = dsc_comm_block_data(blocks[k]);

        CHECK_EQ((uintptr_t)data % (uintptr_t)page, 0);
        CHECK(sizes[k] == 0 || (data[0] == 0 && data[sizes[k] - 1] == 0));
        memset(data, (int)k, (size_t)sizes[k]);
        CHECK(dsc_comm_owns(end.comm, data, sizes[k]));
    }
    for (int32_t k = 0; k < N_BLOCKS; k++)
        dsc_comm_block_destroy(blocks[k]);
    TEST_CASE("blocks");
    CHECK_EQ(blocks_in_use(), n_before);
    CHECK(!dsc_comm_owns(end.comm, &random, sizeof random));
    CHECK_ERROR(dsc_comm_block_create(end.comm, ARENA_BYTES + 1, &blocks[0]), DSC_ENOSPC, "268435457 bytes are asked for, the arena has 268435456");
    CHECK_ERROR(dsc_comm_block_create(end.comm, -1, &blocks[0]), DSC_EINVAL, "-1");
    CHECK_STATUS(dsc_comm_block_create(end.comm, page, &blocks[0]), DSC_OK);
    CHECK_ERROR(dsc_comm_block_create(end.comm, ARENA_BYTES, &blocks[1]), DSC_ENOSPC, "no gap");
    CHECK(dsc_comm_owns(end.comm, dsc_comm_block_data(blocks[0]), ARENA_BYTES));
    CHECK(!dsc_comm_owns(end.comm, dsc_comm_block_data(blocks[0]), ARENA_BYTES + 1));
    CHECK(!dsc_comm_owns(end.comm, dsc_comm_block_data(blocks[0]), -1));
    CHECK(!dsc_comm_owns(end.comm, (char *)dsc_comm_block_data(blocks[0]) - 1, 1));
    CHECK(!dsc_comm_owns(end.comm, (char *)dsc_comm_block_data(blocks[0]) + ARENA_BYTES, 0));
    CHECK_STATUS(dsc_comm_close(end.comm), DSC_OK);
    CHECK(!dsc_comm_owns(end.comm, dsc_comm_block_data(blocks[0]), 1));
    CHECK_ERROR(dsc_comm_block_create(end.comm, 1, &blocks[1]), DSC_ESTATE, "closed");
    dsc_comm_block_destroy(blocks[0]);
    dsc_comm_destroy(end.comm);
}

/* Counts the mappings of segments in this process, and how many of these are left out of core dumps. */
static void count_mappings(int32_t *out_n, int32_t *out_n_left_out)
{
    FILE *file = fopen("/proc/self/smaps", "re");
    bool is_segment = false;
    char line[512];

    *out_n = *out_n_left_out = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strstr(line, "/memfd:deepspeed_c") != NULL) {
            is_segment = true;
            ++*out_n;
        } else if (is_segment && strncmp(line, "VmFlags:", 8) == 0) {
            *out_n_left_out += strstr(line, " dd") != NULL;
            is_segment = false;
        }
    }
    if (file != NULL)
        fclose(file);
}

static void test_core_dumps(void)
{
    struct end end = open_end(0, 1);
    int32_t n = 0;
    int32_t n_left_out = 0;

    count_mappings(&n, &n_left_out);
    CHECK_EQ(n_left_out, n);
    CHECK(n > 0);
    dsc_comm_destroy(end.comm);
}

static void test_refused_memory(void)
{
    struct dsc_comm_config config = config_of(0, 1);
    struct rlimit before;
    dsc_comm *comm = NULL;
    dsc_comm_block *block = NULL;

    TEST_CASE("refused memory");
    config.arena_bytes = 0;
    CHECK_STATUS(dsc_comm_create(&config, &comm), DSC_OK);
    /* One and a half times the machine's memory. */
    CHECK_ERROR(dsc_comm_block_create(comm, (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE) * 3 / 2, &block), DSC_ENOMEM, "are available");
    CHECK(block == NULL);
    dsc_comm_destroy(comm);
    comm = NULL;
    if (getrlimit(RLIMIT_FSIZE, &before) != 0)
        exit(1);

    struct rlimit limit = {.rlim_cur = 1 << 20, .rlim_max = before.rlim_max};

    if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
        exit(1);
    CHECK_ERROR(dsc_comm_create(&config, &comm), DSC_ENOSPC, "1048576 (ulimit -f)");
    if (setrlimit(RLIMIT_FSIZE, &before) != 0)
        exit(1);
    CHECK(comm == NULL);
}

static void test_configs(void)
{
    const struct {
        struct dsc_comm_config config;
        const char *word;
    } CASES[] = {
        {{.size = 3}, "size is 3"},
        {{.size = sizeof(struct dsc_comm_config), .n_ranks = 17, .timeout_ns = 1}, "n_ranks is 17"},
        {{.size = sizeof(struct dsc_comm_config), .n_ranks = 0, .timeout_ns = 1}, "n_ranks is 0"},
        {{.size = sizeof(struct dsc_comm_config), .n_ranks = 2, .rank = 2, .timeout_ns = 1}, "rank is 2"},
        {{.size = sizeof(struct dsc_comm_config), .n_ranks = 2}, "timeout_ns is 0"},
        {{.size = sizeof(struct dsc_comm_config), .n_ranks = 2, .timeout_ns = 1, .arena_bytes = -1}, "arena_bytes is -1"},
        {{.size = sizeof(struct dsc_comm_config), .n_ranks = 2, .timeout_ns = 1, .arena_bytes = INT64_MAX}, "arena_bytes is 9223372036854775807"},
    };
    dsc_comm *comm = NULL;
    struct dsc_comm_count count;

    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        TEST_CASE("config %zu", i);
        CHECK_ERROR(dsc_comm_create(&CASES[i].config, &comm), DSC_EINVAL, CASES[i].word);
        CHECK(comm == NULL);
    }
    dsc_comm_destroy(NULL);
    dsc_comm_block_destroy(NULL);
    CHECK_STATUS(dsc_comm_release(NULL), DSC_OK);

    struct end end = open_end(0, 1);

    CHECK_ERROR(dsc_comm_count_of(end.comm, DSC_COMM_N_OPS, &count), DSC_EINVAL, "op is");
    dsc_comm_destroy(end.comm);
}

int main(void)
{
    alarm(LIMIT_SECONDS);
    test_addresses();
    test_spoiled();
    test_other_user();
    test_blocks();
    test_core_dumps();
    test_refused_memory();
    test_configs();
    return test_finish(__FILE__);
}
