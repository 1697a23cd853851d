// The tiles of many products, and the threads that compute them: those of XLA, and the one that calls.

#ifndef TRENCADIS_TILES_H_
#define TRENCADIS_TILES_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "machines.h"

namespace trencadis {

constexpr Index kTilesPerThread = 8;      // about as many, so that threads end together
constexpr Index kLeastWork = 1 << 20;     // multiplications that are worth a thread
constexpr Index kWorkPerNumber = 16;      // what a number of C costs beside its sum, in multiplications
constexpr Index kShortestRows = 48;       // tiles are not cut below this, or packing takes longer than multiplying
constexpr Index kFewestColumns = 64;
constexpr std::size_t kHugePage = 2 << 20;

// Work that threads share: each takes the next piece. A thread of XLA that comes late finds nothing to do; the caller
// does not wait for it, and so calls that wait in all threads of XLA do not wait for each other.
//
// Nothing is thrown where XLA's threads run: the first exception is that of `wait`, once no thread computes any more.
class Shared {
 public:
  explicit Shared(Index count) : count_(count) {}

  template <class F>
  void take_all(const F& piece) {
    for (Index i = next_++; i < count_; i = next_++) {
      try {
        if (!failed_) piece(i);
      } catch (...) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!failed_) error_ = std::current_exception();
        failed_ = true;
      }
      if (++done_ == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_ == count_; });
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const Index count_;
  std::atomic<Index> next_{0}, done_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable finished_;
};

// What products cost, in multiplications: of how many each is made, and what a number of C takes beside its sums.
struct Cost {
  Index products = 1, number = kWorkPerNumber;
};

inline Index work(const Product& p, Index m, Index n, const Cost& cost) {
  return m * n * (cost.products * p.k + cost.number);
}

// The largest tile: rows and columns of the result, and a block of what is summed.
struct Limits {
  Index m, k, n;
};

// Cut products into tiles of at most `most` work, the longer side first; those with the most work come first.
inline std::vector<Tile> tiles_of(const std::vector<Product>& products, Index most, const Limits& limits,
                                  const Cost& cost) {
  std::vector<std::pair<Index, Tile>> found;
  for (std::size_t i = 0; i < products.size(); i++) {
    const Product& p = products[i];
    Index m = std::min(p.m, limits.m), n = std::min(p.n, limits.n);
    while (work(p, m, n, cost) > most) {
      bool wide = n > kFewestColumns, tall = m > kShortestRows;
      if (wide && (n >= m || !tall)) {
        n = ((n + 1) / 2 + kFewestColumns - 1) / kFewestColumns * kFewestColumns;
      } else if (tall) {
        m = ((m + 1) / 2 + kShortestRows - 1) / kShortestRows * kShortestRows;
      } else {
        break;
      }
    }
    for (Index m0 = 0; m0 < p.m; m0 += m) {
      for (Index n0 = 0; n0 < p.n; n0 += n) {
        Tile t{static_cast<Index>(i), m0, std::min(m0 + m, p.m), n0, std::min(n0 + n, p.n)};
        found.emplace_back(work(p, t.m1 - t.m0, t.n1 - t.n0, cost), t);
      }
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<Tile> tiles;
  for (const auto& each : found) tiles.push_back(each.second);
  return tiles;
}

// The memory of this thread, kept from call to call, so that its pages are there.
inline Scratch& scratch_of_thread() {
  thread_local Scratch scratch;
  return scratch;
}

// Compute all products, which write different parts of memory, by `function(products, tile, block of k, scratch)`.
//
// A pool has `num_threads()` and `Schedule(task)`. What is thrown is thrown here, when all threads are done.
template <class Pool, class F>
void compute_all(std::vector<Product> products, const Limits& limits, Pool& pool, const F& function,
                 const Cost& cost = {}) {
  Index total = 0;
  for (const Product& p : products) total += work(p, p.m, p.n, cost);
  Index threads = std::max<Index>(1, std::min<Index>(pool.num_threads(), total / kLeastWork));
  Index most = threads > 1 ? total / (threads * kTilesPerThread) : total;

  struct State {
    std::vector<Product> products;
    std::vector<Tile> tiles;
    Index block;
    F function;
    Shared shared;
    void run() {
      Scratch& scratch = scratch_of_thread();
      shared.take_all([&](Index i) { function(products, tiles[static_cast<std::size_t>(i)], block, scratch); });
    }
  };
  std::vector<Tile> tiles = tiles_of(products, most, limits, cost);
  Index count = static_cast<Index>(tiles.size());
  if (count == 0) return;
  std::shared_ptr<State> state(new State{std::move(products), std::move(tiles), limits.k, function, Shared(count)});
  try {
    for (Index i = 1; i < std::min(threads, count); i++) pool.Schedule([state] { state->run(); });
  } catch (const std::exception&) {
    // no memory for another task: this thread does what those do not
  }
  state->run();
  state->shared.wait();
}

// The same by a product for each tile.
template <class Pool>
void compute_all(std::vector<Product> products, const Limits& limits, Pool& pool) {
  compute_all(std::move(products), limits, pool,
              [](const std::vector<Product>& all, const Tile& t, Index block, Scratch& scratch) {
                compute_tile(instructions(), all[static_cast<std::size_t>(t.product)], t, block, scratch);
              });
}

// Ask for huge pages under a new result: the threads that write it then take a 512th of the page faults.
inline void advise_huge_pages(void* data, std::size_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  std::size_t start = (reinterpret_cast<std::size_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  std::size_t end = (reinterpret_cast<std::size_t>(data) + bytes) / kHugePage * kHugePage;
  if (end > start) madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace trencadis

#endif  // TRENCADIS_TILES_H_
