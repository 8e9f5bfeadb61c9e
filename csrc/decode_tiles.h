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

// Shapes of the tile registers: queries in 0 and 1, scores in 2, weights in 3, weighted sums in 4 and 5, rows of KV in
// 6 and 7.
class TileShapes {
 public:
  TileShapes(int64_t padded_group, int64_t group) {
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; tile++) {
      config[16 + 2 * tile] = (uint8_t)(tile < 3 ? 4 * padded_group : 64);
      config[48 + tile] = (uint8_t)(tile >= 3 && tile < 6 ? 2 * group : kTileKeys);
    }
    publish(config);
    _tile_loadconfig(config);
  }
  ~TileShapes() { _tile_release(); }
};

// 16 keys of the sequence in order, `stride` bytes apart; `count` of them exist.
template <class Kv>
struct KeyTile {
  const Kv* keys;
  int32_t stride, count;
};

// One sequence, some key/value heads, keys [item.begin, item.end); item.begin is a multiple of kChunk. Steps:
// head_dim / 32.
template <int Steps, class Kv>
class TileDecodeItem {
 public:
  TileDecodeItem(const AttentionArgs& args, const Item& item)
      : keys_(key_rows<Kv>(args, item.seq, item.kv_head)),
        begin_(item.begin),
        end_(item.end),
        kv_heads_(item.num_kv_heads),
        group_(args.num_heads / args.shape.num_kv_heads),
        padded_group_(group_ <= 4 ? 4 : 8),
        scale_(args.scale * kLog2e) {
    const int64_t row = args.cu_seqlens_q[item.seq], first = item.kv_head * group_;
    const int64_t row_size = (args.num_heads + 2 * args.shape.num_kv_heads) * kDim;
    query_ = static_cast<const bf16*>(args.qkv) + row * row_size + first * kDim;
    out_ = static_cast<bf16*>(args.out) + (row * args.num_heads + first) * kDim;
    take_memory();
  }

  void run(const DecodeResults& results, Reads<Kv>& reads) {
    pack_queries();
    for (int64_t h = 0; h < kv_heads_ * group_; h++) states_[h] = kNothingSeen;
    std::memset(sums_, 0, kv_heads_ * head_sums() * sizeof *sums_);
    if (results.before != nullptr) load_partials(results.before);
    const TileShapes shapes(padded_group_, group_);
    float* partials = results.partials;
    for (int64_t position = begin_; position < end_; position += kChunk) {
      num_tiles_ = (smaller<int64_t>(kChunk, end_ - position) + kTileKeys - 1) / kTileKeys;
      for (int64_t i = 0; i < num_tiles_; i++) tiles_[i] = tile_at(position + i * kTileKeys);
      reads.begin_chunk(position,
                        kv_heads_ * num_tiles_ * (2 * Steps + group_ + (kConverts ? kTileKeys : 0)));
      for (int64_t g = 0; g < kv_heads_; g++) {
        score(g, reads);
        if constexpr (kHasScales<Kv>) load_scales();
        for (int64_t h = 0; h < group_; h++) weigh_head(h, reads);
        add_values(reads);
        if (partials == nullptr)
          fold_chunk(g);
        else
          save(partials + g * results.head_stride);
        for (int64_t i = 0; i < num_tiles_; i++) tiles_[i].keys += keys_.head_offset();
      }
      if (partials != nullptr) partials += group_ * partial_size(kDim);
    }
    if (partials == nullptr) finish();
  }

 private:
  static constexpr int64_t kDim = 32 * Steps;
  static constexpr bool kConverts = kHasScales<Kv>;
  static constexpr int64_t kCopiedRows = kConverts ? kChunk : kTileKeys;

  // Floats of the weighted sums of a key/value head.
  BACKFILL_INLINE int64_t head_sums() const { return Steps * 2 * group_ * 16; }

  // Words of the packed queries of a key/value head.
  BACKFILL_INLINE int64_t head_queries() const { return Steps * 16 * padded_group_; }

