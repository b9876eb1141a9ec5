#include "check/device_tensors.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/message.h"

namespace octile::check {

namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::size_t kGuard = GuardedWorkspace::kGuard;
constexpr std::size_t kMinBytes = std::size_t{64} << 20;  // of the one allocation, so that it need not grow often

std::size_t rounded_up(std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// Device memory: guard, workspace, guard | gap, tensor, gap, tensor, gap ...; the staging memory is the part behind |.
void DeviceTensors::place(Tensors& tensors, std::size_t workspace, std::span<std::byte> packed) {
  places_.clear();
  workspace_size_ = workspace;
  std::size_t at = kAlignment;
  std::vector<Tensors::Block> blocks = tensors.blocks();
  if (!packed.empty()) blocks.push_back({packed.data(), packed.size(), 0, kCanary});
  for (const Tensors::Block& block : blocks) {
    // The lead is part of the gap, so that what follows it is aligned.
    places_.push_back({block, at + kAlignment - block.lead, nullptr});
    at = rounded_up(places_.back().at + block.size) + kAlignment;
  }
  staged_ = at;
  if (staged_ > staging_size_) {
    staging_size_ = std::max(2 * staged_, kMinBytes);
    to_device_.reset();
    from_device_.reset();
    to_device_ = gpu_.allocate_on_host(staging_size_);
    from_device_ = gpu_.allocate_on_host(staging_size_ + 2 * kGuard);
  }
  own_allocations_ ? place_each() : place_in_one();
}

void DeviceTensors::place_in_one() {
  const std::size_t before = rounded_up(workspace_size_ + 2 * kGuard);
  if (before + staged_ > memory_size_) {
    memory_size_ = std::max(2 * (before + staged_), kMinBytes);
    memory_.reset();
    memory_ = gpu_.allocate(memory_size_);
  }
  workspace_ = memory_.get();
  tensors_ = memory_.get() + before;
  for (Place& place : places_) place.there = tensors_ + place.at;
}

void DeviceTensors::place_each() {
  owned_.clear();
  owned_.push_back(gpu_.allocate(workspace_size_ + 2 * kGuard));
  workspace_ = owned_.back().get();
  tensors_ = nullptr;
  for (Place& place : places_) {
    const std::size_t lead = place.block.lead == 0 ? 0 : kAlignment - place.block.lead;
    owned_.push_back(gpu_.allocate(lead + place.block.size));
    place.there = owned_.back().get() + lead;
  }
}

std::byte* DeviceTensors::address(const void* host) const {
  const auto* const data = static_cast<const std::byte*>(host);
  for (const Place& place : places_) {
    const Tensors::Block& block = place.block;
    if (data >= block.data && data < block.data + block.size) return place.there + (data - block.data);
  }
  return workspace_;  // of no elements
}

void DeviceTensors::stage() {
  std::size_t at = 0;
  for (const Place& place : places_) {
    std::fill(to_device_.get() + at, to_device_.get() + place.at, place.block.around);
    if (place.block.size > 0) std::memcpy(to_device_.get() + place.at, place.block.data, place.block.size);
    at = place.at + place.block.size;
  }
  std::fill(to_device_.get() + at, to_device_.get() + staged_, kCanary);
}

// Back into the tensors. The gaps between them must be as they were.
void DeviceTensors::unstage() const {
  std::size_t at = 0;
  const auto check_gap = [&](std::size_t end) {
    if (own_allocations_) return;
    const std::span was(to_device_.get() + at, end - at);
    const auto differs = std::mismatch(was.begin(), was.end(), from_device_.get() + at).first - was.begin();
    if (differs == was.end() - was.begin()) return;
    throw std::runtime_error(message("wrote outside of all tensors, ", differs, " bytes beyond the end of one"));
  };
  for (const Place& place : places_) {
    check_gap(place.at);
    if (place.block.size > 0) std::memcpy(place.block.data, from_device_.get() + place.at, place.block.size);
    at = place.at + place.block.size;
  }
  check_gap(staged_);
}

void DeviceTensors::copy_in() {
  gpu_.fill(workspace_, kCanary, workspace_size_ + 2 * kGuard);
  if (!own_allocations_) return gpu_.copy(tensors_, to_device_.get(), staged_);
  for (const Place& place : places_) gpu_.copy(place.there, to_device_.get() + place.at, place.block.size);
}

void DeviceTensors::copy_back() {
  if (own_allocations_) {
    for (const Place& place : places_) gpu_.copy(from_device_.get() + place.at, place.there, place.block.size);
  } else {
    gpu_.copy(from_device_.get(), tensors_, staged_);
  }
  std::byte* const guards = from_device_.get() + staging_size_;
  gpu_.copy(guards, workspace_, kGuard);
  gpu_.copy(guards + kGuard, workspace_ + kGuard + workspace_size_, kGuard);
  gpu_.wait();
  if (!all_canaries({guards, 2 * kGuard})) {
    throw std::runtime_error(message("wrote outside of its workspace of ", workspace_size_, " bytes"));
  }
}

bool DeviceTensors::usable() const {
  try {
    gpu_.wait();
    return true;
  } catch (const std::runtime_error&) {
    return false;
  }
}

void DeviceTensors::run(const std::function<void()>& work, bool as_graph) {
  stage();
  copy_in();
  as_graph ? gpu_.run_as_graph(work) : work();
  copy_back();
  unstage();
}

}  // namespace octile::check
