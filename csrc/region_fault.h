// An exception may not leave an OpenMP region: it would end the process. A region catches what its threads throw and
// the thread that opened it throws it again.
#pragma once

#include <exception>

namespace backfill {

// Nothing here is inline: see kernels.h.
class RegionFault {
 public:
  RegionFault() noexcept;
  ~RegionFault();
  RegionFault(const RegionFault&) = delete;
  RegionFault& operator=(const RegionFault&) = delete;

  // Keep the exception that is being handled, unless another thread's was first. For use in a catch block.
  void keep() noexcept;

  // Throw what was kept, if anything was. For use after the region.
  void rethrow() const;

 private:
  std::exception_ptr fault_;
};

}  // namespace backfill
