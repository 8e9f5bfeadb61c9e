// Copies between KV pools: of whole blocks, and of some slots of blocks.
#pragma once

#include <cstdint>
#include <vector>

namespace backfill {

// Copies block source_blocks[i] of source to block destination_blocks[i] of destination, in order. Both pools
// are dense; they do not overlap.
void copy_blocks(void* destination, const void* source, int64_t block_bytes,
                 const std::vector<int64_t>& destination_blocks, const std::vector<int64_t>& source_blocks);

// A block is num_planes planes of block_size slots; a plane has the K or V of one head in one layer.
struct BlockShape {
  int64_t num_planes, block_size, slot_bytes;
};

// Slots [first[i], first[i] + num[i]) of block blocks[i]. They are one run of memory in each plane.
struct SlotRanges {
  std::vector<int64_t> blocks, first, num;
};

// Copies these slots of source to the same slots of destination_blocks[i] of destination, in order. No other
// byte of a pool is read or written: another thread may write it meanwhile.
void copy_slots(void* destination, const std::vector<int64_t>& destination_blocks, const void* source,
                const SlotRanges& ranges, const BlockShape& shape);

// Copies the slots of a pool to `packed`, range after range, each dense: [num_planes, num[i]].
void gather_slots(void* packed, const void* pool, const SlotRanges& ranges, const BlockShape& shape);

// The way back.
void scatter_slots(void* pool, const void* packed, const SlotRanges& ranges, const BlockShape& shape);

}  // namespace backfill
