# libunjam.so with nothing exported but unjam*, and unjam_static for unit tests that need the insides.
find_package(Threads REQUIRED)

set(globs)
foreach(layer base program transport transport/network plan plan/algorithms plan/check plan/clock engine device device/host
              control reshard runtime sim api)
  list(APPEND globs "${PROJECT_SOURCE_DIR}/src/${layer}/*.cc")
endforeach()
file(GLOB sources CONFIGURE_DEPENDS ${globs})

add_library(unjam_objects OBJECT ${sources})
target_include_directories(unjam_objects PUBLIC "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
target_compile_options(unjam_objects PRIVATE -Wpedantic)  # tests may use __int128 and the like
target_link_libraries(unjam_objects PUBLIC Threads::Threads PRIVATE unjam_warnings)

# Under the sanitizers and for pip a layer's files are compiled as one: reading the headers again and again takes
# a third of that time. The release build compiles every file alone, so that none forgets what it includes. Alone
# here as well: the leaves, each for instructions of its own, and api, whose files have helpers of the same names.
if(UNJAM_SANITIZE OR UNJAM_UNITY)
  foreach(source ${sources})
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}/src" OUTPUT_VARIABLE file)
    cmake_path(GET file PARENT_PATH layer)
    if(NOT layer STREQUAL "api" AND NOT file MATCHES "/leaf_[^/]*$")
      set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${layer}")
    endif()
  endforeach()
  set_target_properties(unjam_objects PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endif()

add_library(unjam_static STATIC $<TARGET_OBJECTS:unjam_objects>)
target_include_directories(unjam_static PUBLIC "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(unjam_static PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
set_target_properties(unjam_static PROPERTIES EXCLUDE_FROM_ALL ON)

set(exports "${PROJECT_SOURCE_DIR}/cmake/unjam.map")
add_library(unjam SHARED $<TARGET_OBJECTS:unjam_objects>)
target_include_directories(unjam INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
                                           "$<INSTALL_INTERFACE:include>")
target_link_libraries(unjam PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
target_link_options(unjam PRIVATE "-Wl,--version-script=${exports}" -Wl,--exclude-libs,ALL -Wl,--no-undefined)
set_target_properties(unjam PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION 0 LINK_DEPENDS "${exports}" LINKER_LANGUAGE CXX)
add_library(unjam::unjam ALIAS unjam)
