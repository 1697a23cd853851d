"""Kernels that choose the experts of tokens, with their weights, and that pull gradients back, in Triton.

A program has whole tokens, and each round takes the best key that is left. Keys are compared as integers of the same
order, of which NaN is the largest; of equal keys the first expert is taken, so that every round takes another one. A
GPU has an instruction for the least or largest of 32 integers, and none for floats or for integers of 64 bits.
"""

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**31))  # below every key
MOST = tl.constexpr(2**31 - 1)  # NaN
TINY = tl.constexpr(2.0**-126)  # the least normal number: sums below it count as 0


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def log_of_one_plus(x):
    """log(1 + x) for x >= 0, with the precision of x where x is small."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * (x / tl.where(y == 1.0, 1.0, y - 1.0)))


@triton.jit
def softmax(x, inside):
    """The normalized exponentials of the entries inside of each row; 0 elsewhere."""
    top = tl.max(tl.where(inside, x, float("-inf")), axis=1)[:, None]
    each = tl.where(inside, tl.exp(x - tl.where(tl.abs(top) < float("inf"), top, 0.0)), 0.0)
    return each / tl.sum(each, axis=1)[:, None]


@triton.jit
def scores_of(logits, inside, SCORE: tl.constexpr):
    """The scores of logits, 0 past the last expert."""
    if SCORE == "sigmoid":
        scores = sigmoid(logits)
    elif SCORE == "sqrtsoftplus":
        scores = tl.sqrt(tl.maximum(logits, 0.0) + log_of_one_plus(tl.exp(-tl.abs(logits))))
    else:
        scores = softmax(logits, inside)
    return tl.where(inside, scores, 0.0)


@triton.jit
def normalized(x):
    """The entries of each row over their sum; 0 where that is 0 or subnormal."""
    total = tl.sum(x, axis=1)[:, None]
    none = tl.abs(total) < TINY
    return tl.where(none, 0.0, x / tl.where(none, 1.0, total))


@triton.jit
def inverse(total):
    """1 / total, and 0 where a total of scores is 0 or subnormal."""
    none = tl.abs(total) < TINY
    return tl.where(none, 0.0, 1.0 / tl.where(none, 1.0, total))


@triton.jit
def ordered(keys, inside):
    """Integers in the order of the keys."""
    bits = tl.where(keys == 0.0, 0.0, keys).to(tl.int32, bitcast=True)
    bits = tl.where(keys != keys, MOST, bits ^ ((bits >> 31) & MOST))
    return tl.where(inside, bits, LEAST)


@triton.jit
def key_of(bits):
    """The key that `ordered` made an integer of."""
    return (bits ^ ((bits >> 31) & MOST)).to(tl.float32, bitcast=True)


@triton.jit
def route(
    logits, keys, experts, weights, probs,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store the K experts of each token with the best keys, by default the scores, their weights, and all scores."""
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    j = tl.arange(0, BLOCK_K)[None, :]
    there = token < TOKENS
    inside = there & (expert < EXPERTS)
    z = tl.load(logits + token * EXPERTS + expert, mask=inside, other=0.0).to(tl.float32)
    scores = scores_of(z, expert < EXPERTS, SCORE)
    if keys is not None:
        by = tl.load(keys + token * EXPERTS + expert, mask=inside, other=0.0)
    elif SCORE == "softmax_topk":
        by = z
    else:
        by = scores
    left = ordered(by, expert < EXPERTS)
    values = z if SCORE == "softmax_topk" else scores
    ids = tl.full((BLOCK_T, BLOCK_K), 0, tl.int32)
    chosen = tl.full((BLOCK_T, BLOCK_K), 0.0, tl.float32)
    for round in tl.static_range(K):
        best = tl.max(left, axis=1)[:, None]
        found = tl.min(tl.where(left == best, expert, MOST), axis=1)[:, None]
        if keys is None:
            value = key_of(best)
        else:
            value = tl.sum(tl.where(expert == found, values, 0.0), axis=1)[:, None]
        left = tl.where(expert == found, LEAST, left)
        ids = tl.where(j == round, found, ids)
        chosen = tl.where(j == round, value, chosen)
    if SCORE == "softmax_topk":
        chosen = softmax(chosen, j < K)
    elif NORMALIZE:
        chosen = normalized(chosen)
    tl.store(experts + token * K + j, ids, mask=there & (j < K))
    tl.store(weights + token * K + j, chosen, mask=there & (j < K))
    tl.store(probs + token * EXPERTS + expert, normalized(scores), mask=inside)


@triton.jit
def pull_back(
    logits, experts, d_weights, d_probs, d_logits,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the logits, from those of the weights of the chosen experts and of all scores."""
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T))[:, None]
    expert = tl.arange(0, BLOCK_E)[None, :]
    there = token < TOKENS
    real = expert < EXPERTS
    at = token * EXPERTS + expert
    z = tl.load(logits + at, mask=there & real, other=0.0).to(tl.float32)
    d_prob = tl.load(d_probs + at, mask=there & real, other=0.0)
    d_chosen = tl.full((BLOCK_T, BLOCK_E), 0.0, tl.float32)
    times = tl.full((BLOCK_T, BLOCK_E), 0.0, tl.float32)  # how often an expert was chosen
    for j in tl.static_range(K):
        hit = expert == tl.load(experts + token * K + j, mask=there, other=-1)
        d_chosen += tl.where(hit, tl.load(d_weights + token * K + j, mask=there, other=0.0), 0.0)
        times += tl.where(hit, 1.0, 0.0)
    scores = scores_of(z, real, SCORE)
    over = inverse(tl.sum(scores, axis=1)[:, None])
    d_scores = (d_prob - tl.sum(d_prob * scores, axis=1)[:, None] * over) * over
    if SCORE != "softmax_topk":
        if NORMALIZE:
            over = inverse(tl.sum(times * scores, axis=1)[:, None])
            d_chosen = (d_chosen - times * (tl.sum(d_chosen * scores, axis=1)[:, None] * over)) * over
        d_scores += d_chosen
    if SCORE == "sigmoid":
        d_z = d_scores * scores * (1.0 - scores)
    elif SCORE == "sqrtsoftplus":
        d_z = d_scores * sigmoid(z) / tl.where(scores == 0.0, 1.0, 2.0 * scores)
    else:
        d_z = scores * (d_scores - tl.sum(scores * d_scores, axis=1)[:, None])
    if SCORE == "softmax_topk":
        chosen = softmax(z, real & (times > 0.0))
        d_z += chosen * (d_chosen - tl.sum(chosen * d_chosen, axis=1)[:, None])
    tl.store(d_logits + at, d_z.to(d_logits.dtype.element_ty), mask=there & real)
