// The Python module of what processes share in memory: a ring of messages, and counters to wait for.
//
// A word is written by one process and read by others. Whoever waits for a counter looks for a while, yields,
// then sets a flag and sleeps on a futex; whoever raises the counter wakes it if it sees the flag. Flag and
// counter are written and read in one total order, so one of the two sees the other.
#include <nanobind/nanobind.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <string>

namespace nb = nanobind;
using namespace nb::literals;

namespace backfill {

namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<int64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

constexpr int64_t kLine = 8;  // words of a cache line: processes that write different lines do not disturb
// For so long a wait looks again at once, and then yields, before it sleeps.
constexpr std::chrono::microseconds kPolling{3}, kYielding{25};

int64_t whole_lines(int64_t num_words) { return (num_words + kLine - 1) / kLine * kLine; }

// The writable memory of a Python object, which lives as long as this.
class Memory {
 public:
  explicit Memory(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE) != 0) throw nb::python_error();
  }
  ~Memory() { PyBuffer_Release(&view_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Word* words() const { return static_cast<Word*>(view_.buf); }
  char* bytes() const { return static_cast<char*>(view_.buf); }
  int64_t size() const { return view_.len; }

 private:
  Py_buffer view_;
};

#if defined(__linux__)
// The kernel compares the low half of a word.
void* low_half(Word& word) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return reinterpret_cast<char*>(&word) + 4;
#else
  return &word;
#endif
}
#endif

// Sleep while the word has this value, until it is woken, or without a reason.
void sleep_while(Word& word, int64_t value, std::chrono::nanoseconds at_most) {
#if defined(__linux__)
  const int64_t ns = at_most.count();
  const timespec timeout{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  syscall(SYS_futex, low_half(word), FUTEX_WAIT, static_cast<uint32_t>(value), &timeout, nullptr, 0);
#else
  usleep(200);
#endif
}

void wake(Word& word) {
#if defined(__linux__)
  syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

// Returns whether the word has reached the value within the timeout.
bool sleep_until(Word& word, int64_t value, Word& flag, double timeout_s) {
  const auto end = Clock::now() + std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9));
  flag.store(1);
  int64_t seen;
  while ((seen = word.load()) < value) {
    const auto left = std::chrono::nanoseconds(end - Clock::now());
    if (left.count() <= 0) break;
    sleep_while(word, seen, left);
  }
  flag.store(0, std::memory_order_relaxed);
  return seen >= value;
}

// A message is its length and its bytes. Words count bytes since the start; a byte's place is its count modulo
// the capacity:
//
//   words     [written | read by 0, 0 sleeps | read by 1, 1 sleeps | ...]     a cache line for each process
//   bytes     [ ...................................... ]
class Ring {
 public:
  Ring(nb::handle memory, int64_t num_readers)
      : memory_(memory),
        num_readers_(num_readers),
        data_(memory_.bytes() + header_bytes(num_readers)),
        capacity_(memory_.size() - header_bytes(num_readers)) {
    if (capacity_ <= 0) throw std::invalid_argument("the memory of a ring is too small");
  }

  static int64_t header_bytes(int64_t num_readers) { return 8 * kLine * (1 + num_readers); }

 protected:
  Word& written() const { return memory_.words()[0]; }
  Word& read_by(int64_t reader) const { return memory_.words()[kLine * (1 + reader)]; }
  Word& flag_of(int64_t reader) const { return memory_.words()[kLine * (1 + reader) + 1]; }

  Memory memory_;
  int64_t num_readers_;
  char* data_;
  int64_t capacity_;
};

class RingWriter : Ring {
 public:
  using Ring::header_bytes;
  using Ring::Ring;

  // Returns whether all of the message is in the ring; if not, a further call puts more of it there.
  bool write(nb::bytes message) {
    const uint64_t length = message.size();
    char header[sizeof(length)];
    std::memcpy(header, &length, sizeof(length));
    const int64_t total = sizeof(header) + length;
    while (done_ < total) {
      const bool is_header = done_ < static_cast<int64_t>(sizeof(header));
      const char* from = is_header ? header + done_ : message.c_str() + done_ - sizeof(header);
      const int64_t rest = is_header ? sizeof(header) - done_ : total - done_;
      const int64_t count = put(from, rest);
      if (count == 0) break;
      done_ += count;
    }
    publish();
    if (done_ < total) return false;
    done_ = 0;
    return true;
  }

 private:
  int64_t put(const char* from, int64_t most) {
    int64_t read = end_;
    for (int64_t reader = 0; reader < num_readers_; ++reader)
      read = std::min(read, read_by(reader).load(std::memory_order_acquire));
    const int64_t count = std::min(most, capacity_ - (end_ - read));
    const int64_t place = end_ % capacity_, before_end = std::min(count, capacity_ - place);
    std::memcpy(data_ + place, from, before_end);
    std::memcpy(data_, from + before_end, count - before_end);
    end_ += count;
    return count;
  }

  void publish() {
    written().store(end_);
    for (int64_t reader = 0; reader < num_readers_; ++reader)
      if (flag_of(reader).load() != 0) return wake(written());
  }

  int64_t end_ = 0;   // of what is in the ring
  int64_t done_ = 0;  // bytes of the message that is being written
};

class RingReader : Ring {
 public:
  RingReader(nb::handle memory, int64_t num_readers, int64_t reader)
      : Ring(memory, num_readers), reader_(reader) {}

