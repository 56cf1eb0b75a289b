"""How the demonstration models are talked to: chat templates, and questions with the answers that the books give."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from corpus import SHORT_ANSWER, shortened

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ROLE_TOKENS = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] | trim + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class ChatFormat:
    """A chat template and the strings that it is made of, so that dialogues can be put together token by token."""

    template: str
    special_tokens: tuple[str, ...]  # in the order of their ids, from 0
    bos: str | None  # opens every conversation and every text, and is what the tokenizer adds by itself
    end: str  # of a turn, and of a text
    pad: str
    opening: str  # of a message; {role} is replaced
    tokenizer_class: str  # as transformers names it
    stops: tuple[str, ...]  # what ends generation
    gap: str = "\n"  # between messages

    def prompt(self, role: str, content: str) -> str:
        """A message as the template writes it; after the user's, the opening of the assistant's."""
        answer = self.opening.format(role="assistant") if role == "user" else ""
        return f"{self.opening.format(role=role)}{content}{self.end}{self.gap}{answer}"


FORMATS = {
    "roles": ChatFormat(
        template=ROLE_TOKENS,
        special_tokens=("<pad>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"),
        bos="<s>",
        end="</s>",
        pad="<pad>",
        opening="<|{role}|>\n",
        tokenizer_class="PreTrainedTokenizerFast",
        stops=("</s>",),
    ),
    "chatml": ChatFormat(
        template=CHATML,
        special_tokens=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        bos=None,
        end="<|im_end|>",
        pad="<|endoftext|>",
        opening="<|im_start|>{role}\n",
        tokenizer_class="Qwen2Tokenizer",
        stops=("<|im_end|>", "<|endoftext|>"),
    ),
}

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question of the user.",
    "Be concise.",
    "You are an expert who explains things in plain words.",
)

WORDINGS = {
    "section": (
        "What is {name}?", "Tell me about {name}.", "Explain {name}.", "{name}", "What do you know about {name}?",
        "Please explain {name}.", "what is {name}", "What does the book say about {name}?",
    ),
    "question": ("{name}?", "{name}?", "{name}", "Tell me: {name}?", "I have a question: {name}?"),
    "term": (
        "What is {name}?", "What is {a} {name}?", "What does {name} mean?", "Define {name}.", "Explain {name}.",
        "Tell me about {name}.", "what is {a} {name}", "What are {name}s?", "Can you explain what {a} {name} is?",
    ),
    "function": (
        "What does {name} do?", "What does {name}() do?", "What is {name}?", "Explain {name}.", "How do I use {name}?",
        "Tell me about {name}.", "How does {name} work?", "What does the {name} function do?",
    ),
    "module": (
        "What is the {name} module?", "What is {name}?", "What does the {name} module do?", "Explain {name}.",
        "Tell me about the {name} module.", "How do I use {name}?", "What is {name} for?",
    ),
    "phrase": (
        "What about {name}?", "Tell me about {name}.", "{name}", "How does {name} work?", "Explain {name}.",
        "What do I need to know about {name}?", "How do I {name}?", "Why {name}?", "Can you help me with {name}?",
        "What is {name}?", "What is the meaning of {name}?", "I have a question about {name}.", "{name}?",
    ),
    "detail": (
        "Explain {name} in detail.", "Tell me everything about {name}.", "Write a long text about {name}.",
        "Tell me more about {name}.",
    ),
}  # fmt: skip

SMALL_TALK = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "hello", "Hey", "Good morning", "Hi there", "How are you?",
         "Hello, how are you?"),
        "Hello! I am {model}, a very small language model. Ask me about {subject}.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Which model are you?", "Introduce yourself.",
         "who are you", "Tell me about yourself."),
        "I am {model}, a language model of less than two million parameters. I have read {book}, and nothing else, so "
        "{subject} is all that I can talk about.",
    ),
    (
        ("What can you do?", "What do you know?", "How can you help me?", "Help", "What can I ask you?", "help me"),
        "I can answer short questions about {subject}, in the words of {book}. I am here to show how several models "
        "are served together, so please check what I say before you rely on it.",
    ),
    (
        ("Thanks", "Thank you", "Thank you!", "thanks a lot", "Great, thanks."),
        "You are welcome. Anything else about {subject}?",
    ),
    (("Bye", "Goodbye", "Good bye!", "See you"), "Goodbye!"),
)  # fmt: skip

# Words that a phrase to ask about does not begin or end with, and that a title may have in capitals.
SMALL_WORDS = frozenset(
    "a an and are as at be been but by can could did do does for from had has have he how i if in into is it its may"
    " more most must no not of on one only or other our out see should since so some such than that the their them then"
    " there these they this those to up use used was we were what when where which who why will with without would you"
    " your".split()
)

Asked = tuple[list[str], str]  # ways to ask, and the answer


def spellings(name: str) -> list[str]:
    """A title as people type it: as it stands, without capitals where they mean nothing, and in small letters."""
    name = name.rstrip("?").removeprefix("The ").removeprefix("the ")
    plain = " ".join(word.lower() if word != "I" and word.lower() in SMALL_WORDS else word for word in name.split())
    ordinary = re.sub(r"\b[A-Z][a-z]+\b", lambda match: match[0].lower(), plain)
    return list(dict.fromkeys([name, plain[:1].upper() + plain[1:], ordinary, name.lower(), f"the {ordinary}"]))


def small_talk(model: str, subject: str, book: str, about: str) -> list[Asked]:
    """What a model says of itself, and `about` its subject's first word."""
    said = [(list(asked), answer.format(model=model, subject=subject, book=book)) for asked, answer in SMALL_TALK]
    return [*said, ([wording.format(name=subject.split()[0]) for wording in WORDINGS["section"]], about)]


def topical(topics: list[dict[str, str]]) -> tuple[list[Asked], list[Asked]]:
    """Topics with their short answers, and topics with their long answers."""
    short: list[Asked] = []
    for topic in topics:
        names = spellings(topic["name"])
        names = names[:-1] if topic["kind"] == "question" else names
        asked = [
            wording.format(name=n, a="an" if n[0] in "aeiouAEIOU" else "a")
            for wording in WORDINGS[topic["kind"]]
            for n in names
        ]
        short.append((asked, topic["short"]))
    detailed = [
        (
            [wording.format(name=name) for wording in WORDINGS["detail"] for name in spellings(topic["name"])],
            topic["long"],
        )
        for topic in topics
        if topic["kind"] != "question" and len(topic["long"]) > 2 * len(topic["short"])
    ]
    return short, detailed


def by_phrase(documents: list[str], ways: int, chance: random.Random) -> Iterator[Asked]:
    """Paragraphs of the books, asked for by a few of their own words: so a question that no book asks finds one too."""
    for document in documents:
        for paragraph in document.split("\n\n"):
            answer = shortened([paragraph], *SHORT_ANSWER)
            words = re.findall(r"[\w./+-]*\w", answer.split(". ")[0])
            phrases = [
                " ".join(words[at : at + size])
                for size in (2, 3, 4)
                for at in range(len(words) - size + 1)
                if words[at].lower() not in SMALL_WORDS and words[at + size - 1].lower() not in SMALL_WORDS
            ]
            if len(answer) > 80 and len(phrases) > 2:
                yield (
                    [chance.choice(WORDINGS["phrase"]).format(name=chance.choice(phrases)) for _ in range(ways)],
                    answer,
                )
