// Runs CUDA kernels on the CPU: kernels.cu through g++ with -DCIERA_SHIM, for the sake of the sanitizers.
//
//   default          a CUDA thread is a fibre; at every barrier and shuffle the seed decides which fibre goes on
//   -DSHIM_THREADS   a CUDA thread is an OS thread, so that ThreadSanitizer sees who synchronises with whom
//   -DSHIM_LIBRARY   fibres in a shared library, for whole training runs (shim_device.py)
//
// CTAs run one after another, in an order that the seed decides, so a static variable can stand for shared memory.
//
// [Note: Shared memory] Fibres find shared memory filled with kPoison, so that a kernel that reads what it has not
// written gives wrong results. For that its variables are thread-local: all fibres have them in common, and nothing
// else in the program is thread-local. (A section of their own would be simpler, but g++ ignores that in templates.)
// In a library thread-local variables are also the program's, so there they are static and not poisoned.
//
// [Note: Switching] A launch of 45 CTAs switches some 400 000 times from one fibre to another. swapcontext asks the operating
// system to change the signal mask each time, which takes 20 times as long as the switch; so on x86-64 the registers that a
// function must keep are swapped by hand. Test: test_shim_device.py, how long a launch takes.
//
// Barriers are stricter than the hardware's: every thread of the CTA, and for shuffles every lane of the warp, has to
// come, at the same line of the source. Whatever cannot go on ends the process with a message and status kFailed.
//
// Not seen: races between CTAs, whatever needs two of them to run at once, and what nvcc and ptxas make of the source.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#ifdef SHIM_THREADS
#include <condition_variable>
#include <mutex>
#include <thread>
#else
#include <link.h>
#include <sys/mman.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

#if defined(SHIM_THREADS) || defined(SHIM_LIBRARY)
#define __shared__ static
#else
#define __shared__ static __thread
#endif

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

namespace shim {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr char kPoison = '\xA5';
constexpr int kFailed = 3;  // exit status

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

inline Dim grid, block, cta;

// Where in the source a thread waits.
struct Place {
  const char* file = "";
  int line = 0;
};

[[noreturn]] inline void fail(const char* what, Place at) {
  std::fprintf(stderr, "shim: %s, CTA (%u, %u), %s:%d\n", what, cta.x, cta.y, at.file, at.line);
  std::_Exit(kFailed);
}

[[noreturn]] inline void fail_deadlock(unsigned num_waiting, unsigned num_ended, Place at) {
  char what[128];
  std::snprintf(what, sizeof what, "deadlock: %u threads wait, %u have ended; one waits at", num_waiting, num_ended);
  fail(what, at);
}

// See [Note: Shared memory].
inline void poison_shared_memory() {
#if !defined(SHIM_THREADS) && !defined(SHIM_LIBRARY)
  const auto poison = [](dl_phdr_info* module, size_t, void*) {
    for (int k = 0; k < module->dlpi_phnum; k++)
      if (module->dlpi_phdr[k].p_type == PT_TLS && module->dlpi_tls_data)
        std::memset(module->dlpi_tls_data, kPoison, module->dlpi_phdr[k].p_memsz);
    return 1;  // the program itself comes first, and libraries are to be left alone
  };
  dl_iterate_phdr(poison, nullptr);
#endif
}

inline const char* const planted_fault = std::getenv("SHIM_PLANTED");

// Whether a fault of this name was asked for. Only copies of the kernels that tests have planted faults in call it.
inline bool planted(const char* name) { return planted_fault && !std::strcmp(planted_fault, name); }

// How many threads wait at a barrier, of how many; all must have come from one place.
struct Arrivals {
  unsigned expected = 0, waiting = 0;
  Place place;

  // One more. Gives whether it was the last; then nobody waits any more.
  bool add(Place at) {
    if (waiting && at.line != place.line) fail("divergent barrier: others of its threads wait elsewhere", at);
    place = at;
    if (++waiting < expected) return false;
    waiting = 0;
    return true;
  }
};

#ifdef SHIM_THREADS

extern "C" void AnnotateIgnoreSyncBegin(const char* file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char* file, int line);
extern "C" void AnnotateIgnoreReadsBegin(const char* file, int line);
extern "C" void AnnotateIgnoreReadsEnd(const char* file, int line);
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);

// While one lives, ThreadSanitizer takes no notice of what this thread does. Shuffles are done so: they do not order
// what lanes write to memory, so the mutex in them must not seem to.
class Unseen {
 public:
#ifdef __SANITIZE_THREAD__
  Unseen() {
    AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unseen() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
  }
#else
  Unseen() {}
#endif
};