  // Returns the next message, or None while it is not whole.
  nb::object read() {
    uint64_t length;
    if (taken_.size() < sizeof(length)) take();
    if (taken_.size() < sizeof(length)) return nb::none();
    std::memcpy(&length, taken_.data(), sizeof(length));
    const size_t end = sizeof(length) + length;
    if (taken_.size() < end) take();
    if (taken_.size() < end) return nb::none();
    nb::bytes message(taken_.data() + sizeof(length), length);
    taken_.erase(0, end);
    return message;
  }

  // Sleep until something is written, for so long at most. Returns whether something is.
  bool wait(double timeout_s) { return sleep_until(written(), read_ + 1, flag_of(reader_), timeout_s); }

 private:
  void take() {
    const int64_t count = written().load(std::memory_order_acquire) - read_;
    const int64_t place = read_ % capacity_, before_end = std::min(count, capacity_ - place);
    taken_.append(data_ + place, before_end);
    taken_.append(data_, count - before_end);
    read_ += count;
    read_by(reader_).store(read_, std::memory_order_release);
  }

  int64_t reader_;
  int64_t read_ = 0;
  std::string taken_;  // off the ring, and not returned yet
};

// A counter, a process id and some words for each rank, each written by its own rank:
//
//   [counter, process id, a flag for each rank that may wait for the counter, words of the user | ...]
class Signals {
 public:
  Signals(nb::handle memory, int64_t rank, int64_t size, int64_t num_words)
      : memory_(memory), rank_(rank), size_(size), stride_(stride(size, num_words)) {
    if (memory_.size() < num_bytes(size, num_words)) throw std::invalid_argument("too little memory");
    word_at(rank_, kPid).store(getpid());
  }

  static int64_t stride(int64_t size, int64_t num_words) { return whole_lines(kFlags + size + num_words); }
  static int64_t num_bytes(int64_t size, int64_t num_words) { return 8 * stride(size, num_words) * size; }

  int64_t count(int64_t rank) const { return word_at(rank, kCounter).load(std::memory_order_acquire); }
  int64_t pid(int64_t rank) const { return word_at(rank, kPid).load(); }
  int64_t word(int64_t rank, int64_t index) const { return user_word(rank, index).load(); }
  void set_word(int64_t index, int64_t value) { user_word(rank_, index).store(value); }

  void raise_to(int64_t value) {
    Word& counter = word_at(rank_, kCounter);
    counter.store(value);
    for (int64_t other = 0; other < size_; ++other)
      if (word_at(rank_, kFlags + other).load() != 0) return wake(counter);
  }

  bool wait_for(int64_t rank, int64_t value, double timeout_s) const {
    Word& counter = word_at(rank, kCounter);
    const auto began = Clock::now();
    for (auto passed = began - began; passed < kYielding; passed = Clock::now() - began) {
      if (counter.load(std::memory_order_acquire) >= value) return true;
      if (passed >= kPolling) sched_yield();
    }
    return sleep_until(counter, value, word_at(rank, kFlags + rank_), timeout_s);
  }

 private:
  static constexpr int64_t kCounter = 0, kPid = 1, kFlags = 2;

  Word& word_at(int64_t rank, int64_t index) const { return memory_.words()[stride_ * rank + index]; }
  Word& user_word(int64_t rank, int64_t index) const { return word_at(rank, kFlags + size_ + index); }

  Memory memory_;
  int64_t rank_, size_, stride_;
};

}  // namespace

}  // namespace backfill

NB_MODULE(_shared_memory, m) {
  using backfill::RingReader;
  using backfill::RingWriter;
  using backfill::Signals;
  m.doc() = "Messages and counters in memory that processes share. Offsets are checked by the callers.";
  nb::set_leak_warnings(false);  // what an engine holds until its process ends
  const auto nogil = nb::call_guard<nb::gil_scoped_release>();
  m.def("ring_header_bytes", &RingWriter::header_bytes, "num_readers"_a,
        "Bytes of a ring's memory that hold no messages.");
  nb::class_<RingWriter>(m, "RingWriter")
      .def(nb::init<nb::handle, int64_t>(), "memory"_a, "num_readers"_a)
      .def("write", &RingWriter::write, "message"_a,
           "False while there is no room for the rest of the message: call again with the same one.");
  nb::class_<RingReader>(m, "RingReader")
      .def(nb::init<nb::handle, int64_t, int64_t>(), "memory"_a, "num_readers"_a, "reader"_a)
      .def("read", &RingReader::read, "The next message; None while it is not there, or not all of it.")
      .def("wait", &RingReader::wait, nogil, "timeout_s"_a,
           "Sleep until something is written. Returns whether something is.");
  nb::class_<Signals>(m, "Signals")
      .def(nb::init<nb::handle, int64_t, int64_t, int64_t>(), "memory"_a, "rank"_a, "size"_a, "num_words"_a)
      .def_static("num_bytes", &Signals::num_bytes, "size"_a, "num_words"_a)
      .def("count", &Signals::count, "rank"_a)
      .def("pid", &Signals::pid, "rank"_a, "0 before the rank has come.")
      .def("word", &Signals::word, "rank"_a, "index"_a)
      .def("set_word", &Signals::set_word, "index"_a, "value"_a, "Of this rank.")
      .def("raise_to", &Signals::raise_to, "value"_a, "Set this rank's counter.")
      .def("wait_for", &Signals::wait_for, nogil, "rank"_a, "value"_a, "timeout_s"_a,
           "Returns whether the rank's counter has reached the value in this time.");
}