  void take_memory() {
    const int64_t weights = kChunkTiles * 2 * group_ * 16, scores = kChunk * padded_group_;
    const int64_t states = round_up((kv_heads_ + 1) * group_ * 2, 16);
    const int64_t floats =
        weights + (kv_heads_ + 3) * head_sums() + kv_heads_ * head_queries() + scores + states + 2 * kChunk;
    float* memory =
        static_cast<float*>(scratch(kWork, floats * sizeof(float) + kCopiedRows * kDim * sizeof(bf16) +
                                               sizeof(KeyTile<Kv>[kChunkTiles])));
    weights_ = reinterpret_cast<uint32_t*>(memory), memory += weights;
    sums_ = memory, memory += kv_heads_ * head_sums();
    chunk_sums_ = memory, memory += head_sums();
    halves_ = memory, memory += 2 * head_sums();
    queries_ = reinterpret_cast<uint32_t*>(memory), memory += kv_heads_ * head_queries();
    scores_ = memory, memory += scores;
    key_scales_ = memory, memory += kChunk;
    value_scales_ = memory, memory += kChunk;
    states_ = reinterpret_cast<SoftmaxState*>(memory), memory += states;
    chunk_states_ = states_ + kv_heads_ * group_;
    copied_ = reinterpret_cast<bf16*>(memory);
    tiles_ = reinterpret_cast<KeyTile<Kv>*>(copied_ + kCopiedRows * kDim);
  }

  // The 16 slots that hold the keys from `position` on.
  KeyTile<Kv> tile_at(int64_t position) const {
    const int64_t size = keys_.shape.block_size, offset = position % size;
    const int32_t ref = keys_.refs[position / size];
    const bool reversed = ref & 1;
    const int64_t slot = reversed ? size - 1 - offset : offset;
    const int32_t stride = (int32_t)(keys_.shape.row_size * (int64_t)sizeof(Kv));
    return {keys_.base + (int64_t)(ref >> 1) * keys_.shape.block_stride + slot * keys_.shape.row_size,
            reversed ? -stride : stride, (int32_t)smaller<int64_t>(kTileKeys, end_ - position)};
  }

  // scores_[tile][key][head] of every query head of key/value head g.
  void score(int64_t g, Reads<Kv>& reads) {
    const uint32_t* queries = queries_ + g * head_queries();
    const int64_t query_stride = 4 * padded_group_, step_words = 16 * padded_group_;
    publish(queries);
    if constexpr (Steps <= 2) _tile_loadd(0, queries, query_stride);
    if constexpr (Steps == 2) _tile_loadd(1, queries + step_words, query_stride);
    if (kConverts) convert(0, num_tiles_, 0, reads);
    for (int64_t i = 0; i < num_tiles_; i++) {
      const KeyTile<bf16> tile = operand(i, 0);
      _tile_zero(2);
      for (int64_t step = 0; step < Steps; step += 2) {
        if constexpr (Steps > 2) _tile_loadd(0, queries + step * step_words, query_stride);
        _tile_loadd(6, tile.keys + step * 32, tile.stride);
        _tile_dpbf16ps(2, 6, 0);
        reads.fetch();
        if (step + 1 == Steps) break;
        if constexpr (Steps > 2) _tile_loadd(1, queries + (step + 1) * step_words, query_stride);
        _tile_loadd(7, tile.keys + (step + 1) * 32, tile.stride);
        _tile_dpbf16ps(2, 7, 1);
        reads.fetch();
      }
      _tile_stored(2, scores_ + i * kTileKeys * padded_group_, query_stride);
    }
    publish(scores_);
  }

  // Copies rows of tiles [first, last), `offset` from their keys, to copied_ [tile, 16, head_dim]; rows of keys
  // that do not exist are zeros there, since unused slots may hold NaN.
  void convert(int64_t first, int64_t last, int64_t offset, Reads<Kv>& reads) {
    for (int64_t i = first; i < last; i++) {
      const KeyTile<Kv>& tile = tiles_[i];
      const Kv* row = tile.keys + offset;
      bf16* copy = copied_ + (i - first) * kTileKeys * kDim;
      for (int r = 0; r < tile.count; r++, row += tile.stride / (int64_t)sizeof(Kv), copy += kDim) {
        if (kConverts && r % 2 == 0) reads.fetch();
        for (int64_t unit = 0; unit < kDim / 2; unit += kLanes) {
          const Floats units = load_stored<bf16>(row, unit, kDim / 2);
          std::memcpy(copy + 2 * unit, &units, sizeof units);
        }
      }
      std::memset(copy, 0, (kTileKeys - tile.count) * kDim * sizeof *copy);
    }
    publish(copied_);
  }

  // What the tile loads of tile i read.
  BACKFILL_INLINE KeyTile<bf16> operand(int64_t i, int64_t offset) const {
    constexpr int32_t kStride = kDim * sizeof(bf16);
    if constexpr (kConverts)
      return {copied_ + i * kTileKeys * kDim, kStride, kTileKeys};
    else
      return {tiles_[i].keys + offset, tiles_[i].stride, tiles_[i].count};
  }

