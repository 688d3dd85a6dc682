/* The checks shared by all plans of this folder. */
#ifndef DSC_SEQ_SEQ_H
#define DSC_SEQ_SEQ_H

#include "base/check.h"
#include "base/share.h"
#include "dsc/seq.h"

/* Ends increase from above 0 to n_tokens; n_documents 0 asks for nothing. */
dsc_status seq_check_documents(const int64_t *document_ends, int64_t n_documents, int64_t n_tokens);

#endif
