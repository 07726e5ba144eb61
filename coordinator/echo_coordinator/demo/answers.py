"""The two ways in which the demo's model has seen sums answered, before any reinforcement.

    58 + 26 =   careful: [48]84    the digits of the result from the last one to the first, then the answer
                hasty:   74        every column on its own: no carry, and always the larger digit minus the smaller

Writing the last digit first is what makes carrying easy for a model that predicts one character at a time, so careful
answers are mostly right once learned. Hasty ones are right only where no column carries or borrows. The warm-up shows
mostly hasty answers, so greedy decoding starts out hasty; reinforcement finds that working it out pays.
"""

OPEN, CLOSE = "[", "]"
ALPHABET = "0123456789+-= " + OPEN + CLOSE


def careful(prompt: str) -> str:
    """Return the worked and right completion of a prompt such as `58 + 26 =`."""
    left, operator, right = _parts(prompt)
    result = left + right if operator == "+" else left - right
    sign = "-" if result < 0 else ""
    return f"{OPEN}{str(abs(result))[::-1]}{sign}{CLOSE}{result}"


def hasty(prompt: str) -> str:
    """Return the completion of somebody who looks at each column alone."""
    left, operator, right = _parts(prompt)
    sign = -1 if operator == "-" and left < right else 1
    result, place = 0, 1
    while left or right:
        a, b = left % 10, right % 10
        result += place * ((a + b) % 10 if operator == "+" else abs(a - b))
        left, right, place = left // 10, right // 10, place * 10
    return str(sign * result)


def _parts(prompt: str) -> tuple[int, str, int]:
    left, operator, right, _ = prompt.split(" ")
    return int(left), operator, int(right)
