// The tensors of one run, in memory of exactly their size, and what may be wrong with them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "base/access.h"
#include "bytes.h"
#include "check/operands.h"
#include "octile/octile.hpp"

namespace octile::fuzz {

inline constexpr std::int64_t kMaxBytes = 1 << 20;  // of one tensor or workspace

// ---- Views, in the order of the argument structures' fields ----

struct Operand : check::Operand {
  Tensor view = {};
  std::size_t block = 0;
  std::size_t offset = 0;  // of view.data in its block
};

using Operands = std::vector<Operand>;

// ---- Memory: each block exactly as large as what lies in it ----

struct Block {
  std::unique_ptr<std::uint8_t[]> bytes;
  std::size_t size = 0;
};

inline Block block_of(std::size_t size) { return {std::make_unique<std::uint8_t[]>(size), size}; }

inline Block copy_of(const Block& block) {
  Block copy = block_of(block.size);
  std::copy_n(block.bytes.get(), block.size, copy.bytes.get());
  return copy;
}

struct Memory {
  std::vector<Block> blocks;

  Memory copy() const {
    Memory other;
    for (const Block& block : blocks) other.blocks.push_back(copy_of(block));
    return other;
  }
  // Points the views at this memory; a view without backing stays null.
  void bind(Operands& operands) const {
    for (Operand& o : operands)
      o.view.data = o.block < blocks.size() ? blocks[o.block].bytes.get() + o.offset : nullptr;
  }
};

inline constexpr std::size_t kNoBlock = ~std::size_t{0};

// Bytes from the first element to the end of the last one; nothing if there are too many bytes or elements.
inline std::optional<std::size_t> extent(const Tensor& t) {
  if ((t.rank != 1 && t.rank != 2) || bits(t.dtype) == 0) return {};
  const __int128 rows = t.shape[0];
  const __int128 cols = t.rank == 2 ? t.shape[1] : 1;
  if (rows < 0 || cols < 0) return {};
  if (rows == 0 || cols == 0) return 0;
  const __int128 last_row = (rows - 1) * t.strides[0];
  const __int128 last_col = (cols - 1) * (t.rank == 2 ? t.strides[1] : 0);
  const __int128 max = kMaxBytes;
  if (last_row < 0 || last_col < 0 || last_row > max || last_col > max || rows * cols > max) return {};
  return static_cast<std::size_t>((last_row * bits(t.dtype) + 7) / 8 + ((last_col + 1) * bits(t.dtype) + 7) / 8);
}

inline std::size_t element_bytes(DType dtype) { return static_cast<std::size_t>(std::max(1, bits(dtype) / 8)); }

// Calls visit(offset of the first byte from view.data) for each element, which has element_bytes(dtype) bytes.
template <class Visit>
void for_each_element(const Tensor& t, const Visit& visit) {
  if ((t.rank != 1 && t.rank != 2) || (t.rank == 2 && t.shape[1] == 0)) return;
  for (std::int64_t r = 0; r < t.shape[0]; ++r) {
    for (std::int64_t c = 0; c < (t.rank == 2 ? t.shape[1] : 1); ++c) {
      const std::int64_t i = r * t.strides[0] + (t.rank == 2 ? c * t.strides[1] : 0);
      visit(static_cast<std::size_t>(t.dtype == DType::s4 ? i / 2 : i * bits(t.dtype) / 8));
    }
  }
}

inline double random_real(Bytes& in, int mode) {
  const std::uint64_t bits = in.random();
  const double uniform = static_cast<double>(bits >> 11) * 0x1p-52 - 1;  // -1..1
  switch (mode) {
    case 0:
      return uniform * 4;
    case 1:
      return std::ldexp(uniform, static_cast<int>(bits & 63) - 32);
    case 2:
      return std::floor(uniform * 200) + 0.5;  // ties
    case 3:
      return 0;
    default:
      break;
  }
  if (bits % 8 != 0) return uniform * 4;
  constexpr double kSpecial[] = {-0.0,          1e-45, 6e-8,   65504,    65520,     3.4028235e38,
                                 -3.4028235e38, 1e308, 1e-310, HUGE_VAL, -HUGE_VAL, NAN};
  return kSpecial[in.random() % std::size(kSpecial)];
}

inline double random_scale(Bytes& in, bool wild) {
  if (wild && in.random() % 4 == 0) {
    constexpr double kWild[] = {0, -1, -0.0, HUGE_VAL, NAN};
    return kWild[in.random() % std::size(kWild)];
  }
  return std::ldexp(1 + static_cast<double>(in.random() & 0xffffff) * 0x1p-24, static_cast<int>(in.random() % 24) - 16);
}

// One element of any type, copied into aligned memory: operands may begin at any byte.
struct Element {
  explicit Element(DType dtype) : view{bytes, dtype, {}, 1, {1, 0}, {1, 0}} {}
  std::size_t size() const { return static_cast<std::size_t>(bits(view.dtype) / 8); }

