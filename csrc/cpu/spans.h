/* Checks lists of spans, and walks their elements block by block. */
#ifndef DSC_CPU_SPANS_H
#define DSC_CPU_SPANS_H

#include "base/par.h"
#include "dsc/flat.h"

/* Check a span, or each of n_spans; errors name it as list[i]. */
dsc_status dsc_check_span(const struct dsc_span *span, const char *list, int64_t i);
dsc_status dsc_check_spans(const struct dsc_span *spans, int64_t n_spans, const char *list);

/* dsc_list_init over the elements of the spans. */
dsc_status dsc_list_of_spans(struct dsc_list *list, const struct dsc_span *spans, int64_t n_spans);

static inline int64_t dsc_block_of(int64_t n_left)
{
    return n_left < DSC_BLOCK_ELEMS ? n_left : DSC_BLOCK_ELEMS;
}

#define CACHE_LINE 64
/*
 * Blocks between the block that is read and the block that is prefetched. One array alone is read as fast as its lines
 * are asked for, and a processor's own prefetching stops at each page.
 */
#define BLOCKS_AHEAD 2

/* Prefetches the block that begins BLOCKS_AHEAD blocks behind data, if so much is left. */
static inline void dsc_prefetch_ahead(const char *data, size_t block_bytes, size_t bytes_left)
{
    const char *block = data + BLOCKS_AHEAD * block_bytes;

    if (bytes_left < (BLOCKS_AHEAD + 1) * block_bytes)
        return;
    for (size_t i = 0; i < block_bytes; i += CACHE_LINE)
        __builtin_prefetch(block + i);
}

#endif
