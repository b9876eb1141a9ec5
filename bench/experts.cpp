// GroupedLinearPlan beside a loop over dense plans, and beside ggml's mul_mat_id, in turns, in one process.
//
//     octile_experts_bench FORMAT EXPERTS SLOTS K N THREADS SECONDS [FOLDER-OF-LIBGGML] TOKENS...
//
// FORMAT: w8a8, w4a8 or w4a16 (groups of 128). Each token goes to SLOTS experts of its own, at random. What is timed is
// from f32 tokens to the f32 rows of all slots: quantizing, gathering, products. Weights are packed before. The loops
// are what a caller without GroupedLinearPlan writes in C++, each expert with a plan selected for its number of rows:
//   loop      gathers an expert's f32 rows; its plan quantizes them
//   loop q    quantizes X once, gathers s8 rows (not w4a16)
// ggml: Q8_0 or Q4_0, in the order of files and, where it has one, in another order ("repacked"), as llama.cpp would
// choose. A line per number of tokens: medians in microseconds, then each peer's time over ours, the median of rounds.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "octile/octile.hpp"

namespace {

using namespace octile;

struct Free {
  void operator()(std::uint8_t* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<std::uint8_t[], Free>;

Buffer buffer(std::size_t size) {
  Buffer made(static_cast<std::uint8_t*>(std::aligned_alloc(64, (size + 63) / 64 * 64)));
  if (!made) throw std::bad_alloc();
  std::memset(made.get(), 0, size);
  return made;
}

struct Problem {
  std::string format;
  std::int64_t experts, slots, k, n, tokens;
  int threads;
  std::vector<float> x;
  std::vector<std::int32_t> index, offsets, token;  // index (tokens, slots)

  bool four_bits() const { return format != "w8a8"; }
  bool quantizes() const { return format != "w4a16"; }
  std::int64_t rows() const { return tokens * slots; }
  WeightFormat weight() const {
    return four_bits() ? WeightFormat{DType::s4, Granularity::group, 128} : WeightFormat::s8_per_channel;
  }
  LinearDescription dense(std::int64_t m) const {
    LinearDescription d{.m = m, .n = n, .k = k, .weight = weight(), .packed_weight = true};
    d.activation = quantizes() ? Activation::dynamic_per_token : Activation::none;
    d.threads = threads;
    return d;
  }
  std::int64_t rows_of(std::int64_t e) const {
    return offsets[static_cast<std::size_t>(e) + 1] - offsets[static_cast<std::size_t>(e)];
  }
};

Problem problem(const std::string& format, std::int64_t experts, std::int64_t slots, std::int64_t k, std::int64_t n,
                int threads, std::int64_t tokens) {
  Problem p{format, experts, slots, k, n, tokens, threads, {}, {}, {0}, {}};
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  p.x.resize(static_cast<std::size_t>(tokens * k));
  for (float& v : p.x) v = normal(random);
  std::vector<std::int32_t> all(static_cast<std::size_t>(experts));
  for (std::size_t e = 0; e < all.size(); ++e) all[e] = static_cast<std::int32_t>(e);
  std::vector<std::vector<std::int32_t>> of(all.size());
  for (std::int32_t t = 0; t < tokens; ++t) {
    std::shuffle(all.begin(), all.end(), random);
    for (std::int64_t s = 0; s < slots; ++s) {
      p.index.push_back(all[static_cast<std::size_t>(s)]);
      of[static_cast<std::size_t>(p.index.back())].push_back(t);
    }
  }
  for (const auto& rows : of) {
    p.token.insert(p.token.end(), rows.begin(), rows.end());
    p.offsets.push_back(static_cast<std::int32_t>(p.token.size()));
  }
  return p;
}

// All experts' packed weights. Their values do not matter to the time.
Buffer packed_weights(const Problem& p, std::size_t one) {
  Buffer all = buffer(one * static_cast<std::size_t>(p.experts));
  const LinearPlan plan = LinearPlan::select(p.dense(1));
  std::mt19937_64 random(2);
  std::vector<std::uint64_t> w(static_cast<std::size_t>(p.n * p.k / 8));
  for (auto& v : w) v = random();
  const std::int64_t groups = p.four_bits() ? p.k / 128 : 1;
  const std::vector<float> scale(static_cast<std::size_t>(p.n * groups), 0.01f);
  LinearPackArgs args;
  args.weight = p.four_bits()
                    ? matrix_s4<const std::uint8_t>(reinterpret_cast<std::uint8_t*>(w.data()), p.n, p.k)
                    : ConstTensor(matrix<const std::int8_t>(reinterpret_cast<std::int8_t*>(w.data()), p.n, p.k));
  args.weight_scale = p.four_bits() ? matrix(scale.data(), p.n, groups) : vector(scale.data(), p.n);
  for (std::int64_t e = 0; e < p.experts; ++e) {
    args.packed = vector(all.get() + static_cast<std::size_t>(e) * one, static_cast<std::int64_t>(one));
    plan.pack(args);
  }
  return all;
}

struct Contender {
  std::string name;
  std::function<void()> run;
  std::shared_ptr<std::vector<float>> y;  // (rows, n), sorted by expert; of ggml unset
};

std::shared_ptr<std::vector<float>> result(const Problem& p) {
  return std::make_shared<std::vector<float>>(static_cast<std::size_t>(p.rows() * p.n), 0.0f);
}

Contender grouped(const Problem& p, const std::uint8_t* packed, std::size_t one) {
  GroupedLinearDescription d{.experts = p.experts, .m = p.rows(), .n = p.n, .k = p.k, .tokens = p.tokens};
  d.gather = true;
  d.activation = p.dense(1).activation;
  d.weight = p.weight();
  d.packed_weight = true;
  d.threads = p.threads;
  const GroupedLinearPlan plan = GroupedLinearPlan::select(d);
  const auto y = result(p);
  GroupedLinearArgs args{.x = matrix(p.x.data(), p.tokens, p.k)};
  args.offsets = vector(p.offsets.data(), p.experts + 1);
  args.token = vector(p.token.data(), p.rows());
  args.weight = vector(packed, static_cast<std::int64_t>(one) * p.experts);
  args.y = matrix(y->data(), p.rows(), p.n);
  const auto size = plan.workspace_size();
  const std::shared_ptr<std::uint8_t[]> workspace = buffer(size);
  return {"grouped", [=] { plan.run(args, {workspace.get(), size}); }, y};
}

Contender loop(const Problem& p, const std::uint8_t* packed, std::size_t one, bool once) {
  std::map<std::int64_t, LinearPlan> plans;
  std::size_t size = 0;
  std::int64_t most = 0;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    const std::int64_t m = p.rows_of(e);
    LinearDescription d = p.dense(m);
    if (once) d.x = DType::s8;
    if (m > 0 && !plans.contains(m)) plans.emplace(m, LinearPlan::select(d));
    if (m > 0) size = std::max(size, plans.at(m).workspace_size());
    most = std::max(most, m);
  }
  const std::size_t width = once ? 1 : sizeof(float), row = static_cast<std::size_t>(p.k) * width;
  const std::shared_ptr<std::uint8_t[]> rows = buffer(static_cast<std::size_t>(most) * row);
  const std::shared_ptr<std::uint8_t[]> q = buffer(static_cast<std::size_t>(p.tokens) * row);
  const auto scale = std::make_shared<std::vector<float>>(p.tokens),
             own_scale = std::make_shared<std::vector<float>>(most);
  const QuantizePlan quantize = QuantizePlan::select({.rows = p.tokens, .cols = p.k, .threads = p.threads});
  size = std::max(size, quantize.workspace_size());
  const std::shared_ptr<std::uint8_t[]> workspace = buffer(size);
  const auto y = result(p);
  return {once ? "loop q" : "loop",
          [=, &p] {
            const Workspace memory{workspace.get(), size};
            const auto* x = reinterpret_cast<const std::uint8_t*>(p.x.data());
            if (once) {
              quantize.run({.x = matrix(p.x.data(), p.tokens, p.k),
                            .q = matrix(reinterpret_cast<std::int8_t*>(q.get()), p.tokens, p.k),
                            .scale = vector(scale->data(), p.tokens)},
                           memory);
              x = q.get();
            }
            for (std::int64_t e = 0; e < p.experts; ++e) {
              const std::int64_t m = p.rows_of(e), first = p.offsets[static_cast<std::size_t>(e)];
              if (m == 0) continue;
              for (std::int64_t r = 0; r < m; ++r) {
                const auto t = static_cast<std::size_t>(p.token[static_cast<std::size_t>(first + r)]);
                std::memcpy(rows.get() + static_cast<std::size_t>(r) * row, x + t * row, row);
                if (once) (*own_scale)[static_cast<std::size_t>(r)] = (*scale)[t];
              }
              LinearArgs args;
              if (once) {
                args.x = matrix<const std::int8_t>(reinterpret_cast<const std::int8_t*>(rows.get()), m, p.k);
                args.x_scale = vector<const float>(own_scale->data(), m);
              } else {
                args.x = matrix<const float>(reinterpret_cast<const float*>(rows.get()), m, p.k);
              }
              args.weight = vector(packed + static_cast<std::size_t>(e) * one, static_cast<std::int64_t>(one));
              args.y = matrix(y->data() + first * p.n, m, p.n);
              plans.at(m).run(args, memory);
            }
          },
          y};
}

// ---- ggml, as llama-cpp-python has it ----

class Ggml {
 public:
  Ggml(const std::string& folder, int threads) {
    for (const char* const part : {"-base", "-cpu"}) {
      libraries_.push_back(dlopen((folder + "/libggml" + part + ".so").c_str(), RTLD_NOW | RTLD_GLOBAL));
      if (!libraries_.back()) throw std::runtime_error(dlerror());
    }
    backend_ = find<void*()>("ggml_backend_cpu_init")();
    find<void(void*, int)>("ggml_backend_cpu_set_n_threads")(backend_, threads);
  }

