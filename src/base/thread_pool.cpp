#include "base/thread_pool.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <dirent.h>
#include <sched.h>

#include <cstdlib>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#define OCTILE_POSIX 1
#endif

#include "base/float_environment.h"
#include "base/message.h"

namespace octile::cpu {

namespace {

static_assert(kMaxThreads < 1 << 15, "the bits of Pool::state_");

// Some 50 to 200 microseconds: the launches of one layer, and the layers of a network, follow each other faster than
// sleeping threads wake.
constexpr int kSpins = 4000;

std::atomic<TaskRunner> the_runner = nullptr;

// True while this thread runs parts: a nested call must not wait for the pool that it occupies.
thread_local bool inside_parallel_for = false;

#if defined(__linux__)
// The cores of the process. The calling thread may have fewer: with OMP_PROC_BIND (vLLM sets it) OpenMP binds each of
// its threads to a core, the main thread too, and new threads inherit that.
cpu_set_t cores_of_the_process() {
  cpu_set_t all;
  CPU_ZERO(&all);
  sched_getaffinity(0, sizeof(all), &all);
  if (DIR* threads = opendir("/proc/self/task")) {
    while (const dirent* thread = readdir(threads)) {
      cpu_set_t own;
      const int id = std::atoi(thread->d_name);
      if (id > 0 && sched_getaffinity(id, sizeof(own), &own) == 0) CPU_OR(&all, &all, &own);
    }
    closedir(threads);
  }
  return all;
}

// While it lives, the calling thread may use all of them; the threads that it starts may do so forever.
class OnAllCores {
 public:
  OnAllCores() {
    const cpu_set_t all = cores_of_the_process();
    widened_ = sched_getaffinity(0, sizeof(before_), &before_) == 0 && !CPU_EQUAL(&before_, &all) &&
               sched_setaffinity(0, sizeof(all), &all) == 0;
  }
  ~OnAllCores() {
    if (widened_) sched_setaffinity(0, sizeof(before_), &before_);
  }
  OnAllCores(const OnAllCores&) = delete;
  OnAllCores& operator=(const OnAllCores&) = delete;

 private:
  cpu_set_t before_;
  bool widened_;
};
#endif

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  int threads = 1;
  std::int64_t parts = 0;
  PartFunction function = nullptr;
  const void* context = nullptr;
};

// The parts that one thread starts with: the same ones in every run, so that its caches hold their part of a weight.
// When they are done it takes parts of other threads, so that no job waits for a thread that was interrupted.
struct alignas(64) Share {
  std::atomic<std::int64_t> next = 0;
  std::int64_t end = 0;
};

// One job at a time. `state_` is the whole protocol:
//   bits 0..15   workers inside the job: they may read job_ and take parts
//   bit  16      open: a worker may still enter
//   bits 17..31  how many workers may enter; worker i enters if i is below it
//   bits 32..63  the job's number
// The owner closes the job when no part is left, and returns when the last worker inside has left. A worker that wakes
// up later finds the job closed, so the owner never waits for a worker without a part.
class Pool {
 public:
  Pool() = default;

  bool try_acquire() { return !busy_.exchange(true, std::memory_order_acquire); }
  void release() { busy_.store(false, std::memory_order_release); }

  // Only between try_acquire and release.
  void run(int threads, const Job& job) {
    const TaskRunner runner = the_runner.load(std::memory_order_acquire);
    if (!runner) grow(threads - 1);
    job_ = job;
    for (int i = 0; i < threads; ++i) {
      Share& share = shares_[static_cast<std::size_t>(i)];
      share.next.store(job.parts * i / threads, std::memory_order_relaxed);
      share.end = job.parts * (i + 1) / threads;
    }
    if (runner) return run_on(runner, threads);
    const std::uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    const auto limit = static_cast<std::uint64_t>(std::min(threads - 1, workers_));
    state_.store(number << 32 | limit << 17 | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      const std::lock_guard lock(mutex_);
      wake_.notify_all();
    }
    work(0);
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; (state_.load(std::memory_order_acquire) & kInside) != 0; ++spins) {
      spins < kSpins ? pause_briefly() : std::this_thread::yield();
    }
  }

  Pool* abandoned = nullptr;  // the parent's pool after a fork: its threads are gone, its memory stays reachable

 private:
  static constexpr std::uint64_t kInside = 0xffff;
  static constexpr std::uint64_t kOpen = 0x10000;

  void run_on(TaskRunner runner, int tasks) {
    tasks_begun_.store(0, std::memory_order_relaxed);
    tasks_done_.store(0, std::memory_order_relaxed);
    for (int i = 0; i < tasks; ++i) task_begun_[static_cast<std::size_t>(i)].store(false, std::memory_order_relaxed);
    runner(tasks, run_task, this);
    const int done = tasks_done_.load(std::memory_order_acquire);
    if (done >= tasks) return;
    // The caller is about to free what the tasks write: those that come later find no part.
    for (Share& share : shares_) share.next.store(share.end, std::memory_order_seq_cst);
    while (tasks_done_.load(std::memory_order_acquire) < tasks_begun_.load(std::memory_order_acquire)) {
      std::this_thread::yield();
    }
    fail(Status::invalid_argument, "octile_use_task_runner: the runner returned when ", done, " of ", tasks,
         " tasks had, expected all");
  }

