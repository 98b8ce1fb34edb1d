# Ways to install: component `sdk` goes into a prefix, for programs in C and C++; `python` into the Python
# package, and with it, where the CUDA part is built, `python_cuda` (pyproject.toml asks for both).
#
# Both hold the library under its SONAME, which is what a program that was linked to it asks for, and tell
# build systems of it: unjamConfig.cmake and unjam.pc, which find the rest from where they lie themselves, so
# that a prefix or an environment may be moved.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

add_custom_target(unjam_package DEPENDS unjam unjam_nccl)  # what the wheel needs
set(shared_libraries unjam)
if(TARGET unjam_cuda)
  add_dependencies(unjam_package unjam_cuda)
  list(APPEND shared_libraries unjam_cuda)
endif()

set(generated "${PROJECT_BINARY_DIR}/install")
get_target_property(soversion unjam SOVERSION)
set(soname "libunjam.so.${soversion}")
write_basic_package_version_file("${generated}/unjamConfigVersion.cmake" COMPATIBILITY SameMinorVersion)

# unjamConfig.cmake and unjam.pc for one layout.
#   unjam_install_descriptions(COMPONENT ROOT LIBDIR INCLUDEDIR LINK_OPTIONS [options of install()...])
# ROOT: the folder below the prefix that has the two others in it, or ""; LINK_OPTIONS: what unjam.pc says
# behind -L and -l.
function(unjam_install_descriptions component root libdir includedir link_options)
  set(library_dir "${root}${libdir}")
  set(include_dir "${root}${includedir}")
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/unjamConfig.cmake.in"
    "${generated}/${component}/unjamConfig.cmake" INSTALL_DESTINATION "${library_dir}/cmake/unjam"
    PATH_VARS library_dir include_dir NO_CHECK_REQUIRED_COMPONENTS_MACRO)
  # ${pcfiledir} is <root>/<libdir>/pkgconfig.
  file(RELATIVE_PATH up "/${libdir}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" up "${up}")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/unjam.pc.in" "${generated}/${component}/unjam.pc" @ONLY)
  install(FILES "${generated}/${component}/unjamConfig.cmake" "${generated}/unjamConfigVersion.cmake"
          DESTINATION "${library_dir}/cmake/unjam" COMPONENT ${component} ${ARGN})
  install(FILES "${generated}/${component}/unjam.pc"
          DESTINATION "${library_dir}/pkgconfig" COMPONENT ${component} ${ARGN})
endfunction()

# A wheel holds no symbolic links: the file has the name of the link that a loader follows, and what the
# linker follows, libunjam.so, is a line of text that names it.
set(runnable OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE)
install(FILES $<TARGET_FILE:unjam> DESTINATION unjam/lib RENAME "${soname}"
        PERMISSIONS ${runnable} COMPONENT python EXCLUDE_FROM_ALL)
file(CONFIGURE OUTPUT "${generated}/python/libunjam.so"
     CONTENT "/* For the linker; programs load @soname@. */\nINPUT(@soname@)\n" @ONLY)
install(FILES "${generated}/python/libunjam.so" DESTINATION unjam/lib COMPONENT python EXCLUDE_FROM_ALL)
install(FILES include/unjam/unjam.h include/unjam/reshard.h DESTINATION unjam/include/unjam COMPONENT python EXCLUDE_FROM_ALL)
# (No loader looks into a Python package unless a program tells it to.)
unjam_install_descriptions(python "unjam/" lib include " -Wl,-rpath,\${libdir}" EXCLUDE_FROM_ALL)
if(TARGET unjam_cuda)
  install(FILES $<TARGET_FILE:unjam_cuda> DESTINATION unjam/lib
          PERMISSIONS ${runnable} COMPONENT python_cuda EXCLUDE_FROM_ALL)
endif()

# libnccl.so.2 lies one folder further down: whoever adds the library's folder to a search path has not asked
# for it.
install(FILES $<TARGET_FILE:unjam_nccl> DESTINATION unjam/lib/nccl RENAME libnccl.so.2
        PERMISSIONS ${runnable} COMPONENT python EXCLUDE_FROM_ALL)
install(FILES $<TARGET_FILE:unjam_nccl> DESTINATION ${CMAKE_INSTALL_LIBDIR}/nccl RENAME libnccl.so.2
        PERMISSIONS ${runnable} COMPONENT sdk)

install(TARGETS ${shared_libraries} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT sdk)
install(FILES include/unjam/unjam.h include/unjam/reshard.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/unjam COMPONENT sdk)
unjam_install_descriptions(sdk "" "${CMAKE_INSTALL_LIBDIR}" "${CMAKE_INSTALL_INCLUDEDIR}" "")
