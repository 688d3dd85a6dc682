/* Cuts a list of arrays into fixed chunks, and runs them through the caller's parallel-for. */
#include "base/par.h"

#include "base/fail.h"

int64_t dsc_list_count(const struct dsc_list *list, int64_t array)
{
    return *(const int64_t *)(const void *)(list->counts + (size_t)array * list->stride_bytes);
}

dsc_status dsc_list_init(struct dsc_list *list, const int64_t *counts, size_t stride_bytes, int64_t n_arrays)
{
    int64_t n_elems = 0;

    list->counts = (const char *)counts;
    list->stride_bytes = stride_bytes;
    list->n_arrays = n_arrays;
    list->mark_arrays = n_arrays / DSC_LIST_MARKS + 1;
    for (int64_t i = 0; i < n_arrays; i++) {
        if (i % list->mark_arrays == 0)
            list->mark_elems[i / list->mark_arrays] = n_elems;
        if (__builtin_add_overflow(n_elems, dsc_list_count(list, i), &n_elems))
            return dsc_fail(DSC_EOVERFLOW, "the first %lld arrays hold more elements than int64_t counts",
                            (long long)(i + 1));
    }
    list->n_elems = n_elems;
    list->chunk_elems = DSC_MIN_CHUNK_ELEMS;
    if (n_elems / DSC_MAX_CHUNKS >= DSC_MIN_CHUNK_ELEMS) /* an even share, rounded up to whole blocks */
        list->chunk_elems = (n_elems / DSC_MAX_CHUNKS / DSC_BLOCK_ELEMS + 1) * DSC_BLOCK_ELEMS;
    list->n_chunks = n_elems / list->chunk_elems + (n_elems % list->chunk_elems != 0);
    return DSC_OK;
}

struct dsc_cursor dsc_list_chunk(const struct dsc_list *list, int64_t chunk)
{
    int64_t begin = chunk * list->chunk_elems;
    int64_t n_left = list->n_elems - begin;
    int64_t low = 0;
    int64_t high = (list->n_arrays - 1) / list->mark_arrays;

    while (low < high) { /* finds the last mark at or before begin */
        int64_t middle = (low + high + 1) / 2;

        if (list->mark_elems[middle] <= begin)
            low = middle;
        else
            high = middle - 1;
    }

    int64_t array = low * list->mark_arrays;
    int64_t offset = begin - list->mark_elems[low];

    while (offset >= dsc_list_count(list, array)) /* begin < n_elems, so some array holds it */
        offset -= dsc_list_count(list, array++);
    return (struct dsc_cursor){
        .list = list,
        .array = array,
        .begin = offset,
        .n_left = n_left < list->chunk_elems ? n_left : list->chunk_elems,
    };
}

bool dsc_cursor_next(struct dsc_cursor *cursor, struct dsc_piece *out_piece)
{
    if (cursor->n_left == 0)
        return false;
    while (cursor->begin >= dsc_list_count(cursor->list, cursor->array)) {
        cursor->array++;
        cursor->begin = 0;
    }

    int64_t n_elems = dsc_list_count(cursor->list, cursor->array) - cursor->begin;

    if (n_elems > cursor->n_left)
        n_elems = cursor->n_left;
    *out_piece = (struct dsc_piece){.array = cursor->array, .begin = cursor->begin, .n_elems = n_elems};
    cursor->begin += n_elems;
    cursor->n_left -= n_elems;
    return true;
}

void dsc_par_run(const struct dsc_par *par, int64_t n_chunks, dsc_par_body body, void *arg)
{
    if (n_chunks <= 0)
        return;
    if (par == NULL || n_chunks == 1)
        body(arg, 0, n_chunks);
    else
        par->run(par->ctx, n_chunks, body, arg);
}
