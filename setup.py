"""Build the extension module: C cores by make, the binding by the C++ compiler, the CUDA library when nvcc is there.

Settings, from the environment:
  CC, CXX, NVCC       compilers; nvcc is looked for in CUDA_HOME too
  MAX_JOBS            parallel compilations; all processors by default
  DSC_BUILD_DIR       folder that keeps object files, so that a later build compiles changed files only;
                      by default setuptools' temporary folder
  DSC_CCACHE          0: without the compiler cache, which otherwise serves where `ccache` is on PATH
  DSC_BUILD_CUDA      0: never build the CUDA library; 1: fail without nvcc; unset: build it when nvcc is found
"""

import importlib.metadata
import importlib.util
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BINDING = Path("ops/binding")
CUDA_LIBRARY = "libdsc_cuda.so"
# The header that every handle includes.
PRECOMPILED = "handles.h"

# torch 2.10: the oldest version whose stable ABI has all functions that the binding calls. One binary then serves all
# later versions.
TORCH_TARGET_VERSION = "0x020a000000000000"
TORCH_MINIMUM = (2, 10)

# errors.py imports nothing of the package, so it can be loaded before the package can be imported.
BuildError = runpy.run_path(str(ROOT / "deepspeed_c" / "errors.py"))["BuildError"]


def find_program(variable: str, default: str, purpose: str) -> list[str]:
    """Return the command in the environment variable ``variable``, or ``default``.

    The command may have arguments ("ccache gcc").
    """
    command = shlex.split(os.environ.get(variable, default))
    if not command or shutil.which(command[0]) is None:
        raise BuildError(
            f"no {purpose}: {' '.join(command) or variable!r} is not on PATH",
            where="building deepspeed_c",
            fix=f"install gcc, g++ and make (Debian: apt-get install build-essential), or name another in {variable}",
        )
    return command


def find_torch() -> Path:
    """Return the folder of the installed torch without importing torch, because the import takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(
            "no torch to build against",
            where="building deepspeed_c",
            fix="pip install 'torch>=2.10', then pip install --no-build-isolation .",
        )
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < TORCH_MINIMUM:
        raise BuildError(
            f"torch {version} is too old",
            where="building deepspeed_c",
            fix="pip install 'torch>=2.10' (the stable ABI that is used)",
        )
    return Path(spec.submodule_search_locations[0])


def find_pybind11() -> str:
    """Return the folder of the headers of pybind11, which only the build needs."""
    try:
        import pybind11
    except ImportError as error:
        raise BuildError(
            "no pybind11 to build with", where="building deepspeed_c", fix="pip install pybind11"
        ) from error
    return pybind11.get_include()


def find_nvcc() -> str | None:
    wish = os.environ.get("DSC_BUILD_CUDA", "")
    if wish not in ("", "0", "1"):
        raise BuildError(
            f"DSC_BUILD_CUDA is {wish!r}", where="building deepspeed_c", fix="set it to 0 or 1, or leave it unset"
        )
    if wish == "0":
        return None
    in_cuda_home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or (str(in_cuda_home) if in_cuda_home.is_file() else None)
    if nvcc is None and wish == "1":
        raise BuildError(
            "DSC_BUILD_CUDA=1 and no nvcc", where="building deepspeed_c", fix="put nvcc on PATH, or name it in NVCC"
        )
    return nvcc


def find_ccache(make: list[str]) -> list[str]:
    """Return the words to put before a compiler's command: the compiler cache, or none."""
    asked = [*make, "-s", "--no-print-directory", "-C", "csrc", "ccache"]
    words = shlex.split(subprocess.run(asked, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True).stdout)
    # Paths below the base folder count as relative, so that a clone in another folder finds the same objects.
    return ["env", f"CCACHE_BASEDIR={ROOT}", *words] if words else []


def run(command: list[str], says: str, ccache: Sequence[str] = ()) -> None:
    print(says, flush=True)
    try:
        subprocess.run([*ccache, *command], cwd=ROOT, check=True)
    except subprocess.CalledProcessError as error:
        raise BuildError(
            f"{command[0]} ended with status {error.returncode}; its messages are above",
            where=shlex.join(command),
            fix="see the first error above",
        ) from error


