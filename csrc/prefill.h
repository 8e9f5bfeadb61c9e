// Attention of many query rows over the same keys: flash attention, laid out transposed.
//
// Queries of a row are neighbours, as in FlashAttention's GQA packing: a tile of kTileQueries covers few rows, and the
// causal limit cuts it closely. Each chunk of keys is packed once, in logical order, and used by every tile:
//
//   S [keys, queries] = K [keys, D] * Q [D, queries]
//   P                 = 2^(S * scale - max of the query in the chunk)
//   O [D, queries]    = fold of O and V [D, keys] * P [keys, queries]
//
// The arithmetic reads packed keys only: it knows no blocks, directions, head sizes or stored types.
// With bf16 products P is rounded to bf16; the sum of a query is taken before rounding. Order: softmax.h.
#pragma once

#include "key_rows.h"
#include "kv_codes.h"
#include "query_rows.h"
#include "scratch.h"
#include "tile_product.h"

namespace backfill::BACKFILL_VARIANT {

// Queries of one item: bounded so that O stays in the L2 cache.
BACKFILL_INLINE int64_t max_prefill_queries(int64_t head_dim) {
  const int64_t fitting = 65536 / head_dim / kTileQueries * kTileQueries;
  return larger<int64_t>(kTileQueries, smaller<int64_t>(1024, fitting));
}

// One key/value head.
template <class T, class Kv, bool Tiled>
class PrefillItem {
 public:
  explicit PrefillItem(const QueryRows& rows)
      : rows_(rows),
        keys_(key_rows<Kv>(rows.args, rows.seq, rows.kv_head)),
        dim_(rows.args.shape.head_dim),
        row_dim_(round_up(dim_, kRowPadding<Tiled>)),
        depth_(round_up(dim_ / kPerUnit<T>, kDepthPadding<Tiled>)),
        num_queries_(rows.count * rows.group),
        num_tiles_(round_up(num_queries_, kTileQueries) / kTileQueries),
        scale_(rows.args.scale * kLog2e) {
    share_memory();
  }

  void run() {
    [[maybe_unused]] const TileRegisters<Tiled> registers;
    begin_prefetch(rows_.begin);
    pack_queries();
    for (int64_t tile = 0; tile < num_tiles_ && rows_.begin > 0; tile++) load_partials(tile);
    for (int64_t begin = rows_.begin; begin < rows_.end; begin += kChunk) {
      const int64_t count = keys_from(begin);
      pack_chunk(begin, count);
      begin_prefetch(begin + kChunk);
      for (int64_t tile = 0; tile < num_tiles_; tile++) {
        const int64_t seen = smaller<int64_t>(count, last_position(tile) + 1 - begin);
        if (seen > 0) attend(tile, begin, seen);
      }
    }
    for (int64_t tile = 0; tile < num_tiles_; tile++) write_out(tile);
  }

 private:
  // Keys of the chunk that begins at `begin`.
  BACKFILL_INLINE int64_t keys_from(int64_t begin) const {
    return larger<int64_t>(0, smaller<int64_t>(kChunk, rows_.end - begin));
  }

  // Depth of the second product, in units, for `count` keys.
  static BACKFILL_INLINE int64_t key_depth(int64_t count) {
    return round_up((count + kPerUnit<T> - 1) / kPerUnit<T>, kDepthPadding<Tiled>);
  }

  void share_memory() {
    const int64_t tile_size = kTileQueries * num_tiles_;
    const int64_t sizes[] = {depth_ * tile_size,
                             row_dim_ * tile_size,
                             tile_size,
                             tile_size,
                             tile_size,
                             kChunk * depth_,
                             kChunk * row_dim_,
                             kChunk * kTileQueries,
                             kChunk * kTileQueries,
                             kTileQueries,
                             kTileQueries,
                             kChunk,
                             kChunk};
    int64_t total = 0;
    for (int64_t size : sizes) total += round_up(size, 16);
    float* memory = static_cast<float*>(scratch(kWork, total * sizeof(float) + 2 * kChunk * sizeof(Kv*)));
    float** parts[] = {&queries_,     &sums_,          &max_,         &total_,   &positions_,
                       &packed_keys_, &packed_values_, &scores_,      &weights_, &fold_before_,
                       &fold_chunk_,  &key_scales_,    &value_scales_};
    for (int i = 0; i < 13; i++) *parts[i] = memory, memory += round_up(sizes[i], 16);
    key_rows_ = reinterpret_cast<const Kv**>(memory);
  }

  BACKFILL_INLINE int64_t queries_in(int64_t tile) const {
    return smaller<int64_t>(kTileQueries, num_queries_ - tile * kTileQueries);
  }

