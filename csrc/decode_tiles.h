// Attention of one query row with AMX. Its tile loads read K and V from the pool's blocks, without packing; KV of
// int8 is converted first, a chunk at a time.
//
// Scores: a tile of 16 keys by 32 elements, as stored, is multiplied with the queries of the group in pairs
// of elements. The result is 16 keys by heads. Values: the tile product sums pairs, A[m][2k] B[k][2n] +
// A[m][2k+1] B[k][2n+1]. B[k] is a row of values. A row of A with the weights at even indices and zeros at
// odd ones yields the even elements of the output; a row with the two exchanged yields the odd elements. Half
// of the multiplications are by zero, but no value is shuffled.
//
// Sums are those of prefill's tile products, to the bit (softmax.h). There one instruction sums the even and
// the odd elements of 16 pairs of keys apart, and then both; the pairs are (k, k + 16) of 32 keys. Here the
// two halves of 32 keys are a product each, from zero, and are added like that. A reversed block is loaded
// with a negative stride, so that its keys come in order. Weights are rounded to bf16 for the product with V;
// their sum is taken before rounding.
#pragma once

#include "decode.h"
#include "tile_product.h"

#if defined(__AMX_BF16__)

namespace backfill::BACKFILL_VARIANT {

constexpr int kTileKeys = 16;
constexpr int kChunkTiles = kChunk / kTileKeys;
constexpr int kPrefetchTiles = 8;  // how far ahead of the product keys and values are fetched

// Shapes of the tile registers for one of the two products; loading them clears the registers.
class TileShapes {
 public:
  ~TileShapes() { _tile_release(); }

  static void load(int tiles_0_to_3_rows, int tiles_0_to_3_bytes, int tiles_4_5_rows, int tiles_4_5_bytes) {
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; tile++) {
      const int rows = tile < 4 ? tiles_0_to_3_rows : tile < 6 ? tiles_4_5_rows : kTileKeys;
      const int bytes = tile < 4 ? tiles_0_to_3_bytes : tile < 6 ? tiles_4_5_bytes : 64;
      config[16 + 2 * tile] = (uint8_t)bytes;
      config[48 + tile] = (uint8_t)rows;
    }
    publish(config);
    _tile_loadconfig(config);
  }
};

// 16 keys of the sequence in order, `stride` bytes apart; `count` of them exist.
template <class Kv>
struct KeyTile {
  const Kv* keys;
  int32_t stride, count;
};

// One sequence, one key/value head, keys [begin, end); begin is a multiple of kChunk. Steps: head_dim / 32.
template <int Steps, class Kv>
class TileDecodeItem {
 public:
  TileDecodeItem(const AttentionArgs& args, int64_t seq, int64_t kv_head)
      : keys_(key_rows<Kv>(args, seq, kv_head)),
        group_(args.num_heads / args.shape.num_kv_heads),
        padded_group_(group_ <= 4 ? 4 : 8),
        scale_(args.scale * kLog2e) {
    const int64_t row = args.cu_seqlens_q[seq];
    const int64_t row_size = (args.num_heads + 2 * args.shape.num_kv_heads) * kDim;
    query_ = static_cast<const bf16*>(args.qkv) + row * row_size + kv_head * group_ * kDim;
    out_ = static_cast<bf16*>(args.out) + (row * args.num_heads + kv_head * group_) * kDim;
  }

