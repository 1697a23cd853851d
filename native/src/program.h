// Elementwise functions of a tile, as programs: an activation or its pullback, one operation after the other.
//
// A program comes from the trace of a Python function. Its registers hold kRows rows of kChunk columns of float, which
// stay in the L1 cache; each operation is a loop over one of them. Rows and columns that a tile does not have hold
// anything, and are not stored.

#ifndef TRENCADIS_PROGRAM_H_
#define TRENCADIS_PROGRAM_H_

#include "kernel.h"

namespace trencadis {

constexpr Index kRows = 4, kChunk = 64, kNumbers = kRows * kChunk;  // of a register
constexpr Index kInputs = 4, kResults = 4;                          // the most that a program has

// In the order of OPERATIONS in `trencadis/backends/cpu/programs.py`. What compares gives 1 or 0.
enum class Operation : Index {
  kAdd, kSubtract, kMultiply, kDivide, kMaximum, kMinimum, kGreater, kGreaterEqual, kEqual, kSelect,
  kAbsolute, kSqrt, kExp, kExpm1, kLog, kLog1p, kTanh, kLogistic, kErf, kErfc, kCount,
};

struct Instruction {
  Index operation, to, a, b, c;
};

// Registers: first the inputs, then the constants, then those that operations write.
struct Program {
  const Instruction* code = nullptr;
  Index count = 0, registers = 0, inputs = 0;
  const float* constants = nullptr;
  Index constant_count = 0;
  const Index* results = nullptr;  // registers
  Index result_count = 0;

  bool valid() const {
    auto there = [&](Index i) { return i >= 0 && i < registers; };
    bool right = inputs <= kInputs && result_count <= kResults && inputs + constant_count <= registers;
    for (Index i = 0; i < result_count; i++) right = right && there(results[i]);
    for (Index i = 0; i < count; i++) {
      const Instruction& x = code[i];
      right = right && x.operation >= 0 && x.operation < static_cast<Index>(Operation::kCount);
      right = right && x.to >= inputs + constant_count && there(x.to) && there(x.a) && there(x.b) && there(x.c);
    }
    return right;
  }
};

// A part of a matrix that a program reads or writes, from its first number on.
struct Block {
  enum Kind { kMatrix, kByRow, kRowSums };  // kByRow: one number for each row; kRowSums: the sum of each kChunk columns
  void* data = nullptr;
  Index stride = 0;  // from one row to the next
  bool narrow = false;
  Kind kind = kMatrix;
};

// ---------------------------------------------------------------------------------------------------------------------
// Functions of vectors

template <class M>
struct Functions {
  using V = typename M::Vector;
  using I = typename VectorOf<std::int32_t, M::L>::Type;

  INLINE static V all(float x) { return V{} + x; }
  INLINE static I bits(V x) { return reinterpret_cast<I&>(x); }
  INLINE static V number(I x) { return reinterpret_cast<V&>(x); }
  INLINE static V absolute(V x) { return number(bits(x) & 0x7fffffff); }
  INLINE static V with_sign(V x, V sign) { return number(bits(absolute(x)) | (bits(sign) & ~0x7fffffff)); }
  INLINE static V or_nan(V x, V otherwise) { return x != x ? x : otherwise; }
  INLINE static V maximum(V x, V y) { return or_nan(x, x > y ? x : y); }
  INLINE static V minimum(V x, V y) { return or_nan(x, x < y ? x : y); }

  INLINE static V polynomial(V, float last) { return all(last); }
  template <class... Rest>
  INLINE static V polynomial(V x, float first, Rest... rest) {
    return polynomial(x, rest...) * x + first;
  }

  // 2^n, n from -252 to 254, times x.
  INLINE static V scaled(V x, I n) {
    I half = n >> 1;
    return x * number((half + 127) << 23) * number((n - half + 127) << 23);
  }

  INLINE static V exp(V x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a number that is added to it is rounded to an integer
    V cut = minimum(maximum(x, all(-104.0f)), all(89.0f));
    V shifted = cut * 1.44269504f + kRound, n = shifted - kRound;
    V r = cut - n * 0.693359375f + n * 2.12194440e-4f;
    V y = polynomial(r, 0.5f, 0.16666577756f, 0.04166685417f, 0.00836316217f, 0.00139012898f) * r * r + r + 1.0f;
    return or_nan(x, scaled(y, bits(shifted) - bits(all(kRound))));
  }

  INLINE static V expm1(V x) {
    V small = polynomial(x, 0.5f, 0.16666667163f, 0.04166645929f, 0.00833336171f, 0.00139344868f, 0.00019858123f);
    return absolute(x) < all(0.34f) ? small * x * x + x : exp(x) - 1.0f;
  }

