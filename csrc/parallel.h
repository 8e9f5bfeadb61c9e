// Work that threads share, see threads.h.
#pragma once

#include "simd.h"
#include "threads.h"

namespace backfill::BACKFILL_VARIANT {

// body(thread, num_threads) on each of `num_threads`.
template <class Body>
void on_threads(int64_t num_threads, const Body& body) {
  const auto part = [](void* context, int64_t thread, int64_t threads) {
    (*static_cast<const Body*>(context))(thread, threads);
  };
  run_threads(num_threads, part, const_cast<Body*>(&body));
}

// Below this many elements a call is over before a second thread would have woken.
constexpr int64_t kParallelElements = 32768;

// body(row) of each row, of so many elements.
template <class Body>
BACKFILL_INLINE void for_each_row(int64_t rows, int64_t elements, const Body& body) {
  const bool is_large = rows > 1 && rows * elements > kParallelElements;
  on_threads(is_large ? max_threads() : 1, [&](int64_t thread, int64_t threads) {
    for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; row++) body(row);
  });
}

}  // namespace backfill::BACKFILL_VARIANT
