// One tile of a product on one thread: C[m, n] = alpha * A[m, k] B[k, n] + bias + beta * C, all matrices row by row.
//
//     for each block of k                    at most kBlock long
//       for each panel of A                  a few rows, copied to memory that stays in the L1 cache
//         for each panel of B                NR columns, packed into memory that stays in the L2 cache
//           registers += panel * panel       then added to C
//
// The first panel of A reads B where it is stored, and packs it on the way: a product of few rows reads each number
// once, while it multiplies. Each sum is over one block of k after the other, and in a block over one k after the other,
// however m and n are cut: results do not depend on tiles, and so not on threads.
//
// Vectors are those that GCC and Clang have, and functions are inlined into one that is compiled for the instructions
// of a machine. bfloat16 is multiplied in pairs along k where there is an instruction for it, else as float.

#ifndef TRENCADIS_KERNEL_H_
#define TRENCADIS_KERNEL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace trencadis {

using Index = std::int64_t;
using Narrow = std::uint16_t;  // the bits of a bfloat16

#define INLINE [[gnu::always_inline]] inline
#define INLINE_LAMBDA __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

constexpr Index kBlock = 512;                // the longest block of k, in numbers or pairs
constexpr Index kColumns = 512;              // the most columns of a tile
constexpr Index kPanelStride = kBlock + 16;  // from one row of a panel of A to the next: no multiple of 4 KB
constexpr Index kFew = 4;                    // rows of A up to which B need not be packed if k is last in it
constexpr Index kAhead = 16;                 // rows of B that are prefetched before they are read

// A or B of a product, from its first number on. A stored row is a row of m or n if k is last, else a row of k.
struct Operand {
  const void* data;
  Index stride;                        // numbers from one stored row to the next
  bool k_last;                         // whether numbers along k are side by side
  bool narrow = false;                 // bfloat16
  const std::int32_t* rows = nullptr;  // which stored row each one is, if they are gathered
  Index stored = 0;                    // how many rows there are to gather from

  // Stored row i; an index of rows that are not there is cut, since it is a number of a program that runs.
  template <class S>
  INLINE const S* row(Index i) const {
    if (rows != nullptr) i = std::clamp<Index>(rows[i], 0, stored - 1);
    return static_cast<const S*>(data) + i * stride;
  }
};

struct Product {
  Index m, n, k;
  Operand a, b;
  void* c;
  Index stride;                 // numbers from one row of C to the next
  bool narrow = false;          // C is bfloat16
  bool keep = false;            // C holds numbers that the product is added to
  float alpha = 1, beta = 1;    // beta counts if C is kept
  const float* bias = nullptr;  // [n]
  Index top = 0, left = 0;      // the row and the column of the product that the first number of C is
};

// Rows [m0, m1) and columns [n0, n1) of a product.
struct Tile {
  Index product, m0, m1, n0, n1;
};

// Memory of a thread, which grows to what it is asked for.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory() { ::operator delete(data_, kAlignment); }

  float* get(Index count) {
    if (count > count_) {
      ::operator delete(data_, kAlignment);
      data_ = nullptr, count_ = 0;
      data_ = static_cast<float*>(::operator new(static_cast<std::size_t>(count) * sizeof(float), kAlignment));
      count_ = count;
    }
    return data_;
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  float* data_ = nullptr;
  Index count_ = 0;
};

// A panel of A, a block of B of all columns of a tile, tiles whose sums are not stored as they are, the registers of
// a program.
struct Scratch {
  Memory a, b, c, sums, registers;
};

// A vector that may be stored anywhere and read as other types; GCC takes these attributes in a member only.
template <class E, int kCount>
struct VectorOf {
  using Type [[gnu::vector_size(kCount * sizeof(E)), gnu::aligned(sizeof(E)), gnu::may_alias]] = E;
};

