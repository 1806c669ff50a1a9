"""What is no call: the text around the calls of an output."""

from __future__ import annotations

from lmkit.api import ParseWarning

from lmkit_formats.markers import BLANKS, MAX_GAP
from lmkit_formats.sink import CallSink
from lmkit_formats.syntax import ToolSyntax


class Content:
    """Blanks at the start and next to calls are no content, and text between the calls of a section may be noise."""

    __slots__ = ("_blanks", "_drops_noise", "_gap", "_had_noise", "_noise", "_sink")

    def __init__(self, sink: CallSink, fmt: ToolSyntax) -> None:
        self._sink = sink
        self._blanks = BLANKS + fmt.separators  # between calls
        self._drops_noise = fmt.noise == "drop"
        self._gap: str | None = ""  # blanks since the start or the last call; None once there was text
        self._noise: list[str] = []  # text between the calls of a section, where it is dropped
        self._had_noise = False  # there was such text since the last call

    @property
    def pending(self) -> int:
        """Characters of which it is not decided whether they are content."""
        return len(self._gap or "")

    def text(self, text: str) -> None:
        if not text:
            return
        if self._gap is not None:
            gap = self._gap + text
            if len(gap) <= MAX_GAP and not gap.strip(self._blanks if self._sink.num_calls else BLANKS):
                self._gap = gap
                return
            self._gap, text = None, gap
        self._sink.text(text)

    def between_calls(self, text: str) -> None:
        """Text in a section, outside of its calls. Blanks before it belong to the section."""
        if not self._had_noise:
            text = text.lstrip(self._blanks)
            self._had_noise = bool(text)
        if self._drops_noise:
            self._noise.append(text)
        else:
            self.text(text)

    def end_noise(self) -> None:
        """A call follows, or the end of the section."""
        if noise := "".join(self._noise):
            self._sink.events.append(ParseWarning("text between tool calls was dropped", noise))
        self._noise, self._had_noise = [], False

    def take_gap(self) -> str:
        """A call begins: the blanks before it."""
        gap, self._gap = self._gap or "", ""
        return gap

    def flush(self) -> None:
        """The output ends. Blanks are content where there is nothing else."""
        self.end_noise()
        if self._gap and not self._sink.num_calls:
            self._sink.text(self._gap)
        self._gap = None
