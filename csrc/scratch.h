// Working memory that a thread keeps between calls, so that the hot path never allocates.
#pragma once

#include <cstddef>

namespace backfill {

enum ScratchUse { kPlan, kWork, kNumScratchUses };

// At least `bytes`, 64-byte aligned, contents arbitrary. Valid until this thread asks again for the same use.
void* scratch(ScratchUse use, std::size_t bytes);

}  // namespace backfill
