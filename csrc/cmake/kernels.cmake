# Compiles kernels/*/*.cu for the sm80 target into one fatbin each: SM80 machine code, SM90 machine code made
# from the same SM80 PTX, so that no newer instruction can slip in, and that PTX for cards to come. Beside each
# lies a .json file of what its kernels take: registers, stack, shared memory (compile_kernel.py).
#
# nvcc is taken from CUDACXX, PATH, or the nvidia-cuda-nvcc wheel of this Python. Without one the package is
# built without kernels: it still compiles models for every target and runs the host's.
if(NOT REWRIGHT_NVCC)
  find_program(REWRIGHT_NVCC nvcc HINTS ENV CUDACXX PATHS /usr/local/cuda/bin)
endif()
if(NOT REWRIGHT_NVCC)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u, pathlib as p; s = u.find_spec('nvidia'); print(*[f for d in (s.submodule_search_locations if s else []) for f in p.Path(d).glob('*/bin/nvcc')][:1])"
    OUTPUT_VARIABLE WHEEL_NVCC OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(WHEEL_NVCC)
    set(REWRIGHT_NVCC ${WHEEL_NVCC})
  endif()
endif()

if(NOT REWRIGHT_NVCC)
  message(WARNING "nvcc was not found: the kernels of the sm80 target are left out of this build")
  return()
endif()

set(FATBINS)
set(COMPILE_KERNEL ${CMAKE_CURRENT_SOURCE_DIR}/cmake/compile_kernel.py)
foreach(SOURCE ${KERNEL_SOURCES})
  get_filename_component(FAMILY ${SOURCE} DIRECTORY)
  get_filename_component(FAMILY ${FAMILY} NAME)
  get_filename_component(NAME ${SOURCE} NAME_WE)
  set(FATBIN ${CMAKE_CURRENT_BINARY_DIR}/${FAMILY}_${NAME}.fatbin)
  set(RESOURCES ${CMAKE_CURRENT_BINARY_DIR}/${FAMILY}_${NAME}.json)
  add_custom_command(
    OUTPUT ${FATBIN} ${RESOURCES}
    COMMAND ${Python_EXECUTABLE} ${COMPILE_KERNEL} ${RESOURCES} ${REWRIGHT_NVCC} -fatbin -std=c++17 -O3 --fmad=true
            -gencode arch=compute_80,code=sm_80 -gencode arch=compute_80,code=sm_90 -gencode arch=compute_80,code=compute_80
            --compress-mode=size -o ${FATBIN} ${SOURCE}
    DEPENDS ${SOURCE} ${KERNEL_HEADERS} ${COMPILE_KERNEL}
    COMMENT "nvcc ${FAMILY}/${NAME}.cu" VERBATIM)
  list(APPEND FATBINS ${FATBIN} ${RESOURCES})
endforeach()
add_custom_target(rewright_kernels ALL DEPENDS ${FATBINS})
# What `rewright doctor` says of them.
execute_process(COMMAND ${REWRIGHT_NVCC} --version OUTPUT_VARIABLE NVCC_VERSION ERROR_QUIET)
string(REGEX MATCH "V([0-9.]+)" NVCC_VERSION "${NVCC_VERSION}")
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/nvcc.txt "${CMAKE_MATCH_1}\n")
install(FILES ${FATBINS} ${CMAKE_CURRENT_BINARY_DIR}/nvcc.txt DESTINATION rewright/runtime/kernels)
