# tests/gpu/X.cu, bench/X.cu and bench/*/X.cu become build/<preset>/gpu/X: programs for machines with GPUs, which
# use nothing but the C API of libunjam.so and the CUDA runtime; but for those that look inside.
# tests/gpu/run_all.sh runs the tests.
if(NOT CMAKE_CUDA_COMPILER)
  unjam_find_nvcc(nvcc reason)
  if(NOT nvcc)
    message(FATAL_ERROR "UNJAM_GPU_TESTS=ON, but ${reason}. Set CUDACXX to an nvcc 13, or run "
                        "`python3 tools/cuda_toolchain.py`, which installs one into .venv.")
  endif()
  set(CMAKE_CUDA_COMPILER "${nvcc}")
endif()
enable_language(CUDA)
set(CMAKE_CUDA_FLAGS_RELEASE -DNDEBUG)  # as UnjamCuda.cmake
set(UNJAM_GPU_TEST_ARCHITECTURES "90a-real" CACHE STRING "GPUs to build the GPU tests for")

file(GLOB gpu_tests CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/gpu/*.cu"
                                    "${PROJECT_SOURCE_DIR}/bench/*.cu"
                                    "${PROJECT_SOURCE_DIR}/bench/*/*.cu")
set(gpu_tests_inside copy_start leaf_check torn_lines written)
set(gpu_tests_with_library written)
set(gpu_test_targets)
foreach(source ${gpu_tests})
  get_filename_component(name "${source}" NAME_WE)
  set(target gpu_${name})
  add_executable(${target} "${source}")
  list(APPEND gpu_test_targets ${target})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/include"
                                               ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  if(name IN_LIST gpu_tests_inside)
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src")
  endif()
  # The standard goes through the flags: CMake 3.25 does not know that nvcc has C++20.
  target_compile_options(${target} PRIVATE -std=c++20
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>)
  if(UNJAM_WERROR)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>)
  endif()
  if(UNJAM_GPU_TEST_ARCHITECTURES MATCHES "^[^;]*-virtual$")  # to see that it compiles
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xcicc -O0>")
  else()
    target_compile_options(${target} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CONFIG:Release>>:-O3>)
  endif()
  if(NOT name IN_LIST gpu_tests_with_library)
    target_link_libraries(${target} PRIVATE unjam)
  endif()
  target_link_libraries(${target} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  # The library lies one folder above, in the build as after copying both.
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME ${name} RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/gpu"
    CUDA_STANDARD_REQUIRED OFF CUDA_ARCHITECTURES "${UNJAM_GPU_TEST_ARCHITECTURES}" CUDA_RUNTIME_LIBRARY Static
    BUILD_RPATH "$ORIGIN/.." BUILD_RPATH_USE_ORIGIN ON)
endforeach()
file(GLOB host_leaves CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/device/host/lea*.cc")
target_sources(gpu_leaf_check PRIVATE ${host_leaves})
# With the library's own make_plan() replaced. The device library is looked for beside the program.
set(make_plan _ZN5unjam9make_planERKNS_11PlanRequestERKNS_10PlanLimitsESt8optionalINS_9AlgorithmEEPNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE)
target_sources(gpu_written PRIVATE "${PROJECT_SOURCE_DIR}/tests/gpu/written_plans.cc" $<TARGET_OBJECTS:unjam_objects>)
target_compile_definitions(gpu_written PRIVATE UNJAM_MAKE_PLAN="${make_plan}")
target_link_options(gpu_written PRIVATE "LINKER:--wrap=${make_plan}")
target_link_libraries(gpu_written PRIVATE ${CMAKE_DL_LIBS})
add_custom_command(TARGET gpu_written POST_BUILD COMMAND ${CMAKE_COMMAND} -E create_symlink
  ../libunjam_cuda.so "${PROJECT_BINARY_DIR}/gpu/libunjam_cuda.so")
target_sources(gpu_torn_lines PRIVATE "${PROJECT_SOURCE_DIR}/src/device/cuda/host/cuda_arena.cc")
target_sources(gpu_copy_start PRIVATE "${PROJECT_SOURCE_DIR}/src/device/cuda/host/copy_thread.cc"
                                      "${PROJECT_SOURCE_DIR}/src/device/cuda/host/first_launch.cc")
configure_file("${PROJECT_SOURCE_DIR}/tests/gpu/run_all.sh" "${PROJECT_BINARY_DIR}/gpu/run_all.sh" COPYONLY)
add_custom_target(gpu_tests DEPENDS ${gpu_test_targets})
