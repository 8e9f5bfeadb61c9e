// Attention of one query row with AMX. Its tile loads read K and V from the pool's blocks, without packing.
//
// Scores: a tile of 16 keys by 32 elements, as stored, is multiplied with the queries of the group in pairs
// of elements. The result is 16 keys by heads. Values: the tile product sums pairs, A[m][2k] B[k][2n] +
// A[m][2k+1] B[k][2n+1]. B[k] is a row of values. A row of A with the weights at even indices and zeros at
// odd ones yields the even elements of the output; a row with the two exchanged yields the odd elements. Half
// of the multiplications are by zero, but no value is shuffled.
//
// The sums do not depend on the order of keys within a tile, so a reversed block is read as stored. A mask
// says which slots of a partly filled tile are valid. Weights are rounded to bf16 for the product with V;
// their sum is taken before rounding.
#pragma once

#include "decode.h"
#include "tile_product.h"

#if defined(__AMX_BF16__)

namespace backfill::BACKFILL_VARIANT {

constexpr int kTileKeys = 16;
constexpr int kPrefetchTiles = 8;  // how far ahead of the product keys and values are fetched

BACKFILL_INLINE bool decodes_in_tiles(const AttentionArgs& args) {
  const PoolShape& shape = args.shape;
  return shape.head_dim % 32 == 0 && shape.head_dim <= 128 && shape.block_size % kTileKeys == 0 &&
         args.num_heads / shape.num_kv_heads <= 8;
}

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

// Which of a tile's 16 slots hold keys of the sequence.
struct KeyTile {
  const bf16* keys;
  __mmask16 valid;
};

// One sequence, one key/value head, keys [begin, end); begin is a multiple of 16. Steps: head_dim / 32.
template <int Steps>
class TileDecodeItem {
 public:
  TileDecodeItem(const AttentionArgs& args, int64_t seq, int64_t kv_head)
      : keys_(key_rows<bf16>(args, seq, kv_head)),
        group_(args.num_heads / args.shape.num_kv_heads),
        padded_group_(group_ <= 4 ? 4 : 8),
        scale_(args.scale * kLog2e) {
    const int64_t row = args.cu_seqlens_q[seq];
    const int64_t row_size = (args.num_heads + 2 * args.shape.num_kv_heads) * kDim;
    query_ = static_cast<const bf16*>(args.qkv) + row * row_size + kv_head * group_ * kDim;
    out_ = static_cast<bf16*>(args.out) + (row * args.num_heads + kv_head * group_) * kDim;
  }

  // Writes the finished output row, or, with `partial`, the unfinished result of a part of the context.
  void run(int64_t begin, int64_t end, float* partial) {
    count_ = (end - begin + kTileKeys - 1) / kTileKeys;
    take_memory();
    for (int64_t i = 0; i < count_; i++) tiles_[i] = tile_at(begin + i * kTileKeys, end);
    TileShapes shapes;
    score();
    for (int64_t h = 0; h < group_; h++) weigh_head(h);
    add_values();
    if (partial == nullptr)
      finish();
    else
      save(partial);
  }

 private:
  static constexpr int64_t kDim = 32 * Steps;

  void take_memory() {
    const int64_t padded = count_ + kPrefetchTiles;
    const int64_t sums = 2 * group_ * Steps * 16, queries = Steps * 16 * padded_group_;
    const int64_t scores = count_ * kTileKeys * padded_group_, weights = count_ * 2 * group_ * 16;
    const int64_t floats = round_up(sums + queries, 16) + scores + weights + 16 * group_ * 2;
    char* memory = static_cast<char*>(
        scratch(kWork, floats * sizeof(float) + 16 * kDim * sizeof(bf16) + padded * sizeof(KeyTile)));
    weights_ = reinterpret_cast<uint32_t*>(memory);
    scores_ = reinterpret_cast<float*>(memory) + weights;
    sums_ = scores_ + scores;
    queries_ = reinterpret_cast<uint32_t*>(sums_ + sums);
    top_ = sums_ + round_up(sums + queries, 16);
    total_ = top_ + 16 * group_;
    last_values_ = reinterpret_cast<bf16*>(total_ + 16 * group_);
    tiles_ = reinterpret_cast<KeyTile*>(last_values_ + 16 * kDim);
  }

