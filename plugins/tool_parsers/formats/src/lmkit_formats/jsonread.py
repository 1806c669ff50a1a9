"""Reads one JSON value (RFC 8259) as it arrives, and gives away what is certain to be part of it.

`out` joins to what the model wrote, character for character, but for two repairs: control characters inside strings
are escaped, and a backslash that begins no escape is doubled. Keys, commas and numbers are given away together with the
value that follows or when they are complete. Before the value is complete, what was given away is no valid JSON.
"""

from __future__ import annotations

import json
import re

MAX_DEPTH = 128  # nesting; deeper values are refused, as most readers of JSON would
_MAX_SCALAR = 1000  # characters of a number
_BLANK = " \t\r\n"
_BLANKS = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]*")
# a whole key with its colon, a whole scalar or string: the usual case in one match
_MEMBER = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"[ \t\r\n]*+:')
_VALUE = re.compile(
    r'(?:"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"|true|false|null'
    r"|-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,99})?+(?:[eE][+-]?[0-9]{1,9})?+)(?=[ \t\r\n,\]}])"
)
_VALUE_MODE, _FIRST, _NEXT, _KEY, _FIRST_KEY, _COLON, _STRING, _KEY_STRING, _SCALAR_MODE = range(9)
_IN_STRING, _BEFORE_VALUE = (_STRING, _KEY_STRING), (_VALUE_MODE, _FIRST)


class JsonReader:
    """feed(text, at) -> where it stopped. `state` is "more" until the value is complete ("done") or wrong ("bad")."""

    __slots__ = ("_closers", "_escape", "_held", "_mode", "_scalar", "begun", "out", "state")

    def __init__(self) -> None:
        self.state = "more"
        self.begun = False  # an object or array has its first member or its end; a scalar is complete
        self.out: list[str] = []  # what may be given away; the caller empties it
        self._held: list[str] = []  # consumed and not yet in `out`
        self._closers: list[str] = []
        self._mode = _VALUE_MODE
        self._escape = ""  # an escape that is not complete
        self._scalar = ""

    def leftover(self) -> str:
        """What was consumed and not given away."""
        return "".join(self._held) + self._escape

    def feed(self, text: str, at: int) -> int:
        """Reads to the end of the text, of the value, or to the first character that is wrong."""
        begin = at
        while at < len(text) and self.state == "more":
            mode = self._mode
            if mode in _IN_STRING:
                begin, at = self._string(text, begin, at)
            elif mode == _SCALAR_MODE:
                begin, at = self._long_scalar(text, begin, at)
            else:
                begin, at = self._structure(text, begin, at)
        if at > begin:
            self._held.append(text[begin:at])
        return at

    def end(self) -> None:
        """No more text comes: a number at the top level is complete."""
        if self._mode == _SCALAR_MODE and not self._closers:
            self._finish_scalar()

    def _give(self, text: str) -> None:
        if self._held:
            self.out.append("".join(self._held))
            self._held.clear()
        if text:
            self.out.append(text)

    def _structure(self, text: str, begin: int, at: int) -> tuple[int, int]:
        """Everything between strings, and whole strings and scalars. Returns (first character not given away, at)."""
        mode, closers, size, safe = self._mode, self._closers, len(text), begin
        key, value = _MEMBER.match, _VALUE.match
        while at < size:
            c = text[at]
            if c in _BLANK:
                at = _BLANKS.match(text, at).end()  # type: ignore[union-attr]
            elif mode == _NEXT:
                if c == ",":
                    mode = _KEY if closers[-1] == "}" else _VALUE_MODE
                elif c == closers[-1]:
                    closers.pop()
                    safe = at + 1
                    if not closers:
                        self.state = "done"
                        at += 1
                        break
                else:
                    self.state = "bad"
                    break
                at += 1
            elif mode in _BEFORE_VALUE:
                if c in "{[":
                    if len(closers) >= MAX_DEPTH:
                        self.state = "bad"
                        break
                    closers.append("}" if c == "{" else "]")
                    mode = _FIRST_KEY if c == "{" else _FIRST
                    at = safe = at + 1
                elif closers and (match := value(text, at)):
                    at = safe = match.end()
                    mode, self.begun = _NEXT, True
                elif c == '"':
                    at = safe = at + 1
                    mode, self.begun = _STRING, True
                    break
                elif c == "]" and mode == _FIRST:
                    mode, self.begun = _NEXT, True
                elif c in "-0123456789tfn":
                    mode = _SCALAR_MODE
                    break
                else:
                    self.state = "bad"
                    break
            elif mode == _COLON:
                if c != ":":
                    self.state = "bad"
                    break
                mode = _VALUE_MODE
                at += 1
            elif c == '"':  # _KEY or _FIRST_KEY
                self.begun = True
                if match := key(text, at):
                    at, mode = match.end(), _VALUE_MODE
                else:
                    at, mode = at + 1, _KEY_STRING
                    break
            elif c == "}" and mode == _FIRST_KEY:
                mode, self.begun = _NEXT, True
            else:
                self.state = "bad"
                break
        self._mode = mode
        if safe > begin:
            self._give(text[begin:safe])
        return safe, at

    def _string(self, text: str, begin: int, at: int) -> tuple[int, int]:
        """The inside of a string. A value is given away as it comes, a key is not."""
        is_key = self._mode == _KEY_STRING
        if self._escape:
            text_at = self._finish_escape(text, at)
            return text_at, text_at
        while at < len(text):
            at = _PLAIN.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text):
                break
            c = text[at]
            if c == '"':
                at += 1
                self._mode = _COLON if is_key else _NEXT
                if not is_key:
                    self._give(text[begin:at])
                    begin = at
                    if not self._closers:
                        self.state = "done"
                return begin, at
            if c == "\\" and (match := _ESCAPE.match(text, at)):
                at = match.end()
                continue
            self._flush_string(text[begin:at], is_key)
            if c == "\\" and _ESCAPE_BEGUN.match(text, at):
                self._escape = text[at:]
                return len(text), len(text)
            self._flush_string("\\\\" if c == "\\" else json.dumps(c)[1:-1], is_key)
            at += 1
            begin = at
        self._flush_string(text[begin:at], is_key)
        return at, at

    def _flush_string(self, text: str, is_key: bool) -> None:
        if is_key:
            self._held.append(text)
        else:
            self._give(text)

    def _finish_escape(self, text: str, at: int) -> int:
        """An escape that a split went through."""
        whole = self._escape + text[at : at + 6]
        is_key, used = self._mode == _KEY_STRING, 0
        if match := _ESCAPE.match(whole):
            used = match.end()
            self._flush_string(whole[:used], is_key)
        elif _ESCAPE_BEGUN.match(whole):
            self._escape = whole
            return len(text)
        else:
            used = len(self._escape)
            self._flush_string("\\" + self._escape, is_key)
        at += used - len(self._escape)
        self._escape = ""
        return at

    def _long_scalar(self, text: str, begin: int, at: int) -> tuple[int, int]:
        """A number or literal that is split, ends in a way that is not JSON, or stands alone."""
        end = _SCALAR_CHARS.match(text, at).end()  # type: ignore[union-attr]
        self._scalar += text[at:end]
        if len(self._scalar) > _MAX_SCALAR:
            self.state = "bad"
        elif end < len(text):
            self._held.append(text[begin:end])
            self._finish_scalar()
            begin = end
        return begin, end

    def _finish_scalar(self) -> None:
        if not _SCALAR.fullmatch(self._scalar):
            self.state = "bad"
            return
        self._scalar = ""
        self._give("")
        self._mode, self.begun = _NEXT, True
        if not self._closers:
            self.state = "done"
