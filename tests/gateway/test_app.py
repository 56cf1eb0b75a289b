"""Paths that do not generate, and what unexpected requests get."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.text.tokenizers import Tokenizers
from protos import common_pb2
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tests.gateway import fakes, tokenizers
from tests.gateway.conftest import MODEL, World
from tokenization.tokenizer import Tokenizer


def refusal(response: httpx.Response, status: int) -> dict[str, object]:
    """The error object of a refusal, checked to be OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


async def test_models_are_listed_with_residency_error_and_sizes(world: World) -> None:
    await world.publish(
        world.route(fakes.place(world.groups[0])),
        world.route(name="org/broken", residency=common_pb2.ERROR, error="tensor x is missing"),
    )
    listed = (await world.http.get("/v1/models")).json()
    assert listed["object"] == "list"
    broken, tiny = listed["data"]
    assert (tiny["id"], tiny["object"], tiny["residency"], tiny["error"]) == (MODEL, "model", "active", None)
    assert (tiny["measured_weights_bytes"], tiny["weights_bytes"], tiny["max_model_len"]) == (1234, 1000, 512)
    assert (broken["id"], broken["residency"], broken["error"]) == ("org/broken", "error", "tensor x is missing")


async def test_model_is_found_by_a_name_with_a_slash(world: World) -> None:
    assert (await world.openai.models.retrieve(MODEL)).id == MODEL
    assert (await world.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    assert refusal(await world.http.get("/v1/models/org/none"), 404)["code"] == "model_not_found"


async def test_health_says_ok_while_placement_is_away(world: World) -> None:
    assert (await world.http.get("/health")).json() == {"status": "ok", "placement": "ok", "models": 1}


async def test_metrics_are_prometheus_text(world: World) -> None:
    world.say("one two")
    await world.chat()
    text = (await world.http.get("/metrics")).text
    assert f'prism_gateway_ttft_seconds_count{{model="{MODEL}"}}' in text
    assert "prism_gateway_in_flight_requests 0.0" in text


async def test_unknown_paths_and_wrong_methods_get_openai_errors(world: World) -> None:
    assert refusal(await world.http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = await world.http.get("/v1/chat/completions")
    assert refusal(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_request_id_is_in_every_response(world: World) -> None:
    response = await world.http.get("/v1/models", headers={"x-request-id": "mine-2"})
    assert response.headers["x-request-id"] == "mine-2"
    for unfit in ("", "x" * 200):
        made = (await world.http.get("/nothing", headers={"x-request-id": unfit})).headers["x-request-id"]
        assert made not in ("", unfit)


async def test_tokenize_and_detokenize_are_inverse(world: World) -> None:
    tokens = (await world.http.post("/tokenize", json={"model": MODEL, "prompt": "hello, 世界"})).json()
    assert tokens["tokens"][1:] == world.ids("hello, 世界")
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 512)
    back = await world.http.post("/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]})
    assert back.json() == {"prompt": "<s>hello, 世界"}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    assert (await world.http.post("/tokenize", json=chat)).json()["count"] > 3


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
WITH_ALL = (
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% if quiet %} quiet{% endif %}{% endif %}"
)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"chat_template_kwargs": {"quiet": True}},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "messages": [{"role": "assistant", "content": "two"}]},
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                {"role": "tool", "content": "x"},
            ]
        },
        {"messages": [{"role": "developer", "content": [{"type": "text", "text": "three"}]}]},
    ],
)
async def test_messages_are_tokenized_to_the_prompt_of_the_chat(
    world: World, asked: dict[str, Any], tmp_path: Path
) -> None:
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "with all", template=WITH_ALL)
    await world.publish(fakes.route("all", folder, fakes.place(world.groups[0])))
    world.say("one")
    body = {"model": "all", **asked, "messages": [{"role": "user", "content": "one"}, *asked.get("messages", [])]}
    tokens = (await world.http.post("/tokenize", json=body)).json()
    assert (await world.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert tokens["tokens"] == list(world.groups[0].requests[0].submit.token_ids)


SQUARES = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
UNKEPT = [{"type": "function", "function": {"name": "f", "parameters": SQUARES}}]
NO_CALLS = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "asked", "param"),
    [
        (None, {"tools": TOOLS}, "tools"),
        (None, {"tools": TOOLS, "tool_choice": "required"}, "tools"),
        (NO_CALLS, {"tools": TOOLS}, "tools"),
        (WITH_ALL, {"tools": UNKEPT, "tool_choice": "required"}, "tools[0].function.parameters"),
        (WITH_ALL, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (WITH_ALL, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        (WITH_ALL, {"chat_template": "{{ messages }}"}, "chat_template"),
        (WITH_ALL, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        (WITH_ALL, {"functions": []}, "functions"),
        (WITH_ALL, {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        (WITH_ALL, {"add_special_tokens": True}, "add_special_tokens"),
        (WITH_ALL, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ],
)
async def test_messages_are_tokenized_only_where_the_chat_is_answered(
    world: World, template: str | None, asked: dict[str, Any], param: str, tmp_path: Path
) -> None:
    written = tokenizers.TEMPLATE if template is None else template
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "model", template=written)
    await world.publish(fakes.route("m", folder, fakes.place(world.groups[0])))
    body = {"model": "m", "messages": [{"role": "user", "content": "one"}], **asked}
    error = refusal(await world.http.post("/tokenize", json=body), 400)
    assert error["param"] == param
    assert error == refusal(await world.http.post("/v1/chat/completions", json=body), 400)


async def test_tokenize_returns_token_strings_if_requested(world: World) -> None:
    body = {"model": MODEL, "prompt": "hello wörld"}
    assert (await world.http.post("/tokenize", json=body)).json()["token_strs"] is None
    told = (await world.http.post("/tokenize", json={**body, "return_token_strs": True})).json()
    assert told["token_strs"] == tokenizers.tiny().encode("hello wörld").tokens and told["token_strs"][0] == "<s>"
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "one"}], "return_token_strs": True}
    told = (await world.http.post("/tokenize", json=chat)).json()
    assert len(told["token_strs"]) == told["count"] and "<|user|>" in told["token_strs"]
    wrong = await world.http.post("/tokenize", json={**body, "return_token_strs": "yes"})
    assert refusal(wrong, 400)["param"] == "return_token_strs"


async def test_a_role_that_the_template_refuses_is_named_by_its_place(world: World, tmp_path: Path) -> None:
    raises = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "raises", template=raises)
    await world.publish(fakes.route("raises", folder, fakes.place(world.groups[0])))
    messages = [{"role": role, "content": "one"} for role in ("user", "assistant", "tool", "user")]
    for path in ("/v1/chat/completions", "/tokenize"):
        error = refusal(await world.http.post(path, json={"model": "raises", "messages": messages}), 400)
        assert error["param"] == "messages[2].role" and "no tools here" in str(error["message"])


