// A block of GPU threads on a CPU, for tests of the CUDA executor where there is no GPU. Each thread has its
// own context on one CPU thread and runs up to its next collective operation (barrier, shuffle, matrix product); then
// the next thread runs. A read before a write, or an overwrite before a read, therefore fails every time. Threads that
// disagree on the next collective are an error. Asynchronous copies complete as late as the waits allow, and shared
// memory starts as 0xA5.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "octile/tile/types.h"

namespace octile::tile::emulation {

using Word = std::uint32_t;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "emulated block: %s\n", what);
  std::abort();
}

// _longjmp() without the check of _FORTIFY_SOURCE, which takes a jump to another stack for an error.
#if defined(__GLIBC__)
extern "C" [[noreturn]] void octile_tile_jump(jmp_buf to, int value) noexcept __asm__("_longjmp");
#else
[[noreturn]] inline void octile_tile_jump(jmp_buf to, int value) { _longjmp(to, value); }
#endif

struct Block {
  struct Copy {
    void* to;
    const void* from;
  };
  // Where a thread is left. Its context starts it; swapcontext() would be a system call each time.
  struct Place {
    jmp_buf place;
  };
  [[gnu::noinline]] static void go(Place& from, Place& to) {
    if (_setjmp(from.place) == 0) octile_tile_jump(to.place, 1);
  }

  struct Thread {
    ucontext_t context;
    Place place;
    bool started = false;
    std::unique_ptr<char[]> stack;
    std::deque<std::vector<Copy>> groups;  // the last one is open
    int parity = 0;
    bool done = false;
  };
  struct Slot {
    const char* kind = nullptr;
    Word words[8] = {};
  };

  std::array<int, 3> index{}, count{};
  std::vector<Thread> threads;
  std::vector<Slot> slots[2];
  std::vector<unsigned char> memory;
  unsigned char* arena = nullptr;
  std::size_t arena_bytes;
  int current = 0;
  bool backwards;  // the last thread first
  Place scheduler;
  std::function<void()> body;

  static constexpr std::size_t kGuard = 8192;  // after the shared memory, unused

  static Block*& here() {
    static thread_local Block* block = nullptr;
    return block;
  }

  Block(int n, std::size_t bytes, bool reversed)
      : threads(static_cast<std::size_t>(n)),
        memory(bytes + 1024 + kGuard, 0xA5),
        arena_bytes(bytes),
        backwards(reversed) {
    slots[0].resize(threads.size());
    slots[1].resize(threads.size());
    arena = memory.data() + (1024 - reinterpret_cast<std::uintptr_t>(memory.data()) % 1024) % 1024;
  }

  static void enter() {
    Block& block = *here();
    block.body();
    Thread& thread = block.threads[static_cast<std::size_t>(block.current)];
    thread.done = true;
    go(thread.place, block.scheduler);
  }

