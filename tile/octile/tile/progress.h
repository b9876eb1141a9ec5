// Where a launch is: to say what a program was doing when it crashed or was stopped.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "octile/tile/report.h"

namespace octile::tile {

// Without pointers: another process may read it.
struct Progress {
  char doing[256] = {};  // by the caller of the launch: a size, an executor
  // Of the checked executor.
  bool program_runs = false;
  std::array<int, 3> program{};
  std::int64_t steps = 0;  // accesses of this program so far; what follows is the last one
  Access access = Access::load;
  unsigned line = 0, column = 0;
  char tensor[64] = {}, file[1024] = {};
};

// Cuts off what does not fit.
template <std::size_t n>
void put(char (&to)[n], const std::string& text) {
  to[text.copy(to, n - 1)] = '\0';
}

Progress& progress();
void put_progress(Progress& where);  // from now on in this (shared) memory

// "n0 = 200, checked executor, program (6,0,0), after 2 accesses: load x at masked_add.cpp:19:26"
std::string text(const Progress& progress);

}  // namespace octile::tile
