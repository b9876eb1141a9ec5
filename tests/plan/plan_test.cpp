// What every plan promises: run allocates nothing, threads may share a plan, explain() describes it.
#include <gtest/gtest.h>

#include <atomic>
#include <cfenv>
#include <cstdlib>
#include <new>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "every_plan.h"
#include "octile/octile.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__unix__)
#include <pthread.h>
#endif
#if defined(__clang__) && defined(__SANITIZE_THREAD__)
#include <sanitizer/allocator_interface.h>
#endif

namespace {
std::atomic<long> allocations{0};
}  // namespace

#if defined(__clang__) && defined(__SANITIZE_THREAD__)
// Its operator new cannot be replaced, but it reports allocations.
[[maybe_unused]] const int hooks = __sanitizer_install_malloc_and_free_hooks(
    [](const volatile void*, std::size_t) { ++allocations; }, [](const volatile void*) {});
#else
void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace octile {
namespace {

// One training step's tensors of a layer, and the plans that compute them.
struct TrainingStep {
  std::int64_t m, n, k;
  std::vector<float> x, w, dy, y, dx, dw, db, x_scale, w_scale;
  std::vector<std::int8_t> xq, wq;

  TrainingStep(std::int64_t rows, std::int64_t out, std::int64_t in) : m(rows), n(out), k(in) {
    const auto filled = [](std::int64_t size, float step) {
      std::vector<float> v(static_cast<std::size_t>(size));
      for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>((i * 7919) % 1009) * step - 1.0f;
      return v;
    };
    x = filled(m * k, 0.002f);
    w = filled(n * k, 0.001f);
    dy = filled(m * n, 0.0015f);
    y.resize(static_cast<std::size_t>(m * n));
    dx.resize(static_cast<std::size_t>(m * k));
    dw.resize(static_cast<std::size_t>(n * k));
    db.resize(static_cast<std::size_t>(n));
    x_scale.resize(static_cast<std::size_t>(m));
    w_scale.resize(static_cast<std::size_t>(n));
    xq.resize(static_cast<std::size_t>(m * k));
    wq.resize(static_cast<std::size_t>(n * k));
  }
};

struct StepPlans {
  QuantizePlan quantize_x, quantize_w;
  LinearPlan forward;
  LinearBackwardPlan backward;

  StepPlans(const TrainingStep& s, int threads)
      : quantize_x(QuantizePlan::select({.rows = s.m, .cols = s.k, .threads = threads})),
        quantize_w(QuantizePlan::select({.rows = s.n, .cols = s.k, .threads = threads})),
        forward(LinearPlan::select({.m = s.m, .n = s.n, .k = s.k, .threads = threads})),
        backward(LinearBackwardPlan::select({.m = s.m,
                                             .n = s.n,
                                             .k = s.k,
                                             .dx = Product::int8,
                                             .dw = Product::dequantized,
                                             .db = true,
                                             .threads = threads})) {}

  std::size_t workspace_size() const {
    return std::max({quantize_x.workspace_size(), quantize_w.workspace_size(), forward.workspace_size(),
                     backward.workspace_size()});
  }

  void run(TrainingStep& s, Workspace workspace) const {
    quantize_x.run({.x = matrix<const float>(s.x.data(), s.m, s.k),
                    .q = matrix(s.xq.data(), s.m, s.k),
                    .scale = vector(s.x_scale.data(), s.m)},
                   workspace);
    quantize_w.run({.x = matrix<const float>(s.w.data(), s.n, s.k),
                    .q = matrix(s.wq.data(), s.n, s.k),
                    .scale = vector(s.w_scale.data(), s.n)},
                   workspace);
    forward.run({.x = matrix<const float>(s.x.data(), s.m, s.k),
                 .weight = matrix<const std::int8_t>(s.wq.data(), s.n, s.k),
                 .weight_scale = vector<const float>(s.w_scale.data(), s.n),
                 .y = matrix(s.y.data(), s.m, s.n)},
                workspace);
    backward.run({.dy = matrix<const float>(s.dy.data(), s.m, s.n),
                  .weight = matrix<const std::int8_t>(s.wq.data(), s.n, s.k),
                  .weight_scale = vector<const float>(s.w_scale.data(), s.n),
                  .x = matrix<const std::int8_t>(s.xq.data(), s.m, s.k),
                  .x_scale = vector<const float>(s.x_scale.data(), s.m),
                  .dx = matrix(s.dx.data(), s.m, s.k),
                  .dw = matrix(s.dw.data(), s.n, s.k),
                  .db = vector(s.db.data(), s.n)},
                 workspace);
  }
};

TEST(Plan, RunAllocatesNothing) {
  TrainingStep step(65, 70, 130);
  const StepPlans plans(step, 2);
  std::vector<std::byte> memory(plans.workspace_size());
  const Workspace workspace{memory.data(), memory.size()};
  plans.run(step, workspace);  // the first run creates the threads
  const long before = allocations;
  plans.run(step, workspace);
  EXPECT_EQ(allocations, before);
  std::vector<int> seen(3);  // checks the counter itself
  EXPECT_GT(allocations, before);
}

// A program that has the library inside, as this one has, may make a plan in a static initializer of its own.
std::string kernels_of_a_plan() { return LinearPlan::select({.m = 64, .n = 512, .k = 512}).sku(); }
const std::string chosen_before_main = kernels_of_a_plan();

TEST(Plan, HasTheSameKernelsBeforeMain) { EXPECT_EQ(chosen_before_main, kernels_of_a_plan()); }

TEST(Plan, RefusesAnInstructionSetThatIsSetTooLate) {
  const char* const given = std::getenv("OCTILE_ISA");
  if (given && *given) GTEST_SKIP() << "OCTILE_ISA is " << given;
  kernels_of_a_plan();
  setenv("OCTILE_ISA", "baseline", 1);
  try {
    kernels_of_a_plan();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    EXPECT_NE(std::string(error.what()).find("OCTILE_ISA is baseline, but was not set"), std::string::npos)
        << error.what();
  }
  unsetenv("OCTILE_ISA");
  kernels_of_a_plan();
}

TEST(Plan, IsSharedByThreads) {
  const TrainingStep first(33, 40, 50);
  const StepPlans plans(first, 2);
  TrainingStep expected = first;
  std::vector<std::byte> memory(plans.workspace_size());
  plans.run(expected, {memory.data(), memory.size()});

  constexpr int kThreads = 4;
  std::vector<TrainingStep> steps(kThreads, first);
  std::vector<std::thread> threads;
  for (TrainingStep& step : steps) {
    threads.emplace_back([&step, &plans] {
      std::vector<std::byte> own(plans.workspace_size());
      for (int i = 0; i < 20; ++i) plans.run(step, {own.data(), own.size()});
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const TrainingStep& step : steps) {
    EXPECT_EQ(step.y, expected.y);
    EXPECT_EQ(step.dx, expected.dx);
    EXPECT_EQ(step.dw, expected.dw);
    EXPECT_EQ(step.db, expected.db);
  }
}

TEST(Plan, WorkspaceOfAnyAlignment) {
  TrainingStep step(5, 6, 7);
  const StepPlans plans(step, 1);
  std::vector<std::byte> memory(plans.workspace_size() + 64);
  plans.run(step, {memory.data(), memory.size()});
  const std::vector<float> y = step.y;
  for (std::size_t shift = 1; shift < 64; shift += 9) {
    step.y.assign(step.y.size(), 0.0f);
    plans.run(step, {memory.data() + shift, plans.workspace_size()});
    EXPECT_EQ(step.y, y) << "workspace shifted by " << shift;
  }
}

TEST(Plan, ExplainsItsChoice) {
  const LinearPlan plan = LinearPlan::select({.m = 8, .n = 16, .k = 32, .kernel = "reference"});
  EXPECT_EQ(plan.sku(), "quantize_reference + w8a8_gemm_reference");
  const std::string text = plan.explain();
  EXPECT_NE(text.find("8 x 32 x 16"), std::string::npos) << text;
  EXPECT_NE(text.find("quantize X: quantize_reference: expected"), std::string::npos) << text;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.operation != "w8a8_gemm" || kernel.name == "w8a8_gemm_reference") continue;
    EXPECT_NE(text.find("not " + kernel.name + ": "), std::string::npos) << text;
  }
  EXPECT_NE(text.find("workspace " + std::to_string(plan.workspace_size())), std::string::npos) << text;
}

TEST(Plan, TheCheapestRowIsTheDefault) {
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.name != "w8a8_gemm_portable") continue;
    EXPECT_EQ(LinearPlan::select({.m = 64, .n = 64, .k = 64}).sku().find("reference"), std::string::npos);
    return;
  }
  GTEST_SKIP() << "a scalar build has only reference rows";
}

