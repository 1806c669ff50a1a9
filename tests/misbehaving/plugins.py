"""Plugins that do what they must not, each a dist of a few lines: what it is, what it does, what the doctor says of it.

A row is one plugin of a pretend world. `code` is that of the doctor's finding, which names the plugin. `asked`: how it
shows when it is used: named by the user ("named"), or part of each start ("start"); "" where its mere import would end
or hang the process of a test, so that only the doctor, who imports it apart, looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass

SPEC = "SchedulerSpec(name={name!r}, summary='It', target='{module}:lmkit_schedulers'{more})"
HEAD = "from lmkit.api import *\nfrom lmkit.api import hookimpl\n"
PROBED = (
    HEAD + "{before}\n"
    "class Device:\n    def defaults(self, model, device): return {defaults}\n"
    "def probe():\n    {probe}\n"
    "@hookimpl\ndef lmkit_platforms():\n"
    "    yield PlatformSpec(name='{name}', summary='It', target='{module}:{target}', probe='{module}:probe',\n"
    "        device_type='cpu', fallback=True{more})\n"
)
DEVICE = "return [DeviceInfo(platform='{name}', device_type='cpu', dtypes=('float32', 'bfloat16'))]"


@dataclass(frozen=True)
class Row:
    id: str
    code: str
    source: str  # of its hooks module
    kind: str = "scheduler"
    asked: str = "named"
    requires: tuple[str, ...] = ("lmkit-core>=0.1,<0.3",)
    level: str = "error"

    @property
    def name(self) -> str:
        return self.id.replace("-", "_")

    @property
    def module(self) -> str:
        return f"bad_{self.name}.hooks"

    @property
    def dist(self) -> str:
        return f"bad-{self.id}"


def row(id: str, code: str, source: str, **more: object) -> Row:
    found = Row(id, code, "", **more)  # type: ignore[arg-type]
    text = source.replace("{name}", found.name).replace("{module}", found.module)
    return Row(id, code, text, **more)  # type: ignore[arg-type]


def good(more: str = "", before: str = "", after: str = "", name: str = "{name}") -> str:
    """A scheduler that is as it should be, but for what is given."""
    spec = SPEC.replace("{name!r}", repr(name)).replace("{more}", more)
    return f"{HEAD}{before}\n@hookimpl\ndef lmkit_schedulers():\n    yield {spec}\n{after}"


def hook(body: str, arguments: str = "", decorator: str = "hookimpl") -> str:
    return f"{HEAD}import os, sys, time\n@{decorator}\ndef lmkit_schedulers({arguments}):\n    {body}\n"


def platform(id: str, code: str, *, probe: str = "", defaults: str = "{}", before: str = "", more: str = "",
             target: str = "Device", **how: object) -> Row:  # fmt: skip
    source = PROBED.replace("{probe}", probe or DEVICE).replace("{defaults}", defaults).replace("{before}", before)
    source = source.replace("{more}", more).replace("{target}", target)
    return row(id, code, source, kind="platform", **how)


def extension(id: str, code: str, body: str, **how: object) -> Row:
    how = {"asked": "start"} | how
    return row(id, code, f"{HEAD}import os, sys, time\n{body}", kind="extension", **how)


def configure(id: str, code: str, body: str, **how: object) -> Row:
    return extension(id, code, f"@hookimpl\ndef lmkit_configure(config, plan, info):\n    {body}\n", **how)


def checks(id: str, body: str, code: str = "", level: str = "error") -> Row:
    source = (
        f"def look():\n    {body}\n@hookimpl\ndef lmkit_doctor_checks():\n"
        "    yield DoctorCheck(name='look', summary='It looks', target='{module}:look')\n"
    )
    return extension(id, code or f"bad_{id.replace('-', '_')}.look", source, asked="", level=level)


AT_IMPORT = [
    row("raises", "broken", "raise RuntimeError('no luck')"),
    row("raises-deep", "broken", "class Stop(BaseException): pass\nraise Stop('deep')"),
    row("raises-mute", "broken", "class E(Exception):\n    def __str__(self): raise ValueError\nraise E"),
    row("raises-late", "broken", "def f(): g()\ndef g(): return 1 / 0\nf()"),
    row("syntax", "broken", "def broken(:"),
    row("null-byte", "broken", "x = '\0'"),
    row("missing-module", "broken", "import module_that_is_not_there"),
    row("exits", "broken", "import sys\nsys.exit(0)"),
    row("exits-text", "broken", "import sys\nsys.exit('so long')"),
    row("interrupts", "broken", "raise KeyboardInterrupt"),
    row("recursion", "broken", "def f(): return f()\nf()"),
    row("no-hook", "broken", "x = 1"),
    row("heavy", "import-budget", good(before="import numpy"), asked=""),
    row("slow", "import-slow", good(before="import time; time.sleep(0.7)"), asked="", level="warning"),
    row("private", "private-import", good(after="def f():\n    from lmkit.plugins.host import PluginHost"), asked=""),
    row("kills-itself", "ends-the-process", "import os\nos._exit(7)", asked=""),
    row("exits-hard", "ends-the-process", "import os\nos._exit(0)", asked=""),
    row("aborts", "ends-the-process", "import os\nos.abort()", asked=""),
    row("killed", "ends-the-process", "import os\nos.kill(os.getpid(), 9)", asked=""),
    row("segfault", "ends-the-process", "import os\nos.kill(os.getpid(), 11)", asked=""),
]
IN_HOOKS = [
    row("hook-raises", "broken", hook("raise RuntimeError('no luck')")),
    row("hook-exits", "broken", hook("sys.exit(3)")),
    row("hook-interrupts", "broken", hook("raise KeyboardInterrupt")),
    row("hook-midway", "broken", good(after="    raise KeyError('midway')")),
    row("hook-exits-hard", "ends-the-process", hook("os._exit(3)"), asked=""),
    row("hook-gives-none", "broken", hook("return None")),
    row("hook-gives-text", "broken", hook("return ['text']")),
    row("hook-gives-number", "broken", hook("return 5")),
    row("hook-gives-class", "broken", hook("return [SchedulerSpec]")),
    row("hook-other-kind", "broken", hook("return [OpSpec(name='{name}', summary='It', target='a:b', op='linear')]")),
    row("hook-no-end-of-specs", "broken", hook("while True: yield 1")),
    row("hook-argument", "broken", hook("return []", "request")),
    row("hook-wrapper", "broken", hook("yield", decorator="hookimpl(wrapper=True)")),
    row("hook-unknown", "unknown-hook", good(after="@hookimpl\ndef lmkit_scheduler(): return []"), asked="",
        level="warning"),
    row("name-other", "broken", good(name="somebody_else")),
    row("name-bad", "broken", good(name="Bad Name")),
    row("name-number", "broken", hook("yield SchedulerSpec(name=5, summary='It', target='a:b')")),
    row("target-malformed", "broken", hook("yield SchedulerSpec(name='{name}', summary='It', target='no colon')")),
    row("summary-lines", "broken", hook("yield SchedulerSpec(name='{name}', summary='a\\nb', target='a:b')")),
    row("field-unknown", "broken", good(", speed=5")),
    row("field-text", "broken", good(", platforms='cpu'")),
    row("field-none", "broken", good(", requires=None")),
    row("field-tier", "broken", good(", tier='fast'")),
    row("field-raises", "broken", good(", capability=1/0")),
    row("interface-zero", "interface-unsupported", good(", interface=0")),
    row("interface-next", "interface-unsupported", good(", interface=9")),
    row("interface-text", "broken", good(", interface='1'")),
]  # fmt: skip
IN_METADATA = [
    row("core-newer", "core-too-old", good(), requires=("lmkit-core>=9",)),
    row("core-older", "core-too-new", good(), requires=("lmkit-core<0.0.1",)),
    row("core-unsaid", "no-core-range", good(), requires=(), asked="", level="warning"),
    row("pin", "exact-pin", good(), requires=("lmkit-core>=0.1", "torch==2.4.0"), asked="", level="warning"),
    row("requirement-text", "bad-requirement", good(), requires=("lmkit-core>=0.1", "what is this"), asked="",
        level="warning"),
    row("requirement-missing", "requirement-missing", good(", requires=('nowhere-to-be-found>=3',)"), level="info"),
    row("requirement-old", "requirement-version", good(", requires=('msgspec>=999',)"), level="info"),
]  # fmt: skip
WHEN_CHOSEN = [
    row("check-raises", "", good(", check='{module}:check'", "def check(request): return 1 / 0")),
    row("check-exits", "", good(", check='{module}:check'", "def check(request): raise SystemExit(4)")),
    row("check-gives-text", "", good(", check='{module}:check'", "def check(request): return 'no'")),
    row("check-gives-number", "", good(", check='{module}:check'", "def check(request): return 5")),
    row("check-missing", "target-import", good(", check='{module}:nothing'")),
    row("options-no-dataclass", "target-import", good(", options='{module}:hookimpl'")),
    row("options-missing", "target-import", good(", options='not_there:Options'")),
    row("target-missing", "target-import", good().replace("target='{module}:", "target='{module}_not_there:")),
]
PLATFORMS = [
    platform("probe-raises", "broken", probe="raise OSError('no driver')"),
    platform("probe-exits", "broken", probe="raise SystemExit(1)"),
    platform("probe-exits-hard", "ends-the-process", probe="import os; os._exit(1)", asked=""),
    platform("probe-gives-none", "broken", probe="return None"),
    platform("probe-gives-nothing", "broken", probe="return []"),
    platform("probe-gives-text", "broken", probe="return 'a device'"),
    platform("probe-gives-texts", "broken", probe="return ['a device']"),
    platform("prefers-list", "broken", more=", prefers=['cpu']"),
    platform("defaults-raises", "", defaults="1 / 0"),
    platform("defaults-number", "", defaults="5"),
    platform("defaults-text", "", defaults="{'sched.max_tokens': 'many'}"),
    platform("defaults-unknown", "", defaults="{'sched.tokens': 5}"),
    platform("defaults-none", "", target="probe"),
]
EXTENSIONS = [
    configure("configure-raises", "", "raise KeyError('no')"),
    configure("configure-midway", "", "yield ConfigProposal('sched.max_rows', 4, 'x'); raise KeyError('no')"),
    configure("configure-exits", "", "raise SystemExit"),
    configure("configure-text", "", "yield ConfigProposal('sched.max_tokens', 'many', 'x')"),
    configure("configure-negative", "", "yield ConfigProposal('sched.max_tokens', -1, 'x')"),
    configure("configure-unknown", "", "yield ConfigProposal('sched.tokens', 1, 'x')"),
    configure("configure-no-proposal", "", "yield 'sched.max_tokens=5'"),
    configure("configure-number", "", "return 5"),
    extension("resolve-raises", "", "@hookimpl\ndef lmkit_resolve_checkpoint(ref, options): return 1 / 0\n"),
    extension("resolve-text", "", "@hookimpl\ndef lmkit_resolve_checkpoint(ref, options): return 'here'\n"),
    extension("extension-raises", "broken", "raise RuntimeError('no luck')", asked="warned"),
    extension("extension-argument", "broken", "@hookimpl\ndef lmkit_configure(nothing): return []\n", asked="warned"),
    extension("check-texts", "broken", "@hookimpl\ndef lmkit_doctor_checks(): return ['fine']\n", asked=""),
    extension("checks-raise", "broken", "@hookimpl\ndef lmkit_doctor_checks(): raise OSError\n", asked=""),
    checks("health-raises", "return 1 / 0"),
    checks("health-exits", "raise SystemExit"),
    checks("health-exits-hard", "import os; os._exit(0)", "ends-the-process"),
    checks("health-problem", "return 'the battery is low'"),
]
ENDLESS = [
    row("import-loops", "endless", "while True: pass"),
    row("import-sleeps", "endless", "import time\ntime.sleep(3600)"),
    row("import-waits", "endless", "import threading\nthreading.Event().wait()", asked=""),
    row("import-thread", "endless", "from threading import *\nThread(target=Event().wait).start()", asked=""),
    row("import-child", "endless", "import subprocess\nsubprocess.run(['sleep', '3600'])", asked=""),
    row("import-stubborn", "endless", "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        asked=""),
    row("hook-loops", "endless", hook("while True: pass")),
    row("hook-sleeps", "endless", hook("time.sleep(3600)"), asked=""),
    row("check-loops", "", good(", check='{module}:check'", "def check(request):\n    while True: pass")),
    platform("probe-sleeps", "endless", probe="import time; time.sleep(3600)"),
    configure("configure-sleeps", "", "time.sleep(3600)"),
    checks("health-loops", "while True: pass", "endless"),
]  # fmt: skip
ROWS = [*AT_IMPORT, *IN_HOOKS, *IN_METADATA, *WHEN_CHOSEN, *PLATFORMS, *EXTENSIONS]
