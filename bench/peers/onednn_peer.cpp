// oneDNN behind five C functions, for peers.py: Y = X * W^T with weights in the layout that oneDNN asks for. Compiled
// once for each oneDNN that the machine has, 2 or 3. Nothing is fused: int8 gives s32 sums, f32 gives f32.
//
//   op = peer_create("u8s8", {m, k, n}, x, w, y)   also "s8s8", "f32"; prepares matmul and inner product, keeps the
//   faster peer_run(op), peer_destroy(op)                 peer_kernel(op) names the implementation, peer_error() the
//   trouble
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "dnnl.hpp"

namespace {

using dnnl::memory;

constexpr int kTrialRuns = 5;

std::string error_text;

struct Sizes {
  std::int64_t m, k, n;
};

struct Operands {
  memory::data_type x_type, w_type, y_type;
  Sizes sizes;
  void* x;
  void* w;  // (n, k), row-major
  void* y;
};

struct Primitive {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  dnnl::primitive primitive;
  std::unordered_map<int, memory> arguments;
  std::string kernel;

  void run() {
    primitive.execute(stream, arguments);
    stream.wait();
  }
};

// The plain layout of the weight is the transpose that a matmul multiplies with; oneDNN reorders it once.
template <class Description>
void prepare(Primitive* p, const Description& chosen, const Operands& o, const memory::desc& plain_weight) {
  p->kernel = chosen.impl_info_str();
  p->primitive = dnnl::primitive(chosen);
  memory plain(plain_weight, p->engine, o.w);
  memory weight(chosen.weights_desc(), p->engine);
  dnnl::reorder(plain, weight).execute(p->stream, plain, weight);
  p->stream.wait();
  p->arguments = {{DNNL_ARG_SRC, memory(chosen.src_desc(), p->engine, o.x)},
                  {DNNL_ARG_WEIGHTS, weight},
                  {DNNL_ARG_DST, memory(chosen.dst_desc(), p->engine, o.y)}};
}

std::unique_ptr<Primitive> matmul(const Operands& o) {
  auto p = std::make_unique<Primitive>();
  const auto [m, k, n] = o.sizes;
  const memory::desc x({m, k}, o.x_type, memory::format_tag::ab);
  const memory::desc w({k, n}, o.w_type, memory::format_tag::any);
  const memory::desc y({m, n}, o.y_type, memory::format_tag::ab);
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::matmul::primitive_desc chosen(p->engine, x, w, y);
#else
  const dnnl::matmul::primitive_desc chosen(dnnl::matmul::desc(x, w, y), p->engine);
#endif
  prepare(p.get(), chosen, o, {{k, n}, o.w_type, memory::format_tag::ba});
  p->kernel = "matmul " + p->kernel;
  return p;
}

std::unique_ptr<Primitive> inner_product(const Operands& o) {
  auto p = std::make_unique<Primitive>();
  const auto [m, k, n] = o.sizes;
  const memory::desc x({m, k}, o.x_type, memory::format_tag::nc);
  const memory::desc w({n, k}, o.w_type, memory::format_tag::any);
  const memory::desc y({m, n}, o.y_type, memory::format_tag::nc);
#if DNNL_VERSION_MAJOR >= 3
  const dnnl::inner_product_forward::primitive_desc chosen(p->engine, dnnl::prop_kind::forward_inference, x, w, y);
#else
  const dnnl::inner_product_forward::desc description(dnnl::prop_kind::forward_inference, x, w, y);
  const dnnl::inner_product_forward::primitive_desc chosen(description, p->engine);
#endif
  prepare(p.get(), chosen, o, {{n, k}, o.w_type, memory::format_tag::ab});
  p->kernel = "inner_product " + p->kernel;
  return p;
}

double fastest(Primitive* p) {
  double best = 1e30;
  for (int i = 0; i < kTrialRuns; ++i) {
    const auto start = std::chrono::steady_clock::now();
    p->run();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return best;
}

Operands operands(const char* types, const Sizes& sizes) {
  const bool f32 = std::strcmp(types, "f32") == 0;
  Operands o = {};
  o.x_type = f32 ? memory::data_type::f32 : types[0] == 'u' ? memory::data_type::u8 : memory::data_type::s8;
  o.w_type = f32 ? memory::data_type::f32 : memory::data_type::s8;
  o.y_type = f32 ? memory::data_type::f32 : memory::data_type::s32;
  o.sizes = sizes;
  return o;
}

}  // namespace

extern "C" {

const char* peer_error() { return error_text.c_str(); }

const char* peer_version() {
  static const std::string text = [] {
    const dnnl_version_t* v = dnnl_version();
    return std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
  }();
  return text.c_str();
}

void* peer_create(const char* types, const std::int64_t* m_k_n, void* x, void* w, void* y) {
  Operands o = operands(types, {m_k_n[0], m_k_n[1], m_k_n[2]});
  o.x = x;
  o.w = w;
  o.y = y;
  std::unique_ptr<Primitive> best;
  double best_time = 0;
  for (auto* kind : {matmul, inner_product}) {
    try {
      std::unique_ptr<Primitive> p = kind(o);
      const double time = fastest(p.get());
      if (!best || time < best_time) {
        best = std::move(p);
        best_time = time;
      }
    } catch (const std::exception& error) {
      error_text = error.what();
    }
  }
  return best.release();
}

const char* peer_kernel(const void* op) { return static_cast<const Primitive*>(op)->kernel.c_str(); }

int peer_run(void* op) {
  try {
    static_cast<Primitive*>(op)->run();
    return 0;
  } catch (const std::exception& error) {
    error_text = error.what();
    return 1;
  }
}

void peer_destroy(void* op) { delete static_cast<Primitive*>(op); }
}
