#include "copies.h"

#include <cstring>

namespace backfill {

void copy_blocks(void* destination, const void* source, int64_t block_bytes,
                 const std::vector<int64_t>& destination_blocks, const std::vector<int64_t>& source_blocks) {
  for (size_t i = 0; i < destination_blocks.size(); ++i) {
    std::memcpy(static_cast<char*>(destination) + destination_blocks[i] * block_bytes,
                static_cast<const char*>(source) + source_blocks[i] * block_bytes,
                static_cast<size_t>(block_bytes));
  }
}

}  // namespace backfill
