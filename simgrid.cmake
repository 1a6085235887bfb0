# How SimGrid's source package is built by `make setup`: without what the rehearsal does not use, and with little optimisation.
# It takes two thirds of the time so, 3 to 6 minutes on two cores; the package itself asks cmake for none of this, but cmake
# reads the file named by CMAKE_TOOLCHAIN_FILE first.
set(enable_lto OFF CACHE BOOL "")
set(enable_model-checking OFF CACHE BOOL "")
set(enable_sthread OFF CACHE BOOL "")
set(enable_fortran OFF CACHE BOOL "")
set(enable_compile_optimizations OFF CACHE BOOL "")
set(CMAKE_C_FLAGS_RELEASE "-O1 -g0 -fno-strict-aliasing -DNDEBUG" CACHE STRING "")
set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g0 -fno-strict-aliasing -DNDEBUG" CACHE STRING "")
