"""The MLP as the package computes it: in float64, but rounded where narrow operands are, and how far that may be off.

`oracle.moe_mlp` and its derivatives are the numbers that are meant. Narrow operands make others of them: the activation
is rounded before the second product, what it is the activation of is kept for the backward in their dtype, and so are
the gradient to it and the weighted activation. Here each of these is rounded too, so that no tolerance has to allow for
it. A value so near the middle between two others that honest arithmetic may round it either way has slack, and so has
the gradient at a kink of the activation.
"""

import itertools
from typing import NamedTuple

import oracle
import torch

KINK = 1e-3  # a slope that changes by so much, relative to itself, within the error of float32


class Estimate(NamedTuple):
    value: torch.Tensor
    slack: torch.Tensor  # error for free
    terms: torch.Tensor  # sums of |terms|, as `oracle.cancellation` takes them

    def __add__(self, other):
        return Estimate(*map(torch.add, self, other))


def product(function, rows, other):
    """function(rows, other), linear in each, of (rows, their slack)."""
    values, slack = rows
    size = other.abs()
    return Estimate(function(values, other), function(slack, size), function(values.abs(), size))


def rounded(value, error, dtype):
    """The value in dtype if that is narrow, and how far from it one within `error` of it may be rounded."""
    if dtype.itemsize > 2:
        return value, error
    low, middle, high = ((value + side * error).to(dtype).double() for side in (-1, 0, 1))
    return middle, torch.maximum(high - middle, middle - low)


class Rows:
    """The rows of all experts around the activation, in expert order, of T * k assignments.

    every: all errors of arithmetic count as slack, not only those that a rounding or a kink makes larger.
    """

    def __init__(self, form, x, W, ids, bias, dtype, every):
        self.form, self.x, self.W, self.bias, self.ids, self.dtype, self.every = form, x, W, bias, ids, dtype, every
        self.order, self.expert = oracle.expert_order(ids, len(W))
        self.token = self.order // max(ids.shape[1], 1)
        self.counts = torch.bincount(self.expert, minlength=len(W) + 1).tolist()
        absolute = [None if t is None else t.abs() for t in (x, W, bias)]
        self.z = oracle.gather_gemm(x, W, ids, bias)
        self.error = self.arithmetic(oracle.gather_gemm(*absolute[:2], ids, absolute[2]))

    def arithmetic(self, terms):
        """What honest arithmetic makes of sums of such |terms|."""
        return oracle.cancellation(terms, terms, self.dtype, torch.float64)

    def corners(self):
        """All that the rows may be within their error: gate and up may be off by themselves."""
        sides = itertools.product((-1.0, 1.0), repeat=1 + self.form.gated)
        for side in sides:
            halves = [torch.full_like(half, s) for half, s in zip(self.form.halves(self.z), side, strict=False)]
            shift = self.form.joined(*halves) if self.form.gated else side[0]
            yield self.z + shift * self.error

    def activated(self):
        """The activation as the forward has it, before it is rounded."""
        value = self.form(self.z)
        return value, largest(self.form(z) - value for z in self.corners())

    def at_what_is_kept(self, d, d_error, weight):
        """(h, its error) and (weight * d * slope, its error) as the backward has them."""

        def at(z):
            z = rounded(z, 0 * z, self.dtype)[0].detach().requires_grad_()
            h = self.form(z)
            return h.detach(), *torch.autograd.grad(h.sum(), z)

        h, slope = at(self.z)
        others = [at(z) for z in self.corners()]
        h_error, slope_error = (largest(other[i] - (h, slope)[i] for other in others) for i in (0, 1))
        d, d_error = (self.form.joined(t, t) if self.form.gated else t for t in (weight * d, weight.abs() * d_error))
        gradient = d * slope
        error = slope_error * d.abs() + slope.abs() * d_error + self.arithmetic(gradient.abs())
        if self.dtype.itemsize > 2 and not self.every:
            h_error = torch.zeros_like(h)
            error = torch.where(slope_error > KINK * (1 + slope.abs()), error, 0.0)
        return (h, h_error), (gradient, error)

    def outer(self, left, right):
        """The sum over each expert's rows of their outer products."""
        parts = zip(left.split(self.counts)[:-1], right.split(self.counts)[:-1], strict=True)
        return torch.stack([a.T @ b for a, b in parts])

    def of_each_expert(self, rows):
        """The sum of each expert's rows."""
        ones = torch.ones_like(self.token, dtype=torch.float64)[:, None]
        return product(lambda r, one: self.outer(r, one)[..., 0], rows, ones)

    def by_token(self, rows):
        return rows[self.order.argsort()].view(*self.ids.shape, rows.shape[1]).sum(1)

    def gradients(self, gradient):
        """To x, W and bias."""
        gradient = rounded(*gradient, self.dtype)
        found = {
            "x": product(
                lambda rows, W: self.by_token(oracle.through_experts(rows, W.transpose(1, 2), self.expert)),
                gradient,
                self.W,
            ),
            "W": product(self.outer, gradient, self.x[self.token]),
        }
        if self.bias is not None:
            found["bias"] = self.of_each_expert(gradient)
        return found


