// An exception that leaves an OpenMP region ends the process. A region therefore catches what its threads
// throw, and the thread that opened the region throws it again.
#pragma once

#include <exception>

namespace backfill {

// Nothing here is inline: see kernels.h.
class RegionError {
 public:
  RegionError() noexcept;
  ~RegionError();
  RegionError(const RegionError&) = delete;
  RegionError& operator=(const RegionError&) = delete;

  // Keeps the exception being handled, unless another thread's came first. For use in a catch block.
  void keep() noexcept;

  // Throws the exception that was kept, if any. For use after the region.
  void rethrow() const;

 private:
  std::exception_ptr error_;
};

}  // namespace backfill
