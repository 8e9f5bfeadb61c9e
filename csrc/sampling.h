// One token for each row of logits: the most likely one, or one drawn by its weight.
//
// A token's weight is e^((x - max) / temperature), the most likely one's 1. Sums of weights are of parts in floats, of
// parts in doubles. What the filters keep of a row is what is above a cutoff, found by bisection of the weights' bits:
// each step is a sum over the row, so nothing is sorted. Rows depend on nothing but themselves.
#pragma once

#include "parallel.h"
#include "scratch.h"
#include "softmax.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int64_t kPart = 512;
constexpr int kChains = 4;  // of operations that wait for each other
constexpr int64_t kStride = kChains * kLanes;
constexpr float kLeastWeight = 0x1p-126f;  // of exp2, above 0
constexpr float kMostScale = 0x1p100f;     // above it the most likely token is all

// The first of the largest. With NaNs some index.
template <class T>
int64_t index_of_largest(const T* x, int64_t size, float& largest) {
  largest = -__builtin_inff();
  int64_t found = 0;
  for (int64_t start = 0; start < size; start += kPart) {
    const int64_t end = smaller(size, start + kPart);
    Floats lanes[kChains];
    for (Floats& each : lanes) each = broadcast(-__builtin_inff());
    int64_t i = start;
    for (; i + kStride <= end; i += kStride)
      for (int chain = 0; chain < kChains; chain++)
        lanes[chain] = max(lanes[chain], load(x + i + chain * kLanes));
    float of_part = max_of(max(max(lanes[0], lanes[1]), max(lanes[2], lanes[3])));
    for (; i < end; i++) of_part = larger(of_part, load(x + i, 1)[0]);
    if (of_part > largest) largest = of_part, found = start;
  }
  for (int64_t i = found; i < smaller(size, found + kPart); i++)
    if (load(x + i, 1)[0] == largest) return i;
  return found;
}

// Weights at or above `least`, which is above 0.
struct Tally {
  int64_t count = 0;
  double mass = 0.0;
};

