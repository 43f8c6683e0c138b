# hep_test_code(TARGET): its code is compiled as tests are, with the standard library parsed once a build. The product
# is compiled without that, so every file includes what it uses.
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/precompiled.cpp CONTENT "")
add_library(hep_precompiled OBJECT EXCLUDE_FROM_ALL ${CMAKE_BINARY_DIR}/precompiled.cpp)
target_link_libraries(hep_precompiled PRIVATE hep_test_flags)
target_precompile_headers(hep_precompiled PRIVATE <algorithm> <array> <atomic> <bit> <chrono> <cstdint> <cstring>
                          <deque> <functional> <map> <memory> <mutex> <random> <set> <sstream> <string> <thread>
                          <vector>)

function(hep_test_code target)
  target_link_libraries(${target} PRIVATE hep_test_flags)
  target_precompile_headers(${target} REUSE_FROM hep_precompiled)
endfunction()