  // Writes the finished output row, or, with `partials`, the result of each chunk. before: the result of keys
  // [0, begin), or null.
  void run(int64_t begin, int64_t end, float* partials, const float* before) {
    count_ = (end - begin + kTileKeys - 1) / kTileKeys;
    take_memory();
    for (int64_t i = 0; i < count_; i++) tiles_[i] = tile_at(begin + i * kTileKeys, end);
    for (int64_t h = 0; h < group_; h++) states_[h] = kNothingSeen;
    std::memset(sums_, 0, Steps * 2 * group_ * 16 * sizeof *sums_);
    if (before != nullptr) load_partials(before);
    TileShapes shapes;
    score();
    const int rows = (int)(2 * group_);
    TileShapes::load(rows, 64, rows, 64);
    for (int64_t first = 0; first < count_; first += kChunkTiles) {
      const int64_t last = smaller(first + kChunkTiles, count_);
      if constexpr (kHasScales<Kv>) load_scales(first, last);
      for (int64_t h = 0; h < group_; h++) weigh_head(h, first, last);
      add_values(first, last);
      if (partials == nullptr)
        fold_chunk();
      else
        partials = save(partials);
    }
    if (partials == nullptr) finish();
  }

 private:
  static constexpr int64_t kDim = 32 * Steps;
  static constexpr bool kConverts = kHasScales<Kv>;
  static constexpr int64_t kCopiedRows = kConverts ? kChunk : kTileKeys;

  void take_memory() {
    const int64_t sums = Steps * 2 * group_ * 16, queries = Steps * 16 * padded_group_;
    const int64_t scores = count_ * kTileKeys * padded_group_;
    const int64_t weights = kChunkTiles * 2 * group_ * 16;
    const int64_t floats = weights + 4 * sums + round_up(queries, 16) + scores + 4 * group_ + 2 * kChunk;
    char* memory = static_cast<char*>(
        scratch(kWork, floats * sizeof(float) + kCopiedRows * kDim * sizeof(bf16) + count_ * sizeof *tiles_));
    weights_ = reinterpret_cast<uint32_t*>(memory);
    sums_ = reinterpret_cast<float*>(memory) + weights;
    chunk_sums_ = sums_ + sums;
    halves_ = chunk_sums_ + sums;
    queries_ = reinterpret_cast<uint32_t*>(halves_ + 2 * sums);
    scores_ = reinterpret_cast<float*>(queries_) + round_up(queries, 16);
    key_scales_ = scores_ + scores;
    value_scales_ = key_scales_ + kChunk;
    copied_ = reinterpret_cast<bf16*>(value_scales_ + kChunk);
    tiles_ = reinterpret_cast<KeyTile<Kv>*>(copied_ + kCopiedRows * kDim);
    states_ = reinterpret_cast<SoftmaxState*>(tiles_ + count_);
    chunk_states_ = states_ + group_;
  }

  // The 16 slots that hold the keys from `position` on.
  KeyTile<Kv> tile_at(int64_t position, int64_t end) const {
    const int64_t size = keys_.shape.block_size, offset = position % size;
    const int32_t ref = keys_.refs[position / size];
    const bool reversed = ref & 1;
    const int64_t slot = reversed ? size - 1 - offset : offset;
    const int32_t stride = (int32_t)(keys_.shape.row_size * (int64_t)sizeof(Kv));
    return {keys_.base + (int64_t)(ref >> 1) * keys_.shape.block_stride + slot * keys_.shape.row_size,
            reversed ? -stride : stride, (int32_t)smaller<int64_t>(kTileKeys, end - position)};
  }

  BACKFILL_INLINE void prefetch_tile(int64_t i, int64_t offset) const {
    if (i >= count_) return;
    const KeyTile<Kv>& tile = tiles_[i];
    const char* line = reinterpret_cast<const char*>(tile.keys + offset);
    if (tile.stride < 0) line += (kTileKeys - 1) * tile.stride;
    const int64_t bytes = kTileKeys * keys_.shape.row_size * (int64_t)sizeof(Kv);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(line + byte, 0, 2);
  }

