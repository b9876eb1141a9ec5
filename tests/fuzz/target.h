// A fuzz target: what libFuzzer calls, and what the program for random inputs (standalone.cpp) asks besides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace octile::fuzz {

// What this many inputs have reached, as text; empty: too little, for a target that reaches nothing finds nothing.
std::string reached(std::uint64_t inputs);

}  // namespace octile::fuzz
