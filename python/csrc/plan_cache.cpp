#include "plan_cache.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>
#include <unordered_map>

namespace octile_torch {

namespace {

// A plan takes a few kilobytes.
constexpr std::size_t kMaxPlans = 1024;
// Per thread; a power of two. A model has few different layer shapes; a thread that holds all of them takes no lock.
constexpr std::size_t kThreadSlots = 64;
constexpr std::size_t kKeyWords = 15;

enum class Kind : std::uint64_t { quantize = 1, dequantize, linear, backward };

struct Key {
  std::array<std::uint64_t, kKeyWords> words = {};
  std::uint64_t hash = 0;

  bool operator==(const Key& other) const { return hash == other.hash && words == other.words; }
};

struct HashOfKey {
  std::size_t operator()(const Key& key) const { return key.hash; }
};

template <class Description>
Key key_of(Kind kind, const Description& description) {
  // No padding: every byte of a description is a field.
  static_assert(sizeof(Description) % 8 == 0 && sizeof(Description) / 8 < kKeyWords);
  Key key;
  key.words[0] = static_cast<std::uint64_t>(kind);
  std::memcpy(&key.words[1], &description, sizeof description);
  for (std::uint64_t word : key.words) {
    key.hash = (key.hash ^ word) * 0x9e3779b97f4a7c15;
    key.hash ^= key.hash >> 32;
  }
  return key;
}

// Evicts the least recently used plan.
class Cache {
 public:
  template <class Make>
  Error find(const Key& key, const Make& make, std::shared_ptr<const Plan>* plan) {
    if (std::lock_guard lock(mutex_); take(key, plan)) return nullptr;
    // Without the lock: several threads may create plans at once, rarely the same one.
    octile_plan* handle = nullptr;
    if (make(&handle) != OCTILE_OK) return octile_last_error();
    auto made = std::make_shared<const Plan>(handle);
    std::lock_guard lock(mutex_);
    if (take(key, plan)) return nullptr;
    ++made_;
    order_.push_front({key, made});
    places_[key] = order_.begin();
    if (order_.size() > kMaxPlans) {
      places_.erase(order_.back().key);
      order_.pop_back();
    }
    *plan = std::move(made);
    return nullptr;
  }

  CacheCounts counts() {
    std::lock_guard lock(mutex_);
    return {order_.size(), made_};
  }

 private:
  struct Entry {
    Key key;
    std::shared_ptr<const Plan> plan;
  };

  bool take(const Key& key, std::shared_ptr<const Plan>* plan) {
    auto place = places_.find(key);
    if (place == places_.end()) return false;
    order_.splice(order_.begin(), order_, place->second);
    *plan = place->second->plan;
    return true;
  }

  std::mutex mutex_;
  std::list<Entry> order_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, HashOfKey> places_;
  std::size_t made_ = 0;
};

Cache& cache() {
  // Never destroyed: a thread may run an op while the process ends.
  static Cache* const the_cache = new Cache;
  return *the_cache;
}

struct Slot {
  Key key;
  std::shared_ptr<const Plan> plan;
};

template <class Make>
Error find(const Key& key, const Make& make, std::shared_ptr<const Plan>* plan) {
  thread_local std::array<Slot, kThreadSlots> slots;
  Slot& slot = slots[key.hash % kThreadSlots];
  if (slot.plan == nullptr || !(slot.key == key)) {
    std::shared_ptr<const Plan> found;
    if (Error error = cache().find(key, make, &found)) return error;
    slot = {key, std::move(found)};
  }
  *plan = slot.plan;
  return nullptr;
}

}  // namespace

Error find_plan(const octile_quantize_description& description, std::shared_ptr<const Plan>* plan) {
  auto make = [&](octile_plan** made) { return octile_quantize_plan_create(&description, made); };
  return find(key_of(Kind::quantize, description), make, plan);
}

Error find_dequantize_plan(const octile_quantize_description& description, std::shared_ptr<const Plan>* plan) {
  auto make = [&](octile_plan** made) { return octile_dequantize_plan_create(&description, made); };
  return find(key_of(Kind::dequantize, description), make, plan);
}

Error find_plan(const octile_linear_description& description, std::shared_ptr<const Plan>* plan) {
  auto make = [&](octile_plan** made) { return octile_linear_plan_create(&description, made); };
  return find(key_of(Kind::linear, description), make, plan);
}

Error find_plan(const octile_linear_backward_description& description, std::shared_ptr<const Plan>* plan) {
  auto make = [&](octile_plan** made) { return octile_linear_backward_plan_create(&description, made); };
  return find(key_of(Kind::backward, description), make, plan);
}

CacheCounts cache_counts() { return cache().counts(); }

}  // namespace octile_torch
