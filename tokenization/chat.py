"""Messages to a prompt, by the chat template of a checkpoint's folder.

Templates are written for the messages that their authors had in mind. What they do not know they leave out without a
word, or write in a form that the model never saw; so roles are checked here, before a model answers to half of a
conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from services.errors import Invalid, Unmet

Message = Mapping[str, Any]
"""A message of OpenAI's API: role, content (text, or a list of parts with a text), and what else belongs to it."""

TAKEN = frozenset(
    (
        # Arguments of the functions of transformers that render a template.
        *("conversation", "conversations", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "self"),
        # Variables that a template gets beside its own options.
        *("messages", "raise_exception", "strftime_now"),
        # Functions that Jinja defines.
        *("range", "dict", "lipsum", "cycler", "joiner", "namespace"),
    )
)
"""Names that no option of a template's own can have."""
MOST_ROLES = 32
"""Most roles in a conversation: for each that is new the template is tried once more."""
_REFUSED = "the model's chat template refused the messages: "
_LONGEST_KEPT = 64
"""Most characters of a role that is remembered."""
_USUAL_ROLES = frozenset({"system", "user", "assistant", "tool"})
_MARK = "⟨content of this role⟩"
"""Content that stands in for a message's, to find out whether a template writes it."""
_IN_SETTINGS = "chat_template of tokenizer_config.json"
_HELLO = {"role": "user", "content": "hello"}
_IN_A_PART = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
_BRIEFED = {"role": "system", "content": "Be brief."}
_PAIRS: Sequence[Sequence[Message]] = (
    [{"role": "query", "content": "hello?"}, {"role": "document", "content": "hello"}],
    [_HELLO, _HELLO],
)
"""The plainest there is for templates of rerankers."""
_PLAINEST: Sequence[Sequence[Message]] = ([_HELLO], [_BRIEFED, _HELLO], [_IN_A_PART], [_BRIEFED, _IN_A_PART])
"""The plainest chat there is, in the forms that templates may want."""
_LONGEST_WHY = 300
"""Most characters of what a template says that go into an error."""
_OF_IMAGES = ("image", "audio", "video", "vision")
_LOOPED = ("message", "msg", "m")
"""Names that templates give a message where they go through the parts of its content."""
bounded: Callable[[], AbstractContextManager[object]] = nullcontext
"""Bound on the time in which a template makes the plainest prompts. A process that may interrupt itself replaces it
(`trial.py`)."""


class WrongMessage(Invalid):
    """A message that the model's chat template refuses."""

    def __init__(self, message: str, place: str) -> None:
        """`place`: the message, or the part of it that is wrong, as an index of messages ("[1].role")."""
        super().__init__(message)
        self.place = place


class UnknownRole(WrongMessage):
    """A role that the model's chat template leaves out, or refuses."""

    def __init__(self, message: str, index: int) -> None:
        """`index`: place of the first message that has the role."""
        super().__init__(message, f"[{index}].role")


