/* base/status.c and base/dtype.c: names, texts, and a last error for each thread. */
#include "test.h"

#include "base/fail.h"

#include <pthread.h>

static void *other_thread(void *arg)
{
    char *texts = arg; /* the checks are made after the thread has ended: they count in globals */

    snprintf(texts, 32, "%s", dsc_last_error());
    dsc_fail(DSC_EINVAL, "other %d", 1);
    snprintf(texts + 32, 32, "%s", dsc_last_error());
    return NULL;
}

int main(void)
{
    pthread_t thread;
    char texts[64];
    char text[2000];

    CHECK_STR(dsc_status_name(DSC_OK), "DSC_OK");
    CHECK_STR(dsc_status_name(DSC_EAGAIN), "DSC_EAGAIN");
    CHECK_STR(dsc_status_name((dsc_status)999), "DSC_UNKNOWN");
    CHECK_STR(dsc_status_text(DSC_ENOMEM), "out of memory");
    CHECK(dsc_status_text((dsc_status)-1) != NULL);

    CHECK_EQ(dsc_dtype_bytes(DSC_DTYPE_F32), 4);
    CHECK_EQ(dsc_dtype_bytes(DSC_DTYPE_BF16), 2);
    CHECK_EQ(dsc_dtype_bytes(DSC_DTYPE_F16), 2);
    CHECK_EQ(dsc_dtype_bytes(DSC_DTYPE_COUNT), 0);
    CHECK_EQ(dsc_dtype_bytes((dsc_dtype)77), 0);

    CHECK_STR(dsc_last_error(), "");
    CHECK_EQ(dsc_fail(DSC_ENOTSUP, "%s is %d", "x", 3), DSC_ENOTSUP);
    CHECK_STR(dsc_last_error(), "x is 3");
    CHECK_EQ(pthread_create(&thread, NULL, other_thread, texts), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_STR(texts, "");
    CHECK_STR(texts + 32, "other 1");
    CHECK_STR(dsc_last_error(), "x is 3");

    /* A text longer than the buffer is cut and terminated. */
    memset(text, 'a', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    dsc_fail(DSC_EINVAL, "%s", text);
    CHECK_EQ(strlen(dsc_last_error()), 511);
    return test_finish(__FILE__);
}
