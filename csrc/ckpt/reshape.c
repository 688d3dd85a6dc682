/* The map from a tensor's saved pieces to any wanted part of it. */
#include "dsc/ckpt.h"

#include "base/fail.h"
#include "ckpt/part.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/*
 * The elements common to a piece and the wanted part, in row-major order: n_rows rows of row_elems elements, each
 * contiguous on both sides and as long as that allows. A row's position grows with its number on both sides, so the
 * rows within both ranges are one run of rows.
 */
struct overlap {
    int64_t n_dims; /* leading ones, where rows lie apart */
    int64_t size[DSC_RESHAPE_MAX_DIMS];
    int64_t src_stride[DSC_RESHAPE_MAX_DIMS];
    int64_t dst_stride[DSC_RESHAPE_MAX_DIMS];
    int64_t src_first; /* of row 0, in the piece's box */
    int64_t dst_first;
    int64_t n_rows;
    int64_t row_elems;
};

struct row {
    int64_t src;
    int64_t dst;
};

static dsc_status check_arguments(const int64_t *shape, int32_t n_dims, const int64_t *pieces, int64_t n_pieces,
                                  const int64_t *wanted)
{
    int64_t n_elems = 0;

    DSC_TRY(dsc_shape_check(shape, n_dims, &n_elems));
    if (n_pieces < 0)
        return dsc_fail(DSC_EINVAL, "n_pieces is %" PRId64 ", must not be negative", n_pieces);
    if ((pieces == NULL && n_pieces > 0) || wanted == NULL)
        return dsc_fail(DSC_EINVAL, "pieces or wanted is NULL");
    for (int64_t i = 0; i < n_pieces; i++)
        DSC_TRY(dsc_part_check(shape, n_dims, pieces + i * (2 * n_dims + 2), i));
    return dsc_part_check(shape, n_dims, wanted, -1);
}

/* False when they have nothing in common. Both are not empty. */
static bool find_overlap(struct dsc_part piece, struct dsc_part wanted, int32_t n_dims, struct overlap *out)
{
    int64_t src_stride = 1; /* the current dimension's, in the piece's box */
    int64_t dst_stride = 1;
    bool is_row = true; /* all dimensions behind this one are whole on both sides */

    out->n_dims = 0;
    out->src_first = 0;
    out->dst_first = 0;
    out->n_rows = 1;
    out->row_elems = 1;
    for (int32_t d = n_dims - 1; d >= 0; d--) {
        int64_t piece_end = piece.start[d] + piece.size[d];
        int64_t wanted_end = wanted.start[d] + wanted.size[d];
        int64_t first = piece.start[d] > wanted.start[d] ? piece.start[d] : wanted.start[d];
        int64_t size = (piece_end < wanted_end ? piece_end : wanted_end) - first;

        if (size <= 0)
            return false;
        out->src_first += (first - piece.start[d]) * src_stride;
        out->dst_first += (first - wanted.start[d]) * dst_stride;
        if (is_row) {
            out->row_elems *= size;
            is_row = size == piece.size[d] && size == wanted.size[d];
        } else {
            out->n_rows *= size;
            out->size[out->n_dims] = size; /* the innermost first */
            out->src_stride[out->n_dims] = src_stride;
            out->dst_stride[out->n_dims] = dst_stride;
            out->n_dims++;
        }
        src_stride *= piece.size[d];
        dst_stride *= wanted.size[d];
    }
    return true;
}

static struct row row_at(const struct overlap *overlap, int64_t number)
{
    struct row row = {overlap->src_first, overlap->dst_first};

    for (int64_t d = 0; d < overlap->n_dims; d++) {
        int64_t index = number % overlap->size[d];

        number /= overlap->size[d];
        row.src += index * overlap->src_stride[d];
        row.dst += index * overlap->dst_stride[d];
    }
    return row;
}