TEST(Plan, ARequestForOneRowLeavesTheOtherStepsFree) {
  const LinearPlan plan = LinearPlan::select({.m = 64, .n = 64, .k = 64, .kernel = "w8a8_gemm_reference"});
  const std::string free_choice = QuantizePlan::select({.rows = 64, .cols = 64}).sku();
  EXPECT_EQ(plan.sku(), free_choice + " + w8a8_gemm_reference");
}

TEST(Plan, ARequestIsAWholeNameOrAnArch) {
  EXPECT_EQ(QuantizePlan::select({.rows = 4, .cols = 4, .kernel = "reference"}).sku(), "quantize_reference");
  const std::string free_choice = FakeQuantizePlan::select({.rows = 4, .cols = 4}).sku();
  EXPECT_EQ(FakeQuantizePlan::select({.rows = 4, .cols = 4, .kernel = "quantize_reference"}).sku(), free_choice);
}

TEST(Plan, GuaranteesTellIntegerFromFloat) {
  const PrecisionGuarantee w8a8 = LinearPlan::select({.m = 1, .n = 1, .k = 1}).precision_guarantee();
  EXPECT_TRUE(w8a8.deterministic && w8a8.bit_stable);
  EXPECT_EQ(w8a8.accumulator, DType::s32);
  EXPECT_EQ(w8a8.error_bound, "exact");
  LinearDescription w4{.m = 1, .n = 1, .k = 32, .activation = Activation::none, .weight = WeightFormat::s4_group};
  w4.weight.group = 32;
  const PrecisionGuarantee w4a16 = LinearPlan::select(w4).precision_guarantee();
  EXPECT_TRUE(w4a16.deterministic);
  EXPECT_FALSE(w4a16.bit_stable);
  EXPECT_EQ(w4a16.accumulator, DType::f32);
  EXPECT_NE(w4a16.error_bound.find("2^-24"), std::string::npos);
}

