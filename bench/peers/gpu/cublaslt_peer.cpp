// cuBLASLt behind a C interface: Y[m, n] = sum_k X[m, k] * W[n, k] in s32, nothing fused, as it has nothing to fuse
// there.
//
// X (M, K), W (N, K) and Y (M, N) are compact and row-major, which cuBLASLt, column-major, sees as Y^T = (W^T)^T * X^T:
// the one order in which it has int8 kernels for tensor cores.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kWorkspaceBytes = 64u << 20;
constexpr int kCandidates = 32;

thread_local std::string error;

bool ok(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return true;
  error = std::string(what) + ": " + cublasLtGetStatusString(status);
  return false;
}

struct Prepared {
  cublasLtHandle_t handle = nullptr;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  void* workspace = nullptr;
  std::vector<cublasLtMatmulHeuristicResult_t> candidates;
  const void *w_data = nullptr, *x_data = nullptr;
  void* y_data = nullptr;

  ~Prepared() {
    cudaFree(workspace);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatrixLayoutDestroy(w);
    cublasLtMatrixLayoutDestroy(x);
    cublasLtMatrixLayoutDestroy(y);
    cublasLtMatmulDescDestroy(product);
    cublasLtDestroy(handle);
  }
};

bool describe(Prepared& p, std::uint64_t m, std::uint64_t n, std::uint64_t k) {
  const cublasOperation_t transposed = CUBLAS_OP_T;
  const std::size_t bytes = kWorkspaceBytes;
  return ok(cublasLtCreate(&p.handle), "cublasLtCreate") &&
         ok(cublasLtMatmulDescCreate(&p.product, CUBLAS_COMPUTE_32I, CUDA_R_32I), "cublasLtMatmulDescCreate") &&
         ok(cublasLtMatmulDescSetAttribute(p.product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed),
            "CUBLASLT_MATMUL_DESC_TRANSA") &&
         ok(cublasLtMatrixLayoutCreate(&p.w, CUDA_R_8I, k, n, static_cast<std::int64_t>(k)), "layout of W") &&
         ok(cublasLtMatrixLayoutCreate(&p.x, CUDA_R_8I, k, m, static_cast<std::int64_t>(k)), "layout of X") &&
         ok(cublasLtMatrixLayoutCreate(&p.y, CUDA_R_32I, n, m, static_cast<std::int64_t>(n)), "layout of Y") &&
         ok(cublasLtMatmulPreferenceCreate(&p.preference), "cublasLtMatmulPreferenceCreate") &&
         ok(cublasLtMatmulPreferenceSetAttribute(p.preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes,
                                                 sizeof bytes),
            "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES");
}

bool ask(Prepared& p) {
  int found = 0;
  p.candidates.resize(kCandidates);
  if (!ok(cublasLtMatmulAlgoGetHeuristic(p.handle, p.product, p.w, p.x, p.y, p.y, p.preference, kCandidates,
                                         p.candidates.data(), &found),
          "cublasLtMatmulAlgoGetHeuristic")) {
    return false;
  }
  p.candidates.resize(static_cast<std::size_t>(found));
  std::erase_if(p.candidates, [](const auto& candidate) { return candidate.state != CUBLAS_STATUS_SUCCESS; });
  if (p.candidates.empty()) error = "no algorithm";
  return !p.candidates.empty();
}

}  // namespace

extern "C" {

struct Operands {
  std::int64_t m, n, k;
  const std::int8_t* x;
  const std::int8_t* w;
  std::int32_t* y;
};

const char* peer_error() { return error.c_str(); }

int peer_version() { return static_cast<int>(cublasLtGetVersion()); }

void* peer_create(const Operands* o) {
  auto* p = new Prepared;
  p->w_data = o->w, p->x_data = o->x, p->y_data = o->y;
  const auto size = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  if (describe(*p, size(o->m), size(o->n), size(o->k)) && ask(*p)) {
    if (cudaMalloc(&p->workspace, kWorkspaceBytes) == cudaSuccess) return p;
    error = "cudaMalloc failed";
  }
  delete p;
  return nullptr;
}

// The heuristic's proposals, best first.
int peer_candidates(void* prepared) { return static_cast<int>(static_cast<Prepared*>(prepared)->candidates.size()); }

int peer_run(void* prepared, int candidate, void* stream) {
  auto& p = *static_cast<Prepared*>(prepared);
  const std::int32_t one = 1, zero = 0;
  const auto& algorithm = p.candidates[static_cast<std::size_t>(candidate)].algo;
  return ok(cublasLtMatmul(p.handle, p.product, &one, p.w_data, p.w, p.x_data, p.x, &zero, p.y_data, p.y, p.y_data, p.y,
                           &algorithm, p.workspace, kWorkspaceBytes, static_cast<cudaStream_t>(stream)),
            "cublasLtMatmul")
             ? 0
             : 1;
}

void peer_destroy(void* prepared) { delete static_cast<Prepared*>(prepared); }
}
