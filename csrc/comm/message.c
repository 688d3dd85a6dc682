/*
 * Messages from one rank to another. They have no thread: each call for one message and each collective that sleeps
 * advances all of them.
 */
#include "comm/message.h"

#include "base/fail.h"
#include "comm/end.h"

#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS INT64_C(100000000)          /* between looks at the other ranks */
#define LONG_SPIN 4                          /* times a usual spin: above a sleep, a wake and a short answer */
#define VAIN_PERIOD 8                        /* of spins in vain, one is long */
#define MAX_KEPT_BYTES ((int64_t)16 << 20)   /* a longer block returns to the system after its message */
#define MAX_KEPT_FACTOR 4                    /* a block may be this many times as long as its data */
#define MAX_MESSAGE_BYTES ((int64_t)1 << 46) /* the longest arena */

/*
 * [Note: Mailboxes] A sender writes notices into its mailbox for the receiver, one after the other, in a ring, and
 * publishes how many there are. The receiver reads them in this order and publishes how many it has read, so that the
 * sender may write the next ones. Each call of the receiver reads all notices: messages that no request expects are
 * remembered (arrivals), so a message never waits for the reception of another one. Data that does not fit a notice
 * stays in the sender's arena. When the receiver has copied it, it writes the message's number into the place that
 * the sender has chosen.
 *
 * A rank that has published something rings: it changes the bell that the other rank may sleep on. Sleepers and bells
 * work as in [Note: Sleepers].
 */
struct dsc_comm_transfer {
    struct dsc_comm_request request;
    int32_t peer;
    bool sends;
    void *data;
    int64_t n_bytes;
    struct dsc_comm_note note; /* a receiver's expected message, and then its arrived one */
    struct dsc_comm_outgoing *outgoing;
    struct dsc_comm_transfer *next;
    bool has_arrived; /* the data waits in the sender's arena */
    bool is_copying;
};

struct dsc_comm_arrival {
    struct dsc_comm_note note;
    struct dsc_comm_arrival *next;
    char data[]; /* if it came with the notice */
};

struct dsc_comm_outgoing {
    uint64_t number;
    int32_t place;
    struct dsc_comm_block *block;   /* the copy; NULL: the data is the sender's */
    struct dsc_comm_transfer *send; /* the request that is done when the data has been taken; NULL: done before */
    struct dsc_comm_outgoing *next;
};

static struct dsc_comm_mailbox *mailbox_of(const struct dsc_comm *comm, int32_t owner, int32_t other)
{
    char *boxes = comm->peers[owner].segment->base + DSC_COMM_AT_MAILBOXES;

    return (struct dsc_comm_mailbox *)(void *)boxes + other;
}

static _Atomic uint32_t *bell_of(const struct dsc_comm *comm, int32_t owner, int32_t other)
{
    return &dsc_comm_control_at(comm, owner)->bells[other];
}

