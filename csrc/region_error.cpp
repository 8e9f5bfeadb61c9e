#include "region_error.h"

#include <mutex>

namespace backfill {

namespace {

std::mutex keeping;  // one for all regions: taken only after an exception

}  // namespace

RegionError::RegionError() noexcept = default;

RegionError::~RegionError() = default;

void RegionError::keep() noexcept {
  const std::lock_guard<std::mutex> lock(keeping);
  if (error_ == nullptr) error_ = std::current_exception();
}

void RegionError::rethrow() const {
  if (error_ != nullptr) std::rethrow_exception(error_);
}

}  // namespace backfill
