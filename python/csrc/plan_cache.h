// Plans by their description. Creating one takes longer than running it on a small layer.
#pragma once

#include <cstddef>
#include <memory>

#include "octile/octile.h"
#include "torch_tensor.h"

namespace octile_torch {

class Plan {
 public:
  explicit Plan(octile_plan* handle) : handle_(handle), workspace_size_(octile_plan_workspace_size(handle)) {}
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() { octile_plan_destroy(handle_); }

  const octile_plan* handle() const { return handle_; }
  std::size_t workspace_size() const { return workspace_size_; }

 private:
  octile_plan* handle_;
  std::size_t workspace_size_;
};

// The plan lives as long as the pointer, even if other threads evict it from the cache. The key is the kind and every
// byte of the description.
std::shared_ptr<const Plan> find_plan(const octile_quantize_description& description);
std::shared_ptr<const Plan> find_dequantize_plan(const octile_quantize_description& description);
std::shared_ptr<const Plan> find_plan(const octile_linear_description& description);
std::shared_ptr<const Plan> find_plan(const octile_linear_backward_description& description);
std::shared_ptr<const Plan> find_plan(const octile_grouped_linear_description& description);
std::shared_ptr<const Plan> find_plan(const octile_grouped_linear_backward_description& description);

// Plans in the cache now, and plans created so far.
struct CacheCounts {
  std::size_t held, made;
};
CacheCounts cache_counts();

}  // namespace octile_torch
