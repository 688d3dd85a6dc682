/*
 * The layer below the checkpoint format: checksums, plans that put together parts of a tensor from saved pieces, parts
 * of a tensor in a file, an atomic swap of names, and files with a checksum for each block that are written and read at
 * the disk's speed.
 */
#ifndef DSC_CKPT_H
#define DSC_CKPT_H

#include "dsc/status.h"
#include "dsc/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * CRC32C (Castagnoli; RFC 3720, appendix B.4) of n_bytes at data, continuing from crc. Pass 0 for the first bytes, and
 * the result for all earlier bytes after that. "123456789" gives 0xe3069283. Computed by the processor's CRC
 * instruction if there is one, and by tables otherwise; the value is the same.
 */
DSC_API uint32_t dsc_crc32c(uint32_t crc, const void *data, size_t n_bytes);

/* Copies from to into and computes the checksum in the same pass over memory. The two buffers must not overlap. */
DSC_API uint32_t dsc_crc32c_copy(uint32_t crc, void *into, const void *from, size_t n_bytes);

/* The most dimensions of a tensor, torch's limit. */
#define DSC_RESHAPE_MAX_DIMS 64

/*
 * Elements [src_elem, src_elem + n_elems) of a stored piece are elements [dst_elem, dst_elem + n_elems) of the wanted
 * part.
 */
struct dsc_reshape_run {
    int64_t piece;
    int64_t src_elem;
    int64_t dst_elem;
    int64_t n_elems; /* > 0 */
};

/* A part of a tensor (row-major, elem_bytes (> 0) an element), for dsc_crc32c_parts. All pointers are borrowed. */
struct dsc_crc32c_part {
    const int64_t *shape;
    const int64_t *part; /* as in dsc_reshape_plan */
    const void *data;    /* the part's elements, one after another */
    int64_t elem_bytes;
    int64_t first_chunk; /* for the call's own use */
    int32_t n_dims;
    uint32_t sum; /* out: the part's contribution */
};

/*
 * The contribution of each part to the CRC32C of the whole tensor that it is a part of.
 * CRCs are linear: the XOR over parts that hold each element once is the same however the tensor is cut, and
 * dsc_crc32c_of_parts makes the CRC32C of it. So ranks compare a tensor that none of them holds.
 *
 * par (may be NULL) shares one pass over the bytes of all parts, so many short parts take no longer than a long one.
 * sum is 0 for a part without elements.
 *
 * DSC_EINVAL names the part that does not fit the shape, elem_bytes, or data that is NULL; DSC_EOVERFLOW when the bytes
 * of a tensor do not fit int64_t. No sum is touched on failure.
 */
DSC_API dsc_status dsc_crc32c_parts(struct dsc_crc32c_part *parts, int64_t n_parts, const struct dsc_par *par);

/* The CRC32C (as dsc_crc32c(0, ...)) of n_bytes whose parts contribute `sum` together, by XOR. */
DSC_API uint32_t dsc_crc32c_of_parts(uint32_t sum, uint64_t n_bytes);

/*
 * Plans how a part of a tensor of shape[n_dims] is put together from the pieces that it was saved in.
 *
 * A part is 2 * n_dims + 2 numbers: start[n_dims], size[n_dims], begin, n_elems. It means the elements [begin, begin +
 * n_elems), in row-major order, of the box [start[d], start[d] + size[d]) along each dimension d. pieces is an array of
 * n_pieces parts, and the elements of each are stored one after another; wanted is one part. Where pieces overlap, the
 * piece with the lowest index is used.
 *
 * First call with out_runs NULL: *out_n_runs is the number of entries that the array needs, work space included (up to
 * three times the runs of the plan). Then call with an array of capacity entries: it receives the *out_n_runs runs of
 * the plan, sorted by piece and then by src_elem. The plan has as few runs as possible, and each wanted element lies in
 * exactly one run. The rest of the array is scratch.
 *
 * DSC_EINVAL names the part that does not fit the shape, or the first wanted element that no piece holds; DSC_EOVERFLOW
 * when the tensor's elements (or the entries needed) do not fit int64_t. *out_n_runs is untouched on failure. Time is
 * O(pieces) for whole boxes and cuts along the first dimension, O(runs log runs) otherwise.
 */
DSC_API dsc_status dsc_reshape_plan(const int64_t *shape, int32_t n_dims, const int64_t *pieces, int64_t n_pieces,
                                    const int64_t *wanted, int64_t capacity, struct dsc_reshape_run *out_runs,
                                    int64_t *out_n_runs);

/* A read of a file that failed: bytes [begin, end) were to be read. */
struct dsc_read_failure {
    int64_t begin;
    int64_t end;
    int64_t at; /* the first byte that could not be read, or the end of the file */
    int err;    /* errno; 0 if the file ends before */
};

/*
 * Reads a part of a tensor of shape[n_dims] from a file that has the whole tensor from byte offset on: row-major,
 * elem_bytes (> 0) an element. wanted is a part as in dsc_reshape_plan; its elements are put one after another into
 * `into`. Runs that lie near one another are read at once and copied from there (64 KiB on the stack), others are read
 * in place. An interrupted read goes on.
 *
 * DSC_EINVAL and DSC_EOVERFLOW as dsc_reshape_plan; DSC_ECORRUPT if the file ends before the part does; DSC_EIO if it
 * cannot be read. *out_failure (may be NULL) is set for the last two. A part of `into` may have been written then.
 */
