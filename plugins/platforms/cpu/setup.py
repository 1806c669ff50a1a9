"""Builds the library of native kernels. Where there is no compiler the plugin installs without it, and says so."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(glob("csrc/*.cpp"))
FLAGS = ["-std=c++17", "-O3", "-g0", "-pthread", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=off"]
# Quiet about vectors passed by value, and about the compiler's own intrinsics.
FLAGS += ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
SANITIZE = os.environ.get("SANITIZE")  # "address,undefined": a library to be tested (nox -s asan)
if SANITIZE:
    FLAGS += [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1", "-g1"]
if os.environ.get("BUILD_ISA") == "native" and "avx512f" not in Path("/proc/cpuinfo").read_text():
    FLAGS += ["-DLK_UP_TO_AVX2"]  # of what this processor cannot run only the syntax is looked at
NEWEST = max(Path(p).stat().st_mtime for p in ["setup.py", *glob("csrc/*")])


class Build(build_ext):
    """Compiles the files side by side; takes the library that stands beside the Python code if it is up to date."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        beside = Path("src", *ext.name.split(".")[:-1], target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not SANITIZE and beside.exists() and beside.stat().st_mtime > NEWEST:
            if beside.resolve() != target.resolve():
                shutil.copy2(beside, target)
            return

        def compile_one(source: str) -> list[str]:
            if "-DLK_UP_TO_AVX2" in FLAGS:
                whole = [flag for flag in FLAGS if flag != "-DLK_UP_TO_AVX2"]
                self.spawn([*self.compiler.compiler_so_cxx, *whole, "-fsyntax-only", "-Icsrc", source])
            return self.compiler.compile(
                [source], self.build_temp, include_dirs=ext.include_dirs, extra_postargs=ext.extra_compile_args
            )

        with ThreadPoolExecutor(os.cpu_count()) as pool:  # more would hold up attention, half of the work
            objects = [name for names in pool.map(compile_one, ext.sources) for name in names]
        self.compiler.link_shared_object(
            objects, str(target), extra_postargs=ext.extra_link_args, target_lang=ext.language
        )


Path("build").mkdir(exist_ok=True)
setup(
    ext_modules=[
        Extension(
            "lmkit_platform_cpu._native",  # loaded with ctypes: it knows nothing of Python, whatever its file is called
            sources=SOURCES,
            include_dirs=["csrc"],
            language="c++",
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread", *([f"-fsanitize={SANITIZE}"] if SANITIZE else [])],
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": Build},
    # metadata of a build stays out of src: an editable install would show it as a second dist
    options={"bdist_wheel": {"py_limited_api": "cp311"}, "egg_info": {"egg_base": "build"}},
)
