"""Attention over a share of one key head's compressed tokens, read as they are stored.

`triton_attention.py` joins the shares.

A program walks the pages of its share with all queries of the head in the rows of small tensor core products. Codes are loaded
once and become the model's floats in registers. The fields of a byte are for channels some way apart (`pack_codes`), so each field
is a product of its own with the query's channels that lie there, and nothing moves between threads to put channels in order.
One scale and zero a token are applied to scores and weights; other grids are applied to the codes.

How keys or values are stored is said by three constants. KIND: "plain", "bitmap", "fp8", "integer". BITS: of an integer, else 8.
GRID, what shares a scale: "none", "token", "channel" (of a page), or "group" (GROUP channels of a token).
"""

from __future__ import annotations

from runtime.kernels.triton.jit import entry, jit, tl


@jit
def channels(f: tl.constexpr, FIELDS: tl.constexpr, WIDTH: tl.constexpr):
    """int32 `[WIDTH]`: the channels that field `f` of a token's bytes is for; elements that are not bytes have one field."""
    at = tl.arange(0, WIDTH)
    if FIELDS > 1:
        at = at // (32 // FIELDS) * 32 + f * (32 // FIELDS) + at % (32 // FIELDS)
    return at


@jit
def _codes(
    pool, mask, slots, seen, SIZE: tl.constexpr, STORED: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """What the tokens at `slots` (int64 `[tokens]`) have in a pool, `[tokens, WIDTH]`; 0 where not `seen` and past the STORED ones.

    Of bitmaps, codes at their channels' positions.
    """
    at = tl.arange(0, WIDTH)
    if KIND == "bitmap":
        there = seen[:, None] & (at < SIZE)[None, :]
        bits = tl.load(mask + slots[:, None] * ((SIZE + 7) // 8) + at[None, :] // 8, mask=there, other=0)
        there = ((bits.to(tl.int32) >> (at % 8)[None, :]) & 1) != 0
        place = tl.cumsum(there.to(tl.int32), 1) - 1
        found = tl.load(pool + slots[:, None] * STORED + place, mask=there, other=0)
    else:
        there = seen[:, None] & (at < STORED)[None, :]
        found = tl.load(pool + slots[:, None] * STORED + at[None, :], mask=there, other=0)
    return found


@jit
def _grid(
    pool, page, slots, seen, f: tl.constexpr,
    SIZE: tl.constexpr, FIELDS: tl.constexpr, WIDTH: tl.constexpr, GRID: tl.constexpr, GROUP: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of field `f` in float32, as wide as they differ: `[tokens or 1, WIDTH or 1]`."""
    channel = channels(f, FIELDS, WIDTH)
    if GRID == "token":
        found = tl.load(pool + slots, mask=seen, other=0)[:, None]
    elif GRID == "group":
        if GROUP % 32 == 0:  # the same for all fields, so that they are loaded once
            channel = channels(0, FIELDS, WIDTH)
        there = seen[:, None] & (channel < SIZE)[None, :]
        at = slots[:, None] * ((SIZE + GROUP - 1) // GROUP) + (channel // GROUP)[None, :]
        found = tl.load(pool + at, mask=there, other=0)
    elif GATHER:  # every token's page has grids of its own
        there = seen[:, None] & (channel < SIZE)[None, :]
        found = tl.load(pool + page[:, None] * SIZE + channel[None, :], mask=there, other=0)
    else:
        there = (channel < SIZE) & (page >= 0)
        found = tl.load(pool + page * SIZE + channel, mask=there, other=0)[None, :]
    return found.to(tl.float32)


@jit
def _floats(
    codes, scale, zero, page, slots, seen, f: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GRID: tl.constexpr,
    GROUP: tl.constexpr, FOLDED: tl.constexpr, GATHER: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Field `f` of codes as TYPE `[tokens, WIDTH]`: what they stand for, or where the grid is FOLDED into something else, that
    without scale and zero; integers then count from the middle of their range.
    """
    FIELDS: tl.constexpr = 8 // BITS
    if KIND == "integer":
        # A field becomes the end of a float's mantissa, 256 + code * 2^(f * BITS): one AND and OR, no conversion.
        bits = ((codes.to(tl.int32) << 15) & (((1 << BITS) - 1) << (15 + f * BITS))) | 0x43800000
        value = bits.to(tl.float32, bitcast=True)
        STEP: tl.constexpr = 1.0 / (1 << (f * BITS))
        if FOLDED:
            value = value * STEP - (256 * STEP + (1 << (BITS - 1)))
        else:
            step = _grid(scale, page, slots, seen, f, SIZE, FIELDS, WIDTH, GRID, GROUP, GATHER) * STEP
            start = _grid(zero, page, slots, seen, f, SIZE, FIELDS, WIDTH, GRID, GROUP, GATHER)
            value = value * step + (start - 256 * step)
    elif KIND == "fp8":
        # Exponent and mantissa moved to where float32 has them, under its larger bias; subnormal numbers come out right too.
        word = codes.to(tl.int32)
        value = (((word & 0x80) << 24) | ((word & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
        if not FOLDED:
            value = value * _grid(scale, page, slots, seen, f, SIZE, FIELDS, WIDTH, GRID, GROUP, GATHER)
    else:
        value = codes
    return value.to(TYPE)


@jit
def key_scores(
    queries, of_queries, k_codes, k_scale, k_zero, page, slots, seen,
    SIZE: tl.constexpr, STORED: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    GRID: tl.constexpr, GROUP: tl.constexpr, GATHER: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Products `[queries, tokens]` with the keys at `slots`; `queries` holds those of each field, `of_queries` their sums over channels."""
    FOLDED: tl.constexpr = GRID == "token"  # into scores
    codes = _codes(k_codes, k_scale, slots, seen, SIZE, STORED, WIDTH, KIND)
    scores = tl.zeros([queries[0].shape[0], slots.shape[0]], tl.float32)
    for f in tl.static_range(8 // BITS):
        keys = _floats(
            codes, k_scale, k_zero, page, slots, seen, f, SIZE, WIDTH, KIND, BITS, GRID, GROUP, FOLDED, GATHER, TYPE
        )
        scores = tl.dot(queries[f], tl.trans(keys), scores, input_precision="tf32x3")
    if FOLDED:
        step = tl.load(k_scale + slots, mask=seen, other=0).to(tl.float32)
        scores = scores * step[None, :]
        if KIND == "integer":
            start = tl.load(k_zero + slots, mask=seen, other=0).to(tl.float32) + step * (1 << (BITS - 1))
            scores += of_queries[:, None] * start[None, :]
    return scores


@jit
def add_values(
    sums, of_zeros, weights, fade, v_codes, v_scale, v_zero, page, slots, seen,
    SIZE: tl.constexpr, STORED: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    GRID: tl.constexpr, GROUP: tl.constexpr, FOLDED: tl.constexpr, GATHER: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """`sums` of each field times `fade` plus the values at `slots` times `weights`, and what zeros add to every channel likewise."""
    codes = _codes(v_codes, v_scale, slots, seen, SIZE, STORED, WIDTH, KIND)
    if FOLDED:
        step = tl.load(v_scale + slots, mask=seen, other=0).to(tl.float32)
        if KIND == "integer":
            start = tl.load(v_zero + slots, mask=seen, other=0).to(tl.float32) + step * (1 << (BITS - 1))
            of_zeros = of_zeros * fade + tl.sum(weights * start[None, :], 1)
        weights = weights * step[None, :]
    weights = weights.to(TYPE)
    added = ()
    for f in tl.static_range(8 // BITS):
        values = _floats(
            codes, v_scale, v_zero, page, slots, seen, f, SIZE, WIDTH, KIND, BITS, GRID, GROUP, FOLDED, GATHER, TYPE
        )
        added += (tl.dot(weights, values, sums[f] * fade[:, None], input_precision="tf32x3"),)  # type: ignore[assignment]
    return added, of_zeros


# A program: a row, a share of its tiles of PAGE tokens, and ROWS of its M queries.
@entry
def split_kernel(
    query, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, bias, table, lengths, visible, index, counts,
    out, lse, part, extent, q_row, q_head, table_row, index_row, visible_row, M, scale, softcap,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, PAGE: tl.constexpr,
    K_SIZE: tl.constexpr, K_STORED: tl.constexpr, K_WIDTH: tl.constexpr, K_KIND: tl.constexpr, K_BITS: tl.constexpr,
    K_GRID: tl.constexpr, K_GROUP: tl.constexpr,
    V_SIZE: tl.constexpr, V_STORED: tl.constexpr, V_WIDTH: tl.constexpr, V_KIND: tl.constexpr, V_BITS: tl.constexpr,
    V_GRID: tl.constexpr, V_GROUP: tl.constexpr, V_FOLDED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_VISIBLE: tl.constexpr, CHOSEN: tl.constexpr, CAPPED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, split = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1)
    TYPE: tl.constexpr = query.dtype.element_ty
    K_FIELDS: tl.constexpr = 8 // K_BITS
    V_FIELDS: tl.constexpr = 8 // V_BITS
    GATHER: tl.constexpr = CHOSEN == "tokens"
    m, n = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PAGE)
    length = tl.load(lengths + row).to(tl.int32)
    if HAS_VISIBLE:
        limit = tl.load(visible + row * visible_row + m, mask=m < M, other=0).to(tl.int32)
        length = tl.minimum(length, tl.max(limit, 0))
    if CHOSEN == "all":
        tiles = tl.cdiv(length, PAGE)
    else:
        count = tl.load(counts + row).to(tl.int32)
        tiles = tl.cdiv(count, PAGE) if GATHER else count
    share = tl.maximum(tl.cdiv(tiles, SPLITS), LEAST)
    begin, at_out = split * share, (row * SPLITS + split) * M + m
    if SPLITS > 1:  # noqa: SIM102  # one is known when compiled, the other is not
        if begin >= tiles:
            tl.store(extent + 2 * at_out, float("-inf"), mask=m < M)
            tl.store(extent + 2 * at_out + 1, 0.0, mask=m < M)
            return

    queries = ()
    of_queries = tl.zeros([ROWS], tl.float32)  # sums over channels, which a token's zero is multiplied with
    for f in tl.static_range(K_FIELDS):
        channel = channels(f, K_FIELDS, K_WIDTH)
        own = (m < M)[:, None] & (channel < K_SIZE)[None, :]
        loaded = tl.load(query + row * q_row + m[:, None] * q_head + channel[None, :], mask=own, other=0.0)
        queries += (loaded,)  # type: ignore[assignment]
        of_queries += tl.sum(loaded.to(tl.float32), 1)

    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    of_zeros = tl.zeros([ROWS], tl.float32)  # what values' zeros add to every channel
    sums = ()
    for _ in tl.static_range(V_FIELDS):
        sums += (tl.zeros([ROWS, V_WIDTH], tl.float32),)  # type: ignore[assignment]
    for tile in tl.range(begin, tl.minimum(begin + share, tiles), num_stages=STAGES):
        if GATHER:
            at = tile * PAGE + n
            place = tl.load(index + row * index_row + at, mask=at < count, other=0).to(tl.int32)
            seen = (at < count) & (place < length)
            page = tl.load(table + row * table_row + place // PAGE, mask=seen, other=0)
            slots = page * PAGE + place % PAGE
        else:
            column = tile
            if CHOSEN == "pages":
                column = tl.load(index + row * index_row + tile).to(tl.int32)
            place = column * PAGE + n
            seen = place < length
            page = tl.load(table + row * table_row + column, mask=column * PAGE < length, other=-1)
            slots = page * PAGE + n

        scores = key_scores(
            queries, of_queries, k_codes, k_scale, k_zero, page, slots, seen,
            K_SIZE, K_STORED, K_WIDTH, K_KIND, K_BITS, K_GRID, K_GROUP, GATHER, TYPE,
        )  # fmt: skip
        if CAPPED:  # the scale is divided by the cap and multiplied by 2 already: tanh(x) = 1 - 2 / (1 + exp(2 x))
            scores = softcap - 2 * softcap / (1 + tl.exp2(scores * scale))
        else:
            scores = scores * scale  # which brings log2(e) along
        if HAS_BIAS:
            scores += (tl.load(bias + slots, mask=seen, other=0.0) * 1.4426950408889634)[None, :]
        read = seen[None, :]
        if HAS_VISIBLE:
            read = read & (place[None, :] < limit[:, None])
        scores = tl.where(read, scores, float("-inf"))

        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query may have seen nothing so far
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(most - base)
        most = higher
        total = total * fade + tl.sum(weights, 1)
        sums, of_zeros = add_values(
            sums, of_zeros, weights, fade, v_codes, v_scale, v_zero, page, slots, seen,
            V_SIZE, V_STORED, V_WIDTH, V_KIND, V_BITS, V_GRID, V_GROUP, V_FOLDED, GATHER, TYPE,
        )  # fmt: skip

    if SPLITS == 1:
        safe = tl.where(total > 0, total, 1.0)
        tl.store(lse + at_out, tl.where(total > 0, (most + tl.log2(safe)) * 0.6931471805599453, most), mask=m < M)
        target, factor = out, 1 / safe
    else:
        tl.store(extent + 2 * at_out, most, mask=m < M)
        tl.store(extent + 2 * at_out + 1, total, mask=m < M)
        target, factor = part, tl.full([ROWS], 1.0, tl.float32)
    for f in tl.static_range(V_FIELDS):
        channel = channels(f, V_FIELDS, V_WIDTH)
        own = (m < M)[:, None] & (channel < V_SIZE)[None, :]
        result = (sums[f] + of_zeros[:, None]) * factor[:, None]
        tl.store(target + at_out[:, None] * V_SIZE + channel[None, :], result, mask=own)
