"""`auto` finds the formats of a checkpoint by its chat template, says why not the others, and can be overridden."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import DeclaredFormat, ParserRequest
from lmkit.config import from_options
from lmkit.plugins.host import PluginHost
from lmkit.plugins.parsers import ParserChooser
from lmkit.plugins.resolve import Resolver
from lmkit.plugins.select import Outcome, consider
from lmkit.plugins.switches import Switches
from lmkit.text.formats import load_format
from lmkit.text.readback import TOOL, Readback
from lmkit_testing.serving import text_plan

TEMPLATES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "chat_templates"
HOST = PluginHost(switches=Switches())
EXPECTED = {  # template: tool parser, reasoning parser
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere_command", "cohere"),
    "GLM-4.6": ("glm45", "glm45"),
    "LFM2-8B-A1B": ("lfm2", None),
    "MiniMax-M2": ("minimax_m2", "minimax_m2"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_r1"),
    "google-gemma-2-2b-it": (None, None),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "think"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "microsoft-Phi-3.5-mini-instruct": (None, None),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "tool_chat_template_deepseekv31": ("deepseek_v31", "deepseek_v3"),
    "tool_chat_template_llama4_pythonic": ("llama4_pythonic", None),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
}


def choose(kind: str, template: str = "", architecture: str = "", user: str = "auto") -> str | None:
    request = ParserRequest(kind=kind, model="model", architecture=architecture, chat_template=template)
    outcome = consider(HOST, request, user)
    return outcome.chosen.name if outcome.chosen else None


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_gives_its_formats_away(name: str) -> None:
    file = TEMPLATES / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("chat templates are not here")
    template = file.read_text(encoding="utf-8")
    assert (choose("tool_parser", template), choose("reasoning_parser", template)) == EXPECTED[name]


def test_an_architecture_gives_them_away_too() -> None:
    assert choose("reasoning_parser", architecture="Qwen3ForCausalLM") == "qwen3"
    assert choose("tool_parser", architecture="InternLM3ForCausalLM") == "internlm"
    assert choose("tool_parser", architecture="DeepseekV32ForCausalLM") == "deepseek_v32"


def test_without_a_sign_there_is_none_but_a_name_is_taken() -> None:
    assert choose("tool_parser", "plain", "PlainForCausalLM") is None
    assert choose("tool_parser", "plain", "PlainForCausalLM", user="granite-20b-fc") == "granite-20b-fc"


QWEN3, LLAMA4 = "Qwen3ForCausalLM", "Llama4ForConditionalGeneration"
HERMES = '<tool_call>\n{"name"'


@pytest.mark.parametrize(
    ("kind", "template", "architecture", "chosen"),
    [
        ("tool_parser", HERMES, LLAMA4, "hermes"),  # tuned to another format
        ("tool_parser", "", LLAMA4, "llama4_pythonic"),
        ("tool_parser", "no marker", LLAMA4, "llama4_pythonic"),
        ("tool_parser", HERMES, "GraniteMoeHybridForCausalLM", "granite4"),  # a family with that format of its own
        ("reasoning_parser", "<think>", QWEN3, "qwen3"),
        ("reasoning_parser", "<｜Assistant｜><think>\\n", QWEN3, "deepseek_r1"),
        ("reasoning_parser", "<think>", "LlamaForCausalLM", "think"),
        ("reasoning_parser", "[THINK]", QWEN3, "mistral"),
    ],
)
def test_the_template_comes_before_the_architecture(kind: str, template: str, architecture: str, chosen: str) -> None:
    assert choose(kind, template, architecture) == chosen


def test_the_checkpoints_own_templates_are_read(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "<think>"}, {"name": "tool_use", "template": "[TOOL_CALLS]"}]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [QWEN3]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    resolver = Resolver(from_options({"model": str(tmp_path)}), HOST, tolerant=True)
    resolver.run()
    plan = resolver.plan()
    assert [(c.name, c.why) for c in plan.choices if c.kind.endswith("_parser")] == [
        ("mistral", "auto: the chat template has '[TOOL_CALLS]'"),
        ("qwen3", "auto: the model is Qwen3ForCausalLM"),
    ]


PROMPT = "<|im_start|>assistant\n"
CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.reasoning_content %}REASONING{% endif %}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if tools %}{% endif %}{%- if add_generation_prompt %}" + PROMPT + "{% endif %}"
)
JSON = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
XML = "{% for k, v in f.arguments.items() %}BEGIN{{ v }}END{% endfor %}"
THINK = "<think>\n{{ m.reasoning_content }}\n</think>\n\n"


def chatml(call: str = "", reasoning: str = "", note: str = "") -> str:
    """A template that shows calls and reasoning in this way; `note` is text that has a format's marker in it."""
    return f"{{#{note}#}}" + CHATML.replace("CALL", call).replace("REASONING", reasoning)


