"""Readers of chat templates: out of a file that is not one itself, or for checkpoints that carry none, or a bad one.

Example, entry point `[project.entry-points."lmkit.template"] toy = "toy_chat.hooks"`::

    from lmkit.api import TemplateSpec, hookimpl


    def template(path, checkpoint):
        return "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\\n{% endfor %}"


    @hookimpl
    def lmkit_templates():
        yield TemplateSpec(
            name="toy", summary="ROLE: CONTENT", target=f"{__name__}:template", models=("ToyForCausalLM",),
            interface=2,
        )
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from lmkit.contracts.checkpoint import Checkpoint
from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Known, Refusals, listed

TEXT_SUFFIXES = frozenset({"", ".j2", ".jinja", ".jinja2", ".template", ".tmpl", ".tpl", ".txt"})  # of text as it is


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSpec(Spec):
    """target: (path: Path, checkpoint: Checkpoint, **options) -> str, the Jinja text; "": there is none.

    `path` is the file that the user names, or where the checkpoint lies. It raises ConfigError or CheckpointError.
    """

    suffixes: tuple[str, ...] = ()  # of the files it reads: ".toy"
    models: tuple[str, ...] = ()  # globs of architectures or names of models whose template it brings


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRequest(SelectRequest):
    """`suffix`: of the file that the user names, or that the checkpoint is; else its template is looked for."""

    kind: str = "template"
    suffix: str | None = None
    architecture: str = ""
    model: str = ""


def of_interface_1(target: Callable[[Path], str]) -> Callable[[Path, Checkpoint], str]:
    """Interface 1 was not told the checkpoint, so that a plugin with templates for several models had to guess."""
    return lambda path, checkpoint, **_: target(path)


def refusals(spec: TemplateSpec, request: TemplateRequest) -> Refusals:
    if request.suffix is not None:
        if request.suffix.lower() not in spec.suffixes:
            yield Refusal("format", listed(spec.suffixes), request.suffix)
    elif not any(fnmatchcase(name, glob) for name in (request.architecture, request.model) for glob in spec.models):
        yield Refusal("model", listed(spec.models), f"{request.model} ({request.architecture})")


def ask(known: Known) -> list[TemplateRequest]:
    """For the file that the user names or that the checkpoint is, else for the checkpoint; none where the tokenizer is
    another's."""
    checkpoint, model = known.checkpoint, known.config.model
    if model.tokenizer and not model.chat_template:
        return []
    file = Path(model.chat_template) if model.chat_template else checkpoint.path
    suffix = file.suffix if model.chat_template or file.is_file() else None
    return [TemplateRequest(suffix=suffix, architecture=checkpoint.architecture, model=checkpoint.name)]


KIND = Kind(
    "template",
    spec=TemplateSpec,
    hook="lmkit_templates",
    interface=2,
    adapter="lmkit.kinds.template:of_interface_1",
    used_by="lmkit.plugins.chat_templates",
    request=TemplateRequest,
    refusals=refusals,
    needs=("checkpoint", "renderer"),
    ask=ask,
    takes="offered",
    doc=__doc__,
)