  BACKFILL_INLINE int64_t first_position(int64_t tile) const {
    return rows_.position_of(tile * kTileQueries);
  }

  BACKFILL_INLINE int64_t last_position(int64_t tile) const {
    return rows_.position_of(tile * kTileQueries + queries_in(tile) - 1);
  }

  // queries_[tile][depth][query]; queries past the end repeat the last query and are never written out.
  void pack_queries() {
    for (int64_t query = 0; query < num_tiles_ * kTileQueries; query += kLanes) {
      prefetch_some();
      const int64_t tile = query / kTileQueries;
      float* target = queries_ + tile * depth_ * kTileQueries + query % kTileQueries;
      const T* rows[kLanes];
      int32_t* positions = reinterpret_cast<int32_t*>(positions_) + query;
      for (int i = 0; i < kLanes; i++) {
        const int64_t source = smaller(query + i, num_queries_ - 1);
        rows[i] = rows_.template query<T>(source);
        positions[i] = (int32_t)rows_.position_of(source);
      }
      for (int64_t unit = 0; unit < depth_; unit += kLanes) {
        const int64_t present = larger<int64_t>(0, dim_ / kPerUnit<T> - unit);
        Floats square[kLanes];
        for (int i = 0; i < kLanes; i++)
          square[i] = present == 0 ? Floats{} : load_units(rows[i] + unit * kPerUnit<T>, present);
        transpose(square);
        for (int i = 0; i < kLanes && unit + i < depth_; i++)
          store(target + (unit + i) * kTileQueries, square[i]);
      }
      store(max_ + query, broadcast(-__builtin_inff()));
      store(total_ + query, Floats{});
    }
  }

  void pack_chunk(int64_t begin, int64_t count) {
    keys_.list(begin, begin + count, key_rows_);
    const int64_t units = dim_ / kPerUnit<T>;
    for (int64_t i = 0; i < count; i++)
      for (int64_t unit = 0; unit < depth_; unit += kLanes) {
        const Kv* row = key_rows_[i];
        Floats key;
        if constexpr (std::is_same_v<T, Kv>)
          key = load_units(row + unit * kPerUnit<T>, larger<int64_t>(0, units - unit));
        else
          key = load_stored<T>(row, unit, units);
        store(packed_keys_ + i * depth_ + unit, key, depth_ - unit);
      }
    if constexpr (kHasScales<Kv>) {
      for (int64_t i = 0; i < round_up(count, kKeysTogether); i++) {
        key_scales_[i] = i < count ? scale_of(key_rows_[i], dim_) : 1.0f;
        value_scales_[i] = i < count ? scale_of(key_rows_[i] + keys_.value_offset(), dim_) : 1.0f;
      }
    }
    const int64_t padded = round_up(count, kRowPadding<Tiled>);
    std::memset(packed_keys_ + count * depth_, 0, (padded - count) * depth_ * sizeof(float));
    if constexpr (Tiled)
      pack_values_for_tiles(count);
    else
      pack_values(count);
  }

  // The chunk that begins at `begin` is read next.
  void begin_prefetch(int64_t begin) {
    const int64_t count = keys_from(begin);
    ahead_ = key_rows_ + kChunk, ahead_end_ = ahead_ + count;
    keys_.list(begin, begin + count, ahead_);
  }

  // A share of the next chunk for each kLanes queries: a core tracks few cache misses at a time.
  BACKFILL_INLINE void prefetch_some() {
    const int64_t bytes = keys_.shape.row_size * (int64_t)sizeof(Kv);
    const Kv** end =
        ahead_ + smaller<int64_t>(ahead_end_ - ahead_, ceil_divide(kChunk * kLanes, num_queries_));
    for (; ahead_ < end; ahead_++)
      for (int64_t byte = 0; byte < bytes; byte += 64) {
        const char* line = reinterpret_cast<const char*>(*ahead_) + byte;
        __builtin_prefetch(line, 0, 2);
        __builtin_prefetch(line + keys_.value_offset() * (int64_t)sizeof(Kv), 0, 2);
      }
  }

  // Value row of key i; zero past the last key, because a weight of zero times NaN is NaN.
  BACKFILL_INLINE Halves value_bits(int64_t i, int64_t count, int64_t d) const {
    if (i >= count || d >= dim_) return Halves{};
    return load_bits(key_rows_[i] + keys_.value_offset(), d, dim_);
  }

