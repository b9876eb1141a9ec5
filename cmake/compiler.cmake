# Which compilers we know to work, and how ours are called. Nothing here reaches a project that includes Octile.

if((CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
   OR (CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14))
  message(FATAL_ERROR "Octile is C++20: it needs g++ 11 or clang++ 14, or newer; "
                      "${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}. "
                      "Choose another with CXX=... or -DCMAKE_CXX_COMPILER=...")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 16
   AND CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  message(FATAL_ERROR "On 64-bit Arm Octile needs g++ 11 or clang++ 16, or newer: older clangs have no instruction sets for "
                      "single functions there; ${CMAKE_CXX_COMPILER} is version ${CMAKE_CXX_COMPILER_VERSION}")
endif()

if(PROJECT_IS_TOP_LEVEL)
  get_property(octile_many_configurations GLOBAL PROPERTY GENERATOR_IS_MULTI_CONFIG)
  if(NOT CMAKE_BUILD_TYPE AND NOT octile_many_configurations)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release, RelWithDebInfo or MinSizeRel" FORCE)
  endif()
  find_program(OCTILE_CCACHE ccache DOC "Makes a rebuild quick; not needed")
  if(OCTILE_CCACHE)
    foreach(language C CXX CUDA)
      if(NOT DEFINED CMAKE_${language}_COMPILER_LAUNCHER)
        set(CMAKE_${language}_COMPILER_LAUNCHER ${OCTILE_CCACHE})
      endif()
    endforeach()
  endif()
endif()

# For all of our own code. No contraction: a * b + c is two roundings unless std::fma is written, on every machine.
function(octile_compile_options target)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -ffp-contract=off>
                                           $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false --diag-suppress=554>)  # 554: overlooks `requires`
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Wrong: g++ 12 about "text" + std::string (its bug 105651), and about a test that replaces operator new.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict -Wno-mismatched-new-delete>)
  endif()
endfunction()

# octile_precompile(TARGET): what the standard library declares is parsed once for all such targets. For clang under sanitizers alone:
# there it saves a third of the time of a file, with g++ nothing, and the other builds still see a file that lacks an include.
function(octile_precompile target)
  if(NOT OCTILE_SANITIZE OR NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    return()
  endif()
  get_target_property(type ${target} TYPE)
  set(headers algorithm array atomic bit chrono cmath cstdint cstring filesystem fstream functional iostream limits map memory mutex
              numeric optional random set span sstream stdexcept string string_view thread tuple unordered_map utility variant vector)
  # Executables, which are tests, have code of another kind: -fPIE.
  set(home octile_precompiled)
  if(type STREQUAL "EXECUTABLE")
    set(home octile_precompiled_for_tests)
    list(APPEND headers gtest/gtest.h)
  endif()
  if(NOT TARGET ${home})
    set(source ${PROJECT_BINARY_DIR}/${home}.cpp)
    file(CONFIGURE OUTPUT ${source} CONTENT "int main() {}\n")
    if(type STREQUAL "EXECUTABLE")
      add_executable(${home} ${source})
      target_link_libraries(${home} PRIVATE GTest::gtest)
    else()
      add_library(${home} OBJECT ${source})
    endif()
    octile_compile_options(${home})
    list(TRANSFORM headers REPLACE "(.+)" "<\\1>")
    target_precompile_headers(${home} PRIVATE ${headers})
    # The compile cache wants to know the headers by their contents.
    target_compile_options(${home} PRIVATE "SHELL:-Xclang -fno-pch-timestamp")
  endif()
  target_precompile_headers(${target} REUSE_FROM ${home})
  # Files of one target are optimized differently, or leave a sanitizer out; what the headers declare does not hang on it.
  target_compile_options(${target} PRIVATE "SHELL:-Xclang -fno-validate-pch")
endfunction()

macro(octile_apply_sanitizers sanitizers)
  if(NOT "${sanitizers}" STREQUAL "")
    # The first finding ends the program, so that no test passes over one.
    add_compile_options($<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${sanitizers}>
                        $<$<COMPILE_LANGUAGE:C,CXX>:-fno-sanitize-recover=all>
                        $<$<COMPILE_LANGUAGE:C,CXX>:-fno-omit-frame-pointer>)
    add_link_options(-fsanitize=${sanitizers})
    if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")  # g++ defines them
      string(REGEX MATCH "address|thread" sanitizer "${sanitizers}")
      string(TOUPPER "__SANITIZE_${sanitizer}__" macro)
      add_compile_definitions(${macro}=1)
    endif()
  endif()
endmacro()
