// Attention of one query row. Memory bounds it, so each row of K and V is read once for all query heads that
// share it, and the next rows are prefetched during the arithmetic.
//
// Scores of kLanes keys at a time are dot products along the head, transposed to one vector. For bf16 with
// AVX-512 BF16, weights are rounded to bf16 for the product with V; their sum is taken before rounding. Two
// value rows are interleaved by a shuffle within 128-bit lanes; the output is then in a permuted order until
// `natural_order`.
#pragma once

#include "key_rows.h"
#include "scratch.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int kDecodeChunk = 64;  // keys between two updates of the running maximum
constexpr int kHeadBatch = 4;     // query heads that share a loaded value in registers
constexpr float kLog2e = 1.44269504089f;

BACKFILL_INLINE int64_t padded_head_dim(int64_t head_dim) { return round_up(head_dim, 32); }

// Running softmax of one query head: values are weighted by 2^(score - max).
struct SoftmaxState {
  float max, total;
};

// Floats of a split context's partial result, per query head: SoftmaxState, then head_dim weighted sums.
BACKFILL_INLINE int64_t partial_size(int64_t head_dim) { return 16 + round_up(head_dim, 16); }

template <class T>
BACKFILL_INLINE void prefetch_row(const T* row, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + i);
}

// `count` lines from `row`; at least one.
template <class T>
BACKFILL_INLINE void prefetch_line(const T* row, int count) {
  const char* line = reinterpret_cast<const char*>(row);
  for (int i = 0; i < larger(count, 1); i++) __builtin_prefetch(line + 64 * i);
}

// Scores of kLanes keys against one query head. Row r starts at keys[r].
template <class T>
BACKFILL_INLINE Floats score_rows(const T* query, const T* const* keys, int64_t dim) {
  constexpr int step = kLanes * kPerUnit<T>;
  Floats acc[kLanes] = {};
  int64_t d = 0;
  for (; d + step <= dim; d += step) {
    const Floats q = load_units(query + d);
    for (int r = 0; r < kLanes; r++) acc[r] = multiply_add<kPaired<T>>(acc[r], q, load_units(keys[r] + d));
  }
  if (d < dim) {
    const int64_t left = (dim - d) / kPerUnit<T>;
    const Floats q = load_units(query + d, left);
    for (int r = 0; r < kLanes; r++)
      acc[r] = multiply_add<kPaired<T>>(acc[r], q, load_units(keys[r] + d, left));
  }
  return sums_of_each(acc);
}

// Turns the scores of one head into weights, in place, and updates its state. Returns the factor by which
// earlier sums must be scaled. `count` keys are real; the rest get weight zero.
template <class T>
BACKFILL_INLINE float weigh(float* scores, int64_t count, float scale, SoftmaxState& state) {
  const int64_t padded = round_up(count, kLanes);
  for (int64_t i = count; i < padded; i++) scores[i] = -__builtin_inff();
  Floats top = broadcast(state.max);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats scaled = load(scores + i) * scale;
    store(scores + i, scaled);
    top = max(top, scaled);
  }
  const float highest = max_of(top);
  Floats total{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Floats weight = exp2<kExpDegree<T>>(load(scores + i) - highest);
    store(scores + i, weight);
    total += weight;
  }
  for (int64_t i = count; i < padded; i++) scores[i] = 0.0f;
  const float correction = __builtin_exp2f(state.max - highest);
  state.max = highest;
  state.total = state.total * correction + sum(total);
  return correction;
}

#if defined(__AVX512BF16__)

// weights[i] as bf16 pairs: lane i of the result's 32-bit units is (weights[2i], weights[2i + 1]).
BACKFILL_INLINE void pair_weights(float* weights, int64_t padded) {
  uint32_t* pairs = reinterpret_cast<uint32_t*>(weights);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Halves bits = narrow(load(weights + i));
    std::memcpy(pairs + i / 2, &bits, sizeof bits);
  }
}

