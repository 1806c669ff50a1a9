"""What is told of errors that nobody foresaw: a bug of ours, or a system that has nothing left to give."""

from __future__ import annotations

import errno

import pytest
from lmkit_cli.errors import shortage, show_bug


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
        (OSError(errno.ENFILE, "Too many open files in system"), "fs.file-max"),
        (OSError(errno.ENOSPC, "No space left on device"), "df -h"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "smaller model"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "disk"),
        (MemoryError(), "smaller model"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_the_system_has_no_more_of_is_said(
    error: Exception, said: str, wrapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where another error came of it, as of an event loop that cannot be closed."""
    if wrapped:
        try:
            try:
                raise error
            finally:
                raise RuntimeError("Cannot close a running event loop")
        except RuntimeError as outer:
            error = outer
    assert show_bug(error) == 1
    told = capsys.readouterr().err
    assert said in " ".join(told.split())
    assert "code: resources" in told
    assert "report this" not in told


@pytest.mark.parametrize("error", [ValueError("x"), OSError(errno.EPERM, "no"), RuntimeError("thread"), OSError("x")])
def test_all_else_is_ours(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    assert shortage(error) is None
    assert show_bug(error) == 1
    assert "report this" in " ".join(capsys.readouterr().err.split())
