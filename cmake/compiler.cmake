# A C++20 compiler: CXX, else the first of these that qualifies, newest first after the machine's default. And ccache.
# Included before project(), which would take a default that is too old.
set(HEP_INSTALL_COMPILER
    "Debian/Ubuntu: apt-get install g++; RHEL/Fedora: dnf install gcc-c++ (RHEL 8 and 9: gcc-toolset-13); conda: conda \
install cxx-compiler. CXX=/path/to/compiler names one.")
if(NOT CMAKE_HOST_SYSTEM_NAME STREQUAL Linux)
  message(FATAL_ERROR "hybrid_ep runs on Linux only (this is ${CMAKE_HOST_SYSTEM_NAME}); use a Linux machine, a "
                      "container or WSL 2.")
endif()

# The compiler's command as a list, and whether it compiles C++20 with its standard library.
function(hep_qualifies result)
  execute_process(COMMAND ${ARGN} -std=c++20 -fsyntax-only ${CMAKE_CURRENT_SOURCE_DIR}/cmake/cxx20_probe.cpp
                  RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET TIMEOUT 60)
  if(status STREQUAL 0)
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

if(NOT CMAKE_CXX_COMPILER)
  if(NOT "$ENV{CXX}" STREQUAL "")
    set(why "CXX=$ENV{CXX} is not there")
    set(candidates "$ENV{CXX}")
  else()
    set(why "there is none on PATH")
    set(candidates g++ clang++ c++)
    foreach(version RANGE 16 11 -1)
      list(APPEND candidates g++-${version})
    endforeach()
    foreach(version RANGE 22 14 -1)
      list(APPEND candidates clang++-${version})
    endforeach()
  endif()
  foreach(candidate IN LISTS candidates)
    separate_arguments(command UNIX_COMMAND "${candidate}")
    list(GET command 0 program)
    unset(found)
    find_program(found ${program} NO_CACHE)
    if(found)
      hep_qualifies(good ${command})
      if(good)
        set(ENV{CXX} "${candidate}")
        break()
      endif()
      set(why "${candidate} is too old or incomplete")
    endif()
  endforeach()
  if(NOT good)
    message(FATAL_ERROR "hybrid_ep needs a C++20 compiler, g++ 11 or clang++ 14 or newer, and ${why}. "
                        "${HEP_INSTALL_COMPILER}")
  endif()
endif()

find_program(HEP_CCACHE ccache NO_CACHE)
if(HEP_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${HEP_CCACHE})
endif()
