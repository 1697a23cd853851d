// Products and programs of many ragged sizes with each of the instructions of this machine, against a loop in double.
//
// Every matrix ends where its memory ends, so that a sanitizer sees whatever is read or written beside it, and what
// must not count is NaN. Build with -fsanitize=address,undefined; the exit code is the number of wrong products.

#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../src/machines.h"

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
  std::printf("%d products with each of %d kinds of instructions, %d wrong\n", count, int(all.size()), wrong);
  return wrong;
}

}  // namespace
}  // namespace trencadis

int main() { return std::min(trencadis::check(2000), 100); }