  void run_block(std::array<int, 3> block_index, std::array<int, 3> block_count) {
    index = block_index;
    count = block_count;
    constexpr std::size_t kStack = 512 * 1024;
    memset(memory.data(), 0xA5, memory.size());
    Block* const outer = here();
    here() = this;
    for (Thread& thread : threads) {
      if (!thread.stack) thread.stack.reset(new char[kStack]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStack;
      thread.groups.assign(1, {});
      thread.parity = 0;
      thread.started = thread.done = false;
      makecontext(&thread.context, enter, 0);
    }
    const int n = static_cast<int>(threads.size());
    for (;;) {
      int running = 0;
      for (int i = 0; i < n; ++i) {
        current = backwards ? n - 1 - i : i;
        Thread& thread = threads[static_cast<std::size_t>(current)];
        if (thread.done) continue;
        resume(thread);
        running += !thread.done;
      }
      if (running == 0) break;
      if (running != n) fail("some threads have ended where others wait");
    }
    here() = outer;
    for (std::size_t i = arena_bytes; i < arena_bytes + kGuard; ++i) {
      if (arena[i] != 0xA5) fail("writes past its shared memory");
    }
  }

  [[gnu::noinline]] void resume(Thread& thread) {
    if (thread.started) return go(scheduler, thread.place);
    thread.started = true;
    if (_setjmp(scheduler.place) == 0) setcontext(&thread.context);
  }

  Thread& me() { return threads[static_cast<std::size_t>(current)]; }

  // Publishes `words`, waits for all threads, and returns what each of them has published.
  template <int n>
  const std::vector<Slot>& meet(const char* kind, const Word (&words)[n]) {
    Thread& thread = me();
    std::vector<Slot>& all = slots[thread.parity];
    thread.parity ^= 1;
    Slot& mine = all[static_cast<std::size_t>(current)];
    mine.kind = kind;
    for (int i = 0; i < n; ++i) mine.words[i] = words[i];
    go(thread.place, scheduler);
    for (const Slot& slot : all) {
      if (slot.kind != kind) fail("threads wait in different places");
    }
    return all;
  }
};

// Every block of a grid, one after the other; `thread` is what each thread does.
inline void run_grid(int threads, std::size_t shared, bool backwards, std::array<int, 3> count,
                     std::function<void()> thread) {
  Block block(threads, shared, backwards);
  block.body = std::move(thread);
  for (int z = 0; z < count[2]; ++z) {
    for (int y = 0; y < count[1]; ++y) {
      for (int x = 0; x < count[0]; ++x) block.run_block({x, y, z}, count);
    }
  }
}

inline int thread() { return Block::here()->current; }
inline int block_index(int axis) { return Block::here()->index[static_cast<std::size_t>(axis)]; }
inline int block_count(int axis) { return Block::here()->count[static_cast<std::size_t>(axis)]; }
inline unsigned char* arena() { return Block::here()->arena; }
inline void barrier() {
  static const char kKind[] = "barrier";
  Block::here()->meet(kKind, {0});
}
inline Word shuffle_xor(Word value, int mask) {
  static const char kKind[] = "shuffle";
  Block& block = *Block::here();
  const int from = block.current ^ mask;
  if (mask <= 0 || mask > 31) fail("a shuffle leaves its warp");
  return block.meet(kKind, {value})[static_cast<std::size_t>(from)].words[0];
}

inline bool all_lanes(bool value) {  // of the block: here no warp may go its own way
  static const char kKind[] = "vote";
  for (const Block::Slot& slot : Block::here()->meet(kKind, {Word{value}})) value = value && slot.words[0] != 0;
  return value;
}

inline void check_aligned(const void* p, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(p) % static_cast<unsigned>(bytes) != 0) fail("misaligned access");
}
inline void check_shared(const void* p, int bytes) {
  Block& block = *Block::here();
  const auto* const byte = static_cast<const unsigned char*>(p);
  if (byte < block.arena || byte + bytes > block.arena + block.arena_bytes) fail("outside of the shared memory");
  check_aligned(p, bytes);
}
inline Word shared_address(const void* p) {
  return static_cast<Word>(static_cast<const unsigned char*>(p) - Block::here()->arena);
}

inline void copy_async(void* to, const void* from) {
  check_shared(to, 16);
  check_aligned(from, 16);
  Block::here()->me().groups.back().push_back({to, from});
}
inline void commit_copies() { Block::here()->me().groups.emplace_back(); }
inline void wait_for_copies(int pending) {
  auto& groups = Block::here()->me().groups;
  while (static_cast<int>(groups.size()) - 1 > pending) {
    for (const Block::Copy& copy : groups.front()) memcpy(copy.to, copy.from, 16);
    groups.pop_front();
  }
}

template <bool kTransposed>
inline void load_matrices(Word (&m)[4], const void* row) {
  static const char kKind[] = "ldmatrix";
  check_shared(row, 16);
  Block& block = *Block::here();
  const auto& all = block.meet(kKind, {shared_address(row)});
  const int warp = block.current / 32 * 32, lane = block.current % 32;
  for (int i = 0; i < 4; ++i) {
    std::uint16_t pair[2];
    for (int h = 0; h < 2; ++h) {
      const int r = kTransposed ? 2 * (lane % 4) + h : lane / 4;
      const int c = kTransposed ? lane / 4 : 2 * (lane % 4) + h;
      memcpy(&pair[h], block.arena + all[static_cast<std::size_t>(warp + 8 * i + r)].words[0] + 2 * c, 2);
    }
    memcpy(&m[i], pair, 4);
  }
}

inline void store_matrices(const Word (&m)[4], void* row) {
  static const char kKind[] = "stmatrix";
  check_shared(row, 16);
  Block& block = *Block::here();
  const auto& all = block.meet(kKind, {shared_address(row)});
  const int warp = block.current / 32 * 32, lane = block.current % 32;
  for (int i = 0; i < 4; ++i) {
    const Word to = all[static_cast<std::size_t>(warp + 8 * i + lane / 4)].words[0];
    memcpy(block.arena + to + 4 * (lane % 4), &m[i], 4);
  }
}

inline Word transpose_matrix(Word word) {
  static const char kKind[] = "movmatrix";
  Block& block = *Block::here();
  const auto& all = block.meet(kKind, {word});
  const int warp = block.current / 32 * 32, lane = block.current % 32;
  std::uint16_t pair[2];
  for (int h = 0; h < 2; ++h) {
    const int row = 2 * (lane % 4) + h, column = lane / 4;
    const Word from = all[static_cast<std::size_t>(warp + 4 * row + column / 2)].words[0];
    pair[h] = static_cast<std::uint16_t>(from >> (16 * (column % 2)));
  }
  Word out;
  memcpy(&out, pair, 4);
  return out;
}

