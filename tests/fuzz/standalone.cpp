// Runs a fuzz target without libFuzzer: on random inputs, or on the bytes of files.
//   NAME [--runs N] [--seconds S] [--seed S] [FILE...]
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "target.h"

// Sanitizers then end in SIGABRT too, whose handler saves the input.
extern "C" const char* __asan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1"; }
extern "C" const char* __tsan_default_options() { return "abort_on_error=1"; }

namespace {

// The current input, and the file that it is saved to when something aborts.
std::vector<std::uint8_t> current;
std::string failure_file;

void save_current(int) {
  std::FILE* const file = std::fopen(failure_file.c_str(), "wb");
  if (file != nullptr) {
    std::fwrite(current.data(), 1, current.size(), file);
    std::fclose(file);
    std::fprintf(stderr, "the input is in %s\n", failure_file.c_str());
  }
  std::_Exit(1);
}

std::uint64_t next_random(std::uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

void run_file(const char* name, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "%s: cannot read %s\n", name, path.c_str());
    std::exit(2);
  }
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
}

struct Options {
  std::uint64_t runs = 20000;
  double seconds = 0;  // instead of runs, if it is not 0
  std::uint64_t seed = 1;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string name = std::filesystem::path(argv[0]).filename().string();
  Options options;
  bool files = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const char* const value = i + 1 < argc ? argv[i + 1] : "0";
    if (argument == "--runs") {
      options.runs = std::strtoull(value, nullptr, 10), ++i;
    } else if (argument == "--seconds") {
      options.seconds = std::strtod(value, nullptr), ++i;
    } else if (argument == "--seed") {
      options.seed = std::strtoull(value, nullptr, 10), ++i;
    } else {
      run_file(name.c_str(), argument);
      files = true;
    }
  }
  if (files) return 0;

  failure_file = name + "_failure.bin";
  std::signal(SIGABRT, save_current);
  const auto begin = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  double slowest = 0;
  std::uint64_t done = 0;
  for (; options.seconds > 0 ? elapsed() < options.seconds : done < options.runs; ++done) {
    std::uint64_t state = (options.seed + done) * 0x9e3779b97f4a7c15u;
    for (int skip = 0; skip < 3; ++skip) next_random(state);
    current.resize(next_random(state) % 200 + 1);
    for (std::uint8_t& byte : current) byte = static_cast<std::uint8_t>(next_random(state) >> 24);
    const double start = elapsed();
    LLVMFuzzerTestOneInput(current.data(), current.size());
    slowest = std::max(slowest, elapsed() - start);
  }
  const std::string text = octile::fuzz::reached(done);
  std::printf("inputs %llu, %s, last seed %llu, slowest %.1f ms\n", static_cast<unsigned long long>(done), text.c_str(),
              static_cast<unsigned long long>(options.seed + done - 1), slowest * 1e3);
  return text.empty() ? 1 : 0;
}
