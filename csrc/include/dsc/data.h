/*
 * The samples of a training step: which sample comes at which position of an epoch, which positions a rank reads, and
 * how difficult samples may be at a step. All three are functions of a few integers, so a run goes on from a saved
 * position at once, on any number of ranks.
 */
#ifndef DSC_DATA_H
#define DSC_DATA_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 16 rounds pass the test of uniformity for a few samples, the hardest case; 12 do not. */
#define DSC_ORDER_ROUNDS 24

/*
 * A pseudo-random order of n samples, without an array: position -> sample.
 *
 * A balanced Feistel network permutes the numbers of as many bits as n - 1 has, and is applied again until the number
 * is below n (cycle walking: Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002; Mitchell et
 * al., Bandwidth-optimal random shuffling for GPUs, 2022). Less than two applications are expected.
 */
struct dsc_order {
    int64_t n_samples;
    int32_t low_bits;
    int32_t high_bits; /* 0 for one and two samples */
    uint64_t keys[DSC_ORDER_ROUNDS];
};

/* n_samples >= 0. The order of each epoch is another; seeds that differ give orders that are independent. */
DSC_API dsc_status dsc_order_init(struct dsc_order *order, int64_t n_samples, uint64_t seed, uint64_t epoch);

/* The samples at n positions: samples[i] is the one at positions[i], 0 <= positions[i] < n_samples. May be in place. */
DSC_API dsc_status dsc_order_at(const struct dsc_order *order, int64_t n, const int64_t *positions, int64_t *samples);

/*
 * The shares of an epoch of n_samples positions. A round is what all ranks read at once: n_ranks * batch positions
 * after one another, dealt out to the ranks in turn, `run` positions at a time. So a training step of the same total
 * batch reads the same positions for any number of ranks, batch and accumulation. A run of 1 deals as torch's
 * DistributedSampler does. With a run of `batch` a rank has `batch` neighbouring positions, and batch k of an epoch is
 * batch k on any number of ranks: of rank k % n_ranks in round k / n_ranks.
 *
 * The last round may be shorter. With drop_last it is left out. Otherwise positions from the beginning of the epoch
 * fill it up to equal shares of whole runs: at most n_ranks * run - 1, some of them twice if the epoch is shorter.
 */
struct dsc_shares {
    int64_t n_samples;
    int64_t n_ranks; /* >= 1 */
    int64_t batch;   /* >= 1: positions of a rank in a round */
    int64_t run;     /* a divisor of batch: neighbouring positions that are dealt at a time */
    bool drop_last;
};

/* Rounds from a position (0 <= position) to the end of the epoch. */
DSC_API dsc_status dsc_shares_rounds(const struct dsc_shares *shares, int64_t position, int64_t *out_n_rounds);

/*
 * The positions that `rank` reads in the round that begins at `position`: writes up to `batch` positions, and the
 * position at which the next round begins (n_samples at the end of the epoch). *out_n is 0 if no round begins there.
 */
DSC_API dsc_status dsc_shares_round(const struct dsc_shares *shares, int64_t position, int64_t rank,
                                    int64_t *out_positions, int64_t *out_n, int64_t *out_next);

/*
 * The n samples of a step, from n_pools >= 1 pools of sizes[i] >= 1 samples: sample i is number out_indices[i] of pool
 * out_pools[i]. A pool is chosen with the probability of its share of all samples, and its samples come in an order of
 * its own, each once before the first one again. cursors[i], how many samples of a pool were drawn, is moved on.
 * `step` is hashed with the seed, so that the pools of a step depend on nothing else. One pool of all samples is
 * dsc_order of epoch after epoch, with another seed.
 */
DSC_API dsc_status dsc_draw(int64_t n_pools, const int64_t *sizes, int64_t *cursors, uint64_t seed, uint64_t step,
                            int64_t n, int64_t *out_pools, int64_t *out_indices);

typedef enum dsc_curriculum_kind {
    DSC_CURRICULUM_ROOT = 0,     /* fixed_root; fixed_linear is degree 1 */
    DSC_CURRICULUM_DISCRETE = 1, /* fixed_discrete */
    DSC_CURRICULUM_COUNT = 2
} dsc_curriculum_kind;

/*
 * The difficulty of a step, DeepSpeed's schedules:
 *
 *   root      floor(min + (max - min) * (step / n_steps)^(1 / degree)), down to a multiple of `multiple`, at least min
 *             and at most max. A max that is no multiple comes after n_steps, where the formula goes on.
 *   discrete  difficulties[i] for the first i with step <= last_steps[i], after the last one difficulties[n_steps]
 */
struct dsc_curriculum {
    dsc_curriculum_kind kind;
    int64_t min;
    int64_t max;
    int64_t n_steps;             /* >= 1: steps up to the last multiple; discrete: of last_steps */
    int64_t multiple;            /* root, >= 1 */
    double degree;               /* root, > 0 */
    const int64_t *difficulties; /* discrete: n_steps + 1, ascending; borrowed */
    const int64_t *last_steps;   /* discrete: n_steps, ascending; borrowed */
};

/* Refuses a schedule that goes down, and numbers out of range. */
DSC_API dsc_status dsc_curriculum_check(const struct dsc_curriculum *curriculum);

/* The difficulty of a step >= 0, of a schedule that was checked. */
DSC_API int64_t dsc_curriculum_at(const struct dsc_curriculum *curriculum, int64_t step);

#ifdef __cplusplus
}
#endif
#endif
