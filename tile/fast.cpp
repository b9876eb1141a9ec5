#include "octile/tile/fast.h"

#include <exception>
#include <thread>
#include <vector>

namespace octile::tile {

void parallel_ranges(int threads, std::int64_t n, void (*body)(const void*, std::int64_t, std::int64_t),
                     const void* context) {
  if (n == 0) return;
  if (threads <= 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  if (threads > n) threads = static_cast<int>(n);
  if (threads <= 1) return body(context, 0, n);
  const std::int64_t part = n / (threads * std::int64_t{16}) + 1;  // small enough to even out, large enough to be cheap
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr failure;  // the first one
  const auto work = [&] {
    try {
      for (std::int64_t first; !failed && (first = next.fetch_add(part)) < n;) {
        body(context, first, first + part < n ? first + part : n);
      }
    } catch (...) {
      if (!failed.exchange(true)) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work);
    work();
  }  // which joins them
  if (failure) std::rethrow_exception(failure);
}

}  // namespace octile::tile