  INLINE static V log(V x) {
    constexpr float kTiny = 1.17549435e-38f, kInfinity = __builtin_inff();
    V zero = all(0.0f), y = x < all(kTiny) ? x * 8388608.0f : x, shifted = x < all(kTiny) ? all(23.0f) : zero;
    I above = bits(y) - 0x3f3504f3;  // from sqrt(1/2) on
    V n = __builtin_convertvector(above >> 23, V) - shifted;
    V f = number((above & 0x007fffff) + 0x3f3504f3) - 1.0f;
    V p = polynomial(f, 0.33333331347f, -0.24999994040f, 0.20000714064f, -0.16668057442f, 0.14249321818f,
                     -0.12420148402f, 0.11677012593f, -0.11514561633f, 0.07037585974f);
    V found = n * 0.693359375f + (f - (f * f * 0.5f - f * f * f * p) - n * 2.12194440e-4f);
    found = x == zero ? all(-kInfinity) : found;
    found = x == all(kInfinity) ? x : found;
    return or_nan(x, x < zero ? all(__builtin_nanf("")) : found);
  }

  // log(u) has the error of u = 1 + x, which the quotient of x and u - 1 takes back.
  INLINE static V log1p(V x) {
    V u = x + 1.0f, found = log(u) * (x / (u - 1.0f));
    found = u == all(__builtin_inff()) ? x : found;
    return u == all(1.0f) ? x : found;
  }

  INLINE static V logistic(V x) { return 1.0f / (exp(-x) + 1.0f); }

  INLINE static V tanh(V x) {
    V e = expm1(2.0f * minimum(absolute(x), all(20.0f)));
    return or_nan(x, with_sign(e / (e + 2.0f), x));
  }

  INLINE static V erf_near_0(V x) {
    return x * polynomial(x * x, 1.12837910652f, -0.37612581253f, 0.11282838136f, -0.02680790424f, 0.00506066345f,
                          -0.00063743576f);
  }

  // erfc of numbers from 0.8 on: exp(-x^2), of which x^2 is exact for the upper half of x, times a polynomial.
  INLINE static V erfc_of_large(V x) {
    V cut = minimum(x, all(11.0f)), upper = number(bits(cut) & ~0xfff), t = (cut - 2.0f) / (cut + 2.0f);
    V q = polynomial(t, 1.27697837353f, -0.09276169539f, -0.16603498161f, 0.16398513317f, -0.05412946269f,
                     -0.00751275569f, 0.00809110422f);
    return exp(-upper * upper) * exp((upper - cut) * (upper + cut)) * q / (cut * 2.0f + 1.0f);
  }

  INLINE static V erf(V x) {
    V large = with_sign(1.0f - erfc_of_large(absolute(x)), x);
    return or_nan(x, absolute(x) < all(0.8f) ? erf_near_0(x) : large);
  }

