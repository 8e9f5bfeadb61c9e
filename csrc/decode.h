// Attention of one query row. Memory bounds it, so each row of K and V is read once for all query heads that
// share it, and those after them are fetched during the arithmetic (items.h).
//
// Keys are transposed, so that lanes are keys and a score is summed in the order of softmax.h, as prefill
// sums it. T is the type of queries, Kv that of KV: T or int8. For bf16 with AVX-512 BF16, weights are rounded
// to bf16 for the product with V; their sum is taken before rounding. Two value rows are interleaved by a
// shuffle within 128-bit lanes; the output is then in a permuted order until `natural_order`.
#pragma once

#include "items.h"
#include "key_rows.h"
#include "kv_codes.h"
#include "partials.h"
#include "scratch.h"

namespace backfill::BACKFILL_VARIANT {

constexpr int kHeadBatch = kLanes == 16 ? 4 : 3;   // query heads whose sums share the registers
constexpr int kKeyVectors = kLanes == 16 ? 2 : 4;  // vectors of keys that are scored at once
constexpr int kKeysAtOnce = kKeyVectors * kLanes;
constexpr int kKeysBetween = 4;  // that are weighted between two fetches
constexpr int kValuesAtOnce =
    kLanes * (kLanes == 16 ? 4 : 2);  // elements of each row that are summed at once

BACKFILL_INLINE int64_t padded_head_dim(int64_t head_dim) { return round_up(head_dim, 32); }

// The keys of a chunk of one head, and where their values are.
template <class Kv>
struct ChunkRows {
  const Kv* const* keys;
  int64_t value_offset;
  int64_t padded;  // to whole vectors
};

// What a decode gives beside its output row. With `partials` the result of each chunk in place of it.
struct DecodeResults {
  float* partials;      // of the item's chunks: [query head of the group, partial_size]; or null
  int64_t head_stride;  // floats between those of key/value heads
  const float* before;  // of the keys before the item: [query head, partial_size]; or null
};

// transposed[unit][kKeysAtOnce] of `vectors` vectors of keys.
template <class T, class Kv>
BACKFILL_INLINE void transpose_keys(const Kv* const* rows, int vectors, int64_t units, float* transposed) {
  for (int v = 0; v < vectors; v++, rows += kLanes) {
    for (int64_t unit = 0; unit < units; unit += kLanes) {
      Floats square[kLanes];
      for (int r = 0; r < kLanes; r++) square[r] = load_stored<T>(rows[r], unit, units);
      transpose(square);
      for (int i = 0; i < kLanes && i < units - unit; i++)
        store(transposed + (unit + i) * kKeysAtOnce + v * kLanes, square[i]);
    }
  }
}

// The same for keys of codes, four of which are transposed at once, and then become units.
template <class T>
BACKFILL_INLINE void transpose_keys(const int8_t* const* rows, int vectors, int64_t units,
                                    float* transposed) {
  constexpr int kUnits = 4 / kPerUnit<T>;
  const int64_t fours = units / kUnits;
  for (int v = 0; v < vectors; v++, rows += kLanes) {
    for (int64_t at = 0; at < fours; at += kLanes) {
      Floats square[kLanes];
      for (int r = 0; r < kLanes; r++)
        square[r] = load(reinterpret_cast<const float*>(rows[r]) + at, fours - at);
      transpose(square);
      for (int i = 0; i < kLanes && i < fours - at; i++) {
        float* target = transposed + (at + i) * kUnits * kKeysAtOnce + v * kLanes;
        const Words four = (Words)square[i];
        for (int u = 0; u < kUnits; u++, target += kKeysAtOnce) {
          if constexpr (kPaired<T>)
            store(target, exact_pair(code_of(four, 2 * u), code_of(four, 2 * u + 1)));
          else
            store(target, code_of(four, u));
        }
      }
    }
  }
}

// Scores of Vectors vectors of transposed keys. query: [NumHeads, query_stride], in units of simd.h.
template <class T, class Kv, int NumHeads, int Vectors>
BACKFILL_INLINE void score_block(const float* transposed, const float* query, int64_t query_stride,
                                 int64_t units, float* scores, Reads<Kv>* reads) {
  const Words upper = Words{} + 0xffff0000u;
  Floats acc[NumHeads][Vectors] = {};
  for (int64_t unit = 0; unit < units; unit++) {
    if (reads != nullptr) reads->fetch();
    Floats keys[Vectors];
    for (int v = 0; v < Vectors; v++) {
      keys[v] = load(transposed + unit * kKeysAtOnce + v * kLanes);
      if constexpr (kSplit<T, Kv>) keys[v] = (Floats)((Words)keys[v] << 16);
    }
    for (int h = 0; h < NumHeads; h++) {
      const Floats q = broadcast(query[h * query_stride + (kSplit<T, Kv> ? 2 * unit : unit)]);
      for (int v = 0; v < Vectors; v++) acc[h][v] = multiply_add<kPaired<T>>(acc[h][v], keys[v], q);
    }
    if constexpr (kSplit<T, Kv>) {
      for (int v = 0; v < Vectors; v++)
        keys[v] = (Floats)((Words)load(transposed + unit * kKeysAtOnce + v * kLanes) & upper);
      for (int h = 0; h < NumHeads; h++) {
        const Floats q = broadcast(query[h * query_stride + 2 * unit + 1]);
        for (int v = 0; v < Vectors; v++) acc[h][v] = multiply_add(acc[h][v], keys[v], q);
      }
    }
  }
  for (int h = 0; h < NumHeads; h++)
    for (int v = 0; v < Vectors; v++) store(scores + h * kChunk + v * kLanes, acc[h][v]);
}

// Turns the scores of one head into weights, in place. `count` keys are real; the rest get weight zero. Where
// KV has scales, weights are then multiplied by those of values.
template <class T, bool HasScales>
BACKFILL_INLINE SoftmaxState weigh(float* scores, int64_t count, float scale, const float* key_scales,
                                   const float* value_scales) {
  const int64_t padded = round_up(count, kLanes);
  for (int64_t i = count; i < padded; i++) scores[i] = -__builtin_inff();
  Floats top = broadcast(-__builtin_inff());
  for (int64_t i = 0; i < padded; i += kLanes) {
    Floats scaled = load(scores + i);
    if constexpr (HasScales) scaled *= load(key_scales + i);
    scaled *= scale;
    store(scores + i, scaled);
    top = max(top, scaled);
  }
  const float highest = max_of(top);
  Floats total{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    Floats weight = exp2<kExpDegree<T>>(load(scores + i) - highest);
    total += weight;
    if constexpr (HasScales) weight *= load(value_scales + i);
    store(scores + i, weight);
  }
  return {highest, sum(total)};
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

// sums[h][...] = weights[h][...] * values, for NumHeads heads and 32 * Vectors elements of the head from `d`.
template <class Kv, int NumHeads, int Vectors>
BACKFILL_INLINE void paired_values(const ChunkRows<Kv>& rows, int64_t d, int64_t dim, const float* weights,
                                   float* sums, int64_t sums_stride, Reads<Kv>* reads) {
  Floats acc[NumHeads][2 * Vectors] = {};
  for (int64_t i = 0; i < rows.padded; i += 2) {
    if (reads != nullptr && i % kKeysBetween == 0) reads->fetch();
    const Kv* first = rows.keys[i] + rows.value_offset;
    const Kv* second = rows.keys[i + 1] + rows.value_offset;
    Floats pair[2 * Vectors];
    if constexpr (kHasScales<Kv>) {
      for (int v = 0; v < 2 * Vectors; v++)
        pair[v] = exact_pair(load_elements(first, d + 16 * v, dim), load_elements(second, d + 16 * v, dim));
    } else {
      for (int v = 0; v < Vectors; v++) {
        const __m512i a = (__m512i)load_stored<bf16>(first, d / 2 + 16 * v, dim / 2);
        const __m512i b = (__m512i)load_stored<bf16>(second, d / 2 + 16 * v, dim / 2);
        pair[2 * v] = (Floats)_mm512_unpacklo_epi16(a, b);
        pair[2 * v + 1] = (Floats)_mm512_unpackhi_epi16(a, b);
      }
    }
    for (int h = 0; h < NumHeads; h++) {
      const Floats weight = broadcast(weights[h * kChunk + i / 2]);
      for (int v = 0; v < 2 * Vectors; v++) acc[h][v] = multiply_add<true>(acc[h][v], pair[v], weight);
    }
  }
  for (int h = 0; h < NumHeads; h++)
    for (int v = 0; v < 2 * Vectors; v++) store(sums + h * sums_stride + d + v * kLanes, acc[h][v]);
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

// The same for Vectors vectors of stored units. Where they are split, each run of 2 * kLanes sums has the
// even elements first.
template <class T, class Kv, int NumHeads, int Vectors>
BACKFILL_INLINE void single_values(const ChunkRows<Kv>& rows, int64_t d, int64_t dim, const float* weights,
                                   float* sums, int64_t sums_stride, Reads<Kv>* reads) {
  constexpr int kSums = kSplit<T, Kv> ? 2 * Vectors : Vectors, kSplits = kSums / Vectors;
  const Words upper = Words{} + 0xffff0000u;
  Floats acc[NumHeads][kSums] = {};
  for (int64_t i = 0; i < rows.padded; i++) {
    if (reads != nullptr && i % kKeysBetween == 0) reads->fetch();
    const Kv* row = rows.keys[i] + rows.value_offset;
    Floats value[kSums];
    for (int v = 0; v < Vectors; v++) {
      const Floats stored = load_stored<T>(row, d / kSplits + v * kLanes, dim / kSplits);
      if constexpr (kSplit<T, Kv>) {
        value[2 * v] = (Floats)((Words)stored << 16);
        value[2 * v + 1] = (Floats)((Words)stored & upper);
      } else {
        value[v] = stored;
      }
    }
    for (int h = 0; h < NumHeads; h++) {
      const Floats weight = broadcast(weights[h * kChunk + i]);
      for (int v = 0; v < kSums; v++) acc[h][v] = multiply_add(acc[h][v], value[v], weight);
    }
  }
  for (int h = 0; h < NumHeads; h++)
    for (int v = 0; v < kSums; v++) store(sums + h * sums_stride + d + v * kLanes, acc[h][v]);
}

// sums [NumHeads, dim] = weights [NumHeads, keys] * values [keys, dim]. reads: null for all but a chunk's first heads;
// they fetch beside the first elements alone, or by passes beside all.
template <class T, int NumHeads, class Kv>
void weighted_values(const ChunkRows<Kv>& rows, int64_t dim, const float* weights, float* sums,
                     int64_t stride, Reads<Kv>* reads) {
  int64_t d = 0;
#if defined(__AVX512BF16__)
  if constexpr (kPaired<T>) {
    for (; d + 64 <= dim; d += 64, reads = nullptr)
      paired_values<Kv, NumHeads, 2>(rows, d, dim, weights, sums, stride, reads);
    for (; d < dim; d += 32, reads = nullptr)
      paired_values<Kv, NumHeads, 1>(rows, d, dim, weights, sums, stride, reads);
    return;
  }
#endif
  constexpr int kSplits = kSplit<T, Kv> ? 2 : 1, kElements = kLanes * kSplits;
  const auto after_first = [&] { return Reads<Kv>::kByPasses ? reads : nullptr; };
  for (; d + kValuesAtOnce <= dim; d += kValuesAtOnce, reads = after_first())
    single_values<T, Kv, NumHeads, kValuesAtOnce / kElements>(rows, d, dim, weights, sums, stride, reads);
  for (; d < dim; d += kElements, reads = after_first())
    single_values<T, Kv, NumHeads, 1>(rows, d, dim, weights, sums, stride, reads);
}

// One sequence, some key/value heads, keys [item.begin, item.end); item.begin is a multiple of kChunk.
template <class T, class Kv>
class DecodeItem {
 public:
  DecodeItem(const AttentionArgs& args, const Item& item)
      : keys_(key_rows<Kv>(args, item.seq, item.kv_head)),
        begin_(item.begin),
        end_(item.end),
        kv_heads_(item.num_kv_heads),
        dim_(args.shape.head_dim),
        padded_dim_(padded_head_dim(dim_)),
        units_(stored_units<T, Kv>(dim_)),
        group_(args.num_heads / args.shape.num_kv_heads),
        heads_(kv_heads_ * group_),
        scale_(args.scale * kLog2e) {
    const int64_t row = args.cu_seqlens_q[item.seq], first = item.kv_head * group_;
    const int64_t row_size = (args.num_heads + 2 * args.shape.num_kv_heads) * dim_;
    query_ = static_cast<const T*>(args.qkv) + row * row_size + first * dim_;
    out_ = static_cast<T*>(args.out) + (row * args.num_heads + first) * dim_;
    const int64_t floats =
        group_ * (kChunk + padded_dim_) + 2 * heads_ * padded_dim_ + units_ * kKeysAtOnce + 2 * kChunk;
    const size_t bytes = floats * sizeof(float) + (heads_ + group_) * sizeof(SoftmaxState);
    float* memory = static_cast<float*>(scratch(kWork, bytes + kChunk * sizeof(Kv*)));
    weights_ = memory, memory += group_ * kChunk;
    sums_ = memory, memory += heads_ * padded_dim_;
    chunk_sums_ = memory, memory += group_ * padded_dim_;
    wide_query_ = memory, memory += heads_ * padded_dim_;
    transposed_ = memory, memory += units_ * kKeysAtOnce;
    key_scales_ = memory, memory += kChunk;
    value_scales_ = memory, memory += kChunk;
    rows_ = reinterpret_cast<const Kv**>(memory);
    states_ = reinterpret_cast<SoftmaxState*>(rows_ + kChunk);
    chunk_states_ = states_ + heads_;
  }

  void run(const DecodeResults& results, Reads<Kv>& reads) {
    widen_queries();
    for (int64_t h = 0; h < heads_; h++) states_[h] = kNothingSeen;
    std::memset(sums_, 0, heads_ * padded_dim_ * sizeof(float));
    if (results.before != nullptr) load_partials(results.before);
    float* partials = results.partials;
    for (int64_t position = begin_; position < end_; position += kChunk) {
      const int64_t count = smaller<int64_t>(kChunk, end_ - position), padded = round_up(count, kLanes);
      keys_.list(position, position + count, rows_);
      for (int64_t i = count; i < padded; i++) rows_[i] = rows_[count - 1];
      if constexpr (!Reads<Kv>::kByPasses)
        reads.begin_chunk(position, kv_heads_ * (score_fetches(count) + padded / kKeysBetween));
      for (int64_t g = 0; g < kv_heads_; g++) {
        attend(position, g, count, reads);
        if (partials == nullptr)
          fold_chunk(g);
        else
          save(partials + g * results.head_stride);
        for (int64_t i = 0; i < padded; i++) rows_[i] += keys_.head_offset();
      }
      if (partials != nullptr) partials += group_ * partial_size(dim_);
    }
    if (partials == nullptr) finish();
  }

 private:
  void widen_queries() {
    for (int64_t h = 0; h < heads_; h++)
      for (int64_t unit = 0; unit < padded_dim_; unit += kLanes) {
        const int64_t left = larger<int64_t>(0, dim_ / kPerUnit<T> - unit);
        if (left > 0)
          store(wide_query_ + h * padded_dim_ + unit,
                load_units(query_ + h * dim_ + unit * kPerUnit<T>, left));
      }
  }

  int64_t score_fetches(int64_t count) const { return ceil_divide(count, kKeysAtOnce) * units_; }

  // The states and weighted sums of the `count` keys of rows_, from `position` on, of key/value head g.
  void attend(int64_t position, int64_t g, int64_t count, Reads<Kv>& reads) {
    if constexpr (Reads<Kv>::kByPasses) reads.begin_keys(position, g, score_fetches(count));
    const float* queries = wide_query_ + g * group_ * padded_dim_;
    for (int64_t i = 0; i < count; i += kKeysAtOnce) {
      const int vectors = (int)smaller<int64_t>(kKeyVectors, (count - i + kLanes - 1) / kLanes);
      transpose_keys<T>(rows_ + i, vectors, units_, transposed_);
      for (int64_t h = 0; h < group_; h += kHeadBatch)
        score_heads(queries + h * padded_dim_, h, i, vectors, h == 0 ? &reads : nullptr);
    }
    const ChunkRows<Kv> rows = {rows_, keys_.value_offset(), round_up(count, kLanes)};
    if constexpr (kHasScales<Kv>) {
      for (int64_t i = 0; i < rows.padded; i++) {
        key_scales_[i] = i < count ? scale_of(rows_[i], dim_) : 1.0f;
        value_scales_[i] = i < count ? scale_of(rows_[i] + rows.value_offset, dim_) : 1.0f;
      }
    }
    for (int64_t h = 0; h < group_; h++) {
      float* weights = weights_ + h * kChunk;
      chunk_states_[h] = weigh<T, kHasScales<Kv>>(weights, count, scale_, key_scales_, value_scales_);
#if defined(__AVX512BF16__)
      if constexpr (kPaired<T>) pair_weights(weights, rows.padded);
#endif
    }
    if constexpr (Reads<Kv>::kByPasses)
      reads.begin_values(position, g, ceil_divide(dim_, kValuesAtOnce) * rows.padded / kKeysBetween);
    for (int64_t h = 0; h < group_; h += kHeadBatch) weigh_values(rows, h, h == 0 ? &reads : nullptr);
  }

  template <int NumHeads>
  void score(const float* query, int64_t h, int64_t i, int vectors, Reads<Kv>* reads) {
    float* scores = weights_ + h * kChunk + i;
    if (vectors == kKeyVectors)
      return score_block<T, Kv, NumHeads, kKeyVectors>(transposed_, query, padded_dim_, units_, scores,
                                                       reads);
    for (int v = 0; v < vectors; v++, reads = nullptr)
      score_block<T, Kv, NumHeads, 1>(transposed_ + v * kLanes, query, padded_dim_, units_,
                                      scores + v * kLanes, reads);
  }

  void score_heads(const float* query, int64_t h, int64_t i, int vectors, Reads<Kv>* reads) {
    switch (smaller<int64_t>(kHeadBatch, group_ - h)) {
      case 1:
        return score<1>(query, h, i, vectors, reads);
      case 2:
        return score<2>(query, h, i, vectors, reads);
      case 3:
        return score<3>(query, h, i, vectors, reads);
      default:
        return score<kHeadBatch>(query, h, i, vectors, reads);
    }
  }

  void weigh_values(const ChunkRows<Kv>& rows, int64_t h, Reads<Kv>* reads) {
    const float* weights = weights_ + h * kChunk;
    float* sums = chunk_sums_ + h * padded_dim_;
    switch (smaller<int64_t>(kHeadBatch, group_ - h)) {
      case 1:
        return weighted_values<T, 1>(rows, dim_, weights, sums, padded_dim_, reads);
      case 2:
        return weighted_values<T, 2>(rows, dim_, weights, sums, padded_dim_, reads);
      case 3:
        return weighted_values<T, 3>(rows, dim_, weights, sums, padded_dim_, reads);
      default:
        return weighted_values<T, kHeadBatch>(rows, dim_, weights, sums, padded_dim_, reads);
    }
  }

  void fold_chunk(int64_t g) {
    for (int64_t h = 0; h < group_; h++) {
      const FoldFactors<Floats> factors = fold(states_[g * group_ + h], chunk_states_[h]);
      float* sums = sums_ + (g * group_ + h) * padded_dim_;
      const float* chunk_sums = chunk_sums_ + h * padded_dim_;
      for (int64_t d = 0; d < padded_dim_; d += kLanes)
        store(sums + d, folded(load(sums + d), load(chunk_sums + d), factors));
    }
  }

  void restore_order([[maybe_unused]] float* sums) {
#if defined(__AVX512BF16__)
    if constexpr (kPaired<T> && !kHasScales<Kv>) natural_order(sums, dim_);
#endif
    if constexpr (kSplit<T, Kv>) {
      for (int64_t d = 0; d < dim_; d += 2 * kLanes) {
        float run[2 * kLanes];
        std::memcpy(run, sums + d, sizeof run);
        for (int i = 0; i < kLanes; i++) sums[d + 2 * i] = run[i], sums[d + 2 * i + 1] = run[kLanes + i];
      }
    }
  }

  // In the order that `restore_order` undoes.
  void load_partials(const float* partial) {
    float* places = chunk_sums_;
    for (int64_t d = 0; d < padded_dim_; d++) places[d] = (float)d;
    restore_order(places);
    for (int64_t h = 0; h < heads_; h++, partial += partial_size(dim_)) {
      states_[h] = state_of(partial);
      for (int64_t d = 0; d < dim_; d++)
        sums_[h * padded_dim_ + (int64_t)places[d]] = partial[kPartialSums + d];
    }
  }

  void finish() {
    for (int64_t h = 0; h < heads_; h++) {
      float* sums = sums_ + h * padded_dim_;
      restore_order(sums);
      const float inverse = 1.0f / states_[h].total;
      for (int64_t d = 0; d < dim_; d += kLanes)
        store(out_ + h * dim_ + d, load(sums + d) * inverse, dim_ - d);
    }
  }

  void save(float* partial) {
    for (int64_t h = 0; h < group_; h++, partial += partial_size(dim_)) {
      float* sums = chunk_sums_ + h * padded_dim_;
      restore_order(sums);
      store_state(chunk_states_[h], partial);
      std::memcpy(partial + kPartialSums, sums, dim_ * sizeof(float));
    }
  }

  KeyRows<Kv> keys_;
  int64_t begin_, end_;
  int64_t kv_heads_, dim_, padded_dim_, units_, group_, heads_;
  float scale_;
  const T* query_;
  T* out_;
  float* weights_;                     // [group, kChunk]
  float* sums_;                        // [heads, padded dim]
  float* chunk_sums_;                  // [group, padded dim]
  float* wide_query_;                  // [heads, padded dim], units
  float* transposed_;                  // [units, kKeysAtOnce]
  float *key_scales_, *value_scales_;  // [kChunk], where KV has scales
  SoftmaxState* states_;               // [heads]
  SoftmaxState* chunk_states_;         // [group]
  const Kv** rows_;                    // [kChunk] keys of a head; to whole vectors the last one again
};

}  // namespace backfill::BACKFILL_VARIANT