  // packed_values_[unit of keys][row_dim].
  void pack_values(int64_t count) {
    const int64_t offset = keys_.value_offset();
    for (int64_t unit = 0; unit < key_depth(count); unit++) {
      float* target = packed_values_ + unit * row_dim_;
      for (int64_t d = 0; d < dim_; d += kLanes) {
        Floats values;
        if constexpr (kPaired<T>)
          values = interleave(value_bits(key_of(unit, 0), count, d), value_bits(key_of(unit, 1), count, d));
        else
          values = load_elements(key_rows_[unit] + offset, d, dim_);
        store(target + d, values, row_dim_ - d);
      }
    }
  }

  // Key `half` of unit `unit`. In tiles a unit has keys k and k + 16 of 32: decode reads 16 keys as stored.
  static BACKFILL_INLINE int64_t key_of(int64_t unit, int64_t half) {
    return Tiled ? unit / 16 * 32 + unit % 16 + 16 * half : 2 * unit + half;
  }

  // packed_values_[row_dim][unit of keys], a chunk's units wide.
  void pack_values_for_tiles(int64_t count) {
    constexpr int64_t kWidth = kChunk / 2;
    for (int64_t unit = 0; unit < key_depth(count); unit += kLanes)
      for (int64_t d = 0; d < row_dim_; d += kLanes) {
        Floats square[kLanes];
        for (int i = 0; i < kLanes; i++)
          square[i] = interleave(value_bits(key_of(unit + i, 0), count, d),
                                 value_bits(key_of(unit + i, 1), count, d));
        transpose(square);
        for (int i = 0; i < kLanes; i++) store(packed_values_ + (d + i) * kWidth + unit, square[i]);
      }
  }

  // Keys [begin, begin + count) of the packed chunk for one tile.
  void attend(int64_t tile, int64_t begin, int64_t count) {
    const int64_t queries = round_up(queries_in(tile), kQueryPadding<Tiled>);
    float* sums = sums_ + tile * row_dim_ * kTileQueries;
    product<T, Tiled>(packed_keys_, depth_, 1, queries_ + tile * depth_ * kTileQueries, depth_, scores_,
                      round_up(count, kRowPadding<Tiled>), queries, StoreSums{});
    if constexpr (kHasScales<Kv>)
      for (int64_t i = 0; i < count; i++)
        for (int64_t query = 0; query < queries; query += kLanes) {
          float* score = scores_ + i * kTileQueries + query;
          store(score, load(score) * key_scales_[i]);
        }
    // Every row of the tile sees keys up to its first row's position.
    const int64_t clear = smaller<int64_t>(count, larger<int64_t>(0, first_position(tile) + 1 - begin));
    for (int64_t query = 0; query < queries; query += kLanes) {
      prefetch_some();
      weigh_queries(tile, query, begin, clear, count);
    }
    const int64_t row_step = Tiled ? kChunk / kPerUnit<T> : 1, depth_step = Tiled ? 1 : row_dim_;
    const auto multiply = [&](const auto& fold) {
      product<T, Tiled>(packed_values_, row_step, depth_step, weights_, key_depth(count), sums, row_dim_,
                        queries, fold);
    };
    if (begin == 0)
      multiply(StoreSums{});
    else
      multiply(FoldSums{fold_before_, fold_chunk_});
  }

  // Softmax of kLanes queries: scores_ to weights_ and the factors of the fold.
  BACKFILL_INLINE void weigh_queries(int64_t tile, int64_t query, int64_t begin, int64_t clear,
                                     int64_t count) {
    float* scores = scores_ + query;
    const int64_t index = tile * kTileQueries + query;
    const Floats top = mask(scores, index, begin, clear, count);
    // A query that sees no key of the chunk: all its weights are zero then.
    const Floats reference = top == -__builtin_inff() ? Floats{} : top;
    const Floats chunk_total = write_weights(scores, weights_ + query, count, reference);
    Floats highest = load(max_ + index), total = load(total_ + index);
    const FoldFactors<Floats> factors = fold(highest, total, top, chunk_total);
    store(max_ + index, highest);
    store(total_ + index, total);
    store(fold_before_ + query, factors.before);
    store(fold_chunk_ + query, factors.chunk);
  }

  // Hides scores after a query's position; keys before `clear` need no mask. Returns: the largest of each
  // query, scaled.
  BACKFILL_INLINE Floats mask(float* scores, int64_t index, int64_t begin, int64_t clear, int64_t count) {
    Ints position;
    std::memcpy(&position, reinterpret_cast<int32_t*>(positions_) + index, sizeof position);
    const Ints last_seen = position - (int32_t)begin;
    const Floats hidden = broadcast(-__builtin_inff());
    Floats top = hidden, other = hidden;
    int64_t i = 0;
    for (; i + 2 <= clear; i += 2) {
      top = max(top, load(scores + i * kTileQueries));
      other = max(other, load(scores + (i + 1) * kTileQueries));
    }
    for (; i < count; i++) {
      const Floats score = load(scores + i * kTileQueries);
      const Floats masked = last_seen < (int32_t)i ? hidden : score;
      store(scores + i * kTileQueries, masked);
      top = max(top, masked);
    }
    for (; i < round_up(count, kKeysTogether); i++) store(scores + i * kTileQueries, hidden);
    return max(top, other) * scale_;
  }

