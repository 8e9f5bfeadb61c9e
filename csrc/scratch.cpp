#include "scratch.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace backfill {

namespace {

std::atomic<std::size_t> most_bytes{SIZE_MAX};

struct Buffer {
  void* data = nullptr;
  std::size_t size = 0;

  ~Buffer() { std::free(data); }

  void* grow(std::size_t bytes) {
    if (bytes > size) {
      std::free(data);
      size = 0;
      const std::size_t rounded = (bytes + 4095) / 4096 * 4096;
      data = std::aligned_alloc(64, rounded);
      if (data == nullptr) throw std::bad_alloc();
      size = rounded;
    }
    return data;
  }
};

}  // namespace

void* scratch(ScratchUse use, std::size_t bytes) {
  if (bytes > most_bytes.load(std::memory_order_relaxed)) throw std::bad_alloc();
  thread_local Buffer buffers[kNumScratchUses];
  return buffers[use].grow(bytes);
}

void limit_scratch(std::size_t bytes) { most_bytes.store(bytes, std::memory_order_relaxed); }

}  // namespace backfill
