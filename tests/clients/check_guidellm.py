"""guidellm run against chat and completions, streamed and not: no request fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKPOINT = Path(__file__).parents[2] / "plugins/models/demo/src/lmkit_model_demo/checkpoint"


@pytest.mark.parametrize(("path", "stream"), [("/v1/chat/completions", "true"), ("/v1/completions", "false")])
def test_run(url: str, path: str, stream: str, tmp_path: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive",
        "--backend", f"kind=openai_http,target={url},model=demo,request_format={path},stream={stream}",
        "--tokenizer", f"kind=huggingface_auto,model={CHECKPOINT}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0)
