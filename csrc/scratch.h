// Working memory that a thread keeps between calls, so that the hot path never allocates.
#pragma once

#include <cstddef>

namespace backfill {

enum ScratchUse { kPlan, kWork, kTiles, kNormed, kProjected, kAttended, kHidden, kNumScratchUses };

// At least `bytes`, 64-byte aligned, contents arbitrary. Valid until this thread asks again for the same use.
// Throws std::bad_alloc; the thread's other scratch memory is then unchanged.
void* scratch(ScratchUse use, std::size_t bytes);

// Makes scratch() of more than `bytes` throw, in all threads from now on. For tests of failed allocations.
void limit_scratch(std::size_t bytes);

}  // namespace backfill
