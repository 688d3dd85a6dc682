/*
 * The backend "fault", for tests: transfers that fail, come back short, late and out of order, on a plan that a seed
 * makes repeatable. A test program includes aio/fault.c once, plugs the backend in (dsc_aio_plug_backend), sets a plan,
 * and asks for the backend by name wherever an engine is made; libdsc.a does not contain it. tests/aio_faults.py is the
 * same for Python.
 */
#ifndef DSC_AIO_FAULT_H
#define DSC_AIO_FAULT_H

#include "aio/backend.h"

/* Chances are out of 256. With all fields 0 the backend has no faults. */
struct dsc_aio_fault_plan {
    uint64_t seed;
    int32_t short_chance;   /* a transfer moves fewer bytes than asked, at least one */
    int32_t passing_chance; /* a transfer moves nothing and fails with EINTR, EAGAIN or EBUSY */
    int32_t failure_chance; /* a transfer moves some bytes or none, and fails with failure_err */
    int32_t failure_err;    /* 0: EIO */
    int32_t late_chance;    /* a reap without wait finds nothing, and a reap with wait finds one result */
    int32_t refusal_chance; /* submit takes nothing and says EAGAIN */
    bool reorders;          /* transfers happen and results come in any order; otherwise in order of submission */
    bool takes_part;        /* submit takes a part of its ops */
    bool refuses_direct;    /* every transfer on an O_DIRECT descriptor fails with EINVAL, as on file systems that
                               refuse only there */
    bool pretends;          /* nothing is moved; every transfer is whole */
    int32_t flip_chance; /* a read succeeds with one bit wrong: a disk that lies. The bit may lie outside the request,
                            in a page that was read for its neighbours */
    int32_t delay_us;    /* every reap that waits takes this much longer */
    int64_t
        bad_begin; /* transfers that touch bytes bad_begin to bad_end - 1 of a file fail with bad_err: a bad sector */
    int64_t bad_end;
    int32_t bad_err;    /* 0: EIO */
    int64_t full_at;    /* > 0: a write that goes past this offset is cut there, a write that begins there is ENOSPC: a
                           full disk */
    int64_t dies_after; /* > 0: after so many results, reap fails with EBADF for good */
};

extern const struct dsc_aio_backend dsc_aio_backend_fault;

struct dsc_aio_fault_counts {
    int64_t n_transfers;
    int64_t n_short;
    int64_t n_passing;
    int64_t n_failures; /* by chance, sector or full disk */
    int64_t n_flipped;
};

/* Sets the plan for engines that this thread makes from now on, and resets the counts to 0. */
void dsc_aio_fault_set(const struct dsc_aio_fault_plan *plan);

/* Counts of all engines that this thread has made since dsc_aio_fault_set. */
struct dsc_aio_fault_counts dsc_aio_fault_counts(void);

#endif
