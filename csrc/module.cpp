#include <nanobind/nanobind.h>
NB_MODULE(_kernels, m) { m.doc() = "C++ kernels of Backfill"; }
