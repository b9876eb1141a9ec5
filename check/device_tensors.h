// The tensors of a case in the memory of a GPU, for one run of a plan there: copied in, with canaries around each and
// around the workspace, and copied back afterwards, inputs too.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <stdexcept>
#include <vector>

#include "check/gpu.h"
#include "check/tensors.h"

namespace octile::check {

class DeviceTensors {
 public:
  // own_allocations: every tensor and the workspace have an allocation of their own that ends where they end, so that
  // compute-sanitizer sees a read beyond it. Otherwise all share one, which is much faster.
  DeviceTensors(int index, bool own_allocations) : gpu_(index), own_allocations_(own_allocations) {}

  Device device() const { return gpu_.device(); }
  Stream stream() const { return gpu_.stream(); }

  // Gives the tensors and a workspace of that size their places. Views of the case before are void. A compact tensor
  // begins at a multiple of 256 bytes, another as far beyond one as its layout says. packed: of the weight, another
  // input.
  void place(Tensors& tensors, std::size_t workspace, std::span<std::byte> packed);
  // The same view of the copy.
  template <class Void>
  BasicTensor<Void> there(BasicTensor<Void> view) const {
    if (!view.present()) return view;
    view.data = address(view.data);
    return on(device(), view);
  }
  Workspace workspace() const { return {workspace_ + GuardedWorkspace::kGuard, workspace_size_}; }

  // Copies everything in, does the work, alone or as a graph, and copies everything back. Throws std::runtime_error
  // where a canary around an input or the workspace has changed; those of outputs come back with them.
  void run(const std::function<void()>& work, bool as_graph);
  // Whether the GPU still takes work: some errors of a kernel end that for the process.
  bool usable() const;

 private:
  struct Place {
    Tensors::Block block;
    std::size_t at;  // in the staging memory
    std::byte* there;
  };
  void place_in_one();
  void place_each();
  void stage();
  void unstage() const;
  void copy_in();
  void copy_back();
  std::byte* address(const void* host) const;

  Gpu gpu_;
  bool own_allocations_;
  std::vector<Place> places_;
  std::size_t staged_ = 0;          // bytes of the staging memory in use
  std::byte* workspace_ = nullptr;  // its first guard
  std::size_t workspace_size_ = 0;
  std::byte* tensors_ = nullptr;  // where the staging memory's copy begins

  GpuBytes memory_{nullptr, nullptr};
  std::size_t memory_size_ = 0;
  GpuBytes to_device_{nullptr, nullptr};  // the staging memory, and what comes back
  GpuBytes from_device_{nullptr, nullptr};
  std::size_t staging_size_ = 0;
  std::vector<GpuBytes> owned_;  // with own_allocations
};

}  // namespace octile::check
