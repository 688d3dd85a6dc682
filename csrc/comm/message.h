/* The messages between this rank and each other rank. */
#ifndef DSC_COMM_MESSAGE_H
#define DSC_COMM_MESSAGE_H

#include "comm/segment.h"

#include <pthread.h>

struct dsc_comm_transfer; /* a request of one message */
struct dsc_comm_arrival;  /* a message that no request expects yet */
struct dsc_comm_outgoing; /* a message whose data lies in the arena until the receiver has taken it */

/* Messages to and from one rank. Each list is in the order of sending or submission. */
struct dsc_comm_pair {
    uint64_t n_posted;                  /* as published */
    uint64_t n_read;                    /* as published */
    struct dsc_comm_transfer *sends;    /* not posted yet */
    struct dsc_comm_transfer *receives; /* not done */
    struct dsc_comm_arrival *arrivals;
    struct dsc_comm_outgoing *outgoing;
    uint64_t places[DSC_COMM_N_PLACES / 64]; /* bits: which of them outgoing messages use */
};

/* All under mutex. */
struct dsc_comm_mail {
    pthread_mutex_t mutex;
    pthread_cond_t has_changed;
    struct dsc_comm_pair pairs[DSC_COMM_MAX_RANKS];
    dsc_comm_block *kept[8]; /* blocks for the next messages, NULL last */
    int32_t n_outside;       /* threads that use memory of other ranks without the mutex */
    uint32_t n_vain;         /* spins in vain since the last one that was not */
    bool is_open;            /* the end is attached and not closed */
    bool has_mailboxes;      /* their memory is committed */
};

void dsc_comm_mail_init(struct dsc_comm_mail *mail);
void dsc_comm_mail_open(dsc_comm *comm);

/* Ends all requests. The caller has set is_closing, and told the other ranks. */
void dsc_comm_mail_stop(dsc_comm *comm);
void dsc_comm_mail_destroy(struct dsc_comm_mail *mail);

/* Wakes all threads of other ranks that sleep until this rank has news. */
void dsc_comm_ring_all(dsc_comm *comm);

/*
 * Makes all progress of messages that needs no wait. A collective that waits calls this, because another rank may come
 * to it only when this rank has taken its message. Returns the failure that broke the end.
 */
dsc_status dsc_comm_mail_advance(dsc_comm *comm);

/* Returns when the request is done; false if stops returned true. */
bool dsc_comm_message_finish(dsc_comm_request *request, bool (*stops)(void *), void *context);

/* Makes all progress that needs no wait. Returns whether the request is done. */
bool dsc_comm_message_advance(dsc_comm_request *request);

#endif
