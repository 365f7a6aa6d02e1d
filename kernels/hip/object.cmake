# cmake -DCLANG=clang-22 -DINPUT=a.hip -DOUTPUT=a.co -DARCH=gfx942 -DDEPFILE=a.d -P object.cmake
# Compiles device code to a code object. Any warning fails the build.
execute_process(
  COMMAND ${CLANG} -x hip --cuda-device-only -nogpuinc -nogpulib --offload-arch=${ARCH} -mcode-object-version=5
    --no-gpu-bundle-output -O3 -std=c++17 -Wall -Wextra -Werror
    -Xclang -dependency-file -Xclang ${DEPFILE} -Xclang -MT -Xclang ${OUTPUT} -o ${OUTPUT} ${INPUT}
  RESULT_VARIABLE rc OUTPUT_VARIABLE out ERROR_VARIABLE out)
if(out)
  message("${out}")
endif()
if(NOT rc EQUAL 0 OR out)
  file(REMOVE ${OUTPUT})
  message(FATAL_ERROR "${INPUT} did not compile to what is wanted")
endif()
