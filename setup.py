"""Compiles the kernel (hf_hsdraft/cpu) where the package is installed or a wheel is built.

Without a compiler, or for another processor, it is left out: a process compiles it later, or works without. With
HSDRAFT_KERNELS=all a wheel has that of each processor, as one for others should.
"""

import os
import runpy
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("hf_hsdraft/cpu")
SOURCE = FOLDER / "few_rows.cpp"
KERNEL = runpy.run_path(str(FOLDER / "kernel_files.py"))


def kernels():
    own = KERNEL["processor_flags"]()
    wanted = [KERNEL["AVX2"], KERNEL["AVX512"]] if own and os.environ.get("HSDRAFT_KERNELS") == "all" else [own]
    return {KERNEL["library_of"](SOURCE, flags): flags for flags in wanted if flags and KERNEL["cpp_compiler"]()}


class BuildKernels(build_ext):
    """Runs the compiler; what it refuses is left out."""

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext):
        out = Path(self.get_ext_fullpath(ext.name))
        out.parent.mkdir(parents=True, exist_ok=True)
        made = out.with_suffix(".made")
        try:
            subprocess.run(KERNEL["command"](KERNEL["cpp_compiler"](), SOURCE, ext.flags, made), check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"the kernel is left out: {error}") from error
        shutil.move(made, out)


class AnyPython(bdist_wheel):
    """The kernel asks for no version of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


def extension(name, flags):
    made = Extension(f"hf_hsdraft.cpu.{name}", [str(SOURCE)], optional=True)
    made.flags = flags
    return made


setup(
    ext_modules=[extension(name, flags) for name, flags in kernels().items()],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython},
)