  // queries_[step][pair][head] of each key/value head: two neighbouring elements of each head's query in 32 bits.
  void pack_queries() {
    std::memset(queries_, 0, kv_heads_ * head_queries() * sizeof *queries_);
    for (int64_t h = 0; h < kv_heads_ * group_; h++) {
      uint32_t* target = queries_ + h / group_ * head_queries() + h % group_;
      for (int64_t pair = 0; pair < kDim / 2; pair++)
        std::memcpy(target + pair * padded_group_, query_ + h * kDim + 2 * pair, sizeof *queries_);
    }
  }

  // Scales of the chunk's keys; 1 for those that do not exist.
  void load_scales() {
    for (int64_t i = 0; i < num_tiles_; i++) {
      const KeyTile<Kv>& tile = tiles_[i];
      const Kv* row = tile.keys;
      float* keys = key_scales_ + i * kTileKeys;
      float* values = value_scales_ + i * kTileKeys;
      for (int r = 0; r < kTileKeys; r++, row += tile.stride) {
        keys[r] = r < tile.count ? scale_of(row, kDim) : 1.0f;
        values[r] = r < tile.count ? scale_of(row + keys_.value_offset(), kDim) : 1.0f;
      }
    }
  }

  // Turns the scores of query head h of the group into the rows of weights for even and for odd elements.
  void weigh_head(int64_t h, Reads<Kv>& reads) {
    const __m512i places = _mm512_add_epi32(
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32((int)padded_group_)),
        _mm512_set1_epi32((int)h));
    const Floats none = broadcast(-__builtin_inff());
    Floats scores[kChunkTiles];
    Floats top = none;
    for (int64_t i = 0; i < num_tiles_; i++) {
      Floats scaled = (Floats)_mm512_i32gather_ps(places, scores_ + i * kTileKeys * padded_group_, 4);
      if constexpr (kHasScales<Kv>) scaled *= load(key_scales_ + i * kTileKeys);
      scaled *= scale_;
      scores[i] = (Floats)_mm512_mask_mov_ps((__m512)none, first_lanes(tiles_[i].count), (__m512)scaled);
      top = max(top, scores[i]);
    }
    const float highest = max_of(top);
    Floats total{};
    for (int64_t i = 0; i < num_tiles_; i++) {
      reads.fetch();
      Floats weight = exp2<kExpDegree<bf16>>(scores[i] - highest);
      total += weight;
      if constexpr (kHasScales<Kv>) weight *= load(value_scales_ + i * kTileKeys);
      const Words bits = words_of(narrow(weight));
      std::memcpy(weight_row(i, 2 * h), &bits, sizeof bits);
      const Words odd = bits << 16;
      std::memcpy(weight_row(i, 2 * h + 1), &odd, sizeof odd);
    }
    chunk_states_[h] = {highest, sum(total)};
  }

  BACKFILL_INLINE uint32_t* weight_row(int64_t tile, int64_t row) const {
    return weights_ + (tile * 2 * group_ + row) * 16;
  }

  // halves[step][row][16]: row 2h holds head h's even elements, row 2h + 1 its odd ones.
  BACKFILL_INLINE void multiply_values(int64_t i, float* halves, Reads<Kv>& reads) {
    const KeyTile<bf16> tile = values_of(i, reads);
    const int64_t step_sums = 2 * group_ * 16;
    _tile_loadd(3, weight_row(i, 0), 64);
    for (int64_t step = 0; step < Steps; step += 2) {
      _tile_zero(4);
      _tile_loadd(6, tile.keys + step * 32, tile.stride);
      _tile_dpbf16ps(4, 3, 6);
      _tile_stored(4, halves + step * step_sums, 64);
      reads.fetch();
      if (step + 1 == Steps) break;
      _tile_zero(5);
      _tile_loadd(7, tile.keys + (step + 1) * 32, tile.stride);
      _tile_dpbf16ps(5, 3, 7);
      _tile_stored(5, halves + (step + 1) * step_sums, 64);
      reads.fetch();
    }
  }

  // chunk_sums_, as `halves`.
  void add_values(Reads<Kv>& reads) {
    float* second = halves_ + head_sums();
    publish(weights_);
    if (kConverts) convert(0, num_tiles_, keys_.value_offset(), reads);
    for (int64_t i = 0; i < num_tiles_; i += 2) {
      multiply_values(i, halves_, reads);
      const bool has_second = i + 1 < num_tiles_;
      if (has_second) multiply_values(i + 1, second, reads);
      publish(halves_);
      for (int64_t at = 0; at < head_sums(); at += kLanes) {
        Floats group = load(halves_ + at);
        if (has_second) group += load(second + at);
        store(chunk_sums_ + at, i == 0 ? group : load(chunk_sums_ + at) + group);
      }
    }
  }

  // The tile's values; where slots are unused, a copy with zeros there.
  KeyTile<bf16> values_of(int64_t i, Reads<Kv>& reads) {
    if (kConverts || tiles_[i].count == kTileKeys) return operand(i, keys_.value_offset());
    convert(i, i + 1, keys_.value_offset(), reads);
    return {copied_, (int32_t)(kDim * sizeof(bf16)), kTileKeys};
  }

  void fold_chunk(int64_t g) {
    for (int64_t h = 0; h < group_; h++) {
      const FoldFactors<Floats> factors = fold(states_[g * group_ + h], chunk_states_[h]);
      for (int64_t s = 0; s < Steps; s++)
        for (int64_t row = 2 * h; row < 2 * h + 2; row++) {
          const int64_t at = (s * 2 * group_ + row) * 16;
          float* sums = sums_ + g * head_sums() + at;
          store(sums, folded(load(sums), load(chunk_sums_ + at), factors));
        }
    }
  }

  void finish() {
    for (int64_t h = 0; h < kv_heads_ * group_; h++) {
      const float inverse = 1.0f / states_[h].total;
      for (int64_t s = 0; s < Steps; s++) {
        const float* even = sums_ + h / group_ * head_sums() + place_of(h % group_, 32 * s);
        const Floats pairs = interleave(narrow(load(even) * inverse), narrow(load(even + 16) * inverse));
        std::memcpy(out_ + h * kDim + 32 * s, &pairs, sizeof pairs);
      }
    }
  }

  // Where the sums of a key/value head have element d of query head h of the group.
  BACKFILL_INLINE int64_t place_of(int64_t h, int64_t d) const {
    return (d / 32 * 2 * group_ + 2 * h + d % 2) * 16 + d % 32 / 2;
  }

  void save(float* partial) {
    for (int64_t h = 0; h < group_; h++, partial += partial_size(kDim)) {
      store_state(chunk_states_[h], partial);
      for (int64_t d = 0; d < kDim; d++) partial[kPartialSums + d] = chunk_sums_[place_of(h, d)];
    }
  }

  void load_partials(const float* partial) {
    for (int64_t h = 0; h < kv_heads_ * group_; h++, partial += partial_size(kDim)) {
      states_[h] = state_of(partial);
      float* sums = sums_ + h / group_ * head_sums();
      for (int64_t d = 0; d < kDim; d++) sums[place_of(h % group_, d)] = partial[kPartialSums + d];
    }
  }

  KeyRows<Kv> keys_;
  int64_t begin_, end_;
  int64_t kv_heads_, group_, padded_group_;
  float scale_;
  const bf16* query_;
  bf16* out_;
  int64_t num_tiles_ = 0;              // of the chunk
  KeyTile<Kv>* tiles_;                 // [kChunkTiles] of a key/value head
  uint32_t* weights_;                  // [kChunkTiles, 2 * group, 16]
  float* scores_;                      // [kChunkTiles, 16 keys, padded group]
  float* sums_;                        // [kv heads, Steps, 2 * group, 16]
  float* chunk_sums_;                  // [Steps, 2 * group, 16]
  float* halves_;                      // [2, Steps, 2 * group, 16]
  uint32_t* queries_;                  // [kv heads, Steps, 16 pairs, padded group]
  SoftmaxState* states_;               // [kv heads, group]
  SoftmaxState* chunk_states_;         // [group]
  bf16* copied_;                       // [kCopiedRows, head_dim]
  float *key_scales_, *value_scales_;  // [kChunk], where KV has scales
};

template <class Kv>
BACKFILL_INLINE void decode_tiles(const AttentionArgs& args, const Item& item, const DecodeResults& results,
                                  Reads<Kv>& reads) {
  switch (args.shape.head_dim / 32) {
    case 1:
      return TileDecodeItem<1, Kv>(args, item).run(results, reads);
    case 2:
      return TileDecodeItem<2, Kv>(args, item).run(results, reads);
    case 3:
      return TileDecodeItem<3, Kv>(args, item).run(results, reads);
    default:
      return TileDecodeItem<4, Kv>(args, item).run(results, reads);
  }
}

}  // namespace backfill::BACKFILL_VARIANT

#endif
