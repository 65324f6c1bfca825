"""Real GGUF files here, in llama.cpp, and in transformers with float32 weights: perplexity of a text, greedy tokens.

    python scripts/compare_real_models.py LLAMA_CPP TRANSFORMERS FILE ... [--tokens N] [--prompts N] [--answer N]

LLAMA_CPP is an interpreter that has the package xllamacpp; TRANSFORMERS one that has torch, transformers, accelerate
and gguf, which read the same file and run its values in float32: the reference. Both engines round activations to 8
bits before products, each in its own way, and keep keys and values in float16; the reference rounds neither.

Each file's own tokenizer reads PROSE_TEXT of fixture_texts.py; its first tokens are taken. Every engine reports the
logprob of each after all before it, and which token it would choose there. Then some pieces of the text are continued
greedily, by llama.cpp and by the reference, and at each place of both answers it is asked what unspool
chooses. Where it first chooses another token, the reference's logits of the two tokens say who is right, and by how
much.

The tables are Markdown, the last line JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripts.fixture_texts import PROSE_TEXT
from tests.models.family_files import rows_of
from unspool.models.checkpoint import Checkpoint, open_checkpoint
from unspool.ops.cpu import CpuOps

LENGTH = 32  # of a prompt
ROWS = 64  # of logits that are turned into logprobs at once
SERVER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 1024, 1
params.hostnames, params.port, params.verbosity, params.warmup = ["127.0.0.1"], int(sys.argv[2]), -1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.n_gpu_layers = 0
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(3600)
"""
# Answers one question a line: {"text": ids}; {"prompts": lists of ids, "count": tokens}; {"places": [list, place, two
# tokens], …}, about the answers it gave; and the same with "ids", other lists than these.
REFERENCE = """
import json, sys, torch, transformers
from pathlib import Path
path = Path(sys.argv[1])
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager").eval()
own = []  # the logits of each step of its answers

def of_text(ids):
    logits = model(torch.tensor([ids])).logits[0, :-1]
    logprobs = [torch.log_softmax(row.double(), 0)[token].item() for row, token in zip(logits, ids[1:])]
    return {"logprobs": logprobs, "chosen": logits.argmax(1).tolist()}

def of_prompts(prompts, count):
    ids, past, found = torch.tensor(prompts), None, []
    for _ in range(count):
        out = model(ids, past_key_values=past, use_cache=True)
        past = out.past_key_values
        own.append(out.logits[:, -1])
        ids = own[-1].argmax(1, keepdim=True)
        found.append(ids[:, 0].tolist())
    return [list(each) for each in zip(*found)]

def at(row, tokens):
    return [row[tokens[0]].item(), row[tokens[1]].item(), row.argmax().item()]

def answer(asked):
    if "text" in asked:
        return of_text(asked["text"])
    if "prompts" in asked:
        return of_prompts(asked["prompts"], asked["count"])
    if "ids" in asked:
        rows = [model(torch.tensor([ids])).logits[0, -1] for ids in asked["ids"]]
        return [at(row, tokens) for row, (_, _, tokens) in zip(rows, asked["places"])]
    return [at(own[place][number], tokens) for number, place, tokens in asked["places"]]

print(flush=True)
with torch.inference_mode():
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
"""


