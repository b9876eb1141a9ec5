// Octile: the one macro that makes a symbol visible outside the shared library.
#pragma once

#if defined(OCTILE_STATIC)
#define OCTILE_API
#elif defined(_WIN32)
#define OCTILE_API __declspec(dllexport)
#else
#define OCTILE_API __attribute__((visibility("default")))
#endif