def compile_changed(ccache: list[str], command: list[str], source: str, made: Path) -> None:
    """Compile ``source``, unless its object was made by this command and is younger than all its dependencies.

    The cache is no part of the command: objects stay valid when ccache is installed or removed.
    """
    said, listed = made.with_suffix(".command"), made.with_suffix(".d")
    # The paths of the sources and of the build do not affect the object: those in another folder give the same object.
    words = shlex.join(command).replace(f"{made.parent}/", "BUILD/").replace(str(ROOT), "ROOT")
    if said.is_file() and said.read_text() == words and is_younger(made, listed):
        return
    said.unlink(missing_ok=True)
    run([*command, "-o", str(made)], f"CXX {source}", ccache)
    # ccache lists relative paths, which name nothing when sources in another folder use this object.
    listed.write_text(f"{made.name}: {' '.join(str(ROOT / name) for name in dependencies(listed))}\n")
    said.write_text(words)


def precompile(ccache: list[str], compiler: list[str], folder: Path) -> Path:
    """Precompile the headers that every handle includes, and return the header to include before all others."""
    header, text = folder / "precompiled.h", f'#include "{PRECOMPILED}"\n'
    if not header.is_file() or header.read_text() != text:
        header.write_text(text)
    command = [*compiler, "-MMD", "-x", "c++-header", str(header)]
    compile_changed(ccache, command, PRECOMPILED, folder / "precompiled.h.gch")
    return header


def dependencies(listed: Path) -> list[str]:
    """Return the names of the files that the compiler listed in ``listed``."""
    return listed.read_text().replace("\\\n", " ").split(":", 1)[1].split()


def is_younger(made: Path, listed: Path) -> bool:
    """Return whether all files that the compiler listed in ``listed`` exist and are older than ``made``."""
    try:
        return all(Path(name).stat().st_mtime_ns <= made.stat().st_mtime_ns for name in dependencies(listed))
    except FileNotFoundError:
        return False


def names_torch(source: str) -> bool:
    """Return whether ``source`` includes torch: operators and their helpers do; handles and exceptions do not."""
    return not Path(source).stem.startswith(("handles_", "module", "status"))


class Tools(NamedTuple):
    """The build's programs and folders, found before any step starts."""

    jobs: int
    make: list[str]
    cc: list[str]
    cxx: list[str]
    nvcc: str | None  # None: no CUDA library
    torch: Path
    pybind11: str  # folder of its headers
    ccache: list[str]  # empty: no compiler cache

    @staticmethod
    def find() -> "Tools":
        make = find_program("MAKE", "make", "make")
        return Tools(
            jobs=int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1),
            make=make,
            cc=find_program("CC", "gcc", "C compiler"),
            cxx=find_program("CXX", "g++", "C++ compiler"),
            nvcc=find_nvcc(),
            torch=find_torch(),
            pybind11=find_pybind11(),
            ccache=find_ccache(make),
        )


