// The arithmetic that every attention kernel of a variant shares, so that a row's result depends on its own
// tokens alone: not on the kernel that computed it (decode, prefill), the rows and sequences beside it, the
// number of threads, or where its keys lie.
//
// The keys of a row are cut by position into chunks of kChunk. Of each chunk come the largest score, the sum
// of the weights 2^(score - max), and the weighted sums of the values; chunks are folded in order.
//   Scores: sums over the head's units in order, from zero. Times the scale, rounded.
//   Sum of weights: kLanes sums of every kLanes-th weight in order, then pairwise (`sum` in simd.h).
//   Weighted sums: over the keys of the chunk in order, from zero. With AMX in groups of 32 keys.
// A key that a row does not see has weight zero, which changes no sum.
#pragma once

#include "simd.h"

namespace backfill::BACKFILL_VARIANT {

constexpr float kLog2e = 1.44269504089f;

// Of one query: values are weighted by 2^(score - max), and `total` is the sum of the weights.
struct SoftmaxState {
  float max, total;
};

constexpr SoftmaxState kNothingSeen = {-__builtin_inff(), 0.0f};

// What the sums before a chunk, and those of the chunk, are multiplied with to refer to the same maximum.
template <class A>
struct FoldFactors {
  A before, chunk;
};

BACKFILL_INLINE Floats folded(Floats before, Floats chunk, const FoldFactors<Floats>& factors) {
  return multiply_add(chunk * factors.chunk, before, factors.before);
}

// kLanes queries. A query that sees no key of the chunk has chunk_max -inf.
BACKFILL_INLINE FoldFactors<Floats> fold(Floats& max_before, Floats& total, Floats chunk_max,
                                         Floats chunk_total) {
  const Floats highest = max(max_before, chunk_max);
  const FoldFactors<Floats> factors = {exp2<6>(max_before - highest), exp2<6>(chunk_max - highest)};
  max_before = highest;
  total = folded(total, chunk_total, factors);
  return factors;
}

// One query.
BACKFILL_INLINE FoldFactors<Floats> fold(SoftmaxState& state, const SoftmaxState& chunk) {
  Floats highest = broadcast(state.max), total = broadcast(state.total);
  const FoldFactors<Floats> factors = fold(highest, total, broadcast(chunk.max), broadcast(chunk.total));
  state = {highest[0], total[0]};
  return factors;
}

}  // namespace backfill::BACKFILL_VARIANT
