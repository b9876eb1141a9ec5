#include "puzzles/starter.h"

#include <algorithm>

namespace octile::tile::puzzles {

namespace {

constexpr std::size_t kColumns = 118;

// As comment lines; what follows the first is indented.
std::string comment(const std::string& words) {
  std::string result, line = "//";
  for (std::size_t begin = 0; begin < words.size();) {
    const std::size_t end = std::min(words.find(' ', begin), words.size());
    if (line.size() + 1 + end - begin > kColumns) {
      result += line + "\n";
      line = "//  ";
    }
    line += " " + words.substr(begin, end - begin);
    begin = end + 1;
  }
  return result + line + "\n";
}

std::string header_of(int number) {
  return number <= 6 ? "elementwise" : number <= 9 ? "rows" : number <= 12 ? "products" : "linear";
}

// The head of a kernel's operator, its parameters broken as clang-format has them.
std::string head(const std::string& parameters) {
  const std::string begin = "  TILE_KERNEL void operator()(", end = ") const {";
  std::string result, line = begin;
  for (std::size_t at = 0; at < parameters.size();) {
    const std::size_t comma = parameters.find(", ", at), next = std::min(comma, parameters.size() - 1) + 1;
    const std::string word = parameters.substr(at, next - at);
    const std::size_t closing = next == parameters.size() ? end.size() : 0;
    if (line.back() != '(' && line.size() + 1 + word.size() + closing > kColumns + 2) {
      result += line + "\n";
      line = std::string(begin.size() - 1, ' ');
    }
    line += (line.back() == '(' ? "" : " ") + word;
    at = next + 1;
  }
  return result + line + end + "\n";
}

}  // namespace

std::string shell_word(const std::string& word) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._+-";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string result = "'";
  for (const char c : word) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::string as_path(const std::string& file) {
  return file.starts_with('-') || file.starts_with('@') ? "./" + file : file;
}

std::string compile_only(const std::string& file, const std::string& program, const Toolbox& toolbox) {
  std::string result = toolbox.compiler;
  // The first three change bits: see the tile language's page.
  result += " -std=c++20 -O1 -Wall -ffp-contract=off -fno-trapping-math -fno-math-errno -Wno-psabi";
  for (const std::string& directory : toolbox.include_directories) result += " -I " + shell_word(directory);
  result += " " + shell_word(file);
  for (const std::string& library : toolbox.libraries) result += " " + shell_word(library);
  return result + " -pthread -o " + shell_word(program);
}

std::string compile_command(const std::string& file, const Toolbox& toolbox) {
  const std::string program = file.substr(0, file.rfind('.'));
  const bool has_directory = program.find('/') != std::string::npos;
  return compile_only(file, program, toolbox) + " && " + shell_word(has_directory ? program : "./" + program);
}

std::string proof_of_the_solution(const Puzzle& puzzle) {
  const std::string part = header_of(puzzle.facts.number);
  std::string kernels;
  for (const std::string& kernel : puzzle.facts.kernels) {
    kernels += ", puzzles::" + part + "::" + (kernel == "MyKernel" ? puzzle.type : kernel) + "{}";
  }
  return "#include \"puzzles/" + part + ".h\"\n#include \"puzzles/mistake.h\"\n#include \"puzzles/prove_trial.h\"\n" +
         "#define int octile::tile::SymbolicInt\n#define bool octile::tile::SymbolicBool\n#include \"puzzles/" + part +
         "_kernels.h\"\n#undef int\n#undef bool\n" +
         "using namespace octile::tile;\nint main(int argc, char** argv) {\n  return puzzles::check<puzzles::" +
         puzzle.type + ">(SymbolicInt(argc), argv" + kernels + ");\n}\n";
}

std::string starter(const Puzzle& puzzle, const std::string& check, const std::string& command) {
  const Facts& facts = puzzle.facts;
  std::string result = comment("Puzzle " + std::to_string(facts.number) + ": " + facts.task);
  result += "//\n" + comment("Tensors: " + facts.tensors);
  result += comment("Launch: " + facts.launch);
  result += comment("Hint: " + facts.hint);
  result += "// The language in one page: docs/reference/tile.md\n";
  result += "//\n// Check it, at these sizes and at hidden ones:\n//   " + check + "\n";
  result += "// which compiles it like this:\n//   " + command + "\n";
  result += "#include \"puzzles/" + header_of(facts.number) + ".h\"\n\nusing namespace octile::tile;\n\n";
  std::string arguments;
  for (const std::string& kernel : facts.kernels) {
    const bool last = &kernel == &facts.kernels.back();
    result += "struct " + kernel + " {\n" + head(facts.parameters);
    result += std::string("    // ") + (last ? "Your kernel." : "The first launch.") + "\n  }\n};\n\n";
    arguments += ", " + kernel + "{}";
  }
  result += "int main(int argc, char** argv) {\n  return puzzles::check<puzzles::" + puzzle.type + ">(argc, argv" +
            arguments + ");\n}\n";
  return result;
}

}  // namespace octile::tile::puzzles
