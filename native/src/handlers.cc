// The custom calls of XLA: from buffers and group sizes to products.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "buffers.h"
#include "fused.h"
#include "machines.h"
#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace trencadis {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// One ragged dimension: rows, or what is summed

struct GroupedOptions {
  bool contraction, transpose_lhs, transpose_rhs, bias, accumulate;
  Index local, gather;  // gather: 0: no rows; 1: those of lhs; 2: those of rhs
  Limits limits;
};

// Rows: out[r] = lhs[r] @ rhs[group of r]. Contraction: out[i] = the sum over the rows of group i of lhs[r]ᵀ rhs[r].
ffi::Error grouped(ffi::ThreadPool& pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, const std::vector<Span>& spans,
                   Rest rest, ffi::AnyBuffer out, Index rows, const GroupedOptions& o) {
  const Array a(lhs), b(rhs), c(out);
  Index n = out.dimensions().back(), k = lhs.dimensions()[o.transpose_lhs ? 0 : 1];
  Index a_rows = lhs.dimensions()[o.transpose_lhs ? 1 : 0], b_rows = rhs.dimensions()[0];
  const float* bias = rest.next<float>(o.bias, o.local * n);
  const char* existing = rest.next(o.accumulate, out);
  const std::int32_t* token = rest.next<std::int32_t>(o.gather != 0, rows);
  if (!rest.ok() || (o.accumulate && existing != c.data)) return wrong("operands of the epilogue are not as announced");
  if (o.gather != 0 && (o.gather == 1 ? a_rows : b_rows) == 0) return wrong("there are no rows to gather from");
  // the rows of an operand from one of a group on, which are stored there or gathered
  auto rows_of = [&](const Array& x, bool gathered, Index stored, Index width, bool k_last, Index start) {
    if (gathered) return Operand{x.data, width, k_last, x.narrow, token + start, stored};
    return Operand{x.at(start * width), width, k_last, x.narrow};
  };

  std::vector<Product> products;
  if (o.contraction) {
    for (std::size_t s = 0; s < spans.size(); s++) {
      Index i = static_cast<Index>(s), start = spans[s].start, length = spans[s].end - start;
      if (length == 0 && o.accumulate) continue;
      Operand left = o.transpose_lhs ? Operand{a.at(start), a_rows, true, a.narrow}
                                     : rows_of(a, o.gather == 1, a_rows, k, false, start);
      Operand right = rows_of(b, o.gather == 2, b_rows, n, false, start);
      products.push_back({k, n, length, left, right, c.at(i * k * n), n, c.narrow, o.accumulate});
    }
  } else {
    each_span(spans, rows, [&](Index i, Index start, Index length) {
      if (i < 0) {
        if (!o.accumulate) products.push_back(zeros(c, start * n, length, n, n));
        return;
      }
      Operand left = rows_of(a, o.gather == 1, a_rows, k, true, start);
      Operand right{b.at(i % b_rows * k * n), o.transpose_rhs ? k : n, o.transpose_rhs, b.narrow};
      products.push_back({length, n, k, left, right, c.at(start * n), n, c.narrow, o.accumulate});
      if (bias != nullptr) products.back().bias = bias + i % o.local * n;
    });
  }
  if (!o.accumulate) advise_huge_pages(c.data, out.size_bytes());
  compute_all(std::move(products), o.limits, pool);
  return ffi::Error::Success();
}

