"""Test sessions. `nox` runs the default ones; `nox --list` shows all."""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["lint", "tests", "trials", "mix"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
PLUGINS = sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("plugins/*/*/pyproject.toml"))
GPU_PLUGINS = ["plugins/platforms/cuda", "plugins/attention/flashinfer"]  # without the libraries they need
LIBRARIES = ["plugins/models/decoders", "plugins/tool_parsers/formats"]
OURS = ["core", *LIBRARIES, *(f"plugins/frontends/{name}" for name in ("cli", "http", "bench"))]
KIT = [argument for path in (*OURS, "tests/kit") for argument in ("-e", f"./{path}")]
BUILD = ["flit_core>=3.11,<4", "setuptools>=77"]  # installed once, not once for each of our dists
SIDE_BY_SIDE = ["-n", "auto", "--maxprocesses", "4", "--dist", "loadscope"]  # what shares a fixture stays together
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def install(session: nox.Session) -> None:
    """The default set, what the tests need, and the GPU plugins without their libraries (to be refused)."""
    session.install("-q", *BUILD)
    session.install("-q", "--no-build-isolation", "-r", "requirements-test.txt")
    session.install("-q", "--no-build-isolation", "--no-deps", *(arg for path in GPU_PLUGINS for arg in ("-e", path)))


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    session.install("-q", "ruff==0.17.5")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


def check_types(session: nox.Session) -> None:
    session.install("-q", "mypy>=1.13", "types-PyYAML")
    session.run("mypy", "core/src/lmkit", "tests/kit/src", *(f"{path}/src" for path in PLUGINS))


@nox.session
def types(session: nox.Session) -> None:
    """Static types of the core and the plugins."""
    install(session)
    check_types(session)


@nox.session
def tests(session: nox.Session) -> None:
    """Static types, then all quick tests: unit, server, wire, end to end, house rules, parity with transformers."""
    install(session)
    check_types(session)
    session.run("pytest", "-q", "-m", "not slow", "--ignore=tests/mix", *SIDE_BY_SIDE, *session.posargs, env=ONE_THREAD)


@nox.session
def parsers(session: nox.Session) -> None:
    """Tool and reasoning formats: recorded outputs at every split, real calls, broken outputs, cost per token."""
    install(session)
    session.run("pytest", "-q", "tests/parsers", *session.posargs, env={"LMKIT_FUZZ": "2000"})


@nox.session
def parsers_long(session: nox.Session) -> None:
    """100,000 random and mutated outputs of every format on all cores (half an hour of one), and work linear in a
    megabyte of text."""
    install(session)
    session.install("-q", "pytest-xdist")
    pytest = ["pytest", "-v", "-n", "auto", *session.posargs]
    session.run(*pytest, "tests/parsers/test_fuzz.py", env=ONE_THREAD | {"LMKIT_FUZZ": "100000"})
    session.run(*pytest, "tests/parsers/test_linear.py", env=ONE_THREAD | {"LMKIT_LINEAR": "1000000"})
    session.run(*pytest, "plugins/tool_parsers", "-k", "linear", env=ONE_THREAD)


@nox.session
def trials(session: nox.Session) -> None:
    """The engine core against the hash model: random trials, and injected faults that must be found."""
    session.install("-q", *KIT, "-e", "./plugins/schedulers/fcfs", "-c", "constraints.txt")
    session.run("python", "-m", "lmkit_testing.trials", *(session.posargs or ["5000"]))


@nox.session
def parity(session: nox.Session) -> None:
    """Models against transformers: logits and greedy tokens, and logits of 6 random configurations of each family."""
    install(session)
    session.run("pytest", "-q", "tests/parity", *session.posargs, env={"LMKIT_CONFIGURATIONS": "6"})


@nox.session
def greedy_tokens(session: nox.Session) -> None:
    """What transformers says to the prompts of the parity tests, into tests/parity/greedy.json."""
    install(session)
    session.run("pytest", "-q", "tests/parity/test_architectures.py", *session.posargs, env={"GREEDY_TOKENS": "write"})


@nox.session
def structured(session: nox.Session) -> None:
    """Structured output: 2,000 sampled answers over the matrix, the JSON Schema test suite, round trips of formats."""
    install(session)
    session.run("pytest", "-q", "-s", "tests/structured", "plugins/grammars", *session.posargs, env=ONE_THREAD)


@nox.session
def model_table(session: nox.Session) -> None:
    """What every model architecture passes, into docs/models.md. `-- --shard 1/4` does a part and keeps the rest."""
    install(session)
    report = ["-p", "lmkit_testing.report", "--model-report", "docs/reference/models.json"]
    session.run("pytest", "-q", *report, "plugins/models", "tests/parity/test_architectures.py", *session.posargs)
    session.run("python", "tools/sync.py")