class BuildExtension(build_ext):
    """Run make for the C cores and the CUDA library, then build the binding."""

    def run(self) -> None:
        self.is_in_place = bool(self.inplace or self.editable_mode)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        tools = Tools.find()
        build = (ROOT / (os.environ.get("DSC_BUILD_DIR") or self.build_temp)).resolve()
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        make_csrc = [
            *tools.make,
            "-C",
            "csrc",
            f"-j{tools.jobs}",
            # Relative, as all paths in csrc/Makefile: a compiler cache then serves clones in other folders.
            f"BUILD={os.path.relpath(build / 'csrc', ROOT / 'csrc')}",
            f"CC={shlex.join(tools.cc)}",
        ]
        run(make_csrc, "make -C csrc")
        cuda_library = target.parent / CUDA_LIBRARY
        cuda_library.unlink(missing_ok=True)  # an earlier build may have left it
        if tools.nvcc is not None:
            run([*make_csrc, f"NVCC={tools.nvcc}", "cuda"], "make -C csrc cuda")
            shutil.copyfile(build / "csrc" / CUDA_LIBRARY, cuda_library)
        objects = self._compile(tools, ext.sources, build / "binding")
        self._link(tools, objects, build / "csrc" / "libdsc.a", target, self.is_in_place)

    def _compile(self, tools: Tools, sources: list[str], folder: Path) -> list[Path]:
        flags = [
            # The binding has no hot loops, so more than -O1 takes time to compile and saves none.
            *("-std=c++17", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"),
            f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
            f'-DDSC_BUILD_TORCH_TARGET="{TORCH_TARGET_VERSION}"',
            f'-DDSC_BUILD_TORCH="{importlib.metadata.version("torch")}"',
            f'-DDSC_BUILD_COMPILER="{shlex.join(tools.cxx)}"',
            f"-DDSC_BUILD_CUDA={int(tools.nvcc is not None)}",
            *(f"-I{ROOT / part}" for part in ("csrc/include", BINDING)),
            f"-fmacro-prefix-map={ROOT}/=",  # keeps the path of the sources out of the module
            *shlex.split(os.environ.get("CXXFLAGS", "")),
        ]
        # -isystem silences warnings of foreign headers. Only files that name torch get torch's headers, because torch
        # brings its own pybind11.
        torch_headers = ["-isystem", str(tools.torch / "include")]
        python_headers = [part for path in (tools.pybind11, *self.include_dirs) for part in ("-isystem", path)]
        folder.mkdir(parents=True, exist_ok=True)
        # Files that include torch are compiled first, because the others wait for the precompiled header, which takes
        # as long as one file.
        sources = sorted(sources, key=names_torch, reverse=True)
        objects = [folder / f"{Path(source).stem}.o" for source in sources]
        with ThreadPoolExecutor(tools.jobs) as pool:
            header = pool.submit(precompile, tools.ccache, [*tools.cxx, *flags, *python_headers], folder)

            def make(source: str, made: Path) -> None:
                own = torch_headers if names_torch(source) else [*python_headers, "-include", str(header.result())]
                compile_changed(tools.ccache, [*tools.cxx, *flags, *own, "-MMD", "-c", source], source, made)

            list(pool.map(make, sources, objects))
        return objects

    @staticmethod
    def _link(tools: Tools, objects: list[Path], archive: Path, target: Path, exports_cores: bool) -> None:
        # A shipped module hides the cores' symbols. A build in place exports their C ABI, because tests call functions
        # that the binding does not use.
        symbols = "-Wl,-Bsymbolic" if exports_cores else "-Wl,--exclude-libs,ALL"
        # The module finds torch's library by name in the process, which has imported torch before the module.
        libraries = [f"-L{tools.torch / 'lib'}", "-ltorch_cpu", "-lpthread", "-ldl", "-lm"]
        command = [
            *(*tools.cxx, "-shared", symbols, "-Wl,-s", "-o", str(target), *map(str, objects)),
            *(str(archive), *libraries, *shlex.split(os.environ.get("LDFLAGS", ""))),
        ]
        run(command, f"LINK {target.name}")

    def copy_extensions_to_source(self) -> None:
        super().copy_extensions_to_source()
        installed = ROOT / "deepspeed_c" / CUDA_LIBRARY
        built = Path(self.build_lib) / "deepspeed_c" / CUDA_LIBRARY
        installed.unlink(missing_ok=True)
        if built.is_file():
            shutil.copyfile(built, installed)


if sys.platform != "linux" and {"build_ext", "bdist_wheel", "editable_wheel"} & set(sys.argv):
    raise BuildError(f"{sys.platform} is not supported", where="building deepspeed_c", fix="build on Linux")

setup(
    packages=[*find_packages(include=["deepspeed_c", "deepspeed_c.*"]), "deepspeed_c.ops"],
    ext_modules=[
        Extension("deepspeed_c._C", sorted(str(path.relative_to(ROOT)) for path in (ROOT / BINDING).glob("*.cpp")))
    ],
    cmdclass={"build_ext": BuildExtension},
)
