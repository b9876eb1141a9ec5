# The installed tree: library, headers, find_package(octile), pkg-config, and what was built of the command.

include(CMakePackageConfigHelpers)

install(TARGETS octile EXPORT octile-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY include/octile TYPE INCLUDE FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
if(TARGET octile_puzzles)
  # A solution to a puzzle is compiled against these, and linked with them.
  install(TARGETS octile_tile octile_tile_autotune octile_tile_report octile_puzzles ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  if(TARGET octile_tile_prove)
    install(TARGETS octile_tile_prove ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
  install(DIRECTORY tile/octile/tile DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/octile FILES_MATCHING PATTERN "*.h")
  install(DIRECTORY tile/puzzles DESTINATION ${CMAKE_INSTALL_DATADIR}/octile FILES_MATCHING PATTERN "*.h")
  install(FILES tile/report/write_report.h DESTINATION ${CMAKE_INSTALL_DATADIR}/octile/report)
endif()
# The documents, in the places where their links to one another and to the headers look for them.
install(FILES LICENSE README.md CHANGELOG.md CONTRIBUTING.md TYPE DOC)
install(DIRECTORY docs TYPE DOC)
install(FILES bench/peers/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR}/bench/peers)
install(FILES bench/peers/gpu/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR}/bench/peers/gpu)
file(RELATIVE_PATH octile_headers ${CMAKE_INSTALL_FULL_DOCDIR} ${CMAKE_INSTALL_FULL_INCLUDEDIR})
install(CODE "
  get_filename_component(octile_link \"${CMAKE_INSTALL_DOCDIR}/include\" ABSOLUTE BASE_DIR \"\${CMAKE_INSTALL_PREFIX}\")
  file(CREATE_LINK \"${octile_headers}\" \"\$ENV{DESTDIR}\${octile_link}\" SYMBOLIC)
  list(APPEND CMAKE_INSTALL_MANIFEST_FILES \"\${octile_link}\")")

set(octile_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/octile)
configure_package_config_file(cmake/octile-config.cmake.in ${PROJECT_BINARY_DIR}/octile-config.cmake
                              INSTALL_DESTINATION ${octile_cmake_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a new minor version may break: 0.1 asks for 0.1.x.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/octile-config-version.cmake COMPATIBILITY SameMinorVersion)
install(EXPORT octile-targets NAMESPACE octile:: DESTINATION ${octile_cmake_dir})
install(FILES ${PROJECT_BINARY_DIR}/octile-config.cmake ${PROJECT_BINARY_DIR}/octile-config-version.cmake
        DESTINATION ${octile_cmake_dir})

# Paths in octile.pc are relative to the file, so that the tree can be moved.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}" OR IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(octile_pc_prefix ${CMAKE_INSTALL_PREFIX})
else()
  file(RELATIVE_PATH octile_pc_up /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
  string(REGEX REPLACE "/$" "" octile_pc_up "${octile_pc_up}")
  set(octile_pc_prefix "\${pcfiledir}/${octile_pc_up}")
endif()
foreach(directory LIBDIR INCLUDEDIR)
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${directory}}")
    set(octile_pc_${directory} ${CMAKE_INSTALL_${directory}})
  else()
    set(octile_pc_${directory} "\${prefix}/${CMAKE_INSTALL_${directory}}")
  endif()
endforeach()
if(octile_library_type STREQUAL "STATIC_LIBRARY")
  set(octile_pc_static "-lstdc++ -lm -pthread")
  if(OCTILE_CUDA)
    string(APPEND octile_pc_static " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt")
  endif()
  set(octile_pc_cflags " -DOCTILE_STATIC")
endif()
configure_file(cmake/octile.pc.in ${PROJECT_BINARY_DIR}/octile.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/octile.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

if(TARGET octile_cli)
  install(TARGETS octile_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  if(NOT CMAKE_CROSSCOMPILING AND NOT OCTILE_SANITIZE)
    # The command writes its own man page and the scripts that complete its command line.
    set(octile_pages ${PROJECT_BINARY_DIR}/octile.1 ${PROJECT_BINARY_DIR}/octile.bash ${PROJECT_BINARY_DIR}/_octile
                     ${PROJECT_BINARY_DIR}/octile.fish)
    add_custom_command(OUTPUT ${octile_pages}
                       COMMAND octile_cli manual man > octile.1
                       COMMAND octile_cli completion bash > octile.bash
                       COMMAND octile_cli completion zsh > _octile
                       COMMAND octile_cli completion fish > octile.fish
                       WORKING_DIRECTORY ${PROJECT_BINARY_DIR} DEPENDS octile_cli VERBATIM)
    add_custom_target(octile_man ALL DEPENDS ${octile_pages})
    install(FILES ${PROJECT_BINARY_DIR}/octile.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    install(FILES ${PROJECT_BINARY_DIR}/octile.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME octile)
    install(FILES ${PROJECT_BINARY_DIR}/_octile DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
    install(FILES ${PROJECT_BINARY_DIR}/octile.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
  endif()
endif()

# Last: what follows in CMake's script is the list of what was installed, in the build folder. Who installs what another
# user has built may not write there, and everything is installed by now.
install(CODE "
  if(CMAKE_INSTALL_COMPONENT)
    set(octile_manifest \"${PROJECT_BINARY_DIR}/install_manifest_\${CMAKE_INSTALL_COMPONENT}.txt\")
  else()
    set(octile_manifest \"${PROJECT_BINARY_DIR}/install_manifest.txt\")
  endif()
  execute_process(COMMAND \"\${CMAKE_COMMAND}\" -E touch \"\${octile_manifest}\" RESULT_VARIABLE octile_result ERROR_QUIET)
  if(NOT octile_result EQUAL 0)
    message(STATUS \"All is installed. There is no list of it, since \${octile_manifest} cannot be written\")
    return()
  endif()" ALL_COMPONENTS)
