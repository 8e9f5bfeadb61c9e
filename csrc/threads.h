// The threads that share an operator's work: one pool in a process, beside that of torch's OpenMP.
//
// A step has hundreds of operators of some 10 to 1,000 us, so threads wait for the next one awake: waking a processor
// of a virtual machine takes some 50 us. But a thread that waits awake where another program needs the
// processor is soon made to wait itself, for a time slice, and everyone with it. OpenMP's waits are as long in
// both cases. Here they are short for a while after a thread was put off for more than a tenth of the time.
#pragma once

#include <cstdint>

namespace backfill {

// Nothing here is inline: see kernels.h.

// Of torch.set_num_threads().
int max_threads();

// Calls part(context, thread, num_threads) for each thread of `num_threads`, the first on this thread. There is one
// thread only while another thread's operator runs, or where the system gives no more.
// Throws what a part has thrown, the first of them, when all have ended.
using ThreadPart = void (*)(void* context, int64_t thread, int64_t num_threads);
void run_threads(int64_t num_threads, ThreadPart part, void* context);

}  // namespace backfill
