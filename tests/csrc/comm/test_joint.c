/*
 * Joint memory: writes by one process are visible to all. Writes to a view stay private to one process until the
 * process forgets them. The memory lives as long as any process maps it.
 */
#include "comm/ranks.h"

#include "comm/segment.h"

enum { N_PAGES = 5, PAGE = 4096 };

#define N_BYTES ((int64_t)N_PAGES * PAGE)

static dsc_comm_joint *make_joint(int64_t n_bytes)
{
    dsc_comm_joint *joint = NULL;

    if (!CHECK_STATUS(dsc_comm_joint_create(n_bytes, &joint), DSC_OK))
        exit(test_finish(__FILE__));
    return joint;
}

static unsigned char *data_of(const dsc_comm_joint *joint)
{
    return dsc_comm_joint_data(joint);
}

static unsigned char *view_of(const dsc_comm_joint *joint)
{
    return dsc_comm_joint_view(joint);
}

static int64_t first_write(const dsc_comm_joint *joint)
{
    int64_t at = -2;

    CHECK_STATUS(dsc_comm_joint_find_write(joint, &at), DSC_OK);
    return at;
}

/* Writes to a view are found at their first byte, in any order, and in more pages than one look at the table shows. */
static void test_find_write(void)
{
    enum { N_MANY = 301 };

    dsc_comm_joint *joint = make_joint((int64_t)N_MANY * PAGE);

    TEST_CASE("find_write");
    CHECK_STATUS(dsc_comm_joint_commit(joint, 0, (int64_t)N_MANY * PAGE), DSC_OK);
    CHECK_EQ(first_write(joint), -1); /* no page of the view is there */
    memset(data_of(joint), 3, (size_t)N_MANY * PAGE);
    for (int64_t page = 0; page < N_MANY; page++)
        CHECK_EQ(view_of(joint)[page * PAGE], 3);
    CHECK_EQ(first_write(joint), -1); /* read, and not written */
    for (int64_t page = 0; page < N_MANY; page += 2)
        view_of(joint)[page * PAGE + 5] = 3;
    CHECK_EQ(first_write(joint), -1); /* written with what was there */
    for (int64_t page = N_MANY - 1; page >= 0; page -= 3) {
        view_of(joint)[page * PAGE + page] = 4;
        CHECK_EQ(first_write(joint), page * PAGE + page);
    }
    CHECK_STATUS(dsc_comm_joint_forget(joint), DSC_OK);
    CHECK_EQ(first_write(joint), -1);
    view_of(joint)[(int64_t)N_MANY * PAGE - 1] = 9;
    CHECK_EQ(first_write(joint), (int64_t)N_MANY * PAGE - 1);
    data_of(joint)[(int64_t)N_MANY * PAGE - 1] = 9; /* now there is no difference */
    CHECK_EQ(first_write(joint), -1);
    dsc_comm_joint_destroy(joint);
}

/* In one process, a second opening shows the same memory and has a separate view. */
static void test_views(void)
{
    dsc_comm_joint *made = make_joint(N_BYTES);
    dsc_comm_joint *opened = NULL;

    TEST_CASE("views");
    CHECK(dsc_comm_joint_bytes(made) >= N_BYTES);
    CHECK_STATUS(dsc_comm_joint_commit(made, 0, N_BYTES), DSC_OK);
    CHECK_STATUS(dsc_comm_joint_open(dsc_comm_joint_address(made), &opened), DSC_OK);
    CHECK_STR(dsc_comm_joint_address(opened), "");
    for (int64_t i = 0; i < N_BYTES; i++)
        if (view_of(made)[i] != 0 || data_of(made)[i] != 0)
            CHECK(false);
    memset(data_of(made), 1, (size_t)N_BYTES);
    CHECK_EQ(view_of(made)[N_BYTES - 1], 1);
    CHECK_EQ(view_of(opened)[0], 1);
    CHECK_EQ(data_of(opened)[PAGE], 1);

    /* One handle writes to its view. Other handles write to the same page and to another page. */
    view_of(opened)[PAGE + 7] = 9;
    CHECK_EQ(data_of(made)[PAGE + 7], 1);
    CHECK_EQ(view_of(made)[PAGE + 7], 1);
    memset(data_of(made), 2, (size_t)N_BYTES);
    CHECK_EQ(view_of(opened)[PAGE + 7], 9);
    CHECK_EQ(view_of(opened)[2 * PAGE], 2);
    CHECK_STATUS(dsc_comm_joint_forget(opened), DSC_OK);
    CHECK_EQ(view_of(opened)[PAGE + 7], 2);
    CHECK_EQ(view_of(opened)[PAGE], 2);
    CHECK_STATUS(dsc_comm_joint_forget(opened), DSC_OK); /* nothing was written */
    CHECK_EQ(view_of(opened)[PAGE], 2);

    /* Writes to the last page, and to every page. */
    view_of(opened)[N_BYTES - 1] = 8;
    CHECK_STATUS(dsc_comm_joint_forget(opened), DSC_OK);
    CHECK_EQ(view_of(opened)[N_BYTES - 1], 2);
    memset(view_of(opened), 7, (size_t)N_BYTES);
    CHECK_STATUS(dsc_comm_joint_forget(opened), DSC_OK);
    CHECK_BYTES(view_of(opened), data_of(made), (size_t)N_BYTES);

    /* The maker may destroy its handle first. */
    dsc_comm_joint_destroy(made);
    CHECK_EQ(view_of(opened)[3], 2);
    data_of(opened)[3] = 4;
    CHECK_EQ(view_of(opened)[3], 4);
    dsc_comm_joint_destroy(opened);
    dsc_comm_joint_destroy(NULL);
}