static void ring(struct dsc_comm *comm, int32_t rank)
{
    _Atomic uint32_t *bell = bell_of(comm, comm->rank, rank);

    atomic_fetch_add(bell, 1);
    if (atomic_load(&dsc_comm_control_at(comm, rank)->sleepers[comm->rank]) > 0)
        (void)syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    /* The rank may sleep in a collective, and looks at its messages when it wakes: if it misses this, a slice later. */
    int32_t awaited = atomic_load_explicit(&dsc_comm_control_at(comm, rank)->awaited, memory_order_relaxed);

    if (awaited > 0 && awaited <= comm->n_ranks)
        (void)syscall(SYS_futex, &dsc_comm_control_at(comm, awaited - 1)->tick, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void dsc_comm_ring_all(struct dsc_comm *comm)
{
    for (int32_t rank = 0; rank < comm->n_ranks; rank++) {
        _Atomic uint32_t *bell = &dsc_comm_control_of(comm->segment)->bells[rank];

        atomic_fetch_add(bell, 1);
        (void)syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

void dsc_comm_mail_init(struct dsc_comm_mail *mail)
{
    pthread_mutex_init(&mail->mutex, NULL); /* these cannot fail on Linux */
    pthread_cond_init(&mail->has_changed, NULL);
}

void dsc_comm_mail_open(struct dsc_comm *comm)
{
    pthread_mutex_lock(&comm->mail.mutex);
    comm->mail.is_open = true;
    pthread_mutex_unlock(&comm->mail.mutex);
}

void dsc_comm_mail_destroy(struct dsc_comm_mail *mail)
{
    pthread_cond_destroy(&mail->has_changed);
    pthread_mutex_destroy(&mail->mutex);
}

/* Bytes of a message; -1 if it cannot be one. */
static int64_t bytes_of(int32_t type, int32_t n_dims, const int64_t *shape)
{
    int64_t n_bytes = (int64_t)dsc_comm_type_bytes((dsc_comm_type)type);
    bool is_empty = false;

    if (n_bytes == 0 || n_dims < 0 || n_dims > DSC_COMM_MAX_DIMS)
        return -1;
    for (int32_t i = 0; i < n_dims; i++) {
        if (shape[i] < 0)
            return -1;
        is_empty |= shape[i] == 0;
    }
    for (int32_t i = 0; i < n_dims && !is_empty; i++)
        if (__builtin_mul_overflow(n_bytes, shape[i], &n_bytes) || n_bytes > MAX_MESSAGE_BYTES)
            return -1;
    return is_empty ? 0 : n_bytes;
}

/* Unlinks a transfer from a list of its pair, if it is there. */
static void unlink_from(struct dsc_comm_transfer **at, const struct dsc_comm_transfer *transfer)
{
    while (*at != NULL && *at != transfer)
        at = &(*at)->next;
    if (*at != NULL)
        *at = transfer->next;
}

static void append_to(struct dsc_comm_transfer **at, struct dsc_comm_transfer *transfer)
{
    while (*at != NULL)
        at = &(*at)->next;
    *at = transfer;
}

/* The transfer is in no list. It must not be used afterwards, because another thread may release it. */
static void end_transfer(struct dsc_comm *comm, struct dsc_comm_transfer *transfer, dsc_status status)
{
    transfer->request.status = status;
    atomic_store_explicit(&transfer->request.is_done, true, memory_order_release);
    pthread_cond_broadcast(&comm->mail.has_changed);
}

/* Blocks. The first of the kept ones has been used last, so its memory is warm. */

static dsc_comm_block *find_kept(struct dsc_comm_mail *mail, int64_t n_bytes)
{
    enum { N_KEPT = sizeof mail->kept / sizeof *mail->kept };

    for (int32_t i = 0; i < N_KEPT && mail->kept[i] != NULL; i++) {
        dsc_comm_block *block = mail->kept[i];
        int64_t has = dsc_comm_block_bytes(block);

        if (has < n_bytes || has / MAX_KEPT_FACTOR > n_bytes)
            continue;
        for (; i + 1 < N_KEPT; i++)
            mail->kept[i] = mail->kept[i + 1];
        mail->kept[N_KEPT - 1] = NULL;
        return block;
    }
    return NULL;
}

static void keep_block(struct dsc_comm_mail *mail, dsc_comm_block *block)
{
    enum { N_KEPT = sizeof mail->kept / sizeof *mail->kept };

    if (block == NULL || dsc_comm_block_bytes(block) > MAX_KEPT_BYTES) {
        dsc_comm_block_destroy(block);
        return;
    }
    dsc_comm_block_destroy(mail->kept[N_KEPT - 1]);
    memmove(mail->kept + 1, mail->kept, (N_KEPT - 1) * sizeof *mail->kept);
    mail->kept[0] = block;
}

/* The receiver's comparison. */

static void write_shape(const struct dsc_comm_note *note, char *text, size_t n_text)
{
    int n = snprintf(text, n_text, "[");

    for (int32_t i = 0; i < note->n_dims; i++)
        n += snprintf(text + n, n_text - (size_t)n, "%s%" PRId64, i > 0 ? ", " : "", note->shape[i]);
    (void)snprintf(text + n, n_text - (size_t)n, "]");
}

/* text has DSC_COMM_WHY_BYTES. */
static void write_difference(const struct dsc_comm *comm, int32_t src, const struct dsc_comm_note *sent,
                             const struct dsc_comm_note *expected, char *text)
{
    enum { SHAPE_BYTES = DSC_COMM_MAX_DIMS * 24 };
    char shapes[2][SHAPE_BYTES];
    int pid = (int)comm->peers[src].segment->pid;

    if (sent->type != expected->type)
        (void)snprintf(text, DSC_COMM_WHY_BYTES,
                       "message of tag %d: rank %d (process %d) sends %s, rank %d expects %s, as \"%.60s\"",
                       (int)sent->tag, (int)src, pid, dsc_comm_type_text((dsc_comm_type)sent->type), (int)comm->rank,
                       dsc_comm_type_text((dsc_comm_type)expected->type), expected->label);
    else if (sent->n_dims != expected->n_dims ||
             memcmp(sent->shape, expected->shape, (size_t)sent->n_dims * sizeof *sent->shape) != 0) {
        write_shape(sent, shapes[0], SHAPE_BYTES);
        write_shape(expected, shapes[1], SHAPE_BYTES);
        (void)snprintf(text, DSC_COMM_WHY_BYTES,
                       "message of tag %d: rank %d (process %d) sends shape %.80s, rank %d expects %.80s, as \"%.60s\"",
                       (int)sent->tag, (int)src, pid, shapes[0], (int)comm->rank, shapes[1], expected->label);
    } else if (sent->label_hash != expected->label_hash)
        (void)snprintf(text, DSC_COMM_WHY_BYTES,
                       "message of tag %d: rank %d (process %d) sends \"%.90s\", rank %d expects \"%.90s\"",
                       (int)sent->tag, (int)src, pid, sent->label, (int)comm->rank, expected->label);
    else
        text[0] = '\0';
}

/*
 * Gives a message to the first request that expects it. The request gets data that came with the notice at once. The
 * request of a message that differs stays in its list, and fails with the end.
 */
static void deliver(struct dsc_comm *comm, int32_t src, struct dsc_comm_transfer *receive,
                    const struct dsc_comm_note *note, const char *data)
{
    char difference[DSC_COMM_WHY_BYTES];

    write_difference(comm, src, note, &receive->note, difference);
    if (difference[0] != '\0') {
        (void)dsc_comm_break_with(comm, DSC_EPEER, difference);
        return;
    }
    receive->note = *note;
    if (note->offset >= 0) {
        receive->has_arrived = true;
        return;
    }
    if (receive->n_bytes > 0)
        memcpy(receive->data, data, (size_t)receive->n_bytes);
    unlink_from(&comm->mail.pairs[src].receives, receive);
    end_transfer(comm, receive, DSC_OK);
}

static struct dsc_comm_transfer *find_receive(const struct dsc_comm_pair *pair, int32_t tag)
{
    struct dsc_comm_transfer *receive = pair->receives;

    while (receive != NULL && (receive->has_arrived || receive->note.tag != tag))
        receive = receive->next;
    return receive;
}

static bool remember(struct dsc_comm_pair *pair, const struct dsc_comm_note *note, const char *data, int64_t n_bytes)
{
    size_t n_inline = note->offset < 0 ? (size_t)n_bytes : 0;
    struct dsc_comm_arrival *arrival = malloc(sizeof *arrival + n_inline);
    struct dsc_comm_arrival **at = &pair->arrivals;

    if (arrival == NULL)
        return false;
    arrival->note = *note;
    arrival->next = NULL;
    memcpy(arrival->data, data, n_inline);
    while (*at != NULL)
        at = &(*at)->next;
    *at = arrival;
    return true;
}

/* Bytes of the message of a notice; -1 if the notice cannot be right. */
static int64_t check_note(const struct dsc_comm *comm, int32_t src, const struct dsc_comm_note *note)
{
    int64_t n_bytes = bytes_of(note->type, note->n_dims, note->shape);
    int64_t end = comm->peers[src].segment->n_bytes;

    if (n_bytes < 0 || note->number != comm->mail.pairs[src].n_read + 1)
        return -1;
    if (note->offset == -1)
        return n_bytes <= DSC_COMM_INLINE_BYTES ? n_bytes : -1;
    if (note->offset < DSC_COMM_AT_ARENA || note->offset > end || end - note->offset < n_bytes || note->place < 0 ||
        note->place >= DSC_COMM_N_PLACES)
        return -1;
    return n_bytes;
}

/* Reads all notices of a rank. */
static void read_notices(struct dsc_comm *comm, int32_t src)
{
    struct dsc_comm_pair *pair = &comm->mail.pairs[src];
    uint64_t n_posted =
        atomic_load_explicit(&dsc_comm_control_at(comm, src)->n_posted[comm->rank], memory_order_acquire);
    uint64_t n_before = pair->n_read;
    char text[DSC_COMM_WHY_BYTES];

    while (pair->n_read != n_posted && dsc_comm_check(comm) == DSC_OK) {
        const struct dsc_comm_notice *notice =
            &mailbox_of(comm, src, comm->rank)->notices[pair->n_read % DSC_COMM_N_NOTICES];
        struct dsc_comm_note note = notice->note;
        int64_t n_bytes = check_note(comm, src, &note);

        if (n_bytes < 0) {
            (void)snprintf(text, sizeof text, "rank %d (process %d) has sent a notice that describes no message",
                           (int)src, (int)comm->peers[src].segment->pid);
            (void)dsc_comm_break_with(comm, DSC_EPEER, text);
            break;
        }
        note.label[sizeof note.label - 1] = '\0';

        struct dsc_comm_transfer *receive = find_receive(pair, note.tag);

        if (receive != NULL)
            deliver(comm, src, receive, &note, notice->data);
        else if (!remember(pair, &note, notice->data, n_bytes))
            break; /* the notice stays, and a later call reads it */
        pair->n_read++;
    }
    if (pair->n_read == n_before)
        return;
    atomic_store_explicit(&dsc_comm_control_of(comm->segment)->n_read[src], pair->n_read, memory_order_release);
    ring(comm, src);
}

/* The sending side. */

/* -1: all are in use. */
static int32_t find_place(struct dsc_comm_pair *pair)
{
    for (int32_t i = 0; i < DSC_COMM_N_PLACES / 64; i++)
        if (pair->places[i] != UINT64_MAX) {
            int32_t bit = __builtin_ctzll(~pair->places[i]);

            pair->places[i] |= UINT64_C(1) << bit;
            return i * 64 + bit;
        }
    return -1;
}

/* Posts the first message that waits. False if there is none, or no room. */
static bool post_first(struct dsc_comm *comm, int32_t dst)
{
    struct dsc_comm_pair *pair = &comm->mail.pairs[dst];
    struct dsc_comm_transfer *send = pair->sends;
    const _Atomic uint64_t *n_read = &dsc_comm_control_at(comm, dst)->n_read[comm->rank];

    if (send == NULL || pair->n_posted - atomic_load_explicit(n_read, memory_order_acquire) >= DSC_COMM_N_NOTICES)
        return false;

    struct dsc_comm_notice *notice = &mailbox_of(comm, comm->rank, dst)->notices[pair->n_posted % DSC_COMM_N_NOTICES];
    struct dsc_comm_outgoing *outgoing = send->outgoing;

    if (outgoing != NULL && (send->note.place = find_place(pair)) < 0)
        return false;
    send->note.number = pair->n_posted + 1;
    notice->note = send->note;
    if (outgoing == NULL && send->n_bytes > 0)
        memcpy(notice->data, send->data, (size_t)send->n_bytes);
    pair->n_posted++;
    atomic_store_explicit(&dsc_comm_control_of(comm->segment)->n_posted[dst], pair->n_posted, memory_order_release);
    ring(comm, dst);
    pair->sends = send->next;
    if (outgoing != NULL) {
        outgoing->number = send->note.number;
        outgoing->place = send->note.place;
        outgoing->send = outgoing->block == NULL ? send : NULL;
        outgoing->next = pair->outgoing;
        pair->outgoing = outgoing;
        send->outgoing = NULL;
    }
    if (outgoing == NULL || outgoing->block != NULL)
        end_transfer(comm, send, DSC_OK);
    return true;
}

/* Ends the messages to a rank that it has taken. */
static void end_taken(struct dsc_comm *comm, int32_t dst)
{
    struct dsc_comm_pair *pair = &comm->mail.pairs[dst];

    for (struct dsc_comm_outgoing **at = &pair->outgoing; *at != NULL;) {
        struct dsc_comm_outgoing *outgoing = *at;
        const _Atomic uint64_t *taken = &mailbox_of(comm, dst, comm->rank)->taken[outgoing->place];

        if (atomic_load_explicit(taken, memory_order_acquire) != outgoing->number) {
            at = &outgoing->next;
            continue;
        }
        *at = outgoing->next;
        pair->places[outgoing->place / 64] &= ~(UINT64_C(1) << outgoing->place % 64);
        keep_block(&comm->mail, outgoing->block);
        if (outgoing->send != NULL)
            end_transfer(comm, outgoing->send, DSC_OK);
        free(outgoing);
    }
}

static void free_outgoing(struct dsc_comm_outgoing *outgoing)
{
    if (outgoing != NULL)
        dsc_comm_block_destroy(outgoing->block);
    free(outgoing);
}

/* Ends all requests that no thread works on. */
static void end_all(struct dsc_comm *comm, dsc_status status)
{
    for (int32_t rank = 0; rank < comm->n_ranks; rank++) {
        struct dsc_comm_pair *pair = &comm->mail.pairs[rank];

        while (pair->sends != NULL) {
            struct dsc_comm_transfer *send = pair->sends;

            pair->sends = send->next;
            free_outgoing(send->outgoing);
            end_transfer(comm, send, status);
        }
        for (struct dsc_comm_outgoing *outgoing = pair->outgoing; outgoing != NULL; outgoing = outgoing->next)
            if (outgoing->send != NULL) {
                end_transfer(comm, outgoing->send, status);
                outgoing->send = NULL;
            }
        for (struct dsc_comm_transfer **at = &pair->receives; *at != NULL;) {
            struct dsc_comm_transfer *receive = *at;

            if (receive->is_copying) {
                at = &receive->next;
                continue;
            }
            *at = receive->next;
            end_transfer(comm, receive, status);
        }
    }
}

/* Makes all progress that needs no wait. The end is open. */
static void advance(struct dsc_comm *comm)
{
    for (int32_t rank = 0; rank < comm->n_ranks && dsc_comm_check(comm) == DSC_OK; rank++) {
        if (rank == comm->rank)
            continue;
        read_notices(comm, rank);
        end_taken(comm, rank);
        while (post_first(comm, rank))
            continue;
    }
    if (dsc_comm_check(comm) != DSC_OK)
        end_all(comm, dsc_comm_check(comm));
}

/* The caller holds the mutex. Between the two calls it does not, and the other ranks' memory stays mapped. */

static void go_outside(struct dsc_comm_mail *mail)
{
    mail->n_outside++;
    pthread_mutex_unlock(&mail->mutex);
}

static void come_back(struct dsc_comm_mail *mail)
{
    pthread_mutex_lock(&mail->mutex);
    mail->n_outside--;
    pthread_cond_broadcast(&mail->has_changed);
}

/* Copies data that has arrived. */
static void take(struct dsc_comm_transfer *receive)
{
    struct dsc_comm *comm = receive->request.comm;
    int32_t src = receive->peer;
    struct dsc_comm_control *control = dsc_comm_control_at(comm, src);
    char text[DSC_COMM_WHY_BYTES];

    receive->is_copying = true;
    go_outside(&comm->mail);
    memcpy(receive->data, comm->peers[src].segment->base + receive->note.offset, (size_t)receive->n_bytes);
    come_back(&comm->mail);

    /*
     * An end that fails or closes gives its callers back the memory of unfinished messages, after it has said so. It
     * may have changed while it was copied.
     */
    atomic_thread_fence(memory_order_acquire);

    bool is_sure = receive->note.is_kept != 0 || atomic_load(&control->state) == DSC_COMM_OPEN;

    receive->is_copying = false;
    unlink_from(&comm->mail.pairs[src].receives, receive);
    if (is_sure) {
        atomic_store_explicit(&mailbox_of(comm, comm->rank, src)->taken[receive->note.place], receive->note.number,
                              memory_order_release);
        ring(comm, src);
        end_transfer(comm, receive, DSC_OK);
        return;
    }
    (void)snprintf(text, sizeof text, "rank %d (process %d) has failed or closed its end while its message was read",
                   (int)src, (int)comm->peers[src].segment->pid);
    end_transfer(comm, receive, dsc_comm_break_with(comm, DSC_EPEER, text));
}

static struct dsc_comm_transfer *find_arrived(const struct dsc_comm *comm)
{
    for (int32_t rank = 0; rank < comm->n_ranks; rank++)
        for (struct dsc_comm_transfer *it = comm->mail.pairs[rank].receives; it != NULL; it = it->next)
            if (it->has_arrived && !it->is_copying)
                return it;
    return NULL;
}

/*
 * Makes all progress that needs no wait. Data of all requests is copied: their senders may wait for that before they do
 * what the caller waits for.
 */
static void move_on(struct dsc_comm *comm)
{
    if (comm->mail.is_open)
        advance(comm);
    for (struct dsc_comm_transfer *arrived; comm->mail.is_open && (arrived = find_arrived(comm)) != NULL;)
        take(arrived);
}

/* Moves on, then returns whether the transfer is done. */
static bool settle(struct dsc_comm_transfer *transfer)
{
    if (!atomic_load_explicit(&transfer->request.is_done, memory_order_relaxed))
        move_on(transfer->request.comm);
    return atomic_load_explicit(&transfer->request.is_done, memory_order_relaxed);
}

dsc_status dsc_comm_mail_advance(struct dsc_comm *comm)
{
    pthread_mutex_lock(&comm->mail.mutex);
    move_on(comm);
    pthread_mutex_unlock(&comm->mail.mutex);
    return dsc_comm_check(comm);
}

static void break_by(struct dsc_comm_transfer *transfer, int32_t rank, dsc_status status, const char *what)
{
    struct dsc_comm *comm = transfer->request.comm;
    char text[DSC_COMM_WHY_BYTES];

    (void)snprintf(text, sizeof text, "message of tag %d %s rank %d, \"%.40s\": rank %d (process %d) %.200s",
                   (int)transfer->note.tag, transfer->sends ? "to" : "from", (int)transfer->peer, transfer->note.label,
                   (int)rank, (int)comm->peers[rank].segment->pid, what);
    (void)dsc_comm_break_with(comm, status, text);
}

/* Breaks the end if another rank's end is broken. */
static void break_if_failed(struct dsc_comm_transfer *transfer)
{
    struct dsc_comm *comm = transfer->request.comm;
    char what[DSC_COMM_WHY_BYTES];

    for (int32_t rank = 0; rank < comm->n_ranks; rank++) {
        struct dsc_comm_control *control = dsc_comm_control_at(comm, rank);

        if (rank == comm->rank || atomic_load(&control->state) != DSC_COMM_FAILED)
            continue;
        (void)snprintf(what, sizeof what, "has failed: %.200s", control->why);
        break_by(transfer, rank, DSC_EPEER, what);
        return;
    }
}

/* Breaks the end if the transfer will never be done. */
static void look_around(struct dsc_comm_transfer *transfer, bool asks_kernel)
{
    struct dsc_comm *comm = transfer->request.comm;
    int32_t peer = transfer->peer;
    bool is_dead = asks_kernel && dsc_comm_has_ended(comm, peer);
    char what[DSC_COMM_WHY_BYTES];

    if (is_dead || atomic_load(&dsc_comm_control_at(comm, peer)->state) != DSC_COMM_OPEN) {
        uint32_t state = atomic_load(&dsc_comm_control_at(comm, peer)->state);

        advance(comm); /* it may have done its part before */
        if (transfer->has_arrived || atomic_load_explicit(&transfer->request.is_done, memory_order_relaxed))
            return;
        if (state != DSC_COMM_FAILED) {
            break_by(transfer, peer, DSC_EPEER, state == DSC_COMM_CLOSED ? "has closed its end" : "has ended");
            return;
        }
    }
    break_if_failed(transfer);
    if (dsc_comm_check(comm) != DSC_OK || dsc_comm_now_ns() < transfer->request.deadline_ns)
        return;
    (void)snprintf(what, sizeof what, "has not come in %.3g s", (double)comm->timeout_ns * 1e-9);
    break_by(transfer, peer, DSC_ETIMEDOUT, what);
}

/*
 * Whether the bell has been rung within spin_ns. Two ranks that answer each other see the other one's sleep and wake in
 * its answers, so after a sleep on each side spins as long as these would end in sleeps forever. So a spin is longer if
 * the last one was not in vain, and now and then.
 */
static bool spin(const _Atomic uint32_t *bell, uint32_t seen, int64_t spin_ns)
{
    for (int64_t until = dsc_comm_now_ns() + spin_ns; dsc_comm_now_ns() < until;)
        for (int32_t i = 0; i < 16; i++) {
            if (atomic_load_explicit(bell, memory_order_acquire) != seen)
                return true;
            dsc_comm_relax();
        }
    return false;
}

static void sleep_until_rung(struct dsc_comm_transfer *transfer, _Atomic uint32_t *bell, uint32_t seen)
{
    struct dsc_comm *comm = transfer->request.comm;
    _Atomic int32_t *sleepers = &dsc_comm_control_of(comm->segment)->sleepers[transfer->peer];
    int64_t left_ns = transfer->request.deadline_ns - dsc_comm_now_ns();
    struct timespec slice = {.tv_nsec = (long)(left_ns < SLICE_NS ? (left_ns > 0 ? left_ns : 1) : SLICE_NS)};

    atomic_fetch_add(sleepers, 1);
    if (atomic_load(bell) == seen)
        (void)syscall(SYS_futex, bell, FUTEX_WAIT, seen, &slice, NULL, 0);
    atomic_fetch_sub(sleepers, 1);
}

/*
 * Returns when there may be news of the transfer since its peer's bell was seen. The caller holds the mutex, which is
 * released meanwhile. Spins, and then sleeps; only sleeps if the last wait has slept. Whether it has slept.
 */
static bool wait_for_news(struct dsc_comm_transfer *transfer, uint32_t seen, bool has_slept)
{
    struct dsc_comm *comm = transfer->request.comm;
    struct dsc_comm_mail *mail = &comm->mail;
    _Atomic uint32_t *bell = bell_of(comm, transfer->peer, comm->rank);

    if (!has_slept) {
        bool is_long = mail->n_vain % VAIN_PERIOD == 0;

        go_outside(mail);
        bool is_rung = spin(bell, seen, is_long ? LONG_SPIN * comm->spin_ns : comm->spin_ns);
        come_back(mail);
        mail->n_vain = is_rung ? 0 : mail->n_vain + 1;
        if (is_rung || !mail->is_open)
            return false;
    }
    look_around(transfer, has_slept);
    if (dsc_comm_check(comm) != DSC_OK || transfer->has_arrived ||
        atomic_load_explicit(&transfer->request.is_done, memory_order_relaxed))
        return false;
    go_outside(mail);
    sleep_until_rung(transfer, bell, seen);
    come_back(mail);
    return true;
}

bool dsc_comm_message_finish(struct dsc_comm_request *request, bool (*stops)(void *), void *context)
{
    struct dsc_comm_transfer *transfer = (struct dsc_comm_transfer *)(void *)request;
    struct dsc_comm *comm = request->comm;
    struct dsc_comm_mail *mail = &comm->mail;
    bool goes_on = true;
    bool has_slept = false;

    if (atomic_load_explicit(&request->is_done, memory_order_acquire))
        return true;
    pthread_mutex_lock(&mail->mutex);
    if (request->deadline_ns == 0)
        request->deadline_ns = dsc_comm_now_ns() + comm->timeout_ns;
    while (goes_on) {
        /* Before settle, so that later news are not missed. */
        uint32_t seen = mail->is_open ? atomic_load(bell_of(comm, transfer->peer, comm->rank)) : 0;

        if (settle(transfer))
            break;
        if (has_slept && stops != NULL) {
            pthread_mutex_unlock(&mail->mutex);
            goes_on = !stops(context);
            pthread_mutex_lock(&mail->mutex);
        }
        if (!goes_on || atomic_load_explicit(&request->is_done, memory_order_relaxed))
            break;
        if (mail->is_open && !transfer->is_copying)
            has_slept = wait_for_news(transfer, seen, has_slept);
        else /* another thread ends it */
            pthread_cond_wait(&mail->has_changed, &mail->mutex);
    }
    goes_on = goes_on || atomic_load_explicit(&request->is_done, memory_order_relaxed);
    pthread_mutex_unlock(&mail->mutex);
    return goes_on;
}

bool dsc_comm_message_advance(struct dsc_comm_request *request)
{
    struct dsc_comm_mail *mail = &request->comm->mail;

    pthread_mutex_lock(&mail->mutex);
    bool is_done = settle((struct dsc_comm_transfer *)(void *)request);
    pthread_mutex_unlock(&mail->mutex);
    return is_done;
}

void dsc_comm_mail_stop(struct dsc_comm *comm)
{
    struct dsc_comm_mail *mail = &comm->mail;

    pthread_mutex_lock(&mail->mutex);
    mail->is_open = false;
    while (mail->n_outside > 0)
        pthread_cond_wait(&mail->has_changed, &mail->mutex);
    end_all(comm, DSC_ESTATE);
    for (int32_t rank = 0; rank < comm->n_ranks; rank++) {
        struct dsc_comm_pair *pair = &comm->mail.pairs[rank];

        /* The receivers may still read these blocks. */
        for (struct dsc_comm_outgoing *outgoing; (outgoing = pair->outgoing) != NULL;) {
            pair->outgoing = outgoing->next;
            if (outgoing->block != NULL)
                dsc_comm_block_abandon(outgoing->block);
            free(outgoing);
        }
        for (struct dsc_comm_arrival *arrival; (arrival = pair->arrivals) != NULL;) {
            pair->arrivals = arrival->next;
            free(arrival);
        }
    }
    for (size_t i = 0; i < sizeof mail->kept / sizeof *mail->kept; i++)
        dsc_comm_block_destroy(mail->kept[i]);
    memset(mail->kept, 0, sizeof mail->kept);
    pthread_mutex_unlock(&mail->mutex);
}

/* Submission. */

static dsc_status check_peer(const struct dsc_comm *comm, int32_t peer, const char *name)
{
    if (peer < 0 || peer >= comm->n_ranks || peer == comm->rank)
        return dsc_fail(DSC_EINVAL, "%s is %d, must be another one of %d ranks than %d", name, (int)peer,
                        (int)comm->n_ranks, (int)comm->rank);
    return DSC_OK;
}

static dsc_status check_message(const struct dsc_comm *comm, int32_t peer, const char *name,
                                const struct dsc_comm_message *message)
{
    DSC_TRY(check_peer(comm, peer, name));
    if (dsc_comm_type_bytes(message->type) == 0)
        return dsc_fail(DSC_EINVAL, "type is %d, which is no element type", (int)message->type);
    if (message->n_dims < 0 || message->n_dims > DSC_COMM_MAX_DIMS)
        return dsc_fail(DSC_EINVAL, "n_dims is %d, must be 0 to %d", (int)message->n_dims, DSC_COMM_MAX_DIMS);
    for (int32_t i = 0; i < message->n_dims; i++)
        if (message->shape[i] < 0)
            return dsc_fail(DSC_EINVAL, "shape[%d] is %" PRId64 ", must not be negative", (int)i, message->shape[i]);

    int64_t n_bytes = bytes_of((int32_t)message->type, message->n_dims, message->shape);

    if (n_bytes < 0)
        return dsc_fail(DSC_EINVAL, "shape has more elements than memory can hold");
    if (message->data == NULL && n_bytes > 0)
        return dsc_fail(DSC_EINVAL, "data is NULL for %" PRId64 " bytes", n_bytes);
    return DSC_OK;
}

static void describe(struct dsc_comm_note *note, const struct dsc_comm_message *message)
{
    const char *label = message->label != NULL ? message->label : "";

    note->offset = -1;
    note->place = -1;
    note->tag = message->tag;
    note->type = (int32_t)message->type;
    note->n_dims = message->n_dims;
    memcpy(note->shape, message->shape, (size_t)message->n_dims * sizeof *note->shape);
    note->label_hash = dsc_comm_hash_of(label);
    /* Sentences are cut anywhere, so they have no characters of several bytes. */
    for (size_t i = 0; i + 1 < sizeof note->label && label[i] != '\0'; i++)
        note->label[i] = (char)((unsigned char)label[i] < 128 ? label[i] : '?');
}

/* Puts the data of a send where the receiver can read it, if it does not fit the notice. */
static dsc_status show_data(struct dsc_comm *comm, struct dsc_comm_transfer *send)
{
    struct dsc_comm_outgoing *outgoing;
    const void *shown = send->data;

    if (send->n_bytes <= DSC_COMM_INLINE_BYTES)
        return DSC_OK;
    if ((outgoing = calloc(1, sizeof *outgoing)) == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a message");
    send->outgoing = outgoing;
    if (!dsc_comm_owns(comm, send->data, send->n_bytes)) {
        pthread_mutex_lock(&comm->mail.mutex);
        outgoing->block = find_kept(&comm->mail, send->n_bytes);
        pthread_mutex_unlock(&comm->mail.mutex);
        if (outgoing->block == NULL)
            DSC_TRY(dsc_comm_block_create(comm, send->n_bytes, &outgoing->block));
        memcpy(dsc_comm_block_data(outgoing->block), send->data, (size_t)send->n_bytes);
        shown = dsc_comm_block_data(outgoing->block);
        send->note.is_kept = 1;
    }
    send->note.offset = (int64_t)((uintptr_t)shown - comm->arena_begin) + DSC_COMM_AT_ARENA;
    return DSC_OK;
}

/* With the mutex. Mailboxes take memory from the first message on. */
static dsc_status commit_mailboxes(struct dsc_comm *comm)
{
    if (comm->mail.has_mailboxes)
        return DSC_OK;
    DSC_TRY(dsc_comm_segment_commit(comm->segment, DSC_COMM_AT_MAILBOXES,
                                    comm->n_ranks * (int64_t)sizeof(struct dsc_comm_mailbox), "mailboxes"));
    comm->mail.has_mailboxes = true;
    return DSC_OK;
}

/* With the mutex. Gives a request the message that has arrived before it. */
static void deliver_arrival(struct dsc_comm *comm, struct dsc_comm_transfer *receive)
{
    struct dsc_comm_arrival **at = &comm->mail.pairs[receive->peer].arrivals;

    while (*at != NULL && (*at)->note.tag != receive->note.tag)
        at = &(*at)->next;

    struct dsc_comm_arrival *arrival = *at;

    if (arrival == NULL)
        return;
    *at = arrival->next;
    deliver(comm, receive->peer, receive, &arrival->note, arrival->data);
    free(arrival);
}

/* With the mutex. */
static dsc_status check_open(const struct dsc_comm *comm)
{
    if (atomic_load_explicit(&comm->is_closing, memory_order_acquire))
        return dsc_fail(DSC_ESTATE, "the end has been closed");
    if (!comm->mail.is_open)
        return dsc_fail(DSC_ESTATE, "the end is not attached to the other ranks");
    return DSC_OK;
}

/* With the mutex. */
static dsc_status enqueue(struct dsc_comm *comm, struct dsc_comm_transfer *transfer)
{
    struct dsc_comm_pair *pair = &comm->mail.pairs[transfer->peer];

    DSC_TRY(check_open(comm));
    if (transfer->sends) /* it may be done at once, and then nobody waits for it */
        break_if_failed(transfer);
    DSC_TRY(dsc_comm_check(comm));
    DSC_TRY(commit_mailboxes(comm));
    append_to(transfer->sends ? &pair->sends : &pair->receives, transfer);
    if (!transfer->sends)
        deliver_arrival(comm, transfer);
    advance(comm);
    return DSC_OK;
}

dsc_status dsc_comm_has_message(dsc_comm *comm, int32_t src, int32_t tag, bool *out_has)
{
    if (comm == NULL || out_has == NULL)
        return dsc_fail(DSC_EINVAL, "%s is NULL", comm == NULL ? "comm" : "out_has");
    DSC_TRY(dsc_process_check(&comm->process, "this end of shared memory"));
    DSC_TRY(check_peer(comm, src, "src"));
    pthread_mutex_lock(&comm->mail.mutex);

    dsc_status status = check_open(comm);
    const struct dsc_comm_arrival *arrival = NULL;

    if (status == DSC_OK) {
        advance(comm);
        arrival = comm->mail.pairs[src].arrivals;
    }
    while (arrival != NULL && arrival->note.tag != tag)
        arrival = arrival->next;
    /* A message may have come before its sender broke. */
    if (status == DSC_OK && arrival == NULL)
        status = dsc_comm_check(comm);
    pthread_mutex_unlock(&comm->mail.mutex);
    *out_has = arrival != NULL;
    return status;
}

static dsc_status submit(struct dsc_comm *comm, int32_t peer, bool sends, const struct dsc_comm_message *message,
                         struct dsc_comm_request **out_request)
{
    DSC_TRY(dsc_process_check(&comm->process, "this end of shared memory"));
    DSC_TRY(check_message(comm, peer, sends ? "dst" : "src", message));

    struct dsc_comm_transfer *transfer = calloc(1, sizeof *transfer);

    if (transfer == NULL)
        return dsc_fail(DSC_ENOMEM, "no memory for a request");
    transfer->request.comm = comm;
    transfer->request.is_message = true;
    transfer->peer = peer;
    transfer->sends = sends;
    transfer->data = message->data;
    transfer->n_bytes = bytes_of((int32_t)message->type, message->n_dims, message->shape);
    describe(&transfer->note, message);

    dsc_status status = sends ? show_data(comm, transfer) : DSC_OK;

    if (status == DSC_OK) {
        pthread_mutex_lock(&comm->mail.mutex);
        status = enqueue(comm, transfer);
        pthread_mutex_unlock(&comm->mail.mutex);
    }
    if (status != DSC_OK) {
        free_outgoing(transfer->outgoing);
        free(transfer);
        return status;
    }
    *out_request = &transfer->request;
    return DSC_OK;
}

dsc_status dsc_comm_send(dsc_comm *comm, int32_t dst, const struct dsc_comm_message *message,
                         dsc_comm_request **out_request)
{
    return submit(comm, dst, true, message, out_request);
}

dsc_status dsc_comm_receive(dsc_comm *comm, int32_t src, const struct dsc_comm_message *message,
                            dsc_comm_request **out_request)
{
    return submit(comm, src, false, message, out_request);
}
