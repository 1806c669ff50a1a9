"""Memory: what a step needs, what is left for the KV cache, and how it is shared among KV groups. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from lmkit.api import (
    AttnNeed,
    CapacityError,
    Checkpoint,
    ConfigError,
    IntegerFormat,
    KVConfig,
    KVSpec,
    LinearSpec,
    ModelInfo,
    QuantScheme,
    ResolvedPlan,
    WorkerFacts,
    itemsize,
)
from lmkit.config import STEP_TOKENS, EngineConfig, format_size, parse_budget
from lmkit.plugins import load_target

DRAFTS = 16  # tokens of one row that a proposer may guess, or a grammar force, in one step
MIN_LENGTH = 256  # an engine that cannot hold this many tokens does not start, unless the user asks for fewer


def step_tokens(config: EngineConfig) -> int:
    """Token budget of a step."""
    return config.sched.max_tokens or STEP_TOKENS


def num_drafts(config: EngineConfig, resolved: ResolvedPlan, info: ModelInfo) -> int:
    """Draft tokens per row and step, guessed by the proposer that the user named, or forced by grammars where they can
    be: with one step of a row in flight, and state that can be taken back."""
    one = config.parallel.in_flight == 1 or config.parallel.pp > 1
    can_force = one and not info.recurrent and resolved.choice("grammar") is not None
    return DRAFTS if can_force or resolved.choice("proposer") is not None else 0


def info_of_rank(info: ModelInfo, num_ranks: int, rank: int = 0) -> ModelInfo:
    """The same model with the attention heads that `rank` of `num_ranks` has; each has keys that all share.

    Whether heads divide is for the model to say, when it is built.
    """

    def own(need: AttnNeed) -> AttnNeed:
        num_kv = need.num_kv_heads if need.mla else max(1, need.num_kv_heads // num_ranks)
        num_q = max(1, need.num_q_heads // num_ranks)
        among = (rank * num_q, need.num_q_heads) if need.alibi else need.among
        return replace(need, num_q_heads=num_q, num_kv_heads=num_kv, among=among)

    if num_ranks == 1:
        return info
    layers = [replace(layer, attn=own(layer.attn)) if layer.attn is not None else layer for layer in info.layers]
    return replace(info, layers=tuple(layers))


def stage(num_layers: int, index: int, num_stages: int) -> range:
    """The layers of one of `num_stages` ranks that follow each other; the first ones have one more where not all can
    have as many. Raises ConfigError."""
    if num_layers < num_stages:
        raise ConfigError(f"{num_layers} layers cannot be split over {num_stages} ranks", fix=f"--pp {num_layers}")
    each, more = divmod(num_layers, num_stages)
    first = index * each + min(index, more)
    return range(first, first + each + (index < more))


def weight_bytes(info: ModelInfo, checkpoint: Checkpoint, resolved: ResolvedPlan, num_ranks: int = 1) -> int:
    """Bytes of a loaded model, or of one rank's part: quantized weights as integers or as stored, or as what packs
    them; others in the dtype.

    A tied output head that is packed takes the place of the embedding, which stays mapped from its file.
    """
    declared, size = checkpoint.config.get("quantization_config"), itemsize(resolved.value("dtype"))
    total = float(info.num_parameters * size)
    choice, tied = resolved.choice("quantization"), info.tie_embeddings and not declared
    scheme: QuantScheme | None = load_target(choice).parse(declared or choice.options) if choice is not None else None
    head = (LinearSpec("lm_head", info.hidden_size, (info.vocab_size,), shard="column"),) if tied else ()
    for linear in (spec for spec in (*info.linears, *head) if not spec.dense):
        plain = linear.total_out * linear.in_features * size
        fmt = scheme.for_layer(linear) if scheme is not None else None
        bits = resolved.value(f"{fmt.name if fmt else 'plain'}_bits")
        held = float(plain)
        if bits and (fmt is not None or not linear.experts):
            held *= bits / 8 / size
        elif isinstance(fmt, IntegerFormat):
            held = _integer_bytes(fmt, linear)
        elif fmt is not None:
            stored = fmt.params(linear, resolved.value("dtype") or info.dtype)
            held = sum(prod(spec.shape) * itemsize(spec.dtype) for spec in stored.values())
        own = not linear.is_head or (linear.total_out % num_ranks == 0 and (linear not in head or bits or fmt))
        total -= plain - held / (num_ranks if own and linear.shard != "none" else 1)
    return round(total)


def _integer_bytes(fmt: IntegerFormat, linear: LinearSpec) -> int:
    """Codes, a float16 scale per group and, where codes have a range, its zero; or what else there is, at most."""
    groups = -(-linear.in_features // fmt.group) if fmt.group else 1
    per_group = {"symmetric": 2, "range": 3}.get(fmt.rounding, 4)
    return linear.total_out * (linear.in_features * fmt.bits // 8 + groups * per_group)


def activation_bytes(info: ModelInfo, dtype: str, max_tokens: int, max_rows: int) -> int:
    """Peak of one step: residual, attention and MLP activations of `max_tokens`, and logits of `max_rows` rows.

    A layer holds the residual stream and its normed copy, q, k, v and the attention output, and gate, up and their
    product; recurrent state of all rows is gathered and changed; logits exist in the model's dtype, in float32, and as
    two float32 temporaries of the sampler.
    """
    size = itemsize(dtype)
    attn = max(
        ((a.num_q_heads + a.num_kv_heads) * 2 * max(a.head_dim, a.v_head_dim or 0) for a, _ in info.kv_groups()),
        default=0,
    )
    state = 2 * max((sum(t.nbytes for t in layer.state) for layer in info.layers), default=0)
    per_token = (3 * info.hidden_size + attn + 3 * (info.intermediate_size or 4 * info.hidden_size)) * size
    return max_tokens * per_token + max_rows * (state + info.vocab_size * (size + 3 * 4))


def adapter_bytes(info: ModelInfo, config: EngineConfig, dtype: str) -> int:
    """What the adapters that an engine lets in take at most: the columns of A and the rows of B of each linear that may
    have some, and of the embedding; but not those of experts, routers and latents, and no weights of their own."""
    sizes = {
        source: spec.in_features + size
        for spec in info.linears if len(spec.sources) == len(spec.out_features)
        for source, size in zip(spec.sources, spec.out_features, strict=True)
        if source.rpartition(".")[2] in info.adapter_targets
    }  # fmt: skip
    widths = sum(sizes.values()) + (info.vocab_size + info.hidden_size if info.embedding else 0)
    num = config.lora.max_adapters if config.lora.enabled else config.lora.modules.count("=")
    return num * config.lora.max_rank * widths * itemsize(dtype)


def blocks_needed(spec: KVSpec, length: int, max_tokens: int) -> int:
    """Blocks that one row of `length` tokens holds at most. A window keeps its tokens and those of the current step."""
    if spec.recurrent:
        return 1
    held = length if spec.window is None else min(length, spec.window + max_tokens + spec.block_size)
    return -(-held // spec.block_size)


def bytes_for(specs: Sequence[KVSpec], length: int, max_tokens: int) -> int:
    """KV bytes of one row of `length` tokens."""
    return sum(spec.bytes_per_block * blocks_needed(spec, length, max_tokens) for spec in specs)


def _alone(specs: Sequence[KVSpec], length: int, max_tokens: int) -> int:
    """The least KV bytes with which a row of `length` tokens runs: its own, and the null block of each group."""
    return bytes_for(specs, length, max_tokens) + sum(spec.bytes_per_block for spec in specs)


def plan_kv(
    facts: WorkerFacts, config: EngineConfig, *, max_length: int | None = None, max_tokens: int | None = None,
    causal: bool = True,
) -> KVConfig:  # fmt: skip
    """How many blocks each KV group gets.

    `max_length`: longest row, when it is known (the user's, or the model's); "auto" memory then takes no more than
    `max_rows` rows of that length can use. Without `causal` a prompt holds blocks for one step only, so "auto" takes
    what the prompts of the steps in flight fill. Raises CapacityError when not even one row fits.
    """
    specs, num_states = facts.kv_specs, config.sched.rows
    if config.cache.prefix_cache:  # as many again for the states that are kept
        num_states *= 2
    max_tokens = max_tokens or step_tokens(config)
    asked = config.model.max_length
    longest = asked or max_length
    floor = asked or min(longest or MIN_LENGTH, MIN_LENGTH)
    if config.cache.num_blocks is not None:
        asked_for = config.cache.num_blocks
        states = min(asked_for, num_states + 1)
        kv = KVConfig(specs, tuple(states if spec.recurrent else asked_for for spec in specs))
        if kv.nbytes > facts.free_kv_bytes:
            raise _too_little(kv.nbytes, facts.free_kv_bytes, f"cache.num_blocks = {config.cache.num_blocks}")
        needed = 1 + max(blocks_needed(spec, floor, max_tokens) for spec in specs)
        if asked_for < needed:
            raise CapacityError(
                f"one request of {floor} tokens needs {needed} blocks, the null block included, "
                f"cache.num_blocks = {asked_for}",
                fix=f"raise --num-blocks to {needed}, or use a smaller --max-length or --max-step-tokens",
            )
        return kv
    budget = parse_budget(config.cache.memory, facts.free_kv_bytes, "cache.memory") or facts.free_kv_bytes
    if budget > facts.free_kv_bytes:
        raise _too_little(budget, facts.free_kv_bytes, f"cache.memory = {config.cache.memory!r}")
    rows = config.sched.rows if config.cache.memory == "auto" and longest else None
    if rows and longest and not causal:  # each row fills its last block in part
        rows = -(-config.parallel.in_flight * (max_tokens + rows * specs[0].block_size) // longest)
    if (needed := _alone(specs, floor, max_tokens)) > budget:
        raise _too_little(needed, budget, f"one request of {floor} tokens")
    return KVConfig(specs, _divide(specs, budget, num_states, (floor, longest or floor), max_tokens, rows))


def _divide(
    specs: Sequence[KVSpec], budget: int, num_states: int, lengths: tuple[int, int], max_tokens: int, rows: int | None
) -> tuple[int, ...]:
    """Blocks per group. Recurrent state gets `num_states`, one for every row, as long as that is half of the budget,
    and a row of the least of `lengths`, which fits, has room beside it.

    For few rows of great length that is too much; but most are shorter, and those that wait for a state wait long.
    """
    shared = _share(specs, budget, lengths, max_tokens, rows)
    state = next((spec.bytes_per_block for spec in specs if spec.recurrent), 0)
    if not state:
        return shared
    room = (budget - _alone(specs[:-1], lengths[0], max_tokens)) // state - 1
    num = min(num_states, room, max(shared[-1] - 1, budget // 2 // state - 1)) + 1
    return (*_share(specs[:-1], budget - num * state, lengths, max_tokens, rows), num) if specs[:-1] else (num,)


def _share(
    specs: Sequence[KVSpec], budget: int, lengths: tuple[int, int], max_tokens: int, rows: int | None
) -> tuple[int, ...]:
    """Blocks per group such that all groups run out together for rows of the longest length of which one fits.

    `lengths` are the least, of which one fits, and the greatest; the null block comes on top.
    """
    span = range(lengths[0], lengths[1] + 1)
    length = span[bisect_right(span, budget, key=lambda n: _alone(specs, n, max_tokens)) - 1]
    needs = [blocks_needed(spec, length, max_tokens) for spec in specs]
    null = sum(spec.bytes_per_block for spec in specs)
    share = (budget - null) / bytes_for(specs, length, max_tokens)
    if rows is not None:
        share = min(share, rows)
    return tuple(1 + int(need * share) for need in needs)


def _too_little(needed: int, available: int, what: str) -> CapacityError:
    sizes = format_size(needed), format_size(max(available, 0))
    if sizes[0] == sizes[1]:
        sizes = f"{needed} bytes", f"{available} bytes"
    return CapacityError(
        f"{what} needs {sizes[0]} of KV cache, {sizes[1]} are available",
        fix="use a smaller --max-length, --max-step-tokens or model, raise --kv-memory or --num-blocks, or free memory",
    )


def fit_length(info: ModelInfo, kv: KVConfig, max_tokens: int, asked: int | None = None) -> int:
    """The longest prompt + output of one request: what was asked, else what the model allows and the cache can hold.

    A window that holds all that a row may need of it in steps of `max_tokens` is no limit.
    """
    if asked is not None:
        return asked
    held = [
        (num - 1) * spec.block_size
        for spec, num in zip(kv.specs, kv.num_blocks, strict=True)
        if num - 1 < blocks_needed(spec, info.max_length, max_tokens)
    ]
    return min([info.max_length, *held])
