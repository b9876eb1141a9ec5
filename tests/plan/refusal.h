// The message with which a plan refuses a call.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "octile/octile.hpp"

namespace octile {

// "" if it accepts the call.
template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline void expect_in(const std::string& text, const std::string& whole) {
  EXPECT_NE(whole.find(text), std::string::npos) << whole;
}

}  // namespace octile
