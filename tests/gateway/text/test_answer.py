"""An answer is the same however its tokens are cut into chunks."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.answer import Answer
from protos import common_pb2
from tests.gateway import tokenizers
from tokenization.tokenizer import Tokenizer

TEXT = "hello wörld, 你好 😀 one two three"


@cache
def tokenizer() -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizers.tiny(), eos_token="</s>"))


def ids() -> list[int]:
    return tokenizer().encode(TEXT, special=False)


def chunk(tokens: list[int], first: int = 0, *, scored: bool = False, finish: int = 0) -> common_pb2.TokenChunk:
    logprobs = [common_pb2.TokenLogprob(logprob=-(first + n)) for n in range(len(tokens))] if scored else []
    return common_pb2.TokenChunk(token_ids=tokens, logprobs=logprobs, finish=finish)  # type: ignore[arg-type]


@settings(max_examples=200)
@given(
    cuts=st.lists(st.integers(0, 60), max_size=8),
    stops=st.lists(st.sampled_from(["o w", "好 ", "😀", "two", "zzz", "three"]), max_size=2),
    scored=st.booleans(),
)
def test_answer_is_the_same_however_its_tokens_are_cut_into_chunks(
    cuts: list[int], stops: list[str], scored: bool
) -> None:
    def play(parts: list[list[int]]) -> tuple[str, int, str | None, list[float]]:
        answer = Answer(tokenizer(), stops=stops)
        text, first, scores = "", 0, []
        for index, part in enumerate(parts):
            finish = common_pb2.STOP if index == len(parts) - 1 else 0
            text += answer.push(chunk(part, first, scored=scored, finish=finish))
            scores += [one.logprob for one in answer.take_scored()]
            first += len(part)
            if answer.finish_reason is not None:
                break
        return text, answer.tokens, answer.finish_reason, scores

    bounds = [0, *sorted(cut for cut in cuts if cut <= len(ids())), len(ids())]
    cut = play([ids()[a:b] for a, b in zip(bounds, bounds[1:], strict=False)])
    assert cut == play([[token] for token in ids()])
    found = [TEXT.index(stop) for stop in stops if stop in TEXT]
    assert cut[0] == TEXT[: min(found, default=len(TEXT))]


def test_tokens_of_a_matched_stop_string_count_and_those_after_it_do_not() -> None:
    answer = Answer(tokenizer(), stops=["two"])
    text = answer.push(chunk(ids()))
    assert text == TEXT[: TEXT.index("two")]
    assert tokenizer().decode(ids()[: answer.tokens]).endswith("two")
    assert list(answer.latest) == ids()[: answer.tokens]
    assert answer.finish_reason == "stop"


def test_scored_token_of_the_stop_string_is_left_out() -> None:
    answer = Answer(tokenizer(), stops=["two"])
    text = answer.push(chunk(ids(), scored=True))
    told = answer.take_scored()
    assert tokenizer().decode([one.token for one in told]).startswith(text)
    assert all(one.offset < len(text) for one in told)


def test_finish_reason_of_the_engine_becomes_that_of_openai() -> None:
    for finish, reason in ((common_pb2.STOP, "stop"), (common_pb2.LENGTH, "length")):
        answer = Answer(tokenizer())
        answer.push(chunk(ids()[:2], finish=finish))
        assert answer.finish_reason == reason


def test_incomplete_character_at_the_end_becomes_the_replacement_character() -> None:
    by_byte = {tokenizer().token_bytes(token): token for token in range(300)}
    answer = Answer(tokenizer())
    assert answer.push(chunk([by_byte[b"\xf0"]])) == ""
    assert answer.push(chunk([], finish=common_pb2.LENGTH)) == "\ufffd"


def test_answer_cached_tokens_are_those_of_the_first_attempt() -> None:
    answer = Answer(tokenizer())
    answer.push(common_pb2.TokenChunk(token_ids=ids()[:2], cached_tokens=0))
    answer.push(common_pb2.TokenChunk(token_ids=ids()[2:3], cached_tokens=9))
    assert answer.cached_tokens == 0


def test_scored_tokens_of_sentence_pieces_have_their_offsets_in_the_text() -> None:
    from transformers import PreTrainedTokenizerFast

    pieces = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizers.sentence_piece(), eos_token="</s>"))
    before, said = (pieces.encode(text, special=False) for text in ("hello", "quick brown fox"))
    answer = Answer(pieces, before=before)
    text = answer.push(chunk(said, scored=True, finish=common_pb2.STOP))
    assert text == " quick brown fox"
    scored = answer.take_scored()
    written = [pieces.token_bytes(one.token).decode() for one in scored]
    assert "".join(written) == text
    assert [text[one.offset :].startswith(token) for one, token in zip(scored, written, strict=True)] == [True] * len(
        said
    )