def xml(begin: str, end: str) -> str:
    return XML.replace("BEGIN", begin).replace("END", end)


SHOWN = {  # what the template shows, the model's name or architecture: tool parser, reasoning parser
    "a name that fits a parser of another format": (
        chatml(f"<tool_call>\n{JSON}\n</tool_call>", THINK), "MiMoForCausalLM", ("hermes", "mimo")
    ),
    "a marker of another format": (
        chatml(
            '<function name="{{ f.name }}">' + xml('<param name="{{ k }}">', "</param>") + "</function>",
            THINK, "<tool_sep>",
        ), "X", ("minicpm5", "think"),
    ),
    "no sign at all": (chatml(f"<tool_call>\n{JSON}\n</tool_call>"), "X", ("hermes", None)),
    "a list of calls": (chatml(f"<tool_calls>[{JSON}]</tool_calls>"), "X", ("jamba", None)),
    "objects as Python spells them": (
        chatml('<tool_calls>[{"name": "{{ f.name }}", "id": "1", "arguments": {{ f.arguments|string }}}]</tool_calls>'),
        "X", ("jamba", None),
    ),
    "a message of its own": (
        chatml(f"<|message_sep|>\n\nfunction call{{{{ '<|role_sep|>' }}}}\n{JSON}"), "X", ("gigachat3", None)
    ),
    "XML": (
        chatml("<tool_call>\n<function={{ f.name }}>\n" + xml("<parameter={{ k }}>\n", "\n</parameter>\n")
               + "</function>\n</tool_call>", THINK), "Step3p5ForCausalLM", ("step3p5", "step3p5"),
    ),
    "an upper-case tag": (chatml(f"<TOOLCALL>[{JSON}]</TOOLCALL>", THINK), "NemotronHForCausalLM",
                          ("nemotron_v2", "nemotron_v3")),
    "a fence": (
        chatml('Action: ```json\n[\n    {"tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}\n]```'),
        "CohereForCausalLM", ("command_r", None),
    ),
    "a function tag": (chatml("<function={{ f.name }}>{{ f.arguments | tojson }}</function>"), "X",
                       ("functionary_v31", None)),
    "many special tokens": (
        chatml(
            "<|tool_calls|><|tool_call:begin|>1<|tool_call:name|>{{ f.name }}<|tool_call:args|>"
            "{{ f.arguments | tojson }}<|tool_call:end|>", "<|think|>{{ m.reasoning_content }}<|end|>",
        ), "X", ("solar", "solar"),
    ),
    "words around reasoning": (
        chatml("", "Here are my reasoning steps:\n{{ m.reasoning_content }}\n[BEGIN FINAL RESPONSE]\n"), "X",
        (None, "apriel"),
    ),
    "plain reasoning": (chatml("", "<seed:think>{{ m.reasoning_content }}</seed:think>"), "X", (None, "seed_oss")),
    "a prompt that opens thinking": (
        chatml(f"<tool_call>\n{JSON}\n</tool_call>").replace(PROMPT, PROMPT.rstrip() + "<think>\n"),
        "LlamaForCausalLM", ("hermes", "think")
    ),
    "a prompt that opens thinking, and thinking of the history is cut out": (
        chatml(f"<TOOLCALL>[{JSON}]</TOOLCALL>").replace(PROMPT, PROMPT.rstrip() + "<think>\n")
        .replace("{{ m.content }}", "{{ (m.content or '').split('</think>')[-1] }}"),
        "NemotronHForCausalLM", ("nemotron_v2", "nemotron_v3")
    ),
    "nothing of calls": (chatml(), "Qwen3ForCausalLM", (None, "qwen3")),
}  # fmt: skip