TEST(Plan, GuaranteesArePerOutputOfTheBackward) {
  const LinearBackwardDescription d{
      .m = 4, .n = 8, .k = 8, .dx = Product::int8, .dw = Product::dequantized, .db = true};
  const LinearBackwardPlan plan = LinearBackwardPlan::select(d);
  EXPECT_FALSE(plan.precision_guarantee().bit_stable);
  EXPECT_TRUE(plan.precision_guarantee(Gradient::dx).bit_stable);
  EXPECT_EQ(plan.precision_guarantee(Gradient::dx).error_bound, "exact");
  for (const Gradient gradient : {Gradient::dw, Gradient::db}) {
    EXPECT_TRUE(plan.precision_guarantee(gradient).deterministic);
    EXPECT_FALSE(plan.precision_guarantee(gradient).bit_stable);
    EXPECT_EQ(plan.precision_guarantee(gradient).accumulator, DType::f32);
    EXPECT_EQ(plan.precision_guarantee(gradient).error_bound.find("(M + 3)"), 0u);
  }
}

// The lines of the text that begin with this.
std::vector<std::string> lines_with(const std::string& text, const std::string& begin) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(begin, 0) == 0) lines.push_back(line);
  }
  return lines;
}

std::string product_of(const LinearPlan& plan) {
  const std::string sku = plan.sku();
  return sku.substr(sku.rfind(' ') + 1);
}

