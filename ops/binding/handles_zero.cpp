/* The ZeRO planners as Python objects: a layout, a bucket tracker, and two functions. Integers in, integers out. */
#include "handles.h"

#include "dsc/zero.h"
#include "status.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace {

using Ints = std::vector<int64_t>;

int64_t count_of(const Ints &ints)
{
    return static_cast<int64_t>(ints.size());
}

class ZeroLayout {
  public:
    ZeroLayout(Ints sizes, int32_t n_ranks, int64_t bucket_elems, int64_t align_elems)
        : sizes(std::move(sizes)), n_ranks(n_ranks), bucket_of(this->sizes.size()), offsets(this->sizes.size()),
          bucket_begin(this->sizes.size()), slice_elems(this->sizes.size())
    {
        int64_t n_buckets = 0;

        dsc::check(dsc_layout_plan(this->sizes.data(), count_of(this->sizes), n_ranks, bucket_elems, align_elems, count_of(bucket_begin),
                                   bucket_of.data(), offsets.data(), bucket_begin.data(), slice_elems.data(), &n_buckets, &flat_elems),
                   "ZeroLayout");
        bucket_begin.resize(static_cast<size_t>(n_buckets));
        slice_elems.resize(static_cast<size_t>(n_buckets));
        for (const int64_t elems : slice_elems) {
            shard_offset.push_back(shard_elems);
            shard_elems += elems;
        }
    }

    using Fragment = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

    std::vector<Fragment> fragments(int32_t rank) const
    {
        std::vector<struct dsc_fragment> found(sizes.size());
        std::vector<Fragment> result;
        int64_t n = 0;

        /* A NULL array asks for the count only, so an empty one must not look like that. */
        if (found.empty())
            found.resize(1);
        dsc::check(dsc_shard_fragments(sizes.data(), count_of(sizes), bucket_of.data(), offsets.data(), bucket_begin.data(),
                                       slice_elems.data(), count_of(bucket_begin), n_ranks, rank, static_cast<int64_t>(found.size()),
                                       found.data(), &n),
                   "ZeroLayout.fragments");
        result.reserve(static_cast<size_t>(n));
        for (int64_t i = 0; i < n; i++) {
            const struct dsc_fragment &f = found[static_cast<size_t>(i)];

            result.emplace_back(f.param, f.param_begin_elems, f.flat_begin_elems, f.shard_begin_elems, f.n_elems);
        }
        return result;
    }

    Ints sizes;
    int32_t n_ranks;
    Ints bucket_of;
    Ints offsets;
    Ints bucket_begin;
    Ints slice_elems;
    Ints shard_offset;
    int64_t shard_elems = 0;
    int64_t flat_elems = 0;
};

/* Owns the arrays that the core keeps pointers into, so it can be neither copied nor moved. */
class BucketTracker {
  public:
    BucketTracker(Ints bucket_of, int64_t n_buckets) : bucket_of_(std::move(bucket_of)), is_marked_(bucket_of_.size())
    {
        if (n_buckets < 0)
            dsc::fail(DSC_EINVAL, "BucketTracker: n_buckets is " + std::to_string(n_buckets) + ", must not be negative");
        pending_.resize(static_cast<size_t>(n_buckets));
        dsc::check(dsc_bucket_tracker_init(&tracker_, bucket_of_.data(), count_of(bucket_of_), n_buckets, pending_.data(),
                                           is_marked_.data()),
                   "BucketTracker");
    }
    BucketTracker(const BucketTracker &) = delete;
    BucketTracker &operator=(const BucketTracker &) = delete;

    bool mark(int64_t param)
    {
        bool is_late = false;

        dsc::check(dsc_bucket_tracker_mark(&tracker_, param, &is_late), "BucketTracker.mark");
        return is_late;
    }

    int64_t next(bool force) { return dsc_bucket_tracker_next(&tracker_, force); }
    void reset() { dsc_bucket_tracker_reset(&tracker_); }

  private:
    Ints bucket_of_;
    Ints pending_;
    std::vector<uint8_t> is_marked_;
    struct dsc_bucket_tracker tracker_{};
};

