# Language standards, warnings and sanitizers, for every target.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_C_STANDARD 11)
set(CMAKE_C_STANDARD_REQUIRED ON)
set(CMAKE_C_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "unjam needs g++ 12 or newer; this is ${CMAKE_CXX_COMPILER_VERSION}. "
                      "Set CXX to a newer one.")
endif()

# Warnings belong to our own targets, so they are linked by name: target_link_libraries(x PRIVATE unjam_warnings).
add_library(unjam_warnings INTERFACE)
set(host_language "$<COMPILE_LANGUAGE:C,CXX>")
target_compile_options(unjam_warnings INTERFACE "$<${host_language}:-Wall;-Wextra>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC bug 105329: "text" + std::string() warns at -O2.
  target_compile_options(unjam_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>")
endif()
if(UNJAM_WERROR)
  target_compile_options(unjam_warnings INTERFACE "$<${host_language}:-Werror>")
endif()

if(UNJAM_SANITIZE)
  string(REPLACE ";" "," sanitizers "${UNJAM_SANITIZE}")
  # Not enum: C callers may pass any int where the API has an enum, and the API refuses it; that g++
  # does not assume otherwise (-fno-strict-enums) is its default.
  add_compile_options("$<${host_language}:-fsanitize=${sanitizers};-fno-sanitize=enum;-fno-sanitize-recover=all;-fno-omit-frame-pointer>")
  add_link_options(-fsanitize=${sanitizers})
  if(sanitizers STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    add_compile_options("$<${host_language}:-Werror=tsan>")  # a fence, which TSan cannot see
  endif()
endif()
