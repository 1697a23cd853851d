// Products and programs of many ragged sizes with each of the instructions of this machine, against a loop in double;
// the rows and addresses of groups, from sizes that may be anything; and threads, some of which throw.
//
// Every matrix ends where its memory ends, so that a sanitizer sees whatever is read or written beside it, and what
// must not count is NaN. Build with -fsanitize=address,undefined; the exit code is the number of wrong results.

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "../src/machines.h"
#include "../src/places.h"
#include "../src/tiles.h"

namespace trencadis {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Case {
  Index m, n, k, limit_m, limit_n, block;
  bool a_last, b_last, a_narrow, b_narrow, c_narrow, keep, bias, gather;
};

std::mt19937 random_bits(0);

Index draw(Index low, Index high) { return std::uniform_int_distribution<Index>(low, high)(random_bits); }

// Memory of `count` numbers and not one more, as floats or as bfloat16.
struct Numbers {
  std::unique_ptr<char[]> data;
  bool narrow;

  Numbers(Index count, bool narrow) : data(new char[std::max<Index>(count, 1) * (narrow ? 2 : 4)]), narrow(narrow) {
    for (Index i = 0; i < count; i++) set(i, static_cast<float>(draw(-64, 64)) / 16);
  }
  void set(Index i, float x) {
    if (narrow) {
      reinterpret_cast<Narrow*>(data.get())[i] = narrowed(x);
    } else {
      reinterpret_cast<float*>(data.get())[i] = x;
    }
  }
  float at(Index i) const {
    return narrow ? widened(reinterpret_cast<Narrow*>(data.get())[i]) : reinterpret_cast<float*>(data.get())[i];
  }
};

// Whether all tiles of a product are what they should be, and nothing else is written.
bool right(Instructions with, const Case& s, Scratch& scratch) {
  const Index a_width = s.a_last ? s.k : s.m, a_rows = s.a_last ? s.m : s.k, stored = a_rows + 3;
  Numbers a((s.gather ? stored : a_rows) * a_width, s.a_narrow), b(s.n * s.k, s.b_narrow), c(s.m * s.n, s.c_narrow);
  std::vector<std::int32_t> rows;
  for (Index i = 0; i < a_rows; i++) rows.push_back(static_cast<std::int32_t>(draw(0, stored - 1)));
  std::vector<float> bias(static_cast<std::size_t>(s.n), 0.5f), want;
  if (!s.keep) {
    for (Index i = 0; i < s.m * s.n; i++) c.set(i, kNaN);
  }
  const float alpha = s.keep ? 0.5f : 1.0f;
  for (Index i = 0; i < s.m; i++) {
    for (Index j = 0; j < s.n; j++) {
      double sum = 0;
      for (Index q = 0; q < s.k; q++) {
        Index row = s.a_last ? i : q, column = s.a_last ? q : i;
        if (s.gather) row = rows[static_cast<std::size_t>(row)];
        sum += double(a.at(row * a_width + column)) * b.at(s.b_last ? j * s.k + q : q * s.n + j);
      }
      want.push_back(static_cast<float>(alpha * sum + (s.bias ? 0.5 : 0) + (s.keep ? c.at(i * s.n + j) : 0)));
    }
  }
  Operand left{a.data.get(), a_width, s.a_last, s.a_narrow, s.gather ? rows.data() : nullptr, stored};
  Operand other{b.data.get(), s.b_last ? s.k : s.n, s.b_last, s.b_narrow};
  Product p{s.m, s.n, s.k, left, other, c.data.get(), s.n, s.c_narrow, s.keep, alpha, 1, s.bias ? bias.data() : nullptr};
  for (Index m0 = 0; m0 < s.m; m0 += s.limit_m) {
    for (Index n0 = 0; n0 < s.n; n0 += s.limit_n) {
      Tile t{0, m0, std::min(m0 + s.limit_m, s.m), n0, std::min(n0 + s.limit_n, s.n)};
      compute_tile(with, p, t, s.block, scratch);
    }
  }
  for (std::size_t i = 0; i < want.size(); i++) {
    float error = std::abs(c.at(static_cast<Index>(i)) - want[i]);
    if (!(error <= (s.c_narrow ? 0.02f : 1e-4f) * (1 + std::abs(want[i])))) return false;
  }
  return true;
}

// Whether a program is what it should be over all of m x n numbers: a * b + weight of the row, and its sum over columns.
bool right(Instructions with, Index m, Index n, bool narrow, Scratch& scratch) {
  const Index chunks = (n + kChunk - 1) / kChunk;
  Numbers a(m * n, narrow), b(m * n, !narrow), weight(m, false), out(m * n, narrow), sums(m * chunks, false);
  const Instruction code[] = {{static_cast<Index>(Operation::kMultiply), 4, 0, 1, 0},
                              {static_cast<Index>(Operation::kMultiply), 5, 2, 3, 0},
                              {static_cast<Index>(Operation::kAdd), 4, 4, 5, 0}};
  const float two[] = {2};
  const Index results[] = {4, 4};
  const Program program{code, 3, 6, 3, two, 1, results, 2};
  const Block inputs[] = {{a.data.get(), n, a.narrow}, {b.data.get(), n, b.narrow},
                          {weight.data.get(), 1, false, Block::kByRow}};
  const Block outputs[] = {{out.data.get(), n, out.narrow}, {sums.data.get(), chunks, false, Block::kRowSums}};
  run_program(with, program, Blocks{inputs, outputs, m, n}, scratch);
  bool good = program.valid();
  for (Index i = 0; i < m; i++) {
    double total = 0, found = 0;
    for (Index j = 0; j < n; j++) {
      double want = double(a.at(i * n + j)) * b.at(i * n + j) + 2.0 * weight.at(i);
      total += want;
      good = good && std::abs(out.at(i * n + j) - want) <= (narrow ? 0.02 : 1e-4) * (1 + std::abs(want));
    }
    for (Index j = 0; j < chunks; j++) found += sums.at(i * chunks + j);
    good = good && std::abs(found - total) <= 1e-4 * (1 + std::abs(total)) * double(n);
  }
  return good;
}

// A size that a program may compute: mostly small, sometimes impossible.
Index size_of_any_kind() {
  const Index wild[] = {-1, -5, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max(), 1000};
  return draw(0, 5) == 0 ? wild[draw(0, 4)] : draw(0, 7);
}

// Whether the spans of groups and the gaps between them are all rows, each once, and those of a window of the groups.
bool right_spans() {
  const Index batch = draw(1, 3), groups = draw(0, 6), local = draw(0, 6), m = draw(0, 20);
  std::vector<std::int32_t> sizes, first;
  for (Index i = 0; i < batch * groups; i++) sizes.push_back(static_cast<std::int32_t>(size_of_any_kind()));
  for (Index i = 0; i < batch; i++) first.push_back(static_cast<std::int32_t>(draw(-3, 8)));
  std::vector<Span> spans = spans_of(sizes.data(), first.data(), batch, groups, local, m);
  Index done = 0, owned = 0, expected = 0;
  bool good = static_cast<Index>(spans.size()) == batch * local;
  each_span(spans, batch * m, [&](Index i, Index start, Index length) {
    good = good && start == done && length > 0;
    done = start + length;
    if (i < 0) return;
    owned += length;
    good = good && spans[static_cast<std::size_t>(i)].start == start && start / m == (start + length - 1) / m;
  });
  for (Index entry = 0; entry < batch; entry++) {
    Index end = 0;
    for (Index group = 0; group < groups; group++) {
      Index before = end, size = sizes[static_cast<std::size_t>(entry * groups + group)];
      end = std::min(m, end + std::max<Index>(size, 0));
      Index at = group - first[static_cast<std::size_t>(entry)];
      if (at >= 0 && at < local) expected += end - before;
    }
  }
  return good && done == batch * m && owned == expected;
}

Packing any_packing(bool last) {
  Packing p{draw(0, 2), 0, draw(0, 1) == 1, {}};
  for (Index i = p.kind; i < 3; i++) p.shape.push_back(draw(0, i == p.kind ? 60 : 9));
  if (p.kind == Packing::kConcatenated && last) p.axis = 1;
  return p;
}

Index numbers_of(const Packing& p) {
  Index count = 1;
  for (Index length : p.shape) count *= length;
  return count;
}

// Whether a matrix lies in its array.
bool inside(const Packing& p, const Place& at, Index rows, Index columns) {
  if (p.transposed) std::swap(rows, columns);
  if (rows == 0 || columns == 0) return true;
  return at.offset >= 0 && at.stride >= columns && at.offset + (rows - 1) * at.stride + columns <= numbers_of(p);
}

// Whether the matrices of a group lie in their arrays, whatever its numbers are.
bool right_group() {
  const Packing packings[3] = {any_packing(draw(0, 1)), any_packing(draw(0, 1)), any_packing(draw(0, 1))};
  Index numbers[6];
  for (Index& each : numbers) each = size_of_any_kind();
  const Group g = group_of(packings, numbers);
  bool lhs = g.k == 0 || inside(packings[0], g.lhs, g.m, g.k), rhs = g.k == 0 || inside(packings[1], g.rhs, g.k, g.n);
  return g.m >= 0 && g.k >= 0 && g.n >= 0 && lhs && rhs && inside(packings[2], g.out, g.m, g.n);
}

// Whether groups and the gaps between them are all numbers of a result, each once.
bool right_gaps() {
  Packing p{draw(1, 2), 0, draw(0, 1) == 1, {}};
  const bool flat = p.kind == Packing::kFlat, beside = !flat && draw(0, 1) == 1;
  const Index width = draw(1, 5);
  std::vector<Group> groups;
  Index end = 0;
  for (Index i = draw(0, 4); i > 0; i--) {
    end += draw(0, 2) * (flat || beside ? 1 : width);
    Index rows = beside ? width : draw(0, 4), columns = flat ? draw(0, 4) : beside ? draw(0, 4) : width;
    if (flat || beside) {
      groups.push_back(Group{rows, 1, columns, {}, {}, {end, flat ? columns : 0}, true});
      end += beside ? columns : rows * columns;
    } else {
      groups.push_back(Group{rows, 1, width, {}, {}, {end, width}, true});
      end += rows * width;
    }
    if (p.transposed) std::swap(groups.back().m, groups.back().n);
  }
  end += draw(0, 2) * (flat || beside ? 1 : width);
  p.axis = beside;
  p.shape = flat ? std::vector<Index>{end} : beside ? std::vector<Index>{width, end} : std::vector<Index>{end / width, width};
  const Index count = numbers_of(p);
  std::vector<int> times(static_cast<std::size_t>(count), 0);
  auto write = [&](Index start, Index m, Index n, Index stride) {
    for (Index i = 0; i < m * n; i++) times.at(static_cast<std::size_t>(start + i / n * stride + i % n))++;
  };
  for (const Gap& gap : gaps_of(p, groups, count)) write(gap.start, gap.m, gap.n, gap.stride);
  for (const Group& g : groups) {
    write(g.out.offset, p.transposed ? g.n : g.m, p.transposed ? g.m : g.n, beside ? end : g.out.stride);
  }
  return std::all_of(times.begin(), times.end(), [](int each) { return each == 1; });
}

// A pool of threads that end when it does; after `most` tasks it has no memory for another.
struct Pool {
  int most = 100;
  std::vector<std::thread> threads;
  Index num_threads() const { return 4; }
  void Schedule(std::function<void()> task) {
    if (static_cast<int>(threads.size()) >= most) throw std::bad_alloc();
    threads.emplace_back(std::move(task));
  }
  ~Pool() {
    for (std::thread& each : threads) each.join();
  }
};

// Whether all tiles are computed once, by threads of which some may be missing; and whether what a tile throws is thrown
// by the call, when no thread writes any more.
bool right_threads(int most, Index failing) {
  Pool pool{most, {}};
  std::atomic<Index> done{0}, running{0};
  const Product p{2048, 2048, 64, {}, {}, nullptr, 2048};
  bool thrown = false;
  try {
    compute_all({p}, Limits{512, 256, 512}, pool, [&](const auto&, const Tile& t, Index, Scratch& scratch) {
      running++;
      scratch.sums.get(16)[0] = 1;
      if (done++ == failing) {
        running--;
        throw std::bad_alloc();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50 + t.m0 % 3));
      running--;
    });
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  return running == 0 && thrown == (failing >= 0) && (thrown || done >= 32);
}

int check(int count) {
  int wrong = 0;
  Scratch scratch;
  const Index sizes[] = {0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 129, 150};
  auto size = [&](std::size_t first) { return sizes[draw(static_cast<Index>(first), 23)]; };
  auto coin = [] { return draw(0, 1) == 1; };
  std::vector<Instructions> all{Instructions::kPortable, instructions()};
#if defined(__x86_64__)
  if (instructions() > Instructions::kAvx2) all.push_back(Instructions::kAvx2);
  if (instructions() > Instructions::kAvx512) all.push_back(Instructions::kAvx512);
#endif
  for (int i = 0; i < count; i++) {
    Case s{size(1), size(1), size(0), size(1), size(1), draw(1, 96), coin(), coin(), coin(),
           coin(),  coin(),  coin(),  coin(),  draw(0, 3) == 0};
    for (Instructions with : all) {
      if (right(with, s, scratch)) continue;
      wrong++;
      std::printf("wrong: instructions %d, m %ld n %ld k %ld, tile %ld %ld, block %ld, a_last %d b_last %d\n",
                  static_cast<int>(with), long(s.m), long(s.n), long(s.k), long(s.limit_m), long(s.limit_n),
                  long(s.block), s.a_last, s.b_last);
    }
  }
  for (int i = 0; i < count / 10; i++) {
    Index m = draw(1, 11), n = draw(1, 200);
    for (Instructions with : all) {
      if (right(with, m, n, i % 2 == 0, scratch)) continue;
      wrong++;
      std::printf("wrong: a program, instructions %d, m %ld n %ld\n", static_cast<int>(with), long(m), long(n));
    }
  }
  for (int i = 0; i < 10 * count; i++) {
    if (!right_spans()) wrong++, std::printf("wrong: spans\n");
    if (!right_group()) wrong++, std::printf("wrong: a group lies beside its arrays\n");
    if (!right_gaps()) wrong++, std::printf("wrong: gaps\n");
  }
  for (int most : {100, 1, 0}) {
    for (Index failing : {-1, 0, 5, 20}) {
      if (!right_threads(most, failing)) wrong++, std::printf("wrong: threads, %d tasks, %ld fails\n", most, long(failing));
    }
  }
  std::printf("%d products with each of %d kinds of instructions, %d wrong\n", count, int(all.size()), wrong);
  return wrong;
}

}  // namespace
}  // namespace trencadis

int main() { return std::min(trencadis::check(2000), 100); }
