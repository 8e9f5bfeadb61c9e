// Working memory that a thread keeps between calls, so that the hot path never allocates.
#pragma once

#include <cstddef>

namespace backfill {

enum ScratchUse { kPlan, kWork, kNumScratchUses };

// At least `bytes`, 64-byte aligned, contents arbitrary. Valid until this thread asks again for the same use.
// Throws std::bad_alloc; the thread's other memory is not touched then.
void* scratch(ScratchUse use, std::size_t bytes);

// No more than so many bytes at once from now on, in any thread: for tests of what a lack of memory does.
void limit_scratch(std::size_t bytes);

}  // namespace backfill
