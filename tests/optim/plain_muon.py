"""Muon and AdamW as plain loops over whole logical tensors, for tests to compare with."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from megaprec.optim.rules.muon.rule import Muon

Tensors = dict[str, Tensor]


def by_singular_values(matrix: Tensor, rule: Muon) -> Tensor:
    """The iteration on the singular values themselves, which is what the products of matrices come
    to."""
    u, s, v = torch.linalg.svd(matrix / max(matrix.norm(), rule.ns_eps), full_matrices=False)
    for _ in range(rule.ns_steps):
        s = sum(
            (c * s ** (2 * n + 1) for n, c in enumerate(rule.ns_coefficients)), torch.zeros_like(s)
        )
    return (u * s) @ v


def plain(
    weights: Tensors,
    steps: Sequence[Tensors],
    rule: Muon,
    lr: float,
    clip: float = 0.0,
    decay: float = 0.1,
    heads: Mapping[str, int] | None = None,
) -> Tensors:
    """The weights after applied steps with these gradients, which are clipped. Nothing of what is
    given changes. heads: by name, of matrices whose heads are updated one by one, if any are."""
    weights = {n: w.clone() for n, w in weights.items()}
    first, second = ({n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    for applied, grads in enumerate(steps, 1):
        norm = float(torch.cat([g.flatten() for g in grads.values()]).norm())
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for n, w in weights.items():
            g = grads[n] * factor
            if w.dim() == 2 and not any(fnmatchcase(n, pattern) for pattern in rule.by_adamw):
                mu = rule.momentum
                first[n] = mu * first[n] + (1 - mu) * g
                update = mu * first[n] + (1 - mu) * g if rule.nesterov else first[n]
                w.mul_(1 - lr * decay)
                of_one = len(w) // (heads or {}).get(n, 1)  # rows
                for head, matrix in zip(w.split(of_one), update.split(of_one), strict=True):
                    rows, columns = matrix.shape
                    moonshot = 0.2 * max(rows, columns) ** 0.5
                    keller = max(1.0, rows / columns) ** 0.5
                    scale = moonshot if rule.scale == "moonshot" else keller
                    head.sub_(lr * scale * by_singular_values(matrix, rule))
                continue
            (one, two), eps = rule.adamw.betas, rule.adamw.eps
            first[n] = one * first[n] + (1 - one) * g
            second[n] = two * second[n] + (1 - two) * g * g
            mean = first[n] / (1 - one**applied)
            square = second[n] / (1 - two**applied)
            w.mul_(1 - lr * decay * (w.dim() >= 2)).sub_(lr * mean / (square.sqrt() + eps))
    return weights
