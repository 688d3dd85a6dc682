/* What the files of this folder share: even shares, and what every plan checks first. */
#ifndef DSC_SEQ_SEQ_H
#define DSC_SEQ_SEQ_H

#include "dsc/seq.h"

struct seq_range {
    int64_t begin;
    int64_t end;
};

/* The first n % n_parts parts get one more. */
static inline struct seq_range seq_even(int64_t n, int64_t n_parts, int64_t part)
{
    int64_t each = n / n_parts;
    int64_t more = n % n_parts;
    int64_t begin = part * each + (part < more ? part : more);

    return (struct seq_range){begin, begin + each + (part < more)};
}

dsc_status seq_check_rank(int32_t n_ranks, int32_t rank);

/* Ends increase from above 0 to n_tokens; n_documents 0 asks for nothing. */
dsc_status seq_check_documents(const int64_t *document_ends, int64_t n_documents, int64_t n_tokens);

#endif