// sums[h][...] += weights[h][...] * values, for NumHeads heads and 64 elements of the head from `d`.
template <int NumHeads, int Vectors>
BACKFILL_INLINE void add_paired_values(const bf16* const* keys, const bf16* const* ahead,
                                       int64_t value_offset, int64_t padded, int64_t d, int64_t dim,
                                       const float* weights, float* sums, int64_t sums_stride) {
  Floats acc[NumHeads][2 * Vectors];
  for (int h = 0; h < NumHeads; h++)
    for (int v = 0; v < 2 * Vectors; v++) acc[h][v] = load(sums + h * sums_stride + d + v * kLanes);
  for (int64_t i = 0; i < padded; i += 2) {
    const bf16* first = keys[i] + value_offset + d;
    const bf16* second = keys[i + 1] + value_offset + d;
    prefetch_line(ahead[i] + value_offset + d, Vectors);
    prefetch_line(ahead[i + 1] + value_offset + d, Vectors);
    Floats pair[2 * Vectors];
    for (int v = 0; v < Vectors; v++) {
      const int64_t left = (dim - d - 32 * v) / 2;
      const __m512i a = (__m512i)load_units(first + 32 * v, left);
      const __m512i b = (__m512i)load_units(second + 32 * v, left);
      pair[2 * v] = (Floats)_mm512_unpacklo_epi16(a, b);
      pair[2 * v + 1] = (Floats)_mm512_unpackhi_epi16(a, b);
    }
    for (int h = 0; h < NumHeads; h++) {
      const Floats weight = broadcast(weights[h * kDecodeChunk + i / 2]);
      for (int v = 0; v < 2 * Vectors; v++) acc[h][v] = multiply_add<true>(acc[h][v], pair[v], weight);
    }
  }
  for (int h = 0; h < NumHeads; h++)
    for (int v = 0; v < 2 * Vectors; v++) store(sums + h * sums_stride + d + v * kLanes, acc[h][v]);
}

template <int NumHeads>
void add_values(const bf16* const* keys, const bf16* const* ahead, int64_t value_offset, int64_t padded,
                int64_t dim, const float* weights, float* sums, int64_t sums_stride) {
  int64_t d = 0;
  for (; d + 64 <= dim; d += 64)
    add_paired_values<NumHeads, 2>(keys, ahead, value_offset, padded, d, dim, weights, sums, sums_stride);
  for (; d < dim; d += 32)
    add_paired_values<NumHeads, 1>(keys, ahead, value_offset, padded, d, dim, weights, sums, sums_stride);
}

// Undoes the order in which the interleaving left each run of 32 sums.
BACKFILL_INLINE void natural_order(float* sums, int64_t dim) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int64_t d = 0; d < dim; d += 32) {
    const Floats low_sums = load(sums + d), high_sums = load(sums + d + 16);
    store(sums + d, (Floats)_mm512_permutex2var_ps(low_sums, first, high_sums));
    store(sums + d + 16, (Floats)_mm512_permutex2var_ps(low_sums, second, high_sums));
  }
}

#endif

template <class T, int NumHeads, int Vectors>
BACKFILL_INLINE void add_single_values(const T* const* keys, const T* const* ahead, int64_t value_offset,
                                       int64_t padded, int64_t d, int64_t dim, const float* weights,
                                       float* sums, int64_t sums_stride) {
  Floats acc[NumHeads][Vectors];
  for (int h = 0; h < NumHeads; h++)
    for (int v = 0; v < Vectors; v++) acc[h][v] = load(sums + h * sums_stride + d + v * kLanes);
  for (int64_t i = 0; i < padded; i++) {
    const T* row = keys[i] + value_offset + d;
    prefetch_line(ahead[i] + value_offset + d, Vectors * kLanes * (int)sizeof(T) / 64);
    Floats value[Vectors];
    for (int v = 0; v < Vectors; v++)
      value[v] = Vectors > 1 ? load(row + v * kLanes) : load(row + v * kLanes, dim - d);
    for (int h = 0; h < NumHeads; h++) {
      const Floats weight = broadcast(weights[h * kDecodeChunk + i]);
      for (int v = 0; v < Vectors; v++) acc[h][v] += value[v] * weight;
    }
  }
  for (int h = 0; h < NumHeads; h++)
    for (int v = 0; v < Vectors; v++) store(sums + h * sums_stride + d + v * kLanes, acc[h][v]);
}

template <int NumHeads, class T>
void add_values(const T* const* keys, const T* const* ahead, int64_t value_offset, int64_t padded,
                int64_t dim, const float* weights, float* sums, int64_t sums_stride) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;
  int64_t d = 0;
  for (; d + kVectors * kLanes <= dim; d += kVectors * kLanes)
    add_single_values<T, NumHeads, kVectors>(keys, ahead, value_offset, padded, d, dim, weights, sums,
                                             sums_stride);
  for (; d < dim; d += kLanes)
    add_single_values<T, NumHeads, 1>(keys, ahead, value_offset, padded, d, dim, weights, sums, sums_stride);
}