  static void run_task(void* pool, std::int32_t index) {
    const FloatEnvironment environment;
    auto& own = *static_cast<Pool*>(pool);
    if (index < 0 || index >= own.job_.threads) return;  // no thread's number: there is no scratch for it
    // Nor for a second one at a time.
    if (own.task_begun_[static_cast<std::size_t>(index)].exchange(true, std::memory_order_acq_rel)) return;
    own.tasks_begun_.fetch_add(1, std::memory_order_acq_rel);
    own.work(index);
    own.tasks_done_.fetch_add(1, std::memory_order_acq_rel);
  }

  void work(int own) {
    const Job job = job_;
    inside_parallel_for = true;
    for (int i = 0; i < job.threads; ++i) {
      Share& share = shares_[static_cast<std::size_t>((own + i) % job.threads)];
      for (std::int64_t part; (part = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) {
        job.function(job.context, part, own);
      }
    }
    inside_parallel_for = false;
  }

  bool enter(std::uint64_t state, int index) {
    while ((state & kOpen) != 0 && static_cast<std::uint64_t>(index) < (state >> 17 & 0x7fff)) {
      // The compare fails when the job ended meanwhile, even if another one is open: its number differs.
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
        return true;
      }
    }
    return false;
  }

  void serve(int index, std::uint64_t seen) {
    const FloatEnvironment environment;
    for (;;) {
      std::uint64_t state = wait_for_news(seen);
      seen = state >> 32;
      if (enter(state, index)) {
        work(index + 1);
        state_.fetch_sub(1, std::memory_order_acq_rel);
      }
    }
  }

  // Returns the state once its job number is not `seen`.
  std::uint64_t wait_for_news(std::uint64_t seen) {
    const int spins = workers_in_excess_.load(std::memory_order_relaxed) ? 0 : kSpins;
    for (int i = 0; i < spins; ++i) {
      const std::uint64_t state = state_.load(std::memory_order_acquire);
      if (state >> 32 != seen) return state;
      pause_briefly();
    }
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    std::uint64_t state = state_.load(std::memory_order_seq_cst);
    while (state >> 32 == seen) {
      wake_.wait(lock);
      state = state_.load(std::memory_order_seq_cst);
    }
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return state;
  }

  // The workers live as long as the process: they are detached, and the pool is never destroyed, so that a program may
  // still call us from its own static destructors.
  void grow(int wanted) {
    wanted = std::min(wanted, kMaxThreads);
    if (wanted <= workers_) return;
    workers_in_excess_.store(wanted + 1 > hardware_threads(), std::memory_order_relaxed);
#if OCTILE_POSIX
    // Signals belong to the program's own threads.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
#if defined(__linux__)
    const OnAllCores cores;
#endif
    const std::uint64_t seen = state_.load(std::memory_order_relaxed) >> 32;
    try {
      for (; workers_ < wanted; ++workers_) {
        std::thread([this, index = workers_, seen] { serve(index, seen); }).detach();
      }
    } catch (const std::exception&) {
      // The system gives no more threads, or no memory for one. Those we have, the caller's at least, do the work.
    }
#if OCTILE_POSIX
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
  }

  std::atomic<bool> busy_ = false;
  std::atomic<bool> workers_in_excess_ = false;
  std::array<std::atomic<bool>, kMaxThreads> task_begun_ = {};  // by a task runner
  std::atomic<int> tasks_begun_ = 0;
  std::atomic<int> tasks_done_ = 0;
  int workers_ = 0;
  Job job_;
  std::array<Share, kMaxThreads> shares_;
  alignas(64) std::atomic<std::uint64_t> state_ = 0;
  alignas(64) std::atomic<int> sleepers_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
};

std::atomic<Pool*> the_pool = nullptr;

void renew_after_fork() {
  Pool* old = the_pool.load(std::memory_order_relaxed);
  if (!old) return;
  Pool* fresh = new Pool;
  fresh->abandoned = old;
  the_pool.store(fresh, std::memory_order_relaxed);
  inside_parallel_for = false;
  the_runner.store(nullptr, std::memory_order_relaxed);  // the threads behind it are gone too
}

Pool& pool() {
  Pool* current = the_pool.load(std::memory_order_acquire);
  if (current) return *current;
  Pool* fresh = new Pool;
  if (!the_pool.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) {
    delete fresh;
    return *current;
  }
#if OCTILE_POSIX
  pthread_atfork(nullptr, nullptr, renew_after_fork);
#endif
  return *fresh;
}

int count_hardware_threads() {
#if defined(__linux__)
  const cpu_set_t cores = cores_of_the_process();
  if (CPU_COUNT(&cores) > 0) return CPU_COUNT(&cores);
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

int hardware_threads() {
  static const int count = count_hardware_threads();
  return count;
}

void use_task_runner(TaskRunner runner) {
  pool();  // which forgets it after a fork
  the_runner.store(runner, std::memory_order_release);
}

void parallel_for(int threads, std::int64_t parts, PartFunction function, const void* context) {
  if (threads <= 0) threads = hardware_threads();
  threads = static_cast<int>(std::min<std::int64_t>({threads, parts, kMaxThreads}));
  if (threads > 1 && !inside_parallel_for) {
    Pool& workers = pool();
    if (workers.try_acquire()) {
      struct Release {  // also where a task runner throws
        Pool& workers;
        ~Release() { workers.release(); }
      } release{workers};
      return workers.run(threads, {threads, parts, function, context});
    }
  }
  for (std::int64_t part = 0; part < parts; ++part) function(context, part, 0);
}

}  // namespace octile::cpu
