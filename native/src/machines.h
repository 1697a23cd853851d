// The instructions of machines, and the function that computes a tile with the best of them.

#ifndef TRENCADIS_MACHINES_H_
#define TRENCADIS_MACHINES_H_

#include "kernel.h"
#include "program.h"

namespace trencadis {

enum class Instructions { kPortable, kAvx2, kAvx512, kAvx512Bf16, kNeon };

// The best that this machine has; the portable ones are correct anywhere, but slower than XLA's own products.
inline Instructions instructions() {
#if defined(__x86_64__)
  static const Instructions best = [] {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Instructions::kPortable;
    if (!__builtin_cpu_supports("avx512f")) return Instructions::kAvx2;
    return __builtin_cpu_supports("avx512bf16") ? Instructions::kAvx512Bf16 : Instructions::kAvx512;
  }();
  return best;
#elif defined(__aarch64__)
  return Instructions::kNeon;
#else
  return Instructions::kPortable;
#endif
}

// Vectors of 16 bytes, in whatever the compiler makes of them.
[[gnu::flatten]] inline void compute_portable(const Product& p, const Tile& t, Index block, Scratch& scratch) {
  compute<Machine<16, 4, 1>>(p, t, block, scratch);
}

// The blocks that a program reads and writes, all of which have as many rows and columns.
struct Blocks {
  const Block *inputs, *results;
  Index m, n;
};

[[gnu::flatten]] inline void run_portable(const Program& p, const Blocks& x, Scratch& scratch) {
  run<Machine<16, 4, 1>>(p, x.inputs, x.results, x.m, x.n, scratch);
}

#if defined(__x86_64__)

#define TRENCADIS_TARGET(features) [[gnu::target(features), gnu::flatten]]

// 32 registers of 64 bytes: 24 sums, 2 of B, and some for A. Of one or two rows, wider pieces of B are read at once.
TRENCADIS_TARGET("avx512f")
inline void compute_avx512(const Product& p, const Tile& t, Index block, Scratch& scratch) {
  if (p.m <= 2) return compute<Machine<64, 2, 8>>(p, t, block, scratch);
  compute<Machine<64, 12, 2>>(p, t, block, scratch);
}

// The same for two operands of bfloat16, of which an instruction multiplies pairs.
TRENCADIS_TARGET("avx512f,avx512bf16")
inline void compute_pairs(const Product& p, const Tile& t, Index block, Scratch& scratch) {
  if (p.m <= 2) return compute<Machine<64, 2, 8, true>>(p, t, block, scratch);
  compute<Machine<64, 12, 2, true>>(p, t, block, scratch);
}

// 16 registers of 32 bytes: 12 sums, 2 of B, and some for A.
TRENCADIS_TARGET("avx2,fma")
inline void compute_avx2(const Product& p, const Tile& t, Index block, Scratch& scratch) {
  compute<Machine<32, 6, 2>>(p, t, block, scratch);
}

// On machines with wider registers too: GCC has no comparison of 64 bytes in a function with a target of its own.
TRENCADIS_TARGET("avx2,fma")
inline void run_avx2(const Program& p, const Blocks& x, Scratch& scratch) {
  run<Machine<32, 6, 2>>(p, x.inputs, x.results, x.m, x.n, scratch);
}

#elif defined(__aarch64__)

// 32 registers of 16 bytes: 24 sums, 2 of B, and some for A.
[[gnu::flatten]] inline void compute_neon(const Product& p, const Tile& t, Index block, Scratch& scratch) {
  compute<Machine<16, 12, 2>>(p, t, block, scratch);
}

#endif

// Compute a tile with some instructions, which this machine must have.
inline void compute_tile(Instructions with, const Product& p, const Tile& t, Index block, Scratch& scratch) {
  switch (with) {
#if defined(__x86_64__)
    case Instructions::kAvx512Bf16:
      if (p.a.narrow && p.b.narrow && p.k > 0) return compute_pairs(p, t, block, scratch);
      [[fallthrough]];
    case Instructions::kAvx512:
      return compute_avx512(p, t, block, scratch);
    case Instructions::kAvx2:
      return compute_avx2(p, t, block, scratch);
#elif defined(__aarch64__)
    case Instructions::kNeon:
      return compute_neon(p, t, block, scratch);
#endif
    default:
      return compute_portable(p, t, block, scratch);
  }
}

// Run a program over blocks with some instructions, which this machine must have. NEON is what the portable one uses.
inline void run_program(Instructions with, const Program& p, const Blocks& x, Scratch& scratch) {
  switch (with) {
#if defined(__x86_64__)
    case Instructions::kAvx512Bf16:
    case Instructions::kAvx512:
    case Instructions::kAvx2:
      return run_avx2(p, x, scratch);
#endif
    default:
      return run_portable(p, x, scratch);
  }
}

}  // namespace trencadis

#endif  // TRENCADIS_MACHINES_H_
