/* Shared by the calls on the contents of blocks: checks, and tiles of keys and values in f32. */
#ifndef DSC_INFER_CONTENTS_H
#define DSC_INFER_CONTENTS_H

#include "dsc/infer.h"
#include "nn/rows.h"

/* Names the first bad field, or the first row whose n_keys its table has no room for. */
dsc_status dsc_kv_check(const struct dsc_kv_shape *shape, const struct dsc_kv_rows *rows);

/* The number of new tokens of all rows before this one. */
int64_t dsc_kv_first_token(const struct dsc_kv_rows *rows, int64_t row);

/*
 * n (a multiple of DSC_KV_TOKENS) keys of a head from token `key` (likewise) on as [head_dim, n], and their values as
 * [n, v_cols], padded with zeros. Values of tokens that are gone, or behind the row's last one, are zeros; such keys
 * may be anything.
 */
void dsc_kv_load(const struct dsc_rows *rows, const struct dsc_kv_attention *call, int64_t row, int64_t kv_head,
                 int64_t key, int64_t n, dsc_f32 *keys, dsc_f32 *values, int64_t v_cols);

#endif
