# octile_embed(TARGET FILE SYMBOL): builds a text file into TARGET as `extern const std::string_view SYMBOL` of
# octile::digits. For lines without quotes, backslashes, brackets and semicolons: a table of numbers.
function(octile_embed target file symbol)
  file(READ ${file} text)
  string(REGEX REPLACE "([^\r\n]*)\r?\n" "    \"\\1\\\\n\"\n" text "${text}")
  set(output ${CMAKE_CURRENT_BINARY_DIR}/${symbol}.cpp)
  # file(GENERATE) leaves an unchanged file alone, so that a new configuration builds nothing again.
  file(GENERATE OUTPUT ${output} CONTENT "#include <string_view>

namespace octile::digits {
extern const std::string_view ${symbol};
const std::string_view ${symbol} =
${text}    ;
}  // namespace octile::digits
")
  target_sources(${target} PRIVATE ${output})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
endfunction()
