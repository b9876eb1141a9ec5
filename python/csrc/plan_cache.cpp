#include "plan_cache.h"

#include <pthread.h>

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
constexpr std::size_t kKeyWords = 18;

enum class Kind : std::uint64_t { quantize = 1, dequantize, linear, backward, grouped, grouped_backward };

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
  std::shared_ptr<const Plan> find(const Key& key, const Make& make) {
    if (std::lock_guard lock(mutex_); auto found = take(key)) return found;
    // Without the lock: several threads may create plans at once, rarely the same one.
    octile_plan* handle = nullptr;
    if (make(&handle) != OCTILE_OK) fail("%s", octile_last_error());
    auto made = std::make_shared<const Plan>(handle);
    std::lock_guard lock(mutex_);
    if (auto found = take(key)) return found;
    ++made_;
    order_.push_front({key, made});
    places_[key] = order_.begin();
    if (order_.size() > kMaxPlans) {
      places_.erase(order_.back().key);
      order_.pop_back();
    }
    return made;
  }

  CacheCounts counts() {
    std::lock_guard lock(mutex_);
    return {order_.size(), made_};
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Entry {
    Key key;
    std::shared_ptr<const Plan> plan;
  };

  // NULL: there is none.
  std::shared_ptr<const Plan> take(const Key& key) {
    auto place = places_.find(key);
    if (place == places_.end()) return nullptr;
    order_.splice(order_.begin(), order_, place->second);
    return place->second->plan;
  }

  std::mutex mutex_;
  std::list<Entry> order_;  // most recently used first
  std::unordered_map<Key, std::list<Entry>::iterator, HashOfKey> places_;
  std::size_t made_ = 0;
};

Cache& cache() {
  // Never destroyed: a thread may run an op while the process ends.
  static Cache* const the_cache = [] {
    // A forked child, a worker of a DataLoader, must not wait for a thread of its parent.
    pthread_atfork([] { cache().lock(); }, [] { cache().unlock(); }, [] { cache().unlock(); });
    return new Cache;
  }();
  return *the_cache;
}

struct Slot {
  Key key;
  std::shared_ptr<const Plan> plan;
};

// By `create`, if there is none yet.
template <class Description>
std::shared_ptr<const Plan> find(Kind kind, const Description& description,
                                 octile_status (*create)(const Description*, octile_plan**)) {
  thread_local std::array<Slot, kThreadSlots> slots;
  const Key key = key_of(kind, description);
  Slot& slot = slots[key.hash % kThreadSlots];
  if (slot.plan == nullptr || !(slot.key == key)) {
    slot = {key, cache().find(key, [&](octile_plan** made) { return create(&description, made); })};
  }
  return slot.plan;
}

}  // namespace

std::shared_ptr<const Plan> find_plan(const octile_quantize_description& description) {
  return find(Kind::quantize, description, octile_quantize_plan_create);
}
std::shared_ptr<const Plan> find_dequantize_plan(const octile_quantize_description& description) {
  return find(Kind::dequantize, description, octile_dequantize_plan_create);
}
std::shared_ptr<const Plan> find_plan(const octile_linear_description& description) {
  return find(Kind::linear, description, octile_linear_plan_create);
}
std::shared_ptr<const Plan> find_plan(const octile_linear_backward_description& description) {
  return find(Kind::backward, description, octile_linear_backward_plan_create);
}
std::shared_ptr<const Plan> find_plan(const octile_grouped_linear_description& description) {
  return find(Kind::grouped, description, octile_grouped_linear_plan_create);
}
std::shared_ptr<const Plan> find_plan(const octile_grouped_linear_backward_description& description) {
  return find(Kind::grouped_backward, description, octile_grouped_linear_backward_plan_create);
}

CacheCounts cache_counts() { return cache().counts(); }

}  // namespace octile_torch
