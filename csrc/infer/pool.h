/* Calls of the index of prefixes (prefixes.c) on a pool of blocks. */
#ifndef DSC_INFER_POOL_H
#define DSC_INFER_POOL_H

#include "dsc/infer.h"

/*
 * A *kept* block is idle without a table: it counts as free, and is taken when no other block is left, the longest idle
 * one first. `forget` is called before, and must not call the pool.
 */
dsc_status dsc_kv_set_keeper(struct dsc_kv_pool *pool, void (*forget)(void *arg, int32_t block), void *arg);

/* The pool has no keeper from now on: kept blocks are as all others. */
void dsc_kv_clear_keeper(struct dsc_kv_pool *pool);

/* Keeps a block of a table. */
void dsc_kv_keep(struct dsc_kv_pool *pool, int32_t block);

/* DSC_EINVAL for a number that is no sequence of the pool. */
dsc_status dsc_kv_check_live(const struct dsc_kv_pool *pool, int32_t sequence);

/* Full blocks of the sequence, gone ones too. */
int64_t dsc_kv_n_full(const struct dsc_kv_pool *pool, int32_t sequence);

/* Entry i of the sequence's table. */
int32_t dsc_kv_block(const struct dsc_kv_pool *pool, int32_t sequence, int64_t i);

/* Makes room for n more entries in the sequence's table, so that the next dsc_kv_attach cannot fail. */
dsc_status dsc_kv_reserve(struct dsc_kv_pool *pool, int32_t sequence, int64_t n);

/*
 * Puts n full blocks, of other tables or idle, behind a sequence of full blocks alone. Entries at the front of an empty
 * sequence may be DSC_KV_GONE.
 */
void dsc_kv_attach(struct dsc_kv_pool *pool, int32_t sequence, int64_t n, const int32_t *blocks);

#endif
