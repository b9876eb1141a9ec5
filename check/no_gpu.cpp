// The GPU of a command that was built without CUDA: there is none, so nothing is called after the constructor.
#include <stdexcept>

#include "check/gpu.h"

namespace octile::check {

Gpu::Gpu(int index) : index_(index) { throw std::runtime_error(cuda_devices().reason); }
CudaDevice Gpu::facts() const { return {}; }
GpuBytes Gpu::allocate(std::size_t) const { return {nullptr, nullptr}; }
GpuBytes Gpu::allocate_on_host(std::size_t) const { return {nullptr, nullptr}; }
void Gpu::copy(void*, const void*, std::size_t) const {}
void Gpu::fill(void*, std::byte, std::size_t) const {}
void Gpu::wait() const {}
void Gpu::run_as_graph(const std::function<void()>&) const {}
std::vector<double> Gpu::time(int, const std::function<void()>&, const std::function<void()>&) const { return {}; }
double Gpu::read_rate() const { return 0; }
double Gpu::copy_rate() const { return 0; }
double Gpu::int8_rate(std::string&) const { return 0; }

}  // namespace octile::check
