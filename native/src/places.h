// Where the matrices of groups are: from sizes to rows and addresses.
//
// Sizes are numbers of a program that runs, and may be anything. Every product is cut to what its arrays hold before
// its addresses are computed; what no product writes is zero, or keeps its value where the call adds to a result.

#ifndef TRENCADIS_PLACES_H_
#define TRENCADIS_PLACES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernel.h"

namespace trencadis {

// ---------------------------------------------------------------------------------------------------------------------
// One ragged dimension

struct Span {
  Index start, end;
};

// The rows of each local group, for all batch entries one after the other: sizes are cut to the m rows of their entry.
inline std::vector<Span> spans_of(const std::int32_t* sizes, const std::int32_t* first, Index batch, Index groups,
                                  Index local, Index m) {
  std::vector<Span> spans(static_cast<std::size_t>(batch * local), Span{0, 0});
  for (Index entry = 0; entry < batch; entry++) {
    Index end = 0;
    for (Index group = 0; group < groups; group++) {
      Index start = end;
      end = std::min(m, end + std::max<Index>(sizes[entry * groups + group], 0));
      Index at = group - first[entry];
      if (at >= 0 && at < local) spans[entry * local + at] = Span{entry * m + start, entry * m + end};
    }
  }
  return spans;
}

// Call a function with the group, the first row and the number of rows of all spans that have rows, in order, and of
// the gaps between them, whose group is -1.
template <class F>
void each_span(const std::vector<Span>& spans, Index rows, const F& function) {
  Index done = 0;
  for (std::size_t i = 0; i < spans.size(); i++) {
    Index start = spans[i].start, length = spans[i].end - start;
    if (length == 0) continue;
    if (start > done) function(Index{-1}, done, start - done);
    function(static_cast<Index>(i), start, length);
    done = start + length;
  }
  if (done < rows) function(Index{-1}, done, rows - done);
}

// ---------------------------------------------------------------------------------------------------------------------
// Several ragged dimensions

// How the matrices of all groups are stored: an array of them, one beside or below the other, or in a flat buffer.
struct Packing {
  enum Kind { kStacked = 0, kConcatenated = 1, kFlat = 2 };
  Index kind, axis;  // the axis on which groups follow each other
  bool transposed;
  std::vector<Index> shape;

  Index length() const { return shape[static_cast<std::size_t>(axis)]; }

  // Cut rows and columns, in the order of storage, of a matrix that starts there to what the array holds.
  void cut(Index start, Index stride, Index& rows, Index& columns) const {
    Index room = start >= 0 && start <= length() ? length() - start : 0;
    if (kind == kFlat) {
      rows = std::min(rows, stride > 0 ? room / stride : 0);
    } else if (kind == kStacked) {
      rows = room > 0 ? std::min(rows, shape[1]) : 0;
      columns = std::min(columns, shape[2]);
    } else {
      rows = std::min(rows, axis == 0 ? room : shape[0]);
      columns = std::min(columns, axis == 1 ? room : shape[1]);
    }
  }
};

// One of lhs, rhs and out of a group: its first number, and the numbers from one stored row to the next.
struct Place {
  Index offset, stride;
};

struct Group {
  Index m, k, n;
  Place lhs, rhs, out;
  bool whole;  // nothing was cut
};

// The place of a matrix, whose sizes are cut to what the array holds.
inline Place place(const Packing& p, Index start, Index& first, Index& second) {
  Index &rows = p.transposed ? second : first, &columns = p.transposed ? first : second;
  Index stride = p.kind == Packing::kFlat ? columns : p.shape.back();
  p.cut(start, stride, rows, columns);
  Index unit = p.kind == Packing::kStacked ? p.shape[1] * p.shape[2] : p.kind == Packing::kFlat || p.axis == 1 ? 1 : stride;
  return {start * unit, stride};
}

// A group by its numbers: where lhs, rhs and out start, and its m, k and n.
inline Group group_of(const Packing (&packings)[3], const Index (&numbers)[6]) {
  Group g{};
  Index m = std::max<Index>(numbers[3], 0), k = std::max<Index>(numbers[4], 0), n = std::max<Index>(numbers[5], 0);
  // strides are those of the sizes as they are given; so each place is computed from these
  Index lhs_m = m, lhs_k = k, rhs_k = k, rhs_n = n, out_m = m, out_n = n;
  g.lhs = place(packings[0], numbers[0], lhs_m, lhs_k);
  g.rhs = place(packings[1], numbers[1], rhs_k, rhs_n);
  g.out = place(packings[2], numbers[2], out_m, out_n);
  g.m = std::min(lhs_m, out_m), g.k = std::min(lhs_k, rhs_k), g.n = std::min(rhs_n, out_n);
  if (k == 0) g.m = out_m, g.n = out_n;  // lhs and rhs are empty then, and do not cut m and n
  g.whole = g.m == m && g.k == k && g.n == n;
  return g;
}

// A part of the result that no group has: m rows of n numbers.
struct Gap {
  Index start, m, n, stride;
};

// The gaps between groups, none of which was cut, in a result of `count` numbers.
inline std::vector<Gap> gaps_of(const Packing& p, const std::vector<Group>& groups, Index count) {
  std::vector<Gap> gaps;
  bool beside = p.kind == Packing::kConcatenated && p.axis == 1;  // a gap has a piece of each row
  Index done = 0, end = beside ? p.length() : count;
  auto add = [&](Index to) {
    if (to > done) gaps.push_back({done, beside ? p.shape[0] : 1, to - done, end});
  };
  for (const Group& g : groups) {
    if (g.m == 0 || g.n == 0) continue;
    add(g.out.offset);
    Index rows = p.transposed ? g.n : g.m, columns = p.transposed ? g.m : g.n;
    done = std::max(done, g.out.offset + (beside ? columns : rows * g.out.stride));
  }
  add(end);
  return gaps;
}

}  // namespace trencadis

#endif  // TRENCADIS_PLACES_H_
