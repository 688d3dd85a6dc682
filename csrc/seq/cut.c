/* Cuts a sequence over ranks: even shares, zigzag, whole documents, and rows of ranks that share a part. */
#include "seq/seq.h"

#include "base/fail.h"

dsc_status seq_check_documents(const int64_t *document_ends, int64_t n_documents, int64_t n_tokens)
{
    int64_t end = 0;

    if (n_tokens < 0 || n_tokens > DSC_SEQ_MAX_TOKENS)
        return dsc_fail(DSC_EINVAL, "n_tokens is %lld, must be 0 to %lld", (long long)n_tokens,
                        (long long)DSC_SEQ_MAX_TOKENS);
    if (n_documents < 0 || (n_documents > 0 && document_ends == NULL))
        return dsc_fail(DSC_EINVAL, "%lld documents, and document_ends is %s", (long long)n_documents,
                        document_ends == NULL ? "NULL" : "set");
    for (int64_t i = 0; i < n_documents; i++) {
        if (document_ends[i] <= end)
            return dsc_fail(DSC_EINVAL, "document %lld ends at %lld, must end after %lld, where it begins",
                            (long long)i, (long long)document_ends[i], (long long)end);
        end = document_ends[i];
    }
    if (n_documents > 0 && end != n_tokens)
        return dsc_fail(DSC_EINVAL, "the last of %lld documents ends at %lld, the sequence has %lld tokens",
                        (long long)n_documents, (long long)end, (long long)n_tokens);
    return DSC_OK;
}

static int64_t begin_of(const int64_t *document_ends, int64_t document)
{
    return document > 0 ? document_ends[document - 1] : 0;
}

/* Whether document a goes below b in the heap: the root is the shortest, of equals the last, so that it ends up behind.
 */
static bool is_below(const int64_t *document_ends, int64_t a, int64_t b)
{
    int64_t of_a = document_ends[a] - begin_of(document_ends, a);
    int64_t of_b = document_ends[b] - begin_of(document_ends, b);

    return of_a != of_b ? of_a > of_b : a < b;
}

static void sift_down(const int64_t *document_ends, int64_t *heap, int64_t n, int64_t at)
{
    for (;;) {
        int64_t next = 2 * at + 1;
        int64_t moved = heap[at];

        if (next >= n)
            return;
        if (next + 1 < n && is_below(document_ends, heap[next], heap[next + 1]))
            next++;
        if (!is_below(document_ends, moved, heap[next]))
            return;
        heap[at] = heap[next];
        heap[next] = moved;
        at = next;
    }
}

/* Longest first, of equals the first in the sequence. */
static void sort_by_length(const int64_t *document_ends, int64_t n, int64_t *order)
{
    for (int64_t i = 0; i < n; i++)
        order[i] = i;
    for (int64_t i = n / 2 - 1; i >= 0; i--)
        sift_down(document_ends, order, n, i);
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t root = order[0];

        order[0] = order[i];
        order[i] = root;
        sift_down(document_ends, order, i, 0);
    }
}

dsc_status dsc_seq_deal(const int64_t *document_ends, int64_t n_documents, int32_t n_parts, int64_t *order,
                        int64_t *part_tokens, int32_t *out_document_parts)
{
    int64_t n_tokens = n_documents > 0 && document_ends != NULL ? document_ends[n_documents - 1] : 0;

    DSC_TRY(dsc_check_rank(n_parts, 0));
    DSC_TRY(seq_check_documents(document_ends, n_documents, n_tokens));
    if (part_tokens == NULL || (n_documents > 0 && (order == NULL || out_document_parts == NULL)))
        return dsc_fail(DSC_EINVAL, "an array of dsc_seq_deal is NULL");
    for (int32_t part = 0; part < n_parts; part++)
        part_tokens[part] = 0;
    sort_by_length(document_ends, n_documents, order);
    for (int64_t i = 0; i < n_documents; i++) {
        int64_t document = order[i];
        int32_t least = 0;

        for (int32_t part = 1; part < n_parts; part++)
            if (part_tokens[part] < part_tokens[least])
                least = part;
        out_document_parts[document] = least;
        part_tokens[least] += document_ends[document] - begin_of(document_ends, document);
    }
    return DSC_OK;
}

/* Collects a part's runs as they are found; a rank keeps the runs within its share. */
struct runs {
    struct dsc_seq_run *kept; /* NULL: counted only */
    int64_t capacity;
    int64_t n;
    struct dsc_range share; /* in the part's tokens */
    int64_t passed;         /* tokens of the part so far */
    int64_t end;            /* the last run's */
};

