"""Conan's recipe of the C++ library: conan create . (-o "octile/*:cuda=True" with a CUDA toolkit)."""

import re
from pathlib import Path

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout


class Octile(ConanFile):
    name = "octile"
    description = "Quantized linear layers for CPUs and NVIDIA GPUs, forward and backward"
    license = "Apache-2.0"
    topics = ("quantization", "int8", "linear", "cuda")
    package_type = "library"
    settings = "os", "compiler", "build_type", "arch"
    options = {"shared": [True, False], "fPIC": [True, False], "cuda": [True, False]}
    default_options = {"shared": True, "fPIC": True, "cuda": False}
    implements = ["auto_shared_fpic"]
    exports_sources = ("CMakeLists.txt", "*.md", "LICENSE", "cmake/*", "docs/*", "include/*", "src/*", "bench/peers/README.md",
                       "bench/peers/gpu/README.md")

    def set_version(self):
        header = Path(self.recipe_folder, "include/octile/octile.h").read_text()
        self.version = ".".join(re.findall(r"#define OCTILE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))

    def validate(self):
        check_min_cppstd(self, 20)
        if self.options.cuda and not self.options.shared:
            raise ConanInvalidConfiguration("octile with cuda is a shared library, which has CUDA's runtime inside")

    def layout(self):
        cmake_layout(self)

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["OCTILE_CUDA"] = bool(self.options.cuda)
        for part in ("BUILD_TESTING", "OCTILE_BUILD_CLI", "OCTILE_CHECKPOINT", "OCTILE_TILE"):
            toolchain.cache_variables[part] = False
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()

    def package_info(self):
        self.cpp_info.libs = ["octile"]
        self.cpp_info.set_property("cmake_target_name", "octile::octile")
        if not self.options.shared:
            self.cpp_info.defines = ["OCTILE_STATIC"]
            self.cpp_info.system_libs = ["m", "pthread"]
