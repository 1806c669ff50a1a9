"""What examples and the README show of the Python API runs as it stands there, on the demo checkpoint."""

from __future__ import annotations

import asyncio
import inspect
import re
import runpy
from pathlib import Path
from textwrap import dedent

import pytest

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = README.parents[3] / "examples" / "python_api"
# What a line of each says, and how many lines there are at least.
PRINTED = {
    "generate": ("chat: ", 4),
    "beam_search": ("What is 2 + 3?", 4),
    "steps": ("(all)", 4),
    "streams": ("Tell me -> ", 2),
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", list(PRINTED))
def test_an_example_says_what_it_should(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
    asyncio.run(main()) if inspect.iscoroutinefunction(main) else main()
    lines = capsys.readouterr().out.splitlines()
    text, least = PRINTED[name]
    assert any(text in line for line in lines)
    assert len(lines) >= least
    if name == "streams":
        assert any(line.count("|") > 2 for line in lines), "texts came as a whole"
    if name == "beam_search":
        scores = [float(line.split()[0]) for line in lines]
        assert scores == sorted(scores, reverse=True)


def test_the_code_of_the_readme_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"(?:^ {4}.*\n|^\n)*^ {4}.*\n", README.read_text(encoding="utf-8"), re.MULTILINE)
    path = tmp_path / "readme.py"
    path.write_text(dedent(block), encoding="utf-8")
    runpy.run_path(str(path))
    out = capsys.readouterr().out
    assert len(re.findall(r"^-\d.*What is 2 \+ 3\?", out, re.MULTILINE)) == 4  # beams, and their scores
    assert re.search(r"^a .*True$", out, re.MULTILINE)
