#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <stdexcept>
#include <system_error>

#include "puzzles.h"

namespace octile::cli {

namespace {

namespace fs = std::filesystem;

// Set by the build: the checkout and its build directory, and where an installed tree has its headers, its shared files
// and its libraries, below the prefix.
constexpr const char* kSourceDirectory = OCTILE_SOURCE_DIRECTORY;
constexpr const char* kBuildDirectory = OCTILE_BUILD_DIRECTORY;
constexpr const char* kIncludeDirectory = OCTILE_INSTALL_INCLUDE;
constexpr const char* kDataDirectory = OCTILE_INSTALL_DATA;
constexpr const char* kLibraryDirectory = OCTILE_INSTALL_LIBRARY;

tile::puzzles::Toolbox toolbox(const std::vector<fs::path>& includes, const std::vector<fs::path>& libraries) {
  tile::puzzles::Toolbox result;
  if (const char* const compiler = std::getenv("CXX"); compiler != nullptr && *compiler != '\0')
    result.compiler = compiler;
  for (const fs::path& path : includes) result.include_directories.push_back(path.string());
  for (const fs::path& path : libraries) {
    if (!fs::exists(path))
      throw std::runtime_error("there is no " + path.string() + ", which a solution is linked with");
    result.libraries.push_back(path.string());
  }
  return result;
}

// The proofs come behind the puzzles, which call them, and before the language.
std::vector<fs::path> with_solver(bool prove, const fs::path& folder, const std::string& solver,
                                  std::vector<fs::path> libraries) {
  if (!prove) return libraries;
  libraries.insert(libraries.begin() + 1, folder / "liboctile_tile_prove.a");
  libraries.emplace_back(solver);
  return libraries;
}

}  // namespace

std::string this_command() {
  std::error_code ignored;
  const fs::path self = fs::canonical("/proc/self/exe", ignored);
  const char* const path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const fs::path command = fs::path(folder) / "octile";
    if (fs::exists(command, ignored)) return fs::equivalent(command, self, ignored) ? "octile" : self.string();
  }
  return self.string();
}

tile::puzzles::Toolbox find_toolbox(bool prove) {
#if defined(OCTILE_Z3)
  constexpr const char* kSolver = OCTILE_Z3;
#else
  constexpr const char* kSolver = "";
  if (prove) throw std::runtime_error("this octile was built without Z3 (libz3-dev), which proves kernels");
#endif
  std::error_code ignored;
  const fs::path command = fs::canonical("/proc/self/exe", ignored).parent_path();
  const fs::path build(kBuildDirectory);
  if (fs::equivalent(command, build, ignored)) {
    return toolbox({fs::path(kSourceDirectory) / "tile"},
                   with_solver(prove, build / "tile/prove", kSolver,
                               {build / "tile/puzzles/liboctile_puzzles.a",
                                build / "tile/report/liboctile_tile_report.a", build / "tile/liboctile_tile.a"}));
  }
  const fs::path prefix = command.parent_path(), headers = prefix / kIncludeDirectory;
  if (!fs::exists(headers / "octile/tile/context.h")) {
    throw std::runtime_error("there is no " + (headers / "octile/tile/context.h").string() +
                             ": neither a build directory nor an installed octile");
  }
  const fs::path library = prefix / kLibraryDirectory;
  return toolbox({headers, prefix / kDataDirectory / "octile"},
                 with_solver(prove, library, kSolver,
                             {library / "liboctile_puzzles.a", library / "liboctile_tile_report.a",
                              library / "liboctile_tile.a"}));
}

}  // namespace octile::cli
