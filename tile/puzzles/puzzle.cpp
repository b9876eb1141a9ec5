#include "puzzles/puzzle.h"

#include <algorithm>
#include <limits>

#include "puzzles/trial.h"

namespace octile::tile::puzzles {

std::uint64_t Trial::next() {  // splitmix64
  if (drawn_++ == 0) {
    for (const int n : outcome.the_case.sizes) state_ = state_ * 31 + static_cast<std::uint64_t>(n) + 1;
  }
  std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

float Trial::next_float(Values values, Place place) {
  constexpr std::int64_t kBlock = 32;
  constexpr float kOdd[] = {1, 3, 5, 7};  // times 253 halves, exact in f16
  const std::uint64_t bits = next();
  const float uniform = static_cast<float>(bits >> 40) * 0x1p-24f;  // [0, 1)
  // exp(95) overflows f32 too, but exp(-95) is not far below its smallest number.
  const float level = (place.line % 2 == 0 ? 200.0f : 95.0f) * static_cast<float>(place.at / kBlock);
  const std::int64_t special[] = {0, place.length - 1, place.length / 2};
  switch (values) {
    case Values::negative:
      return uniform * -0.5f - 0x1p-10f;
    case Values::large:
      return (uniform - 0.5f) * 320.0f;
    case Values::zero:
      return 0.0f;
    case Values::tied: {
      const int halves = (bits & 7u) == 0 ? 254 : static_cast<int>((bits >> 8) % 509) - 254;
      return static_cast<float>(halves) * 0.5f * kOdd[place.line % 4];
    }
    case Values::low:
      return place.line % 2 == 0 ? uniform * 40.0f - 320.0f : uniform * 1000.0f - 4000.0f;
    case Values::rising:
      return uniform - 0.5f + level;
    case Values::falling:
      return uniform - 0.5f - level;
    case Values::apart:
      return uniform - 0.5f - (place.line % 2 == 0 ? 0.0f : 200.0f);
    case Values::tiny:
      return static_cast<float>(static_cast<int>(bits % 41) - 20) * 0x1p-24f;
    case Values::nan:
    case Values::infinite:
      if (place.line % 2 == 0 || place.at != special[place.line / 2 % 3]) break;
      if (values == Values::nan) return std::numeric_limits<float>::quiet_NaN();
      return (place.line / 2 % 2 == 0 ? 1.0f : -1.0f) * std::numeric_limits<float>::infinity();
    case Values::mixed:
      break;
  }
  return (bits & 15u) == 0 ? 0.0f : uniform - 0.5f;
}

float Trial::next_scale() { return static_cast<float>((next() >> 40) + (1u << 24)) * 0x1p-32f; }

std::int32_t Trial::next_integer() { return static_cast<std::int32_t>(static_cast<std::uint32_t>(next() >> 32)); }
s8 Trial::next_byte() { return static_cast<s8>(static_cast<int>(next() % 255) - 127); }

namespace {

// The last launch that stored to the element, and the record in it.
void find_writer(const std::vector<Report>& reports, Mismatch& mismatch) {
  for (std::size_t launch = reports.size(); launch-- > 0 && mismatch.record < 0;) {
    const std::vector<TensorUse>& tensors = reports[launch].tensors;
    for (std::size_t i = 0; i < tensors.size() && mismatch.record < 0; ++i) {
      if (tensors[i].name != mismatch.tensor) continue;
      mismatch.record = last_store(reports[launch], static_cast<int>(i), mismatch.index);
      mismatch.launch = mismatch.record < 0 ? -1 : static_cast<int>(launch);
    }
  }
}

// The first store to an input.
void find_stores_to_inputs(Outcome& outcome) {
  for (const std::string& input : outcome.inputs) {
    for (std::size_t launch = 0; launch < outcome.reports.size(); ++launch) {
      const Report& report = outcome.reports[launch];
      const auto stores = [&](const Record& record) {
        const Site& site = report.sites[static_cast<std::size_t>(record.site)];
        return site.access != Access::load && report.tensors[static_cast<std::size_t>(site.tensor)].name == input;
      };
      const auto first = std::find_if(report.records.begin(), report.records.end(), stores);
      if (first == report.records.end()) continue;
      Mismatch& mismatch = outcome.mismatches.emplace_back();
      mismatch.input = true;
      mismatch.tensor = input;
      mismatch.index = first->base;
      mismatch.launch = static_cast<int>(launch);
      mismatch.record = static_cast<int>(first - report.records.begin());
      for (const TensorUse& use : report.tensors) {
        if (use.name != input) continue;
        mismatch.count = use.elements_written;
        mismatch.size = use.size;
      }
      break;
    }
  }
}

}  // namespace

void read_reports(Outcome& outcome) {
  for (Mismatch& mismatch : outcome.mismatches) find_writer(outcome.reports, mismatch);
  find_stores_to_inputs(outcome);
}

constexpr std::int64_t kSector = 32;  // bytes

Score score(const Outcome& outcome) {
  Score result;
  result.min_bytes = outcome.min_bytes;
  for (const Report& report : outcome.reports) {
    std::vector<std::int64_t> loaded(report.tensors.size());
    for (const Site& site : report.sites) {
      if (site.access == Access::load) loaded[static_cast<std::size_t>(site.tensor)] += site.bytes;
      result.moved_bytes += site.bytes;
      result.sector_bytes += kSector * site.request_sectors;
      result.used_bytes += site.request_bytes;
      result.lanes += site.lanes;
      result.active += site.active;
    }
    for (std::size_t i = 0; i < loaded.size(); ++i) {
      const TensorUse& use = report.tensors[i];
      if (loaded[i] != 0) result.reuse.push_back({use.name, loaded[i], use.elements_read * use.element_bytes});
    }
  }
  return result;
}

Verdict judge(const std::vector<Case>& cases, const Try& a_try) {
  constexpr int kThreads[] = {1, 2, 5};
  Verdict verdict;
  std::vector<Case> all = cases;
  if (a_try.prove) {
    verdict.proof = a_try.prove();
    if (verdict.proof->refuted) all.push_back(*verdict.proof->refuted);
  }
  for (const Case& a_case : all) {
    const bool of_the_proof = &a_case == &all.back() && verdict.proof && verdict.proof->refuted;
    if (!a_case.stated && !a_try.hidden && !of_the_proof) continue;
    const Outcome outcome = a_try.checked(a_case);
    ++verdict.cases;
    verdict.hidden += a_case.stated ? 0 : 1;
    const bool good = outcome.right() && outcome.clean();
    if (a_case.stated && !outcome.reports.empty()) verdict.stated = outcome;
    if (!good) {
      verdict.wrong = outcome;
      return verdict;
    }
    verdict.worst = std::max(verdict.worst, outcome.worst);
    for (const int threads : kThreads) {
      if (!a_try.fast) break;
      const Outcome quick = a_try.fast(a_case, threads);
      if (quick.right() && quick.outputs == outcome.outputs) continue;
      verdict.disagreement = "the fast executor gives other bits than the checked one with " + std::to_string(threads) +
                             (threads == 1 ? " thread" : " threads");
      return verdict;
    }
    if (a_try.progress) a_try.progress();
  }
  return verdict;
}

}  // namespace octile::tile::puzzles
