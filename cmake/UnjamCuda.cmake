# libunjam_cuda.so: the daemon kernel and the CUDA device, opened by libunjam.so where there is a driver.
#
# nvcc is looked for in CUDACXX, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda, and in the wheels that
# tools/cuda_toolchain.py installs into .venv. UNJAM_CUDA_STATUS says in words what came of it.

# Sets `out` to an nvcc 13 or to "", and `why` to what stood against it.
function(unjam_find_nvcc out why)
  set(found "")
  if(CMAKE_CUDA_COMPILER)
    set(found "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(found "$ENV{CUDACXX}")
  else()
    find_program(UNJAM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
                 PATHS /usr/local/cuda NO_CACHE)
    file(GLOB wheels "$ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/cu13"
                     "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/cu13")
    set(candidates ${UNJAM_NVCC})
    foreach(root ${wheels})
      if(EXISTS "${root}/bin/nvcc" AND EXISTS "${root}/lib64")
        list(APPEND candidates "${root}/bin/nvcc")
      endif()
    endforeach()
    foreach(candidate ${candidates})
      execute_process(COMMAND "${candidate}" --version OUTPUT_VARIABLE text ERROR_QUIET)
      if(text MATCHES "release 1[3-9]\\.")
        set(found "${candidate}")
        break()
      endif()
      set(${why} "${candidate} is older than CUDA 13" PARENT_SCOPE)
    endforeach()
    if(NOT candidates)
      set(${why} "no nvcc in CUDACXX, CUDA_HOME, PATH, /usr/local/cuda or .venv" PARENT_SCOPE)
    endif()
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

file(GLOB cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/device/cuda/*.cu")
set(UNJAM_CUDA_STATUS "no")
string(TOUPPER "${UNJAM_CUDA}" wish)
if(NOT wish MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|YES|NO|1|0)$")
  message(FATAL_ERROR "UNJAM_CUDA is '${UNJAM_CUDA}'; it takes AUTO, ON or OFF.")
elseif(wish MATCHES "^(OFF|FALSE|NO|0)$")
  set(UNJAM_CUDA_STATUS "host-only build, as asked by UNJAM_CUDA=OFF")
elseif(NOT cuda_sources)
  set(UNJAM_CUDA_STATUS "host-only build, there is no src/device/cuda/*.cu")
else()
  unjam_find_nvcc(nvcc reason)
  if(nvcc)
    set(CMAKE_CUDA_COMPILER "${nvcc}")
    set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real" CACHE STRING "GPUs to build for: A100, H100/H200")
    enable_language(CUDA)
    set(UNJAM_CUDA_STATUS "libunjam_cuda.so for ${CMAKE_CUDA_ARCHITECTURES} with ${nvcc}")
  elseif(wish STREQUAL "AUTO")
    set(UNJAM_CUDA_STATUS "HOST-ONLY BUILD, ${reason} (tools/cuda_toolchain.py installs one into .venv)")
  else()
    message(FATAL_ERROR "UNJAM_CUDA=ON, but ${reason}. Set CUDACXX to an nvcc 13, or run "
                        "`python3 tools/cuda_toolchain.py`, which installs one into .venv.")
  endif()
endif()

if(CMAKE_CUDA_COMPILER AND UNJAM_CUDA_STATUS MATCHES "^libunjam_cuda")
  # A release configuration whatever the host's is: a debug build of a persistent kernel tells nothing.
  # The standard goes through the flags: CMake 3.25 does not know that nvcc has C++20.
  # (Without -O3, that of the host's part: targets say it, for not all want it.)
  set(CMAKE_CUDA_FLAGS_RELEASE -DNDEBUG)
  add_library(unjam_cuda SHARED ${cuda_sources})
  file(GLOB cuda_host_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/device/cuda/*.cc")
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
                                         -Wl,--exclude-libs,ALL)
  set_target_properties(unjam_cuda PROPERTIES
    CUDA_STANDARD_REQUIRED OFF
    CUDA_RUNTIME_LIBRARY Static
    CUDA_VISIBILITY_PRESET hidden
    # Keeps ptxas' words on registers and spills beside each object, for tools/ptxas_report.py.
    CUDA_COMPILER_LAUNCHER "${PROJECT_SOURCE_DIR}/tools/nvcc_log.sh")

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
