"""Eigenvectors of symmetric matrices in decimals of 60 digits, by Jacobi's rotations."""

from __future__ import annotations

from decimal import Decimal

from exact import multiply, transpose

Matrix = list[list[Decimal]]


def eigen(matrix: Matrix) -> tuple[list[Decimal], Matrix]:
    """The eigenvalues and, as columns, their eigenvectors."""
    size = len(matrix)
    a = [list(row) for row in matrix]
    v = [[Decimal(int(i == j)) for j in range(size)] for i in range(size)]
    whole = sum((x * x for row in a for x in row), Decimal(0))
    while (
        sum((a[i][j] ** 2 for i in range(size) for j in range(size) if i != j), Decimal(0))
        > whole * Decimal(10) ** -100
    ):
        for p in range(size):
            for q in range(p + 1, size):
                if a[p][q] != 0:
                    _rotate(a, v, p, q)
    return [a[i][i] for i in range(size)], v


def _rotate(a: Matrix, v: Matrix, p: int, q: int) -> None:
    """Turn axes p and q so that their entry vanishes."""
    theta = (a[q][q] - a[p][p]) / (2 * a[p][q])
    tangent = (1 if theta >= 0 else -1) / (abs(theta) + (theta * theta + 1).sqrt())
    cosine = 1 / (tangent * tangent + 1).sqrt()
    sine = tangent * cosine
    for row in (*a, *v):
        row[p], row[q] = cosine * row[p] - sine * row[q], sine * row[p] + cosine * row[q]
    a[p], a[q] = (
        [cosine * x - sine * y for x, y in zip(a[p], a[q], strict=True)],
        [sine * x + cosine * y for x, y in zip(a[p], a[q], strict=True)],
    )


def square_roots(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """The symmetric root of a positive matrix, and the root's inverse."""
    values, vectors = eigen(matrix)
    assert min(values) > 0, "a moment without an inverse"
    found = []
    for power in ([x.sqrt() for x in values], [1 / x.sqrt() for x in values]):
        weighted = [[x * w for x, w in zip(row, power, strict=True)] for row in vectors]
        found.append(multiply(weighted, transpose(vectors)))
    return found[0], found[1]


def projector_of_largest(matrix: Matrix, count: int) -> Matrix:
    """The projector on the eigenvectors of the ``count`` largest eigenvalues; refuses a cut between close ones."""
    values, vectors = eigen(matrix)
    order = sorted(range(len(values)), key=lambda i: -values[i])
    edge = Decimal(0) if count >= len(values) else values[order[count]]
    size = values[order[0]]
    if count < len(values) and edge > size * Decimal("1e-30"):
        assert values[order[count - 1]] > edge * Decimal("1.05"), "a cut between close eigenvalues"
    kept = [[row[i] for i in order[:count]] for row in vectors]
    product: Matrix = multiply(kept, transpose(kept))
    return product
