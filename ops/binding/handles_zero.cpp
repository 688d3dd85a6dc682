/* The ZeRO planners as Python objects: a layout, and the even split. All arguments and results are integers. */
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

        /* A NULL array asks for the count only, so an empty array must not be NULL. */
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
    m.def("shard_range", &shard_range, py::arg("n_elems"), py::arg("n_ranks"), py::arg("rank"),
          "(begin, end) of rank's piece of n_elems split evenly without padding.");
}
