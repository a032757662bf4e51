"""vLLM on the work of `bench.rollout_gpu`: the same prompts and lengths, dummy weights, in this process's GPU.

    python -m bench.vllm_peer olmoe-1b-7b --cases 256,1024,lognormal --json peer.json

Needs vllm beside our dependencies. bf16, CUDA graphs, log-probabilities of sampled tokens in flat arrays, stop tokens
ignored, as many sequences at once as there are. Seconds are of the whole batch, after a warm-up of the same kind.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.rollout_work import MOST, PROMPT_TOKENS, SHAPES, WARM_UP, Batch, batch
from contraflow.model.families import ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("--cases", default="256,1024,lognormal")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    config, begun = SHAPES[options.shape], time.perf_counter()
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(tree(config)), encoding="utf-8")
        llm = vllm.LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=PROMPT_TOKENS + MOST, max_num_seqs=options.prompts * options.episodes,
            gpu_memory_utilization=0.9, disable_log_stats=True,
        )  # fmt: skip
    start_s, rows = time.perf_counter() - begun, list[dict[str, Any]]()
    for case in (WARM_UP, *options.cases.split(",")):
        work = batch(case, vocab=config.vocab, prompts=options.prompts, episodes=options.episodes, seed=options.seed)
        seconds = generate(llm, work)
        rows.append(
            {"case": case, "seconds": round(seconds, 2), "tokens_s": round(work.tokens / seconds), **work.described()}
        )
        print("RESULT vllm", options.shape, rows[-1], flush=True)
    facts = {"engine": f"vllm {vllm.__version__}", "start_s": round(start_s, 1), "rows": rows[1:]}
    options.json.write_text(json.dumps(facts, indent=1), encoding="utf-8")


def tree(config: ModelConfig) -> dict[str, Any]:
    """The shape as a Hugging Face `config.json`, with an end token that nothing stops at."""
    return config.to_hf() | {"torch_dtype": "bfloat16", "eos_token_id": config.vocab - 1, "pad_token_id": 1}


def generate(llm: Any, work: Batch) -> float:
    """Seconds for the whole batch, which is checked. Sequences of one length are asked for as samples of a prompt."""
    from vllm import SamplingParams

    fixed = {"temperature": 1.0, "ignore_eos": True, "detokenize": False, "logprobs": 0, "flat_logprobs": True}
    prompts, params, wanted = list[Any](), list[Any](), list[list[int]]()
    for prompt, lengths in zip(work.prompts, work.lengths, strict=True):
        asked = [lengths] if len(set(lengths)) == 1 else [[length] for length in lengths]
        for same in asked:
            prompts.append({"prompt_token_ids": prompt.tolist()})
            params.append(SamplingParams(n=len(same), max_tokens=same[0], **fixed))
            wanted.append(same)
    begun = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    assert [[len(given.token_ids) for given in answer.outputs] for answer in answers] == wanted
    return seconds


if __name__ == "__main__":
    main()
