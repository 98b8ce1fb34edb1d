# Two ways to install: component `python` goes into the Python package (pyproject.toml asks for it alone),
# component `sdk` into a prefix, for programs in C and C++.
include(GNUInstallDirs)

add_custom_target(unjam_package DEPENDS unjam)  # what the wheel needs
set(shared_libraries unjam)
if(TARGET unjam_cuda)
  add_dependencies(unjam_package unjam_cuda)
  list(APPEND shared_libraries unjam_cuda)
endif()

# A wheel holds no symbolic links: one file under the plain name.
foreach(library ${shared_libraries})
  install(FILES $<TARGET_FILE:${library}> DESTINATION unjam/lib RENAME lib${library}.so
          PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ WORLD_EXECUTE
          COMPONENT python EXCLUDE_FROM_ALL)
endforeach()
install(FILES include/unjam/unjam.h DESTINATION unjam/include/unjam COMPONENT python EXCLUDE_FROM_ALL)

install(TARGETS ${shared_libraries} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT sdk)
install(FILES include/unjam/unjam.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/unjam COMPONENT sdk)