class Template:
    """The chat template of one folder, or all of them where it has one for tools as well."""

    def __init__(self, folder_tokenizer: Any, places: Mapping[str, str]) -> None:
        """`folder_tokenizer`: a tokenizer of transformers. `places`: files that hold templates, by the templates'
        names. Raises Unmet for a template that does not compile, and for one that makes no prompt of the plainest chat:
        it can hardly make one of any."""
        self._hf = folder_tokenizer
        template = getattr(folder_tokenizer, "chat_template", None) or ""
        texts = {"default": template} if isinstance(template, str) else template
        self.text = "\n".join(texts.values())
        """Text of all templates; empty if there is none."""
        for name, text in texts.items():
            if text:
                _compile(text, places.get(name, _IN_SETTINGS))
        self._written: set[str] = set()
        """Roles whose messages were seen in a prompt. Number and length are bounded, because clients make roles up."""
        with bounded():
            why = self._refusal() if self.text else None
        if why is not None:
            place = places.get("default") or ", ".join(places.values()) or _IN_SETTINGS
            raise Unmet(f"its chat template makes no prompt of a message of a user: {place}: {why}")

    def _refusal(self) -> str | None:
        """What is wrong with the plainest chat, in one line; None where the template takes it in any of its forms."""
        if isinstance(self._hf.chat_template, dict) and "default" not in self._hf.chat_template:
            return f"none of its templates ({', '.join(self._hf.chat_template)}) is named default"
        first = None
        for messages in (*_PLAINEST, *_PAIRS):
            try:
                self.render(messages, {})
            except Exception as error:  # also what is not the messages' fault
                first = first or error
            else:
                return None
        cause = (first.__context__ if isinstance(first, Invalid) else None) or first
        kind = "" if type(cause).__module__.startswith(("jinja2", __name__)) else f"{type(cause).__name__}: "
        return kind + " ".join(str(cause).split())[:_LONGEST_WHY]

    def render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        """The prompt of `messages`. `options`: the template's own, by name, and `tools`. A message of role "developer"
        has role "system" where the template does not name the former. Raises Invalid when there is no template or it
        refuses the messages, UnknownRole when it leaves out those of a role, WrongMessage when the message that it
        refuses can be found."""
        if not self.text:
            raise Invalid("this model has no chat template: use /v1/completions")
        options = {"add_generation_prompt": True, **options}
        if "developer" not in self.text:
            messages = [{**one, "role": "system"} if one.get("role") == "developer" else one for one in messages]
        roles = {str(message.get("role")) for message in messages}
        if len(roles) > MOST_ROLES:
            raise Invalid(f"the messages have {len(roles)} roles: at most {MOST_ROLES} are taken")
        shown = self._shaped(messages, options)
        try:
            prompt = self._applied(shown, options)
        except Invalid as error:
            self._blame_role(messages, error)
            self._blame_message(shown, options, error)
            raise
        for role in roles - self._written:
            self._check_written(role, shown, options)
        return prompt

    def _shaped(self, messages: Sequence[Message], options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Messages as SGLang's server passes them to a template: nothing that is null, contents of several parts as
        lists for templates that go through them, otherwise as one text with spaces between the parts."""
        has_tools = options.get("tools") is not None
        chosen = self._hf.get_chat_template(None, [] if has_tools else None)
        lists = _goes_through_parts(chosen)
        shaped = []
        for message in messages:
            told = {name: value for name, value in message.items() if value is not None}
            content = told.setdefault("content", "")
            if isinstance(content, list):
                texts = [str(part["text"]) for part in content]
                as_list = lists and told.get("role") != "tool"
                told["content"] = [{"type": "text", "text": text} for text in texts] if as_list else " ".join(texts)
            shaped.append(told)
        return shaped

    def _applied(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        import jinja2

        tools = options.get("tools")
        try:
            try:
                return str(self._hf.apply_chat_template(list(messages), tokenize=False, **options))
            except Exception:
                if not tools:
                    raise
            # Some templates take functions without what OpenAI puts around them.
            bare = {**options, "tools": [tool.get("function", tool) for tool in tools]}
            return str(self._hf.apply_chat_template(list(messages), tokenize=False, **bare))
        except jinja2.TemplateError as error:
            raise Invalid(f"{_REFUSED}{error}") from None
        except Exception as error:  # a template is a program: it divides, recurses, and counts too far
            raise Invalid(f"the messages do not suit the model's chat template: {error}") from None

    def _blame_role(self, messages: Sequence[Message], error: Invalid) -> None:
        """Raises UnknownRole where the template refused messages and one of them has a role that it does not name."""
        for index, one in enumerate(messages):
            role = str(one.get("role"))
            if role not in _USUAL_ROLES and role not in self.text:
                said = str(error).removeprefix(_REFUSED)
                message = f"The model's chat template does not know the role '{role}': {said}"
                raise UnknownRole(message, index) from None

    def _blame_message(self, shown: Sequence[Message], options: Mapping[str, Any], error: Invalid) -> None:
        """Raises WrongMessage where the template, which goes through messages in their order, refuses one of them and
        would take the rest. Tries some twenty conversations at most, none longer than this."""

        def refused(some: Sequence[Message]) -> bool:
            """Whether `some` are refused in the same words: without a message others may be in the wrong place."""
            try:
                self._applied(some, options)
            except Invalid as other:
                return str(other) == str(error)
            return False

        taken, index = 0, len(shown) - 1
        while taken < index:  # the first `taken` messages are not refused, those up to `index` are
            middle = (taken + index) // 2
            if refused(shown[: middle + 1]):
                index = middle
            else:
                taken = middle + 1
        role = shown[index].get("role")
        without_it = [*shown[:index], *shown[index + 1 :]]
        without_role = [one for one in shown if one.get("role") != role]
        if all(refused(some) for some in (without_it, without_role) if some) or not without_it:
            return
        plain = {"role": role, "content": "x"}
        of_role = refused([*shown[:index], plain])
        raise WrongMessage(str(error), f"[{index}].role" if of_role else f"[{index}]") from None

    def _check_written(self, role: str, shown: Sequence[Message], options: Mapping[str, Any]) -> None:
        """Raises UnknownRole where the prompt would be the same whatever the messages of `role` say."""
        places = [index for index, message in enumerate(shown) if message.get("role") == role and message["content"]]
        if not places:
            return
        marked = [_marked(one) if index in places else one for index, one in enumerate(shown)]
        try:
            written = _MARK in self._applied(marked, options)
        except Invalid:  # the template wants contents of a certain form, so it reads them
            return
        if not written:
            raise UnknownRole(f"The model's chat template leaves out messages of the role '{role}'.", places[0])
        if len(role) <= _LONGEST_KEPT and len(self._written) < MOST_ROLES:
            self._written.add(role)


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a content that differs from any other, in the form that it has."""
    as_list = isinstance(message["content"], list)
    return {**message, "content": [{"type": "text", "text": _MARK}] if as_list else _MARK}


def _compile(text: str, place: str = _IN_SETTINGS) -> Any:
    """Compiles a template. Raises Unmet, which names the `place` where it is written."""
    import jinja2
    from transformers.utils import chat_template_utils

    try:
        return chat_template_utils._compile_jinja_template(text)
    except jinja2.TemplateError as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise Unmet(f"its chat template does not compile: {place}{line}: {error.message}") from None
    except (ValueError, RecursionError) as error:  # Python refuses its numbers or depths
        raise Unmet(f"its chat template does not compile: {place}: {error}") from None


@cache
def _goes_through_parts(text: str) -> bool:
    """Whether a template takes contents as lists of parts. By SGLang's rule it does if it speaks of images, or has a
    loop over a message's content."""
    import jinja2
    from jinja2 import nodes

    if any(word in text for word in _OF_IMAGES):
        return True
    try:
        tree = _compile(text).environment.parse(text)
    except (jinja2.TemplateError, Unmet):
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: Any) -> bool:
    """Whether an expression is a message's content, filtered, tested or sliced or as it is."""
    from jinja2 import nodes

    while True:
        if isinstance(node, (nodes.Filter, nodes.Test)) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        else:
            break
    if isinstance(node, nodes.Getattr):
        named = node.attr == "content"
    elif isinstance(node, nodes.Getitem):
        named = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    else:
        return False
    return named and isinstance(node.node, nodes.Name) and node.node.name in _LOOPED
