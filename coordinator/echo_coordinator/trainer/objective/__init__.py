"""The loss, one idea a file, on flat tensors: one entry for each completion token of the rows at hand.

    loss = Σ_rows Σ_tokens  weight(row) · (policy term + kl_coefficient · kl term)

`aggregation` gives the weights, from the whole optimizer step and before anything is split, so neither
micro-batches nor ranks change the gradient.
"""
