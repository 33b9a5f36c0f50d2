"""Least squares, and non-negative ones, in a handful of unknowns, from sums alone: no samples are kept.

scipy's nnls does the same from the samples, and is what the tests hold this against; importing it costs the driver half
a second of processor time, more than planning a long prompt does in all.

Source: C. L. Lawson, R. J. Hanson, Solving Least Squares Problems (1974), chapter 23, on the normal equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

_TOLERANCE = 1e-10  # of a gradient, with columns scaled to length one


def nnls(gram: Sequence[Sequence[float]], moment: Sequence[float]) -> list[float]:
    """x >= 0 that minimises |Ax - y|^2, from ``gram`` = A'A and ``moment`` = A'y. Columns of zeros get 0."""
    size = len(moment)
    scale = [1 / sqrt(gram[i][i]) if gram[i][i] > 0 else 0.0 for i in range(size)]
    matrix = [[scale[i] * scale[j] * gram[i][j] for j in range(size)] for i in range(size)]
    vector = [scale[i] * moment[i] for i in range(size)]
    limit = _TOLERANCE * max(map(abs, vector), default=0.0)
    x = [0.0] * size
    free: list[int] = []  # unknowns above zero
    for _ in range(3 * size):
        gradient = [vector[i] - sum(matrix[i][j] * x[j] for j in free) for i in range(size)]
        entering = max((i for i in range(size) if i not in free and scale[i]), key=gradient.__getitem__, default=None)
        if entering is None or gradient[entering] <= limit:
            break
        free.append(entering)
        while True:
            solution = solve(matrix, vector, free)
            if all(value > 0 for value in solution):
                break
            # Walk towards the solution until the first unknown is zero; it leaves.
            steps = [x[i] / (x[i] - s) for i, s in zip(free, solution, strict=True) if s <= 0 and x[i] > s]
            step = min(steps, default=0.0)
            for i, value in zip(free, solution, strict=True):
                x[i] += step * (value - x[i])
            free = [i for i, s in zip(free, solution, strict=True) if s > 0 or x[i] > 1e-12]
            for i in range(size):
                if i not in free:
                    x[i] = 0.0
        for i, value in zip(free, solution, strict=True):
            x[i] = value
    return [scale[i] * x[i] for i in range(size)]


def solve(matrix: Sequence[Sequence[float]], vector: Sequence[float], rows: Sequence[int]) -> list[float]:
    """x with ``matrix`` x = ``vector`` in the unknowns ``rows`` alone, by elimination with pivots.

    An unknown that the others determine already is 0.
    """
    work = [[matrix[i][j] for j in rows] + [vector[i]] for i in rows]
    size = len(rows)
    solution = [0.0] * size
    pivots = []
    used: set[int] = set()
    for column in range(size):
        row = max((r for r in range(size) if r not in used), key=lambda r: abs(work[r][column]))
        if abs(work[row][column]) < 1e-13:
            continue
        used.add(row)
        pivots.append((row, column))
        for other in range(size):
            if other != row:
                factor = work[other][column] / work[row][column]
                for j in range(column, size + 1):
                    work[other][j] -= factor * work[row][j]
    for row, column in pivots:
        solution[column] = work[row][size] / work[row][column]
    return solution
