// A fuzz target: what libFuzzer calls, and what standalone.cpp, which makes random inputs, needs besides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace octile::fuzz {

// What this many inputs have reached, as text; empty if that is too little: a target that reaches nothing finds
// nothing.
std::string reached(std::uint64_t inputs);

}  // namespace octile::fuzz
