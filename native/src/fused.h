// Rows products with a program in their epilogue: an activation, a gated one, or its pullback.
//
// The sums of a tile are float32 in memory of the thread, and the program reads them there. Its inputs are the sums of
// the product, those of a second product if there is one (gate and up, or two that are added), and what follows as
// arrays; its results are arrays of as many rows and columns, or, of one dimension, sums over the columns of each row.

#ifndef TRENCADIS_FUSED_H_
#define TRENCADIS_FUSED_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "buffers.h"
#include "machines.h"
#include "program.h"
#include "tiles.h"

namespace trencadis {

static_assert(kFewestColumns % kChunk == 0, "tiles are cut between the chunks of which row sums are computed");

struct FusedOptions {
  bool transpose_rhs, bias, gather;
  Index local, second;  // operands of the second product that follow: 0: there is none; 1: its rhs; 2: both
  Limits limits;
};

// What all tiles of a call share.
struct Fused {
  std::vector<Index> rows;       // of the results, at which each product starts
  std::vector<char> gaps;        // whether each is only rows that no group owns
  std::vector<Product> seconds;  // the second product of each; none if there is none
  Program program;
  std::vector<Block> inputs, results;  // whole arrays

  // A tile: its sums, and what the program makes of them. The results of a gap are zero.
  void compute(const std::vector<Product>& products, const Tile& t, Index block, Scratch& scratch) const {
    std::size_t i = static_cast<std::size_t>(t.product);
    Index m = t.m1 - t.m0, n = t.n1 - t.n0, row = rows[i] + t.m0;
    Block read[kInputs], written[kResults];
    for (std::size_t j = 0; j < results.size(); j++) written[j] = part(results[j], row, t.n0);
    if (gaps[i]) {
      for (std::size_t j = 0; j < results.size(); j++) clear(written[j], m, n);
      return;
    }
    Index count = seconds.empty() ? 1 : 2;
    float* sums = scratch.sums.get(count * m * n);
    for (Index j = 0; j < count; j++) {
      Product p = j == 0 ? products[i] : seconds[i];
      p.c = sums + j * m * n, p.stride = n, p.top = t.m0, p.left = t.n0;
      compute_tile(instructions(), p, t, block, scratch);
      read[j] = Block{p.c, n};
    }
    for (std::size_t j = 0; j < inputs.size(); j++) read[static_cast<std::size_t>(count) + j] = part(inputs[j], row, t.n0);
    run_program(instructions(), program, Blocks{read, written, m, n}, scratch);
  }

 private:
  static Block part(Block x, Index row, Index column) {
    Index first = row * x.stride + (x.kind == Block::kMatrix ? column : x.kind == Block::kByRow ? 0 : column / kChunk);
    x.data = static_cast<char*>(x.data) + first * (x.narrow ? 2 : 4);
    return x;
  }