template <class T>
BACKFILL_INLINE void add_values_of(int64_t heads, const T* const* keys, const T* const* ahead,
                                   int64_t value_offset, int64_t padded, int64_t dim, const float* weights,
                                   float* sums, int64_t stride) {
  switch (heads) {
    case 1:
      return add_values<1>(keys, ahead, value_offset, padded, dim, weights, sums, stride);
    case 2:
      return add_values<2>(keys, ahead, value_offset, padded, dim, weights, sums, stride);
    case 3:
      return add_values<3>(keys, ahead, value_offset, padded, dim, weights, sums, stride);
    default:
      return add_values<4>(keys, ahead, value_offset, padded, dim, weights, sums, stride);
  }
}

// One sequence, one key/value head, keys [begin, end).
template <class T>
class DecodeItem {
 public:
  DecodeItem(const AttentionArgs& args, int64_t seq, int64_t kv_head)
      : keys_(key_rows<T>(args, seq, kv_head)),
        dim_(args.shape.head_dim),
        padded_dim_(padded_head_dim(dim_)),
        group_(args.num_heads / args.shape.num_kv_heads),
        scale_(args.scale * kLog2e) {
    const int64_t row = args.cu_seqlens_q[seq];
    const int64_t row_size = (args.num_heads + 2 * args.shape.num_kv_heads) * dim_;
    query_ = static_cast<const T*>(args.qkv) + row * row_size + kv_head * group_ * dim_;
    out_ = static_cast<T*>(args.out) + (row * args.num_heads + kv_head * group_) * dim_;
    char* memory = static_cast<char*>(scratch(kWork, bytes()));
    float* floats = reinterpret_cast<float*>(memory);
    weights_ = floats, floats += group_ * kDecodeChunk;
    sums_ = floats, floats += group_ * padded_dim_;
    wide_keys_ = floats, floats += kWidenKeys ? kLanes * padded_dim_ : 0;
    wide_query_ = floats, floats += kWidenKeys ? group_ * padded_dim_ : 0;
    states_ = reinterpret_cast<SoftmaxState*>(floats), floats += round_up(2 * group_, 16);
    rows_[0] = reinterpret_cast<const T**>(floats);
    rows_[1] = rows_[0] + kDecodeChunk;
  }

  // Writes the finished output row, or, with `partial`, the unfinished result of a part of the context.
  void run(int64_t begin, int64_t end, float* partial) {
    for (int64_t h = 0; h < group_; h++) states_[h] = {-__builtin_inff(), 0.0f};
    std::memset(sums_, 0, group_ * padded_dim_ * sizeof(float));
    if constexpr (kWidenKeys)
      for (int64_t h = 0; h < group_; h++) widen_row(query_ + h * dim_, wide_query_ + h * padded_dim_);
    list_rows(begin, end);
    for (int64_t position = begin; position < end; position += kDecodeChunk) {
      const int64_t count = smaller<int64_t>(kDecodeChunk, end - position);
      const T** current = rows_[0];
      const int64_t next = position + count;
      rows_[0] = rows_[1];
      rows_[1] = current;
      if (next < end) list_rows(next, end);
      // At the end the current rows are prefetched once more, which costs almost nothing.
      const T** ahead = end - next >= kDecodeChunk ? rows_[0] : pad_ahead(current, end - next);
      score(current, ahead, count, position == begin);
      add(current, ahead, round_up(count, kLanes));
    }
    if (partial == nullptr)
      finish();
    else
      save(partial);
  }

 private:
  // Without a bf16 product, keys are converted to float once for all heads that share them.
  static constexpr bool kWidenKeys = sizeof(T) == 2 && !kPaired<T>;

  size_t bytes() const {
    const int64_t floats = group_ * (kDecodeChunk + padded_dim_) + round_up(2 * group_, 16) +
                           (kWidenKeys ? (kLanes + group_) * padded_dim_ : 0);
    return floats * sizeof(float) + 2 * kDecodeChunk * sizeof(T*);
  }

  // Fills rows_[0] for the chunk at `begin`; rows past the end repeat the last one and get weight zero.
  void list_rows(int64_t begin, int64_t end) {
    const int64_t count = smaller<int64_t>(kDecodeChunk, end - begin);
    keys_.list(begin, begin + count, rows_[0]);
    for (int64_t i = count; i < round_up(count, kLanes); i++) rows_[0][i] = rows_[0][count - 1];
  }

  // The next chunk's `count` rows, padded with current ones to a full chunk to prefetch.
  const T** pad_ahead(const T** current, int64_t count) {
    if (count <= 0) return current;
    for (int64_t i = round_up(count, kLanes); i < kDecodeChunk; i++) rows_[0][i] = current[i];
    return rows_[0];
  }

