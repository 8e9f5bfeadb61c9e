// Of each row of logits: the log probability and the rank of one token, and the most likely tokens.
//
// A row is read for its maximum, for its sum of exponentials and the rank, and where they are asked for once more for
// the most likely tokens: they are kept in order, and what is read is compared with the last of them.
#pragma once

#include <cmath>

#include "sampling.h"

namespace backfill::BACKFILL_VARIANT {

struct RowSums {
  double mass = 0.0;    // sum of e^(x - largest)
  int64_t greater = 0;  // elements above `own`
};

template <class T>
RowSums row_sums(const T* x, int64_t size, float largest, float own) {
  RowSums found;
  for (int64_t start = 0; start < size; start += kPart) {
    Floats mass[kChains] = {};
    Ints greater[kChains] = {};
    const int64_t end = smaller(size, start + kPart);
    const auto add = [&](Floats values, int chain) __attribute__((always_inline)) {
      mass[chain] += exp2<6>((values - largest) * kLog2e);
      greater[chain] -= values > own;
    };
    int64_t i = start;
    for (; i + kStride <= end; i += kStride)
      for (int chain = 0; chain < kChains; chain++) add(load(x + i + chain * kLanes), chain);
    for (; i < end; i += kLanes) {
      Floats values = load(x + i, end - i);
      for (int64_t lane = end - i; lane < kLanes; lane++) values[lane] = -__builtin_inff();
      add(values, 0);
    }
    found.mass += sum((mass[0] + mass[1]) + (mass[2] + mass[3]));
    found.greater += sum((greater[0] + greater[1]) + (greater[2] + greater[3]));
  }
  return found;
}

// The `count` largest elements above -inf in order, of equals the first. Returns how many there are.
template <class T>
int64_t find_largest(const T* x, int64_t size, int64_t count, int64_t* indices, double* values) {
  int64_t found = 0;
  float least = -__builtin_inff();  // of the last one, once all are found
  for (int64_t start = 0; start < size && count > 0; start += kStride) {
    const int64_t end = smaller(size, start + kStride);
    if (end - start == kStride) {
      Floats largest = load(x + start);
      for (int chain = 1; chain < kChains; chain++) largest = max(largest, load(x + start + chain * kLanes));
      if (!(max_of(largest) > least)) continue;
    }
    for (int64_t i = start; i < end; i++) {
      const float value = load(x + i, 1)[0];
      if (!(value > least)) continue;
      if (found < count) found++;
      int64_t at = found - 1;
      for (; at > 0 && values[at - 1] < value; at--)
        values[at] = values[at - 1], indices[at] = indices[at - 1];
      values[at] = value, indices[at] = i;
      if (found == count) least = (float)values[count - 1];
    }
  }
  return found;
}

template <class T>
void score_row(const ScoreArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.logits) + row * args.stride;
  const float own = load(x + args.tokens[row], 1)[0];
  float largest;
  index_of_largest(x, args.size, largest);
  const RowSums sums = row_sums(x, args.size, largest, own);
  const double log_sum = (double)largest + std::log(sums.mass);
  args.logprobs[row] = (double)own - log_sum;
  args.ranks[row] = sums.greater + 1;
  double* top = args.top_logprobs + row * args.most_top;
  args.num_top[row] =
      find_largest(x, args.size, args.num_top[row], args.top_tokens + row * args.most_top, top);
  for (int64_t i = 0; i < args.num_top[row]; i++) top[i] -= log_sum;
}

template <class T>
void score(const ScoreArgs& args) {
  for_each_row(args.rows, args.size, [&](int64_t row) { score_row<T>(args, row); });
}

}  // namespace backfill::BACKFILL_VARIANT
