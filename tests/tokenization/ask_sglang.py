"""What SGLang's own server makes of texts and messages. A process of its own, since SGLang wants one; reads
`{"folders": [...], "texts": [...], "chats": [...]}` from its input and writes a list with an answer for each folder."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

from gpu_scheduler.engines.sglang.base import environment


def main() -> None:
    faulthandler.enable()
    asked = json.load(sys.stdin)
    environment.prepare()
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.parser.jinja_template_utils import (
        detect_jinja_template_content_format,
        jinja_template_may_reorder_tool_results,
    )
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    def rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int] | None:
        chat = OpenAIServingChat.__new__(
            OpenAIServingChat
        )  # its parts that make a prompt, and nothing else of a server
        chat.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer)
        chat.template_manager = SimpleNamespace(
            jinja_template_content_format=detect_jinja_template_content_format(tokenizer.chat_template),
            jinja_template_may_reorder_tool_results=jinja_template_may_reorder_tool_results(tokenizer.chat_template),
            reasoning_config=None,
            python_chat_template=None,
        )
        chat.chat_encoding_spec = chat._encoding_adapter = None
        chat._tokenizer_auto_adds_specials = True
        chat.is_minimax_m3 = False
        chat._chat_template_cache = OrderedDict()
        chat._prompt_text_round_trip_is_lossy = chat._probe_prompt_text_round_trip()
        request = ChatCompletionRequest(model="m", messages=messages)
        try:
            return list(chat._apply_jinja_template(request, None, False).prompt_ids)
        except ValueError:
            return None

    def answer(path: str) -> dict[str, Any]:
        tokenizer = get_tokenizer(path)
        bare = [tokenizer.encode(text, add_special_tokens=False) for text in asked["texts"]]
        return {
            "bare": bare,
            "special": [tokenizer.encode(text) for text in asked["texts"]],
            "back": [tokenizer.decode(ids) for ids in bare],
            "ends": sorted({tokenizer.eos_token_id} | (tokenizer.additional_stop_token_ids or set())),
            "chats": [rendered(tokenizer, messages) for messages in asked["chats"]] if tokenizer.chat_template else [],
        }

    json.dump([answer(path) for path in asked["folders"]], sys.stdout)


if __name__ == "__main__":
    main()
