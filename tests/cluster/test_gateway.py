"""What gateways of other projects ask of a model server, read as they read it: from the page of metrics."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.brake import Brake
from tests.server.harness import Client, in_process, make_llm
from unspool.server.config import ServerConfig

# The Gateway API Inference Extension's model-server protocol (proposal 003), by vLLM's names: queued, running, use of
# the cache, its shape, adapters.
GAUGES = ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc")
LONG = {"prompt": "Once upon a time", "max_tokens": 1000, "ignore_eos": True}


async def scraped(client: Client, prefix: str) -> dict[str, Metric]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {each.name.removeprefix(prefix): each for each in families if each.name.startswith(prefix)}


@pytest.mark.parametrize("prefix", ["unspool:", "vllm:"])
def test_the_metrics_of_the_model_server_protocol(prefix: str) -> None:
    llm = make_llm()
    brake = Brake(llm.engine)

    async def test(client: Client) -> None:
        for path in ("/health", "/v1/models"):
            assert (await client.get(path)).status_code == 200
        idle = await scraped(client, prefix)
        for name in GAUGES:
            assert idle[name].type == "gauge", name
            assert {sample.value for sample in idle[name].samples} == {0.0}
        for sample in idle["cache_config_info"].samples:
            assert sample.value == 1
            assert int(sample.labels["block_size"]) * int(sample.labels["num_gpu_blocks"]) == 8192
        for sample in idle["lora_requests_info"].samples:
            reported = [sample.labels[each] for each in ("max_lora", "running_lora_adapters", "waiting_lora_adapters")]
            assert reported == ["0", "", ""]
        asking = asyncio.create_task(client.post("/v1/completions", LONG))
        while not any(sample.value for sample in (await scraped(client, prefix))["num_requests_running"].samples):
            assert not asking.done()
            await asyncio.sleep(0.001)
        busy = await scraped(client, prefix)
        assert 0 < max(sample.value for sample in busy["kv_cache_usage_perc"].samples) <= 1
        brake.release()
        assert (await asking).status_code == 200
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", chat)).status_code == 200

    in_process(test, ServerConfig(metrics_prefix=prefix, log_format="off"), llm)