static void append(struct runs *runs, int64_t begin, int64_t end)
{
    int64_t first = runs->passed;
    int64_t low = runs->share.begin > first ? begin + (runs->share.begin - first) : begin;
    int64_t high = runs->share.end - first < end - begin ? begin + (runs->share.end - first) : end;

    runs->passed += end - begin;
    if (low >= high)
        return;
    if (runs->n > 0 && runs->end == low) {
        if (runs->kept != NULL && runs->n <= runs->capacity)
            runs->kept[runs->n - 1].n_tokens += high - low;
    } else {
        if (runs->kept != NULL && runs->n < runs->capacity)
            runs->kept[runs->n] = (struct dsc_seq_run){first + (low - begin) - runs->share.begin, low, high - low};
        runs->n++;
    }
    runs->end = high;
}

static void walk(const struct dsc_seq_cut *cut, int32_t part, struct runs *runs)
{
    int32_t n_parts = cut->n_ranks / cut->n_inner;

    if (cut->order == DSC_SEQ_CONTIGUOUS) {
        struct dsc_range range = dsc_even(cut->n_tokens, n_parts, part);

        append(runs, range.begin, range.end);
    } else if (cut->order == DSC_SEQ_ZIGZAG) {
        struct dsc_range low = dsc_even(cut->n_tokens, 2 * (int64_t)n_parts, part);
        struct dsc_range high = dsc_even(cut->n_tokens, 2 * (int64_t)n_parts, 2 * (int64_t)n_parts - 1 - part);

        append(runs, low.begin, low.end);
        append(runs, high.begin, high.end);
    } else {
        for (int64_t i = 0; i < cut->n_documents; i++)
            if (cut->document_parts[i] == part)
                append(runs, begin_of(cut->document_ends, i), cut->document_ends[i]);
    }
}

static dsc_status check_cut(const struct dsc_seq_cut *cut, int32_t rank)
{
    if (cut == NULL)
        return dsc_fail(DSC_EINVAL, "cut is NULL");
    DSC_TRY(dsc_check_rank(cut->n_ranks, rank));
    if (cut->n_inner < 1 || cut->n_ranks % cut->n_inner != 0)
        return dsc_fail(DSC_EINVAL, "n_inner is %d, must divide n_ranks, which is %d", (int)cut->n_inner,
                        (int)cut->n_ranks);
    if (cut->order < DSC_SEQ_CONTIGUOUS || cut->order > DSC_SEQ_DOCUMENTS)
        return dsc_fail(DSC_EINVAL, "order is %d, which is no dsc_seq_order", (int)cut->order);
    DSC_TRY(seq_check_documents(cut->document_ends, cut->n_documents, cut->n_tokens));
    if (cut->order != DSC_SEQ_DOCUMENTS)
        return DSC_OK;
    if (cut->document_parts == NULL && cut->n_documents > 0)
        return dsc_fail(DSC_EINVAL, "document_parts is NULL for %lld documents", (long long)cut->n_documents);
    if (cut->n_documents == 0 && cut->n_tokens > 0)
        return dsc_fail(DSC_EINVAL, "%lld tokens in the order of documents, and no document", (long long)cut->n_tokens);
    for (int64_t i = 0; i < cut->n_documents; i++)
        if (cut->document_parts[i] < 0 || cut->document_parts[i] >= cut->n_ranks / cut->n_inner)
            return dsc_fail(DSC_EINVAL, "document %lld goes to part %d, must be 0 to %d", (long long)i,
                            (int)cut->document_parts[i], (int)(cut->n_ranks / cut->n_inner - 1));
    return DSC_OK;
}

dsc_status dsc_seq_runs_of(const struct dsc_seq_cut *cut, int32_t rank, int64_t capacity, struct dsc_seq_run *out_runs,
                           int64_t *out_n_runs, int64_t *out_n_tokens)
{
    if (out_n_runs == NULL || out_n_tokens == NULL)
        return dsc_fail(DSC_EINVAL, "an out_ pointer is NULL");
    DSC_TRY(check_cut(cut, rank));

    int32_t part = rank / cut->n_inner;
    struct runs whole = {.share = {0, INT64_MAX}};

    walk(cut, part, &whole);

    struct dsc_range share = dsc_even(whole.passed, cut->n_inner, rank % cut->n_inner);
    struct runs count = {.share = share};
    struct runs kept = {.share = share, .kept = out_runs, .capacity = capacity};

    walk(cut, part, &count);
    if (out_runs != NULL && count.n > capacity)
        return dsc_fail(DSC_EINVAL, "%lld runs do not fit %lld entries", (long long)count.n, (long long)capacity);
    if (out_runs != NULL)
        walk(cut, part, &kept);
    *out_n_runs = count.n;
    *out_n_tokens = share.end - share.begin;
    return DSC_OK;
}