  // scores_[tile][key][head] of every head of the group.
  void score() {
    pack_queries();
    TileShapes::load(16, 4 * padded_group_, 16, 4 * padded_group_);
    const int64_t query_stride = 4 * padded_group_;
    publish(queries_);
    _tile_loadd(0, queries_, query_stride);
    if constexpr (Steps > 1) _tile_loadd(1, queries_ + 16 * padded_group_, query_stride);
    if constexpr (Steps > 2) _tile_loadd(2, queries_ + 32 * padded_group_, query_stride);
    if constexpr (Steps > 3) _tile_loadd(3, queries_ + 48 * padded_group_, query_stride);
    for (int64_t i = 0; i < kPrefetchTiles; i++) prefetch_tile(i, 0);
    for (int64_t i = 0; i < count_; i++) {
      if (kConverts && i % kChunkTiles == 0) convert(i, smaller(i + kChunkTiles, count_), 0);
      const KeyTile<bf16> tile = operand(i, 0);
      const bf16* keys = tile.keys;
      const int64_t stride = tile.stride;
      prefetch_tile(i + kPrefetchTiles, 0);
      _tile_zero(4);
      _tile_loadd(6, keys, stride);
      _tile_dpbf16ps(4, 6, 0);
      if constexpr (Steps > 1) {
        _tile_loadd(7, keys + 32, stride);
        _tile_dpbf16ps(4, 7, 1);
      }
      if constexpr (Steps > 2) {
        _tile_loadd(6, keys + 64, stride);
        _tile_dpbf16ps(4, 6, 2);
      }
      if constexpr (Steps > 3) {
        _tile_loadd(7, keys + 96, stride);
        _tile_dpbf16ps(4, 7, 3);
      }
      _tile_stored(4, scores_ + i * kTileKeys * padded_group_, query_stride);
    }
    publish(scores_);
    for (int64_t i = 0; i < kPrefetchTiles; i++) prefetch_tile(i, keys_.value_offset());
  }

  // Copies rows of tiles [first, last), `offset` from their keys, to copied_ [tile, 16, head_dim]; rows of keys
  // that do not exist are zeros there, since unused slots may hold NaN.
  void convert(int64_t first, int64_t last, int64_t offset) {
    for (int64_t i = first; i < last; i++) {
      const KeyTile<Kv>& tile = tiles_[i];
      const Kv* row = tile.keys + offset;
      bf16* copy = copied_ + (i - first) % (kCopiedRows / kTileKeys) * kTileKeys * kDim;
      for (int r = 0; r < tile.count; r++, row += tile.stride / (int64_t)sizeof(Kv), copy += kDim)
        for (int64_t unit = 0; unit < kDim / 2; unit += kLanes) {
          const Floats units = load_stored<bf16>(row, unit, kDim / 2);
          std::memcpy(copy + 2 * unit, &units, sizeof units);
        }
      std::memset(copy, 0, (kTileKeys - tile.count) * kDim * sizeof *copy);
    }
    publish(copied_);
  }

  // What the tile loads of tile i read.
  BACKFILL_INLINE KeyTile<bf16> operand(int64_t i, int64_t offset) const {
    constexpr int32_t kStride = kDim * sizeof(bf16);
    if constexpr (kConverts)
      return {copied_ + i % kChunkTiles * kTileKeys * kDim, kStride, kTileKeys};
    else
      return {tiles_[i].keys + offset, tiles_[i].stride, tiles_[i].count};
  }

  // queries_[step][pair][head]: two neighbouring elements of each head's query in 32 bits.
  void pack_queries() {
    std::memset(queries_, 0, Steps * 16 * padded_group_ * sizeof *queries_);
    for (int64_t h = 0; h < group_; h++)
      for (int64_t pair = 0; pair < kDim / 2; pair++)
        std::memcpy(queries_ + pair * padded_group_ + h, query_ + h * kDim + 2 * pair, sizeof *queries_);
  }

