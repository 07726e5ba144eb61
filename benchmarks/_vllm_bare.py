"""The other side of benchmarks.backend_vllm: `LLM.generate` and nothing else, in vLLM's own environment.

    python _vllm_bare.py SETTINGS_JSON

`SETTINGS_JSON` holds `engine`, the arguments of `LLM`, and `tokens`. The first line on stdout says `ready`. Then, for
each line on stdin, `{"prompts": [[id, …]], "seeds": [n, …]}`, there is one on stdout:
`{"seconds": s, "cpu_seconds": s, "tokens": n}`.
"""

# pyright: reportMissingImports=false

import json
import os
import sys
import time
from typing import Any, TextIO

import psutil


def cpu_seconds() -> float:
    """Processor time of this process and of those it started."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    times = [process.cpu_times() for process in processes]
    return sum(t.user + t.system for t in times)


def answer(llm: Any, line: str, tokens: int) -> dict[str, Any]:
    from vllm import SamplingParams, TokensPrompt

    work = json.loads(line)
    # Just what the backend asks of vLLM; a temperature of 1, a seed, and the sampled token's log-probability.
    settings = [
        SamplingParams(max_tokens=tokens, seed=seed, logprobs=0, ignore_eos=True, detokenize=False)
        for seed in work["seeds"]
    ]
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in work["prompts"]]
    start_s, start_cpu_s = time.perf_counter(), cpu_seconds()
    outputs = llm.generate(prompts, settings, use_tqdm=False)
    return {
        "seconds": time.perf_counter() - start_s,
        "cpu_seconds": cpu_seconds() - start_cpu_s,
        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    answers = claim_stdout()
    from vllm import LLM

    llm = LLM(**settings["engine"])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(llm, line, settings["tokens"])), file=answers, flush=True)


def claim_stdout() -> TextIO:
    """Return the pipe to the parent, and send what vLLM prints to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
