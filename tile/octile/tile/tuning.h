// Tuned launches without their types: what tile/autotune/store.cpp keeps, and how it measures.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace octile::tile {

struct Autotune {
  std::string name;                 // the kernel's, and whatever else its speed depends on, such as an element type
  std::vector<std::int64_t> sizes;  // tuned for sizes up to the next power of two
  // Where choices are kept. Empty: what OCTILE_TILE_TUNING names, or else the device's file in the user's cache folder.
  // "off": nowhere but in this process.
  std::string file = {};
};

struct ChoiceTime {
  std::string choice;   // "Warpgroups<2> 128 256 64 band=16 cluster=1"
  double seconds = 0;   // the median; 0: it cannot run
  std::string problem;  // why
};
struct TunedLaunch {
  std::string choice;
  double seconds = 0;             // when it was measured; 0: it was not
  std::vector<ChoiceTime> times;  // of all, if this launch measured them
};

namespace tuning {

struct Kept {
  std::string choice;
  double seconds = 0;
};
// "matmul 4096 4096 1024": the name, and the sizes' next powers of two. Throws std::invalid_argument for a bad name.
std::string key_of(const Autotune& autotune);
// The device's choice for a key. Throws std::runtime_error with what is wrong with the file.
std::optional<Kept> find(const std::string& file, const std::string& device, const std::string& key);
void keep(const std::string& file, const std::string& device, const std::string& key, const Kept& kept);
std::string cpu_device();  // "cpu AMD EPYC 9575F 64-Core Processor x 2"

// A choice, its type forgotten.
struct Candidate {
  std::string words;
  std::function<void()> run;
  std::function<double()> time;
};
// Runs the choice that is kept, or measures all of them, and keeps and runs the fastest.
TunedLaunch run(const Autotune& autotune, const std::string& device, bool may_measure,
                const std::vector<Candidate>& candidates);

}  // namespace tuning
}  // namespace octile::tile
