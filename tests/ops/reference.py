"""Float64 references in NumPy, gradients written out, and random prefix trees built from parent pointers."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass
class Tree:
    """A depth-first row: for each position its parent (-1: root), depth, end of subtree, and what it may see."""

    parent: np.ndarray
    depth: np.ndarray
    subtree_end: np.ndarray
    sees: np.ndarray  # bool [T, T], from walking up the parents

    def visible(self, window: int = 0) -> np.ndarray:
        near = self.depth[:, None] - self.depth[None, :] < (window or len(self.depth))
        return self.sees & near


def tree_from_parents(parent: list[int]) -> Tree:
    """The tree of parent pointers in depth-first order."""
    length = len(parent)
    depth, sees = np.zeros(length, np.int32), np.zeros((length, length), bool)
    for i, p in enumerate(parent):
        sees[i, i] = True
        if p >= 0:
            sees[i] |= sees[p]
            depth[i] = depth[p] + 1
    subtree_end = np.array([1 + np.flatnonzero(sees[:, k]).max() for k in range(length)], np.int32)
    return Tree(np.array(parent), depth, subtree_end, sees)


def random_tree(rng: np.random.Generator, length: int, pads: int = 0, fork: float = 0.08) -> Tree:
    """A random forest of ``length`` positions, then ``pads`` positions that are trees of their own."""
    parent: list[int] = []
    for i in range(length):
        if i == 0:
            parent.append(-1)
            continue
        path = [-1]
        at = i - 1
        while at >= 0:
            path.append(at)
            at = parent[at]
        parent.append(int(rng.choice(path)) if rng.random() < fork else i - 1)
    return tree_from_parents(parent + [-1] * pads)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: np.ndarray, see: np.ndarray, scale: float, softcap: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Output and the gradients of q, k, v under the cotangent ``d_out``; all float64."""
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    repeats = q.shape[1] // k.shape[1]
    k_all, v_all = np.repeat(k, repeats, axis=1), np.repeat(v, repeats, axis=1)
    raw = scale * np.einsum("thd,shd->hts", q, k_all)
    scores = raw if softcap is None else softcap * np.tanh(raw / softcap)
    scores = np.where(see, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hts,shd->thd", weights, v_all)
    d_weights = np.einsum("thd,shd->hts", d_out, v_all)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    if softcap is not None:
        d_scores = d_scores * (1 - np.tanh(raw / softcap) ** 2)
    dq = scale * np.einsum("hts,shd->thd", d_scores, k_all)
    dk = scale * np.einsum("hts,thd->shd", d_scores, q)
    dv = np.einsum("hts,thd->shd", weights, d_out)
    merged = (x.reshape(len(x), -1, repeats, x.shape[-1]).sum(2) for x in (dk, dv))
    return out, dq, *merged


def head(
    hidden: np.ndarray,
    kernel: np.ndarray,
    ids: np.ndarray,
    num_rows: int,
    d_log_probs: np.ndarray,
    d_entropy: np.ndarray,
    *,
    temperature: float,
    softcap: float | None,
    candidates: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Log-probs, entropy and the gradients of hidden and kernel under the given cotangents; all float64."""
    rows, vocabulary = len(hidden), len(kernel)
    log_probs, entropy = np.zeros(ids.shape), np.zeros(rows)
    d_hidden, d_kernel = np.zeros(hidden.shape), np.zeros(kernel.shape)
    for m in range(num_rows):
        raw = kernel.astype(np.float64) @ hidden[m].astype(np.float64)
        z = raw if softcap is None else softcap * np.tanh(raw / softcap)
        x = z / temperature
        allowed = np.zeros(vocabulary, bool)
        if candidates is not None:
            allowed[candidates[m][candidates[m] >= 0]] = True
        if not allowed.any():
            allowed[:] = True
        log_p = x - x[allowed].max() - np.log(np.exp(x[allowed] - x[allowed].max()).sum())
        p = np.where(allowed, np.exp(log_p), 0.0)
        entropy[m] = -(p * log_p).sum()
        d_x = -d_entropy[m] * p * (log_p + entropy[m])
        for n, token in enumerate(ids[m]):
            if token < 0:
                continue
            log_probs[m, n] = log_p[token] if allowed[token] else -np.inf
            if allowed[token]:
                d_x -= d_log_probs[m, n] * p
                d_x[token] += d_log_probs[m, n]
        d_raw = d_x / temperature
        if softcap is not None:
            d_raw = d_raw * (1 - np.tanh(raw / softcap) ** 2)
        d_hidden[m] = d_raw @ kernel.astype(np.float64)
        d_kernel += np.outer(d_raw, hidden[m].astype(np.float64))
    return log_probs, entropy, d_hidden, d_kernel


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest absolute difference in units of the largest expected value, or absolute where that is below 1."""
    return float(np.abs(np.asarray(found, np.float64) - expected).max() / max(np.abs(expected).max(), 1.0))