DSC_API dsc_status dsc_part_read(int fd, int64_t offset, int64_t elem_bytes, const int64_t *shape, int32_t n_dims,
                                 const int64_t *wanted, void *into, struct dsc_read_failure *out_failure);

/*
 * Swaps the files or folders of two names, atomically: any process sees both before or both after. Returns 0 or -errno.
 * -ENOSYS, -EINVAL and -ENOTSUP mean that the kernel or the file system cannot swap names. -EINVAL also means that one
 * path lies inside the other.
 */
DSC_API int dsc_exchange_paths(const char *a, const char *b);

/*
 * A *block file* is a file with one CRC32C for each block of block_bytes (the last block may be shorter). The checksums
 * are kept outside the file. It is written and read through a ring of buffers and an I/O engine (dsc/aio.h), so that
 * the disk, the checksums and the copies go on at the same time.
 */
struct dsc_block_config {
    uint32_t size;       /* sizeof(struct dsc_block_config) */
    size_t block_bytes;  /* 1 to 1 GiB: the bytes under one checksum. Multiples of dsc_aio_alignment() go to the disk as
                            they are */
    const char *backend; /* of dsc_aio_config */
    size_t buffer_bytes; /* 1 to 1 GiB, rounded up to dsc_aio_alignment() (a reader: to whole blocks): the largest
                            request */
    int32_t n_buffers;   /* 2 to 1024. The ring takes n_buffers * buffer_bytes of memory */
};

#define DSC_BLOCK_CONFIG_INIT                                                        \
    {                                                                                \
        sizeof(struct dsc_block_config), (size_t)256 << 10, NULL, (size_t)2 << 20, 4 \
    }

/* Writes one file, from its beginning to its end. For one thread at a time. */
typedef struct dsc_block_writer dsc_block_writer;

/*
 * Creates path, which must not exist (mode 0666 less the umask). DSC_EINVAL names the bad field; DSC_ENOTFOUND or
 * DSC_ENOTSUP: the backend, and no file has been created; DSC_ENOMEM; DSC_EIO: dsc_aio_last_failure has the errno.
 */
DSC_API dsc_status dsc_block_writer_create(const char *path, const struct dsc_block_config *config,
                                           dsc_block_writer **out_writer);

/*
 * Appends n_bytes, which are borrowed for the call. DSC_EIO (dsc_aio_last_failure has the errno) and DSC_ENOMEM may
 * concern data of earlier calls. Every call is DSC_ESTATE after such a failure, after finish, and in a child forked
 * from the process that created the writer.
 */
DSC_API dsc_status dsc_block_writer_write(dsc_block_writer *writer, const void *data, size_t n_bytes);

/* Bytes appended so far. */
DSC_API int64_t dsc_block_writer_bytes(const dsc_block_writer *writer);

/*
 * Writes the rest, syncs the file and closes it. *out_crcs gets the checksums of all *out_n_blocks blocks, in order.
 * They are borrowed until destroy. Fails as write does. Syncs the file, not its folder.
 */
DSC_API dsc_status dsc_block_writer_finish(dsc_block_writer *writer, const uint32_t **out_crcs, int64_t *out_n_blocks);

/*
 * Waits for transfers in flight, then closes and frees. A file that has not been finished stays behind incomplete. NULL
 * is allowed. Does nothing in a forked process, because engine and file belong to the parent.
 */
DSC_API void dsc_block_writer_destroy(dsc_block_writer *writer);

/* A range to read: n_bytes from offset of the file to into. */
struct dsc_block_copy {
    int64_t offset;
    int64_t n_bytes;
    void *into;
};

/* The known length and checksums of a file to read. */
struct dsc_block_file {
    const char *path;
    int64_t n_bytes;      /* its length */
    const uint32_t *crcs; /* one for each block, in order; NULL: nothing is checked */
    int64_t n_crcs;       /* the number of blocks; 0 with NULL */
};

/*
 * Sorts copies by offset and makes them; they may overlap in the file. Each block that a copy touches is read once and
 * whole, checked, and then copied from. No other block is read. *out_n_bytes_read (may be NULL): bytes read from the
 * file. With nothing to copy, the file is not opened.
 *
 * DSC_EINVAL names a copy that does not lie in the file, a bad field, or n_crcs; DSC_EIO as above; DSC_ECORRUPT if the
 * file's length is not n_bytes (*out_bad_block is -1) or a block does not match its checksum (*out_bad_block is its
 * index). Nothing of a bad block has been copied, but earlier blocks may have been.
 */
DSC_API dsc_status dsc_blocks_read(const struct dsc_block_file *file, const struct dsc_block_config *config,
                                   struct dsc_block_copy *copies, int64_t n_copies, int64_t *out_n_bytes_read,
                                   int64_t *out_bad_block);

/*
 * Reads the whole file and lists the blocks that do not match their checksums, ascending, in out_bad, which has n_crcs
 * entries. crcs may be NULL only for an empty file. Fails as dsc_blocks_read does, except that a bad block is a result
 * here and not a failure.
 */
DSC_API dsc_status dsc_blocks_verify(const struct dsc_block_file *file, const struct dsc_block_config *config,
                                     int64_t *out_bad, int64_t *out_n_bad);

#ifdef __cplusplus
}
#endif
#endif
