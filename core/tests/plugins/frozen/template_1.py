"""A plugin of interface 1 of the kind template, as its authors were told to write one then. It is not to be edited."""

from lmkit.api import TemplateSpec, hookimpl


def template(path):
    return "{# old #}{% for m in messages %}{{ m['content'] }}{% endfor %}"


@hookimpl
def lmkit_templates():
    yield TemplateSpec(
        name="frozen", summary="Contents only", target=f"{__name__}:template", models=("ToyForCausalLM",), interface=1
    )
