"""What "mean" means, as one weight per row that each of its tokens gets.

    token:     1 / Σ_j len_j                 rows of 5 and 1 tokens with values 2 and 10: 20 / 6 = 3.3333
    sequence:  1 / (rows · len_i)            the same rows: (2 + 10) / 2 = 6.0
    constant:  1 / (rows · constant_length)  Dr. GRPO: no row's own length enters

Token-level is DAPO's (arXiv 2503.14476), sequence-level that of the GRPO paper. Only rows that are trained are given,
so whatever is masked counts in no denominator.
"""

from collections.abc import Sequence

from echo_coordinator.trainer.settings import Aggregation


def row_weights(lengths: Sequence[int], aggregation: Aggregation, constant_length: int | None = None) -> list[float]:
    """Return each row's weight. `lengths`: completion tokens (>= 1) of all rows of one optimizer step."""
    if aggregation == "token":
        total = sum(lengths)
        return [1 / total for _ in lengths]
    if aggregation == "sequence":
        return [1 / (len(lengths) * length) for length in lengths]
    if constant_length is None:
        raise ValueError("constant aggregation needs constant_length")
    return [1 / (len(lengths) * constant_length) for _ in lengths]
