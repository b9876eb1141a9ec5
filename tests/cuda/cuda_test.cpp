// What plans promise on a GPU besides the bits, which `octile check --device cuda` compares: they can be captured in a
// graph, shared by threads and streams, run with fewer rows and back to back, and a run allocates nothing.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/devices.h"
#include "octile/octile.hpp"
#include "plan/plan.h"
#include "plan/tuning.h"

namespace {
std::atomic<long> allocations{0};
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace octile {
namespace {

constexpr Device kGpu = Device::cuda(0);
constexpr int kPoison = 0x5a;

void expect(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

// An array on the GPU.
template <class T>
class OnGpu {
 public:
  explicit OnGpu(std::size_t size) : size_(size) {
    expect(cudaMalloc(reinterpret_cast<void**>(&data_), std::max<std::size_t>(size, 1) * sizeof(T)));
    poison();
  }
  explicit OnGpu(const std::vector<T>& values) : OnGpu(values.size()) {
    expect(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  OnGpu(OnGpu&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  ~OnGpu() { cudaFree(data_); }

  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  void poison() {
    expect(cudaMemset(data_, kPoison, size_ * sizeof(T)));
    expect(cudaDeviceSynchronize());  // the streams used next do not wait for the default one
  }
  std::vector<T> values() const {
    std::vector<T> host(size_);
    expect(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

class SideStream {
 public:
  SideStream() { expect(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;
  ~SideStream() { cudaStreamDestroy(stream_); }

  cudaStream_t get() const { return stream_; }
  operator Stream() const { return {stream_}; }
  void wait() const { expect(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// The bits of Y, f16.
using Bits = std::vector<std::uint16_t>;

bool in_groups(const LinearDescription& d) { return d.weight.granularity == Granularity::group; }

// Scales of a row of the weight.
std::int64_t groups_of(const LinearDescription& d) {
  return in_groups(d) && d.weight.group > 0 ? d.k / d.weight.group : 1;
}

// A layer with f16 activations: weights, bias and X.
struct Values {
  std::vector<std::uint16_t> x, bias;
  std::vector<std::int8_t> weight;
  std::vector<float> weight_scale;

  Values(const LinearDescription& d, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> integer(-128, 127);
    for (std::int64_t i = 0; i < d.m * d.k; ++i) x.push_back(Half(normal(random)).bits);
    const std::int64_t weight_bytes = d.n * d.k * bits(d.weight.type) / 8;
    for (std::int64_t i = 0; i < weight_bytes; ++i) weight.push_back(static_cast<std::int8_t>(integer(random)));
    for (std::int64_t i = 0; i < d.n; ++i) bias.push_back(Half(normal(random)).bits);
    for (std::int64_t i = 0; i < d.n * groups_of(d); ++i) {
      weight_scale.push_back(0.001f + 0.0001f * static_cast<float>(integer(random) & 31));
    }
  }
};

// The arguments, in host or GPU memory.
struct Pointers {
  const void *x, *weight, *weight_scale, *bias;
  void* y;
};
LinearArgs arguments(const LinearDescription& d, const Pointers& p, std::int64_t rows) {
  const bool out_in = d.weight_layout == WeightLayout::out_in;
  LinearArgs args;
  args.x = on(d.device, matrix(static_cast<const Half*>(p.x), rows, d.k));
  const std::int64_t rows_of_weight = out_in ? d.n : d.k, cols_of_weight = out_in ? d.k : d.n;
  args.weight = on(d.device, d.weight.type == DType::s4
                                 ? matrix_s4(static_cast<const std::uint8_t*>(p.weight), rows_of_weight, cols_of_weight)
                                 : matrix(static_cast<const std::int8_t*>(p.weight), rows_of_weight, cols_of_weight));
  const auto* const scale = static_cast<const float*>(p.weight_scale);
  args.weight_scale = on(d.device, in_groups(d) ? matrix(scale, d.n, groups_of(d)) : vector(scale, d.n));
  if (d.bias) args.bias = on(d.device, vector(static_cast<const Half*>(p.bias), d.n));
  args.y = on(d.device, matrix(static_cast<Half*>(p.y), rows, d.n));
  return args;
}

// A layer's tensors on the GPU, with a workspace.
struct Tensors {
  LinearDescription description;
  OnGpu<std::uint16_t> x, bias;
  OnGpu<std::int8_t> weight;
  OnGpu<float> weight_scale;
  OnGpu<std::uint16_t> y;
  OnGpu<std::byte> memory;

  Tensors(const LinearDescription& d, const Values& v, std::size_t workspace_size)
      : description(d),
        x(v.x),
        bias(v.bias),
        weight(v.weight),
        weight_scale(v.weight_scale),
        y(static_cast<std::size_t>(d.m * d.n)),
        memory(workspace_size) {}

  LinearArgs args(std::int64_t rows) const {
    return arguments(description, {x.data(), weight.data(), weight_scale.data(), bias.data(), y.data()}, rows);
  }
  LinearArgs args() const { return args(description.m); }
  Workspace workspace() const { return {memory.data(), memory.size()}; }
};

// The result on the CPU.
Bits on_cpu(LinearDescription d, const Values& v) {
  d.device = Device::cpu();
  const LinearPlan plan = LinearPlan::select(d);
  Bits y(static_cast<std::size_t>(d.m * d.n));
  std::vector<std::byte> memory(plan.workspace_size());
  plan.run(arguments(d, {v.x.data(), v.weight.data(), v.weight_scale.data(), v.bias.data(), y.data()}, d.m),
           {memory.data(), memory.size()});
  return y;
}

LinearDescription layer(std::int64_t m, std::int64_t n, std::int64_t k) {
  return {.m = m, .n = n, .k = k, .x = DType::f16, .y = DType::f16, .bias = true, .device = kGpu};
}

// One layer per path of a plan: few rows, small and large tiles, both weight layouts, odd sizes, static scales, one
// scale for the tensor, an empty contraction, weights of 4 bits.
std::vector<LinearDescription> layers() {
  std::vector<LinearDescription> all;
  for (const std::int64_t m : {1, 16, 70, 300}) all.push_back(layer(m, 264, 512));
  all.push_back(layer(45, 131, 333));
  all.push_back(layer(5, 24, 0));
  all.push_back(layer(70, 256, 192));
  all.back().weight_layout = WeightLayout::in_out;
  all.push_back(layer(64, 128, 256));
  all.back().activation = Activation::static_per_tensor;
  all.back().static_scale = 0.02;
  all.push_back(layer(64, 128, 256));
  all.back().activation = Activation::dynamic_per_tensor;
  all.back().bias = false;
  for (const std::int64_t m : {2, 9, 70}) {
    all.push_back(layer(m, 2112, 1024));
    all.back().weight = WeightFormat::s4_group;
  }
  return all;
}

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    const CudaDevices found = cuda_devices();
    if (found.devices.empty()) GTEST_SKIP() << found.reason;
  }
};

TEST_F(Cuda, AGraphOnASideStreamEqualsAPlainRun) {
  for (const LinearDescription& d : layers()) {
    const LinearPlan plan = LinearPlan::select(d);
    SCOPED_TRACE(plan.explain());
    const Values values(d, 1);
    Tensors tensors(d, values, plan.workspace_size());
    plan.run(tensors.args(), tensors.workspace());
    expect(cudaDeviceSynchronize());
    const Bits plain = tensors.y.values();
    EXPECT_EQ(plain, on_cpu(d, values));

    const SideStream stream;
    cudaGraph_t graph = nullptr;
    expect(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
    plan.run(tensors.args(), tensors.workspace(), stream);
    expect(cudaStreamEndCapture(stream.get(), &graph));
    cudaGraphExec_t executable = nullptr;
    expect(cudaGraphInstantiate(&executable, graph, 0));
    tensors.y.poison();
    for (int i = 0; i < 3; ++i) expect(cudaGraphLaunch(executable, stream.get()));
    stream.wait();
    EXPECT_EQ(tensors.y.values(), plain);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
}

TEST_F(Cuda, FewerRowsThanM) {
  for (const LinearDescription& d : layers()) {
    const LinearPlan plan = LinearPlan::select(d);
    if (d.activation == Activation::dynamic_per_tensor) continue;  // a row depends on all the others
    SCOPED_TRACE(plan.explain());
    const Values values(d, 2);
    Tensors tensors(d, values, plan.workspace_size());
    const Bits all = on_cpu(d, values);
    for (const std::int64_t rows : {std::int64_t{0}, std::int64_t{1}, d.m / 2, d.m - 1}) {
      tensors.y.poison();
      plan.run(tensors.args(rows), tensors.workspace());
      Bits expected(all.size(), kPoison << 8 | kPoison);
      std::copy_n(all.begin(), rows * d.n, expected.begin());
      EXPECT_EQ(tensors.y.values(), expected) << rows << " rows";
    }
  }
}

// A run that did not wait would overwrite what the previous one still reads.
TEST_F(Cuda, RunsOnOneStreamShareAWorkspace) {
  for (const LinearDescription& d : layers()) {
    const LinearPlan plan = LinearPlan::select(d);
    SCOPED_TRACE(plan.explain());
    const SideStream stream;
    constexpr unsigned kRuns = 12;
    std::vector<Tensors> tensors;
    std::vector<Bits> expected;
    for (unsigned i = 0; i < kRuns; ++i) {
      const Values values(d, i);
      tensors.emplace_back(d, values, i == 0 ? plan.workspace_size() : 0);
      expected.push_back(on_cpu(d, values));
    }
    for (int round = 0; round < 5; ++round) {
      for (const Tensors& t : tensors) plan.run(t.args(), tensors[0].workspace(), stream);
    }
    stream.wait();
    for (unsigned i = 0; i < kRuns; ++i) EXPECT_EQ(tensors[i].y.values(), expected[i]) << "run " << i;
  }
}

// A run reads what the stream wrote just before it. Its product starts while its quantizer still runs.
TEST_F(Cuda, ARunSeesWhatWasWrittenJustBefore) {
  for (const LinearDescription& d : layers()) {
    const LinearPlan plan = LinearPlan::select(d);
    SCOPED_TRACE(plan.explain());
    const SideStream stream;
    const std::array<Values, 2> values = {Values(d, 5), Values(d, 6)};
    const std::array<Bits, 2> expected = {on_cpu(d, values[0]), on_cpu(d, values[1])};
    const std::array<Tensors, 2> written = {Tensors(d, values[0], 0), Tensors(d, values[1], 0)};
    Tensors read(d, values[0], plan.workspace_size());
    const auto copy = [&](const auto& to, const auto& from) {
      expect(cudaMemcpyAsync(to.data(), from.data(), from.size() * sizeof(*from.data()), cudaMemcpyDeviceToDevice,
                             stream.get()));
    };
    constexpr std::size_t kRuns = 40;
    std::vector<OnGpu<std::uint16_t>> results;
    for (std::size_t i = 0; i < kRuns; ++i) results.emplace_back(read.y.size());
    for (std::size_t i = 0; i < kRuns; ++i) {
      const Tensors& from = written[i % 2];
      copy(read.x, from.x);
      copy(read.bias, from.bias);
      copy(read.weight, from.weight);
      copy(read.weight_scale, from.weight_scale);
      plan.run(read.args(), read.workspace(), stream);
      copy(results[i], read.y);
    }
    stream.wait();
    for (std::size_t i = 0; i < kRuns; ++i) EXPECT_EQ(results[i].values(), expected[i % 2]) << "run " << i;
  }
}

// The weight's scales are written by a kernel that lets the next one start while it still runs. The layer's product may
// read them before its quantizer has ended, and must not see the old ones.
TEST_F(Cuda, ARunSeesTheScalesThatAnEarlyKernelWrites) {
  for (const LinearDescription& d : layers()) {
    const LinearPlan plan = LinearPlan::select(d);
    SCOPED_TRACE(plan.explain());
    LinearDescription of_scales = layer(1, d.n * groups_of(d), 4096);
    of_scales.y = DType::f32;
    of_scales.bias = false;
    of_scales.weight = WeightFormat::s4_group;
    of_scales.weight.group = 128;
    const LinearPlan makes_scales = LinearPlan::select(of_scales);
    const auto scales_to = [](LinearArgs args, float* to, Device device) {
      args.y = on(device, matrix(to, 1, args.y.cols()));
      return args;
    };

    Values values(d, 7);
    const std::array<Values, 2> sources = {Values(of_scales, 8), Values(of_scales, 9)};
    std::array<Bits, 2> expected;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      LinearDescription here = of_scales;
      here.device = Device::cpu();
      const LinearPlan on_host = LinearPlan::select(here);
      const Values& v = sources[i];
      std::vector<std::byte> memory(on_host.workspace_size());
      const LinearArgs args = arguments(
          here, {v.x.data(), v.weight.data(), v.weight_scale.data(), v.bias.data(), values.weight_scale.data()}, 1);
      on_host.run(scales_to(args, values.weight_scale.data(), here.device), {memory.data(), memory.size()});
      expected[i] = on_cpu(d, values);
    }

    const SideStream stream;
    const std::array<Tensors, 2> written = {Tensors(of_scales, sources[0], makes_scales.workspace_size()),
                                            Tensors(of_scales, sources[1], makes_scales.workspace_size())};
    const Tensors read(d, values, plan.workspace_size());
    constexpr std::size_t kRuns = 40;
    std::vector<OnGpu<std::uint16_t>> results;
    for (std::size_t i = 0; i < kRuns; ++i) results.emplace_back(read.y.size());
    for (std::size_t i = 0; i < kRuns; ++i) {
      const Tensors& from = written[i % 2];
      makes_scales.run(scales_to(from.args(), read.weight_scale.data(), kGpu), from.workspace(), stream);
      LinearArgs args = read.args();
      args.y.data = results[i].data();
      plan.run(args, read.workspace(), stream);
    }
    stream.wait();
    for (std::size_t i = 0; i < kRuns; ++i) EXPECT_EQ(results[i].values(), expected[i % 2]) << "run " << i;
  }
}

TEST_F(Cuda, IsSharedByThreads) {
  for (const LinearDescription& d : layers()) {
    const LinearPlan plan = LinearPlan::select(d);
    SCOPED_TRACE(plan.explain());
    constexpr unsigned kThreads = 4;
    std::vector<Tensors> tensors;
    std::vector<Bits> expected;
    for (unsigned i = 0; i < kThreads; ++i) {
      const Values values(d, i);
      tensors.emplace_back(d, values, plan.workspace_size());
      expected.push_back(on_cpu(d, values));
    }
    std::vector<std::thread> threads;
    for (const Tensors& t : tensors) {
      threads.emplace_back([&t, &plan] {
        const SideStream stream;
        for (int i = 0; i < 20; ++i) plan.run(t.args(), t.workspace(), stream);
        stream.wait();
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (unsigned i = 0; i < kThreads; ++i) EXPECT_EQ(tensors[i].y.values(), expected[i]) << "thread " << i;
  }
}

TEST_F(Cuda, RunAllocatesNothing) {
  for (const LinearDescription& d : layers()) {
    const LinearPlan plan = LinearPlan::select(d);
    SCOPED_TRACE(plan.explain());
    const SideStream stream;
    const Tensors tensors(d, Values(d, 3), plan.workspace_size());
    const LinearArgs args = tensors.args();
    std::size_t free_before = 0, free_after = 0, total = 0;
    expect(cudaMemGetInfo(&free_before, &total));
    const long before = allocations;
    for (int i = 0; i < 3; ++i) plan.run(args, tensors.workspace(), stream);
    const long after = allocations;
    stream.wait();
    expect(cudaMemGetInfo(&free_after, &total));
    EXPECT_EQ(after, before);
    EXPECT_EQ(free_after, free_before);
  }
  const long before = allocations;
  std::vector<int> seen(3);  // the counter counts
  EXPECT_GT(allocations, before);
}

TEST_F(Cuda, ATensorOfTheOtherDeviceIsRefused) {
  const LinearDescription gpu = layer(4, 8, 16);
  LinearDescription cpu = gpu;
  cpu.device = Device::cpu();
  const Values values(gpu, 4);
  const Tensors tensors(gpu, values, 0);
  Bits y(values.x.size());
  const LinearArgs host = arguments(
      cpu, {values.x.data(), values.weight.data(), values.weight_scale.data(), values.bias.data(), y.data()}, cpu.m);
  const auto refuses = [](const LinearDescription& d, const LinearArgs& args, const std::string& text) {
    const LinearPlan plan = LinearPlan::select(d);
    const Verdict verdict = plan.can_implement(args);
    EXPECT_EQ(verdict.status, Status::shape_mismatch);
    EXPECT_NE(verdict.reason.find(text), std::string::npos) << verdict.reason;
    EXPECT_THROW(plan.run(args), Error);
  };
  refuses(cpu, tensors.args(), "on cuda:0");
  refuses(gpu, host, "on cpu");
  for (const auto member : {&LinearArgs::x, &LinearArgs::weight, &LinearArgs::weight_scale, &LinearArgs::bias}) {
    LinearArgs args = tensors.args();
    args.*member = host.*member;
    refuses(gpu, args, "on cpu");
  }
}

// The second plan needs less shared memory for the kernel that both plans use; and a run that did not wait would
// overwrite what the previous one still reads.
TEST_F(Cuda, QuantizersShareKernelsAndAWorkspace) {
  const auto description = [](std::int64_t rows, std::int64_t cols, Granularity granularity, Orientation orientation) {
    QuantizeDescription d;
    d.rows = rows;
    d.cols = cols;
    d.granularity = granularity;
    d.orientation = orientation;
    return d;
  };
  const QuantizeDescription all[] = {description(33, 24576, Granularity::row, Orientation::both),
                                     description(33, 512, Granularity::row, Orientation::both),
                                     description(20000, 36, Granularity::column, Orientation::both),
                                     description(100, 36, Granularity::column, Orientation::both),
                                     description(100, 35, Granularity::column, Orientation::both),
                                     description(300, 512, Granularity::tensor, Orientation::row_major),
                                     description(300, 512, Granularity::tensor, Orientation::both),
                                     description(300, 511, Granularity::tensor, Orientation::both)};
  std::vector<QuantizePlan> plans;
  for (QuantizeDescription d : all) {
    d.device = kGpu;
    plans.push_back(QuantizePlan::select(d));
  }
  const auto args = [](const QuantizeDescription& d, Device device, const auto& x, const auto& q,
                       const auto& transposed, const auto& scale) {
    QuantizeArgs a;
    a.x = on(device, matrix(static_cast<const float*>(x.data()), d.rows, d.cols));
    if (d.orientation != Orientation::transposed) {
      a.q = on(device, matrix(const_cast<std::int8_t*>(q.data()), d.rows, d.cols));
    }
    if (d.orientation != Orientation::row_major) {
      a.q_transposed = on(device, matrix(const_cast<std::int8_t*>(transposed.data()), d.cols, d.rows));
    }
    const std::int64_t segments[] = {1, d.rows, d.cols};
    a.scale = on(device, vector(const_cast<float*>(scale.data()), segments[static_cast<int>(d.granularity)]));
    return a;
  };
  std::mt19937 random(9);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    SCOPED_TRACE(plans[i].explain());
    const QuantizeDescription& d = all[i];
    const auto size = static_cast<std::size_t>(d.rows * d.cols);
    const auto max_segments = static_cast<std::size_t>(std::max(d.rows, d.cols));
    const bool transposed = d.orientation != Orientation::row_major;
    const QuantizePlan on_cpu = QuantizePlan::select(d);
    std::vector<std::byte> cpu_memory(on_cpu.workspace_size());
    const OnGpu<std::byte> memory(plans[i].workspace_size());
    const SideStream stream;
    struct Case {
      std::vector<std::int8_t> q, transposed;
      OnGpu<float> x, scale;
      OnGpu<std::int8_t> q_gpu, transposed_gpu;
    };
    std::vector<Case> cases;
    for (int run = 0; run < 8; ++run) {
      std::normal_distribution<float> normal(0, static_cast<float>(1 << run));
      std::vector<float> x(size), scale(max_segments);
      for (float& v : x) v = normal(random);
      cases.push_back({std::vector<std::int8_t>(size), std::vector<std::int8_t>(transposed ? size : 0), OnGpu<float>(x),
                       OnGpu<float>(max_segments), OnGpu<std::int8_t>(size),
                       OnGpu<std::int8_t>(transposed ? size : 0)});
      Case& c = cases.back();
      on_cpu.run(args(d, {}, x, c.q, c.transposed, scale), {cpu_memory.data(), cpu_memory.size()});
    }
    for (int round = 0; round < 5; ++round) {
      for (const Case& c : cases) {
        plans[i].run(args(d, kGpu, c.x, c.q_gpu, c.transposed_gpu, c.scale), {memory.data(), memory.size()}, stream);
      }
    }
    stream.wait();
    for (const Case& c : cases) {
      EXPECT_TRUE(c.q_gpu.values() == c.q);
      EXPECT_TRUE(c.transposed_gpu.values() == c.transposed);
    }
  }
}

// Inputs of a backward pass with f16 dY, and the dW to accumulate into.
struct GradientValues {
  std::vector<std::uint16_t> dy;
  std::vector<std::int8_t> weight, x;
  std::vector<float> weight_scale, x_scale, dw;

  GradientValues(const LinearBackwardDescription& d, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < d.m * d.n; ++i) dy.push_back(Half(normal(random)).bits);
    for (std::int64_t i = 0; i < d.n * d.k; ++i) weight.push_back(static_cast<std::int8_t>(random() & 255));
    for (std::int64_t i = 0; i < d.m * d.k; ++i) x.push_back(static_cast<std::int8_t>(random() & 255));
    for (std::int64_t i = 0; i < d.n; ++i) weight_scale.push_back(0.001f * static_cast<float>(1 + random() % 20));
    for (std::int64_t i = 0; i < d.m; ++i) x_scale.push_back(0.001f * static_cast<float>(1 + random() % 20));
    for (std::int64_t i = 0; i < d.n * d.k; ++i) dw.push_back(normal(random));
  }
};

template <class Dy, class Bytes, class Floats>
LinearBackwardArgs gradient_arguments(const LinearBackwardDescription& d, const Dy& dy, const Bytes& weight,
                                      const Bytes& x, const std::array<const Floats*, 2>& scales) {
  LinearBackwardArgs a;
  a.dy = on(d.device, matrix(reinterpret_cast<const Half*>(dy.data()), d.m, d.n));
  if (d.dx != Product::none) {
    a.weight = on(d.device, matrix(static_cast<const std::int8_t*>(weight.data()), d.n, d.k));
    a.weight_scale = on(d.device, vector(static_cast<const float*>(scales[0]->data()), d.n));
  }
  if (d.dw != Product::none) {
    a.x = on(d.device, matrix(static_cast<const std::int8_t*>(x.data()), d.m, d.k));
    a.x_scale = on(d.device, vector(static_cast<const float*>(scales[1]->data()), d.m));
  }
  return a;
}

template <class Dx, class Dw, class Db>
void add_outputs(LinearBackwardArgs& a, const LinearBackwardDescription& d, Dx& dx, Dw& dw, Db& db) {
  if (d.dx != Product::none) a.dx = on(d.device, matrix(reinterpret_cast<Half*>(dx.data()), d.m, d.k));
  if (d.dw != Product::none) a.dw = on(d.device, matrix(dw.data(), d.n, d.k));
  if (d.db) a.db = on(d.device, vector(reinterpret_cast<Half*>(db.data()), d.n));
}

struct Gradients {
  Bits dx, db;
  std::vector<float> dw;
  bool operator==(const Gradients&) const = default;
};

Gradients gradients_on_cpu(LinearBackwardDescription d, const GradientValues& v) {
  d.device = Device::cpu();
  const LinearBackwardPlan plan = LinearBackwardPlan::select(d);
  Gradients g{Bits(v.x.size()), Bits(v.weight_scale.size()), v.dw};
  LinearBackwardArgs a = gradient_arguments(d, v.dy, v.weight, v.x, std::array{&v.weight_scale, &v.x_scale});
  add_outputs(a, d, g.dx, g.dw, g.db);
  std::vector<std::byte> memory(plan.workspace_size());
  plan.run(a, {memory.data(), memory.size()});
  return g;
}

// Every pair of products, with and without dB: a run's graph equals a plain run, which allocates nothing. All-int8
// results equal the CPU's.
TEST_F(Cuda, GradientsRepeatAndAllocateNothing) {
  constexpr Product kProducts[] = {Product::none, Product::dequantized, Product::int8};
  for (int i = 0; i < 36; ++i) {
    LinearBackwardDescription d{.m = 264, .n = 200, .k = 136, .dy = DType::f16, .dw_dtype = DType::f32};
    d.dx = kProducts[i % 3];
    d.dw = kProducts[i / 3 % 3];
    d.db = i / 9 % 2 == 1;
    d.dw_accumulate = i / 18 == 1 && d.dw != Product::none;
    if (d.dx == Product::none && d.dw == Product::none && !d.db) continue;
    const GradientValues v(d, 6);
    const Gradients cpu = gradients_on_cpu(d, v);
    d.device = kGpu;
    const LinearBackwardPlan plan = LinearBackwardPlan::select(d);
    SCOPED_TRACE(plan.explain());
    const OnGpu<std::uint16_t> dy(v.dy), dx(v.x.size()), db(v.weight_scale.size());
    const OnGpu<std::int8_t> weight(v.weight), x(v.x);
    const OnGpu<float> weight_scale(v.weight_scale), x_scale(v.x_scale);
    const OnGpu<std::byte> memory(plan.workspace_size());
    const SideStream stream;
    const auto run = [&](const auto& enqueue) {
      const OnGpu<float> dw(v.dw);
      LinearBackwardArgs a = gradient_arguments(d, dy, weight, x, std::array{&weight_scale, &x_scale});
      add_outputs(a, d, dx, dw, db);
      const Workspace workspace = {memory.data(), memory.size()};
      enqueue([&] { plan.run(a, workspace, stream); });
      stream.wait();
      return Gradients{dx.values(), db.values(), dw.values()};
    };
    const Gradients plain = run([&](const auto& call) {
      const long before = allocations;
      call();
      EXPECT_EQ(allocations, before);
    });
    const Gradients graphed = run([&](const auto& call) {
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      expect(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
      call();
      expect(cudaStreamEndCapture(stream.get(), &graph));
      expect(cudaGraphInstantiate(&executable, graph, 0));
      expect(cudaGraphLaunch(executable, stream.get()));
      stream.wait();
      cudaGraphExecDestroy(executable);
      cudaGraphDestroy(graph);
    });
    EXPECT_TRUE(plain == graphed);
    EXPECT_TRUE(d.dx != Product::int8 || plain.dx == cpu.dx);
    EXPECT_TRUE(d.dw != Product::int8 || plain.dw == cpu.dw);
  }
}

// A layer with a 4-bit weight in groups of 64, with zero points.
struct FourBits {
  LinearDescription description;
  std::vector<std::uint16_t> x, bias;
  std::vector<std::uint8_t> weight;
  std::vector<float> scale;
  std::vector<std::int32_t> zero_point;

  explicit FourBits(std::int64_t m, std::int64_t k = 512, std::int64_t group = 64) {
    description = {.m = m, .n = 272, .k = k, .x = DType::f16, .y = DType::f16};
    LinearDescription& d = description;
    d.activation = Activation::none;
    d.weight = {DType::s4, Granularity::group, group, true};
    d.bias = true;
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < d.m * d.k; ++i) x.push_back(Half(normal(random)).bits);
    for (std::int64_t i = 0; i < d.n; ++i) bias.push_back(Half(normal(random)).bits);
    for (std::int64_t i = 0; i < d.n * d.k / 2; ++i) weight.push_back(static_cast<std::uint8_t>(random() & 255));
    for (std::int64_t i = 0; i < d.n * groups(); ++i) {
      scale.push_back(0.001f * static_cast<float>(1 + random() % 20));
      zero_point.push_back(static_cast<std::int32_t>(random() % 16) - 8);
    }
  }

  std::int64_t groups() const { return description.weight.group == 0 ? 1 : description.k / description.weight.group; }

  std::vector<std::uint8_t> packed(const LinearPlan& plan) const {
    const LinearDescription& d = description;
    std::vector<std::uint8_t> bytes(plan.packed_weight_size() + 64);
    void* begin = bytes.data();
    std::size_t space = bytes.size();
    auto* const aligned = static_cast<std::uint8_t*>(std::align(64, plan.packed_weight_size(), begin, space));
    plan.pack({matrix_s4(weight.data(), d.n, d.k), matrix(scale.data(), d.n, groups()),
               matrix(zero_point.data(), d.n, groups()),
               vector(aligned, static_cast<std::int64_t>(plan.packed_weight_size()))});
    return {aligned, aligned + plan.packed_weight_size()};
  }
};

// For every kernel, with the weight packed or not: a graph and repeated runs on a side stream give a plain run's bits,
// nothing is allocated, and y equals the CPU's up to the roundings that the plan allows.
TEST_F(Cuda, FourBitWeightsRepeatAndAllocateNothing) {
  for (const std::int64_t m : {1, 9, 30, 40, 100, 300, -1, -9, -30, -100}) {
    for (const bool packed : {false, true}) {
      // Run after others, and with a K that ends within a step of every kernel: leftover data must not matter.
      FourBits layer(std::abs(m), m < 0 ? 96 : 512, m < 0 ? (m % 2 == 0 ? 0 : 32) : 64);
      LinearDescription& d = layer.description;
      std::vector<std::uint16_t> on_cpu(static_cast<std::size_t>(d.m * d.n));
      LinearArgs args;
      args.x = matrix(reinterpret_cast<const Half*>(layer.x.data()), d.m, d.k);
      args.weight = matrix_s4(layer.weight.data(), d.n, d.k);
      args.weight_scale = matrix(layer.scale.data(), d.n, layer.groups());
      args.weight_zero_point = matrix(layer.zero_point.data(), d.n, layer.groups());
      args.bias = vector(reinterpret_cast<const Half*>(layer.bias.data()), d.n);
      args.y = matrix(reinterpret_cast<Half*>(on_cpu.data()), d.m, d.n);
      const LinearPlan on_host = LinearPlan::select(d);
      std::vector<std::byte> host_memory(on_host.workspace_size());
      on_host.run(args, {host_memory.data(), host_memory.size()});

      d.device = kGpu;
      d.packed_weight = packed;
      const LinearPlan plan = LinearPlan::select(d);
      SCOPED_TRACE(plan.explain());
      const OnGpu<std::uint16_t> x(layer.x), bias(layer.bias);
      const OnGpu<std::uint8_t> weight(packed ? layer.packed(plan) : layer.weight);
      const OnGpu<float> scale(layer.scale);
      const OnGpu<std::int32_t> zero_point(layer.zero_point);
      OnGpu<std::uint16_t> y(on_cpu.size());
      args.x = on(kGpu, matrix(reinterpret_cast<const Half*>(x.data()), d.m, d.k));
      args.bias = on(kGpu, vector(reinterpret_cast<const Half*>(bias.data()), d.n));
      args.y = on(kGpu, matrix(reinterpret_cast<Half*>(y.data()), d.m, d.n));
      if (packed) {
        args.weight = on(kGpu, vector(weight.data(), static_cast<std::int64_t>(weight.size())));
        args.weight_scale = args.weight_zero_point = {};
      } else {
        args.weight = on(kGpu, matrix_s4(weight.data(), d.n, d.k));
        args.weight_scale = on(kGpu, matrix(scale.data(), d.n, layer.groups()));
        args.weight_zero_point = on(kGpu, matrix(zero_point.data(), d.n, layer.groups()));
      }
      const OnGpu<std::byte> memory(plan.workspace_size());
      const Workspace workspace = {memory.data(), memory.size()};
      plan.run(args, workspace);
      expect(cudaDeviceSynchronize());
      const Bits plain = y.values();
      // Sums of terms of at most 5 * 15 * 0.02, in f16: 2^-9 of each, and y's rounding.
      std::size_t far = 0;
      for (std::size_t i = 0; i < plain.size(); ++i) {
        const double difference = static_cast<double>(Half::to_float(plain[i]) - Half::to_float(on_cpu[i]));
        far += !(std::abs(difference) <= static_cast<double>(d.k) * 5 * 15 * 0.02 * 0x1p-9);  // or NaN
      }
      EXPECT_EQ(far, 0u);

      const SideStream stream;
      y.poison();
      const long before = allocations;
      for (int i = 0; i < 3; ++i) plan.run(args, workspace, stream);
      EXPECT_EQ(allocations, before);
      stream.wait();
      EXPECT_EQ(y.values(), plain);
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      expect(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
      plan.run(args, workspace, stream);
      expect(cudaStreamEndCapture(stream.get(), &graph));
      expect(cudaGraphInstantiate(&executable, graph, 0));
      y.poison();
      for (int i = 0; i < 3; ++i) expect(cudaGraphLaunch(executable, stream.get()));
      stream.wait();
      EXPECT_EQ(y.values(), plain);
      cudaGraphExecDestroy(executable);
      cudaGraphDestroy(graph);
    }
  }
}

// s8 weights in groups, on the GPU: with int8 activations the bits of the CPU, with float ones its values up to
// rounding.
TEST_F(Cuda, ByteWeightsInGroupsAreTheCpus) {
  for (const std::int64_t group : {0, 32, 64, 128}) {
    for (const Activation activation : {Activation::dynamic_per_token, Activation::none}) {
      LinearDescription d = layer(67, 131, group == 0 ? 259 : 384);
      d.activation = activation;
      d.weight = {DType::s8, Granularity::group, group};
      const Values values(d, 11);
      const LinearPlan plan = LinearPlan::select(d);
      const Tensors tensors(d, values, plan.workspace_size());
      plan.run(tensors.args(), tensors.workspace());
      expect(cudaDeviceSynchronize());
      const Bits y = tensors.y.values();
      const Bits expected_bits = on_cpu(d, values);
      if (activation != Activation::none) {
        EXPECT_TRUE(y == expected_bits) << "group " << group;
        continue;
      }
      for (std::size_t i = 0; i < y.size(); ++i) {
        const float expected = Half::to_float(expected_bits[i]);
        EXPECT_NEAR(Half::to_float(y[i]), expected, 0.01 + 0x1p-9 * std::abs(expected)) << "group " << group;
      }
    }
  }
}

// A quantizer that needs aligned rows names the one that runs when they are not, and the bits are the same.
TEST_F(Cuda, AQuantizerTellsWhatRunsWithoutAlignment) {
  QuantizeDescription d{.rows = 96, .cols = 512};
  d.granularity = Granularity::column;
  d.orientation = Orientation::both;
  d.device = kGpu;
  const QuantizePlan plan = QuantizePlan::select(d);
  if (plan.sku().find("quantize_sm90") == std::string::npos) GTEST_SKIP() << "not a Hopper GPU";
  EXPECT_NE(plan.sku().find("(unaligned: quantize_sm80)"), std::string::npos) << plan.sku();
  const auto size = static_cast<std::size_t>(d.rows * d.cols);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> x(size + 1);
  for (std::size_t i = 0; i < size; ++i) x[i] = normal(random);
  const OnGpu<float> aligned(x);
  std::rotate(x.begin(), x.end() - 1, x.end());
  const OnGpu<float> shifted(x);
  const OnGpu<std::byte> memory(plan.workspace_size());
  std::vector<std::int8_t> results[2];
  for (const bool unaligned : {false, true}) {
    const OnGpu<std::int8_t> q(size), q_transposed(size);
    const OnGpu<float> scale(static_cast<std::size_t>(d.cols));
    QuantizeArgs args;
    const float* const data = unaligned ? shifted.data() + 1 : aligned.data();
    args.x = on(kGpu, matrix(data, d.rows, d.cols));
    args.q = on(kGpu, matrix(q.data(), d.rows, d.cols));
    args.q_transposed = on(kGpu, matrix(q_transposed.data(), d.cols, d.rows));
    args.scale = on(kGpu, vector(scale.data(), d.cols));
    plan.run(args, {memory.data(), memory.size()});
    expect(cudaDeviceSynchronize());
    results[unaligned] = q.values();
    const std::vector<std::int8_t> columns = q_transposed.values();
    results[unaligned].insert(results[unaligned].end(), columns.begin(), columns.end());
  }
  EXPECT_TRUE(results[0] == results[1]);
}

// Sums near the end of f32's range, which the Hopper kernel may hold 16 times too large: the bits still equal the
// CPU's, and not all of them are infinities.
TEST_F(Cuda, FourBitWeightsWithHugeScales) {
  FourBits layer(70);
  LinearDescription& d = layer.description;
  d.x = DType::s8;
  d.y = DType::f32;
  d.activation = Activation::dynamic_per_token;
  d.weight.zero_point = d.bias = false;
  for (std::size_t i = 0; i < layer.scale.size(); ++i) layer.scale[i] *= i / 8 % 5 == 0 ? 0x1p118f : 1;
  std::vector<std::int8_t> x(static_cast<std::size_t>(d.m * d.k));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::int8_t>(i * 37 % 255 - 127);
  const std::vector<float> x_scale(static_cast<std::size_t>(d.m), 0x1p-100f);
  std::vector<std::uint32_t> expected(static_cast<std::size_t>(d.m * d.n));
  LinearArgs args;
  args.x = matrix(x.data(), d.m, d.k);
  args.x_scale = vector(x_scale.data(), d.m);
  args.weight = matrix_s4(layer.weight.data(), d.n, d.k);
  args.weight_scale = matrix(layer.scale.data(), d.n, layer.groups());
  args.y = matrix(reinterpret_cast<float*>(expected.data()), d.m, d.n);
  d.kernel = "reference";
  LinearPlan::select(d).run(args);
  const auto huge = std::count_if(expected.begin(), expected.end(), [](std::uint32_t bits) {
    const float t = std::abs(std::bit_cast<float>(bits)) * 0x1p100f;
    return t >= 0x1p124f && t <= std::numeric_limits<float>::max();
  });
  EXPECT_GT(huge, 100);

  d.device = kGpu;
  for (const char* kernel : {"w4a8_gemm_simt_sm80", "w4a8_gemm_sm80", "w4a8_gemm_sm90"}) {
    d.kernel = kernel;
    const OnGpu<std::int8_t> x_there(x);
    const OnGpu<std::uint8_t> weight(layer.weight);
    const OnGpu<float> x_scale_there(x_scale), scale(layer.scale);
    const OnGpu<std::uint32_t> y(expected.size());
    args.x = on(kGpu, matrix(x_there.data(), d.m, d.k));
    args.x_scale = on(kGpu, vector(x_scale_there.data(), d.m));
    args.weight = on(kGpu, matrix_s4(weight.data(), d.n, d.k));
    args.weight_scale = on(kGpu, matrix(scale.data(), d.n, layer.groups()));
    args.y = on(kGpu, matrix(reinterpret_cast<float*>(y.data()), d.m, d.n));
    LinearPlan::select(d).run(args);
    expect(cudaDeviceSynchronize());
    EXPECT_EQ(y.values(), expected) << kernel;
  }
}

TEST_F(Cuda, FourBitWeightsThatAreRefused) {
  FourBits layer(64);
  LinearDescription& d = layer.description;
  d.device = kGpu;
  const auto refused = [&](const char* kernel, const std::string& text) {
    LinearDescription requested = d;
    requested.kernel = kernel;
    try {
      LinearPlan::select(requested);
      ADD_FAILURE() << kernel << " was chosen";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused("w4a16_gemv_sm90", "is for up to 16 rows of a");
  refused("w4a16_gemm_skinny_sm90", "needs a packed weight for groups smaller than 128");
  d.m = 65;
  refused("w4a16_gemm_skinny_sm90", "is for up to 64 rows of a");
  d.m = 64;
  d.x = d.y = DType::f32;
  refused("w4a16_gemm_sm90", "takes f16 and bf16");
  refused("w4a16_gemv_sm90", "takes f16 and bf16");
  d.x = DType::f16;
  d.y = DType::bf16;
  refused("w4a16_gemm_sm90", "writes y in x's type or f32");
  d.y = DType::f16;
  d.k = 100;
  d.weight.group = 0;
  refused("w4a16_gemm_sm90", "needs K to be a multiple of 32");
  d.m = 1;
  refused("w4a16_gemv_sm90", "needs K to be a multiple of 32");
  EXPECT_EQ(LinearPlan::select(d).sku(), "w4a16_gemm_simt_sm80");  // which accepts everything
  d.x = DType::s8;
  d.activation = Activation::dynamic_per_token;
  refused("w4a8_gemm_sm90", "needs K to be a multiple of 32");
  EXPECT_EQ(LinearPlan::select(d).sku(), "w4a8_gemm_simt_sm80");
  d.k = 128;
  d.y = DType::f64;
  refused("w4a8_gemm_sm90", "has no f64");

  d = FourBits(1).description;
  d.device = kGpu;
  d.packed_weight = true;
  const LinearPlan plan = LinearPlan::select(d);
  layer.zero_point[5] = 8;
  EXPECT_THROW(layer.packed(plan), Error);  // on the CPU, where the error can be detected
  const OnGpu<std::uint8_t> weight(plan.packed_weight_size() + 16);
  const OnGpu<std::uint16_t> x(layer.x), bias(layer.bias), y(layer.bias.size());
  LinearArgs args;
  args.x = on(kGpu, matrix(reinterpret_cast<const Half*>(x.data()), d.m, d.k));
  args.bias = on(kGpu, vector(reinterpret_cast<const Half*>(bias.data()), d.n));
  args.y = on(kGpu, matrix(reinterpret_cast<Half*>(y.data()), d.m, d.n));
  args.weight = on(kGpu, vector(weight.data() + 16, static_cast<std::int64_t>(plan.packed_weight_size())));
  EXPECT_EQ(plan.can_implement(args).status, Status::misaligned);
}

// ---- Experts ----

// Experts with f16 tokens, a few for each, in host memory.
struct ExpertValues {
  GroupedLinearDescription d;
  std::vector<std::uint16_t> x, bias;
  std::vector<std::uint8_t> weight;  // of either type
  std::vector<float> weight_scale, router_weight;
  std::vector<std::int32_t> offsets, token, place;

  explicit ExpertValues(const GroupedLinearDescription& description) : d(description) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    const auto size = [](std::int64_t count) { return static_cast<std::size_t>(count); };
    const std::int64_t groups = d.weight.granularity == Granularity::group ? d.k / d.weight.group : 1;
    for (std::int64_t i = 0; i < d.tokens * d.k; ++i) x.push_back(Half(normal(random)).bits);
    for (std::int64_t i = 0; i < d.experts * d.n; ++i) bias.push_back(Half(normal(random)).bits);
    weight.resize(size(d.experts * d.n * d.k * bits(d.weight.type) / 8));
    weight_scale.resize(size(d.experts * d.n * groups));
    router_weight.resize(size(d.tokens * d.slots));
    for (auto& v : weight) v = static_cast<std::uint8_t>(random());
    for (float& v : weight_scale) v = 0.001f + 0.0001f * static_cast<float>(random() & 31);
    for (float& v : router_weight) v = normal(random);
    route(0);
  }

  // Other tokens for each expert; some rows belong to no expert, and some experts have none.
  void route(unsigned seed) {
    std::mt19937 random(seed);
    std::vector<std::int32_t> bounds;
    for (std::int64_t e = 0; e <= d.experts; ++e) bounds.push_back(static_cast<std::int32_t>(random() % (d.m + 1)));
    std::sort(bounds.begin(), bounds.end());
    if (seed % 3 == 1) std::fill(bounds.begin(), bounds.end(), static_cast<std::int32_t>(d.m / 2));  // no rows at all
    offsets = bounds;
    token.assign(static_cast<std::size_t>(d.m), 0);
    place.assign(static_cast<std::size_t>(d.tokens * d.slots), 0);
    for (auto& t : token) t = static_cast<std::int32_t>(random() % d.tokens);
    for (auto& r : place) r = static_cast<std::int32_t>(random() % (d.m + 2)) - 1;
  }

  struct Pointers {
    const void *x, *weight, *weight_scale, *bias, *router_weight, *offsets, *token, *place;
    void* y;
  };
  GroupedLinearArgs args(Device device, const Pointers& p) const {
    GroupedLinearArgs a;
    const auto s32 = [](const void* data) { return static_cast<const std::int32_t*>(data); };
    const std::int64_t rows = d.experts * d.n;
    a.x = matrix(static_cast<const Half*>(p.x), d.tokens, d.k);
    a.offsets = vector(s32(p.offsets), d.experts + 1);
    a.token = vector(s32(p.token), d.m);
    if (d.weight.type == DType::s4) {
      a.weight = matrix_s4(static_cast<const std::uint8_t*>(p.weight), rows, d.k);
    } else {
      a.weight = matrix(static_cast<const std::int8_t*>(p.weight), rows, d.k);
    }
    const auto* const scale = static_cast<const float*>(p.weight_scale);
    const bool grouped = d.weight.granularity == Granularity::group;
    a.weight_scale = grouped ? ConstTensor(matrix(scale, rows, d.k / d.weight.group)) : vector(scale, rows);
    if (d.bias) a.bias = matrix(static_cast<const Half*>(p.bias), d.experts, d.n);
    if (d.slots > 0) {
      a.place = matrix(s32(p.place), d.tokens, d.slots);
      a.router_weight = matrix(static_cast<const float*>(p.router_weight), d.tokens, d.slots);
    }
    a.y = matrix(static_cast<Half*>(p.y), d.slots > 0 ? d.tokens : d.m, d.n);
    for (ConstTensor* t :
         {&a.x, &a.offsets, &a.token, &a.weight, &a.weight_scale, &a.bias, &a.place, &a.router_weight}) {
      *t = on(device, *t);
    }
    a.y = on(device, a.y);
    return a;
  }

  std::size_t size_of_y() const { return static_cast<std::size_t>((d.slots > 0 ? d.tokens : d.m) * d.n); }

  Bits on_cpu() const {
    GroupedLinearDescription cpu = d;
    cpu.device = {};
    const auto plan = GroupedLinearPlan::select(cpu);
    Bits y(size_of_y(), kPoison << 8 | kPoison);
    std::vector<std::byte> memory(plan.workspace_size());
    plan.run(args({}, {x.data(), weight.data(), weight_scale.data(), bias.data(), router_weight.data(), offsets.data(),
                       token.data(), place.data(), y.data()}),
             {memory.data(), memory.size()});
    return y;
  }
};

GroupedLinearDescription experts(std::int64_t m, Activation activation, const WeightFormat& weight) {
  GroupedLinearDescription d{.experts = 9, .m = m, .n = 136, .k = 256, .tokens = 40, .gather = true};
  d.x = d.y = DType::f16;
  d.activation = activation;
  d.weight = weight;
  d.bias = true;
  d.device = kGpu;
  return d;
}

// One graph serves every routing: the host does not know the routing.
TEST_F(Cuda, ExpertsInAGraphFollowTheirOffsets) {
  for (const WeightFormat& weight : {WeightFormat::s8_per_channel, WeightFormat::s8_group, WeightFormat::s4_group}) {
    for (const Activation activation : {Activation::dynamic_per_token, Activation::none}) {
      for (const std::int64_t slots : {0, 3}) {
        for (const std::int64_t m : {1, 30, 300}) {
          GroupedLinearDescription d = experts(m, activation, weight);
          d.slots = slots;
          ExpertValues values(d);
          const auto plan = GroupedLinearPlan::select(d);
          SCOPED_TRACE(plan.explain());
          const OnGpu<std::uint16_t> x(values.x), bias(values.bias);
          const OnGpu<std::uint8_t> bytes(values.weight);
          const OnGpu<float> scale(values.weight_scale), router(values.router_weight);
          const OnGpu<std::int32_t> offsets(values.offsets), token(values.token), place(values.place);
          OnGpu<std::uint16_t> y(values.size_of_y());
          const OnGpu<std::byte> memory(plan.workspace_size());
          const GroupedLinearArgs args =
              values.args(kGpu, {x.data(), bytes.data(), scale.data(), bias.data(), router.data(), offsets.data(),
                                 token.data(), place.data(), y.data()});
          const SideStream stream;
          cudaGraph_t graph = nullptr;
          expect(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
          const long before = allocations;
          plan.run(args, {memory.data(), memory.size()}, stream);
          EXPECT_EQ(allocations, before);
          expect(cudaStreamEndCapture(stream.get(), &graph));
          cudaGraphExec_t executable = nullptr;
          expect(cudaGraphInstantiate(&executable, graph, 0));
          for (unsigned seed = 0; seed < 6; ++seed) {
            values.route(seed);
            const auto copy = [&](const OnGpu<std::int32_t>& to, const std::vector<std::int32_t>& from) {
              expect(cudaMemcpy(to.data(), from.data(), from.size() * 4, cudaMemcpyHostToDevice));
            };
            copy(offsets, values.offsets);
            copy(token, values.token);
            copy(place, values.place);
            y.poison();
            expect(cudaGraphLaunch(executable, stream.get()));
            stream.wait();
            const Bits replayed = y.values();
            if (activation != Activation::none) {
              EXPECT_EQ(replayed, values.on_cpu()) << "routing " << seed;
            }
            y.poison();
            plan.run(args, {memory.data(), memory.size()}, stream);
            stream.wait();
            EXPECT_EQ(y.values(), replayed) << "routing " << seed;
          }
          cudaGraphExecDestroy(executable);
          cudaGraphDestroy(graph);
        }
      }
    }
  }
}

TEST_F(Cuda, ExpertsThatAreRefused) {
  const auto refused = [](GroupedLinearDescription d, const std::string& kernel, const std::string& text) {
    d.kernel = kernel;
    try {
      GroupedLinearPlan::select(d);
      ADD_FAILURE() << kernel << " was chosen";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  GroupedLinearDescription d = experts(8, Activation::dynamic_per_token, WeightFormat::s8_group);
  refused(d, "w8a8_grouped_gemm_sm80", "takes a scale per channel or tensor, not groups");
  refused(d, "w8a8_grouped_gemm_sm90", "takes a scale per channel or tensor, not groups");
  d.weight = WeightFormat::s8_per_channel;
  refused(d, "w8a8_grouped_gemm_simt_sm80", "takes scales of groups of a row");
  d.packed_weight = true;
  refused(d, "", "takes the weight as it is, not packed");
  d.packed_weight = false;
  d.m = (std::int64_t{1} << 30) + 1;
  refused(d, "", "takes at most 2^30");
  refused(d, "w8a8_grouped_gemm_sm90", "takes at most 2^30 rows of an operand");
  --d.m;
  d.n = 1 << 17;
  refused(d, "w8a8_grouped_gemm_sm90", "takes at most 2^30 tiles of y");
  d.n = 136;
  d.m = 8;
  d.k = 264;
  refused(d, "w8a8_grouped_gemm_sm90", "needs K to be a multiple of 16");
  d.k = 256;
  d.x = d.y = DType::f64;
  refused(d, "w8a8_grouped_gemm_sm90", "has no f64");
  d.x = d.y = DType::f16;
  d.experts = 513;
  refused(d, "w8a8_grouped_gemm_sm90", "is for at most 512 experts");
  d.weight = WeightFormat::s4_group;
  d.packed_weight = true;
  for (const auto& [kernel, activation] : {std::pair{"w4a8_grouped_gemm_sm90", Activation::dynamic_per_token},
                                           std::pair{"w4a8_grouped_gemm_skinny_sm90", Activation::dynamic_per_token},
                                           std::pair{"w4a16_grouped_gemm_sm90", Activation::none},
                                           std::pair{"w4a16_grouped_gemm_skinny_sm90", Activation::none}}) {
    GroupedLinearDescription four_bits = d;
    four_bits.activation = activation;
    refused(four_bits, kernel, "is for at most 512 experts");
    four_bits.experts = 9;
    four_bits.packed_weight = false;
    refused(four_bits, kernel, "takes packed weights");
    four_bits.packed_weight = true;
    four_bits.k = 272;
    four_bits.weight.group = 0;
    refused(four_bits, kernel, "needs K to be a multiple of 32");
    four_bits.k = 256;
    four_bits.m = std::int64_t{1} << 30;
    four_bits.n = 1 << 14;
    refused(four_bits, kernel, "takes at most 2^30 tiles of y");
  }
  GroupedLinearDescription few = d;
  few.activation = Activation::none;
  few.m = 65;
  refused(few, "w4a16_grouped_gemv_sm90", "is for up to 64 rows of all experts");
  few.m = 32;
  few.packed_weight = false;
  refused(few, "w4a16_grouped_gemv_sm90", "takes packed weights");
  few.activation = Activation::dynamic_per_token;
  refused(few, "w4a8_grouped_gemv_sm90", "takes packed weights");
  few.packed_weight = true;
  refused(few, "w4a8_grouped_gemv_sm90", "is for up to 16 rows of all experts");
  d.weight = WeightFormat::s8_per_channel;
  d.packed_weight = false;
  d.experts = 9;
  const ExpertValues values(d);
  const auto plan = GroupedLinearPlan::select(d);
  EXPECT_EQ(plan.sku().find("quantize"), 0u) << plan.sku();
  EXPECT_NE(plan.sku().find(" + w8a8_grouped_gemm_"), std::string::npos) << plan.sku();
  Bits y(values.size_of_y());
  const GroupedLinearArgs host =
      values.args({}, {values.x.data(), values.weight.data(), values.weight_scale.data(), values.bias.data(), nullptr,
                       values.offsets.data(), values.token.data(), nullptr, y.data()});
  EXPECT_EQ(plan.can_implement(host).status, Status::shape_mismatch);
}

TEST_F(Cuda, GradientsOfExpertsThatAreRefused) {
  const auto refused = [](GroupedLinearBackwardDescription d, const std::string& kernel, const std::string& text) {
    d.kernel = kernel;
    try {
      GroupedLinearBackwardPlan::select(d);
      ADD_FAILURE() << kernel << " was chosen";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  GroupedLinearBackwardDescription d{.experts = 9, .m = 300, .n = 128, .k = 64, .dy = DType::f16};
  d.dx = d.dw = Product::int8;
  d.db = true;
  d.device = kGpu;
  refused(d, "", "gradient_block = 0 with dx = int8, dw = int8 on cuda:0, expected 128, 256, 512 or 1024");
  d.gradient_block = 256;
  refused(d, "w8a8_grouped_gradient", "no kernel is named w8a8_grouped_gradient");
  d.gradient_block = 128;
  refused(d, "grouped_gradient_quantize_sm90", "does blocks of 256 and 512 terms");
  d.gradient_block = 256;
  d.experts = 513;
  refused(d, "w8a8_grouped_gradient_sm90", "is for at most 512 experts");
  d.experts = 9;
  d.dx = Product::none;
  d.db = false;
  d.m = (std::int64_t{1} << 30) + 1;
  refused(d, "", "does at most");  // the quantizer
  d.dx = d.dw = Product::dequantized;
  d.gradient_block = 0;
  refused(d, "", "takes at most 2^30 rows of an operand");
  d.m = 300;
  d.experts = (std::int64_t{1} << 30) / 2;
  d.n = 2 * 128 + 1;
  d.k = 1;
  refused(d, "", "takes at most 2^30 tiles of y");
  d.experts = 9;
  d.dy = DType::f64;
  d.db = true;
  refused(d, "", "does f16, bf16 and f32 to s8");
  d.db = false;
  EXPECT_EQ(GroupedLinearBackwardPlan::select(d).sku(), "w8a16_grouped_gradient_sm80 + w8a16_grouped_gradient_sm80");
  d.dx = Product::int8;
  d.gradient_block = 128;
  refused(d, "", "does f16, bf16 and f32 to s8");
}

// The kernels that a tuning file names are chosen; for float sums, only if the file itself was named.
TEST_F(Cuda, ATuningFileIsFollowed) {
  std::string folder = std::filesystem::temp_directory_path() / "octile_tuning_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  setenv("XDG_CACHE_HOME", folder.c_str(), 1);
  LinearDescription w8a8{.m = 64, .n = 256, .k = 256, .x = DType::s8, .y = DType::f16, .device = kGpu};
  LinearDescription w4a16{.m = 64, .n = 256, .k = 256, .x = DType::f16, .y = DType::f16, .device = kGpu};
  w4a16.activation = Activation::none;
  w4a16.weight = WeightFormat::s4_group;
  w4a16.weight.group = 64;
  for (const LinearDescription& d : {w8a8, w4a16}) {
    use_tuning("off");
    const std::string free_choice = LinearPlan::select(d).sku();
    const GemmProblem p = gemm_problem(d);
    for (const GemmKernel* row : gemm_kernels()) {
      if (row->task != task_of(p) || row->device != DeviceType::cuda || !refusal(*row, p).empty()) continue;
      SCOPED_TRACE(row->name);
      const std::string name(row->name);
      const std::string unaligned = row->aligned ? name + " (unaligned: " : name;
      TuningFile file{tuning_device(kGpu), {}};
      file.choices[tuning_key(p)][64] = {64, name, 1e-6, name, 1e-6};
      const std::filesystem::path path = default_tuning_path(file.device);
      std::filesystem::create_directories(path.parent_path());
      std::ofstream(path) << text_of(file);
      use_tuning(path.string());
      EXPECT_EQ(LinearPlan::select(d).sku().find(unaligned), 0u) << LinearPlan::select(d).explain();
      use_tuning("");
      const std::string found = LinearPlan::select(d).sku();
      EXPECT_EQ(is_exact(task_of(p)) ? found.find(unaligned) : found.compare(free_choice), 0u) << found;
    }
  }
  use_tuning("off");
  unsetenv("XDG_CACHE_HOME");
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace octile
