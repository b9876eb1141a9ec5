// What this machine is: its processor, the instructions that matter to a quantized product, its caches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octile::cli {

struct Isa {
  std::string name;
  bool usable = false;  // the processor has it, and the operating system keeps its registers
};

struct Cache {
  std::string name;  // "L1d", "L2", "L3"
  std::int64_t bytes = 0;
};

struct Machine {
  std::string cpu;
  int threads = 1;            // that this process may use
  std::vector<Isa> isas;      // all that were requested, in order
  std::vector<Cache> caches;  // as the first core sees them; empty where the system does not tell

  std::int64_t last_cache_bytes() const;  // 0 if not known
};

Machine this_machine();

// Throws std::runtime_error where the verb's --device cuda finds no GPU.
void require_gpu(const std::string& verb);

}  // namespace octile::cli
