/* aio/file.c: results of opening, closing and syncing, and file systems without O_DIRECT. */
#include "aio/folder.h"

static void test_flags(void)
{
    dsc_aio_file *file = NULL;

    CHECK_ERROR(dsc_aio_open(NULL, DSC_AIO_READ, false, &file), DSC_EINVAL, "path");
    CHECK_ERROR(dsc_aio_open(path, DSC_AIO_READ, false, NULL), DSC_EINVAL, "out_file");
    CHECK_ERROR(dsc_aio_open(path, 0, false, &file), DSC_EINVAL, "flags are 0");
    CHECK_ERROR(dsc_aio_open(path, DSC_AIO_CREATE, false, &file), DSC_EINVAL, "flags are 4");
    CHECK_ERROR(dsc_aio_open(path, 1 | 64, false, &file), DSC_EINVAL, "flags are 65");
    CHECK_ERROR(dsc_aio_open(path, DSC_AIO_WRITE | DSC_AIO_EXCLUSIVE, false, &file), DSC_EINVAL, "DSC_AIO_CREATE");
    CHECK_ERROR(dsc_aio_open(path, DSC_AIO_READ | DSC_AIO_TRUNCATE, false, &file), DSC_EINVAL, "DSC_AIO_WRITE");
    CHECK(file == NULL);
    CHECK_STATUS(dsc_aio_close(NULL), DSC_OK);
    CHECK_ERROR(dsc_aio_sync(NULL), DSC_EINVAL, "file");
}

static void test_errors(void)
{
    struct dsc_aio_failure failure;
    dsc_aio_file *file = NULL;
    int64_t n_fds = folder_count_fds();

    CHECK_ERROR(dsc_aio_open(path, DSC_AIO_READ, true, &file), DSC_EIO, "No such file");
    CHECK(strstr(dsc_last_error(), path) != NULL);
    dsc_aio_last_failure(&failure);
    CHECK_STR(failure.path, path);
    CHECK_STR(failure.verb, "open");
    CHECK_EQ(failure.err, ENOENT);
    CHECK_EQ(failure.offset, -1);
    CHECK_ERROR(dsc_aio_open(folder, DSC_AIO_WRITE, true, &file), DSC_EIO, "Is a directory");
    CHECK_STATUS(dsc_aio_open(path, DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_EXCLUSIVE, true, &file), DSC_OK);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    CHECK_ERROR(dsc_aio_open(path, DSC_AIO_WRITE | DSC_AIO_CREATE | DSC_AIO_EXCLUSIVE, true, &file), DSC_EIO, "File exists");
    unlink(path);
    CHECK_EQ(mkfifo(path, 0600), 0);
    CHECK_ERROR(dsc_aio_open(path, DSC_AIO_READ | DSC_AIO_WRITE, true, &file), DSC_EIO, "Illegal seek");
    unlink(path);
    CHECK_EQ(folder_count_fds(), n_fds);
}

static void test_truncate_and_size(void)
{
    dsc_aio_file *file;
    int64_t n_bytes = -1;

    folder_write("abcdefg", 7);
    file = folder_open(DSC_AIO_READ | DSC_AIO_WRITE | DSC_AIO_CREATE, true); /* create keeps existing data */
    CHECK_STATUS(dsc_aio_file_bytes(file, &n_bytes), DSC_OK);
    CHECK_EQ(n_bytes, 7);
    CHECK_STATUS(dsc_aio_sync(file), DSC_OK);
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
    file = folder_open(DSC_AIO_WRITE | DSC_AIO_TRUNCATE, false);
    CHECK_STATUS(dsc_aio_file_bytes(file, &n_bytes), DSC_OK);
    CHECK_EQ(n_bytes, 0);
    CHECK(!dsc_aio_file_is_direct(file));
    CHECK_STR(dsc_aio_file_note(file), ""); /* was not asked for */
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
}

/* A device file that does not support O_DIRECT is opened without it, and the file has a note. */
static void test_refusal(void)
{
    dsc_aio_file *file = NULL;

    CHECK_STATUS(dsc_aio_open("/dev/zero", DSC_AIO_READ, true, &file), DSC_OK);
    CHECK(dsc_aio_file_is_direct(file) == (dsc_aio_file_note(file)[0] == '\0'));
    CHECK(!dsc_aio_file_is_direct(file));
    CHECK_STATUS(dsc_aio_close(file), DSC_OK);
}

static void test_alignment(void)
{
    size_t alignment = dsc_aio_alignment();

    CHECK(alignment >= 4096 && (alignment & (alignment - 1)) == 0);
}

int main(void)
{
    folder_make();
    test_flags();
    test_errors();
    test_truncate_and_size();
    test_refusal();
    test_alignment();
    folder_remove();
    return test_finish(__FILE__);
}
