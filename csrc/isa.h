// Which variants this machine can run.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace backfill {

struct Isa {
  std::string name;
  const KernelTable* table;
};

// From the most portable to the fastest; detected once.
const std::vector<Isa>& supported_isas();

}  // namespace backfill