  INLINE static V erfc(V x) {
    V large = erfc_of_large(absolute(x));
    V found = x < all(0.0f) ? 2.0f - large : large;
    return or_nan(x, absolute(x) < all(0.8f) ? 1.0f - erf_near_0(x) : found);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Blocks and registers

// Rows of a block, which has `columns` here, into a register.
template <class M>
INLINE void load(const Block& x, Index row, Index rows, Index column, Index columns, float* to) {
  for (Index i = 0; i < rows; i++, to += kChunk) {
    Index first = (row + i) * x.stride + (x.kind == Block::kByRow ? 0 : column);
    const float* wide = static_cast<const float*>(x.data) + first;
    const Narrow* narrow = static_cast<const Narrow*>(x.data) + first;
    if (x.kind == Block::kByRow) {
      std::fill(to, to + kChunk, x.narrow ? widened(*narrow) : *wide);
    } else if (x.narrow) {
      for (Index j = 0; j < columns; j++) to[j] = widened(narrow[j]);
    } else {
      for (Index j = 0; j < columns; j++) to[j] = wide[j];
    }
  }
}

// Rows of a register into a block; where their sums are stored, columns that the block does not have become zeros.
template <class M>
INLINE void store(const Block& x, Index row, Index rows, Index column, Index columns, float* from) {
  using V = typename M::Vector;
  for (Index i = 0; i < rows; i++, from += kChunk) {
    if (x.kind == Block::kRowSums) {
      std::fill(from + columns, from + kChunk, 0.0f);
      V sums = V{};
      for (Index j = 0; j < kChunk; j += M::L) sums += *reinterpret_cast<V*>(from + j);
      float sum = 0;
      for (Index l = 0; l < M::L; l++) sum += sums[l];
      static_cast<float*>(x.data)[(row + i) * x.stride + column / kChunk] = sum;
    } else if (x.narrow) {
      Narrow* to = static_cast<Narrow*>(x.data) + (row + i) * x.stride + column;
      for (Index j = 0; j < columns; j++) to[j] = narrowed(from[j]);
    } else {
      float* to = static_cast<float*>(x.data) + (row + i) * x.stride + column;
      for (Index j = 0; j < columns; j++) to[j] = from[j];
    }
  }
}

// Call a function of one to three vectors for all of the registers of an instruction.
template <class M, class F>
INLINE void each(const Instruction& x, float* registers, const F& function) {
  using V = typename M::Vector;
  auto vectors = [&](Index i) { return reinterpret_cast<V*>(registers + i * kNumbers); };
  V *to = vectors(x.to), *a = vectors(x.a), *b = vectors(x.b), *c = vectors(x.c);
  for (Index i = 0; i < kNumbers / M::L; i++) to[i] = function(a[i], b[i], c[i]);
}

template <class M>
INLINE void execute(const Instruction& x, float* r) {
  using F = Functions<M>;
  using V = typename M::Vector;
  switch (static_cast<Operation>(x.operation)) {
    case Operation::kAdd: return each<M>(x, r, [](V a, V b, V) INLINE_LAMBDA { return a + b; });
    case Operation::kSubtract: return each<M>(x, r, [](V a, V b, V) INLINE_LAMBDA { return a - b; });
    case Operation::kMultiply: return each<M>(x, r, [](V a, V b, V) INLINE_LAMBDA { return a * b; });
    case Operation::kDivide: return each<M>(x, r, [](V a, V b, V) INLINE_LAMBDA { return a / b; });
    case Operation::kMaximum: return each<M>(x, r, [](V a, V b, V) INLINE_LAMBDA { return F::maximum(a, b); });
    case Operation::kMinimum: return each<M>(x, r, [](V a, V b, V) INLINE_LAMBDA { return F::minimum(a, b); });
    case Operation::kGreater: return each<M>(x, r, [](V a, V b, V) INLINE_LAMBDA { return a > b ? F::all(1.0f) : V{}; });
    case Operation::kGreaterEqual: return each<M>(x, r, [](V a, V b, V) INLINE_LAMBDA { return a >= b ? F::all(1.0f) : V{}; });
    case Operation::kEqual: return each<M>(x, r, [](V a, V b, V) INLINE_LAMBDA { return a == b ? F::all(1.0f) : V{}; });
    case Operation::kSelect:
      return each<M>(x, r, [](V a, V b, V c) INLINE_LAMBDA { return a != V{} ? b : c; });
    case Operation::kAbsolute: return each<M>(x, r, [](V a, V, V) INLINE_LAMBDA { return F::absolute(a); });
    case Operation::kSqrt: {
      const float* from = r + x.a * kNumbers;
      for (Index i = 0; i < kNumbers; i++) r[x.to * kNumbers + i] = __builtin_sqrtf(from[i]);
      return;
    }
    case Operation::kExp: return each<M>(x, r, [](V a, V, V) INLINE_LAMBDA { return F::exp(a); });
    case Operation::kExpm1: return each<M>(x, r, [](V a, V, V) INLINE_LAMBDA { return F::expm1(a); });
    case Operation::kLog: return each<M>(x, r, [](V a, V, V) INLINE_LAMBDA { return F::log(a); });
    case Operation::kLog1p: return each<M>(x, r, [](V a, V, V) INLINE_LAMBDA { return F::log1p(a); });
    case Operation::kTanh: return each<M>(x, r, [](V a, V, V) INLINE_LAMBDA { return F::tanh(a); });
    case Operation::kLogistic: return each<M>(x, r, [](V a, V, V) INLINE_LAMBDA { return F::logistic(a); });
    case Operation::kErf: return each<M>(x, r, [](V a, V, V) INLINE_LAMBDA { return F::erf(a); });
    case Operation::kErfc: return each<M>(x, r, [](V a, V, V) INLINE_LAMBDA { return F::erfc(a); });
    case Operation::kCount: return;
  }
}

// Run a program over m rows and n columns of its blocks. A block of row sums starts at a multiple of kChunk columns.
template <class M>
INLINE void run(const Program& p, const Block* inputs, const Block* results, Index m, Index n, Scratch& scratch) {
  float* registers = scratch.registers.get(p.registers * kNumbers);
  std::fill(registers, registers + p.inputs * kNumbers, 0.0f);
  for (Index i = 0; i < p.constant_count; i++) {
    float* constant = registers + (p.inputs + i) * kNumbers;
    std::fill(constant, constant + kNumbers, p.constants[i]);
  }
  for (Index row = 0; row < m; row += kRows) {
    Index rows = std::min(kRows, m - row);
    for (Index column = 0; column < n; column += kChunk) {
      Index columns = std::min(kChunk, n - column);
      for (Index i = 0; i < p.inputs; i++) load<M>(inputs[i], row, rows, column, columns, registers + i * kNumbers);
      for (Index i = 0; i < p.count; i++) execute<M>(p.code[i], registers);
      for (Index i = 0; i < p.result_count; i++) {
        store<M>(results[i], row, rows, column, columns, registers + p.results[i] * kNumbers);
      }
    }
  }
}

}  // namespace trencadis

#endif  // TRENCADIS_PROGRAM_H_
