"""The kernels. KV of a layer: [num_blocks, block_size, num_kv_heads, head_dim + v_head_dim], or keys alone where values
are their first part.

With int8 a block has codes like these, and behind them two float32 scales [2, num_kv_heads, block_size]: of the key
and of the value of each token and head; where values are a part of keys, of that part and of the rest. A scale is the
largest magnitude / 127.

`attend` is flash attention (Dao 2023, 2307.08691) over pages, with the query heads of one KV head in one tile. Long
rows of a decode step are cut into splits, whose parts `merge` puts together by their log-sum-exp.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _stored(x, most, LIMIT: tl.constexpr, INT8: tl.constexpr):
    """float32 as a cache holds it. LIMIT: what is too large for float8 becomes its largest number; 0: no float8.

    INT8: 127 for `most`, the largest magnitude of the head; whole numbers, halves to even.
    """
    if INT8:
        x = x * tl.where(most > 0, 1.0 / most * 127.0, 0.0)[:, None]
        # What is added makes the last bit of a float32 a whole number.
        x = tl.minimum(tl.maximum((x + 12582912.0) - 12582912.0, -127.0), 127.0)
    elif LIMIT > 0:
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    return x


@triton.jit
def _most(x):
    """The largest magnitude of each head: [H, entries] -> [H]."""
    return tl.max(tl.abs(x), 1)


@triton.jit
def write(
    k, v, kv, scales, slots, heads, k_size, v_size, k_token, k_head, k_entry, v_token, v_head, v_entry,
    kv_block, kv_slot, kv_head, s_block, s_rest, page,
    LIMIT: tl.constexpr, INT8: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """A program writes H heads of one token; slot -1 is not written. V = 0: values are a part of keys.

    Of int8 those v_size entries are K, and REST or a few less stand behind them, under a scale of their own.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    head = tl.program_id(1) * H + tl.arange(0, H)
    writes = head < tl.where(slot >= 0, heads, 0)
    block, place = slot // page, slot % page
    at = kv + block * kv_block + place * kv_slot + head[:, None] * kv_head
    of_key = scales + block * s_block + head * page + place
    first = v_size if REST > 0 else k_size
    i = tl.arange(0, K)
    of_k = writes[:, None] & (i < first)[None, :]
    base = k + token * k_token + head[:, None] * k_head
    keys = tl.load(base + i[None, :] * k_entry, of_k, 0.0).to(tl.float32)
    most = _most(keys)
    tl.store(at + i[None, :], _stored(keys, most, LIMIT, INT8).to(kv.dtype.element_ty), of_k)
    if INT8:
        tl.store(of_key, most / 127.0, writes)
    if REST > 0:
        r = v_size + tl.arange(0, REST)
        of_r = writes[:, None] & (r < k_size)[None, :]
        rest = tl.load(base + r[None, :] * k_entry, of_r, 0.0).to(tl.float32)
        most = _most(rest)
        tl.store(at + r[None, :], _stored(rest, most, LIMIT, INT8).to(kv.dtype.element_ty), of_r)
        tl.store(of_key + s_rest, most / 127.0, writes)
    if V > 0:
        j = tl.arange(0, V)
        of_v = writes[:, None] & (j < v_size)[None, :]
        values = tl.load(v + token * v_token + head[:, None] * v_head + j[None, :] * v_entry, of_v, 0.0).to(tl.float32)
        most = _most(values)
        tl.store(at + k_size + j[None, :], _stored(values, most, LIMIT, INT8).to(kv.dtype.element_ty), of_v)
        if INT8:
            tl.store(of_key + s_rest, most / 127.0, writes)