// `size`: a multiple of kStride.
inline Tally tally(const float* weights, int64_t size, float least) {
  Tally whole;
  for (int64_t start = 0; start < size; start += kPart) {
    Floats mass[kChains] = {};
    Ints count[kChains] = {};
    for (int64_t i = start; i < smaller(size, start + kPart); i += kStride)
      for (int chain = 0; chain < kChains; chain++) {
        const Floats weight = load(weights + i + chain * kLanes);
        const Ints is_counted = weight >= least;
        mass[chain] += (Floats)((Ints)weight & is_counted);
        count[chain] -= is_counted;
      }
    whole.count += sum((count[0] + count[1]) + (count[2] + count[3]));
    whole.mass += sum((mass[0] + mass[1]) + (mass[2] + mass[3]));
  }
  return whole;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// The smallest kept weight, and how many of those equal to it are kept, in the order of tokens.
struct Cutoff {
  float least = 0.0f;
  int64_t ties = INT64_MAX;

  // What both keep.
  Cutoff with(const Cutoff& other) const {
    if (least != other.least) return least > other.least ? *this : other;
    return {least, smaller(ties, other.ties)};
  }
};

// The least of so few weights as satisfy `is_enough`, of a tally. All where no tally does.
template <class Enough>
float least_of_fewest(const float* weights, int64_t size, const Enough& is_enough) {
  uint32_t enough = 0, too_few = bits_of(1.0f) + 1;
  while (too_few - enough > 1) {
    const uint32_t middle = enough + (too_few - enough) / 2;
    (is_enough(tally(weights, size, float_of(middle))) ? enough : too_few) = middle;
  }
  return float_of(enough);
}

struct Candidates {
  float* weights;  // then zeros up to a multiple of kStride
  int32_t* tokens;
  int64_t count, size;
};

// Of top-k and top-p. Top-p is of the mass that top-k leaves; `mass` is that of all weights.
inline Cutoff cutoff_of(const Candidates& all, int64_t top_k, double top_p, double mass) {
  Cutoff cutoff;
  const auto above = [&](float least) { return tally(all.weights, all.size, float_of(bits_of(least) + 1)); };
  if (top_k <= all.count) {
    const float least =
        least_of_fewest(all.weights, all.size, [&](const Tally& each) { return each.count >= top_k; });
    const Tally before = above(least);
    cutoff = {least, top_k - before.count};
    mass = before.mass + cutoff.ties * (double)least;
  }
  if (top_p < 1.0) {
    const double wanted = top_p * mass;
    const float least =
        least_of_fewest(all.weights, all.size, [&](const Tally& each) { return each.mass >= wanted; });
    // The last one is that with which the sum reaches what is wanted. Rounded, it may reach it with none.
    const double ties = least > 0.0f ? __builtin_ceil((wanted - above(least).mass) / least) : 0x1p62;
    cutoff = cutoff.with({least, (int64_t)smaller(ties, 0x1p62)});
  }
  return cutoff;
}

// Weights that may pass, found without looking at the others one by one.
inline void find_candidates(const float* weights, int64_t size, float least, Candidates& found) {
  found.count = 0;
  for (int64_t start = 0; start < size; start += kStride) {
    Floats largest{};
    for (int64_t i = start; i < start + kStride; i += kLanes) largest = max(largest, load(weights + i));
    if (!(max_of(largest) >= least)) continue;
    for (int64_t i = start; i < start + kStride; i++) {
      found.weights[found.count] = weights[i];
      found.tokens[found.count] = (int32_t)i;
      found.count += weights[i] >= least;
    }
  }
  found.size = round_up(found.count, kStride);
  std::memset(found.weights + found.count, 0, (found.size - found.count) * sizeof(float));
}

// The index on which the share `uniform`, in [0, 1), of the sum falls. Its weight is above 0; one is.
inline int64_t drawn(const float* weights, int64_t size, double uniform) {
  const double total = tally(weights, size, kLeastWeight).mass;
  const double target = uniform * total;
  double before = 0.0;
  int64_t last = 0;
  for (int64_t start = 0; start < size; start += kPart) {
    const int64_t end = smaller(size, start + kPart);
    const double of_part = tally(weights + start, end - start, kLeastWeight).mass;
    if (of_part == 0.0) continue;
    double reached = before;
    for (int64_t i = start; before + of_part > target && i < end; i++) {
      reached += weights[i];
      // The part before may have ended below the share by its doubles, and above it by its floats.
      if (reached > target && weights[i] > 0.0f) return i;
    }
    before += of_part, last = start;
  }
  // Rounded sums ended before the share: the last weight.
  int64_t i = smaller(size, last + kPart) - 1;
  while (i > 0 && weights[i] == 0.0f) i--;
  return i;
}

// Of what top-k, top-p and min-p keep. `found` is overwritten.
inline int64_t drawn_filtered(const float* weights, int64_t size, int64_t top_k, double top_p, float min_p,
                              double uniform, Candidates& found) {
  const double mass = tally(weights, size, kLeastWeight).mass;
  const auto is_enough = [&](float least) {
    if (top_k < size) return tally(weights, size, least).count >= top_k;
    if (top_p < 1.0) return tally(weights, size, least).mass >= top_p * mass;
    return least <= min_p;
  };
  float least = 0x1p-4f;
  while (least > kLeastWeight && !is_enough(least)) least = larger(kLeastWeight, least * least);
  find_candidates(weights, size, least, found);
  const Cutoff cutoff = cutoff_of(found, top_k, top_p, mass).with({min_p, INT64_MAX});
  int64_t ties = 0;
  for (int64_t i = 0; i < found.count; i++) {
    const bool is_tie = found.weights[i] == cutoff.least;
    if (found.weights[i] < cutoff.least || (is_tie && ties >= cutoff.ties)) found.weights[i] = 0.0f;
    ties += is_tie;
  }
  return found.count == 0 ? 0 : found.tokens[drawn(found.weights, found.size, uniform)];
}

// `size` weights, then zeros up to a multiple of kStride.
template <class T>
void weigh(const T* x, int64_t size, float largest, float scale, float* weights) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(weights + i, exp2<6>((load(x + i) - largest) * scale));
  std::memset(weights + i, 0, (round_up(size, kStride) - i) * sizeof(float));
  if (i < size) store(weights + i, exp2<6>((load(x + i, size - i) - largest) * scale), size - i);
}

template <class T>
int64_t sample_row(const SampleArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.logits) + row * args.stride;
  float largest;
  const int64_t best = index_of_largest(x, args.size, largest);
  const float scale = kLog2e / args.temperature[row];
  if (!(scale < kMostScale)) return best;
  const int64_t size = round_up(args.size, kStride);
  auto* weights = static_cast<float*>(scratch(kWork, (3 * size + 2 * kStride) * sizeof(float)));
  weigh(x, args.size, largest, scale, weights);
  if (args.top_k[row] >= args.size && args.top_p[row] >= 1.0 && args.min_p[row] <= 0.0f)
    return drawn(weights, size, args.uniform[row]);
  float* found_weights = weights + size;
  Candidates found = {found_weights, reinterpret_cast<int32_t*>(found_weights + size + kStride), 0, 0};
  return drawn_filtered(weights, size, args.top_k[row], args.top_p[row], args.min_p[row], args.uniform[row],
                        found);
}

template <class T>
void sample(const SampleArgs& args) {
  for_each_row(args.rows, args.size, [&](int64_t row) { args.out[row] = sample_row<T>(args, row); });
}

}  // namespace backfill::BACKFILL_VARIANT