ffi::Error grouped_handler(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::Buffer<ffi::S32> sizes,
                           ffi::Buffer<ffi::S32> first, ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out,
                           bool contraction, bool transpose_lhs, bool transpose_rhs, bool bias, bool accumulate,
                           Index gather, Index rows, Index local, ffi::Span<const std::int64_t> tile) {
  auto x = lhs.dimensions(), w = rhs.dimensions(), y = out->dimensions();
  if (x.size() != 2 || w.size() != (contraction ? 2 : 3) || y.size() != (contraction ? 3 : 2)) {
    return wrong("lhs, rhs or the result has a wrong number of dimensions");
  }
  Index batch = static_cast<Index>(first.element_count()), m = batch > 0 ? rows / batch : 0;
  Index groups = batch > 0 ? static_cast<Index>(sizes.element_count()) / batch : 0;
  Index k = x[transpose_lhs ? 0 : 1], n = y.back();
  bool right = contraction ? y[0] == batch * local && y[1] == k && w[1] == n && (gather == 2 || w[0] == rows)
                           : y[0] == rows && w[transpose_rhs ? 2 : 1] == k && w[transpose_rhs ? 1 : 2] == n &&
                                 !transpose_lhs && gather != 2 && (w[0] > 0 || batch * local == 0);
  if (!right || rows < 0 || local < 0 || rows != batch * m ||
      (gather == 1 ? transpose_lhs : x[transpose_lhs ? 1 : 0] != rows)) {
    return wrong("shapes do not match");
  }
  std::optional<Limits> limits = limits_of(tile);
  if (!limits) return wrong("want a tile of three positive numbers");
  GroupedOptions options{contraction, transpose_lhs, transpose_rhs, bias, accumulate, local, gather, *limits};
  return checked({lhs, rhs, *out}, [&] {
    std::vector<Span> spans = spans_of(sizes.typed_data(), first.typed_data(), batch, groups, local, m);
    return grouped(pool, lhs, rhs, spans, Rest(args), *out, rows, options);
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Several ragged dimensions

ffi::Error ragged(ffi::ThreadPool& pool, const Array& a, const Array& b, const std::vector<Group>& groups,
                  const Packing (&packings)[3], Rest rest, ffi::AnyBuffer out, bool accumulate,
                  ffi::Span<const std::int64_t> given, const Limits& limits) {
  Index count = static_cast<Index>(out.element_count()), g_count = static_cast<Index>(groups.size());
  const Array c(out);
  const char* existing = rest.next(accumulate, out);
  const float* alpha = rest.next<float>(given[0] != 0, g_count);
  const float* bias = rest.next<float>(given[1] != 0, given[1]);
  const float* beta = rest.next<float>(given[2] != 0, g_count);
  Index n = g_count > 0 ? given[1] / g_count : 0;  // columns of the bias
  if (!rest.ok() || (accumulate && existing != c.data)) return wrong("operands of the epilogue are not as announced");

  std::vector<Product> products;
  bool whole = std::all_of(groups.begin(), groups.end(), [](const Group& g) { return g.whole; });
  if (!accumulate) {
    advise_huge_pages(c.data, out.size_bytes());
    if (whole) {
      for (const Gap& gap : gaps_of(packings[2], groups, count)) {
        products.push_back(zeros(c, gap.start, gap.m, gap.n, gap.stride));
      }
    } else {
      std::memset(c.data, 0, out.size_bytes());  // sizes that do not fit leave more than gaps
    }
  }
  for (std::size_t i = 0; i < groups.size(); i++) {
    const Group& g = groups[i];
    if (g.m == 0 || g.n == 0) continue;
    Operand left{a.at(g.lhs.offset), g.lhs.stride, !packings[0].transposed, a.narrow};
    Operand right{b.at(g.rhs.offset), g.rhs.stride, packings[1].transposed, b.narrow};
    Product p{g.m, g.n, g.k, left, right, c.at(g.out.offset), g.out.stride, c.narrow, accumulate};
    if (packings[2].transposed) {  // Cᵀ = Bᵀ Aᵀ
      std::swap(p.m, p.n);
      std::swap(p.a, p.b);
    }
    if (alpha != nullptr) p.alpha = alpha[i];
    if (beta != nullptr) p.beta = beta[i];
    if (bias != nullptr) {
      if (g.n > n || packings[2].transposed) return wrong("the bias has another number of columns");
      p.bias = bias + static_cast<Index>(i) * n;
    }
    products.push_back(p);
  }
  compute_all(std::move(products), limits, pool);
  return ffi::Error::Success();
}

ffi::Error ragged_handler(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, ffi::Buffer<ffi::S32> table,
                          ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> out, bool accumulate,
                          ffi::Span<const std::int64_t> kinds, ffi::Span<const std::int64_t> axes,
                          ffi::Span<const std::int64_t> transposed, ffi::Span<const std::int64_t> given,
                          ffi::Span<const std::int64_t> tile) {
  std::optional<Limits> limits = limits_of(tile);
  if (!limits || kinds.size() != 3 || axes.size() != 3 || transposed.size() != 3 || given.size() != 3) {
    return wrong("want three numbers for lhs, rhs and the result");
  }
  auto packing = [&](int i, ffi::AnyBuffer::Dimensions shape) {
    return Packing{kinds[i], axes[i], transposed[i] != 0, std::vector<Index>(shape.begin(), shape.end())};
  };
  const Packing packings[3] = {packing(0, lhs.dimensions()), packing(1, rhs.dimensions()), packing(2, out->dimensions())};
  for (const Packing& p : packings) {
    Index rank = static_cast<Index>(p.shape.size());
    if (p.kind < 0 || p.kind > 2 || rank != 3 - p.kind || p.axis < 0 || p.axis > (p.kind == Packing::kConcatenated)) {
      return wrong("lhs, rhs or the result has a wrong number of dimensions");
    }
  }
  if (table.dimensions().size() != 2 || table.dimensions()[0] != 6) return wrong("want six numbers for each group");
  Index count = table.dimensions()[1];
  const std::int32_t* at = table.typed_data();
  return checked({lhs, rhs, *out}, [&] {
    std::vector<Group> groups;
    for (Index i = 0; i < count; i++) {
      Index numbers[6];
      for (int field = 0; field < 6; field++) numbers[field] = at[field * count + i];
      groups.push_back(group_of(packings, numbers));
    }
    return ragged(pool, Array(lhs), Array(rhs), groups, packings, Rest(args), *out, accumulate, given, *limits);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(trencadis_grouped, grouped_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("contraction")
                                  .Attr<bool>("transpose_lhs")
                                  .Attr<bool>("transpose_rhs")
                                  .Attr<bool>("bias")
                                  .Attr<bool>("accumulate")
                                  .Attr<Index>("gather")
                                  .Attr<Index>("rows")
                                  .Attr<Index>("local")
                                  .Attr<ffi::Span<const std::int64_t>>("tile"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(trencadis_fused, fused_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("transpose_rhs")
                                  .Attr<bool>("bias")
                                  .Attr<bool>("gather")
                                  .Attr<Index>("second")
                                  .Attr<Index>("rows")
                                  .Attr<Index>("local")
                                  .Attr<Index>("registers")
                                  .Attr<ffi::Span<const std::int64_t>>("tile")
                                  .Attr<ffi::Span<const std::int64_t>>("code")
                                  .Attr<ffi::Span<const float>>("constants")
                                  .Attr<ffi::Span<const std::int64_t>>("results"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(trencadis_ragged, ragged_handler,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("accumulate")
                                  .Attr<ffi::Span<const std::int64_t>>("kinds")
                                  .Attr<ffi::Span<const std::int64_t>>("axes")
                                  .Attr<ffi::Span<const std::int64_t>>("transposed")
                                  .Attr<ffi::Span<const std::int64_t>>("given")
                                  .Attr<ffi::Span<const std::int64_t>>("tile"));

}  // namespace trencadis

// The instructions that products are computed with, by name; empty if there are none in particular for this machine.
extern "C" const char* trencadis_instructions() {
  switch (trencadis::instructions()) {
    case trencadis::Instructions::kAvx2:
      return "AVX2";
    case trencadis::Instructions::kAvx512:
      return "AVX-512";
    case trencadis::Instructions::kAvx512Bf16:
      return "AVX-512 with bfloat16";
    case trencadis::Instructions::kNeon:
      return "NEON";
    case trencadis::Instructions::kPortable:
      return "";
  }
  return "";
}