def largest(differences):
    return torch.stack([difference.abs() for difference in differences]).amax(0)


def gather_gemm(form, x, W, ids, bias, dtype, every, dy=None):
    """The result ("y"), or where dy is given the gradients, by name."""
    x, W, bias = (None if t is None else t.detach().double() for t in (x, W, bias))
    rows = Rows(form, x, W, ids, bias, dtype, every)
    if dy is None:
        value, error = rows.activated()
        return {"y": Estimate(value, error if every else torch.zeros_like(error), value.abs())}
    one = torch.ones_like(rows.z[:, :1])
    return rows.gradients(rows.at_what_is_kept(dy.double(), torch.zeros_like(dy).double(), one)[1])


def moe_mlp(form, x, w_up, w_down, weights, biases, ids, dtype, every, dy=None):
    """As `gather_gemm`; the biases by name."""
    x, w_up, w_down, weights = (t.detach().double() for t in (x, w_up, w_down, weights))
    biases = {name: bias.detach().double() for name, bias in biases.items()}
    bias_down, E = biases.get("bias_down"), len(w_up)
    weights = weights.where(oracle.is_live(ids, E), 0.0)
    rows = Rows(form, x, w_up, ids, biases.get("bias_up"), dtype, every)

    if dy is None:
        h, error = rows.activated()
        if dtype.itemsize > 2 and not every:
            error = torch.zeros_like(h)
        y = product(lambda h, W: oracle.gemm_combine(h, W, ids, weights), rounded(h, error, dtype), w_down)
        if bias_down is not None:
            nothing = torch.zeros_like(h)
            y += product(lambda b, W: oracle.gemm_combine(nothing, W, ids, weights, b), exactly(bias_down), w_down)
        return {"y": y}

    weight = weights.flatten()[rows.order][:, None]
    dy = dy.to(dtype)[rows.token].double().where(rows.expert[:, None] < E, 0.0)
    back = product(lambda d, W: oracle.through_experts(d, W.transpose(1, 2), rows.expert), exactly(dy), w_down)
    h, gradient = rows.at_what_is_kept(back.value, rows.arithmetic(back.terms), weight)
    up = rows.gradients(gradient)
    error = weight * h[1]
    if dtype.itemsize == 2:  # what is that near the middle between two values may be rounded either way
        error = error + rows.arithmetic((weight * h[0]).abs())
    weighted = rounded(weight * h[0], error, dtype)
    found = {"x": up["x"], "w_up": up["W"], "w_down": product(lambda r, d: rows.outer(d, r), weighted, dy)}

    dot = product(lambda h, d: (h * d).sum(1), h, back.value)
    dot = dot._replace(terms=(h[0].abs() * back.terms).sum(1))
    if bias_down is not None:
        of_bias = torch.cat([bias_down, torch.zeros_like(bias_down[:1])])[rows.expert]
        dot += product(lambda b, d: (b * d).sum(1), exactly(of_bias), dy)
        found["bias_down"] = rows.of_each_expert(oracle.scaled(dy.to(dtype), weight[:, 0]))
    if "bias" in up:
        found["bias_up"] = up["bias"]
    found["weights"] = Estimate(*(t[rows.order.argsort()].view(ids.shape) for t in dot))
    return found


def exactly(values):
    return values, torch.zeros_like(values)