  alignas(8) std::uint8_t bytes[8] = {};
  Tensor view;
};

inline void put_real(std::uint8_t* at, DType dtype, double value) {
  // A double beyond f32's range becomes an infinity first; the cast alone would be undefined.
  const bool beyond = dtype != DType::f64 && std::abs(value) > std::numeric_limits<float>::max();
  Element element(dtype);
  store(element.view, 0, 0, beyond ? std::copysign(HUGE_VAL, value) : value);
  std::memcpy(at, element.bytes, element.size());
}

inline void fill(const Operand& o, Bytes& in, bool wild) {
  auto* const data = static_cast<std::uint8_t*>(o.view.data);
  const int mode = in.below(5);
  std::size_t next = 0;
  for_each_element(o.view, [&](std::size_t at) {
    std::uint8_t* const element = data + at;
    if (next < o.values.size() && o.view.dtype == DType::s32 && !(wild && in.random() % 8 == 0)) {
      std::memcpy(element, &o.values[next++], sizeof(std::int32_t));
    } else if (o.content == check::Content::zero_point && o.view.dtype == DType::s32) {
      const auto span = static_cast<std::uint64_t>(std::max(o.range[1] - o.range[0], 0)) + 1;
      const std::int32_t value = wild && in.random() % 4 == 0
                                     ? static_cast<std::int32_t>(in.random())
                                     : o.range[0] + static_cast<std::int32_t>(in.random() % span);
      std::memcpy(element, &value, sizeof value);
    } else if (is_float(o.view.dtype)) {
      const bool scale = o.content == check::Content::scale || o.content == check::Content::given_scale;
      put_real(element, o.view.dtype, scale ? random_scale(in, wild) : random_real(in, mode));
    } else {
      for (std::size_t i = 0; i < element_bytes(o.view.dtype); ++i) element[i] = static_cast<std::uint8_t>(in.random());
    }
  });
}

// ---- What may be wrong with the arguments ----

struct Mistakes {
  bool any = false;          // an operand does not match the description
  bool wild_values = false;  // scales or zero points that may be refused
  bool short_workspace = false;
  bool null_workspace = false;
};

// Legal variety: padded rows, strided vectors, repeated inputs.
inline void vary_layout(Operand& o, Bytes& in) {
  const std::uint8_t b = in.byte();
  Tensor& t = o.view;
  if (!t.present() || b < 128) return;
  if (b >= 240 && !o.output) {
    t.strides[0] = 0;
  } else if (t.rank == 2) {
    t.strides[0] += t.dtype == DType::s4 ? b % 8 / 2 * 2 : b % 8;
  } else {
    t.strides[0] = 1 + b % 4;
  }
}

// A wild size plus a little may overflow the type.
inline std::int64_t wrapping_sum(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}

inline void spoil(Operand& o, Bytes& in) {
  Tensor& t = o.view;
  const std::size_t axis = in.byte() % 2;
  switch (in.below(7)) {
    case 0:
      t.rank = in.pick<int>({0, 1, 2, 3, -1, 1 << 30});
      break;
    case 1:
      t.shape[axis] = in.size();
      break;
    case 2:
      t.shape[axis] = wrapping_sum(t.shape[axis], in.below(3) - 1);
      break;
    case 3:
      t.strides[axis] = in.size();
      break;
    case 4:
      t.strides[axis] = wrapping_sum(t.strides[axis], in.below(5) - 2);
      break;
    case 5:
      t.dtype = in.choice<DType>(9);
      break;
    case 6:
      t.device = {static_cast<DeviceType>(in.below(3)), in.below(4) - 1};
      break;
  }
}

// Memory of exactly each view's size. A large view gets none: it stays null and must be refused.
inline Memory allocate(Operands& operands, Bytes& in, Mistakes& mistakes) {
  Memory memory;
  for (Operand& o : operands) {
    o.block = kNoBlock;
    const std::optional<std::size_t> size = extent(o.view);
    if (!size || *size > kMaxBytes) {
      if (o.view.present()) mistakes.any = true;
      continue;
    }
    o.block = memory.blocks.size();
    o.offset = in.byte() % 4 * element_bytes(o.view.dtype);
    memory.blocks.push_back(block_of(o.offset + *size));
  }
  if (!in.rarely(12)) return memory;

  mistakes.any = true;
  Operand& o = operands[in.byte() % operands.size()];
  const Operand& other = operands[in.byte() % operands.size()];
  const int what = in.below(3);
  if (o.block == kNoBlock) return memory;
  if (what == 0) {
    o.block = kNoBlock;    // null
  } else if (what == 1) {  // misaligned, where an element has more than one byte
    memory.blocks[o.block] = block_of(memory.blocks[o.block].size + 1);
    o.offset += 1;
  } else if (other.block != kNoBlock) {  // on top of another
    const std::size_t offset = other.offset + in.byte() % 16 * element_bytes(o.view.dtype);
    const std::size_t needed = offset + *extent(o.view);
    Block& shared = memory.blocks[other.block];
    if (needed > shared.size) shared = block_of(needed);
    o.block = other.block;
    o.offset = offset;
  }
  return memory;
}

// What the headers forbid, decided here independently, one tensor at a time. Wrong shapes are not included: with
// other rows in each tensor the run may be legal again.
inline bool forbidden(const Operand& o, const Tensor& wanted) {
  const Tensor& t = o.view;
  if (!wanted.present() || (o.optional && !t.present())) return false;
  if (t.rank != wanted.rank || t.dtype != wanted.dtype || t.device != wanted.device) return true;
  const std::int64_t rows = t.shape[0];
  const std::int64_t cols = t.rank == 2 ? t.shape[1] : 1;
  if (rows < 0 || cols < 0) return true;
  if (rows == 0 || cols == 0) return false;
  if (t.data == nullptr || reinterpret_cast<std::uintptr_t>(t.data) % element_bytes(t.dtype) != 0) return true;
  if (t.strides[0] < 0 || (cols > 1 && t.strides[1] != 1)) return true;
  const bool repeated = t.strides[0] == 0 && !o.output;
  return rows > 1 && ((t.strides[0] < cols && !repeated) || (t.dtype == DType::s4 && t.strides[0] % 2 != 0));
}

// Whether an output shares a byte with another tensor.
inline bool overlapping(const Operands& operands, const Memory& memory) {
  constexpr int kNobody = -1;
  std::vector<std::vector<int>> writer(memory.blocks.size());
  for (std::size_t b = 0; b < writer.size(); ++b) writer[b].assign(memory.blocks[b].size, kNobody);
  const auto for_each_byte = [&](const Operand& o, const auto& visit) {
    if (o.block == kNoBlock) return;
    for_each_element(o.view, [&](std::size_t at) {
      for (std::size_t i = 0; i < element_bytes(o.view.dtype); ++i) visit(writer[o.block][o.offset + at + i]);
    });
  };
  bool shared = false;
  for (std::size_t index = 0; index < operands.size(); ++index) {
    if (!operands[index].output) continue;
    for_each_byte(operands[index], [&](int& owner) {
      shared = shared || (owner != kNobody && owner != static_cast<int>(index));
      owner = static_cast<int>(index);
    });
  }
  for (const Operand& o : operands) {
    if (!o.output) for_each_byte(o, [&](const int& owner) { shared = shared || owner != kNobody; });
  }
  return shared;
}

}  // namespace octile::fuzz
