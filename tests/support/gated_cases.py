"""Problems with a gated activation: their operands, their meaning in float64, and poison in them."""

import numpy as np
import oracle
from poisoned import rows_problem, spans, sum_problem

from trencadis.core.epilogue import Epilogue, Gate, Gather
from trencadis.core.problem import Form
from trencadis.moe import swiglu
from trencadis.moe.permutation import rows_of_tokens

BIAS = Epilogue(bias=np.dtype("float32"))


def forward(*shape, keep=True, **changes):
    """A problem with SwiGLU in its epilogue."""
    return rows_problem(*shape, gate=Gate(activation=swiglu(), keep=keep), **changes)


def gathered(m, *shape, keep=True, k=2, **changes):
    """The same with rows that are gathered from tokens, each of which has k rows."""
    gate = Gate(activation=swiglu(), keep=keep, gather=Gather(m // k, rows_of_tokens))
    return rows_problem(m, *shape, gate=gate, **changes)


def pullback(m, *shape, k=0, **changes):
    """The pullback of SwiGLU, of a product with transposed weights; rows are gathered if a token has k of them."""
    gather = Gather(m // k, rows_of_tokens) if k else None
    gate = Gate(activation=swiglu(), pullback=True, gather=gather)
    return rows_problem(m, *shape, gate=gate, transpose_rhs=True, **changes)


def weights(m, *shape, k=0, operand="lhs", pair=False, **changes):
    """The gradient of weights, or of a pair of them; rows of an operand are gathered if a token has k of them."""
    gather = Gather(m // k, rows_of_tokens, operand) if k else None
    return sum_problem(m, *shape, gate=Gate(activation=None, pair=pair, gather=gather), **changes)


def total(*shape, **changes):
    """The sum of two products with transposed weights."""
    return rows_problem(*shape, gate=Gate(activation=None), transpose_rhs=True, **changes)


def numbers(problem, seed):
    """The operands without sizes and first group, in numpy so that they can be spoilt."""
    rng = np.random.default_rng(seed)
    wanted = [*problem.operands[:2], *problem.operands[4:], *problem.gate_operands]
    if problem.gather is None:
        return [rng.normal(size=shape).astype(dtype) for shape, dtype in wanted]
    inverse = rng.permutation(problem.m).astype(np.int32)  # the row of each assignment, k of them to a token
    token = np.argsort(inverse).astype(np.int32) // (problem.m // problem.gather.tokens)
    return [*(rng.normal(size=shape).astype(dtype) for shape, dtype in wanted[:-2]), token, inverse]


def meaning(problem, sizes, first, lhs, rhs, *rest):
    """All results in float64: a loop over groups, then the activation or its pullback row by row."""
    mine = np.zeros((problem.m, 1), bool)
    for span in spans(problem, sizes, first):
        mine[list(span)] = True
    if problem.gather is not None:
        *rest, token, _ = rest
        lhs, rhs = (lhs[token], rhs) if problem.gather.operand == "lhs" else (lhs, rhs[token])
    if problem.form is Form.CONTRACTION:
        window = dict(first=int(first[0]), local=problem.local_groups)
        return [oracle.contraction(lhs, each, sizes[0], **window) for each in (rhs, *rest)]
    window = dict(first=int(first[0]), transpose_rhs=problem.transpose_rhs)
    if problem.gate.activation is None:
        pairs = ((lhs, rhs), rest)
        return [sum(oracle.rows(*pair, sizes[0], **window) for pair in pairs)]
    if problem.gate.pullback:
        z_gate, z_up, weight = map(oracle.wide, rest)
        d_h, weight = oracle.rows(lhs, rhs, sizes[0], **window), weight[:, None]
        sigmoid = 1 / (1 + np.exp(-z_gate))
        h = z_gate * sigmoid * z_up
        slope = sigmoid * (1 + z_gate * (1 - sigmoid))
        found = [weight * d_h * slope * z_up, weight * d_h * z_gate * sigmoid, weight * h]
        return [*(np.where(mine, each, 0) for each in found), np.where(mine, d_h * h, 0).sum(axis=1)]
    bias_gate, up, bias_up = rest if len(rest) == 3 else (None, *rest, None)
    gate = oracle.rows(lhs, rhs, sizes[0], bias=bias_gate, **window)
    up = oracle.rows(lhs, up, sizes[0], bias=bias_up, **window)
    h = np.where(mine, gate / (1 + np.exp(-gate)) * up, 0)
    return [h, gate, up] if problem.gate.keep else [h]


def spoil(problem, sizes, first, operands, bad, poison):
    """Poison in all unowned rows, in those of span `bad`, and in the weights and biases of its group.

    Where rows are gathered it is in the tokens that have no other rows.
    """
    mine = spans(problem, sizes, first)
    good = [row for i, span in enumerate(mine) if i != bad for row in span]
    found, rows = [np.array(each) for each in operands], np.setdiff1d(np.arange(problem.m), good)
    if problem.gather is not None:
        tokens = np.setdiff1d(np.arange(problem.gather.tokens), found[-2][good])
        at = ("lhs", "rhs").index(problem.gather.operand)
        found[at][tokens] = poison
        others = [*found[:at], *found[at + 1 : -2]]
        others = spoil(problem.of_rows, sizes, first, others, bad, poison)
        return [*others[:at], found[at], *others[at:], *found[-2:]]
    for each in found:
        each[rows if each.shape[0] == problem.m else bad] = poison
    return found


def check(problem, sizes, first, operands, outs):
    """The results equal those in float64, and are exactly 0 in unowned rows, or for empty groups."""
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = meaning(problem, sizes, first, *operands)
    mine = [row for span in spans(problem, sizes, first) for row in span]
    rest = np.setdiff1d(np.arange(problem.m), mine)
    if problem.form is Form.CONTRACTION:
        rest = [i for i, span in enumerate(spans(problem, sizes, first)) if not span]
    for got, want, (shape, dtype) in zip(outs, wanted, problem.results, strict=True):
        assert got.shape == shape and got.dtype == dtype
        finite = want[np.isfinite(want)]
        oracle.check(got, want, scale=max(1.0, float(np.abs(finite).max(initial=0.0))))
        assert not np.any(np.asarray(got, np.float32)[rest])
