"""Least squares without negative coefficients, for a handful of columns, in which outliers count less."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

_ROUNDS = 20
_HUBER = 2.0
"""Residuals of more than so many robust standard deviations count less."""


def fit_non_negative(columns: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """x >= 0 [c] with the least |columns @ x - wanted|; columns float64 [n, c], c at most 6.

    Tries all sets of columns that may be above zero: exact, and fast for so few. Of equal fits the one with fewer columns.
    """
    num_columns = columns.shape[1]
    scale = np.linalg.norm(columns, axis=0)
    best = np.zeros(num_columns)
    best_error = float(wanted @ wanted)
    usable = [place for place in range(num_columns) if scale[place] > 0]
    for size in range(1, len(usable) + 1):
        for chosen in combinations(usable, size):
            part = columns[:, chosen] / scale[list(chosen)]
            found, _, rank, _ = np.linalg.lstsq(part, wanted, rcond=1e-10)
            if rank < size or (found < 0).any():
                continue
            residual = part @ found - wanted
            error = float(residual @ residual)
            if error < best_error * (1 - 1e-9) - 1e-30:
                best, best_error = np.zeros(num_columns), error
                best[list(chosen)] = found / scale[list(chosen)]
    return best


def fit_robust(columns: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`fit_non_negative` with Huber's weights, renewed until they stay: a few wild samples do not bend it."""
    weights = np.ones_like(wanted)
    found = fit_non_negative(columns, wanted)
    for _ in range(_ROUNDS):
        residual = columns @ found - wanted
        deviation = 1.4826 * float(np.median(np.abs(residual)))
        if deviation <= 1e-12:
            break
        renewed = np.minimum(1.0, _HUBER * deviation / np.maximum(np.abs(residual), 1e-300))
        if np.allclose(renewed, weights, rtol=1e-3):
            break
        weights = renewed
        root = np.sqrt(weights)
        found = fit_non_negative(columns * root[:, None], wanted * root)
    return found