// The registers of a machine: vectors of L numbers, and panels of MR rows and NV vectors of sums.
template <int kBytes, int kRows, int kVectors, bool kPairwise = false>
struct Machine {
  using Vector = typename VectorOf<float, kBytes / sizeof(float)>::Type;
  static constexpr int L = kBytes / sizeof(float), MR = kRows, NV = kVectors, NR = L * NV;
  static constexpr bool kPairs = kPairwise;  // a number of a panel is a pair of bfloat16, as bits

  // sums + x * y, where x is one number or as many as y.
  template <class X>
  INLINE static void add_product(Vector& sums, X x, Vector y) {
    if constexpr (!kPairs) {
      sums += x * y;
#if defined(__x86_64__)
    } else {
      Vector total = sums;  // in a register: a reference would be written to memory
      asm("vdpbf16ps %2, %1, %0" : "+v"(total) : "v"(y), "v"(x));
      sums = total;
#endif
    }
  }

  // A number of a panel, as a factor of a vector.
  INLINE static auto factor(const float& x) {
    if constexpr (!kPairs) {
      return x;
    } else {
      std::int32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      typename VectorOf<std::int32_t, L>::Type all = typename VectorOf<std::int32_t, L>::Type{} + bits;
      return reinterpret_cast<Vector&>(all);
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Numbers: from how they are stored to how they are multiplied

INLINE float widened(Narrow x) {  // exact: a bfloat16 is the upper half of a float
  std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

INLINE Narrow narrowed(float x) {  // to the nearest, and to even between two
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<Narrow>(x != x ? bits >> 16 | 0x40 : rounded);
}

enum class Kind { kSame, kWidened, kPairs };

// How one operand is read: numbers of panels, which are pairs if the machine has them, from stored ones.
template <class M, Kind kKind>
struct Reader {
  using V = typename M::Vector;
  using S = std::conditional_t<kKind == Kind::kSame, float, Narrow>;
  static constexpr Index kStep = kKind == Kind::kPairs ? 2 : 1;  // stored numbers along k for one of a panel

  using Bits = typename VectorOf<std::uint32_t, M::L>::Type;

  // The bits of L stored numbers, each in the lower half of a number.
  INLINE static Bits bits(const Narrow* x) {
    return __builtin_convertvector(*reinterpret_cast<const typename VectorOf<Narrow, M::L>::Type*>(x), Bits);
  }

  // Numbers u to u + L of a row along k.
  INLINE static V along(const S* row, Index u) {
    if constexpr (kKind == Kind::kSame) {
      return *reinterpret_cast<const V*>(row + u);
    } else if constexpr (kKind == Kind::kWidened) {
      Bits all = bits(row + u) << 16;
      return reinterpret_cast<V&>(all);
    } else {
      auto pairs = *reinterpret_cast<const typename VectorOf<Narrow, 2 * M::L>::Type*>(row + 2 * u);
      return reinterpret_cast<V&>(pairs);
    }
  }

  // A number from one or two stored ones.
  INLINE static float joined(S low, S high) {
    if constexpr (kKind == Kind::kSame) {
      return low;
    } else if constexpr (kKind == Kind::kWidened) {
      return widened(low);
    } else {
      std::uint32_t both = low | static_cast<std::uint32_t>(high) << 16;
      float number;
      std::memcpy(&number, &both, sizeof number);
      return number;
    }
  }

  // Number u of a row along k, of which `k` numbers are stored.
  INLINE static float one(const S* row, Index u, Index k) {
    return joined(row[u * kStep], u * kStep + 1 < k ? row[u * kStep + 1] : S(0));
  }

  // Numbers u of `count` columns, where stored rows are along k: in whole vectors if `vectors`.
  INLINE static void across(const Operand& x, Index u, Index k, Index first, Index count, bool vectors, float* to) {
    static constexpr S kZeros[256] = {};
    const S* low = x.row<S>(u * kStep) + first;
    const S* high = kStep == 1 ? low : u * kStep + 1 < k ? x.row<S>(u * kStep + 1) + first : kZeros;
    if (!vectors) {
      for (Index j = 0; j < count; j++) to[j] = joined(low[j], high[j]);
    } else if constexpr (kKind == Kind::kPairs) {
      for (Index j = 0; j < count; j += M::L) *reinterpret_cast<Bits*>(to + j) = bits(low + j) | bits(high + j) << 16;
    } else {
      for (Index j = 0; j < count; j += M::L) *reinterpret_cast<V*>(to + j) = along(low, j);
    }
  }
};

// Call a function with the reader of an operand.
template <class M, class F>
INLINE void with_reader(const Operand& x, const F& function) {
  if (!x.narrow) {
    if constexpr (!M::kPairs) function(Reader<M, Kind::kSame>{});
  } else if constexpr (M::kPairs) {
    function(Reader<M, Kind::kPairs>{});
  } else {
    function(Reader<M, Kind::kWidened>{});
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Panels

// The transpose of L vectors: in each stage, blocks of S numbers off the diagonal change places.
template <class V, int L, int S, std::size_t... E>
INLINE void exchange(V& low, V& high, std::index_sequence<E...>) {
  V a = low, b = high;
  low = __builtin_shufflevector(a, b, (E & S ? int(L + E - S) : int(E))...);
  high = __builtin_shufflevector(a, b, (E & S ? int(L + E) : int(E + S))...);
}

// All stages, from halves of a vector down to single numbers.
template <class V, int L, int S = L / 2>
INLINE void transpose(V* x) {
  UNROLL for (int i = 0; i < L; i++) {
    if (!(i & S)) exchange<V, L, S>(x[i], x[i + S], std::make_index_sequence<L>{});
  }
  if constexpr (S > 1) transpose<V, L, S / 2>(x);
}

// Numbers k0 to k0 + k and columns n0 to n0 + width of B as a panel [k, NR], filled up with zeros to whole vectors.
// There are `stored` numbers along k.
template <class M, class R>
INLINE void pack_b(R, const Operand& b, Index stored, Index k0, Index k, Index n0, Index width, float* to) {
  using S = typename R::S;
  using V = typename M::Vector;
  Index vectors = (width + M::L - 1) / M::L;
  bool whole = width == vectors * M::L;
  if (!b.k_last) {
    for (Index p = 0; p < k; p++, to += M::NR) {
      if (b.rows == nullptr) __builtin_prefetch(b.row<S>((k0 + p) * R::kStep + kAhead) + n0);
      R::across(b, k0 + p, stored, n0, width, whole, to);
      if (!whole) std::fill(to + width, to + vectors * M::L, 0.0f);
    }
    return;
  }
  Index done = 0, full = whole ? std::min(k, stored / R::kStep - k0) / M::L * M::L : 0;
  for (; done < full; done += M::L) {
    for (Index j = 0; j < width; j += M::L) {
      V x[M::L];
      UNROLL for (int i = 0; i < M::L; i++) {
        const S* row = b.row<S>(n0 + j + i);
        __builtin_prefetch(row + (k0 + done + 4 * M::L) * R::kStep);
        x[i] = R::along(row, k0 + done);
      }
      transpose<V, M::L>(x);
      UNROLL for (int i = 0; i < M::L; i++) *reinterpret_cast<V*>(to + (done + i) * M::NR + j) = x[i];
    }
  }
  for (Index j = 0; j < vectors * M::L; j++) {
    const S* row = b.row<S>(n0 + std::min(j, width - 1));
    for (Index p = done; p < k; p++) to[p * M::NR + j] = j < width ? R::one(row, k0 + p, stored) : 0.0f;
  }
}

// Rows m0 to m0 + rows of m of A, numbers k0 to k0 + k: as [rows, kPanelStride] if k is last, else as [k, MR].
template <class M, class R>
INLINE void pack_a(R, const Operand& a, Index m, Index stored, Index m0, Index rows, Index k0, Index k, float* to) {
  using S = typename R::S;
  if (a.k_last) {
    for (Index i = 0; i < rows; i++, to += kPanelStride) {
      const S* row = a.row<S>(m0 + i);
      Index p = 0, whole = std::min(k, stored / R::kStep - k0) / M::L * M::L;
      for (; p < whole; p += M::L) *reinterpret_cast<typename M::Vector*>(to + p) = R::along(row, k0 + p);
      for (; p < k; p++) to[p] = R::one(row, k0 + p, stored);
    }
  } else {
    constexpr Index kWhole = (M::MR + M::L - 1) / M::L * M::L;
    bool vectors = m0 + kWhole <= m;  // a few numbers more than there are rows, which the next ones overwrite
    for (Index p = 0; p < k; p++, to += M::MR) {
      if (a.rows == nullptr) __builtin_prefetch(a.row<S>((k0 + p) * R::kStep + kAhead) + m0);
      R::across(a, k0 + p, stored, m0, vectors ? kWhole : rows, vectors, to);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Registers

// A panel of B is read packed, [k, NR], or from rows of B, from which it is packed; `step` is 0 if it is not read again.
struct Source {
  float* packed;
  Index step;
  const float* rows;
  Index stride;
};

// Where sums go: alpha * sum, plus what is there if `add`.
struct Store {
  float* c;
  Index stride;
  float alpha;
  bool add;
};

// C[R, NV * L] from A[R, k] and B[k, NR]; number (i, p) of A is at a[i * kRow + p * kColumn].
template <class M, int R, int NV, int kRow, int kColumn, bool kPack>
INLINE void multiply(const float* a, Source b, Index k, Store out) {
  using V = typename M::Vector;
  V sums[R][NV];
  UNROLL for (int i = 0; i < R; i++) {
    UNROLL for (int v = 0; v < NV; v++) sums[i][v] = V{};
  }
#pragma GCC unroll 2
  for (Index p = 0; p < k; p++) {
    V row[NV];
    UNROLL for (int v = 0; v < NV; v++) {
      if constexpr (kPack) {
        row[v] = reinterpret_cast<const V*>(b.rows + p * b.stride)[v];
        reinterpret_cast<V*>(b.packed + p * b.step)[v] = row[v];
        __builtin_prefetch(reinterpret_cast<const V*>(b.rows + (p + kAhead) * b.stride) + v);
      } else {
        row[v] = reinterpret_cast<const V*>(b.packed + p * M::NR)[v];
      }
    }
    UNROLL for (int i = 0; i < R; i++) {
      auto x = M::factor(a[i * kRow + p * kColumn]);
      UNROLL for (int v = 0; v < NV; v++) M::add_product(sums[i][v], x, row[v]);
    }
  }
  UNROLL for (int i = 0; i < R; i++) {
    UNROLL for (int v = 0; v < NV; v++) {
      V* to = reinterpret_cast<V*>(out.c + i * out.stride) + v;
      *to = out.add ? *to + out.alpha * sums[i][v] : out.alpha * sums[i][v];
    }
  }
}

// The same with as many rows as there are, of 1 to MR.
template <class M, bool kLast, bool kPack, int NV = M::NV, int R = M::MR>
INLINE void multiply_rows(Index rows, const float* a, Source b, Index k, Store out) {
  if (rows == R) {
    multiply<M, R, NV, kLast ? kPanelStride : 1, kLast ? 1 : M::MR, kPack>(a, b, k, out);
  } else if constexpr (R > 1) {
    multiply_rows<M, kLast, kPack, NV, R - 1>(rows, a, b, k, out);
  }
}

// One to kFew rows of A, where k is last in A and in B: nothing is packed, and each sum is that of L sums.
template <class M, class Reader, int R = kFew>
INLINE void multiply_few(Reader reader, const Product& p, const Tile& t, Store out) {
  if constexpr (R > 1) {
    if (t.m1 - t.m0 < R) return multiply_few<M, Reader, R - 1>(reader, p, t, out);
  }
  using V = typename M::Vector;
  using S = typename Reader::S;
  constexpr int kTogether = 4;  // rows of B
  for (Index n0 = t.n0; n0 < t.n1; n0 += kTogether) {
    const S *a[R], *b[kTogether];
    V sums[R][kTogether];
    UNROLL for (int i = 0; i < R; i++) a[i] = p.a.template row<S>(t.m0 + i);
    UNROLL for (int j = 0; j < kTogether; j++) b[j] = p.b.template row<S>(std::min<Index>(n0 + j, t.n1 - 1));
    UNROLL for (int i = 0; i < R; i++) {
      UNROLL for (int j = 0; j < kTogether; j++) sums[i][j] = V{};
    }
    Index whole = p.k / Reader::kStep / M::L * M::L;
    for (Index q = 0; q < whole; q += M::L) {
      V x[R];
      UNROLL for (int i = 0; i < R; i++) x[i] = Reader::along(a[i], q);
      UNROLL for (int j = 0; j < kTogether; j++) {
        V y = Reader::along(b[j], q);
        UNROLL for (int i = 0; i < R; i++) M::add_product(sums[i][j], x[i], y);
      }
    }
    for (int i = 0; i < R; i++) {
      for (int j = 0; j < kTogether && n0 + j < t.n1; j++) {
        float sum = 0, *c = out.c + i * out.stride + (n0 - t.n0) + j;
        for (int l = 0; l < M::L; l++) sum += sums[i][j][l];
        for (Index q = whole * Reader::kStep; q < p.k; q++) {
          if constexpr (std::is_same_v<S, float>) {
            sum += a[i][q] * b[j][q];
          } else {
            sum += widened(a[i][q]) * widened(b[j][q]);
          }
        }
        *c = (out.add ? *c : 0.0f) + out.alpha * sum;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tiles

// bias + beta * C, as far as there are a bias and a C, in the place where sums are added up.
template <class S>
INLINE void begin(const Product& p, const Tile& t, float* c, Index stride) {
  bool read = p.keep && p.beta != 0.0f;  // NaN in C does not count if beta is 0
  for (Index i = t.m0; i < t.m1; i++, c += stride) {
    const S* old = static_cast<const S*>(p.c) + (i - p.top) * p.stride - p.left;
    for (Index j = t.n0; j < t.n1; j++) {
      float start = p.bias != nullptr ? p.bias[j] : 0.0f;
      if constexpr (std::is_same_v<S, float>) {
        c[j - t.n0] = read ? p.beta * old[j] + start : start;
      } else {
        c[j - t.n0] = read ? p.beta * widened(old[j]) + start : start;
      }
    }
  }
}

// The numbers from which piece i of `count` starts, of 0 to `size`: pieces are as long as each other, or one longer.
INLINE Index piece(Index size, Index count, Index i) { return size * i / count; }

// The sums of a tile into `out`, where its first number is.
template <class M>
INLINE void add_up(const Product& p, const Tile& t, Index block, Scratch& scratch, Store out) {
  Index units = M::kPairs ? (p.k + 1) / 2 : p.k, blocks = (units + block - 1) / block;
  Index panels = (t.m1 - t.m0 + M::MR - 1) / M::MR, columns = (t.n1 - t.n0 + M::NR - 1) / M::NR * M::NR;
  float *a = scratch.a.get(M::MR * kPanelStride + M::L), *packed = scratch.b.get(block * columns), edge[M::MR * M::NR];
  for (Index j = 0; j < blocks; j++, out.add = true) {
    Index k0 = piece(units, blocks, j), k = piece(units, blocks, j + 1) - k0;
    for (Index i = 0; i < panels; i++) {
      Index m0 = t.m0 + piece(t.m1 - t.m0, panels, i), rows = t.m0 + piece(t.m1 - t.m0, panels, i + 1) - m0;
      with_reader<M>(p.a, [&](auto reader) { pack_a<M>(reader, p.a, p.m, p.k, m0, rows, k0, k, a); });
      for (Index n0 = t.n0; n0 < t.n1; n0 += M::NR) {
        // at the edge of a tile a panel starts earlier if it can, so that its vectors are full, or it has only one
        Index width = std::min<Index>(M::NR, t.n1 - n0), vectors = width <= M::L ? 1 : M::NV;
        Index before = std::min(vectors * M::L - width, n0);
        bool whole = width == M::NR, pack = i == 0 && whole && !p.b.k_last && !p.b.narrow && p.b.rows == nullptr;
        Source b{packed + (n0 - t.n0) * k, panels > 1 ? M::NR : 0, nullptr, p.b.stride};
        if (pack) {
          b.rows = p.b.template row<float>(k0) + n0;
        } else if (i == 0) {
          with_reader<M>(p.b, [&](auto reader) {
            pack_b<M>(reader, p.b, p.k, k0, k, n0 - before, width + before, b.packed);
          });
        }
        float* c = out.c + (m0 - t.m0) * out.stride + (n0 - t.n0);
        Store to = whole ? Store{c, out.stride, out.alpha, out.add} : Store{edge, M::NR, out.alpha, false};
        if (p.a.k_last) {
          pack           ? multiply_rows<M, true, true>(rows, a, b, k, to)
          : vectors == 1 ? multiply_rows<M, true, false, 1>(rows, a, b, k, to)
                         : multiply_rows<M, true, false>(rows, a, b, k, to);
        } else {
          pack           ? multiply_rows<M, false, true>(rows, a, b, k, to)
          : vectors == 1 ? multiply_rows<M, false, false, 1>(rows, a, b, k, to)
                         : multiply_rows<M, false, false>(rows, a, b, k, to);
        }
        for (Index r = 0; r < rows && !whole; r++, c += out.stride) {
          const float* from = edge + r * M::NR + before;
          for (Index q = 0; q < width; q++) c[q] = (out.add ? c[q] : 0.0f) + from[q];
        }
      }
    }
  }
}

// A tile of C, whole: what it starts from, its sums, and where C is bfloat16 their rounding.
template <class M>
INLINE void compute(const Product& p, const Tile& t, Index block, Scratch& scratch) {
  Index m = t.m1 - t.m0, n = t.n1 - t.n0;
  Store out{nullptr, p.stride, p.alpha, p.keep};
  bool begun = p.bias != nullptr || p.k == 0 || (p.keep && (p.narrow || p.beta != 1.0f));
  if (p.narrow) {
    out.c = scratch.c.get(m * n), out.stride = n;
    if (begun) begin<Narrow>(p, t, out.c, out.stride);
  } else {
    out.c = static_cast<float*>(p.c) + (t.m0 - p.top) * p.stride + (t.n0 - p.left);
    if (begun) begin<float>(p, t, out.c, out.stride);
  }
  out.add = out.add || begun;
  if (p.k > 0) {
    if (p.m <= kFew && p.a.k_last && p.b.k_last && p.a.narrow == p.b.narrow) {
      with_reader<M>(p.a, [&](auto reader) { multiply_few<M>(reader, p, t, out); });
    } else {
      add_up<M>(p, t, block, scratch, out);
    }
  }
  if (p.narrow) {
    for (Index i = 0; i < m; i++) {
      Narrow* to = static_cast<Narrow*>(p.c) + (t.m0 - p.top + i) * p.stride + (t.n0 - p.left);
      for (Index j = 0; j < n; j++) to[j] = narrowed(out.c[i * n + j]);
    }
  }
}

}  // namespace trencadis

#endif  // TRENCADIS_KERNEL_H_
