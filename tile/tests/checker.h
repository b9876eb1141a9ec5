// For tests of the checked executor: a kernel marks the faulty line, which the report must name.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "octile/tile/tile.h"

namespace octile::tile {

inline unsigned line = 0;  // (line = __LINE__, t.load(...))

inline Array<f32> ramp(const char* name, std::vector<std::int64_t> shape) {
  Array<f32> result(name, std::move(shape));
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, static_cast<float>(i));
  return result;
}

inline std::string all(const Report& report) {
  std::string result;
  for (const Finding& finding : report.findings) result += text(report, finding) + "\n";
  return result;
}

// The only finding of a report.
inline Finding only(const Report& report, Problem problem, std::int64_t count) {
  EXPECT_EQ(report.findings.size(), 1u) << all(report);
  if (report.findings.empty()) return {};
  const Finding finding = report.findings[0];
  EXPECT_STREQ(name(finding.problem), name(problem)) << all(report);
  EXPECT_EQ(finding.count, count) << all(report);
  const Site& site = report.sites[static_cast<std::size_t>(finding.site)];
  EXPECT_EQ(site.line, line) << all(report);
  EXPECT_NE(site.file.find("checker_"), std::string::npos);
  return finding;
}

using Triple = std::array<int, 3>;

}  // namespace octile::tile
