#include "region_fault.h"

#include <mutex>

namespace backfill {

namespace {

std::mutex keeping;  // one for all: it is taken only where something has failed

}  // namespace

RegionFault::RegionFault() noexcept = default;

RegionFault::~RegionFault() = default;

void RegionFault::keep() noexcept {
  const std::lock_guard<std::mutex> lock(keeping);
  if (fault_ == nullptr) fault_ = std::current_exception();
}

void RegionFault::rethrow() const {
  if (fault_ != nullptr) std::rethrow_exception(fault_);
}

}  // namespace backfill