  // None: no such order takes these weights.
  std::vector<Contender> contenders(const Problem& p) const {
    std::vector<Contender> found;
    if (auto plain = contender(p, find<void*()>("ggml_backend_cpu_buffer_type")(), "ggml")) found.push_back(*plain);
    void* const registry = find<void*()>("ggml_backend_cpu_reg")();
    void* const function = find<void*(void*, const char*)>("ggml_backend_reg_get_proc_address")(
        registry, "ggml_backend_dev_get_extra_bufts");
    void* const device = find<void*(void*, std::size_t)>("ggml_backend_reg_dev_get")(registry, 0);
    for (void** type = reinterpret_cast<void** (*)(void*)>(function)(device); *type; ++type) {
      if (auto other = contender(p, *type, "ggml repacked")) found.push_back(*other);
    }
    return found;
  }

 private:
  template <class Function>
  Function* find(const char* name) const {
    for (void* const library : libraries_) {
      if (void* const function = dlsym(library, name)) return reinterpret_cast<Function*>(function);
    }
    throw std::runtime_error(std::string("ggml has no ") + name);
  }

  std::optional<Contender> contender(const Problem& p, void* buffer_type, const std::string& name) const {
    struct InitParams {
      std::size_t size;
      void* memory;
      bool no_alloc;
    };
    constexpr int kF32 = 0, kQ4 = 2, kQ8 = 8, kI32 = 26;
    const auto context = [&] { return find<void*(InitParams)>("ggml_init")({1 << 20, nullptr, true}); };
    const auto tensor = find<void*(void*, int, std::int64_t, std::int64_t, std::int64_t)>("ggml_new_tensor_3d");
    const auto allocate = find<void*(void*, void*)>("ggml_backend_alloc_ctx_tensors_from_buft");
    const auto set = find<void(void*, const void*, std::size_t, std::size_t)>("ggml_backend_tensor_set");
    void* const weights = context();
    void* const rest = context();
    void* const w = tensor(weights, p.four_bits() ? kQ4 : kQ8, p.k, p.n, p.experts);
    void* const memory = allocate(weights, buffer_type);
    if (!memory) return std::nullopt;
    void* const x = tensor(rest, kF32, p.k, 1, p.tokens);
    void* const ids =
        find<void*(void*, int, std::int64_t, std::int64_t)>("ggml_new_tensor_2d")(rest, kI32, p.slots, p.tokens);
    void* const y = find<void*(void*, void*, void*, void*)>("ggml_mul_mat_id")(rest, w, x, ids);
    allocate(rest, find<void*()>("ggml_backend_cpu_buffer_type")());
    if (!find<bool(void*, void*)>("ggml_backend_supports_op")(backend_, y)) {
      find<void(void*)>("ggml_backend_buffer_free")(memory);
      return std::nullopt;
    }
    // Blocks of 32 levels with an f16 scale: 0.01 here, any levels.
    const std::size_t block = p.four_bits() ? 18 : 34;
    std::vector<std::uint8_t> blocks(static_cast<std::size_t>(p.experts * p.n * p.k / 32) * block);
    std::mt19937_64 random(2);
    for (std::size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<std::uint8_t>(random());
    for (std::size_t i = 0; i < blocks.size(); i += block) blocks[i] = 0x1f, blocks[i + 1] = 0x21;
    set(w, blocks.data(), 0, blocks.size());
    set(x, p.x.data(), 0, p.x.size() * sizeof(float));
    set(ids, p.index.data(), 0, p.index.size() * sizeof(std::int32_t));
    void* const graph = find<void*(void*)>("ggml_new_graph")(rest);
    find<void(void*, void*)>("ggml_build_forward_expand")(graph, y);
    void* const plan = find<void*(void*, void*)>("ggml_backend_graph_plan_create")(backend_, graph);
    const auto compute = find<int(void*, void*)>("ggml_backend_graph_plan_compute");
    return Contender{name,
                     [compute, plan, backend = backend_] {
                       if (compute(backend, plan) != 0) throw std::runtime_error("ggml failed");
                     },
                     nullptr};
  }

  std::vector<void*> libraries_;
  void* backend_;
};

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void time_in_turns(const Problem& p, const std::vector<Contender>& all, double seconds) {
  constexpr std::size_t kRounds = 7;
  const double turn = seconds / static_cast<double>(kRounds * all.size());
  std::vector<std::vector<double>> times(all.size());
  for (std::size_t round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::size_t c = (i + round) % all.size();
      // The other contender's threads go to sleep, this one's wake up.
      auto start = std::chrono::steady_clock::now();
      do all[c].run();
      while (seconds_since(start) < turn / 4);
      start = std::chrono::steady_clock::now();
      int calls = 0;
      do all[c].run(), ++calls;
      while (seconds_since(start) < turn * 3 / 4);
      times[c].push_back(seconds_since(start) / calls);
    }
  }
  std::printf("%s %lldx%lld %lldx%lld threads %d tokens %6lld:", p.format.c_str(), static_cast<long long>(p.experts),
              static_cast<long long>(p.slots), static_cast<long long>(p.k), static_cast<long long>(p.n), p.threads,
              static_cast<long long>(p.tokens));
  for (std::size_t c = 0; c < all.size(); ++c) {
    std::printf("  %s %.0f", all[c].name.c_str(), median(times[c]) * 1e6);
    if (c == 0) continue;
    std::vector<double> ratios;
    for (std::size_t round = 0; round < kRounds; ++round) ratios.push_back(times[c][round] / times[0][round]);
    std::printf(" (%.2f)", median(ratios));
  }
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** words) {
  if (count < 9) {
    std::fprintf(stderr,
                 "octile_experts_bench FORMAT EXPERTS SLOTS K N THREADS SECONDS [FOLDER-OF-LIBGGML] TOKENS...\n");
    return 2;
  }
  const auto number = [&](int i) { return std::atoll(words[i]); };
  const bool with_ggml = number(8) == 0;
  for (int i = with_ggml ? 9 : 8; i < count; ++i) {
    const Problem p =
        problem(words[1], number(2), number(3), number(4), number(5), static_cast<int>(number(6)), number(i));
    const std::size_t one = LinearPlan::select(p.dense(1)).packed_weight_size();
    const Buffer packed = packed_weights(p, one);
    std::vector<Contender> all = {grouped(p, packed.get(), one), loop(p, packed.get(), one, false)};
    if (p.quantizes()) all.push_back(loop(p, packed.get(), one, true));
    for (const Contender& contender : all) contender.run();
    for (std::size_t c = 1; p.quantizes() && c < all.size(); ++c) {
      if (*all[c].y != *all[0].y) throw std::runtime_error(all[c].name + ": other bits");
    }
    if (with_ggml) {
      for (Contender& contender : Ggml(words[8], p.threads).contenders(p)) all.push_back(std::move(contender));
    }
    time_in_turns(p, all, std::atof(words[7]));
  }
  return 0;
}
