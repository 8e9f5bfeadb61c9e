#include "threads.h"

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <fcntl.h>
#include <unistd.h>
#endif

namespace backfill {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr microseconds kPatience{1'000};     // that a thread waits awake
constexpr microseconds kLittlePatience{20};  // where another program needs the processors
// Between two looks at how long a thread was put off, and how long patience stays little then. Short, since a server
// that sends a step's tokens needs a processor for a few ms of each step.
constexpr microseconds kCheck{5'000};
constexpr double kMostPutOff = 0.1;  // part of the time; more is another program's work

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

std::atomic<Clock::rep> cautious_until{0};

// How long this thread was ready to run while others ran; the time that a hypervisor takes is not in it.
class PutOff {
 public:
  ~PutOff() { forget(); }

  // Looks every now and then.
  void check(Clock::time_point now) {
    if (now - checked_at_ <= kCheck) return;
    const int64_t before = nanoseconds_,
                  most = (int64_t)(kMostPutOff * (double)Nanoseconds(now - checked_at_).count());
    nanoseconds_ = read();
    checked_at_ = now;
    if (nanoseconds_ - before > most) cautious_until = (now + kCheck).time_since_epoch().count();
  }

  // The file is another thread's after a fork.
  void forget() {
#if defined(__linux__)
    if (file_ >= 0) close(file_);
#endif
    file_ = kUnopened;
  }

 private:
  using Nanoseconds = std::chrono::nanoseconds;

  static constexpr int kUnopened = -2;

  // 0 where the system does not tell.
  int64_t read() {
#if defined(__linux__)
    if (file_ == kUnopened) file_ = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    char text[64];
    const ssize_t size = file_ < 0 ? -1 : pread(file_, text, sizeof text - 1, 0);
    if (size <= 0) return 0;
    text[size] = 0;
    long long ran = 0, waited = 0;
    return std::sscanf(text, "%lld %lld", &ran, &waited) == 2 ? waited : 0;
#else
    return 0;
#endif
  }

  int file_ = kUnopened;
  int64_t nanoseconds_ = 0;
  Clock::time_point checked_at_{};
};

thread_local PutOff put_off;

// With OMP_PROC_BIND the thread that loads OpenMP is bound to its first place, and threads that it starts would be
// there too. Each gets a place of its own, as OpenMP's threads do.
void bind_to_place(int64_t thread) {
#if defined(__linux__)
  const int num_places = omp_get_num_places();
  if (num_places == 0 || omp_get_proc_bind() == omp_proc_bind_false) return;
  const int place = (int)(thread % num_places);
  std::vector<int> ids((std::size_t)omp_get_place_num_procs(place));
  omp_get_place_proc_ids(place, ids.data());
  cpu_set_t processors;
  CPU_ZERO(&processors);
  for (const int id : ids) CPU_SET(id, &processors);
  pthread_setaffinity_np(pthread_self(), sizeof processors, &processors);
#else
  (void)thread;
#endif
}

// Where a thread waits until another one calls notify(): awake at first, then asleep. One thread at a time.
class Waiter {
 public:
  // `done` becomes true before notify() is called.
  template <class Done>
  void wait(const Done& done) {
    if (stays_awake_until(done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_ = true;
    condition_.wait(lock, done);
    asleep_ = false;
  }

  void notify() {
    if (!asleep_) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    condition_.notify_one();
  }

 private:
  // Whether `done` came while it was patient.
  template <class Done>
  bool stays_awake_until(const Done& done) {
    const Clock::time_point began = Clock::now();
    put_off.check(began);
    const auto patience = began.time_since_epoch().count() < cautious_until ? kLittlePatience : kPatience;
    Clock::time_point last = began;
    while (last - began <= patience) {
      for (int i = 0; i < 8; i++) {
        if (done()) return true;
        pause();
      }
      last = Clock::now();
    }
    return done();
  }

  std::mutex mutex_;
  std::condition_variable condition_;
  std::atomic<bool> asleep_{false};
};

class Pool {
 public:
  void run(int64_t num_threads, ThreadPart part, void* context) {
    num_threads = std::min<int64_t>(num_threads, num_workers_with(num_threads - 1) + 1);
    part_ = part;
    context_ = context;
    num_threads_ = num_threads;
    num_running_ = num_threads - 1;
    for (int64_t i = 0; i + 1 < num_threads; i++) workers_[i]->begin();
    run_part(0);
    waiter_.wait([this] { return num_running_ == 0; });
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  class Worker {
   public:
    Worker(Pool& pool, int64_t index) {
      std::thread([this, &pool, index] {
        bind_to_place(index);
        for (uint64_t number = 1;; number++) {
          waiter_.wait([&] { return number_ >= number; });
          pool.run_part(index);
          pool.end_part();
        }
      }).detach();
    }

    void begin() {
      number_++;
      waiter_.notify();
    }

   private:
    alignas(64) std::atomic<uint64_t> number_{0};  // of the operators that it was given
    Waiter waiter_;
  };

  // Starts those that are missing, if it can.
  int64_t num_workers_with(int64_t wanted) {
    workers_.reserve((std::size_t)std::max<int64_t>(wanted, 0));  // a worker's thread keeps its address
    try {
      while ((int64_t)workers_.size() < wanted)
        workers_.push_back(std::make_unique<Worker>(*this, (int64_t)workers_.size() + 1));
    } catch (const std::system_error&) {
    }
    return (int64_t)workers_.size();
  }

  void run_part(int64_t thread) {
    try {
      part_(context_, thread, num_threads_);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(keeping_);
      if (error_ == nullptr) error_ = std::current_exception();
    }
  }

  void end_part() {
    if (--num_running_ == 0) waiter_.notify();
  }

  std::vector<std::unique_ptr<Worker>> workers_;
  ThreadPart part_ = nullptr;
  void* context_ = nullptr;
  int64_t num_threads_ = 1;
  std::mutex keeping_;
  std::exception_ptr error_;
  alignas(64) std::atomic<int64_t> num_running_{0};
  Waiter waiter_;
};

std::atomic_flag is_busy = ATOMIC_FLAG_INIT;
Pool* pool = nullptr;  // never deleted: its threads end with the process

// A forked process has none of the threads.
void forget_threads() {
  pool = nullptr;
  put_off.forget();
  is_busy.clear();
}

}  // namespace

int max_threads() { return omp_get_max_threads(); }

void run_threads(int64_t num_threads, ThreadPart part, void* context) {
  if (num_threads <= 1 || is_busy.test_and_set(std::memory_order_acquire)) return part(context, 0, 1);
  struct Release {
    ~Release() { is_busy.clear(std::memory_order_release); }
  } release;
  if (pool == nullptr) {
    static const int registered = pthread_atfork(nullptr, nullptr, forget_threads);
    (void)registered;
    pool = new Pool;
  }
  pool->run(num_threads, part, context);
}

}  // namespace backfill
