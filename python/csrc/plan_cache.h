// Plans by their description. Making one takes longer than running it on a small layer.
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

// The plan stays alive as long as the pointer, whatever other threads make the cache forget. Descriptions of two
// kind, which is part of the key; all of their bytes count.
Error find_plan(const octile_quantize_description& description, std::shared_ptr<const Plan>* plan);
Error find_plan(const octile_linear_description& description, std::shared_ptr<const Plan>* plan);
Error find_plan(const octile_linear_backward_description& description, std::shared_ptr<const Plan>* plan);

// How many plans the cache holds, and how many were made.
struct CacheCounts {
  std::size_t held, made;
};
CacheCounts cache_counts();

}  // namespace octile_torch
