// Copies of whole KV blocks between two pools.
#pragma once

#include <cstdint>
#include <vector>

namespace backfill {

// Copies block source_blocks[i] of source to block destination_blocks[i] of destination, in order. Both pools
// are dense; they do not overlap.
void copy_blocks(void* destination, const void* source, int64_t block_bytes,
                 const std::vector<int64_t>& destination_blocks, const std::vector<int64_t>& source_blocks);

}  // namespace backfill