async def test_role_that_the_template_would_leave_out_is_refused_by_its_place(world: World, tmp_path: Path) -> None:
    only = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "only", template=only)
    await world.publish(fakes.route("only", folder, fakes.place(world.groups[0])))
    messages = [{"role": "user", "content": "one"}, {"role": "critic", "content": "two"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        error = refusal(await world.http.post(path, json={"model": "only", "messages": messages}), 400)
        assert error["param"] == "messages[1].role" and "critic" in str(error["message"])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": MODEL}, "prompt"),
        ({"model": MODEL, "prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"prompt": "a"}, "model"),
        ({"model": MODEL, "prompt": 3}, "prompt"),
    ],
)
async def test_tokenize_with_an_invalid_field_names_it(world: World, body: dict[str, object], field: str) -> None:
    assert refusal(await world.http.post("/tokenize", json=body), 400)["param"] == field


async def test_detokenize_of_an_id_beyond_the_vocabulary_is_refused(world: World) -> None:
    route = world.route(fakes.place(world.groups[0]))
    route.model.vocab_size = 400
    await world.publish(route)
    while (await world.http.post("/detokenize", json={"model": MODEL, "tokens": [400]})).status_code == 200:
        await asyncio.sleep(0.005)  # it has the new route in a moment
    answer = await world.http.post("/detokenize", json={"model": MODEL, "tokens": [3, 400]})
    assert refusal(answer, 400)["param"] == "tokens"
    assert (await world.http.post("/detokenize", json={"model": MODEL, "tokens": [399]})).status_code == 200
    assert (await world.http.post("/detokenize", json={"model": MODEL, "tokens": []})).json() == {"prompt": ""}


async def test_tokenize_of_a_client_that_is_gone_is_cancelled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    go, encoded, all_of = threading.Event(), list[int](), list[Tokenizers]()
    began = asyncio.Event()
    encode, aside = Tokenizer.encode, Tokenizers.run_aside

    def held(tokenizer: Tokenizer, text: str, special: bool, most: int | None = None) -> list[int]:
        go.wait()
        encoded.append(len(text))
        return encode(tokenizer, text, special, most)

    async def noted(tokenizers: Tokenizers, *arguments: Any, **options: Any) -> Any:
        all_of.append(tokenizers)
        began.set()
        return await aside(tokenizers, *arguments, **options)

    assert (await world.http.post("/tokenize", json={"model": MODEL, "prompt": "a"})).json()["count"] == 2
    monkeypatch.setattr(Tokenizer, "encode", held)
    monkeypatch.setattr(Tokenizers, "run_aside", noted)

    def asked(characters: int) -> asyncio.Task[httpx.Response]:
        body = {"model": MODEL, "prompt": "a" * characters}
        return tasks.spawn(world.http.post("/tokenize", json=body), "a test")

    async def waiting(count: int) -> None:
        while not all_of or all_of[0]._waiting != count:
            await asyncio.sleep(0.005)

    first = asked(5000)
    await asyncio.wait_for(began.wait(), PATIENCE_S)
    gone = asked(6000)
    await waiting(1)
    gone.cancel()
    await waiting(0)
    last = asked(7000)
    await waiting(1)
    go.set()
    assert (await first).json()["count"] and (await last).json()["count"]
    assert encoded == [5000, 7000]  # the thread of the one that was gone never began


@pytest.mark.parametrize("header", ["000000000001" + "9" * 6000, "9" * 13, "-1", "1.5"])
async def test_slo_target_out_of_range_is_refused_by_its_header(world: World, header: str) -> None:
    response = await world.http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "a"}, headers={"x-slo-ttft-ms": header}
    )
    assert refusal(response, 400)["param"] == "x-slo-ttft-ms"