# The other engines ----------------------------------------------------------------------------------------------------
class LlamaCpp:
    """xllamacpp's server."""

    def __init__(self, address: str) -> None:
        self._address = address

    def _complete(self, ids: list[int], **body: Any) -> dict[str, Any]:
        body = {"prompt": ids, "temperature": 0, "top_k": 0, "cache_prompt": True, "return_tokens": True} | body
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._address}/completion", json.dumps(body).encode(), kind)
        found: dict[str, Any] = json.load(urllib.request.urlopen(request))
        return found

    def of_text(self, ids: list[int]) -> tuple[np.ndarray, list[int]]:
        """Each token's logprob after those before it, and what would be chosen there.

        A bias makes the server take the token; the logprobs that it reports are those without bias.
        """
        logprobs, chosen = [], []
        for place in range(1, len(ids)):
            reply = self._complete(ids[:place], n_predict=1, n_probs=1, logit_bias=[[ids[place], 1000.0]])
            (step,) = reply["completion_probabilities"]
            assert step["id"] == ids[place]
            logprobs.append(step["logprob"])
            chosen.append(step["top_logprobs"][0]["id"])
        return np.array(logprobs), chosen

    def answers(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        return [self._complete(each, n_predict=count, ignore_eos=True)["tokens"] for each in prompts]


@contextmanager
def llama_cpp(python: str, path: Path) -> Iterator[LlamaCpp]:
    server = subprocess.Popen([python, "-c", SERVER, str(path), "18331"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield LlamaCpp(server.stdout.readline().strip())
    finally:
        server.kill()
        server.communicate()


class Reference:
    """transformers, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@contextmanager
def reference(python: str, path: Path) -> Iterator[Reference]:
    process = subprocess.Popen(
        [python, "-c", REFERENCE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield Reference(process)
    finally:
        process.kill()
        process.communicate()


# Comparing ------------------------------------------------------------------------------------------------------------
def our_text(checkpoint: Checkpoint, ops: CpuOps, ids: list[int]) -> tuple[np.ndarray, list[int]]:
    logits = rows_of(checkpoint, ops, np.array(ids, np.int32), [len(ids)], "f16")[:-1]
    logprobs = []
    for start in range(0, len(logits), ROWS):
        rows = logits[start : start + ROWS].astype(np.float64)
        norm = np.log(np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)) + rows.max(axis=1)
        logprobs.append(rows[np.arange(len(rows)), ids[start + 1 : start + 1 + len(rows)]] - norm)
    return np.concatenate(logprobs), logits.argmax(axis=1).tolist()


def partings(
    checkpoint: Checkpoint, ops: CpuOps, prompts: list[list[int]], answers: list[list[int]]
) -> list[dict[str, Any]]:
    """Where, in each answer, unspool first chooses another token: the place, both tokens, and its lead."""
    found = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        read = np.array([*prompt, *answer[:-1]], np.int32)
        rows = rows_of(checkpoint, ops, read, [len(read)], "f16")[len(prompt) - 1 :]
        own = rows.argmax(axis=1)
        if (differs := np.flatnonzero(own != answer)).size:
            place = int(differs[0])
            lead = float(rows[place, own[place]] - rows[place, answer[place]])
            found.append({"prompt": number, "place": place, "tokens": [int(own[place]), answer[place]], "lead": lead})
    return found


def with_reference(found: list[dict[str, Any]], reference: list[list[float]]) -> list[dict[str, Any]]:
    """Partings with the reference's lead of our token over the other one, and which of them it chooses."""
    result = []
    for each, (own, other, best) in zip(found, reference, strict=True):
        names = dict(zip(each["tokens"], ("ours", "the other"), strict=True))
        result.append(each | {"reference_lead": own - other, "reference": names.get(int(best), "a third")})
    return result


def beside(right: dict[str, Any], logprobs: np.ndarray, chosen: list[int]) -> dict[str, float]:
    """What an engine says of a text, beside the reference."""
    apart = np.abs(logprobs - right["logprobs"])
    return {
        "perplexity": float(np.exp(-logprobs.mean())),
        "mean_difference": float(apart.mean()),
        "largest_difference": float(apart.max()),
        "same_choice": float(np.mean(np.array(chosen) == right["chosen"])),
    }


def prompts_of(ids: list[int], start: list[int], count: int) -> list[list[int]]:
    """Pieces of a text, each after `start`."""
    text = ids[len(start) :]
    step, size = len(text) // count, LENGTH - len(start)
    return [start + text[place : place + size] for place in range(0, count * step, step)]


def compare(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    checkpoint, ops = open_checkpoint(path), CpuOps(threads=1)
    tokenizer = checkpoint.tokenizer()
    ids = tokenizer.encode(PROSE_TEXT)[: options.tokens]
    prompts = prompts_of(ids, ids[:1] if tokenizer.adds_bos else [], options.prompts)
    with llama_cpp(options.llama_cpp, path) as server:
        theirs, answers = server.of_text(ids), server.answers(prompts, options.answer)
    ours, from_llama = our_text(checkpoint, ops, ids), partings(checkpoint, ops, prompts, answers)
    with reference(options.transformers, path) as asked:
        right, right_answers = asked.ask(text=ids), asked.ask(prompts=prompts, count=options.answer)
        from_right = partings(checkpoint, ops, prompts, right_answers)
        places = [[each["prompt"], each["place"], each["tokens"]] for each in from_right]
        from_right = with_reference(from_right, asked.ask(places=places))
        places = [[each["prompt"], each["place"], each["tokens"]] for each in from_llama]
        before = [[*prompts[number], *answers[number][:place]] for number, place, _ in places]
        from_llama = with_reference(from_llama, asked.ask(places=places, ids=before))
    return {
        "model": path.name,
        "tokens": len(right["logprobs"]),
        "reference_perplexity": float(np.exp(-np.mean(right["logprobs"]))),
        "unspool": beside(right, *ours),
        "llama_cpp": beside(right, *theirs),
        "from_reference": from_right,
        "from_llama_cpp": from_llama,
    }


# Reporting ------------------------------------------------------------------------------------------------------------
def report_texts(results: list[dict[str, Any]]) -> None:
    print("\n| model | tokens | perplexity: reference | unspool | llama.cpp | mean difference of a logprob: unspool |"
          " llama.cpp | largest: unspool | llama.cpp | same first choice: unspool | llama.cpp |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for each in results:
        pair = each["unspool"], each["llama_cpp"]
        print(f"| {each['model']} | {each['tokens']} | {each['reference_perplexity']:.3f}", end="")
        for key, shown in (("perplexity", ".3f"), ("mean_difference", ".4f"), ("largest_difference", ".3f")):
            print(*(f" | {one[key]:{shown}}" for one in pair), end="", sep="")
        print(*(f" | {one['same_choice']:.1%}" for one in pair), " |", sep="")


def report_answers(results: list[dict[str, Any]], prompts: int, answer: int) -> None:
    print(f"\nOf {prompts} greedy answers of {answer} tokens: where unspool parts, its lead, and the reference's lead"
          " of unspool's token over the other.")  # fmt: skip
    print("\n| model | from | answers alike | token: lead, the reference's lead |\n|---|---|---|---|")
    for each in results:
        for name, key in (("the reference", "from_reference"), ("llama.cpp", "from_llama_cpp")):
            found = [f"{one['place']}: {one['lead']:.3f}, {one['reference_lead']:+.3f}" for one in each[key]]
            print(f"| {each['model']} | {name} | {prompts - len(found)} | {'; '.join(found)} |")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("llama_cpp")
    parser.add_argument("transformers")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=513, help="of the text; all but the first are predicted")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--answer", type=int, default=48, help="tokens of each answer")
    options = parser.parse_args(arguments)
    results = []
    for path in options.files:
        results.append(compare(options, path.resolve()))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    report_texts(results)
    report_answers(results, options.prompts, options.answer)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