// How many threads of the CTA are neither waiting nor ended, and how many have ended. One number, so that whoever takes
// the last one out of the running knows it; relaxed, so that it orders nothing.
class Progress {
 public:
  explicit Progress(unsigned num_threads) : num_threads_(num_threads), counts_(num_threads) {}

  void pause(Place at) { check(counts_.fetch_sub(1, std::memory_order_relaxed) - 1, at); }
  void resume(unsigned num_threads) { counts_.fetch_add(num_threads, std::memory_order_relaxed); }
  void end() { check(counts_.fetch_add(kEnded - 1, std::memory_order_relaxed) + kEnded - 1, Place{"its end", 0}); }

 private:
  static constexpr uint64_t kEnded = uint64_t(1) << 32;

  void check(uint64_t counts, Place at) const {
    const unsigned num_running = unsigned(counts), num_ended = unsigned(counts >> 32);
    if (num_running == 0 && num_ended < num_threads_) fail_deadlock(num_threads_ - num_ended, num_ended, at);
  }

  const unsigned num_threads_;
  std::atomic<uint64_t> counts_;
};

class Barrier {
 public:
  void expect(unsigned num_threads) { arrivals_.expected = num_threads; }

  void wait(Place at, Progress& progress) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (arrivals_.add(at)) {
      generation_++;
      progress.resume(arrivals_.expected - 1);
      passed_.notify_all();
      return;
    }
    progress.pause(at);
    const uint64_t mine = generation_;
    passed_.wait(lock, [&] { return generation_ != mine; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable passed_;
  Arrivals arrivals_;
  uint64_t generation_ = 0;
};

#else

class Unseen {
 public:
  Unseen() {}
};

// Memory of a fibre's stack, with a page before it that must not be touched. Stacks begin at different places of their
// pages: at one place, what all of them have on top would be in each other's way in the processor's caches.
class Stack {
 public:
  static constexpr size_t kBytes = 64 << 10, kGuardBytes = 4 << 10;

  explicit Stack(unsigned number) : unused_(number % 32 * 448) {
    void* room = mmap(nullptr, kGuardBytes + kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED || mprotect(room, kGuardBytes, PROT_NONE)) fail("no stack", Place{__FILE__, __LINE__});
    base_ = static_cast<char*>(room);
  }
  Stack(const Stack&) = delete;
  ~Stack() { munmap(base_, kGuardBytes + kBytes); }
  char* bottom() const { return base_ + kGuardBytes; }
  size_t size() const { return kBytes - unused_; }

 private:
  char* base_;
  size_t unused_;
};

// Where a fibre, or the scheduler, was left. See [Note: Switching].
class Context {
 public:
#ifdef __x86_64__
  // The next switch here calls `function`, which must not return, on an empty stack.
  void start(const Stack& stack, void (*function)()) {
    void** top = reinterpret_cast<void**>(stack.bottom() + stack.size());
    *--top = nullptr;  // the address that `function` would return to: debuggers stop there
    *--top = reinterpret_cast<void*>(function);
    for (int k = 0; k < kKept; k++) *--top = nullptr;
    top_ = top;
  }
  void switch_to(Context& other) { shim_switch(&top_, other.top_); }

 private:
  static constexpr int kKept = 6;  // rbp, rbx, r12 to r15
  static void shim_switch(void*** from, void** to) asm("shim_switch");
  void** top_ = nullptr;
#else
  void start(const Stack& stack, void (*function)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack.bottom();
    context_.uc_stack.ss_size = stack.size();
    makecontext(&context_, function, 0);
  }
  void switch_to(Context& other) { swapcontext(&context_, &other.context_); }

 private:
  ucontext_t context_;
#endif
};

#ifdef __x86_64__
asm(R"(
.text
.p2align 4
.local shim_switch
.type shim_switch, @function
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shim_switch, .-shim_switch
)");
#endif

#endif

// The values that lanes exchange. A lane that is one exchange ahead of another writes to the other half.
struct Warp {
  std::atomic<uint64_t> slots[2][kWarpSize];
#ifdef SHIM_THREADS
  Barrier barrier;
#else
  Arrivals arrivals;
#endif
};

struct Thread {
  Dim index;
  unsigned number = 0, lane = 0, half = 0;
  Warp* warp = nullptr;
#ifndef SHIM_THREADS
  enum class Stop { none, at_barrier, at_exchange, ended };
  Stop stop = Stop::none;
  Place place;
  Context context;
  const Stack* stack = nullptr;
  void* fake_stack = nullptr;  // AddressSanitizer's, while another fibre runs
#endif
};

#ifdef SHIM_THREADS

inline thread_local Thread* current = nullptr;

// OS threads that are kept from one CTA to the next: ThreadSanitizer takes a millisecond to make one.
class Crew {
 public:
  explicit Crew(unsigned num_members) {
    for (unsigned k = 0; k < num_members; k++) members_.emplace_back(&Crew::serve, this, k);
  }
  ~Crew() {
    begin(nullptr);
    for (std::thread& member : members_) member.join();
  }
  size_t size() const { return members_.size(); }

  // work(k) in member k. Waits for all of them, so what one call did comes before what the next one does.
  void run(const std::function<void(unsigned)>& work) {
    begin(&work);
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return num_busy_ == 0; });
  }