TEST(Plan, FewRowsAreRunByTheKernelOfAPlanForFewRows) {
  struct Shape {
    std::int64_t n, k;
  };
  for (const auto [n, k] : {Shape{256, 256}, Shape{16, 1024}, Shape{64, 64}, Shape{1000, 24}}) {
    for (const bool packed : {false, true}) {
      LinearDescription d{.m = 5000, .n = n, .k = k, .packed_weight = packed, .threads = 1};
      const LinearPlan plan = LinearPlan::select(d);
      // "  up to 39 rows: w8a8_gemm_portable: expected 1 ms"
      std::int64_t after = 0;
      for (const std::string& line : lines_with(plan.explain(), "  up to ")) {
        const std::int64_t rows = std::stoll(line.substr(8));
        for (d.m = after + 1; d.m <= rows; ++d.m) {
          EXPECT_NE(line.find(": " + product_of(LinearPlan::select(d)) + ": "), std::string::npos) << line << d.m;
        }
        after = rows;
      }
      for (d.m = after + 1; d.m <= 5000; d.m += 1 + d.m / 16) {
        EXPECT_EQ(product_of(LinearPlan::select(d)), product_of(plan)) << d.m;
      }
    }
  }
}

TEST(Plan, FewRowsHaveTheBitsOfAPlanForFewRows) {
  TrainingStep step(130, 70, 90);
  const StepPlans all(step, 1);
  std::vector<std::byte> memory(all.workspace_size());
  all.run(step, {memory.data(), memory.size()});
  for (const std::int64_t m : {1, 2, 17, 40, 64, 129}) {
    const auto run = [&](const LinearPlan& forward, const LinearBackwardPlan& backward) {
      std::vector<std::byte> own(std::max(forward.workspace_size(), backward.workspace_size()));
      std::vector<float> out(static_cast<std::size_t>(m * (step.n + step.k)));
      const auto weight = matrix<const std::int8_t>(step.wq.data(), step.n, step.k);
      const auto scale = vector<const float>(step.w_scale.data(), step.n);
      forward.run({.x = matrix<const float>(step.x.data(), m, step.k),
                   .weight = weight,
                   .weight_scale = scale,
                   .y = matrix(out.data(), m, step.n)},
                  {own.data(), own.size()});
      backward.run({.dy = matrix<const float>(step.dy.data(), m, step.n),
                    .weight = weight,
                    .weight_scale = scale,
                    .dx = matrix(out.data() + m * step.n, m, step.k)},
                   {own.data(), own.size()});
      return out;
    };
    const auto backward = [&](std::int64_t rows) {
      return LinearBackwardPlan::select(
          {.m = rows, .n = step.n, .k = step.k, .dx = Product::int8, .dw = Product::none, .threads = 1});
    };
    const LinearPlan few = LinearPlan::select({.m = m, .n = step.n, .k = step.k, .threads = 1});
    EXPECT_EQ(run(all.forward, backward(130)), run(few, backward(m))) << m << " rows";
  }
}

TEST(Plan, ExplainsWhatItsTimesAreOf) {
  const LinearDescription d{.m = 64, .n = 512, .k = 512, .threads = 3};
  EXPECT_NE(LinearPlan::select(d).explain().find("estimates for 3 threads with nothing in the caches"),
            std::string::npos);
  const LinearDescription one{.m = 1, .n = 512, .k = 512, .threads = 1};
  EXPECT_NE(LinearPlan::select(one).explain().find("estimates for 1 thread with"), std::string::npos);
  const std::string text = LinearPlan::select(d).explain();
  LinearDescription packed = d;
  packed.packed_weight = true;
  EXPECT_TRUE(lines_with(LinearPlan::select(packed).explain(), "  packed_weight").empty());
  if (product_of(LinearPlan::select(d)).find("avx") == std::string::npos) return;  // those pack an unpacked weight
  ASSERT_EQ(lines_with(text, "  packed_weight = true would be faster: ").size(), 1u) << text;
  EXPECT_NE(text.find("faster: " + product_of(LinearPlan::select(packed)) + ": expected "), std::string::npos) << text;
}

