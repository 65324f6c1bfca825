// The extension module unspool._native: each part binds itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "unspool's native kernels; use them through unspool.ops.cpu and unspool.sampling";
}