@nox.session
def mix(session: nox.Session) -> None:
    """Random subsets of plugins in clean environments: what is missing is explained, what is there works."""
    install(session)
    session.run("pytest", "-q", "tests/mix", *session.posargs)


@nox.session
def chaos(session: nox.Session) -> None:
    """Engines killed, stopped and attacked, and random requests in company: five minutes each."""
    install(session)
    env = ONE_THREAD | {"CHAOS_SECONDS": "300"}
    session.run("pytest", "-q", "-s", "tests/chaos", "tests/audit", *session.posargs, env=env)


@nox.session
@nox.parametrize("path", PLUGINS)
def plugin(session: nox.Session, path: str) -> None:
    """One plugin with core and its declared dependencies only: proves that they are complete."""
    args = ["--no-deps"] if path in GPU_PLUGINS else []
    session.install("-q", *KIT, "pytest-asyncio", "-c", "constraints.txt")
    local = ["-e", "plugins/models/llama"] if path == "plugins/models/demo" else []  # it needs a dist of this tree
    session.install("-q", *args, *local, "-e", path, "-c", "constraints.txt")
    session.run("pytest", "-q", f"{path}/tests")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every dist, install the wheels into a clean environment, run the doctor."""
    out = session.create_tmp()
    session.install("-q", "-c", "constraints.txt", "torch")
    paths = ["core", *(p for p in PLUGINS if p not in GPU_PLUGINS)]
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, *(f"./{p}" for p in paths))
    files = sorted(str(p) for p in Path(out).glob("lmkit_*.whl"))
    session.install("-q", "-c", "constraints.txt", *files)
    session.run("lmkit", "plugins", "doctor", "--strict")


@nox.session
def peers(session: nox.Session) -> None:
    """lmkit beside vLLM, llama.cpp, OpenVINO and transformers: docs/bench.md. Half an hour; an hour the first time."""
    session.install("-q", "-r", "requirements.txt", "matplotlib", "httpx")
    session.run("python", "bench/peers/environments.py", success_codes=[0, 1])  # whoever is missing is reported
    session.run("python", "bench/peers/run.py", *session.posargs)


@nox.session
def api(session: nox.Session) -> None:
    """Compare the public surface with core/api.lock.json (`nox -s api -- --write` renews it)."""
    session.install("-q", "-e", "./core", "-c", "constraints.txt")
    session.run("python", "tools/api_lock.py", *session.posargs)


KERNEL_TESTS = ["plugins/platforms/cpu/tests", "plugins/attention/cpu/tests"]


@nox.session
def kernels(session: nox.Session) -> None:
    """Native kernels against float64 on every instruction set of this machine: the long grid."""
    install(session)
    session.run("pytest", "-q", *KERNEL_TESTS, *session.posargs, env=ONE_THREAD | {"KERNEL_GRID": "1"})


@nox.session
def cross(session: nox.Session) -> None:
    """The native library by clang, for Arm (NEON) and for x86-64: that it compiles, without warnings."""
    session.install("-q", "ziglang")
    flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    sources = [str(path) for path in sorted((ROOT / "plugins/platforms/cpu/csrc").glob("*.cpp"))]
    for target in session.posargs or ("aarch64-linux-gnu", "x86_64-linux-gnu"):
        out = str(Path(session.create_tmp()).resolve() / f"native-{target}.so")
        session.run("python", "-m", "ziglang", "c++", "-target", target, *flags, *sources, "-o", out)


@nox.session
def asan(session: nox.Session) -> None:
    """The same tests with the native library under AddressSanitizer and UndefinedBehaviorSanitizer (needs gcc)."""
    install(session)
    session.install("-q", "setuptools>=77")
    out, source = Path(session.create_tmp()).resolve(), ROOT / "plugins/platforms/cpu"
    with session.chdir(source):
        build = ["--build-lib", str(out / "lib"), "--build-temp", str(out / "temp")]
        session.run("python", "setup.py", "-q", "build_ext", *build, env={"SANITIZE": "address,undefined"})
    package = "lmkit_platform_cpu"
    for folder in (source / "src", out / "lib"):  # the library replaces the one that was installed
        shutil.copytree(folder / package, out / "site" / package, dirs_exist_ok=True)
    libraries = [
        str(session.run("gcc", f"-print-file-name={name}.so", external=True, silent=True)).strip()
        for name in ("libasan", "libubsan", "libstdc++")
    ]
    env = ONE_THREAD | {
        "SANITIZE": "address,undefined",
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": str(out / "site"),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # Python keeps much until the end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    select = ["-s", "-p", "no:cacheprovider", "-k", "not fork and not works_alone"]
    session.run("pytest", "-q", *select, *KERNEL_TESTS, *session.posargs, env=env)
