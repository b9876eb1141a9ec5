#include "cpu/support/processor.h"

#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace octile::cpu {

std::string trimmed(const std::string& text) {
  const auto first = text.find_first_not_of(" \t\n");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t\n") - first + 1);
}

namespace {

// The value of the first line of /proc/cpuinfo that begins with `key`; "" if there is none.
std::string cpuinfo(const std::string& key) {
  std::ifstream lines("/proc/cpuinfo");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(key) && line.find(':') != std::string::npos) return trimmed(line.substr(line.find(':') + 1));
  }
  return {};
}

#if defined(__x86_64__)

std::string brand() {
  constexpr unsigned kBrand = 0x80000002;
  std::array<unsigned, 12> words = {};
  for (unsigned i = 0; i < 3; ++i) {
    unsigned* w = words.data() + std::size_t{4} * i;
    __get_cpuid(kBrand + i, w, w + 1, w + 2, w + 3);
  }
  std::array<char, sizeof words + 1> text = {};
  std::memcpy(text.data(), words.data(), sizeof words);
  return text.data();
}

#else

std::string brand() { return {}; }

#endif

}  // namespace

std::string processor_name() {
  std::string name = trimmed(brand());
  if (name.empty()) name = cpuinfo("model name");
  if (name.empty() && !cpuinfo("CPU part").empty()) {
    name = "implementer " + cpuinfo("CPU implementer") + " part " + cpuinfo("CPU part");
  }
  return name.empty() ? "unknown" : name;
}

std::string processor_signature() {
#if defined(__x86_64__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return {};
  char text[16];
  std::snprintf(text, sizeof text, "%x", eax & 0x0fff3fff);  // without reserved bits
  return text;
#else
  return {};
#endif
}

}  // namespace octile::cpu
