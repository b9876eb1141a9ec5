// The file of measured choices.
//
//   octile tile tuning 1
//   device cuda NVIDIA H200
//   0.000214 matmul 4096 4096 4096 : Warpgroups<2,Warps<4,2,2,1>> band=16 cluster=1 128 256 64
//   end 1
#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/output.h"
#include "base/tuning_file.h"
#include "octile/tile/tuning.h"

namespace octile::tile::tuning {

namespace {

namespace fs = std::filesystem;
using base::in_quotes;

constexpr std::string_view kTitle = "octile tile tuning 1";
using Choices = std::map<std::string, Kept>;  // by key

[[noreturn]] void refuse(const fs::path& path, const std::string& why) {
  throw std::runtime_error("octile: the tuning file " + path.string() + " " + why +
                           "; remove it, or name another one in OCTILE_TILE_TUNING");
}

Choices read(const fs::path& path, const std::string& device) {
  const std::optional<std::string> text = base::tuning_text(path, [&](const std::string& why) { refuse(path, why); });
  if (!text) return {};
  std::string_view rest = *text;
  int number = 0;
  const auto line = [&] {
    const std::size_t end = rest.find('\n');
    if (end == std::string_view::npos) refuse(path, number == 0 ? "has no line" : "is cut off: it has no \"end\"");
    const std::string_view found = rest.substr(0, end);
    rest.remove_prefix(end + 1);
    ++number;
    return found;
  };
  const auto bad = [&](std::string_view found) {
    refuse(path, "has in line " + std::to_string(number) + " " + in_quotes(found) + ", which is not a choice");
  };
  if (const auto first = line(); first != kTitle) {
    refuse(path, "is none: its first line is " + in_quotes(first) + ", not \"" + std::string(kTitle) + '"');
  }
  if (const auto there = line(); there != "device " + device) {
    refuse(path, "has the line " + in_quotes(there) + ", and this is " + in_quotes(device));
  }
  Choices choices;
  for (;;) {
    const std::string_view found = line();
    if (found.starts_with("end ")) {
      if (found.substr(4) != std::to_string(choices.size())) {
        refuse(path, "has " + in_quotes(found) + " after " + std::to_string(choices.size()) + " choices");
      }
      break;
    }
    double seconds = 0;
    const auto [end, error] = std::from_chars(found.data(), found.data() + found.size(), seconds);
    const std::size_t colon = found.find(" : ");
    const auto start = static_cast<std::size_t>(end - found.data()) + 1;
    if (error != std::errc{} || !(seconds > 0) || !std::isfinite(seconds) || colon == std::string_view::npos ||
        start >= colon || *end != ' ') {
      bad(found);
    }
    const std::string key(found.substr(start, colon - start)), choice(found.substr(colon + 3));
    if (choice.empty() || !choices.emplace(key, Kept{choice, seconds}).second) bad(found);
  }
  if (!rest.empty()) refuse(path, "goes on after its end");
  return choices;
}

std::string text_of(const Choices& choices, const std::string& device) {
  std::string text = std::string(kTitle) + "\ndevice " + device + "\n";
  for (const auto& [key, kept] : choices) {
    char digits[32];
    char* const end = std::to_chars(digits, digits + sizeof digits, kept.seconds, std::chars_format::general, 6).ptr;
    text.append(std::string(digits, end) + " " + key + " : " + kept.choice + "\n");
  }
  return text + "end " + std::to_string(choices.size()) + "\n";
}

// Empty: only in this process.
fs::path path_of(const std::string& file, const std::string& device) {
  const char* const variable = std::getenv("OCTILE_TILE_TUNING");
  const std::string named = file.empty() && variable ? variable : file;
  if (named == "off") return {};
  return named.empty() ? base::tuning_path("tile-", device, ".tuning") : fs::path(named);
}

// What this process has read and measured, by path and device.
struct State {
  std::mutex mutex;
  std::map<std::pair<std::string, std::string>, Choices> known;
};
State& state() {
  static State& all = *new State;  // threads may outlive main's statics
  return all;
}

std::string in_words(const std::vector<ChoiceTime>& times) {
  std::string words;
  for (const ChoiceTime& one : times) words += "\n  " + one.choice + ": " + one.problem;
  return words;
}

}  // namespace

std::string key_of(const Autotune& autotune) {
  const bool plain = std::all_of(autotune.name.begin(), autotune.name.end(),
                                 [](unsigned char byte) { return byte > 0x20 && byte < 0x7f && byte != ':'; });
  if (!plain || autotune.name.empty() || autotune.name.size() > 200) {
    throw std::invalid_argument("octile: the name of a tuned kernel is 1 to 200 letters, digits and signs, not " +
                                in_quotes(autotune.name));
  }
  std::string key = autotune.name;
  for (const std::int64_t size : autotune.sizes) {
    if (size < 0 || size > std::int64_t{1} << 62) {
      throw std::invalid_argument("octile: a kernel is tuned for sizes from 0 to 2^62, not " + std::to_string(size));
    }
    key += ' ' + std::to_string(std::bit_ceil(static_cast<std::uint64_t>(size)));
  }
  return key;
}

std::string cpu_device() {
  static const std::string device = [] {
    std::ifstream info("/proc/cpuinfo");
    std::string line, name = "of unknown name";
    while (std::getline(info, line)) {
      if (!line.starts_with("model name")) continue;
      name = line.substr(std::min(line.size(), line.find(':') + 2));
      break;
    }
    return "cpu " + name + " x " + std::to_string(std::thread::hardware_concurrency());
  }();
  return device;
}

std::optional<Kept> find(const std::string& file, const std::string& device, const std::string& key) {
  const fs::path path = path_of(file, device);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const auto [at, is_new] = s.known.try_emplace({path.string(), device});
  if (is_new && !path.empty()) {
    try {
      at->second = read(path, device);
    } catch (...) {
      s.known.erase(at);  // the file may be mended
      throw;
    }
  }
  const auto found = at->second.find(key);
  if (found == at->second.end()) return std::nullopt;
  return found->second;
}

void keep(const std::string& file, const std::string& device, const std::string& key, const Kept& kept) {
  const fs::path path = path_of(file, device);
  State& s = state();
  const std::lock_guard lock(s.mutex);
  Choices& known = s.known[{path.string(), device}];
  known[key] = kept;
  if (path.empty()) return;
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  fs::create_directories(folder);
  const base::FolderLock lock_of_files(folder);
  Choices all = read(path, device);  // other processes have added theirs
  all[key] = kept;
  base::write_file(path, text_of(all, device));
  known = std::move(all);
}

TunedLaunch run(const Autotune& autotune, const std::string& device, bool may_measure,
                const std::vector<Candidate>& candidates) {
  const std::string key = key_of(autotune);
  if (const std::optional<Kept> kept = find(autotune.file, device, key)) {
    for (const Candidate& one : candidates) {
      if (one.words != kept->choice) continue;
      one.run();
      return {kept->choice, kept->seconds, {}};
    }
  }
  if (!may_measure) {
    candidates.front().run();
    return {candidates.front().words, 0, {}};
  }

  constexpr int kRounds = 7;  // in turns, after one that is not counted
  TunedLaunch result;
  std::vector<std::vector<double>> times(candidates.size());
  for (const Candidate& one : candidates) result.times.push_back({one.words, 0, {}});
  for (int round = 0; round <= kRounds; ++round) {
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      if (!result.times[i].problem.empty()) continue;
      try {
        const double seconds = candidates[i].time();
        if (round > 0) times[i].push_back(seconds);
      } catch (const std::exception& error) {
        result.times[i].problem = error.what();
      }
    }
  }
  std::size_t best = candidates.size();
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (!result.times[i].problem.empty()) continue;
    std::sort(times[i].begin(), times[i].end());
    result.times[i].seconds = std::max(times[i][kRounds / 2], 1e-9);
    if (best == candidates.size() || result.times[i].seconds < result.times[best].seconds) best = i;
  }
  if (best == candidates.size()) {
    throw std::runtime_error("octile: no choice for " + key + " can run:" + in_words(result.times));
  }
  result.choice = result.times[best].choice;
  result.seconds = result.times[best].seconds;
  keep(autotune.file, device, key, {result.choice, result.seconds});
  candidates[best].run();
  return result;
}

}  // namespace octile::tile::tuning
