# bench/X.cc becomes the executable build/<preset>/bench/X. It may use the insides, and tests/support.
file(GLOB bench_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bench/*.cc")
foreach(source ${bench_sources})
  get_filename_component(name "${source}" NAME_WE)
  add_executable(bench_${name} "${source}")
  target_include_directories(bench_${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(bench_${name} PRIVATE unjam_static unjam_warnings)
  set_target_properties(bench_${name} PROPERTIES
    OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/bench")
endforeach()