std::tuple<int64_t, int64_t> shard_range(int64_t n_elems, int32_t n_ranks, int32_t rank)
{
    int64_t begin = 0;
    int64_t end = 0;

    dsc::check(dsc_shard_range_of(n_elems, n_ranks, rank, &begin, &end), "shard_range");
    return {begin, end};
}

int32_t shard_owner(int64_t n_elems, int32_t n_ranks, int64_t element)
{
    int32_t rank = 0;

    dsc::check(dsc_shard_owner_of(n_elems, n_ranks, element, &rank), "shard_owner");
    return rank;
}

std::vector<int32_t> balance(const Ints &costs, int32_t n_ranks)
{
    std::vector<int32_t> rank_of(costs.size());
    Ints scratch;

    if (n_ranks > 0)
        scratch.resize(costs.size() + static_cast<size_t>(n_ranks));
    dsc::check(dsc_balance_assign(costs.data(), count_of(costs), n_ranks, scratch.data(), rank_of.data()), "balance");
    return rank_of;
}

}  // namespace

void dsc::bind_zero(py::module_ &m)
{
    py::class_<ZeroLayout>(m, "ZeroLayout",
                           "Where each parameter of a unit lies in its flat buffer, the buckets it is cut into and each rank's shard "
                           "(dsc/zero.h). All numbers are elements. Raises ValueError naming the bad entry.")
        .def(py::init<Ints, int32_t, int64_t, int64_t>(), py::arg("sizes"), py::arg("n_ranks"), py::arg("bucket_elems"),
             py::arg("align_elems"))
        .def_readonly("sizes", &ZeroLayout::sizes)
        .def_readonly("n_ranks", &ZeroLayout::n_ranks)
        .def_property_readonly("n_buckets", [](const ZeroLayout &self) { return self.bucket_begin.size(); })
        .def_readonly("flat_elems", &ZeroLayout::flat_elems, "Length of the flat buffer, padding included.")
        .def_readonly("bucket_of", &ZeroLayout::bucket_of, "Bucket of each parameter.")
        .def_readonly("offsets", &ZeroLayout::offsets, "First element of each parameter within the flat buffer.")
        .def_readonly("bucket_begin", &ZeroLayout::bucket_begin, "First element of each bucket within the flat buffer.")
        .def_readonly("slice_elems", &ZeroLayout::slice_elems, "Length of one rank's slice of each bucket.")
        .def_readonly("shard_elems", &ZeroLayout::shard_elems, "Length of one rank's shard: the sum of slice_elems.")
        .def_readonly("shard_offset", &ZeroLayout::shard_offset, "First element of each bucket's slice within a rank's shard.")
        .def("fragments", &ZeroLayout::fragments, py::arg("rank"),
             "The pieces of parameters that rank owns, as (param, param_begin, flat_begin, shard_begin, n_elems), by bucket and position.");
    py::class_<BucketTracker>(m, "BucketTracker",
                              "Which parameters of a step window are ready, and which bucket may be reduced next (dsc/zero.h).")
        .def(py::init<Ints, int64_t>(), py::arg("bucket_of"), py::arg("n_buckets"))
        .def("mark", &BucketTracker::mark, py::arg("param"),
             "Marks a parameter as ready. True when its bucket has been launched in this window already.")
        .def("next", &BucketTracker::next, py::arg("force") = false,
             "The next bucket that is due, counted as launched from now on; -1 when none is. force: missing members do not matter.")
        .def("reset", &BucketTracker::reset, "Begins a new window.");
    m.def("shard_range", &shard_range, py::arg("n_elems"), py::arg("n_ranks"), py::arg("rank"),
          "(begin, end) of rank's piece of n_elems split evenly without padding.");
    m.def("shard_owner", &shard_owner, py::arg("n_elems"), py::arg("n_ranks"), py::arg("element"),
          "The rank whose shard_range holds element.");
    m.def("balance", &balance, py::arg("costs"), py::arg("n_ranks"),
          "A rank for each item such that the largest sum of costs is small (longest first to the least loaded).");
}