  // Scales of the keys of tiles [first, last); 1 for those that do not exist.
  void load_scales(int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const KeyTile<Kv>& tile = tiles_[i];
      const Kv* row = tile.keys;
      float* keys = key_scales_ + (i - first) * kTileKeys;
      float* values = value_scales_ + (i - first) * kTileKeys;
      for (int r = 0; r < kTileKeys; r++, row += tile.stride) {
        keys[r] = r < tile.count ? scale_of(row, kDim) : 1.0f;
        values[r] = r < tile.count ? scale_of(row + keys_.value_offset(), kDim) : 1.0f;
      }
    }
  }

  // Turns one head's scores of tiles [first, last) into the rows of weights for even and for odd elements.
  void weigh_head(int64_t h, int64_t first, int64_t last) {
    const __m512i places = _mm512_add_epi32(
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32((int)padded_group_)),
        _mm512_set1_epi32((int)h));
    const Floats none = broadcast(-__builtin_inff());
    Floats scores[kChunkTiles];
    Floats top = none;
    for (int64_t i = first; i < last; i++) {
      Floats scaled = (Floats)_mm512_i32gather_ps(places, scores_ + i * kTileKeys * padded_group_, 4);
      if constexpr (kHasScales<Kv>) scaled *= load(key_scales_ + (i - first) * kTileKeys);
      scaled *= scale_;
      scores[i - first] =
          (Floats)_mm512_mask_mov_ps((__m512)none, first_lanes(tiles_[i].count), (__m512)scaled);
      top = max(top, scores[i - first]);
    }
    const float highest = max_of(top);
    Floats total{};
    for (int64_t i = first; i < last; i++) {
      Floats weight = exp2<kExpDegree<bf16>>(scores[i - first] - highest);
      total += weight;
      if constexpr (kHasScales<Kv>) weight *= load(value_scales_ + (i - first) * kTileKeys);
      const Words bits = words_of(narrow(weight));
      std::memcpy(weight_row(i - first, 2 * h), &bits, sizeof bits);
      const Words odd = bits << 16;
      std::memcpy(weight_row(i - first, 2 * h + 1), &odd, sizeof odd);
    }
    chunk_states_[h] = {highest, sum(total)};
  }

  BACKFILL_INLINE uint32_t* weight_row(int64_t tile, int64_t row) const {
    return weights_ + (tile * 2 * group_ + row) * 16;
  }

  // halves[step][row][16]: row 2h holds head h's even elements, row 2h + 1 its odd ones.
  BACKFILL_INLINE void multiply_values(int64_t i, int64_t first, float* halves) {
    const KeyTile<bf16> tile = values_of(i);
    const int64_t rows = 2 * group_;
    prefetch_tile(i + kPrefetchTiles, keys_.value_offset());
    _tile_loadd(4, weight_row(i - first, 0), 64);
    _tile_zero(0);
    _tile_loadd(6, tile.keys, tile.stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stored(0, halves, 64);
    if constexpr (Steps > 1) {
      _tile_zero(1);
      _tile_loadd(7, tile.keys + 32, tile.stride);
      _tile_dpbf16ps(1, 4, 7);
      _tile_stored(1, halves + rows * 16, 64);
    }
    if constexpr (Steps > 2) {
      _tile_zero(2);
      _tile_loadd(6, tile.keys + 64, tile.stride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_stored(2, halves + rows * 32, 64);
    }
    if constexpr (Steps > 3) {
      _tile_zero(3);
      _tile_loadd(7, tile.keys + 96, tile.stride);
      _tile_dpbf16ps(3, 4, 7);
      _tile_stored(3, halves + rows * 48, 64);
    }
  }

  // chunk_sums_, as `halves`, of tiles [first, last).
  void add_values(int64_t first, int64_t last) {
    const int64_t size = Steps * 2 * group_ * 16;
    float* second = halves_ + size;
    publish(weights_);
    if (kConverts) convert(first, last, keys_.value_offset());
    for (int64_t i = first; i < last; i += 2) {
      multiply_values(i, first, halves_);
      const bool has_second = i + 1 < last;
      if (has_second) multiply_values(i + 1, first, second);
      publish(halves_);
      for (int64_t at = 0; at < size; at += kLanes) {
        Floats group = load(halves_ + at);
        if (has_second) group += load(second + at);
        store(chunk_sums_ + at, i == first ? group : load(chunk_sums_ + at) + group);
      }
    }
  }

  // The tile's values; where slots are unused, a copy with zeros there.
  KeyTile<bf16> values_of(int64_t i) {
    if (kConverts || tiles_[i].count == kTileKeys) return operand(i, keys_.value_offset());
    convert(i, i + 1, keys_.value_offset());
    return {copied_, (int32_t)(kDim * sizeof(bf16)), kTileKeys};
  }

  void fold_chunk() {
    for (int64_t h = 0; h < group_; h++) {
      const FoldFactors<Floats> factors = fold(states_[h], chunk_states_[h]);
      for (int64_t s = 0; s < Steps; s++)
        for (int64_t row = 2 * h; row < 2 * h + 2; row++) {
          const int64_t at = (s * 2 * group_ + row) * 16;
          store(sums_ + at, folded(load(sums_ + at), load(chunk_sums_ + at), factors));
        }
    }
  }

  BACKFILL_INLINE Floats sums_of(int64_t step, int64_t row) const {
    return load(sums_ + (step * 2 * group_ + row) * 16);
  }

  void finish() {
    for (int64_t h = 0; h < group_; h++) {
      const float inverse = 1.0f / states_[h].total;
      for (int64_t s = 0; s < Steps; s++) {
        const Floats pairs =
            interleave(narrow(sums_of(s, 2 * h) * inverse), narrow(sums_of(s, 2 * h + 1) * inverse));
        std::memcpy(out_ + h * kDim + 32 * s, &pairs, sizeof pairs);
      }
    }
  }

  // Where sums_ has element d of a head's sums.
  BACKFILL_INLINE int64_t place_of(int64_t h, int64_t d) const {
    return (d / 32 * 2 * group_ + 2 * h + d % 2) * 16 + d % 32 / 2;
  }

  // Returns: where the next chunk's result goes.
  float* save(float* partial) {
    for (int64_t h = 0; h < group_; h++, partial += partial_size(kDim)) {
      store_state(chunk_states_[h], partial);
      for (int64_t d = 0; d < kDim; d++) partial[kPartialSums + d] = chunk_sums_[place_of(h, d)];
    }
    return partial;
  }

  void load_partials(const float* partial) {
    for (int64_t h = 0; h < group_; h++, partial += partial_size(kDim)) {
      states_[h] = state_of(partial);
      for (int64_t d = 0; d < kDim; d++) sums_[place_of(h, d)] = partial[kPartialSums + d];
    }
  }

  KeyRows<Kv> keys_;
  int64_t group_, padded_group_;
  float scale_;
  const bf16* query_;
  bf16* out_;
  int64_t count_;                         // tiles of keys
  KeyTile<Kv>* tiles_;                    // [count]
  uint32_t* weights_;                     // [kChunkTiles, 2 * group, 16]
  float* scores_;                         // [count, 16 keys, padded group]
  float *sums_, *chunk_sums_;             // [Steps, 2 * group, 16]
  float* halves_;                         // [2, Steps, 2 * group, 16]
  uint32_t* queries_;                     // [Steps, 16 pairs, padded group]
  SoftmaxState *states_, *chunk_states_;  // [group]
  bf16* copied_;                          // [kCopiedRows, head_dim]
  float *key_scales_, *value_scales_;     // [kChunk], where KV has scales
};

template <class Kv>
BACKFILL_INLINE void decode_tiles(const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t begin,
                                  int64_t end, float* partials, const float* before) {
  switch (args.shape.head_dim / 32) {
    case 1:
      return TileDecodeItem<1, Kv>(args, seq, kv_head).run(begin, end, partials, before);
    case 2:
      return TileDecodeItem<2, Kv>(args, seq, kv_head).run(begin, end, partials, before);
    case 3:
      return TileDecodeItem<3, Kv>(args, seq, kv_head).run(begin, end, partials, before);
    default:
      return TileDecodeItem<4, Kv>(args, seq, kv_head).run(begin, end, partials, before);
  }
}

}  // namespace backfill::BACKFILL_VARIANT

#endif
