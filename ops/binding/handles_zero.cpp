/* The ZeRO planners as Python objects: a layout, a bucket tracker, and the even split. Integers in, integers out. */
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

        dsc::check(dsc_layout_plan(this->sizes.data(), count_of(this->sizes), n_ranks, bucket_elems, align_elems,
                                   count_of(bucket_begin), bucket_of.data(), offsets.data(), bucket_begin.data(),
                                   slice_elems.data(), &n_buckets, &flat_elems),
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
        dsc::check(dsc_shard_fragments(sizes.data(), count_of(sizes), bucket_of.data(), offsets.data(),
                                       bucket_begin.data(), slice_elems.data(), count_of(bucket_begin), n_ranks, rank,
                                       static_cast<int64_t>(found.size()), found.data(), &n),
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
            dsc::fail(DSC_EINVAL,
                      "BucketTracker: n_buckets is " + std::to_string(n_buckets) + ", must not be negative");
        pending_.resize(static_cast<size_t>(n_buckets));
        states_.resize(static_cast<size_t>(n_buckets));
        dsc::check(dsc_bucket_tracker_init(&tracker_, bucket_of_.data(), count_of(bucket_of_), n_buckets,
                                           pending_.data(), is_marked_.data(), states_.data()),
                   "BucketTracker");
    }
    BucketTracker(const BucketTracker &) = delete;
    BucketTracker &operator=(const BucketTracker &) = delete;

    int32_t mark(int64_t param)
    {
        int32_t time = 0;

        dsc::check(dsc_bucket_tracker_mark(&tracker_, param, &time), "BucketTracker.mark");
        return time;
    }

    int64_t next(int32_t due) { return dsc_bucket_tracker_next(&tracker_, due); }

    bool pass(int64_t bucket)
    {
        bool is_due = false;

        dsc::check(dsc_bucket_tracker_pass(&tracker_, bucket, &is_due), "BucketTracker.pass_turn");
        return is_due;
    }

    void set_waiting(int64_t bucket, bool waits)
    {
        dsc::check(dsc_bucket_tracker_set_waiting(&tracker_, bucket, waits), "BucketTracker.set_waiting");
    }

    void reset() { dsc_bucket_tracker_reset(&tracker_); }

  private:
    Ints bucket_of_;
    Ints pending_;
    std::vector<uint8_t> is_marked_;
    std::vector<uint8_t> states_;
    struct dsc_bucket_tracker tracker_ {};
};

std::tuple<int64_t, int64_t> shard_range(int64_t n_elems, int32_t n_ranks, int32_t rank)
{
    int64_t begin = 0;
    int64_t end = 0;

    dsc::check(dsc_shard_range_of(n_elems, n_ranks, rank, &begin, &end), "shard_range");
    return {begin, end};
}

}  // namespace

void dsc::bind_zero(py::module_ &m)
{
    py::class_<ZeroLayout>(
        m, "ZeroLayout",
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
        .def_readonly("shard_offset", &ZeroLayout::shard_offset,
                      "First element of each bucket's slice within a rank's shard.")
        .def(
            "fragments", &ZeroLayout::fragments, py::arg("rank"),
            "The pieces of parameters that rank owns, as (param, param_begin, flat_begin, shard_begin, n_elems), by bucket and position.");
    auto tracker = py::class_<BucketTracker>(
        m, "BucketTracker", "Which parameters of a pass are ready, and which bucket may be reduced next (dsc/zero.h).");
    tracker.def(py::init<Ints, int64_t>(), py::arg("bucket_of"), py::arg("n_buckets"))
        .def("mark", &BucketTracker::mark, py::arg("param"), "Marks a parameter as ready: IN_TIME, WAITED or LATE.")
        .def(
            "next", &BucketTracker::next, py::arg("due"),
            "The next bucket of those that due (READY, PROMPT or ALL) names, counted as launched from now on; -1 when there is none.")
        .def(
            "pass_turn", &BucketTracker::pass, py::arg("bucket"),
            "The bucket's turn has come, whatever its members: whether it is to be launched, and counts as launched from now on.")
        .def("set_waiting", &BucketTracker::set_waiting, py::arg("bucket"), py::arg("waits"),
             "Whether the bucket lets its turn pass and is due after all others; kept by reset.")
        .def("reset", &BucketTracker::reset, "Begins anew: nothing marked, nothing launched.");
    tracker.attr("IN_TIME") = static_cast<int>(DSC_BUCKET_IN_TIME);
    tracker.attr("WAITED") = static_cast<int>(DSC_BUCKET_WAITED);
    tracker.attr("LATE") = static_cast<int>(DSC_BUCKET_LATE);
    tracker.attr("READY") = static_cast<int>(DSC_BUCKET_READY);
    tracker.attr("PROMPT") = static_cast<int>(DSC_BUCKET_PROMPT);
    tracker.attr("ALL") = static_cast<int>(DSC_BUCKET_ALL);
    m.def("shard_range", &shard_range, py::arg("n_elems"), py::arg("n_ranks"), py::arg("rank"),
          "(begin, end) of rank's piece of n_elems split evenly without padding.");
}
