# hybrid_ep._core, and beside it the CUDA library where nvcc is found.
find_package(Python 3.10 QUIET COMPONENTS Interpreter Development.Module)
if(NOT Python_Interpreter_FOUND)
  message(FATAL_ERROR "hybrid_ep needs Python 3.10 to 3.13")
endif()
if(NOT Python_Development.Module_FOUND)
  set(version ${Python_VERSION_MAJOR}.${Python_VERSION_MINOR})
  message(FATAL_ERROR "hybrid_ep needs Python.h, the C headers of Python ${version}. Debian/Ubuntu: apt-get install "
                      "python${version}-dev; RHEL/Fedora: dnf install python${version}-devel; Pythons of pyenv, uv and "
                      "conda have them.")
endif()
execute_process(COMMAND ${Python_EXECUTABLE} -c "import pybind11; print(pybind11.get_cmake_dir())"
                OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE status)
if(status)
  message(FATAL_ERROR "hybrid_ep needs pybind11: ${Python_EXECUTABLE} -m pip install pybind11")
endif()
find_package(pybind11 3 QUIET REQUIRED CONFIG)

# Not pybind11_add_module, which would add flags of its own (LTO, strip).
Python_add_library(_core MODULE WITH_SOABI ${HEP_MODULE_SOURCES} $<TARGET_OBJECTS:hep_host>
                   $<TARGET_OBJECTS:hep_engine> $<TARGET_OBJECTS:hep_balance>)
target_link_libraries(_core PRIVATE pybind11::headers)
target_link_libraries(_core PRIVATE rt)
target_link_options(_core PRIVATE -pthread)
set_target_properties(_core PROPERTIES DEFINE_SYMBOL "")
if(HEP_VARIANT)
  # For scripts/python_asan.py. -O0: bindings take half the time to compile. The warning: in pybind11's own code.
  target_link_libraries(_core PRIVATE hep_test_flags)
  target_compile_options(_core PRIVATE -O0 -g0 -Wno-maybe-uninitialized)
  set_target_properties(_core PROPERTIES EXCLUDE_FROM_ALL ON)
  return()
endif()

# hep_beside_sources(TARGET FILE): copied in one step: a running process keeps the file it has mapped.
function(hep_beside_sources target name)
  set(there ${CMAKE_SOURCE_DIR}/hybrid_ep/${name})
  add_custom_command(OUTPUT ${there} DEPENDS ${target}
                     COMMAND ${CMAKE_COMMAND} -E copy $<TARGET_FILE:${target}> ${there}.new
                     COMMAND ${CMAKE_COMMAND} -E rename ${there}.new ${there} COMMENT "hybrid_ep/${name}" VERBATIM)
  add_custom_target(${target}_beside_sources ALL DEPENDS ${there})
endfunction()

if(HEP_IN_TREE)
  hep_beside_sources(_core _core.${Python_SOABI}.so)
  set(cuda_folder ${CMAKE_SOURCE_DIR}/hybrid_ep)
else()
  install(TARGETS _core LIBRARY DESTINATION hybrid_ep)
  set(cuda_folder ${CMAKE_BINARY_DIR}/cuda_libraries)
endif()

# By a process of its own, which knows what changed.
set(wish "$ENV{HYBRID_EP_CUDA}")
if(NOT wish MATCHES "^[01]?$")
  message(FATAL_ERROR "HYBRID_EP_CUDA='${wish}' must be 0 (leave the CUDA library out) or 1 (insist on it)")
endif()
if(NOT wish STREQUAL "0")
  set(build_cuda ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/scripts/build_cuda.py)
  execute_process(COMMAND ${build_cuda} --find RESULT_VARIABLE status ERROR_VARIABLE why OUTPUT_QUIET
                  ERROR_STRIP_TRAILING_WHITESPACE)
  if(status EQUAL 0)
    file(MAKE_DIRECTORY ${cuda_folder})
    add_custom_target(cuda_libraries ALL COMMAND ${build_cuda} --out ${cuda_folder} USES_TERMINAL
                      COMMENT "the CUDA library; HYBRID_EP_CUDA=0 leaves it out")
    if(NOT HEP_IN_TREE)
      install(DIRECTORY ${cuda_folder}/ DESTINATION hybrid_ep)
    endif()
  elseif(wish)
    message(FATAL_ERROR "${why}")
  else()
    message(STATUS "${why}; everything else is built")
  endif()
endif()