TEST(Plan, RunsFewerRowsThanItWasSelectedFor) {
  TrainingStep step(9, 6, 7);
  const StepPlans plans(step, 1);
  std::vector<std::byte> memory(plans.workspace_size());
  plans.run(step, {memory.data(), memory.size()});
  const std::vector<float> y = step.y;
  step.y.assign(step.y.size(), 77.0f);
  plans.forward.run({.x = matrix<const float>(step.x.data(), 4, step.k),
                     .weight = matrix<const std::int8_t>(step.wq.data(), step.n, step.k),
                     .weight_scale = vector<const float>(step.w_scale.data(), step.n),
                     .y = matrix(step.y.data(), 4, step.n)},
                    {memory.data(), memory.size()});
  for (std::size_t i = 0; i < step.y.size(); ++i) EXPECT_EQ(step.y[i], i < 24 ? y[i] : 77.0f);
}

using test::Call;
using test::Choice;
using test::EveryPlan;
using test::Piece;

constexpr test::Size kSmall{6, 40, 64};
constexpr test::Size kForFourThreads{64, 512, 512};

// Separate memory for one run.
class OwnWorkspace {
 public:
  explicit OwnWorkspace(const Call& call) : memory_(call.workspace_size) {}
  operator Workspace() { return {memory_.data(), memory_.size()}; }

 private:
  std::vector<std::byte> memory_;
};

bool refuses(const Call& call, Workspace workspace) {
  try {
    call.run(workspace);
    return false;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument) << error.what();
    EXPECT_NE(std::string(error.what()).find("workspace at "), std::string::npos) << error.what();
    return true;
  }
}

TEST(EveryPlan, RefusesAWorkspaceThatOverlapsATensor) {
  for (const char* kernel : {"", "reference"}) {
    EveryPlan plans({.size = kSmall, .kernel = kernel});
    plans.for_each([&](const Call& call) {
      if (call.workspace_size == 0) return;
      ASSERT_LT(call.workspace_size + EveryPlan::kLine, EveryPlan::kGap) << call.name;
      OwnWorkspace own(call);
      call.run(own);
      const std::vector<std::byte> expected = call.outputs();
      std::vector<std::byte*> places;
      for (const Piece& piece : call.pieces) {
        std::byte* const last = piece.begin + piece.bytes;
        const std::byte* before = piece.begin - call.workspace_size;
        for (const int shift : {-1, 0, 1, 65}) places.push_back(const_cast<std::byte*>(before) + shift);
        for (std::byte* place : {piece.begin, piece.begin + piece.bytes / 2, last - 1, last}) places.push_back(place);
      }
      for (std::byte* place = plans.begin(); place + call.workspace_size <= plans.end(); place += 32749) {
        places.push_back(place);
      }
      for (std::byte* place : places) {
        const bool overlaps = std::any_of(call.pieces.begin(), call.pieces.end(), [&](const Piece& piece) {
          return place < piece.begin + piece.bytes && piece.begin < place + call.workspace_size;
        });
        // The unused part of a larger workspace may overlap.
        const std::size_t size = call.workspace_size + 7 * sizeof(float);
        ASSERT_EQ(refuses(call, {place, size}), overlaps) << call.name << ", workspace at " << place - plans.begin();
        ASSERT_EQ(call.outputs(), expected) << call.name << ", workspace at " << place - plans.begin();
      }
    });
  }
}

TEST(EveryPlan, TakesAWorkspaceOfAnyAlignment) {
  EveryPlan plans({.size = kSmall});
  plans.for_each([&](const Call& call) {
    std::vector<std::byte> memory(call.workspace_size + 128);
    call.run({memory.data(), call.workspace_size});
    const std::vector<std::byte> expected = call.outputs();
    for (std::size_t shift = 1; shift <= 128; shift += call.workspace_size == 0 ? 128 : 9) {
      memory.assign(memory.size(), std::byte{0x5a});
      call.run({memory.data() + shift, call.workspace_size});
      ASSERT_EQ(call.outputs(), expected) << call.name << ", workspace shifted by " << shift;
      for (std::size_t i = 0; i < memory.size(); ++i) {
        if (i >= shift && i < shift + call.workspace_size) continue;
        ASSERT_EQ(memory[i], std::byte{0x5a}) << call.name << " wrote beside its workspace";
      }
    }
  });
}

TEST(EveryPlan, AllocatesNothing) {
  for (const int threads : {1, 2}) {
    EveryPlan plans({.size = {64, 256, 256}, .threads = threads});
    plans.for_each([&](const Call& call) {
      OwnWorkspace own(call);
      call.run(own);  // the first run creates the threads
      const long before = allocations;
      call.run(own);
      EXPECT_EQ(allocations, before) << call.name;
    });
  }
}

