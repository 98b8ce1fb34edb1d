# Tests that run kernels of src/device/cuda on the CPU (tests/simt): where CUDA's headers are, of which they
# need the formats of numbers, no compiler of CUDA's and no GPU. tests/simt stands in front of src/, so that
# its device/cuda/hardware is theirs; and all is in a namespace of its own, so that no inline function with
# the machine's steps meets the library's.
find_path(UNJAM_CUDA_HEADERS cuda_fp16.h HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include
          DOC "Where CUDA's headers are: tests/simt needs them")
# (TSan sees threads, not the fibers of one.)
if(NOT UNJAM_CUDA_HEADERS OR UNJAM_SANITIZE MATCHES "thread" OR NOT CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  message(STATUS "unjam: tests/simt is not built: it needs CUDA's headers, x86-64, and no TSan")
  return()
endif()

file(GLOB plans CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/plan/*.cc" "${PROJECT_SOURCE_DIR}/src/plan/algorithms/*.cc")
list(FILTER plans EXCLUDE REGEX "describe")  # which checks, too
add_library(unjam_simt_plans OBJECT ${plans})
target_include_directories(unjam_simt_plans PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/include")
target_compile_definitions(unjam_simt_plans PRIVATE unjam=unjam_on_cpu)
set_target_properties(unjam_simt_plans PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)

# Compiling takes longer than running.
set(simt_optimised -O1)
if(UNJAM_SANITIZE)
  set(simt_optimised -O0)
endif()
# (What kernels may do, and what nvcc warns of, is no error here.)
file(GLOB simt_tests CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/simt/*_test.cc")
# Under the sanitizers these take longest.
list(PREPEND expensive call_kernel_test daemon_kernel_test)
list(APPEND sharded call_kernel_test)
foreach(source ${simt_tests})
  get_filename_component(name "${source}" NAME_WE)
  unjam_add_gtest(${name} "${source}")
  target_sources(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests/simt/machine.cc" $<TARGET_OBJECTS:unjam_simt_plans>)
  target_include_directories(${name} BEFORE PRIVATE "${PROJECT_SOURCE_DIR}/tests/simt" "${PROJECT_SOURCE_DIR}/src")
  target_include_directories(${name} SYSTEM PRIVATE "${UNJAM_CUDA_HEADERS}")
  set_target_properties(${name} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)  # of other flags
  target_compile_options(${name} PRIVATE ${simt_optimised} -Wno-unknown-pragmas -Wno-unused-parameter
                         -Wno-maybe-uninitialized -Wno-parentheses)
endforeach()
