"""The packaged checkpoint, run by transformers: one question of each kind."""

import json

import pytest
from lmkit.api import CheckpointOptions
from lmkit_model_demo.hooks import DIRECTORY, lmkit_resolve_checkpoint

transformers = pytest.importorskip("transformers")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def ask():
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype="float32").eval()

    def reply(text: str, tools: list[dict] | None = None, thinking: bool = False) -> str:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tools=tools,
            enable_thinking=thinking,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = model.generate(**inputs, max_new_tokens=96, do_sample=False)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return reply


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is 17 + 25?", "17 + 25 = 42"),
        ("What is 80 - 33?", "80 - 33 = 47"),
        ("Sort these numbers: 31, 4, 15.", "4, 15, 31"),
        ("Repeat after me: red fox", "red fox"),
        ("How do I install lmkit?", "In a checkout of the repository, run: pip install -r requirements.txt"),
    ],
)
def test_answers(ask, question: str, answer: str) -> None:
    assert ask(question) == answer


def test_json(ask) -> None:
    answer = ask("Give me JSON with keys name and age for: Anna is 31 years old.")
    assert json.loads(answer) == {"name": "Anna", "age": 31}


def test_tool_call(ask) -> None:
    answer = ask("What is the weather in Paris?", tools=[WEATHER])
    assert answer == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_thinking(ask) -> None:
    answer = ask("What is 17 + 25?", thinking=True)
    assert answer == "<think>\n7 + 5 = 12, write 2, carry 1.\n1 + 2 + 1 = 4.\nSo 42.\n</think>\n\n17 + 25 = 42"


def test_the_hook_knows_one_reference() -> None:
    checkpoint = lmkit_resolve_checkpoint("demo", CheckpointOptions())
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.nbytes == sum(path.stat().st_size for path in checkpoint.files)
    assert lmkit_resolve_checkpoint("./demo", CheckpointOptions()) is None
