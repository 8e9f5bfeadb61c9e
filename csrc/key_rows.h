// Where the keys of one sequence and one key/value head are in the pool.
//
// Attention reads a range of positions as a list of row addresses, in logical order. Only this file, items.h and
// decode_tiles.h know block sizes and directions. Unused slots of a last block are never listed.
#pragma once

#include "simd.h"

namespace backfill::BACKFILL_VARIANT {

template <class Kv>
struct KeyRows {
  const Kv* base;  // K of the layer and head in block 0
  const int32_t* refs;
  PoolShape shape;

  // From a key row to that of the next head.
  BACKFILL_INLINE int64_t head_offset() const { return shape.block_size * shape.row_size; }

  // From a key row to the value row of the same token.
  BACKFILL_INLINE int64_t value_offset() const { return shape.num_kv_heads * head_offset(); }

  // Writes the addresses of the keys at positions [begin, end) to rows[0 ... end - begin).
  BACKFILL_INLINE void list(int64_t begin, int64_t end, const Kv** rows) const {
    const int64_t size = shape.block_size, row_size = shape.row_size;
    int64_t block = begin / size, offset = begin % size;
    for (int64_t position = begin; position < end; block++, offset = 0) {
      const int32_t ref = refs[block];
      const int64_t step = (ref & 1) ? -row_size : row_size;
      const Kv* row =
          base + (int64_t)(ref >> 1) * shape.block_stride + ((ref & 1) ? (size - 1) * row_size : 0);
      row += offset * step;
      const int64_t stop = smaller(end, position + size - offset);
      for (; position < stop; position++, row += step) *rows++ = row;
    }
  }
};

template <class Kv>
BACKFILL_INLINE KeyRows<Kv> key_rows(const AttentionArgs& args, int64_t seq, int64_t kv_head) {
  const PoolShape& shape = args.shape;
  const Kv* base = static_cast<const Kv*>(args.pool) + shape.layer_offset;
  return {base + kv_head * shape.block_size * shape.row_size,
          args.block_table + args.block_table_offsets[seq], shape};
}

}  // namespace backfill::BACKFILL_VARIANT