// The floating-point environment of this thread, as a register's bits.
class Environment {
 public:
  Environment() : saved_(read()) {}
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() { write(saved_); }

#if defined(__x86_64__)
  static constexpr std::uint64_t kModes[] = {0x1f80 | 0x8040,  // flush to zero, and denormals are zero
                                             0x1f80 | 0x4000,          0x1f80 | 0x2000,
                                             0x1f80 | 0x6000,                    // up, down, to zero
                                             0x1f80 | 0x8040 | 0x4000, 0x0000};  // no exception is masked
  static std::uint64_t read() { return _mm_getcsr(); }
  static void write(std::uint64_t bits) { _mm_setcsr(static_cast<unsigned>(bits)); }
#elif defined(__aarch64__)
  static constexpr std::uint64_t kModes[] = {1u << 24, 1u << 22, 2u << 22, 3u << 22, 1u << 24 | 1u << 22};
  static std::uint64_t read() {
    std::uint64_t bits = 0;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  static void write(std::uint64_t bits) { asm volatile("msr fpcr, %0" ::"r"(bits)); }
#else
  static constexpr int kModes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  static int read() { return std::fegetround(); }
  static void write(int mode) { std::fesetround(mode); }
#endif

 private:
  decltype(read()) saved_;
};

// The bits, and that the caller's environment is unchanged afterwards, sticky flags included.
void expect_own_environment(const Choice& choice) {
  EveryPlan plans(choice);
  plans.for_each([&](const Call& call) {
    OwnWorkspace own(call);
    call.run(own);
    const std::vector<std::byte> expected = call.outputs();
    for (const auto mode : Environment::kModes) {
      for (const Piece& piece : call.pieces) {
        if (piece.output) std::memset(piece.begin, 0, piece.bytes);
      }
      auto after = mode;
      {
        const Environment saved;
        Environment::write(mode);
        call.run(own);
        after = static_cast<std::remove_const_t<decltype(mode)>>(Environment::read());
      }
      EXPECT_EQ(after, mode) << call.name;
      EXPECT_TRUE(call.outputs() == expected) << call.name << ": other bits in the environment " << mode;
    }
  });
}

// The sizes for four threads are only for rows that use threads: the reference would take minutes.
bool has_threads() {
  const std::vector<KernelInfo> rows = kernels();
  return std::any_of(rows.begin(), rows.end(), [](const KernelInfo& row) { return row.name == "quantize_portable"; });
}

TEST(EveryPlan, ComputesInItsOwnFloatingPointEnvironment) {
  expect_own_environment({.size = kSmall, .kernel = "reference"});
  if (!has_threads()) return;
  for (const int threads : {1, 4}) expect_own_environment({.size = kForFourThreads, .threads = threads});
}

#if defined(__unix__)
constexpr std::size_t kStack = 128 << 10;  // the size of a musl thread's

// Runs body on a thread with this small stack; threads that the library starts meanwhile have it too.
void on_a_small_stack(void (*body)()) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, kStack), 0);
#if defined(__GLIBC__)
  ASSERT_EQ(pthread_setattr_default_np(&attributes), 0);
#endif
  pthread_t thread;
  const auto start = [](void* context) -> void* {
    reinterpret_cast<void (*)()>(context)();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, start, reinterpret_cast<void*>(body)), 0);
  ASSERT_EQ(pthread_join(thread, nullptr), 0);
  pthread_attr_destroy(&attributes);
}

TEST(EveryPlan, FitsASmallStack) {
  on_a_small_stack([] {
    const auto run = [](const Choice& choice) {
      EveryPlan(choice).for_each([](const Call& call) {
        OwnWorkspace own(call);
        call.run(own);
      });
    };
    run({.size = kSmall, .kernel = "reference"});
    run({.size = {100, 40, 64}});
    if (!has_threads()) return;
    for (const int threads : {1, 4}) run({.size = kForFourThreads, .threads = threads});
  });
}
#endif

}  // namespace
}  // namespace octile