  // The 16 slots that hold the keys from `position` on.
  KeyTile tile_at(int64_t position, int64_t end) const {
    const int64_t size = keys_.shape.block_size, offset = position % size;
    const int32_t ref = keys_.refs[position / size];
    const int64_t slot = (ref & 1) ? size - kTileKeys - offset : offset;
    const int64_t missing = larger<int64_t>(0, position + kTileKeys - end);
    const unsigned all = 0xffff;
    return {keys_.base + (int64_t)(ref >> 1) * keys_.shape.block_stride + slot * kDim,
            (__mmask16)((ref & 1) ? all & (all << missing) : all >> missing)};
  }

  BACKFILL_INLINE void prefetch_tile(int64_t i, int64_t offset) const {
    if (i >= count_) return;
    const char* line = reinterpret_cast<const char*>(tiles_[i].keys + offset);
    for (int64_t byte = 0; byte < kTileKeys * kDim * 2; byte += 64) __builtin_prefetch(line + byte, 0, 2);
  }

  // scores_[tile][key][head] of every head of the group.
  void score() {
    constexpr int64_t stride = kDim * sizeof(bf16);
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
      const bf16* keys = tiles_[i].keys;
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

  // queries_[step][pair][head]: two neighbouring elements of each head's query in 32 bits.
  void pack_queries() {
    std::memset(queries_, 0, Steps * 16 * padded_group_ * sizeof *queries_);
    for (int64_t h = 0; h < group_; h++)
      for (int64_t pair = 0; pair < kDim / 2; pair++)
        std::memcpy(queries_ + pair * padded_group_ + h, query_ + h * kDim + 2 * pair, sizeof *queries_);
  }

  // Turns one head's scores into the rows of weights for even and for odd elements.
  void weigh_head(int64_t h) {
    const __m512i places = _mm512_add_epi32(
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32((int)padded_group_)),
        _mm512_set1_epi32((int)h));
    const Floats none = broadcast(-__builtin_inff());
    Floats top = none;
    for (int64_t i = 0; i < count_; i++) {
      const Floats scores =
          (Floats)_mm512_i32gather_ps(places, scores_ + i * kTileKeys * padded_group_, 4) * scale_;
      const Floats valid = (Floats)_mm512_mask_mov_ps((__m512)none, tiles_[i].valid, (__m512)scores);
      store(reinterpret_cast<float*>(weight_row(i, 2 * h)), valid);
      top = max(top, valid);
    }
    const float highest = max_of(top);
    Floats total{};
    for (int64_t i = 0; i < count_; i++) {
      uint32_t* even = weight_row(i, 2 * h);
      const Floats shifted = load(reinterpret_cast<float*>(even)) - highest;
      const Floats weight =
          (Floats)_mm512_maskz_mov_ps(tiles_[i].valid, (__m512)exp2<kExpDegree<bf16>>(shifted));
      total += weight;
      const Words bits = __builtin_convertvector(narrow(weight), Words);
      std::memcpy(even, &bits, sizeof bits);
      const Words odd = bits << 16;
      std::memcpy(even + 16, &odd, sizeof odd);
    }
    top_[h] = highest;
    total_[h] = sum(total);
  }

  BACKFILL_INLINE uint32_t* weight_row(int64_t tile, int64_t row) const {
    return weights_ + (tile * 2 * group_ + row) * 16;
  }

