"""Flags of other servers: the error says what to write here, and what it says exists."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from lmkit.api import LmkitError, UnknownKey
from lmkit.config import from_options
from lmkit.config.schema import leaves
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit_cli import errors, run
from lmkit_cli.hints import ELSEWHERE
from lmkit_cli.root import root

COMMANDS = re.compile(r"`lmkit ([a-z ]+)")
UNPROVEN = {"--tokenizer-path", "--lora", "--lora-paths"}  # they need files of their own; their options are checked


@pytest.fixture(scope="module")
def options() -> set[str]:
    """The options of `lmkit serve`, as they are when a wrong one is explained."""
    found: set[str] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "flag_hint", lambda flag, known: found.update(known))
        run(["serve", "demo", "--no-such-option"])
    return found


@pytest.mark.parametrize("flag", sorted(ELSEWHERE))
def test_what_a_hint_says_exists(flag: str, options: set[str]) -> None:
    hint = ELSEWHERE[flag]
    flags = {name for name in re.findall(r"--[a-z][\w.-]+", hint.text) if "." not in name}
    assert flags <= options, flags - options
    assert flag not in options, "it is an option here, so nobody asks for a hint"
    assert hint.example or hint.leave_out or flag in UNPROVEN
    for name in COMMANDS.findall(hint.text):
        with pytest.raises(SystemExit) as ended:
            root().main(args=[*name.split(), "--help"], prog_name="lmkit")
        assert ended.value.code == 0


@pytest.mark.parametrize("example", sorted({hint.example for hint in ELSEWHERE.values() if hint.example}))
def test_what_a_hint_recommends_is_taken(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By `serve`, and where it is about the engine also by what chooses everything for it."""
    args = shlex.split(example)
    model = [] if "--model" in args else ["demo"]
    assert run(["serve", *model, *args, "--platform", "cpu", "--explain"]) == 0
    engine = {leaf.flag for leaf in leaves().values()}
    if all(arg in engine or "." in arg for arg in args if arg.startswith("--")):
        assert run(["plan", *model, *args, "--platform", "cpu"]) == 0
    assert not capsys.readouterr().err


def test_what_is_left_out_is_so(tmp_path: Path) -> None:
    """What hints say happens anyway."""
    plan, _, _ = resolve(from_options({"model": "demo", "platform": "cpu"}))
    assert plan.value("prefix_cache") is True  # --enable-prefix-caching
    assert plan.choice("tool_parser") is not None  # --enable-auto-tool-choice
    assert plan.value("max_step_tokens") < plan.value("max_length", 1 << 20)  # --enable-chunked-prefill
    assert len(PluginHost().names("logits_processor")) > 1  # --logits-processors
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "auto_map": {"AutoModel": "x.Y"}}))
    (tmp_path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    with pytest.raises(LmkitError) as refused:  # --trust-remote-code
        resolve(from_options({"model": str(tmp_path), "platform": "cpu"}))
    assert "never run" in f"{refused.value.message} {refused.value.fix}"


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--tensor-parallel-size", "write --tp N"),
        ("--tensor_parallel_size", "write --tp N"),
        ("--gpu-memory-utilization", "write --kv-memory 90%"),
        ("--max-num-seqs", "write --max-rows N"),
        ("--download-dir", "write --cache-dir FOLDER"),
        ("--trust-remote-code", "leave it out: code of checkpoints is never run"),
        ("--speculative-config", "write --proposer NAME"),
        ("--ssl-keyfile", "write --tls-key FILE"),
        ("--max_rows", "write --max-rows"),
        ("--max-rwos", "did you mean --max-rows?"),
    ],
)
def test_the_nearest_flag_is_named(flag: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "demo", flag, "2"]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "plan", "serve"])
@pytest.mark.parametrize("flag", ["--logits-processor"])
def test_what_requests_name_is_no_option(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, flag, "echo"]) == 2
    shown = capsys.readouterr().err
    assert flag in shown
    assert "leave it out: requests name the logits processors" in shown
    name = flag.strip("-").replace("-", "_")
    with pytest.raises(UnknownKey, match=name):
        from_options({name: "echo"})


def test_a_wrong_name_is_explained_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "demo", "--tool-parser", "nope"]) == 2
    assert capsys.readouterr().err.count("deepseek_v31") == 1
