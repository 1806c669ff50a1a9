"""A table of turns, as in

    answer = "<|assistant|>"
    [turn]
    user = ["<|user|>", "<|end|>"]
    assistant = ["<|assistant|>", "<|end|>"]

becomes the chat template that says the same; a role that has no turn is refused in each request."""

import json
import tomllib

from lmkit.api import ConfigError


def template(path, checkpoint):
    """Contract: the target of lmkit.api.TemplateSpec. `path` is the file that the user names."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} is no table of turns: {e}", fix="check the path, and that it is TOML") from e
    answer, turns = table.get("answer"), table.get("turn")
    if not isinstance(answer, str) or not isinstance(turns, dict) or not {"user", "assistant"} <= turns.keys():
        raise ConfigError(f"{path} lacks `answer`, or the turns of user and assistant", fix="see the plugin's README")
    cases = []
    for role, around in turns.items():
        if not isinstance(around, list) or [type(text) for text in around] != [str, str]:
            raise ConfigError(f"{path}: turn.{role} is {around!r}", fix="give two texts: before it, and behind it")
        before, behind = map(literal, around)
        cases.append(f"if m.role == {literal(role)} %}}{{{{ {before} }}}}{{{{ m.content }}}}{{{{ {behind} }}}}")
    return (
        "{% for m in messages %}{% "
        + "{% el".join(cases)
        + "{% else %}{{ raise_exception('no turn for ' + m.role) }}{% endif %}{% endfor %}"
        + f"{{% if add_generation_prompt %}}{{{{ {literal(answer)} }}}}{{% endif %}}"
    )


def literal(text):
    return json.dumps(text, ensure_ascii=False)