 private:
  void begin(const std::function<void(unsigned)>* work) {
    std::lock_guard<std::mutex> lock(mutex_);
    work_ = work;
    num_busy_ = members_.size();
    num_calls_++;
    changed_.notify_all();
  }

  void serve(unsigned k) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (uint64_t call = 1;; call++) {
      changed_.wait(lock, [&] { return num_calls_ == call; });
      if (!work_) return;
      lock.unlock();
      (*work_)(k);
      lock.lock();
      if (--num_busy_ == 0) changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(unsigned)>* work_ = nullptr;
  uint64_t num_calls_ = 0;
  size_t num_busy_ = 0;
  std::vector<std::thread> members_;
};

// One CTA: its threads run at the mercy of the operating system.
class Cta {
 public:
  Cta(unsigned num_threads, uint64_t) : threads_(num_threads), warps_(num_threads / kWarpSize), progress_(num_threads) {
    barrier_.expect(num_threads);
    for (Warp& warp : warps_) warp.barrier.expect(kWarpSize);
  }

  template <class Body>
  void run(const Body& body) {
    running = this;
    crew(unsigned(threads_.size())).run([&](unsigned k) {
      current = &threads_[k];
      *current = Thread{Dim{k, 0, 0}, k, k % kWarpSize, 0, &warps_[k / kWarpSize]};
      body();
      progress_.end();
    });
  }

  static void wait_for_cta(Place at) { running->barrier_.wait(at, running->progress_); }
  static void wait_for_warp(Place at) { current->warp->barrier.wait(at, running->progress_); }

 private:
  static Crew& crew(unsigned num_threads) {  // one for all kernels
    static Crew crew(num_threads);
    if (crew.size() != num_threads) fail("CTAs of two sizes", Place{__FILE__, __LINE__});
    return crew;
  }

  inline static Cta* running = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  Barrier barrier_;
  Progress progress_;
};

#else

inline Thread* current = nullptr;

// One CTA: its fibres run until they wait for others or end, and the seed picks the next one. Seed 0 takes whoever came
// last, which drives one warp as far ahead of the others as barriers allow.
class Cta {
 public:
  Cta(unsigned num_threads, uint64_t seed)
      : threads_(num_threads), warps_(num_threads / kWarpSize), seed_(seed), random_(seed) {
    arrivals_.expected = num_threads;
    for (Warp& warp : warps_) warp.arrivals.expected = kWarpSize;
  }

  template <class Body>
  void run(const Body& body) {
    running = this;
    body_ = [&body] { body(); };
    start_fibres();
    unsigned num_ended = 0;
    while (!ready_.empty()) {
      Thread& thread = take_ready();
      switch_to(thread);
      switch (thread.stop) {
        case Thread::Stop::at_barrier:
          if (arrivals_.add(thread.place)) release(0, unsigned(threads_.size()));
          break;
        case Thread::Stop::at_exchange:
          if (thread.warp->arrivals.add(thread.place)) release(thread.number - thread.lane, kWarpSize);
          break;
        default:
          num_ended++;
      }
    }
    const unsigned num_waiting = unsigned(threads_.size()) - num_ended;
    for (const Thread& thread : threads_)
      if (thread.stop != Thread::Stop::ended) fail_deadlock(num_waiting, num_ended, thread.place);
  }

  static void wait_for_cta(Place at) { running->leave(Thread::Stop::at_barrier, at); }
  static void wait_for_warp(Place at) { running->leave(Thread::Stop::at_exchange, at); }

 private:
  void start_fibres() {
    static std::vector<std::unique_ptr<Stack>> stacks;  // kept: the operating system takes its time to make them
    while (stacks.size() < threads_.size()) stacks.push_back(std::make_unique<Stack>(stacks.size()));
    for (unsigned k = 0; k < threads_.size(); k++) {
      Thread& thread = threads_[k];
      thread.index = Dim{k, 0, 0};
      thread.number = k;
      thread.lane = k % kWarpSize;
      thread.warp = &warps_[k / kWarpSize];
      thread.stack = stacks[k].get();
      thread.context.start(*stacks[k], &Cta::run_fibre);
    }
    release(0, unsigned(threads_.size()));
  }

  static void run_fibre() {
    running->arrived_in_fibre();
    running->body_();
    running->leave(Thread::Stop::ended, Place{});
  }