async def test_a_stop_token_beyond_the_vocabulary_is_refused(world: World) -> None:
    route = world.route(fakes.place(world.groups[0]), name="org/small")
    route.model.vocab_size = 400
    await world.publish(route)
    answer = await world.complete(model="org/small", stop_token_ids=[3, 400])
    assert refusal(answer, 400)["param"] == "stop_token_ids"


async def test_a_model_that_only_this_gateway_cannot_serve_is_listed_with_the_reason_and_counted(
    world: World, tmp_path: Path
) -> None:
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "bad", template="{% if %}")
    await world.publish(world.route(), fakes.route("bad", folder))
    assert (await world.http.get("/v1/models/bad")).json()["error"] is None  # nobody has tried
    answer = await world.http.post("/v1/completions", json={"model": "bad", "prompt": "a"})
    error = refusal(answer, 503)
    assert error["code"] == "model_error" and "chat template does not compile" in str(error["message"])
    assert str(tmp_path) not in answer.text
    card = (await world.http.get("/v1/models/bad")).json()
    assert card["error"].startswith("at this gateway its chat template does not compile")
    text = (await world.http.get("/metrics")).text
    assert 'prism_gateway_model_unusable{model="bad"} 1.0' in text
    assert f'prism_gateway_model_unusable{{model="{MODEL}"}} 0.0' in text
    tokenizers.write(tokenizers.tiny(), tmp_path / "bad")
    await world.http.post("/tokenize", json={"model": "bad", "prompt": "a"})
    assert (await world.http.get("/v1/models/bad")).json()["error"] is None
    assert 'prism_gateway_model_unusable{model="bad"} 0.0' in (await world.http.get("/metrics")).text
