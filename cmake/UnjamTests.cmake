# tests/unit/X_test.cc becomes the executable and the ctest test X_test. Its tests whose names contain
# "Soak" are left out of that and run as X_test.soak, label "soak" (make soak). A file whose own name
# contains "soak" is all soak. Other .cc files in tests/unit are shared by all tests.
list(APPEND CMAKE_PREFIX_PATH "${PROJECT_SOURCE_DIR}/.venv/opt/usr")  # where tools/setup_env.py unpacks it
find_package(GTest)
if(NOT GTest_FOUND)
  message(FATAL_ERROR "The unit tests need GoogleTest, which was not found. Install it (Debian, Ubuntu: "
                      "apt-get install libgtest-dev libgmock-dev), or run `python3 tools/setup_env.py test`, "
                      "which unpacks it into .venv/opt, or configure with -DUNJAM_TESTS=OFF.")
endif()

file(GLOB test_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/unit/*_test.cc")
file(GLOB support_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/unit/*.cc")
list(REMOVE_ITEM support_sources ${test_sources})

add_library(unjam_test_support INTERFACE)
target_include_directories(unjam_test_support INTERFACE "${PROJECT_SOURCE_DIR}")
target_link_libraries(unjam_test_support INTERFACE unjam_static GTest::gtest GTest::gtest_main unjam_warnings)
if(TARGET GTest::gmock)
  target_link_libraries(unjam_test_support INTERFACE GTest::gmock)
endif()
if(support_sources)
  add_library(unjam_test_objects OBJECT ${support_sources})
  target_link_libraries(unjam_test_objects PRIVATE unjam_test_support)
endif()

function(unjam_add_gtest name source)
  add_executable(${name} ${source})
  target_link_libraries(${name} PRIVATE unjam_test_support)
  if(TARGET unjam_test_objects)
    target_link_libraries(${name} PRIVATE unjam_test_objects)
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:unjam_test_objects>)
  endif()
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  # The library has these checks; what the tests themselves do with pointers is left to ASan. These
  # three are a quarter of the time that a test takes to compile.
  if(UNJAM_SANITIZE MATCHES "undefined")
    target_compile_options(${name} PRIVATE -fno-sanitize=null,alignment,vptr)
  endif()
  set(kind usual)
  if(name IN_LIST quickly_compiled OR UNJAM_QUICK_TESTS)
    target_compile_options(${name} PRIVATE ${quick_to_compile})
    set(kind quick)
  endif()
  # Under the sanitizers and for a quick check, what all tests include is read once for those with equal
  # flags: half of a small test's time. The release build reads it in every test, so that none forgets what it
  # includes.
  if(UNJAM_SANITIZE OR UNJAM_QUICK_TESTS)
    get_property(first GLOBAL PROPERTY unjam_precompiled_${kind})
    if(first)
      target_precompile_headers(${name} REUSE_FROM ${first})
    else()
      set_property(GLOBAL PROPERTY unjam_precompiled_${kind} ${name})
      target_precompile_headers(${name} PRIVATE ${precompiled})
    endif()
  endif()
  set(results "${PROJECT_BINARY_DIR}/results")
  string(TOLOWER "${name}" lower)
  if(NOT lower MATCHES "soak")
    # ctest begins with the most expensive.
    list(FIND expensive ${name} place)
    if(place LESS 0)
      set(cost 0)
    else()
      math(EXPR cost "1000 - ${place}")
    endif()
    set(labels unit)
    if(name IN_LIST long)
      list(APPEND labels long)
    endif()
    set(shards 1)
    if(name IN_LIST sharded)
      set(shards 4)
    endif()
    math(EXPR last "${shards} - 1")
    foreach(shard RANGE ${last})
      set(test ${name})
      if(shards GREATER 1)
        set(test ${name}.${shard})
      endif()
      add_test(NAME ${test} COMMAND ${name} --gtest_filter=-*Soak* --gtest_brief=1
                                            --gtest_output=xml:${results}/${test}.xml)
      set_tests_properties(${test} PROPERTIES LABELS "${labels}" TIMEOUT ${UNJAM_TEST_TIMEOUT}
                                           COST ${cost})
      if(shards GREATER 1)
        set_tests_properties(${test} PROPERTIES
          ENVIRONMENT "GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${shard}")
      endif()
    endforeach()
    # Looked up in the text, so that ctest does not list soak tests that do not exist.
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
    file(STRINGS "${source}" soak REGEX "Soak")
    if(NOT soak)
      return()
    endif()
    set(filter --gtest_filter=*Soak*)
  endif()
  add_test(NAME ${name}.soak COMMAND ${name} ${filter} --gtest_output=xml:${results}/${name}.soak.xml)
  set_tests_properties(${name}.soak PROPERTIES LABELS soak TIMEOUT 3600)
endfunction()

# Sanitizer builds leave out what they cannot judge: code of one thread under the thread sanitizer, and
# under all of them those of the explorer, which copy their stacks (and skip themselves there), and
# plan_correct_test and plan_levels_test, minutes of arithmetic whose code plan_mistakes_test and
# levels_run_test run as well.
set(left_out)
if(UNJAM_SANITIZE)
  list(APPEND left_out copy_ring_explored_test courier_explored_test leaving_test protocol_test stream_call_reports_test
              plan_correct_test plan_levels_test)
endif()
if(UNJAM_SANITIZE MATCHES "thread")
  list(APPEND left_out plan_mistakes_test float_types_test leaves_test waitfor_test send_window_test
              lane_pacing_test overlap_rule_test cluster_placement_test carried_plans_test hop_mix_test
              hop_order_test agreed_order_test order_rule_test recall_test nvlink_test async_ring_test
              doorbell_test clock_test courier_test net_plugin_test plugin_fabric_test ucx_fabric_test reshard_plan_test
              reshard_paper_test)
endif()

# Of some tests, compiling takes many times longer than running. They speak to the library from outside and
# calculate little, so they are compiled as fast as it goes; what they test is optimised as ever. (But for
# engine_peers_test, which has engines of its own, and hop_order_test: how fast those are nobody minds.)
set(quickly_compiled api_test control_fuzz_test control_test engine_peers_test heap_test hop_order_test keys_test
                     kill_test point_to_point_test processes_test programs_test waitfor_test windows_test)
if(UNJAM_SANITIZE)
  set(quick_to_compile -O0)
elseif(UNJAM_QUICK_TESTS)
  set(quick_to_compile -O1 -Wno-array-bounds)  # g++ 12 warns of std::string's own memcpy() here
else()
  set(quick_to_compile -O1)
endif()

# Tests that take long, the longest first, so that no core is left alone with one at the end; and of these
# the ones whose work one program does in parts, as ctest tests of their own, so that all cores share it.
set(expensive collectives_test engine_holes_test leaves_test plan_correct_test processes_test late_call_test control_test
              kill_test point_to_point_test programs_test sim_test agent_test agent_hosts_test)
set(sharded collectives_test engine_holes_test)
# Tests that take more than some seconds: `make check` leaves them to `make test`.
set(long agent_hosts_test agent_test collectives_test engine_holes_test plan_correct_test processes_test leaves_test
         leaving_test protocol_test)

set(precompiled <algorithm> <array> <atomic> <chrono> <cmath> <cstring> <fstream> <functional> <map> <memory> <mutex>
                <random> <set> <sstream> <string> <thread> <vector> <gtest/gtest.h>)

# Tests that load the plugins below.
set(use_net_plugins courier_engines_test net_plugin_test plugin_fabric_test ucx_fabric_test)

# A test that has another name now would lose what these lists say of it.
foreach(name ${left_out} ${quickly_compiled} ${expensive} ${sharded} ${long} ${use_net_plugins})
  if(NOT EXISTS "${PROJECT_SOURCE_DIR}/tests/unit/${name}.cc")
    message(FATAL_ERROR "cmake/UnjamTests.cmake lists ${name}, which is not in tests/unit.")
  endif()
endforeach()

# Network plugins that tests load: ours as each version of NCCL's ABI, one with a function missing, and three
# that are none.
set(net_plugins)
function(unjam_add_net_plugin name source)
  add_library(net_${name} MODULE "${PROJECT_SOURCE_DIR}/tests/net/${source}")
  target_include_directories(net_${name} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src")
  target_compile_definitions(net_${name} PRIVATE ${ARGN})
  target_link_libraries(net_${name} PRIVATE unjam_warnings)
  set_target_properties(net_${name} PROPERTIES
    PREFIX "" OUTPUT_NAME ${name} LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests/net")
  set(net_plugins ${net_plugins} net_${name} PARENT_SCOPE)
endfunction()
foreach(version RANGE 6 12)
  unjam_add_net_plugin(v${version} test_plugin.cc UNJAM_NET_ABI=${version})
endforeach()
unjam_add_net_plugin(incomplete test_plugin.cc UNJAM_NET_ABI=8 UNJAM_NET_INCOMPLETE)
unjam_add_net_plugin(old unknown_plugin.cc UNJAM_NET_SYMBOL=ncclNetPlugin_v5)
unjam_add_net_plugin(new unknown_plugin.cc UNJAM_NET_SYMBOL=ncclNetPlugin_v13)
unjam_add_net_plugin(none unknown_plugin.cc)

foreach(source ${test_sources})
  get_filename_component(name "${source}" NAME_WE)
  if(name IN_LIST left_out)
    continue()
  endif()
  unjam_add_gtest(${name} "${source}")
  if(name MATCHES "^nccl_")
    target_sources(${name} PRIVATE $<TARGET_OBJECTS:unjam_nccl_objects> "${nccl_no_cuda}")
  endif()
  if(name IN_LIST use_net_plugins)
    add_dependencies(${name} ${net_plugins})
  endif()
endforeach()

add_test(NAME exported_symbols
         COMMAND "${PROJECT_SOURCE_DIR}/tools/check_exports.sh" $<TARGET_FILE:unjam>)
set_tests_properties(exported_symbols PROPERTIES LABELS unit)
add_test(NAME exported_symbols_nccl
         COMMAND "${PROJECT_SOURCE_DIR}/tools/check_exports.sh" $<TARGET_FILE:unjam_nccl>
                 "${PROJECT_SOURCE_DIR}/tests/fixtures/nccl/exports-2.28.9.txt")
set_tests_properties(exported_symbols_nccl PROPERTIES LABELS unit)
