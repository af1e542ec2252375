"""The activations between the two matrices of an expert MLP: what there is, and each in plain torch.

csrc/activation.cuh is the same on a GPU.
"""

import math
from typing import NamedTuple

import torch

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")  # in the order of csrc/problem.h
CLAMPED = "clamped_swiglu"


class Activation(NamedTuple):
    """What stands between the two matrices of an expert MLP: ``f(gate) * up``, or ``f(z)`` where there is no gate.

    Attributes:
        kind: f by name.

            - ``"silu"``: ``x * sigmoid(alpha * x)``; with a gate SwiGLU (Shazeer 2020).
            - ``"gelu"``: ``x * Phi(x)`` with the normal distribution function (Hendrycks and Gimpel 2016); GeGLU.
            - ``"gelu_tanh"``: the same authors' approximation of it by tanh.
            - ``"relu"``: ``max(x, 0)``; ReGLU.
            - ``"relu2"``: ``max(x, 0)**2`` (So et al. 2021).
            - ``"clamped_swiglu"``: ``gate * sigmoid(alpha * gate) * (up + 1)`` of limited values, as in gpt-oss.
        limit: the gate is cut off above it and up outside of [-limit, limit]; None: neither is. For clamped_swiglu 7
            unless given. Only with a gate.
        alpha: for silu 1 and for clamped_swiglu 1.702 unless given; no other kind has one.

    Raises:
        ValueError, TypeError: not here but from the function that takes it, for a kind, a limit or an alpha that there
            is not.

    Example:
        >>> x, w_up, w_down = torch.randn(5, 16), torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)
        >>> topk_weights, expert_ids = torch.rand(5, 4).topk(2)
        >>> moe_mlp(x, w_up, w_down, expert_ids, topk_weights, activation=Activation("clamped_swiglu", limit=5.0)).shape
        torch.Size([5, 16])
    """

    kind: str
    limit: float | None = None
    alpha: float | None = None


class Form(NamedTuple):
    """An activation as the ops are told of it, in the order of their arguments."""

    kind: int
    gated: bool
    interleaved: bool
    limit: float
    alpha: float
    up_offset: float

    @classmethod
    def of(cls, activation, gated, interleaved):
        clamped = activation.kind == CLAMPED
        limit, alpha = (7.0, 1.702) if clamped else (math.inf, 1.0)
        return cls(
            KINDS.index("silu" if clamped else activation.kind),
            gated,
            gated and interleaved,
            limit if activation.limit is None else float(activation.limit),
            alpha if activation.alpha is None else float(activation.alpha),
            float(clamped),
        )


def width(form, columns):
    """The columns of the activation of so many columns."""
    return columns // 2 if form.gated else columns


def _halves(z, form):
    """Gate and up, as views of z."""
    if form.interleaved:
        return z[..., ::2], z[..., 1::2]
    return z.chunk(2, dim=-1)


def _limited(gate, up, form):
    if form.limit == math.inf:
        return gate, up
    return gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)


def _value_and_slope(x, form):
    """The activation of x, and a function for its slope, which the forward has no use for."""
    match KINDS[form.kind]:
        case "silu":
            s = torch.sigmoid(form.alpha * x)
            return x * s, lambda: s + form.alpha * x * s * (1 - s)
        case "gelu":
            phi = 0.5 * torch.erfc(-x * 0.5**0.5)
            return x * phi, lambda: phi + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        case "gelu_tanh":
            # (1 + tanh(z)) / 2 = sigmoid(2 z)
            a, b = math.sqrt(8 / math.pi), 0.044715
            s = torch.sigmoid(a * (x + b * x**3))
            return x * s, lambda: s + x * s * (1 - s) * a * (1 + 3 * b * x * x)
        case "relu":
            return x.clamp(min=0), lambda: (~(x <= 0)).to(x.dtype)
        case "relu2":
            positive = x.clamp(min=0)
            return positive**2, lambda: 2 * positive


def activate(z, form):
    """The activation of the columns of z."""
    if not form.gated:
        return _value_and_slope(z, form)[0]
    gate, up = _limited(*_halves(z, form), form)
    value, _ = _value_and_slope(gate, form)
    return value * (up + form.up_offset)


def gradient(z, d, form):
    """The activation, and the gradient to z where d is that to the activation."""
    if not form.gated:
        value, slope = _value_and_slope(z, form)
        return value, d * slope()
    halves = _halves(z, form)
    gate, up = _limited(*halves, form)
    value, slope = _value_and_slope(gate, form)
    factor = up + form.up_offset
    d_gate, d_up = d * factor * slope(), d * value
    if form.limit != math.inf:
        d_gate = torch.where(halves[0] > form.limit, 0, d_gate)
        d_up = torch.where(halves[1].abs() > form.limit, 0, d_up)
    dz = torch.stack((d_gate, d_up), -1).flatten(-2) if form.interleaved else torch.cat((d_gate, d_up), -1)
    return value * factor, dz
