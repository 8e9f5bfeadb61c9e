// Results that wait in memory for the chunks after them: of a chunk of keys, or of all keys of a row up to one.
#pragma once

#include "softmax.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int kPartialSums = 16;  // floats before the weighted sums: SoftmaxState

// Floats of one query head's result: SoftmaxState, then head_dim weighted sums.
BACKFILL_INLINE int64_t partial_size(int64_t head_dim) { return kPartialSums + round_up(head_dim, 16); }

// That of a sequence's query head in [sequence, query head, partial_size].
BACKFILL_INLINE float* row_partial(const AttentionArgs& args, float* partials, int64_t seq, int64_t head) {
  return partials + (seq * args.num_heads + head) * partial_size(args.shape.head_dim);
}

BACKFILL_INLINE void store_state(const SoftmaxState& state, float* partial) {
  std::memcpy(partial, &state, sizeof state);
}

BACKFILL_INLINE SoftmaxState state_of(const float* partial) {
  SoftmaxState state;
  std::memcpy(&state, partial, sizeof state);
  return state;
}

// Folds `count` chunks' results of one query head, `stride` floats apart, into `before`, that of the keys before
// them, and writes the head's output. Overwrites `before`.
template <class T>
void merge_partials(float* before, const float* partials, int64_t count, int64_t stride, T* out,
                    int64_t dim) {
  const int64_t padded = round_up(dim, kLanes);
  float* sums = before + kPartialSums;
  SoftmaxState state = state_of(before);
  for (int64_t i = 0; i < count; i++, partials += stride) {
    const FoldFactors<Floats> factors = fold(state, state_of(partials));
    for (int64_t d = 0; d < padded; d += kLanes)
      store(sums + d, folded(load(sums + d), load(partials + kPartialSums + d), factors));
  }
  const float inverse = 1.0f / state.total;
  for (int64_t d = 0; d < dim; d += kLanes) store(out + d, load(sums + d) * inverse, dim - d);
}

}  // namespace backfill::BACKFILL_VARIANT
