#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/float_environment.h"
#include "octile/error.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__)
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace octile::cpu {
namespace {

// Each part adds 1 to its own counter: every part must run once, and the caller must see its writes.
std::vector<int> counts_of(int threads, std::int64_t parts) {
  std::vector<int> counts(static_cast<std::size_t>(parts));
  parallel_for(threads, parts, [&](std::int64_t part) { ++counts[static_cast<std::size_t>(part)]; });
  return counts;
}

TEST(ThreadPool, RunsEveryPartOnce) {
  for (int threads : {0, 1, 2, 3, 7, 16}) {
    for (std::int64_t parts : {0, 1, 2, 3, 7, 100, 10000}) {
      EXPECT_EQ(counts_of(threads, parts), std::vector<int>(static_cast<std::size_t>(parts), 1))
          << threads << " threads, " << parts << " parts";
    }
  }
}

TEST(ThreadPool, HasAtLeastOneThread) { EXPECT_GE(hardware_threads(), 1); }

TEST(ThreadPool, UsesSeveralThreads) {
  // Every part waits until a second thread has come; without one the test would hang, not pass.
  std::atomic<int> inside = 0;
  parallel_for(2, 2, [&](std::int64_t) {
    inside.fetch_add(1);
    while (inside.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(inside.load(), 2);
}

TEST(ThreadPool, NeverUsesMoreThreadsThanAsked) {
  counts_of(8, 1000);  // the pool has eight now
  std::atomic<int> inside = 0;
  std::atomic<int> most = 0;
  parallel_for(3, 3000, [&](std::int64_t) {
    const int now = inside.fetch_add(1) + 1;
    int seen = most.load();
    while (seen < now && !most.compare_exchange_weak(seen, now)) {
    }
    inside.fetch_sub(1);
  });
  EXPECT_LE(most.load(), 3);
  EXPECT_GE(most.load(), 1);
}

TEST(ThreadPool, ManyShortJobs) {
  std::atomic<std::int64_t> sum = 0;
  for (int job = 0; job < 5000; ++job) {
    parallel_for(1 + job % 5, 4, [&](std::int64_t part) { sum.fetch_add(part, std::memory_order_relaxed); });
  }
  EXPECT_EQ(sum.load(), 5000 * 6);
}

TEST(ThreadPool, NestedCallsRunInTheirThread) {
  std::vector<int> counts(64);
  parallel_for(4, 8, [&](std::int64_t outer) {
    const std::thread::id caller = std::this_thread::get_id();
    parallel_for(4, 8, [&](std::int64_t inner) {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      ++counts[static_cast<std::size_t>(outer * 8 + inner)];
    });
  });
  EXPECT_EQ(counts, std::vector<int>(64, 1));
}

TEST(ThreadPool, ConcurrentCallers) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int job = 0; job < 200; ++job) {
        for (int count : counts_of(3, 50)) wrong += count != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(ThreadPool, NamesTheThreadOfAPart) {
  for (int threads : {1, 2, 5}) {
    std::atomic<int> inside[5] = {};
    std::atomic<int> wrong = 0;
    parallel_for(threads, 2000, [&](std::int64_t, int thread) {
      if (thread < 0 || thread >= threads || inside[thread].fetch_add(1) != 0) ++wrong;
      inside[thread].fetch_sub(1);
    });
    EXPECT_EQ(wrong.load(), 0) << threads << " threads";
  }
}

// Pools of one program: one with a thread for each task, and one with only the caller's thread.
std::atomic<int> tasks_run = 0;
void on_new_threads(std::int32_t tasks, Task task, void* context) {
  std::vector<std::thread> threads;
  for (std::int32_t i = 1; i < tasks; ++i) threads.emplace_back([=] { task(context, i); });
  task(context, 0);
  for (std::thread& thread : threads) thread.join();
  tasks_run += tasks;
}
void on_the_caller(std::int32_t tasks, Task task, void* context) {
  for (std::int32_t i = tasks; i-- > 0;) task(context, i);
  tasks_run += tasks;
}

TEST(ThreadPool, WorksOnAnotherPool) {
  for (TaskRunner runner : {on_new_threads, on_the_caller}) {
    use_task_runner(runner);
    tasks_run = 0;
    EXPECT_EQ(counts_of(3, 1000), std::vector<int>(1000, 1));
    EXPECT_EQ(tasks_run.load(), 3);
    EXPECT_EQ(counts_of(7, 2), std::vector<int>(2, 1));
    EXPECT_EQ(tasks_run.load(), 5);
    use_task_runner(nullptr);
    EXPECT_EQ(counts_of(3, 1000), std::vector<int>(1000, 1));
    EXPECT_EQ(tasks_run.load(), 5);
  }
}

TEST(ThreadPool, WorksAgainAfterAnotherPoolHasThrown) {
  use_task_runner([](std::int32_t, Task, void*) { throw std::runtime_error("no threads"); });
  EXPECT_THROW(counts_of(3, 1000), std::runtime_error);
  use_task_runner(on_the_caller);
  tasks_run = 0;
  EXPECT_EQ(counts_of(3, 1000), std::vector<int>(1000, 1));
  EXPECT_EQ(tasks_run.load(), 3);
  use_task_runner(nullptr);
}

TEST(ThreadPool, RefusesAnotherPoolThatLeavesTasksOut) {
  const auto refused = [](TaskRunner runner, const std::string& text) {
    use_task_runner(runner);
    try {
      counts_of(3, 1000);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::invalid_argument);
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused([](std::int32_t, Task task, void* context) { task(context, 1); }, "when 1 of 3 tasks");
  const auto counts_from_1 = [](std::int32_t tasks, Task task, void* context) {
    for (std::int32_t i = 1; i <= tasks; ++i) task(context, i);
  };
  refused(counts_from_1, "when 2 of 3 tasks");
  const auto one_twice = [](std::int32_t tasks, Task task, void* context) {
    for (std::int32_t i = 0; i < tasks; ++i) task(context, i == 1 ? 0 : i);
  };
  refused(one_twice, "when 2 of 3 tasks");
  use_task_runner(nullptr);
  EXPECT_EQ(counts_of(3, 1000), std::vector<int>(1000, 1));
}

TEST(ThreadPool, ThreadsOfAnotherPoolHaveTheirOwnRounding) {
  use_task_runner(on_new_threads);
  std::atomic<int> upward = 0;
  std::fesetround(FE_UPWARD);
  {
    const FloatEnvironment environment;
    parallel_for(4, 100, [&](std::int64_t) { upward += std::fegetround() != FE_TONEAREST; });
  }
  std::fesetround(FE_TONEAREST);
  use_task_runner(nullptr);
  EXPECT_EQ(upward.load(), 0);
}

TEST(ThreadPool, WorkersDoNotInheritTheRoundingOfTheirMaker) {
  // More threads than any earlier test asked for, so that some are created here.
  constexpr int kThreads = 24;
  std::fesetround(FE_UPWARD);
  std::atomic<int> upward = 0;
  std::atomic<int> inside = 0;
  {
    const FloatEnvironment environment;
    parallel_for(kThreads, kThreads, [&](std::int64_t) {
      upward += std::fegetround() != FE_TONEAREST;
      inside.fetch_add(1);
      while (inside.load() < kThreads) std::this_thread::yield();
    });
  }
  EXPECT_EQ(std::fegetround(), FE_UPWARD);
  std::fesetround(FE_TONEAREST);
  EXPECT_EQ(upward.load(), 0);
}

TEST(FloatEnvironment, LeavesTheStickyFlags) {
  volatile float zero = 0;
  volatile float one = 1;
  std::feclearexcept(FE_ALL_EXCEPT);
  volatile float result = zero / zero;
  {
    const FloatEnvironment environment;
    result = one / zero;
    result = one / (one + one + one);
  }
  EXPECT_EQ(std::fetestexcept(FE_ALL_EXCEPT), FE_INVALID) << result;
  std::feclearexcept(FE_ALL_EXCEPT);
}

#if defined(__unix__) && !defined(__SANITIZE_THREAD__)
constexpr int kNoLimit = 77;

// Runs in a child that may not create threads.
int work_without_threads() {
  const rlimit one{1, 1};
  if (setrlimit(RLIMIT_NPROC, &one) != 0 || (geteuid() == 0 && setuid(65534) != 0)) return kNoLimit;
  try {
    std::thread([] {}).join();
    return kNoLimit;
  } catch (const std::system_error&) {
  }
  return counts_of(4, 1000) == std::vector<int>(1000, 1) && counts_of(64, 3) == std::vector<int>(3, 1) ? 0 : 1;
}

TEST(ThreadPool, WorksWhereTheSystemGivesNoThreads) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    _exit(work_without_threads());
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNoLimit) GTEST_SKIP() << "this system limits no threads";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

#if defined(__linux__)
// In a child, which has a new pool: the caller is bound to one core and another thread to a second one, as by OpenMP.
int cores_of_a_worker(int first, int second) {
  const auto bind = [](int core) {
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    return sched_setaffinity(0, sizeof(cores), &cores) == 0;
  };
  std::atomic<bool> bound = false;
  std::atomic<bool> over = false;
  std::thread other([&] {
    bound = bind(second);
    while (!over) std::this_thread::yield();
  });
  while (!bound) std::this_thread::yield();
  const auto caller = std::this_thread::get_id();
  std::atomic<int> of_a_worker = 0;
  if (!bind(first)) return -1;
  parallel_for(2, 200, [&](std::int64_t) {
    cpu_set_t cores;
    sched_getaffinity(0, sizeof(cores), &cores);
    if (std::this_thread::get_id() != caller) of_a_worker = CPU_COUNT(&cores);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  over = true;
  other.join();
  cpu_set_t own;
  sched_getaffinity(0, sizeof(own), &own);
  return CPU_COUNT(&own) == 1 && CPU_ISSET(first, &own) ? of_a_worker.load() : -1;
}

TEST(ThreadPool, WorkersAreNotBoundWithTheirCaller) {
  cpu_set_t cores;
  ASSERT_EQ(sched_getaffinity(0, sizeof(cores), &cores), 0);
  if (CPU_COUNT(&cores) < 2) GTEST_SKIP() << "one core";
  int first = 0;
  while (!CPU_ISSET(first, &cores)) ++first;
  int second = first + 1;
  while (!CPU_ISSET(second, &cores)) ++second;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    _exit(cores_of_a_worker(first, second));
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 2);
}
#endif

// TSan does not follow a fork of a multithreaded process.
TEST(ThreadPool, WorksInAForkedChild) {
  counts_of(4, 100);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a child that waits for the parent's threads would wait for ever
    _exit(counts_of(4, 1000) == std::vector<int>(1000, 1) ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(counts_of(4, 100), std::vector<int>(100, 1));
}

TEST(ThreadPool, AForkedChildForgetsAnotherPool) {
  use_task_runner(on_the_caller);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    tasks_run = 0;
    _exit(counts_of(4, 1000) == std::vector<int>(1000, 1) && tasks_run == 0 ? 0 : 1);
  }
  use_task_runner(nullptr);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}
#endif

}  // namespace
}  // namespace octile::cpu