// Element (row, k) of a and (k, column) of b, as the manual of mma.sync places them: `kPack` elements a word.
template <class T, class C>
inline void multiply_matrices(C (&c)[4], const Word (&a)[4], const Word (&b)[2]) {
  static const char kKind[] = "mma";
  constexpr int kPack = 4 / static_cast<int>(sizeof(T));
  Block& block = *Block::here();
  const auto& all = block.meet(kKind, {a[0], a[1], a[2], a[3], b[0], b[1]});
  const int warp = block.current / 32 * 32, lane = block.current % 32;
  const auto element = [&](int from, int word, int i) {
    T values[kPack];
    memcpy(values, &all[static_cast<std::size_t>(warp + from)].words[word], 4);
    return widen(values[i]);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 8 * kPack; ++k) {
      const int half = k / (4 * kPack), within = k % (4 * kPack);
      const auto left = element(row % 8 * 4 + within / kPack, 2 * half + row / 8, within % kPack);
      const auto right = element(column * 4 + within / kPack, 4 + half, within % kPack);
      c[i] += left * right;
    }
  }
}

// ---- WGMMA, as the manual places its operands and its sums ----

// Element (row, term) of an operand that a descriptor names: 8 lines of a swizzle's bytes, and then its strides.
template <class T, bool kAlong>
inline auto matrix_element(std::uint64_t descriptor, int row, int term) {
  const auto kind = static_cast<int>(descriptor >> 62);
  const int line = kind == 1 ? 128 : kind == 2 ? 64 : kind == 3 ? 32 : 0;
  if (line == 0) fail("a descriptor without a swizzle");
  const auto start = static_cast<std::uint32_t>(descriptor & 0x3fff) * 16;
  const auto panel = static_cast<std::uint32_t>(descriptor >> 16 & 0x3fff) * 16;
  const auto eights = static_cast<std::uint32_t>(descriptor >> 32 & 0x3fff) * 16;
  const int size = static_cast<int>(sizeof(T));
  std::uint32_t at = start;
  if (kAlong) {
    at += static_cast<std::uint32_t>(row / 8) * eights + static_cast<std::uint32_t>(row % 8 * line + term * size);
  } else {
    if (size != 2 || line != 128) fail("only 16-bit operands may lie across, in lines of 128 bytes");
    at += static_cast<std::uint32_t>(row / 64) * panel + static_cast<std::uint32_t>(term / 8) * eights +
          static_cast<std::uint32_t>(term % 8 * line + row % 64 * size);
  }
  at ^= (at >> 7 & static_cast<std::uint32_t>(line / 16 - 1)) << 4;
  Block& block = *Block::here();
  check_shared(block.arena + at, size);
  T value;
  memcpy(static_cast<void*>(&value), block.arena + at, sizeof(T));
  return widen(value);
}

template <class T, class Left, class Right, class Sum>
inline void add_products(int n, Left left, Right right, Sum sum) {
  const int me = thread(), warp = me / 32 % 4, lane = me % 32;
  for (int i = 0; i < n / 2; ++i) {
    const int row = 16 * warp + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    for (int k = 0; k < 32 / static_cast<int>(sizeof(T)); ++k) sum(i) += left(row, k) * right(column, k);
  }
}

template <class T, bool kAlongA, bool kAlongB, int n, class Sum>
inline void wgmma(std::uint64_t a, std::uint64_t b, Sum sum) {
  static const char kKind[] = "wgmma";
  Block::here()->meet(kKind, {0});
  add_products<T>(
      n, [&](int row, int k) { return matrix_element<T, kAlongA>(a, row, k); },
      [&](int column, int k) { return matrix_element<T, kAlongB>(b, column, k); }, sum);
}

template <class T, bool kAlongB, int n, class Sum>
inline void wgmma(const Word (&a)[4], std::uint64_t b, Sum sum) {
  static const char kKind[] = "wgmma with registers";
  Block& block = *Block::here();
  const auto& all = block.meet(kKind, {a[0], a[1], a[2], a[3]});
  const int group = block.current / 128 * 128;
  const auto left = [&](int row, int k) {
    const int from = group + row / 16 * 32 + row % 8 * 4 + k % 8 / 2;
    T pair[2];
    memcpy(static_cast<void*>(pair), &all[static_cast<std::size_t>(from)].words[row / 8 % 2 + 2 * (k / 8)], 4);
    return widen(pair[k % 2]);
  };
  add_products<T>(
      n, left, [&](int column, int k) { return matrix_element<T, kAlongB>(b, column, k); }, sum);
}

}  // namespace octile::tile::emulation
