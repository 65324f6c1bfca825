"""POST /v1/score: the logprobs of given texts."""

from __future__ import annotations

from unspool.events import Token
from unspool.params import SamplingParams
from unspool.results import Choice
from unspool.server.dialect import Body, WholeWriter, prompt_ids, token_entry, usage
from unspool.server.job import Job
from unspool.server.service import Service


def prepare(service: Service, body: Body) -> Job:
    params = SamplingParams(
        max_tokens=0,
        prompt_logprobs=body.get("top_logprobs", 0),
        deadline_ms=body.get("deadline_ms"),
        priority=body.get("priority", 0),
    )
    return Job([(ids, params) for ids in prompt_ids(service, body, "input")], prompt_field="input")


class ScoreWriter(WholeWriter):
    def body(self) -> Body:
        return {
            "object": "list",
            "created": self.run.created,
            "model": self.service.name,
            "data": [self._entry(choice) for choice in self.run.choices],
            "usage": usage(self.run),
            "unspool": self.service.report(self.run),
        }

    def _entry(self, choice: Choice) -> Body:
        assert choice.end is not None
        ids, _ = self.run.job.prompts[choice.index]
        scored = choice.end.prompt_logprobs
        known = [token.logprob for token in scored if token is not None and token.logprob is not None]
        return {
            "object": "score",
            "index": choice.index,
            "finish_reason": choice.end.reason,
            "num_tokens": len(ids),
            "logprob": sum(known),
            "tokens": [
                token_entry(token or Token(id), self.tokenizer) for id, token in zip(ids, scored, strict=False)
            ],
        }