  // sums_[step][row][16]: row 2h holds head h's even elements, row 2h + 1 its odd ones.
  void add_values() {
    constexpr int64_t stride = kDim * sizeof(bf16);
    const int rows = (int)(2 * group_);
    TileShapes::load(rows, 64, rows, 64);
    publish(weights_);
    for (int64_t i = 0; i < count_; i++) {
      const bf16* values = values_of(i);
      prefetch_tile(i + kPrefetchTiles, keys_.value_offset());
      _tile_loadd(4, weight_row(i, 0), 64);
      _tile_loadd(6, values, stride);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (Steps > 1) {
        _tile_loadd(7, values + 32, stride);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (Steps > 2) {
        _tile_loadd(6, values + 64, stride);
        _tile_dpbf16ps(2, 4, 6);
      }
      if constexpr (Steps > 3) {
        _tile_loadd(7, values + 96, stride);
        _tile_dpbf16ps(3, 4, 7);
      }
    }
    _tile_stored(0, sums_, 64);
    if constexpr (Steps > 1) _tile_stored(1, sums_ + rows * 16, 64);
    if constexpr (Steps > 2) _tile_stored(2, sums_ + rows * 32, 64);
    if constexpr (Steps > 3) _tile_stored(3, sums_ + rows * 48, 64);
    publish(sums_);
  }

  // The tile's values; where slots are unused, a copy with zeros there, since they may hold NaN.
  const bf16* values_of(int64_t i) {
    const bf16* values = tiles_[i].keys + keys_.value_offset();
    if (tiles_[i].valid == 0xffff) return values;
    for (int r = 0; r < kTileKeys; r++) {
      bf16* row = last_values_ + r * kDim;
      if (tiles_[i].valid >> r & 1)
        std::memcpy(row, values + r * kDim, kDim * sizeof *row);
      else
        std::memset(row, 0, kDim * sizeof *row);
    }
    publish(last_values_);
    return last_values_;
  }

  BACKFILL_INLINE Floats sums_of(int64_t step, int64_t row) const {
    return load(sums_ + (step * 2 * group_ + row) * 16);
  }

  void finish() {
    for (int64_t h = 0; h < group_; h++) {
      const float inverse = 1.0f / total_[h];
      for (int64_t s = 0; s < Steps; s++) {
        const Floats pairs =
            interleave(narrow(sums_of(s, 2 * h) * inverse), narrow(sums_of(s, 2 * h + 1) * inverse));
        std::memcpy(out_ + h * kDim + 32 * s, &pairs, sizeof pairs);
      }
    }
  }

  void save(float* partial) {
    for (int64_t h = 0; h < group_; h++, partial += partial_size(kDim)) {
      partial[0] = top_[h];
      partial[1] = total_[h];
      for (int64_t s = 0; s < Steps; s++)
        for (int64_t i = 0; i < 16; i++) {
          partial[16 + 32 * s + 2 * i] = sums_[(s * 2 * group_ + 2 * h) * 16 + i];
          partial[16 + 32 * s + 2 * i + 1] = sums_[(s * 2 * group_ + 2 * h + 1) * 16 + i];
        }
    }
  }

  KeyRows<bf16> keys_;
  int64_t group_, padded_group_;
  float scale_;
  const bf16* query_;
  bf16* out_;
  int64_t count_;        // tiles of keys
  KeyTile* tiles_;       // [count]
  uint32_t* weights_;    // [count, 2 * group, 16]
  float* scores_;        // [count, 16 keys, padded group]
  float* sums_;          // [Steps, 2 * group, 16]
  uint32_t* queries_;    // [Steps, 16 pairs, padded group]
  float *top_, *total_;  // [group]
  bf16* last_values_;    // [16, head_dim]
};

BACKFILL_INLINE void decode_tiles(const AttentionArgs& args, int64_t seq, int64_t kv_head, int64_t begin,
                                  int64_t end, float* partial) {
  switch (args.shape.head_dim / 32) {
    case 1:
      return TileDecodeItem<1>(args, seq, kv_head).run(begin, end, partial);
    case 2:
      return TileDecodeItem<2>(args, seq, kv_head).run(begin, end, partial);
    case 3:
      return TileDecodeItem<3>(args, seq, kv_head).run(begin, end, partial);
    default:
      return TileDecodeItem<4>(args, seq, kv_head).run(begin, end, partial);
  }
}

}  // namespace backfill::BACKFILL_VARIANT

#endif
