# cmake -DNVCC=nvcc -DINPUT=a.cu -DOUTPUT=a.fatbin -DDEPFILE=a.d -DTARGETS="-gencode ..." -P fatbin.cmake
# Compiles device code. Any warning fails the build; so does ptxas's C7512 (matrix products that it runs one after the
# other, at 15 % of a kernel's speed), which it prints as information.
separate_arguments(TARGETS)
execute_process(
  COMMAND ${NVCC} -O3 -std=c++17 -Werror all-warnings -MD -MF ${DEPFILE} -MT ${OUTPUT} ${TARGETS} -fatbin -o ${OUTPUT} ${INPUT}
  RESULT_VARIABLE rc OUTPUT_VARIABLE out ERROR_VARIABLE out)
if(out)
  message("${out}")
endif()
if(NOT rc EQUAL 0 OR out MATCHES "C7512|serialized due to")
  file(REMOVE ${OUTPUT})
  message(FATAL_ERROR "${INPUT} did not compile to what is wanted")
endif()
