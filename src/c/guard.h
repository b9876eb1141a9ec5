// What every function of the C interface does around its work: exceptions become a status and a text.
#pragma once

#include <cstring>
#include <string_view>

#include "c/convert.h"

namespace octile {

// For octile_last_error; in c_api.cpp.
octile_status keep_error(octile_status status, const char* text) noexcept;

template <class Body>
octile_status guarded(const Body& body) noexcept {
  try {
    body();
    return OCTILE_OK;
  } catch (const Error& error) {
    return keep_error(static_cast<octile_status>(error.status()), error.what());
  } catch (const std::exception& error) {
    return keep_error(OCTILE_INTERNAL, error.what());
  } catch (...) {
    return keep_error(OCTILE_INTERNAL, "unknown error");
  }
}

template <class Struct>
octile_status init_struct(std::string_view function, Struct* wanted, std::size_t size, const Struct& defaults) {
  return guarded([&] {
    c_interface::checked_size(function, "description", size);
    if (wanted != nullptr) std::memcpy(wanted, &size, sizeof size);
    c_interface::write_struct(function, "description", wanted, defaults);
  });
}

}  // namespace octile

// octile_linear_description_init, by the description's name here and in C++: the defaults of its twin.
#define OCTILE_DESCRIPTION(name, Cpp)                                                                     \
  octile_status octile_##name##_description_init(octile_##name##_description* description, size_t size) { \
    using Description = octile_##name##_description;                                                      \
    return octile::init_struct(__func__, description, size,                                               \
                               octile::c_interface::defaults<octile::Cpp##Description, Description>());   \
  }
