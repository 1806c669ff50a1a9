"""Writes a checkpoint of safetensors files as NumPy files: python -m lmkit_loader_npy.convert FOLDER OUT"""

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from lmkit_loader_npy.loader import BITS


def convert(folder, out):
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    (Path(out) / "tensors").mkdir()
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if dtype in BITS:
                name, tensor = f"{name}.{dtype}", tensor.view(getattr(torch, BITS[dtype].__name__))
            np.save(Path(out) / "tensors" / f"{name}.npy", tensor.numpy())


if __name__ == "__main__":
    convert(*sys.argv[1:])