@triton.jit
def rotate_write(
    q, k, v, kv, scales, slots, cos, sin, q_heads, heads, k_size, v_size, pairs,
    q_token, q_head, q_entry, k_token, k_head, k_entry, v_token, v_head, v_entry,
    kv_block, kv_slot, kv_head, s_block, s_rest, page,
    INTERLEAVED: tl.constexpr, LIMIT: tl.constexpr, INT8: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    REST: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program turns H heads of one token: of the queries, or of the keys, which it writes with their values.

    REST entries, or a few more, of each key are not turned; 0: there are none. V = 0: values are a part of keys.
    """
    token = tl.program_id(0).to(tl.int64)
    blocks = (q_heads + H - 1) // H
    i = tl.arange(0, P)
    c = tl.load(cos + token * pairs + i, i < pairs, 0.0)[None, :]
    s = tl.load(sin + token * pairs + i, i < pairs, 0.0)[None, :]
    if INTERLEAVED:
        left, right = 2 * i[None, :], 2 * i[None, :] + 1
    else:
        left, right = i[None, :], pairs + i[None, :]
    if tl.program_id(1) < blocks:
        head = tl.program_id(1) * H + tl.arange(0, H)
        mask = (head < q_heads)[:, None] & (i < pairs)[None, :]
        base = q + token * q_token + head[:, None] * q_head
        a = tl.load(base + left * q_entry, mask, 0.0).to(tl.float32)
        b = tl.load(base + right * q_entry, mask, 0.0).to(tl.float32)
        tl.store(base + left * q_entry, (a * c - b * s).to(q.dtype.element_ty), mask)
        tl.store(base + right * q_entry, (b * c + a * s).to(q.dtype.element_ty), mask)
    else:
        slot = tl.load(slots + token)
        head = (tl.program_id(1) - blocks) * H + tl.arange(0, H)
        mask = (head < heads)[:, None] & (i < pairs)[None, :]
        base = k + token * k_token + head[:, None] * k_head
        block, place = slot // page, slot % page
        at = kv + block * kv_block + place * kv_slot + head[:, None] * kv_head
        of_key = scales + block * s_block + head * page + place
        a = tl.load(base + left * k_entry, mask, 0.0).to(tl.float32)
        b = tl.load(base + right * k_entry, mask, 0.0).to(tl.float32)
        turned_a = (a * c - b * s).to(k.dtype.element_ty)
        turned_b = (b * c + a * s).to(k.dtype.element_ty)
        tl.store(base + left * k_entry, turned_a, mask)
        tl.store(base + right * k_entry, turned_b, mask)
        present = head < tl.where(slot >= 0, heads, 0)
        writes = present[:, None]
        kept = writes & (i < pairs)[None, :]
        wide_a, wide_b = turned_a.to(tl.float32), turned_b.to(tl.float32)
        most = tl.maximum(_most(wide_a), _most(wide_b))
        if REST > 0:
            r = 2 * pairs + tl.arange(0, REST)
            of_rest = writes & (r < k_size)[None, :]
            rest = tl.load(base + r[None, :] * k_entry, of_rest, 0.0).to(tl.float32)
            most = tl.maximum(most, _most(rest))
        tl.store(at + left, _stored(wide_a, most, LIMIT, INT8).to(kv.dtype.element_ty), kept)
        tl.store(at + right, _stored(wide_b, most, LIMIT, INT8).to(kv.dtype.element_ty), kept)
        if REST > 0:
            tl.store(at + r[None, :], _stored(rest, most, LIMIT, INT8).to(kv.dtype.element_ty), of_rest)
        if INT8:
            tl.store(of_key, most / 127.0, present)
        if V > 0:
            j = tl.arange(0, V)
            kept = writes & (j < v_size)[None, :]
            x = tl.load(v + token * v_token + head[:, None] * v_head + j[None, :] * v_entry, kept, 0.0).to(tl.float32)
            most = _most(x)
            tl.store(at + k_size + j[None, :], _stored(x, most, LIMIT, INT8).to(kv.dtype.element_ty), kept)
            if INT8:
                tl.store(of_key + s_rest, most / 127.0, present)


@triton.jit
def _visible(position, key, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Whether a query at `position` sees the key there: [queries, 1] and [1, keys] -> [queries, keys]."""
    visible = key >= position * 0
    if CAUSAL:
        visible &= key <= position
    if WINDOW > 0:
        if CHUNKED:
            visible &= key >= position // WINDOW * WINDOW
        else:
            visible &= key > position - WINDOW
        if not CAUSAL:
            visible &= key < position + WINDOW
    return visible


@triton.jit
def _bounds(first, last, length, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The keys that queries from position `first` to `last` see: the lowest, and one behind the highest."""
    low, high = 0, length
    if CAUSAL:
        high = last + 1
    if WINDOW > 0:
        if CHUNKED:
            low = first // WINDOW * WINDOW
        else:
            low = tl.maximum(0, first - WINDOW + 1)
        if not CAUSAL:
            high = tl.minimum(length, last + WINDOW)
    return low, high


@triton.jit
def _part(low, high, split, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """The first tile of a part of the keys from `low` to `high`, and one behind its last."""
    end = (high + TILE - 1) // TILE
    each = (end - low // TILE + SPLITS - 1) // SPLITS
    start = low // TILE + split * each
    return start, tl.minimum(start + each, end)


@triton.jit
def _scores(x, y, keys, rest_at, inside, of_rest, of_first, of_second, INT8: tl.constexpr, REST: tl.constexpr):
    """Queries x and, beside the part of keys that is values, y, times keys; of int8 each part has its scales.

    The rest of keys is read after their first part is multiplied: registers do not hold both.
    """
    scores = tl.dot(x, tl.trans(keys), input_precision="ieee")
    if INT8:
        scores *= of_first[None, :]
    if REST > 0:
        rest = tl.load(rest_at, inside[:, None] & of_rest, 0.0).to(x.dtype)
        if INT8:
            scores += tl.dot(y, tl.trans(rest), input_precision="ieee") * of_second[None, :]
        else:
            scores = tl.dot(y, tl.trans(rest), scores, input_precision="ieee")
    return scores


@triton.jit
def _weighed(shares, values, scales, like, INT8: tl.constexpr):
    """Shares [queries, keys] of values [keys, entries], of int8 with a scale for each key.

    Shares under small scales are none in float16; bfloat16 has them, and holds codes exactly.
    """
    if INT8:
        shares *= scales[None, :]
        if like.dtype == tl.float16:
            y = tl.dot(shares.to(tl.bfloat16), values.to(tl.bfloat16))
        else:
            y = tl.dot(shares.to(like.dtype), values.to(like.dtype), input_precision="ieee")
    else:
        y = tl.dot(shares.to(like.dtype), values.to(like.dtype), input_precision="ieee")
    return y


@triton.jit
def _softmax(scores, most, weight, factor):
    """Shares of a tile's keys under the largest score so far, with what those before fade by, and both sums anew.

    Times `factor`, which is positive, scores are logarithms to base 2, as `most` is: one instruction multiplies and
    subtracts.
    """
    larger = tl.maximum(most, tl.max(scores, 1) * factor)
    base = tl.where(larger == -float("inf"), 0.0, larger)
    shares = tl.exp2(scores * factor - base[:, None])
    fade = tl.exp2(most - base)
    return shares, fade, larger, weight * fade + tl.sum(shares, 1)


@triton.jit
def _seen(
    first, end, total, most, weight, x, y, of_rest, kv, scales, page_table, head, position, live, high, slope, scale,
    softcap, size, k_size, v_size, kv_block, kv_slot, kv_head, s_block, s_rest, MASKED: tl.constexpr,
    INT8: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr, REST: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The tiles of keys from `first` to `end`, added to what was seen before. Without MASKED every query sees every key
    of theirs, and nothing is compared. `size` entries of a key lie in its first part."""
    i, j, t = tl.arange(0, K), tl.arange(0, V), tl.arange(0, TILE)
    for tile in range(first, end):
        key = tile * TILE + t
        inside = key < high if MASKED else key >= 0
        block = tl.load(page_table + key // PAGE, inside, 0).to(tl.int64)
        at = kv + block * kv_block + key % PAGE * kv_slot + head * kv_head
        keys = tl.load(at[:, None] + i[None, :], inside[:, None] & (i < size)[None, :], 0.0).to(x.dtype)
        rest_at, of_first, of_second = at, 1.0, 1.0
        if REST > 0:
            rest_at = at[:, None] + v_size + tl.arange(0, REST)[None, :]
        if INT8:
            of_key = scales + block * s_block + head * PAGE + key % PAGE
            of_first, of_second = tl.load(of_key, inside, 0.0), tl.load(of_key + s_rest, inside, 0.0)
        scores, factor = _scores(x, y, keys, rest_at, inside, of_rest, of_first, of_second, INT8, REST), scale
        if SOFTCAP or ALIBI:
            scores, factor = scores * scale, 1.0
        if SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        if ALIBI:
            scores -= slope[:, None] * (position[:, None] - key[None, :]).to(tl.float32)
        if MASKED:
            visible = _visible(position[:, None], key[None, :], CAUSAL, WINDOW, CHUNKED)
            scores = tl.where(visible & inside[None, :] & live[:, None], scores, -float("inf"))
        shares, fade, most, weight = _softmax(scores, most, weight, factor * LOG2E)
        values = keys
        if REST == 0:
            values = tl.load(at[:, None] + k_size + j[None, :], inside[:, None] & (j < v_size)[None, :], 0.0)
        total = total * fade[:, None] + _weighed(shares, values, of_first if REST > 0 else of_second, x, INT8)
    return total, most, weight


@triton.jit(do_not_specialize=["first_row"])  # how many rows decode beside prompts changes from step to step
def attend(
    q, kv, scales, out, partial, logs, sinks, slopes, query_start, seq_len, page_start, pages, scale, softcap,
    first_row, q_heads, group, k_size, v_size, q_token, q_head, q_entry, kv_block, kv_slot, kv_head, s_block, s_rest,
    out_token, out_head, INT8: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr,
    REST: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program does TOKENS queries of a row for GROUP heads of one KV head; of their keys one of SPLITS parts.

    REST > 0: values are the first entries of keys, which are read once for both; REST more, or a few less, are not.
    The last queries of a row come first: they see the most keys, and what takes longest is not begun last.
    """
    row = first_row + tl.program_id(0)
    head, split = tl.program_id(2) // (SPLITS * GROUPS), tl.program_id(2) % SPLITS
    first_query = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - first_query
    length = tl.load(seq_len + row)
    begin = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    if begin < num_queries and length > 0:
        m = tl.arange(0, TOKENS * GROUP)
        token, member = begin + m // GROUP, tl.program_id(2) // SPLITS % GROUPS * GROUP + m % GROUP
        live = (token < num_queries) & (member < group)
        position = length - num_queries + token
        i, j = tl.arange(0, K), tl.arange(0, V)
        of_token = (first_query + token).to(tl.int64)
        query_head = head * group + member
        size = v_size if REST > 0 else k_size
        queries = q + (of_token * q_token + query_head * q_head)[:, None]
        x = tl.load(queries + i[None, :] * q_entry, live[:, None] & (i < size)[None, :], 0.0)
        y, of_rest = x, 0
        if REST > 0:
            r = tl.arange(0, REST)
            of_rest = (r < k_size - v_size)[None, :]
            y = tl.load(queries + (v_size + r[None, :]) * q_entry, live[:, None] & of_rest, 0.0)
        past = length - num_queries
        last = past + tl.minimum(begin + TOKENS, num_queries) - 1
        low, high = _bounds(past + begin, last, length, CAUSAL, WINDOW, CHUNKED)
        start, end = _part(low, high, split, TILE, SPLITS)
        whole = start  # from here on a query may not see a key of its tile
        if WINDOW == 0:
            whole = tl.maximum(start, tl.minimum(end, (past + begin + 1 if CAUSAL else length) // TILE))
        most, weight = tl.full([TOKENS * GROUP], -float("inf"), tl.float32), tl.zeros([TOKENS * GROUP], tl.float32)
        if SINKS:
            mine = live & (member < tl.where(split == 0, group, 0))
            most = tl.load(sinks + query_head, mine, -float("inf")) * LOG2E
            weight = tl.where(mine, 1.0, 0.0)
        slope = most
        if ALIBI:
            slope = tl.load(slopes + query_head, live, 0.0)
        total = tl.zeros([TOKENS * GROUP, V], tl.float32)
        page_table = pages + tl.load(page_start + row)
        total, most, weight = _seen(
            start, whole, total, most, weight, x, y, of_rest, kv, scales, page_table, head, position, live, high, slope,
            scale, softcap, size, k_size, v_size, kv_block, kv_slot, kv_head, s_block, s_rest, False,
            INT8, CAUSAL, WINDOW, CHUNKED, SOFTCAP, ALIBI, PAGE, TILE, K, REST, V,
        )  # fmt: skip
        total, most, weight = _seen(
            whole, end, total, most, weight, x, y, of_rest, kv, scales, page_table, head, position, live, high, slope,
            scale, softcap, size, k_size, v_size, kv_block, kv_slot, kv_head, s_block, s_rest, True,
            INT8, CAUSAL, WINDOW, CHUNKED, SOFTCAP, ALIBI, PAGE, TILE, K, REST, V,
        )  # fmt: skip
        mean = total / tl.where(weight == 0, 1.0, weight)[:, None]
        there = live[:, None] & (j < v_size)[None, :]
        if SPLITS == 1:
            at = out + (of_token * out_token + query_head * out_head)[:, None]
            tl.store(at + j[None, :], mean.to(out.dtype.element_ty), there)
        else:
            part = (row * q_heads + query_head).to(tl.int64) * SPLITS + split
            tl.store(partial + part[:, None] * v_size + j[None, :], mean, there)
            tl.store(logs + part, most + tl.log2(weight), live)


@triton.jit
def merge(
    out, partial, logs, query_start, seq_len, q_heads, v_size, out_token, out_head, SPLITS: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    """The parts of one row and head, each of its weight."""
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start + row)
    if tl.load(query_start + row + 1) > first and tl.load(seq_len + row) > 0:
        s, j = tl.arange(0, SPLITS), tl.arange(0, V)
        part = (row * q_heads + head).to(tl.int64) * SPLITS + s
        log = tl.load(logs + part)
        share = tl.exp2(log - tl.max(log, 0))
        parts = tl.load(partial + part[:, None] * v_size + j[None, :], (j < v_size)[None, :], 0.0)
        mean = tl.sum(parts * share[:, None], 0) / tl.sum(share, 0)
        at = out + first.to(tl.int64) * out_token + head * out_head + j
        tl.store(at, mean.to(out.dtype.element_ty), j < v_size)