  static void clear(const Block& x, Index m, Index n) {
    Index count = x.kind == Block::kMatrix ? n : (n + kChunk - 1) / kChunk, size = x.narrow ? 2 : 4;
    for (Index i = 0; i < m; i++) {
      std::memset(static_cast<char*>(x.data) + i * x.stride * size, 0, static_cast<std::size_t>(count * size));
    }
  }
};

// An array of a number for each row, or of a row of n numbers.
inline Block block_of(ffi::AnyBuffer x, Index n) {
  bool by_row = x.dimensions().size() == 1;
  return {x.untyped_data(), by_row ? 1 : n, x.element_type() == ffi::DataType::BF16,
          by_row ? Block::kByRow : Block::kMatrix};
}

inline bool fits(ffi::AnyBuffer x, Index rows, Index n) {
  auto shape = x.dimensions();
  if (x.element_type() != ffi::DataType::F32 && x.element_type() != ffi::DataType::BF16) return false;
  return (shape.size() == 1 && shape[0] == rows) || (shape.size() == 2 && shape[0] == rows && shape[1] == n);
}

inline ffi::Error fused(ffi::ThreadPool& pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs, const std::vector<Span>& spans,
                        ffi::RemainingArgs args, ffi::RemainingRets rets, Index rows, const Program& program,
                        const FusedOptions& o) {
  const Array a(lhs), b(rhs);
  Index k = lhs.dimensions()[1], a_rows = lhs.dimensions()[0], b_rows = rhs.dimensions()[0];
  Index n = rhs.dimensions()[o.transpose_rhs ? 1 : 2], chunks = (n + kChunk - 1) / kChunk;
  Rest rest(args);
  const char *other_a = rest.next(o.second > 1, lhs), *other_b = rest.next(o.second > 0, rhs);
  const float* bias = rest.next<float>(o.bias, o.local * n);
  const float* other_bias = rest.next<float>(o.bias && o.second > 0, o.local * n);
  const std::int32_t* token = rest.next<std::int32_t>(o.gather, rows);
  if (o.gather && a_rows == 0) return wrong("there are no rows to gather from");

  auto state = std::make_shared<Fused>();
  state->program = program;
  for (std::size_t i = rest.used(); i < args.size(); i++) {
    auto x = args.get<ffi::AnyBuffer>(i);
    if (x.has_error() || !fits(*x, rows, n)) return wrong("an input of the program has a wrong shape or dtype");
    state->inputs.push_back(block_of(*x, n));
  }
  // sums of each chunk of columns, which are added up in order when all tiles are done
  std::vector<std::vector<float>> sums(rets.size());
  for (std::size_t i = 0; i < rets.size(); i++) {
    auto x = rets.get<ffi::AnyBuffer>(i);
    if (x.has_error() || !fits(**x, rows, n)) return wrong("a result of the program has a wrong shape or dtype");
    Block block = block_of(**x, n);
    if (block.kind == Block::kByRow) {
      if (block.narrow) return wrong("sums over columns are float32");
      sums[i].assign(static_cast<std::size_t>(rows * chunks), 0.0f);
      block = Block{sums[i].data(), chunks, false, Block::kRowSums};
    } else {
      advise_huge_pages(block.data, (*x)->size_bytes());
    }
    state->results.push_back(block);
  }
  if (!rest.right()) return wrong("operands of the epilogue are not as announced");
  if (program.inputs != 1 + (o.second > 0) + static_cast<Index>(state->inputs.size()) ||
      program.result_count != static_cast<Index>(rets.size()) || !program.valid()) {
    return wrong("the program of the epilogue is not valid");
  }

  std::vector<Product> products;
  each_span(spans, rows, [&](Index i, Index start, Index length) {
    state->rows.push_back(start), state->gaps.push_back(i < 0);
    Product p{length, n, 0, {}, {}, nullptr, n};
    if (i >= 0) {
      Index row = o.gather ? 0 : start;
      p.k = k, p.a = Operand{a.at(row * k), k, true, a.narrow, token == nullptr ? nullptr : token + start, a_rows};
      p.b = Operand{b.at(i % b_rows * k * n), o.transpose_rhs ? k : n, o.transpose_rhs, b.narrow};
      if (bias != nullptr) p.bias = bias + i % o.local * n;
    }
    products.push_back(p);
    if (o.second == 0) return;
    if (i >= 0) {
      p.b.data = other_b + i % b_rows * k * n * b.size;
      if (other_a != nullptr) p.a.data = other_a + start * k * a.size;
      if (other_bias != nullptr) p.bias = other_bias + i % o.local * n;
    }
    state->seconds.push_back(p);
  });
  compute_all(std::move(products), o.limits, pool,
              [state](const std::vector<Product>& all, const Tile& t, Index block, Scratch& scratch) {
                state->compute(all, t, block, scratch);
              },
              Cost{1 + (o.second > 0), kWorkPerNumber + program.count});
  for (std::size_t i = 0; i < rets.size(); i++) {
    if (state->results[i].kind != Block::kRowSums) continue;
    float* out = static_cast<float*>((*rets.get<ffi::AnyBuffer>(i))->untyped_data());
    for (Index row = 0; row < rows; row++) {
      float total = 0;
      for (Index j = 0; j < chunks; j++) total += sums[i][static_cast<std::size_t>(row * chunks + j)];
      out[row] = total;
    }
  }
  return ffi::Error::Success();
}

inline ffi::Error fused_handler(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer rhs,
                                ffi::Buffer<ffi::S32> sizes, ffi::Buffer<ffi::S32> first, ffi::RemainingArgs args,
                                ffi::RemainingRets rets, bool transpose_rhs, bool bias, bool gather,
                                Index second, Index rows, Index local, Index registers, ffi::Span<const std::int64_t> tile,
                                ffi::Span<const std::int64_t> code, ffi::Span<const float> constants,
                                ffi::Span<const std::int64_t> results) {
  auto x = lhs.dimensions(), w = rhs.dimensions();
  Index batch = static_cast<Index>(first.element_count()), m = batch > 0 ? rows / batch : 0;
  Index groups = batch > 0 ? static_cast<Index>(sizes.element_count()) / batch : 0;
  if (x.size() != 2 || w.size() != 3 || w[transpose_rhs ? 2 : 1] != x[1] || rows < 0 || local < 0 ||
      rows != batch * m || (!gather && x[0] != rows) || (w[0] == 0 && batch * local > 0) || second < 0 || second > 2 ||
      (second > 1 && gather)) {
    return wrong("shapes do not match");
  }
  std::optional<Limits> limits = limits_of(tile);
  if (!limits || registers < 0 || code.size() % 5 != 0) return wrong("want a tile of three positive numbers, and a program");
  limits->n = std::max<Index>(limits->n / kChunk, 1) * kChunk;
  Program program;
  program.code = reinterpret_cast<const Instruction*>(code.begin());
  program.count = static_cast<Index>(code.size()) / 5, program.registers = registers;
  program.constants = constants.begin(), program.constant_count = static_cast<Index>(constants.size());
  program.results = results.begin(), program.result_count = static_cast<Index>(results.size());
  Index pair = second > 0, others = second + (bias ? 1 + pair : 0) + gather;
  program.inputs = 1 + pair + static_cast<Index>(args.size()) - std::min(others, static_cast<Index>(args.size()));
  FusedOptions options{transpose_rhs, bias, gather, local, second, *limits};
  return checked({lhs, rhs}, [&] {
    std::vector<Span> spans = spans_of(sizes.typed_data(), first.typed_data(), batch, groups, local, m);
    return fused(pool, lhs, rhs, spans, args, rets, rows, program, options);
  });
}

}  // namespace trencadis

#endif  // TRENCADIS_FUSED_H_
