# DSA_VERSION_STRING: the project's version, with the commit when this is a git checkout. DSA_BUILD_COMMIT: the commit alone, or
# "unknown".
set(DSA_VERSION_STRING "${PROJECT_VERSION}")
set(DSA_COMMIT "" CACHE STRING "Commit of the source, where it is built without its git folder")
set(DSA_BUILD_COMMIT "unknown")
if(DSA_COMMIT)
  set(DSA_BUILD_COMMIT "${DSA_COMMIT}")
  set(DSA_VERSION_STRING "${PROJECT_VERSION}+${DSA_COMMIT}")
endif()
find_package(Git QUIET)
if(GIT_FOUND AND EXISTS "${PROJECT_SOURCE_DIR}/.git")
  execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse --short=12 HEAD
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET RESULT_VARIABLE rc)
  if(rc EQUAL 0)
    set(DSA_BUILD_COMMIT "${commit}")
    set(DSA_VERSION_STRING "${PROJECT_VERSION}+${commit}")
  endif()
endif()
