# The rule for UNJAM_CUDA, stated here and nowhere else: whether kernels are compiled, and for which GPUs.
#
#   AUTO  for the GPUs of this machine; none here, or no nvcc 13: host only
#   ON    for the GPUs of this machine; none here: for all that unjam supports; no nvcc 13: an error
#   OFF   host only
#
# CMAKE_CUDA_ARCHITECTURES chooses other GPUs than those of this machine; it does not turn OFF or AUTO into ON.
# `cmake -DUNJAM_CUDA=AUTO -P cmake/UnjamCudaChoice.cmake` prints for which GPUs a build would compile, or nothing
# (tools/demo.py asks it so).
set(UNJAM_CUDA_SUPPORTED "80-real;90a-real")  # A100; H100 and H200
if(NOT UNJAM_NVIDIA_DRIVER)
  set(UNJAM_NVIDIA_DRIVER "/proc/driver/nvidia/gpus")  # a folder in it for each GPU
endif()

# Sets `out` to an nvcc 13 or to "", and `why` to what stood against it. It is looked for in CUDACXX, CUDA_HOME,
# CUDA_PATH, PATH, /usr/local/cuda, and in the wheels that tools/cuda_toolchain.py installs into .venv.
function(unjam_find_nvcc out why)
  set(found "")
  if(CMAKE_CUDA_COMPILER)
    set(found "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    set(found "$ENV{CUDACXX}")
  else()
    find_program(UNJAM_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
                 PATHS /usr/local/cuda NO_CACHE)
    file(GLOB wheels "$ENV{VIRTUAL_ENV}/lib/python3*/site-packages/nvidia/cu13"
                     "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/../.venv/lib/python3*/site-packages/nvidia/cu13")
    set(candidates)
    if(UNJAM_NVCC)
      list(APPEND candidates "${UNJAM_NVCC}")
    endif()
    foreach(root ${wheels})
      if(EXISTS "${root}/bin/nvcc" AND EXISTS "${root}/lib64")
        list(APPEND candidates "${root}/bin/nvcc")
      endif()
    endforeach()
    foreach(candidate ${candidates})
      execute_process(COMMAND "${candidate}" --version OUTPUT_VARIABLE text ERROR_QUIET)
      if(text MATCHES "release 1[3-9]\\.")
        set(found "${candidate}")
        break()
      endif()
      set(${why} "${candidate} is older than CUDA 13" PARENT_SCOPE)
    endforeach()
    if(NOT candidates)
      set(${why} "no nvcc in CUDACXX, CUDA_HOME, PATH, /usr/local/cuda or .venv" PARENT_SCOPE)
    endif()
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# Sets `out` to what to compile for the GPUs of this machine, "" if there are none that unjam runs on, and `why`
# to words for it.
function(unjam_gpus_here out why)
  set(architectures "")
  set(words "there is no GPU on this machine")
  find_program(smi nvidia-smi NO_CACHE)
  set(told "")
  if(smi)
    # (A driver that hangs must not hang the build.)
    execute_process(COMMAND "${smi}" --query-gpu=compute_cap --format=csv,noheader TIMEOUT 60
                    OUTPUT_VARIABLE told ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${told}")
  file(GLOB known "${UNJAM_NVIDIA_DRIVER}/*")
  if(capabilities)
    foreach(capability ${capabilities})
      if(capability MATCHES "^8\\.")
        list(APPEND architectures 80-real)
      elseif(capability MATCHES "^9\\.")
        list(APPEND architectures 90a-real)
      elseif(capability VERSION_GREATER_EQUAL 10)
        list(APPEND architectures 90-virtual)  # the driver translates it when it is first used
      endif()
    endforeach()
    list(REMOVE_DUPLICATES architectures)
    list(SORT architectures)
    list(JOIN capabilities ", " words)
    set(words "the GPUs of this machine have compute capability ${words}")
  elseif(known)
    set(architectures "${UNJAM_CUDA_SUPPORTED}")
    set(words "there are GPUs here, and nvidia-smi does not tell which")
  endif()
  set(${out} "${architectures}" PARENT_SCOPE)
  set(${why} "${words}" PARENT_SCOPE)
endfunction()

# Sets `out_nvcc` and `out_architectures`, "" for a host-only build, and `out_words` to what was decided and why.
function(unjam_choose_cuda out_nvcc out_architectures out_words)
  string(TOUPPER "${UNJAM_CUDA}" wish)
  set(nvcc "")
  set(architectures "")
  if(NOT wish MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|YES|NO|1|0)$")
    message(FATAL_ERROR "UNJAM_CUDA is '${UNJAM_CUDA}'; it takes AUTO, ON or OFF.")
  elseif(wish MATCHES "^(OFF|FALSE|NO|0)$")
    set(words "host only, as asked by UNJAM_CUDA=OFF")
  else()
    unjam_find_nvcc(nvcc reason)
    unjam_gpus_here(architectures gpus)
    if(NOT nvcc AND NOT wish STREQUAL "AUTO")
      message(FATAL_ERROR "UNJAM_CUDA=ON, but ${reason}. Set CUDACXX to an nvcc 13, or run "
                          "`python3 tools/cuda_toolchain.py`, which installs one into .venv.")
    elseif(wish STREQUAL "AUTO" AND NOT architectures)
      set(words "host only, because ${gpus}; UNJAM_CUDA=ON compiles the kernels all the same (12 minutes of a core)")
    elseif(NOT nvcc)
      set(architectures "")
      set(words "HOST ONLY, though ${gpus}: ${reason} (tools/cuda_toolchain.py installs one into .venv)")
    else()
      if(CMAKE_CUDA_ARCHITECTURES)
        set(architectures "${CMAKE_CUDA_ARCHITECTURES}")
        set(gpus "as asked by CMAKE_CUDA_ARCHITECTURES")
      elseif(NOT architectures)
        set(architectures "${UNJAM_CUDA_SUPPORTED}")
        set(gpus "all that unjam supports")
      endif()
      list(LENGTH architectures count)
      math(EXPR minutes "6 * ${count}")
      set(words "kernels for ${architectures} (${gpus}) with ${nvcc}, about ${minutes} minutes of a core; UNJAM_CUDA=OFF skips them")
    endif()
  endif()
  set(${out_nvcc} "${nvcc}" PARENT_SCOPE)
  set(${out_architectures} "${architectures}" PARENT_SCOPE)
  set(${out_words} "${words}" PARENT_SCOPE)
endfunction()

# pip shows nothing of what a build prints. Who waits for it at a terminal is told there what is compiled.
function(unjam_tell_builder words)
  if(SKBUILD)
    execute_process(COMMAND sh -c "printf '\\n[unjam] CUDA part: %s\\n' \"$1\" >/dev/tty" sh "${words}"
                    OUTPUT_QUIET ERROR_QUIET)  # there may be no terminal
  endif()
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  unjam_choose_cuda(nvcc architectures words)
  message(NOTICE "${words}")  # to stderr
  if(architectures)
    execute_process(COMMAND "${CMAKE_COMMAND}" -E echo "${architectures}")
  endif()
endif()
