// What a proof says in the verdict on a puzzle.
#include <algorithm>
#include <cstdio>

#include "puzzles/prove_trial.h"

namespace octile::tile::puzzles {

std::vector<int> blocks_of(const Facts& facts) {
  std::vector<int> result;
  for (const Case& a_case : facts.cases) {
    if (std::find(result.begin(), result.end(), a_case.blocks) == result.end()) result.push_back(a_case.blocks);
  }
  return result;
}

ProofVerdict verdict_of(const std::vector<Proof>& proofs, const std::vector<int>& blocks) {
  ProofVerdict verdict;
  verdict.proved = std::all_of(proofs.begin(), proofs.end(), [](const Proof& proof) { return proof.proved(); });
  double seconds = 0;
  for (const Proof& proof : proofs) seconds += proof.seconds;
  char took[32];
  std::snprintf(took, sizeof took, "%.2f s", seconds);
  if (verdict.proved) {
    verdict.text = std::string("  proved for all sizes, in ") + took +
                   ": in bounds, no race, no missing barrier, nothing undefined, all written, no overflow\n";
    return verdict;
  }
  for (const bool refuted : {true, false}) {  // the worst first, each property once
    for (int i = 0; i < kProperties; ++i) {
      const auto property = static_cast<Property>(i);
      for (std::size_t p = 0; p < proofs.size(); ++p) {
        const Claim& claim = proofs[p].claims[static_cast<std::size_t>(i)];
        if (claim.answer == Answer::proved || (claim.answer == Answer::refuted) != refuted) continue;
        if (!refuted && std::any_of(proofs.begin(), proofs.end(),
                                    [&](const Proof& proof) { return proof.answer(property) == Answer::refuted; })) {
          break;
        }
        verdict.text += text(proofs[p], claim);
        if (refuted && !verdict.refuted) {
          Case wrong;
          for (const std::int64_t size : claim.counterexample->sizes) wrong.sizes.push_back(static_cast<int>(size));
          wrong.blocks = blocks[p];
          verdict.refuted = wrong;
        }
        break;
      }
    }
  }
  return verdict;
}

}  // namespace octile::tile::puzzles