  // Weights of the chunk for every head; scales earlier sums to the new maximum.
  void score(const T* const* rows, const T* const* ahead, int64_t count, bool is_first) {
    const int64_t offset = keys_.value_offset();
    for (int64_t i = 0; i < count; i += kLanes) {
      if (is_first)
        for (int r = 0; r < kLanes; r++) prefetch_row(rows[i + r] + offset, dim_);
      if constexpr (kWidenKeys) {
        const float* wide[kLanes];
        for (int r = 0; r < kLanes; r++) wide[r] = widen_row(rows[i + r], wide_keys_ + r * padded_dim_);
        for (int64_t h = 0; h < group_; h++) {
          prefetch_share(ahead + i, h);
          store(weights_ + h * kDecodeChunk + i, score_rows(wide_query_ + h * padded_dim_, wide, dim_));
        }
      } else {
        for (int64_t h = 0; h < group_; h++) {
          prefetch_share(ahead + i, h);
          store(weights_ + h * kDecodeChunk + i, score_rows(query_ + h * dim_, rows + i, dim_));
        }
      }
    }
    for (int64_t h = 0; h < group_; h++) {
      float* weights = weights_ + h * kDecodeChunk;
      const float correction = weigh<T>(weights, count, scale_, states_[h]);
      if (correction != 1.0f) {
        float* sums = sums_ + h * padded_dim_;
        for (int64_t d = 0; d < padded_dim_; d += kLanes) store(sums + d, load(sums + d) * correction);
      }
#if defined(__AVX512BF16__)
      if constexpr (kPaired<T>) pair_weights(weights, round_up(count, kLanes));
#endif
    }
  }

  // Prefetches head h's part of kLanes rows. A core tracks few cache misses at a time and stalls beyond that
  // number, so prefetches are spread evenly over the arithmetic.
  BACKFILL_INLINE void prefetch_share(const T* const* ahead, int64_t h) const {
    for (int64_t r = h * kLanes / group_; r < (h + 1) * kLanes / group_; r++) prefetch_row(ahead[r], dim_);
  }

  const float* widen_row(const T* row, float* target) {
    for (int64_t d = 0; d < dim_; d += kLanes) store(target + d, load(row + d, dim_ - d));
    return target;
  }

  void add(const T* const* rows, const T* const* ahead, int64_t padded) {
    for (int64_t h = 0; h < group_; h += kHeadBatch)
      add_values_of<T>(smaller<int64_t>(kHeadBatch, group_ - h), rows, ahead, keys_.value_offset(), padded,
                       dim_, weights_ + h * kDecodeChunk, sums_ + h * padded_dim_, padded_dim_);
  }

  void restore_order(int64_t h) {
#if defined(__AVX512BF16__)
    if constexpr (kPaired<T>) natural_order(sums_ + h * padded_dim_, dim_);
#endif
    (void)h;
  }

  void finish() {
    for (int64_t h = 0; h < group_; h++) {
      restore_order(h);
      const float* sums = sums_ + h * padded_dim_;
      const float inverse = 1.0f / states_[h].total;
      for (int64_t d = 0; d < dim_; d += kLanes)
        store(out_ + h * dim_ + d, load(sums + d) * inverse, dim_ - d);
    }
  }

  void save(float* partial) {
    for (int64_t h = 0; h < group_; h++, partial += partial_size(dim_)) {
      restore_order(h);
      partial[0] = states_[h].max;
      partial[1] = states_[h].total;
      std::memcpy(partial + 16, sums_ + h * padded_dim_, dim_ * sizeof(float));
    }
  }

  KeyRows<T> keys_;
  int64_t dim_, padded_dim_, group_;
  float scale_;
  const T* query_;
  T* out_;
  float* weights_;     // [group, kDecodeChunk]
  float* sums_;        // [group, padded dim]
  float* wide_keys_;   // [kLanes, padded dim]
  float* wide_query_;  // [group, padded dim]
  SoftmaxState* states_;
  const T** rows_[2];
};

// Merges the partial results of one query head, `stride` floats apart, into its output.
template <class T>
void merge_partials(const float* partials, int64_t count, int64_t stride, T* out, int64_t dim) {
  float highest = partials[0];
  for (int64_t i = 1; i < count; i++) highest = larger(highest, partials[i * stride]);
  float total = 0.0f;
  for (int64_t i = 0; i < count; i++)
    total += partials[i * stride + 1] * __builtin_exp2f(partials[i * stride] - highest);
  for (int64_t d = 0; d < dim; d += kLanes) {
    Floats value{};
    for (int64_t i = 0; i < count; i++) {
      const float* partial = partials + i * stride;
      value += load(partial + 16 + d, dim - d) * __builtin_exp2f(partial[0] - highest);
    }
    store(out + d, value / total, dim - d);
  }
}

}  // namespace backfill::BACKFILL_VARIANT
