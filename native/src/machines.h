// The instructions of machines, and the function that computes a tile with the best of them.

#ifndef TRENCADIS_MACHINES_H_
#define TRENCADIS_MACHINES_H_

#include "kernel.h"

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

}  // namespace trencadis

#endif  // TRENCADIS_MACHINES_H_
