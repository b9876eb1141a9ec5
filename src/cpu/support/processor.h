// The processor's name and signature.
#pragma once

#include <string>

namespace octile::cpu {

// "AMD EPYC 9654 96-Core Processor"; "unknown" where nothing tells.
std::string processor_name();

// The family, model and stepping, in hexadecimal: virtual machines give different processors one name. Empty where
// there is no such number.
std::string processor_signature();

// Without white space around it.
std::string trimmed(const std::string& text);

}  // namespace octile::cpu
