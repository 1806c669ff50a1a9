"""A full disk: whatever lmkit writes, the error is typed or a warning, and nothing half-written is taken for whole."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import ConfigError
from lmkit_bench.result import make_result, write
from lmkit_cli.generate import _open


@contextmanager
def full_disk(left: int = 4096) -> Iterator[None]:
    """Files of more than `left` bytes cannot be written by this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_packed_weights_that_cannot_be_kept_are_a_warning(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    said = []
    for left in (100, 4096, 20_000, None):
        options = {"packed_cache": str(tmp_path), "max_length": 128, "kv_memory": "4MiB", "threads": 1}
        with full_disk(left or 1 << 40), LLM("demo", **options) as llm:
            said.append(llm.generate(["1 2 3"], params)[0].outputs[0].token_ids)
            warned = "could not be kept" in " ".join(llm.facts.warnings)
        whole = [path for path in tmp_path.iterdir() if path.suffix == ".safetensors"]
        assert list(tmp_path.iterdir()) == whole, "a torn file stays behind"
        assert warned == (left is not None)
        assert len(whole) == (left is None)
    assert all(tokens == said[0] for tokens in said)


def test_output_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    output = str(tmp_path / "out.jsonl")
    with pytest.raises(ConfigError, match="cannot write") as caught, full_disk(), _open(output, append=False) as out:
        out.write("x" * 1_000_000)
    assert "--resume" in caught.value.fix
    with full_disk(100), pytest.raises(ConfigError, match="cannot write"):
        write(make_result("latency", "x" * 1000, {}, {}), tmp_path / "result.json")
