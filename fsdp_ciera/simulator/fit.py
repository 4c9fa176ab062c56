"""Least squares without negative coefficients, for a handful of columns, in which outliers count less."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt

_ROUNDS = 20
_HUBER = 2.0
"""A residual of more than this many robust standard deviations counts less."""


def fit_non_negative(columns: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns x >= 0, float64 [c], with the least |columns @ x - wanted|. `columns`: float64 [n, c], c at most 6.

    Tries all sets of columns whose coefficients may be above zero: this is exact, and fast for so few. Of equal fits it takes
    the one with fewer columns.
    """
    num_columns = columns.shape[1]
    scale = np.linalg.norm(columns, axis=0)
    best = np.zeros(num_columns)
    best_error = float(wanted @ wanted)
    usable = [column for column in range(num_columns) if scale[column] > 0]
    for num_chosen in range(1, len(usable) + 1):
        for chosen in combinations(usable, num_chosen):
            scaled_columns = columns[:, chosen] / scale[list(chosen)]
            coefficients, _, rank, _ = np.linalg.lstsq(scaled_columns, wanted, rcond=1e-10)
            if rank < num_chosen or (coefficients < 0).any():
                continue
            residual = scaled_columns @ coefficients - wanted
            error = float(residual @ residual)
            if error < best_error * (1 - 1e-9) - 1e-30:
                best, best_error = np.zeros(num_columns), error
                best[list(chosen)] = coefficients / scale[list(chosen)]
    return best


def fit_robust(columns: npt.NDArray[np.float64], wanted: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Fits as `fit_non_negative` does, but with Huber's weights, so that a few wild samples do not bend the result.

    The weights are computed anew until they stay the same, at most `_ROUNDS` times.
    """
    weights = np.ones_like(wanted)
    coefficients = fit_non_negative(columns, wanted)
    for _ in range(_ROUNDS):
        residual = columns @ coefficients - wanted
        deviation = 1.4826 * float(np.median(np.abs(residual)))
        if deviation <= 1e-12:
            break
        renewed = np.minimum(1.0, _HUBER * deviation / np.maximum(np.abs(residual), 1e-300))
        if np.allclose(renewed, weights, rtol=1e-3):
            break
        weights = renewed
        root = np.sqrt(weights)
        coefficients = fit_non_negative(columns * root[:, None], wanted * root)
    return coefficients
