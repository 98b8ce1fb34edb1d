# libunjam_cuda.so: the daemon kernel and the CUDA device, opened by libunjam.so where there is a driver.
# Whether it is built, and for which GPUs, decides UnjamCudaChoice.cmake. UNJAM_CUDA_STATUS says it in words.
include(UnjamCudaChoice)

unjam_choose_cuda(nvcc cuda_architectures UNJAM_CUDA_STATUS)
if(cuda_architectures)
  set(CMAKE_CUDA_COMPILER "${nvcc}")
  # No cache entry: where nobody has said for what to compile, it is looked up each time.
  set(CMAKE_CUDA_ARCHITECTURES "${cuda_architectures}")
  enable_language(CUDA)
endif()
unjam_tell_builder("${UNJAM_CUDA_STATUS}")

file(GLOB cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/device/cuda/kernels/*.cu")
if(cuda_architectures)
  # A release configuration whatever the host's is: a debug build of a persistent kernel tells nothing.
  # The standard goes through the flags: CMake 3.25 does not know that nvcc has C++20.
  # (Without -O3, that of the host's part: targets say it, for not all want it.)
  set(CMAKE_CUDA_FLAGS_RELEASE -DNDEBUG)
  add_library(unjam_cuda SHARED ${cuda_sources})
  file(GLOB cuda_host_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/device/cuda/host/*.cc")
  target_sources(unjam_cuda PRIVATE ${cuda_host_sources})
  target_include_directories(unjam_cuda PRIVATE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src"
                                                ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(unjam_cuda PRIVATE
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CONFIG:Release>>:-O3>
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra;-Xptxas=-v;--threads=2>")
  # 177: what a kernel does not use of a header or of a device's interface is no fault.
  target_compile_options(unjam_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-diag-suppress=177>")
  if(UNJAM_WERROR)
    target_compile_options(unjam_cuda PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-Xcompiler=-Werror>")
  endif()
  target_link_libraries(unjam_cuda PRIVATE unjam_warnings Threads::Threads ${CMAKE_DL_LIBS})
  target_link_options(unjam_cuda PRIVATE "-Wl,--version-script=${PROJECT_SOURCE_DIR}/cmake/unjam.map"
                                         -Wl,--exclude-libs,ALL -Wl,--no-undefined)
  # Behind it the user's launcher, if there is one: an empty word in the list would be what is run.
  set(nvcc_launcher "${PROJECT_SOURCE_DIR}/tools/nvcc_log.sh" ${CMAKE_CUDA_COMPILER_LAUNCHER})
  set_target_properties(unjam_cuda PROPERTIES
    CUDA_STANDARD_REQUIRED OFF
    CUDA_RUNTIME_LIBRARY Static
    CUDA_VISIBILITY_PRESET hidden
    # Keeps ptxas' words on registers and spills beside each object, for tools/ptxas_report.py.
    CUDA_COMPILER_LAUNCHER "${nvcc_launcher}")

  # For more GPUs, only to see that it compiles: into PTX that nothing uses, so cicc, which takes most of the
  # time, optimises nothing.
  # (Named as what all_host leaves out.)
  set(UNJAM_CUDA_COMPILED_ONLY "" CACHE STRING "A GPU for which to compile and no more, as CMAKE_CUDA_ARCHITECTURES")
  if(UNJAM_CUDA_COMPILED_ONLY)
    add_library(gpu_compiled_only OBJECT EXCLUDE_FROM_ALL ${cuda_sources})
    foreach(property INCLUDE_DIRECTORIES COMPILE_OPTIONS)
      set_target_properties(gpu_compiled_only PROPERTIES
        ${property} "$<TARGET_PROPERTY:unjam_cuda,${property}>")
    endforeach()
    target_compile_options(gpu_compiled_only PRIVATE "SHELL:-Xcicc -O0")
    set_target_properties(gpu_compiled_only PROPERTIES
      CUDA_PTX_COMPILATION ON CUDA_STANDARD_REQUIRED OFF CUDA_ARCHITECTURES "${UNJAM_CUDA_COMPILED_ONLY}")
  endif()
endif()
