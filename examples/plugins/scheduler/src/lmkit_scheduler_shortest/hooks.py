"""Registers the policy `shortest`, its option, and observers that tell what came of it."""

import logging
from dataclasses import dataclass

from lmkit.api import SchedulerSpec, Tier, hookimpl

log = logging.getLogger("lmkit_scheduler_shortest")
first_tokens = []  # (tokens of a prompt, seconds to the first token of its answer), of this process


@dataclass(frozen=True, slots=True)
class Options:
    """--scheduler.shortest.aging, LMKIT_SCHEDULER__SHORTEST__AGING, the key scheduler.shortest.aging of a file."""

    aging: float = 1000.0  # tokens of a prompt that one second of waiting weighs

    def __post_init__(self):
        if not 0 < self.aging <= 1e9:
            raise ValueError(f"aging is {self.aging}, needs 0 < aging <= 1e9: with 0 a long prompt might wait for ever")


@hookimpl
def lmkit_schedulers():
    yield SchedulerSpec(
        name="shortest",
        interface=1,
        summary="Short prompts first, and everybody in the end: waiting counts",
        target="lmkit_scheduler_shortest.policy:Shortest",
        options="lmkit_scheduler_shortest.hooks:Options",
        tier=Tier.PORTABLE,
    )


# A plugin that was chosen may implement hooks of behaviour beside its registration. These three observe: what they
# raise is logged, and never ends a request. They are called in the process of the front end.


@hookimpl
def lmkit_engine_started(info):
    first_tokens.clear()
    log.info("%s is served, short prompts first; cache: %d tokens", info.model, info.num_kv_tokens)


@hookimpl
def lmkit_request_finished(stats):
    if stats.first_token is not None:
        first_tokens.append((stats.num_prompt_tokens, stats.first_token))


@hookimpl
def lmkit_engine_stopping(info):
    for size, seconds in sorted(first_tokens)[-3:]:
        log.info("%d tokens of a prompt: first token after %.2f s", size, seconds)