def read_back(tmp_path: Path, template: str, architecture: str) -> list[Outcome]:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    chooser = ParserChooser(HOST, text_plan(), {"default": template}, tmp_path)
    requests = [
        ParserRequest(kind=kind, model="model", architecture=architecture, chat_template=template)
        for kind in ("tool_parser", "reasoning_parser")
    ]
    return [chooser.choose(request) for request in requests]


@pytest.mark.parametrize("name", SHOWN)
def test_what_the_template_shows_decides(name: str, tmp_path: Path) -> None:
    template, architecture, expected = SHOWN[name]
    outcomes = read_back(tmp_path, template, architecture)
    assert tuple(o.chosen.name if o.chosen else None for o in outcomes) == expected


def test_a_format_that_cannot_read_the_template_is_refused(tmp_path: Path) -> None:
    template, architecture, _ = SHOWN["a name that fits a parser of another format"]
    refused = {c.name: c.reasons[0] for c in read_back(tmp_path, template, architecture)[0].candidates if c.reasons}
    assert refused["mimo"].code == "template"
    assert "hermes" in refused["mimo"].needed


def test_prompts_that_begin_a_call(tmp_path: Path) -> None:
    template = (
        "{%- for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' %}>>>{% endif %}"
        "{%- if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}\n{{ c.function.arguments | tojson }}"
        "{% endfor %}{% else %}{{ 'all\n' if m.role == 'assistant' }}{{ m.content }}{% endif %}{% endfor %}"
        "{%- if tools %}{% endif %}{% if add_generation_prompt %}<|start|>assistant\n>>>{% endif %}"
    )
    tool, _ = read_back(tmp_path, template, "X")
    assert tool.chosen is not None
    assert tool.chosen.name == "functionary_v32"


# calls in a fence of lines of their own, descriptions that must be there, and instructions behind the conversation
COMMAND_R_PLUS = (
    "{{ bos_token }}{% for tool in tools %}def {{ tool.function.name }}("
    "{% for name, of in tool.function.parameters.properties|items %}"
    "{{- name + ': ' + of.type + ', ' + of.description }}"
    "{% endfor %}): pass{% endfor %}<|END_OF_TURN_TOKEN|>"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' + m.content|trim + '<|END_OF_TURN_TOKEN|>' }}"
    "{%- elif m.tool_calls is defined %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}"
    "{%- if m.content is defined %}{{- m.content|trim }}{%- endif %}{{- '\\nAction:\\n```json\\n[\\n' }}"
    "{%- for call in m.tool_calls %}{{- '    {\\n        \"tool_name\": \"' + call.function.name + '\",\\n' }}"
    "{{- '        \"parameters\": ' }}{%- if call.function.arguments|length > 0 %}"
    "{{- call.function.arguments|tojson(indent=4)|indent(8) }}{{- '\\n' }}{%- else %}{{- '{}\\n' }}{%- endif %}"
    "{{- '    }' }}{%- if not loop.last %}{{- ',\\n' }}{%- endif %}{%- endfor %}{{- '\\n]```\\n' }}"
    "{%- else %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' + m.content|trim + '<|END_OF_TURN_TOKEN|>' }}"
    "{%- endif %}{%- endfor %}{{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Write your actions<|END_OF_TURN_TOKEN|>' }}"
    "{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{%- endif %}"
)


def test_instructions_behind_the_conversation_are_no_part_of_a_call(tmp_path: Path) -> None:
    tool, _ = read_back(tmp_path, COMMAND_R_PLUS, "X")
    assert tool.chosen is not None
    assert tool.chosen.name == "command_r"
    back = Readback.of(text_plan(), {"default": COMMAND_R_PLUS}, {"bos_token": "<s>"})
    assert [case.left_by(load_format(HOST, "tool_parser", "command_r")) for case in back._calls()] == [0, 0]