/* The first row that ends behind src and behind dst. */
static int64_t first_row_behind(const struct overlap *overlap, int64_t src, int64_t dst)
{
    int64_t low = 0;
    int64_t high = overlap->n_rows;

    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        struct row row = row_at(overlap, middle);

        if (row.src + overlap->row_elems > src && row.dst + overlap->row_elems > dst)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The first row that begins at or behind src, or at or behind dst. */
static int64_t first_row_from(const struct overlap *overlap, int64_t src, int64_t dst)
{
    int64_t low = 0;
    int64_t high = overlap->n_rows;

    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        struct row row = row_at(overlap, middle);

        if (row.src >= src || row.dst >= dst)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The rows [*out_first, returned end) that lie, at least in part, within both ranges. */
static int64_t rows_between(const struct overlap *overlap, struct dsc_part piece, struct dsc_part wanted,
                            int64_t *out_first)
{
    int64_t end = first_row_from(overlap, piece.end, wanted.end);
    int64_t first = first_row_behind(overlap, piece.begin, wanted.begin);

    *out_first = first;
    return end > first ? end : first;
}

/* Positions count from the ranges' beginnings. *out is untouched when nothing of the row is in both ranges. */
static bool clip_row(struct row row, int64_t n_elems, struct dsc_part piece, struct dsc_part wanted,
                     struct dsc_reshape_run *out)
{
    int64_t src = row.src - piece.begin;
    int64_t dst = row.dst - wanted.begin;
    int64_t skip = 0; /* elements before either range */

    if (-src > skip)
        skip = -src;
    if (-dst > skip)
        skip = -dst;
    src += skip;
    dst += skip;
    n_elems -= skip;
    if (n_elems > piece.end - piece.begin - src)
        n_elems = piece.end - piece.begin - src;
    if (n_elems > wanted.end - wanted.begin - dst)
        n_elems = wanted.end - wanted.begin - dst;
    if (n_elems <= 0)
        return false;
    out->src_elem = src;
    out->dst_elem = dst;
    out->n_elems = n_elems;
    return true;
}

/*
 * Lists the runs that each piece could give, by piece and then by position, pieces that overlap included, and returns
 * their number. With out_runs NULL it counts rows only: a few more, in no time.
 */
static int64_t list_candidates(int32_t n_dims, const int64_t *pieces, int64_t n_pieces, struct dsc_part wanted,
                               struct dsc_reshape_run *out_runs)
{
    int64_t n_runs = 0;

    if (wanted.begin == wanted.end)
        return 0;
    for (int64_t i = 0; i < n_pieces; i++) {
        struct dsc_part piece = dsc_part_at(pieces + i * (2 * n_dims + 2), n_dims);
        struct overlap overlap;
        int64_t row;

        if (piece.begin == piece.end || !find_overlap(piece, wanted, n_dims, &overlap))
            continue;

        int64_t end = rows_between(&overlap, piece, wanted, &row);

        if (out_runs == NULL) {
            if (__builtin_add_overflow(n_runs, end - row, &n_runs))
                return INT64_MAX;
            continue;
        }
        for (; row < end; row++) {
            if (clip_row(row_at(&overlap, row), overlap.row_elems, piece, wanted, &out_runs[n_runs])) {
                out_runs[n_runs].piece = i;
                n_runs++;
            }
        }
    }
    return n_runs;
}

static int compare(int64_t a, int64_t b)
{
    return (a > b) - (a < b);
}

static int by_dst(const void *a, const void *b)
{
    const struct dsc_reshape_run *x = a;
    const struct dsc_reshape_run *y = b;
    int order = compare(x->dst_elem, y->dst_elem);

    return order != 0 ? order : compare(x->piece, y->piece);
}

static int by_src(const void *a, const void *b)
{
    const struct dsc_reshape_run *x = a;
    const struct dsc_reshape_run *y = b;
    int order = compare(x->piece, y->piece);

    return order != 0 ? order : compare(x->src_elem, y->src_elem);
}

/* Most lists come in order. */
static void sort_runs(struct dsc_reshape_run *runs, int64_t n_runs, int (*order)(const void *, const void *))
{
    for (int64_t i = 1; i < n_runs; i++) {
        if (order(&runs[i - 1], &runs[i]) > 0) {
            qsort(runs, (size_t)n_runs, sizeof *runs, order);
            return;
        }
    }
}

static void cut_front(struct dsc_reshape_run *run, int64_t n_elems)
{
    run->src_elem += n_elems;
    run->dst_elem += n_elems;
    run->n_elems -= n_elems;
}

static int64_t end_of(const struct dsc_reshape_run *run)
{
    return run->dst_elem + run->n_elems;
}

/*
 * Candidates that began where a lower piece was taken, and may have to stand in where that ends: a heap with the lowest
 * piece on top.
 */
static void push(struct dsc_reshape_run *heap, int64_t *n_heap, struct dsc_reshape_run run)
{
    int64_t i = (*n_heap)++;

    for (; i > 0 && heap[(i - 1) / 2].piece > run.piece; i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = run;
}

static struct dsc_reshape_run pop(struct dsc_reshape_run *heap, int64_t *n_heap)
{
    struct dsc_reshape_run top = heap[0];
    struct dsc_reshape_run last = heap[--*n_heap];
    int64_t i = 0;

    for (int64_t child = 1; child < *n_heap; child = 2 * i + 1) {
        if (child + 1 < *n_heap && heap[child + 1].piece < heap[child].piece)
            child++;
        if (heap[child].piece >= last.piece)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

/*
 * Walks the n_candidates runs, which are in order of dst_elem, and gives each element to the lowest piece that has it.
 * The heap takes the place of candidates that have been passed. Writes at most 2 * n_candidates runs; returns the first
 * element that nobody has, or n_elems.
 */
static int64_t resolve(struct dsc_reshape_run *candidates, int64_t n_candidates, int64_t n_elems,
                       struct dsc_reshape_run *out_runs, int64_t *out_n_runs)
{
    struct dsc_reshape_run *heap = candidates;
    int64_t n_heap = 0;
    int64_t next = 0;
    int64_t n_runs = 0;
    int64_t at = 0; /* elements below it have their run */
    struct dsc_reshape_run taken = {.n_elems = 0};

    while (at < n_elems) {
        while (taken.n_elems == 0 && n_heap > 0) {
            taken = pop(heap, &n_heap);
            if (end_of(&taken) > at)
                cut_front(&taken, at - taken.dst_elem);
            else
                taken.n_elems = 0;
        }
        if (taken.n_elems == 0) { /* no run reaches beyond at, so all that begin below it have been passed */
            if (next == n_candidates || candidates[next].dst_elem > at)
                break;
            taken = candidates[next++];
        }

        int64_t end = end_of(&taken);

        /* Up to where it ends, or where a lower piece begins. */
        for (; next < n_candidates && candidates[next].dst_elem < end; next++) {
            if (candidates[next].piece < taken.piece) {
                end = candidates[next].dst_elem;
                break;
            }
            if (end_of(&candidates[next]) > end)
                push(heap, &n_heap, candidates[next]);
        }
        if (end > at) {
            out_runs[n_runs] = taken;
            out_runs[n_runs++].n_elems = end - at;
            cut_front(&taken, end - at);
        }
        at = end;
        if (taken.n_elems > 0) { /* a lower piece begins here */
            push(heap, &n_heap, taken);
            taken = candidates[next++];
        }
    }
    *out_n_runs = n_runs;
    return at;
}

/* Joins neighbours in place. */
static int64_t merge(struct dsc_reshape_run *runs, int64_t n_runs)
{
    int64_t n_merged = 0;

    for (int64_t i = 0; i < n_runs; i++) {
        struct dsc_reshape_run *last = &runs[n_merged - (n_merged > 0)];

        if (n_merged > 0 && runs[i].piece == last->piece && runs[i].src_elem == last->src_elem + last->n_elems &&
            runs[i].dst_elem == end_of(last))
            last->n_elems += runs[i].n_elems;
        else
            runs[n_merged++] = runs[i];
    }
    return n_merged;
}

/* "[3, 0, 7]": where an element of the wanted range lies in the tensor. */
static void write_index(char *text, size_t text_bytes, struct dsc_part wanted, int32_t n_dims, int64_t element)
{
    int64_t index[DSC_RESHAPE_MAX_DIMS];
    size_t used = 0;

    element += wanted.begin;
    for (int32_t d = n_dims - 1; d >= 0; d--) {
        index[d] = wanted.start[d] + element % wanted.size[d];
        element /= wanted.size[d];
    }
    text[0] = '\0';
    for (int32_t d = 0; d < n_dims && used < text_bytes; d++)
        used += (size_t)snprintf(text + used, text_bytes - used, "%s%" PRId64, d == 0 ? "" : ", ", index[d]);
}

dsc_status dsc_reshape_plan(const int64_t *shape, int32_t n_dims, const int64_t *pieces, int64_t n_pieces,
                            const int64_t *wanted, int64_t capacity, struct dsc_reshape_run *out_runs,
                            int64_t *out_n_runs)
{
    DSC_TRY(check_arguments(shape, n_dims, pieces, n_pieces, wanted));
    if (out_n_runs == NULL)
        return dsc_fail(DSC_EINVAL, "out_n_runs is NULL");

    struct dsc_part part = dsc_part_at(wanted, n_dims);
    int64_t n_rows = list_candidates(n_dims, pieces, n_pieces, part, NULL);
    int64_t n_needed;

    /* The plan in front, at most twice the candidates; they at the end. */
    if (__builtin_mul_overflow(n_rows, INT64_C(3), &n_needed))
        return dsc_fail(DSC_EOVERFLOW, "the plan's entries do not fit int64_t");
    if (out_runs == NULL) {
        *out_n_runs = n_needed;
        return DSC_OK;
    }
    if (capacity < n_needed)
        return dsc_fail(DSC_EINVAL, "capacity is %" PRId64 ", %" PRId64 " entries are needed", capacity, n_needed);

    struct dsc_reshape_run *candidates = out_runs + 2 * n_rows;
    int64_t n_candidates = list_candidates(n_dims, pieces, n_pieces, part, candidates);
    int64_t n_runs = 0;

    sort_runs(candidates, n_candidates, by_dst);

    int64_t n_found = resolve(candidates, n_candidates, part.end - part.begin, out_runs, &n_runs);

    if (n_found < part.end - part.begin) {
        char index[160];

        write_index(index, sizeof index, part, n_dims, n_found);
        return dsc_fail(
            DSC_EINVAL,
            "no piece holds element [%s] of the tensor, the first missing one of what is wanted (its number there is %" PRId64
            ")",
            index, n_found);
    }
    sort_runs(out_runs, n_runs, by_src);
    *out_n_runs = merge(out_runs, n_runs);
    return DSC_OK;
}
