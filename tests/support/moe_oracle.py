"""An MoE layer as a loop over tokens and their experts in float64 numpy, with its gradients; nothing of the package."""

import numpy as np

NAMES = ("gate", "up", "down", "bias_gate", "bias_up", "bias_down")


def swiglu(gate, up, limit=None, alpha=1.0, shift=0.0):
    """The activation and its derivatives in gate and up."""
    d_gate = d_up = 1.0
    if limit is not None:
        d_gate, d_up = (gate < limit) * 1.0, (np.abs(up) < limit) * 1.0
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    s = 1 / (1 + np.exp(-alpha * gate))
    value = gate * s * (up + shift)
    return value, d_gate * (s + alpha * gate * s * (1 - s)) * (up + shift), d_up * gate * s


def layer(x, experts, weights, params, ct, *, first=0, **options):
    """The result [t, d], and the gradients of <result, ct> in x, weights and each parameter, by name."""
    x, weights, ct = (np.asarray(each, np.float64) for each in (x, weights, ct))
    params = {name: None if p is None else np.asarray(p, np.float64) for name, p in params.items()}
    out, d_x, d_weights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
    d = {name: None if p is None else np.zeros_like(p) for name, p in params.items()}
    gated = params["gate"] is not None
    for t, j in np.ndindex(*np.shape(experts)):
        e = int(experts[t, j]) - first
        if not 0 <= e < params["up"].shape[0]:
            continue

        def affine(v, name, e=e):
            bias = params[f"bias_{name}"]
            return v @ params[name][e] + (0 if bias is None else bias[e])

        up = affine(x[t], "up")
        if gated:
            gate = affine(x[t], "gate")
            h, slope_gate, slope_up = swiglu(gate, up, **options)
        else:
            h, slope_up = np.maximum(up, 0), (up > 0) * 1.0
        y = affine(h, "down")
        out[t] += weights[t, j] * y
        d_y = weights[t, j] * ct[t]
        d_weights[t, j] = ct[t] @ y
        d_h = params["down"][e] @ d_y
        d["down"][e] += np.outer(h, d_y)
        gradients = {"down": d_y, "up": d_h * slope_up}
        if gated:
            gradients["gate"] = d_h * slope_gate
        for name, g in gradients.items():
            if name != "down":
                d[name][e] += np.outer(x[t], g)
                d_x[t] += params[name][e] @ g
            if d[f"bias_{name}"] is not None:
                d[f"bias_{name}"][e] += g
    return out, {"x": d_x, "weights": d_weights, **d}