static void test_discard(void)
{
    dsc_comm_joint *joint = make_joint(N_BYTES);

    TEST_CASE("discard");
    memset(data_of(joint), 1, (size_t)N_BYTES);
    /* Only the part's whole pages are discarded: pages shared with neighbouring parts stay. */
    CHECK_STATUS(dsc_comm_joint_discard(joint, 100, 2 * PAGE), DSC_OK);
    CHECK_EQ(data_of(joint)[100], 1);
    CHECK_EQ(data_of(joint)[PAGE], 0);
    CHECK_EQ(data_of(joint)[2 * PAGE - 1], 0);
    CHECK_EQ(data_of(joint)[2 * PAGE], 1);
    CHECK_STATUS(dsc_comm_joint_discard(joint, 2 * PAGE + 1, 17), DSC_OK);
    CHECK_STATUS(dsc_comm_joint_discard(joint, N_BYTES, 0), DSC_OK);
    CHECK_EQ(data_of(joint)[2 * PAGE], 1);
    data_of(joint)[PAGE] = 5;
    CHECK_EQ(view_of(joint)[PAGE], 5);
    dsc_comm_joint_destroy(joint);
}

static void test_bad_input(void)
{
    dsc_comm_joint *joint = make_joint(1);
    dsc_comm_joint *other = NULL;
    int64_t n_bytes = dsc_comm_joint_bytes(joint);

    TEST_CASE("bad input");
    CHECK_ERROR(dsc_comm_joint_create(0, &other), DSC_EINVAL, "n_bytes is 0");
    CHECK_ERROR(dsc_comm_joint_create(-1, &other), DSC_EINVAL, "n_bytes is -1");
    CHECK_ERROR(dsc_comm_joint_create(((int64_t)1 << 46) + 1, &other), DSC_EINVAL, "at most");
    CHECK_ERROR(dsc_comm_joint_open(NULL, &other), DSC_EINVAL, "NULL");
    CHECK_ERROR(dsc_comm_joint_open("", &other), DSC_EINVAL, "no address");
    CHECK_ERROR(dsc_comm_joint_commit(joint, -1, 1), DSC_EINVAL, "from -1 on");
    CHECK_ERROR(dsc_comm_joint_commit(joint, 1, n_bytes), DSC_EINVAL, "from 1 on");
    CHECK_ERROR(dsc_comm_joint_commit(joint, n_bytes + 1, 0), DSC_EINVAL, "joint memory has");
    CHECK_ERROR(dsc_comm_joint_discard(joint, 0, -1), DSC_EINVAL, "-1 bytes");
    CHECK_STATUS(dsc_comm_joint_commit(joint, n_bytes, 0), DSC_OK);
    CHECK(other == NULL);
    dsc_comm_joint_destroy(joint);

    /* The segment of an end is no joint memory. */
    struct dsc_comm_config config = config_of(1, 2);
    dsc_comm *comm = NULL;

    CHECK_STATUS(dsc_comm_create(&config, &comm), DSC_OK);
    CHECK_ERROR(dsc_comm_joint_open(dsc_comm_address(comm), &other), DSC_EPEER, "rank 1 of 2");
    dsc_comm_destroy(comm);

    /* A request for more memory than available is refused with both numbers. */
    joint = make_joint((int64_t)1 << 45);
    CHECK_ERROR(dsc_comm_joint_commit(joint, 0, (int64_t)1 << 45), DSC_ENOMEM, "35184372088832 bytes");
    dsc_comm_joint_destroy(joint);
}

