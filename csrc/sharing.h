// Which decodes of a batch begin with the same blocks, so that attention reads these once for all of them.
//
// Sequences are sorted by their block tables, where those with a shared beginning are neighbours. Shared keys
// form a tree: a run of a level is what all its sequences have in the same blocks behind their run of the level
// above. Runs are of whole chunks, whose results do not depend on what is read together (softmax.h).
#pragma once

#include <vector>

#include "kernels.h"

namespace backfill {

// Nothing here is inline: see kernels.h.
class SharedBlocks {
 public:
  // Of the decodes in `args`; at least `min_sharers` have the keys of a run.
  SharedBlocks(const AttentionArgs& args, int64_t min_sharers);

  // Nothing where nothing is shared. Valid while this lives.
  Sharing view() const;

 private:
  std::vector<int32_t> sharers_, lens_;
  std::vector<SharedRun> runs_;
};

// Fewest sequences for which a run pays. A key/value head's chunks of a run are computed in order, so that where
// threads outnumber these heads the others wait.
int64_t min_sharers(int64_t num_heads, int64_t num_kv_heads, int64_t num_threads);

}  // namespace backfill
