"""Small talk and questions about lmkit: how people ask and what the model says.

`{a|b}` in a question means either. Each intent's answers are all the answers that count as right.
"""

from dataclasses import dataclass

HELLO = "{hello|hi|hey|good morning|good evening|good afternoon|greetings|hi there|hello there|hey there|howdy|yo}"
ASK = "{what is|what's|whats|tell me|do you know|explain|describe}"
HOW = (
    "{how do i|how can i|how to|how does one|what is the command to|show"
    " me how to|tell me how to|i want to|how would i}"
)


@dataclass(frozen=True)
class Intent:
    """One thing that people ask."""

    name: str
    about: str  # how the model names the question when it thinks
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    more: tuple[str, ...] = ()  # further questions, for training only: evaluation stays comparable as they grow


INTENTS = (
    Intent(
        "hello",
        "The user greets me.",
        (HELLO, f"{HELLO} {{lmkit|model|you|friend|everyone|my friend|assistant|bot}}", f"{HELLO}, {HELLO}"),
        ("Hello! How can I help you?", "Hi! What can I do for you?"),
        more=(
            "{hello|hi|hey} {again|dear model|demo|all|there friend}",
            "{good day|hiya|welcome|nice to meet you|hello world}",
        ),
    ),
    Intent(
        "how_are_you",
        "The user asks how I am.",
        (
            "{how are you|how are you doing|how is it going|how do you do|how are things|how do you feel|what's up}"
            "{| today| now| this morning| tonight|, model|, my friend}",
            f"{HELLO}, {{how are you|how is it going|how are you doing}}",
        ),
        ("I am fine, thank you! How can I help you?",),
        more=(
            "{are you|everything|all} {ok|well|fine|good}{| today}",
            "how {have you been|is your day|is life|are you feeling}",
        ),
    ),
    Intent(
        "thanks",
        "The user thanks me.",
        (
            "{thanks|thank you|many thanks|thx|cheers}{| a lot| so much| very much| for your help| for that| again}",
            "{great|perfect|nice|cool|ok|good}, {thanks|thank you|thx}",
        ),
        ("You are welcome!",),
        more=(
            "{i thank you|thanks a million|thank you kindly|much appreciated|i appreciate it|that helped}"
            "{|, model|, friend}",
            "{that was|this is} {great|helpful}, {thanks|thank you}",
        ),
    ),
    Intent(
        "bye",
        "The user says goodbye.",
        (
            "{bye|goodbye|bye bye|see you|see you later|good night|farewell|have a nice day|until next time|cheerio}"
            "{| then| for now|, model| my friend|, lmkit| and thanks}",
        ),
        ("Goodbye!", "Goodbye! Have a nice day!"),
        more=(
            "{i have to go|i am leaving|i must go|talk to you later|take care|so long}{| now|, bye|, goodbye}",
            "{ok|thanks}, {bye|goodbye|see you}",
        ),
    ),
    Intent(
        "who_are_you",
        "The user asks who I am.",
        (
            "{who|what} are you{| exactly| really| called}",
            "{what is|what's|tell me} your name{| please}",
            "{introduce|describe} yourself{| please| to me}",
            "{are you|is this} {a bot|an ai|a language model|a human|a robot|chatgpt|the demo model}",
            "{tell me|say something} about yourself",
            "{what|which} model {are you|is this|am i talking to|is running}",
        ),
        ("I am demo, a very small language model that comes with lmkit.",),
        more=(
            "{do you have|what's|say} {a name|your full name}",
            "{which|what} {kind of model|bot|assistant|ai} {are you|is this|am i using}",
            "{who am i|what am i} {talking|speaking|chatting} {to|with}",
        ),
    ),
    Intent(
        "abilities",
        "The user asks what I can do.",
        (
            "what can {you|this model} do{| for me| exactly}",
            "{what are|tell me|list} your {abilities|skills|features|talents}",
            "{help|help me|i need help|what should i ask you|what can i ask you|how can you help me|what do you know}",
            "what {are you|is this model} {good at|able to do|good for}",
        ),
        ("I can talk about lmkit, add and subtract small numbers, sort lists, write JSON and call tools.",),
        more=(
            "what {tasks|questions|things} can {you do|you answer|you handle|i give you}",
            "{show me|explain} {what you can do|your abilities|your features}",
            "what {do you offer|are your strengths|can i do with you|can you help with}",
        ),
    ),
    Intent(
        "size",
        "The user asks how big I am.",
        (
            "how {big|large|small} {are you|is this model|is the demo model}",
            "how many {parameters|weights|layers} {do you have|does this model have|are in you|has this model}",
            "{what is|what's|tell me} your {size|parameter count|number of parameters}",
        ),
        ("I have about three million parameters in four layers.",),
        more=(
            "{what|which} size {are you|is this model|do you have}",
            "how {big|large} {is your network|are your weights|is the model}",
            "{your|model} {size|parameters}",
            "how many {parameters|layers|weights} {are there|does the demo model have}",
        ),
    ),
    Intent(
        "training",
        "The user asks how I was trained.",
        (
            "{how|on what|where} were you {trained|made|built|taught}",
            "{who|what} {made|trained|built|created} you",
            "{what is|what's|tell me about} your {training|training data|dataset|origin}",
            "what {data|texts} {were you trained on|did you learn from|have you seen}",
        ),
        ("I was trained by the scripts in the lmkit repository, on text that those scripts generate.",),
        more=(
            "{tell me|explain} how you were {trained|made|built}",
            "{who is|who are} your {maker|creator|author|authors}",
            "where {do you come from|does your knowledge come from|is your training data from}",
        ),
    ),
    Intent(
        "what_is_lmkit",
        "The user asks what lmkit is.",
        (
            f"{ASK} lmkit{{| exactly| in short| please| in one sentence}}",
            "{tell me|say something|talk|i want to know} {|more |something }about lmkit",
            "what {does lmkit do|is lmkit good for|is lmkit for|does lmkit mean|kind of tool is lmkit}",
            "{why|when} {would i|should i|to} use lmkit",
        ),
        ("lmkit is a toolkit for running and serving language models in Python. Everything in it is a plugin.",),
        more=(
            "{define|introduce|summarize} lmkit{| for me| please}",
            "what {exactly is|kind of software is|sort of thing is|can i do with} lmkit",
            "{about lmkit|lmkit|lmkit in one sentence|the purpose of lmkit}",
        ),
    ),
    Intent(
        "install",
        "The user asks how to install lmkit.",
        (
            f"{HOW} {{install|set up|get}} {{lmkit|it|this|this toolkit|lmkit here|lmkit on my machine}}",
            "{install lmkit|installation|lmkit install|lmkit installation|setup instructions|installing lmkit}",
            "{what is|what's} the {install command|installation|way to install lmkit|setup}",
        ),
        ("In a checkout of the repository, run: pip install -r requirements.txt",),
        more=(
            "{i need to|help me|can you help me|where do i} install {lmkit|it|this}",
            "{how is|where is} lmkit installed",
            "{steps|commands|instructions} to {install|set up} {lmkit|this|it}",
        ),
    ),
    Intent(
        "serve",
        "The user asks how to serve a model.",
        (
            f"{HOW} {{serve|host|deploy|expose}} {{a model|models|my model|an llm|a"
            f" checkpoint|this model}}{{| with lmkit}}",
            f"{HOW} start {{the|a|lmkit's|an lmkit}} {{server|api|http server|service}}",
            "{serve a model|lmkit serve|start a server|serving|what does lmkit serve do|server command}",
        ),
        ("Run: lmkit serve MODEL. The server speaks the OpenAI API at http://localhost:8000/v1.",),
        more=(
            "{i need to|help me|can i} {serve|host|deploy} {a model|my model|an llm}",
            "{which|what} command {serves|hosts|deploys} {a model|models|my model}",
            "{run|launch|open} {a|the} {server|model server|api server}",
        ),
    ),
    Intent(
        "chat",
        "The user asks how to chat with a model.",
        (
            f"{HOW} {{chat|talk|speak}} {{with|to}} {{a model|my model|the model"
            f"|models|an llm|you}}{{| in lmkit| in the terminal}}",
            "{lmkit chat|chat command|what does lmkit chat do|is there a chat command|chat in the terminal}",
        ),
        ("Run: lmkit chat MODEL. It opens a chat in the terminal.",),
        more=(
            "{i need to|help me|can i} {chat|talk} {with|to} {a model|my model|an llm}",
            "{which|what} command {opens|starts} a chat{| with a model}",
            "{open|start|begin} a chat{| with a model| in the terminal}",
        ),
    ),
    Intent(
        "demo_model",
        "The user asks how to run the demo model.",
        (
            f"{HOW} {{run|start|load|try|use|serve}} {{the demo|the demo model|demo"
            f"|the demo checkpoint}}{{| with lmkit}}",
            "{what is|what's|explain} the {demo model|demo checkpoint|demo}",
        ),
        ("The demo model is this small model. Start it with: lmkit serve demo",),
        more=(
            "{describe|define|tell me about|i want to know about} the {demo|demo model|demo checkpoint}",
            "what {exactly is|sort of thing is|kind of model is} the {demo|demo model|demo checkpoint}",
            "{which|what} command {runs|starts|loads} the {demo|demo model}",
            "{run|start|load} the {demo|demo model}",
        ),
    ),
    Intent(
        "plugins",
        "The user asks what plugins are.",
        (
            "{what is|what are|what's|explain} {a plugin|plugins|lmkit plugins|the"
            " plugins|an lmkit plugin}{| in lmkit}",
            "{what do plugins do|how do plugins work|why plugins|tell me about plugins|what can plugins do}",
            "what {can be|is} {a plugin|plugged in|extended|pluggable}",
        ),
        (
            "Plugins are Python packages that add platforms, attention, quantization, models, tool parsers or "
            "schedulers to lmkit.",
        ),
        more=(
            "{describe|define} {a plugin|plugins|lmkit plugins}",
            "what {does a plugin do|are plugins for|is a plugin for|do plugins add|kinds of plugins are there}",
        ),
    ),
    Intent(
        "list_plugins",
        "The user asks how to list plugins.",
        (
            f"{HOW} {{list|see|show|find|print}} {{plugins|the plugins|all plugins|my plugins|installed plugins}}",
            "{which|what} plugins {are installed|do i have|are there|are available|exist}",
            "{list plugins|plugin list|lmkit plugins list|show me the plugins|show installed plugins}",
        ),
        ("Run: lmkit plugins list",),
        more=(
            "{where|how} do i see {plugins|my plugins|which plugins i have}",
            "{which|what} command {lists|shows|prints} {plugins|the plugins|all plugins}",
            "{print|see|find} {all|my|the|installed} plugins",
        ),
    ),
    Intent(
        "write_plugin",
        "The user asks how to write a plugin.",
        (
            f"{HOW} {{write|create|make|develop|build|add}} {{a plugin|my own"
            f" plugin|a new plugin|plugins|an lmkit plugin}}",
            "{writing a plugin|create a plugin|new plugin|plugin development|plugin template}",
        ),
        ("Run: lmkit plugins new. It writes a package with a passing test that you can change.",),
        more=(
            "{i need to|help me|can i} {write|make|create|build} {a plugin|my own plugin|a new plugin}",
            "{which|what} command {creates|makes|starts} a {plugin|new plugin}",
            "{make|write|start|build} {a plugin|my own plugin}",
        ),
    ),
    Intent(
        "doctor",
        "The user asks how to check the plugins.",
        (
            f"{HOW} {{check|debug|diagnose|test|fix|repair}} {{plugins|my plugins"
            f"|my installation|a broken plugin|lmkit}}",
            "{my plugin does not work|a plugin is broken|lmkit does not work"
            "|something is broken|plugin doctor|it fails}",
        ),
        ("Run: lmkit plugins doctor. It checks every plugin and says how to fix it.",),
        more=(
            "{which|what} command {checks|tests|diagnoses} {plugins|my plugins|my installation}",
            "{my|the} {plugin|installation|plugins} {is broken|does not load|fails|has an error}",
            "{check|test|diagnose} {my plugins|plugins|the installation}",
        ),
    ),
    Intent(
        "attention",
        "The user asks how to choose the attention.",
        (
            f"{HOW} {{choose|select|change|set|pick|switch}} {{attention|the"
            f" attention|the attention backend|attention backends}}",
            f"{HOW} use {{flashinfer|flashinfer attention|another attention backend|the flashinfer backend}}",
            "{attention backend|attention option|which attention is used|use flashinfer|lmkit with flashinfer}",
        ),
        ("Name it when you serve: lmkit serve MODEL --attention flashinfer",),
        more=(
            "{which|what} option {sets|chooses|selects} the attention{| backend}",
            "{can i|help me} {use|choose|select|change} {flashinfer|the attention|another attention}",
            "{set|change|select|pick} the attention{| backend}",
        ),
    ),
    Intent(
        "license",
        "The user asks for the license.",
        (
            "{what is|what's|tell me|which is} the {license|licence}{| of lmkit| of this| please| of this project}",
            "{which|what} {license|licence} {does lmkit have|does lmkit use|is lmkit under|is it|applies}",
            "{is lmkit|is it|is this} {free|open source|free to use|free software|apache}",
            "{license|licence|lmkit license|license of lmkit|can i use lmkit at work|can i use it commercially}",
        ),
        ("lmkit is open source under the Apache-2.0 license.",),
        more=(
            "{what|which} {terms|conditions} {apply|does lmkit have}",
            "under {which|what} {license|licence} is {lmkit|it|this}",
            "{may i|am i allowed to|can i} {sell|share|change|copy} lmkit",
        ),
    ),
    Intent(
        "api",
        "The user asks for the API address.",
        (
            "{what is|what's|tell me|where is} the {api|address|url|endpoint|base"
            " url|api url|api address}{| of the server}",
            "{which|what} {api|protocol} does {lmkit|the server|it} {speak|use|offer|support|have}",
            "is {lmkit|the server|the api|it} {compatible with openai|openai compatible|like openai}",
            "{can i|how do i|how can i} use the openai {client|sdk|library|api|python client}{| with lmkit}",
            "{which|what} {port|url|address} {does the server use|does lmkit use|is used|is the default}",
        ),
        ("The server is compatible with the OpenAI API. Its address is http://localhost:8000/v1",),
        more=(
            "{which|what} address {do i call|do i use|should i use|does the api have}",
            "{where does|on which port does} {lmkit|the server} {listen|run|answer}",
            "{can i|may i} {call|use} {lmkit|the server|it} {like openai|with openai clients}",
        ),
    ),
    Intent(
        "python",
        "The user asks how to use lmkit from Python.",
        (
            f"{HOW} use {{lmkit|it}} {{in|from|with}} {{python|a python script|python code|my code|a notebook}}",
            "{python example|lmkit python api|python api|show me python code|give"
            " me a python example|example in python}",
        ),
        ('from lmkit import LLM\nllm = LLM("demo")',),
        more=(
            "{show|write|give me} {python code|some python code|code in python|a python script}"
            "{| for lmkit| that uses lmkit}",
            "{import lmkit|python usage|python sample|python snippet|sample code|code sample|code example"
            "|a snippet in python}",
            "{call|run|load} {lmkit|a model} {from|in} {python|my python code|a python script}",
            "{some|more|a few|short} {python|code} {examples|samples|snippets}{| please| for lmkit}",
            "how does {lmkit|it|that|this} look {in python|as python code|in code|in a notebook}",
            "{which|what} {python class|class|import|function} {do i use|do i need|do i call}",
            "{show|write|give me} {a short program|a program|a few lines|the lines} {in python|that load a model}",
            "lmkit {as a library|as a python library|as a module|for python programmers}",
        ),
    ),
    Intent(
        "python_version",
        "The user asks which Python is needed.",
        (
            "{which|what} {python|python version|version of python} {do i need|is needed|is required|does lmkit need}",
            "{does lmkit|does it} {work with|run on|support} {python 3.11|python 3.12|python 3.13|my python}",
            "{python version|minimum python|required python version|supported python versions}",
        ),
        ("lmkit needs Python 3.11 or newer.",),
        more=(
            "{how new|how old|how recent} must {python|my python} be",
            "{is|will} python {3.10|3.11|3.12|3.13} {enough|supported|ok|new enough}",
            "{the oldest python|the python requirement|python requirements|needed python}",
        ),
    ),
    Intent(
        "hardware",
        "The user asks about hardware.",
        (
            "{do i|does lmkit|does it} need a {gpu|graphics card|cuda gpu|big machine}",
            "{does lmkit|can lmkit|can it|does it|will it} {run|work} {on|with} {a"
            " cpu|cpu|a laptop|my laptop|a gpu|cuda|rocm}",
            "{which|what} {hardware|devices|platforms|gpus} {are supported|does lmkit support|do i need|can i use}",
            "{can i run|does} lmkit {without a gpu|on cpu|on my machine}",
        ),
        ("lmkit runs on the CPU and on GPUs. Each kind of device is a platform plugin.",),
        more=(
            "{is|are} {a gpu|gpus|cuda|a graphics card} {needed|required|necessary|supported}",
            "{which|what} {computer|machine|gpu|device} {is needed|do i need for lmkit|should i use}",
            "{hardware requirements|supported hardware|lmkit on a cpu|lmkit on a gpu}",
        ),
    ),
    Intent(
        "models",
        "The user asks which models work.",
        (
            "{which|what} {models|architectures|llms|checkpoints} {are supported"
            "|does lmkit support|can i use|work|run}",
            "{does lmkit support|can lmkit run|can i run} {llama|qwen|gemma|mistral|other models|my own model}",
            "{supported models|model list|list of models}",
        ),
        ("Models of the Llama, Mistral and Qwen families. Plugins add more; see them with: lmkit plugins list",),
        more=(
            "{which|what} {models|llms|model families} {can lmkit run|does it support|are there|are available}",
            "{is|are} {llama|qwen|gemma|mistral} {supported|available}",
            "{supported|available} {architectures|llms|checkpoints}",
        ),
    ),
    Intent(
        "joke",
        "The user wants a joke.",
        (
            "{tell me a joke|make me laugh|say something funny|do you know a joke"
            "|a joke|joke|another joke|one more joke}"
            "{| please| now|, please|, model| for me}",
        ),
        ("Why did the model stop? It ran out of tokens.",),
        more=(
            "{tell|give|say} {us|me} {a joke|another joke|one joke|a funny joke}",
            "{i want|i need|i would like} {a joke|another joke|to laugh|to hear a joke}",
            "{any|got any|do you have} jokes",
        ),
    ),
    Intent(
        "creator_opinion",
        "The user says something nice.",
        (
            "{you are|you're} {great|nice|cool|smart|good|the best|very good|very smart|funny|so helpful|awesome}",
            "{i like you|i love you|well done|good job|nice work|good bot|good"
            " work|very good|excellent}{| today|, model|, really}",
        ),
        ("Thank you! That is kind of you.",),
        more=(
            "{this is|that was|that is} {great|nice|cool|awesome|very good|amazing}",
            "{you did|you are doing} {well|great|a good job}",
            "{amazing|impressive|fantastic|wonderful|bravo}",
        ),
    ),
)

