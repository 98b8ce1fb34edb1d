# libnccl.so.2: NCCL's interface over libunjam.so, for programs that cannot change (docs/nccl.md). It lies in a
# folder of its own, so that nobody who looks for libunjam.so finds it by accident.
file(GLOB nccl_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/api/nccl/*.cc")
set(nccl_folder "${PROJECT_SOURCE_DIR}/src/api/nccl")
set(nccl_no_cuda "${nccl_folder}/no_cuda_calls.cc")
set(nccl_on_load "${nccl_folder}/on_load.cc")
list(REMOVE_ITEM nccl_sources "${nccl_no_cuda}" "${nccl_on_load}")

add_library(unjam_nccl_objects OBJECT ${nccl_sources})
target_include_directories(unjam_nccl_objects PUBLIC "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(unjam_nccl_objects PUBLIC Threads::Threads PRIVATE unjam_warnings)

add_library(unjam_nccl SHARED "${nccl_on_load}")
target_link_libraries(unjam_nccl PRIVATE unjam_nccl_objects unjam Threads::Threads ${CMAKE_DL_LIBS} unjam_warnings)
target_include_directories(unjam_nccl PRIVATE "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
if(TARGET unjam_cuda)
  target_sources(unjam_nccl PRIVATE "${nccl_folder}/cuda_calls.cu")
  target_include_directories(unjam_nccl PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_options(unjam_nccl PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>"
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<CONFIG:Release>>:-O3>)
  set_target_properties(unjam_nccl PROPERTIES
    CUDA_STANDARD_REQUIRED OFF CUDA_RUNTIME_LIBRARY Static CUDA_VISIBILITY_PRESET hidden)
else()
  target_sources(unjam_nccl PRIVATE "${nccl_no_cuda}")
endif()
set(nccl_exports "${PROJECT_SOURCE_DIR}/cmake/nccl.map")
target_link_options(unjam_nccl PRIVATE "-Wl,--version-script=${nccl_exports}" -Wl,--exclude-libs,ALL -Wl,--no-undefined)
set_target_properties(unjam_nccl PROPERTIES
  OUTPUT_NAME nccl VERSION 2 SOVERSION 2 LINK_DEPENDS "${nccl_exports}" LINKER_LANGUAGE CXX
  LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/nccl"
  BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/..")