/*
 * Ranks are processes: each writes its slice, which spans pages, and reads all slices, with barriers in between. Then
 * each writes into its view and forgets.
 */
static int write_and_read(struct meeting *meeting, int32_t rank, int32_t n_ranks, void *arg)
{
    enum { SLICE = 3001, ROUNDS = 20 };
    dsc_comm *comm = meet(meeting, rank, n_ranks, (int64_t)120 * 1000000000);
    dsc_comm_joint *joint = NULL;

    (void)arg;
    if (rank == 0) {
        if (dsc_comm_joint_create((int64_t)n_ranks * SLICE, &joint) != DSC_OK)
            return 1;
        strcpy(meeting->addresses[0], dsc_comm_joint_address(joint));
    }
    if (barrier(comm) != DSC_OK || (rank > 0 && dsc_comm_joint_open(meeting->addresses[0], &joint) != DSC_OK))
        return 2;
    if (dsc_comm_joint_commit(joint, (int64_t)rank * SLICE, SLICE) != DSC_OK)
        return 3;
    for (int round = 0; round < ROUNDS; round++) {
        if (barrier(comm) != DSC_OK)
            return 4;
        memset(data_of(joint) + (ptrdiff_t)rank * SLICE, round * 8 + rank, SLICE);
        if (barrier(comm) != DSC_OK || dsc_comm_joint_forget(joint) != DSC_OK)
            return 5;
        for (int32_t i = 0; i < n_ranks * SLICE; i++)
            if (view_of(joint)[i] != round * 8 + i / SLICE)
                return 6;
        /* In some rounds this rank edits the next rank's slice in its view. */
        if (round % 3 == rank)
            memset(view_of(joint) + (ptrdiff_t)((rank + 1) % n_ranks) * SLICE, 255, SLICE);
    }
    /* The memory outlives the process that made it. */
    if (barrier(comm) != DSC_OK)
        return 7;
    if (rank == 0)
        _exit(0);
    for (int32_t i = 0; i < SLICE; i++)
        if (data_of(joint)[i] != (ROUNDS - 1) * 8)
            return 8;
    dsc_comm_joint_destroy(joint);
    dsc_comm_destroy(comm);
    return 0;
}

static void test_processes(void)
{
    enum { N = 3 };
    struct meeting *meeting = new_meeting();
    pid_t pids[N];

    TEST_CASE("processes");
    for (int32_t rank = 0; rank < N; rank++)
        pids[rank] = fork_rank(write_and_read, meeting, rank, N, NULL);
    for (int32_t rank = 0; rank < N; rank++)
        CHECK_EQ(ending_of(pids[rank]), 0);
    munmap(meeting, sizeof *meeting);
}

/* A child of fork() may read, and its writes to a view stay private to the child. */
static void test_fork(void)
{
    dsc_comm_joint *joint = make_joint(N_BYTES);

    TEST_CASE("fork");
    memset(data_of(joint), 3, (size_t)N_BYTES);

    pid_t pid = fork();

    if (pid == 0) {
        int64_t at = 0;
        bool is_right = view_of(joint)[5] == 3 && dsc_comm_joint_forget(joint) == DSC_ESTATE &&
                        dsc_comm_joint_find_write(joint, &at) == DSC_ESTATE &&
                        dsc_comm_joint_commit(joint, 0, 1) == DSC_ESTATE;

        view_of(joint)[5] = 9;
        dsc_comm_joint_destroy(joint);
        _exit(is_right && view_of(joint)[5] == 9 ? 0 : 1);
    }
    CHECK_EQ(ending_of(pid), 0);
    CHECK_EQ(view_of(joint)[5], 3);
    CHECK_EQ(data_of(joint)[5], 3);
    dsc_comm_joint_destroy(joint);
}

int main(void)
{
    test_fork();
    test_processes();
    test_views();
    test_find_write();
    test_discard();
    test_bad_input();
    return test_finish(__FILE__);
}
