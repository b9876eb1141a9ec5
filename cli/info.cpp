// octile info: this machine, and for each row of the kernel table whether it can run here.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/cli.h"
#include "cli/support/console.h"
#include "cli/support/machine.h"
#include "cpu/support/isa.h"
#include "cuda/devices.h"
#include "octile/octile.h"
#include "octile/plan.h"
#include "plan/tuning.h"

namespace octile::cli {

namespace {

constexpr const char* kFooter =
    R"("uses" is the widest instruction set that kernels exist for and that may be used
here; the environment variable OCTILE_ISA (baseline, avx2, avxvnni, avx512, avx512vnni,
avx512bf16, amx; on 64-bit Arm baseline, neon, i8mm) forces a narrower one.

"tuning" is the file of measured kernels (octile tune) that plans use, for each device.

The kernel table has one row per kernel. "yes" in its last column: a plan can choose the
kernel on this machine; otherwise the column says what is missing. `octile check` compares
the rows that can run with the oracle, `octile bench` times them.

Examples:
  octile info
  octile info --json | jq -r '.kernels[] | select(.available) | .name')";

std::string capability(const CudaDevice& gpu) { return std::to_string(gpu.major) + "." + std::to_string(gpu.minor); }

std::string binary_size(std::int64_t bytes) {
  constexpr std::int64_t kKi = 1024;
  if (bytes < kKi * kKi) return std::to_string(bytes / kKi) + " KiB";
  if (bytes < kKi * kKi * kKi) return std::to_string(bytes / (kKi * kKi)) + " MiB";
  return fixed(static_cast<double>(bytes) / static_cast<double>(kKi * kKi * kKi), 1) + " GiB";
}

void print_json(const Machine& machine, const CudaDevices& cuda) {
  using nlohmann::json;
  json isas = json::object();
  for (const Isa& isa : machine.isas) isas[isa.name] = isa.usable;
  json caches = json::array();
  for (const Cache& cache : machine.caches) caches.push_back({{"name", cache.name}, {"bytes", cache.bytes}});
  json gpus = json::array();
  for (const CudaDevice& gpu : cuda.devices) {
    gpus.push_back({{"name", gpu.name},
                    {"compute_capability", capability(gpu)},
                    {"memory_bytes", gpu.memory},
                    {"multiprocessors", gpu.sms}});
  }
  json tunings = json::array();
  for (const Device device : all_devices()) {
    const std::shared_ptr<const Tuning> tuning = tuning_of(device);
    tunings.push_back({{"device", tuning_device(device)},
                       {"file", tuning->path.string()},
                       {"used", tuning->reason.empty()},
                       {"reason", tuning->reason}});
  }
  json rows = json::array();
  for (const KernelInfo& kernel : kernels()) {
    rows.push_back({{"name", kernel.name},
                    {"operation", kernel.operation},
                    {"device", name(kernel.device)},
                    {"available", kernel.reason.empty()},
                    {"reason", kernel.reason}});
  }
  const json document = {{"version", octile_version()},
                         {"cpu",
                          {{"name", machine.cpu},
                           {"threads", machine.threads},
                           {"isas", isas},
                           {"isa", cpu::name(cpu::isa())},
                           {"isa_reason", cpu::explain_isa()},
                           {"caches", caches}}},
                         {"gpus", gpus},
                         {"gpus_reason", cuda.reason},
                         {"tuning", tunings},
                         {"kernels", rows}};
  // What a driver calls a device need not be UTF-8.
  std::cout << document.dump(2, ' ', false, json::error_handler_t::replace) << "\n";
}

void print_text(const Machine& machine, const CudaDevices& cuda) {
  std::string isas;
  for (const Isa& isa : machine.isas) {
    if (isa.usable) isas += (isas.empty() ? "" : " ") + isa.name;
  }
  std::string caches;
  for (const Cache& cache : machine.caches) {
    caches += (caches.empty() ? "" : ", ") + cache.name + " " + binary_size(cache.bytes);
  }
  std::cout << "octile  " << octile_version() << "\n"
            << "cpu     " << machine.cpu << ", " << machine.threads << (machine.threads == 1 ? " thread" : " threads")
            << "\n";
  if (!isas.empty()) std::cout << "isas    " << isas << "\n";
  std::cout << "uses    " << cpu::explain_isa() << "\n";
  if (!caches.empty()) std::cout << "caches  " << caches << "\n";
  for (const CudaDevice& gpu : cuda.devices) {
    std::cout << "gpu     " << gpu.name << ", compute capability " << capability(gpu) << ", "
              << binary_size(static_cast<std::int64_t>(gpu.memory)) << ", " << gpu.sms << " SMs\n";
  }
  if (cuda.devices.empty()) std::cout << "gpu     none: " << cuda.reason << "\n";

  for (const Device device : all_devices()) {
    std::cout << "tuning  " << name(device.type) << ": " << in_words(*tuning_of(device)) << "\n";
  }

  std::vector<std::vector<std::string>> rows;
  for (const KernelInfo& kernel : kernels()) {
    rows.push_back({kernel.name, kernel.operation, std::string(name(kernel.device)),
                    kernel.reason.empty() ? "yes" : "no: " + kernel.reason});
  }
  std::cout << "\n" << format_table({"kernel", "operation", "device", "runs here"}, rows, 4);
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Show this machine, and which kernels can run on it");
  command->footer(kFooter);
  auto as_json = std::make_shared<bool>(false);
  command->add_flag("--json", *as_json, "Write one JSON document instead of text");
  command->callback([as_json] {
    const Machine machine = this_machine();
    const CudaDevices cuda = cuda_devices();
    *as_json ? print_json(machine, cuda) : print_text(machine, cuda);
  });
}

}  // namespace octile::cli
