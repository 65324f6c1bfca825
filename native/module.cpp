// The extension module unspool._native: each part binds itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace unspool {
void bind_program(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_text(nb::module_& m);
}  // namespace unspool

NB_MODULE(_native, m) {
    // kernels are never freed, and reports of that at exit would only confuse users
    nb::set_leak_warnings(false);
    m.doc() = "unspool's native kernels; use them through unspool.ops.cpu and unspool.sampling";
    unspool::bind_program(m);
    unspool::bind_sampling(m);
    unspool::bind_text(m);
}