  // Keys whose weights are computed together: all of kLanes sums, and whole units.
  static constexpr int kKeysTogether = Tiled ? 32 : kLanes;

  // weights: units of keys by queries, padded with zeros to whole tiles. Returns the sums of the queries.
  BACKFILL_INLINE Floats write_weights(const float* scores, float* weights, int64_t count, Floats reference) {
    Floats sums[kLanes] = {};
    const auto weight_of = [&](int64_t key, int lane) __attribute__((always_inline)) {
      Floats weight = exp2<kExpDegree<T>>(load(scores + key * kTileQueries) * scale_ - reference);
      sums[lane] += weight;
      if constexpr (kHasScales<Kv>) weight *= value_scales_[key];
      return weight;
    };
    for (int64_t first = 0; first < count; first += kKeysTogether) {
      if constexpr (kPaired<T>) {
        for (int i = 0; i < kKeysTogether / 2; i++) {
          const int64_t unit = first / 2 + i;
          const Floats low = weight_of(key_of(unit, 0), (int)(key_of(i, 0) % kLanes));
          const Floats high = weight_of(key_of(unit, 1), (int)(key_of(i, 1) % kLanes));
          store(weights + unit * kTileQueries, pair(low, high));
        }
      } else {
        for (int i = 0; i < kLanes; i++) store(weights + (first + i) * kTileQueries, weight_of(first + i, i));
      }
    }
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
  }

  static BACKFILL_INLINE Floats pair(Floats first, Floats second) {
    return interleave(narrow(first), narrow(second));
  }

  void load_partials(int64_t tile) {
    float* sums = sums_ + tile * row_dim_ * kTileQueries;
    for (int64_t query = 0; query < queries_in(tile); query++) {
      const int64_t index = tile * kTileQueries + query;
      const float* partial = rows_.partial_of(index);
      const SoftmaxState state = state_of(partial);
      max_[index] = state.max, total_[index] = state.total;
      for (int64_t d = 0; d < dim_; d++) sums[d * kTileQueries + query] = partial[kPartialSums + d];
    }
  }

  // To the rows' output, or, of a run, to their partial results.
  void write_out(int64_t tile) {
    const float* sums = sums_ + tile * row_dim_ * kTileQueries;
    const int64_t queries = queries_in(tile);
    for (int64_t query = 0; query < queries; query += kLanes) {
      const int64_t first = tile * kTileQueries + query, count = smaller<int64_t>(kLanes, queries - query);
      if (rows_.sharers == nullptr) {
        T* rows[kLanes];
        for (int i = 0; i < count; i++) rows[i] = rows_.out<T>(first + i);
        write_rows(sums + query, 1.0f / load(total_ + first), rows, count);
      } else {
        float* rows[kLanes];
        for (int i = 0; i < count; i++) {
          rows[i] = rows_.partial_of(first + i) + kPartialSums;
          store_state({max_[first + i], total_[first + i]}, rows[i] - kPartialSums);
        }
        write_rows(sums + query, broadcast(1.0f), rows, count);
      }
    }
  }

  // sums [dim, kTileQueries] times the factor of each query.
  template <class Out>
  void write_rows(const float* sums, Floats factor, Out* const* rows, int64_t count) const {
    for (int64_t d = 0; d < dim_; d += kLanes) {
      Floats square[kLanes];
      for (int i = 0; i < kLanes; i++)
        square[i] = d + i < dim_ ? load(sums + (d + i) * kTileQueries) * factor : Floats{};
      transpose(square);
      for (int i = 0; i < kLanes && i < count; i++) store(rows[i] + d, square[i], dim_ - d);
    }
  }

  QueryRows rows_;
  KeyRows<Kv> keys_;
  int64_t dim_, row_dim_;  // head size; padded as rows of the second product
  int64_t depth_;          // units of the first product
  int64_t num_queries_, num_tiles_;
  float scale_;
  const Kv** key_rows_;             // of a chunk
  const Kv **ahead_, **ahead_end_;  // of the next one: those that are not prefetched yet
  float *queries_, *sums_, *max_, *total_, *positions_;
  float *packed_keys_, *packed_values_, *scores_, *weights_;
  float *fold_before_, *fold_chunk_;   // of a tile's queries
  float *key_scales_, *value_scales_;  // [kChunk], where KV has scales
};

}  // namespace backfill::BACKFILL_VARIANT