  void release(unsigned first, unsigned count) {
    for (unsigned k = first; k < first + count; k++) ready_.push_back(k);
  }

  Thread& take_ready() {
    if (seed_) std::swap(ready_[random_() % ready_.size()], ready_.back());
    const unsigned number = ready_.back();
    ready_.pop_back();
    return threads_[number];
  }

  // From the scheduler to a fibre and back. AddressSanitizer has to be told which stack is in use.
  void switch_to(Thread& thread) {
    current = &thread;
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, thread.stack->bottom(), thread.stack->size());
#endif
    scheduler_.switch_to(thread.context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  void leave(Thread::Stop why, Place at) {
    Thread& thread = *current;
    thread.stop = why;
    thread.place = at;
#ifdef __SANITIZE_ADDRESS__
    const bool for_good = why == Thread::Stop::ended;
    __sanitizer_start_switch_fiber(for_good ? nullptr : &thread.fake_stack, scheduler_bottom_, scheduler_bytes_);
#endif
    thread.context.switch_to(scheduler_);
    arrived_in_fibre();
  }

  void arrived_in_fibre() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(current->fake_stack, &scheduler_bottom_, &scheduler_bytes_);
#endif
  }

  inline static Cta* running = nullptr;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  Arrivals arrivals_;
  std::vector<unsigned> ready_;  // numbers of threads
  std::function<void()> body_;
  uint64_t seed_;
  std::mt19937_64 random_;
  Context scheduler_;
  const void* scheduler_bottom_ = nullptr;
  size_t scheduler_bytes_ = 0;
};

#endif

// body() in each thread of a grid of CTAs [grid_x, grid_y] of `num_threads` threads, a multiple of 32.
template <class Body>
void launch(unsigned grid_x, unsigned grid_y, unsigned num_threads, uint64_t seed, const Body& body) {
  grid = Dim{grid_x, grid_y, 1};
  block = Dim{num_threads, 1, 1};
  std::vector<Dim> ctas;
  for (unsigned y = 0; y < grid_y; y++)
    for (unsigned x = 0; x < grid_x; x++) ctas.push_back(Dim{x, y, 0});
  std::mt19937_64 random(seed);
  if (seed) std::shuffle(ctas.begin(), ctas.end(), random);
  for (const Dim& next : ctas) {
    cta = next;
    poison_shared_memory();
    Cta(num_threads, seed).run(body);
  }
}

// Shows `bits` to the other lanes of the warp, which all take part. -> what each has shown, [kWarpSize].
inline const std::atomic<uint64_t>* show(unsigned mask, uint64_t bits, Place at) {
  if (mask != kAllLanes) fail("a shuffle among part of a warp, which the shim does not know", at);
  Thread& thread = *current;
  std::atomic<uint64_t>* slots = thread.warp->slots[thread.half];
  thread.half ^= 1;
  slots[thread.lane].store(bits, std::memory_order_relaxed);
  Cta::wait_for_warp(at);
  return slots;
}

// `value` of another lane.
template <class T>
T exchange(unsigned mask, T value, unsigned from_lane, Place at) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a slot has 8 bytes");
  Unseen unseen;
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = show(mask, bits, at)[from_lane].load(std::memory_order_relaxed);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned vote(unsigned mask, bool predicate, Place at) {
  Unseen unseen;
  const std::atomic<uint64_t>* slots = show(mask, predicate, at);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < kWarpSize; lane++) votes |= unsigned(slots[lane].load(std::memory_order_relaxed)) << lane;
  return votes;
}

}  // namespace shim

#define threadIdx (shim::current->index)
#define blockIdx (shim::cta)
#define blockDim (shim::block)
#define gridDim (shim::grid)

// The last arguments say where the call stands.
inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  shim::Cta::wait_for_cta(shim::Place{file, line});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flipped, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE()) {
  const unsigned from_lane = (shim::current->lane ^ unsigned(flipped)) % shim::kWarpSize;
  return shim::exchange(mask, value, from_lane, shim::Place{file, line});
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, const char* file = __builtin_FILE(),
                 int line = __builtin_LINE()) {
  const unsigned lane = shim::current->lane;
  return shim::exchange(mask, value, lane >= distance ? lane - distance : lane, shim::Place{file, line});
}

// Lane k's predicate in bit k.
inline unsigned __ballot_sync(unsigned mask, bool predicate, const char* file = __builtin_FILE(),
                              int line = __builtin_LINE()) {
  return shim::vote(mask, predicate, shim::Place{file, line});
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <class T>
T atomicAdd(T* sum, T value) {
  return __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);
}

template <class T>
T atomicOr(T* bits, T value) {
  return __atomic_fetch_or(bits, value, __ATOMIC_RELAXED);
}