UNKNOWN_ANSWER = "I am only a small demo model and do not know that."
UNKNOWN_QUESTIONS = (
    "{what is|what's} the capital of %s",
    "{who is|who was} %s",
    "{who|what} {invented|discovered|killed|found|wrote} {the|a} %s",
    "{write|compose} {a|me a} {poem|story|song|novel|essay|letter} about {a|the} %s",
    "{why is|why does} the %s {blue|big|so small|move|shine|not work|so expensive}",
    "{what do you think|what do you know} about %s",
    "{tell me|explain to me} {about|the history of|the meaning of} %s",
    "{how old|how tall|how heavy|how far|how fast} is {the|a|} %s",
    "{translate|spell} %s {in|into|to} {french|german|spanish|italian}",
    "{when|where} {was|is} the %s {built|born|made|sold|found}",
    "{what is|define|explain} {a|the|} %s",
    "{summarize|review|recommend} {a|the} %s",
    "{i like|i have|i want|i need|i see|i lost} {a|my|the} %s",
    "{sing|draw|cook|dance|play|paint|build} {a|the|me a} %s",
    "{where can i|how do i|how can i} {buy|find|build|cook|learn} {a|the|} %s",
    "{write|tell me|give me} a {haiku|rhyme|recipe|riddle|poem} {about|with|for} {the|a|} %s",
    "%s",
)