def test_the_choice_is_tried_first_and_code_of_others_is_not_run() -> None:
    class Code:
        name, keep_special = "code", frozenset[str]()

        def start(self, prompt_tail: str, tools: object) -> object:
            raise AssertionError("nobody has chosen it")

    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        return Code() if name == "code" else load_format(HOST, "tool_parser", name)

    back = Readback.of(text_plan(), {"default": SHOWN["no sign at all"][0]}, {})
    names = ["code", "mimo", "hermes"]
    assert back.readers("tool_parser", "hermes", names, load) == ("hermes",)
    assert loaded == ["hermes"]
    assert back.readers("tool_parser", "mimo", names, load) == ("hermes",)
    assert back.readers("tool_parser", "code", names, load) == ("hermes",)


@pytest.mark.parametrize("template", ["{{ broken", "{{ raise_exception('no') }}", "{{ 1 / 0 }}", ""])
def test_a_template_that_shows_nothing_changes_nothing(template: str, tmp_path: Path) -> None:
    outcomes = read_back(tmp_path, template, "Qwen3ForCausalLM")
    assert [o.chosen.name if o.chosen else None for o in outcomes] == [None, "qwen3"]


@pytest.mark.parametrize("name", EXPECTED)
def test_reading_back_agrees_with_the_markers(name: str, tmp_path: Path) -> None:
    file = TEMPLATES / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("chat templates are not here")
    outcomes = read_back(tmp_path, file.read_text(encoding="utf-8"), "")
    assert tuple(o.chosen.name if o.chosen else None for o in outcomes) == EXPECTED[name]


THINKING_PROMPTS = ("<think>\\n", "<seed:think>", "<|think|>", "[THINK]", "Thoughts: ")


@pytest.mark.parametrize("opening", THINKING_PROMPTS)
@pytest.mark.parametrize("name", [name for name, (tool_parser, _) in EXPECTED.items() if tool_parser])
def test_a_prompt_that_opens_thinking_changes_no_tool_parser(name: str, opening: str, tmp_path: Path) -> None:
    """Fine-tunes add it to the prompt, and leave the thinking out of the history."""
    file = TEMPLATES / f"{name}.jinja"
    if not file.is_file():
        pytest.skip("chat templates are not here")
    opens = "{%- if add_generation_prompt %}{{- '" + opening + "' }}{%- endif %}"
    tool, _ = read_back(tmp_path, file.read_text(encoding="utf-8") + opens, "")
    assert tool.chosen is not None
    assert tool.chosen.name == EXPECTED[name][0]


CALLS = {True: ("get_weather", {"city": "Paris", "days": 3}), False: ("get_weather", {})}


@pytest.mark.parametrize("name", HOST.names("tool_parser"))
def test_a_prompt_that_goes_on_like_a_call_cuts_no_marker(name: str) -> None:
    """Wherever the prompt parts from what is written of a call, the parser gets the marker whole."""
    fmt = load_format(HOST, "tool_parser", name)
    assert isinstance(fmt, DeclaredFormat)
    written = {full: fmt.write([call], [TOOL]) for full, call in CALLS.items()}
    if not fmt.write([CALLS[True]]) or fmt.whole:
        pytest.skip("no call is written by a format whose prompts end in messages")
    opener = min((text for text in fmt.openers if written[True].startswith(text)), key=len, default="")
    for length in range(len(opener)):
        template = (
            "{%- for m in messages %}[{{ m.role }}]: {{ m.content }}{% for c in m.tool_calls or [] %}"
            "{% if c.function.arguments %}" + raw(written[True]) + "{% else %}" + raw(written[False]) + "{% endif %}"
            "{% endfor %}{% endfor %}{% if tools %}{% endif %}"
            "{%- if add_generation_prompt %}[assistant]: " + raw(opener[:length]) + "=more{% endif %}"
        )
        back = Readback.of(text_plan(), {"default": template}, {})
        assert back.readers("tool_parser", name, [name], partial(load_format, HOST, "tool_parser")) == (name,), length
        [case, *_] = back._calls()
        assert case.left_by(fmt) == 0, length


def raw(text: str) -> str:
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}"


def test_the_longer_name_knows_the_model_better() -> None:
    assert choose("reasoning_parser", architecture="Step3p5ForCausalLM") == "step3p5"
    assert choose("reasoning_parser", architecture="Step3VLForConditionalGeneration") == "step3"
