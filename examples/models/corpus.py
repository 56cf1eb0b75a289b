"""What the demonstration models read: free documentation of a Debian machine, as text and as topics to talk about.

A source is read from where its Debian packages put it and becomes sections: a heading and the paragraphs under it. The
sections become two things: documents, for plain continuation, and topics, from which dialogues are made. Code and
tables are left out: a model of two million parameters speaks prose better than it programs.
"""

from __future__ import annotations

import html.parser
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SHORT_ANSWER = (110, 420)  # characters: stop after the paragraph that passes the first, never pass the second
LONG_ANSWER = (1200, 1700)


@dataclass(frozen=True)
class Section:
    """A heading and the paragraphs under it; `kind`: section, question, term, function, module, other (no topic)."""

    kind: str
    name: str
    paragraphs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """Packages of documentation, the licences that their copyright files state, and how their pages become sections."""

    packages: str
    licences: str
    read: Callable[[], Iterator[list[Section]]]


def clean(text: str) -> str:
    """One line of text with plain quotation marks and single spaces."""
    plain = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " ", "¶": None}
    return re.sub(r"\s+", " ", text.translate(str.maketrans(plain))).strip()


def shortened(paragraphs: list[str], enough: int, most: int) -> str:
    """Whole paragraphs until there is `enough`, cut at a sentence's end before `most` characters; '' if none is."""
    text = ""
    for paragraph in paragraphs:
        if len(text) >= enough:
            break
        text = f"{text}\n\n{paragraph}" if text else paragraph
    if len(text) > most or not text.endswith((".", "!", "?")):
        end = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!etc)[.!?][)\"']?(?=\s|$)")
        ends = [match.end() for match in end.finditer(text[:most])]
        text = text[: ends[-1]] if ends else ""
    return text.strip()


class BlockReader(html.parser.HTMLParser):
    """Flattens a page of documentation into (kind, id, text) blocks, where kind is title, dt or para."""

    VOID = frozenset("br hr img input link meta area col wbr".split())
    SKIPPED_TAGS = frozenset("pre script style table head nav footer sup".split())
    SKIPPED_CLASSES = frozenset(
        "docnav related sphinxsidebar footer headerlink toc toctree-wrapper figure contents footnote-reference seealso"
        " admonition-title versionadded versionchanged deprecated sig-paren mobile-nav index-list example-contents"
        " navheader navfooter mediaobject example banner".split()
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str, str]] = []
        self._open: list[tuple[str, bool, bool]] = []  # tag, its content is skipped, it is a block of its own
        self._kind, self._id, self._text = "para", "", ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.VOID:
            return
        given = dict(attrs)
        classes = set((given.get("class") or "").split())
        title = re.fullmatch(r"h[1-5]", tag) is not None or (tag == "p" and "title" in classes)
        block = title or tag in {"p", "li", "dt", "dd"} or (tag == "div" and "para" in classes)
        if block:
            self._flush()
            self._kind = "title" if title else "dt" if tag == "dt" else "para"
            self._id = given.get("id") or ""
        skipped = tag in self.SKIPPED_TAGS or bool(classes & self.SKIPPED_CLASSES)
        skipped |= (
            "emphasis" in classes and self._kind == "title"
        )  # the handbook's "BACK TO BASICS" before a box's title
        self._open.append((tag, skipped, block))

    def handle_endtag(self, tag: str) -> None:
        if not any(tag == opened for opened, _, _ in self._open):
            return
        while self._open:
            opened, _, block = self._open.pop()
            if block:
                self._flush()
            if opened == tag:
                return

    def handle_data(self, data: str) -> None:
        if not any(skipped for _, skipped, _ in self._open):
            self._text += data

    def _flush(self) -> None:
        if text := clean(self._text):
            self.blocks.append((self._kind, self._id, text))
        self._kind, self._id, self._text = "para", "", ""


def read_html(path: Path, main: str) -> list[tuple[str, str, str]]:
    """The blocks of a page, from the text `main` on where the page has it."""
    page = path.read_text(encoding="utf-8", errors="replace")
    reader = BlockReader()
    reader.feed(page[max(page.find(main), 0) :])
    reader.close()
    return reader.blocks


def debian_books() -> Iterator[list[Section]]:
    """The handbook, policy, reference and developers' reference of Debian, the handbook's boxes as sections."""
    books = {
        "/usr/share/doc/debian-handbook/html/en-US": "*.html",
        "/usr/share/doc/debian-policy/policy.html": "ch-*.html",
        "/usr/share/debian-reference": "ch*.en.html",
        "/usr/share/developers-reference": "*.html",
    }
    for path in (path for folder, pages in books.items() for path in sorted(Path(folder).glob(pages))):
        if path.stem in {"index", "ix01", "developers-reference", "search", "genindex"}:
            continue
        sections: list[Section] = []
        for kind, _, text in read_html(path, 'role="main"' if "policy" in str(path) else "<body"):
            if kind == "title":
                name = re.sub(r"^(Chapter |Appendix )?[\dA-C]+(\.\d+)*\.\s+", "", text)
                sections.append(Section("question" if name.endswith("?") else "section", name))
            elif sections and len(text) > 30:
                sections[-1].paragraphs.append(text)
        yield [section for section in sections if not re.match(r"(Table|Figure|Example) ", section.name)]


def python_documentation() -> Iterator[list[Section]]:
    """Python's glossary, tutorial, FAQ, howtos, language and library reference."""
    root = max(Path("/usr/share/doc").glob("python3.*/html"), default=Path("/usr/share/doc/python3/html"))
    functions = (
        "functions stdtypes itertools functools os.path random math json shutil asyncio-task time contextlib"
        " collections textwrap glob copy statistics heapq bisect pathlib"
    ).split()
    notes = (
        "Source code:",
        "New in",
        "Changed in",
        "Deprecated since",
        "See also",
        "Availability",
        "CPython implementation",
    )
    parts = [sorted((root / part).glob("*.html")) for part in ("tutorial", "faq", "howto", "reference", "library")]
    for path in [root / "glossary.html", *(page for part in parts for page in part)]:
        library = path.parent.name == "library"
        if path.stem in {"index", "logging-cookbook", "clinic", "curses", "isolating-extensions", "grammar"}:
            continue
        sections: list[Section] = []
        for position, (kind, identity, text) in enumerate(read_html(path, 'role="main"')):
            if kind == "dt" and identity.startswith("term-"):
                sections.append(Section("term", text))
            elif kind == "dt" and re.fullmatch(r"[A-Za-z_][\w.]*", identity) and path.stem in functions:
                sections.append(Section("function", identity))
            elif kind == "dt":
                sections.append(Section("other", text))
            elif kind == "title":
                name = re.sub(r"^\d+(\.\d+)*\.\s+", "", text)
                module = re.fullmatch(r"([a-z_][\w.]*) - .*", name.replace("\u2014", "-")) if library else None
                if module and position < 3:
                    sections.append(Section("module", module[1]))
                else:
                    kind = "question" if name.endswith("?") else "other" if library else "section"
                    sections.append(Section(kind, name))
            elif sections and len(text) > 30 and not text.startswith(notes):
                sections[-1].paragraphs.append(text)
        yield sections


def perl_manual() -> Iterator[list[Section]]:
    """Perl's manual without the pages that list changes, internals, other systems and the interfaces for C."""
    root = max(Path("/usr/share/perl").glob("5.*/pod"), default=Path("/usr/share/perl/5/pod"))
    others = re.compile(
        r"perl(5.*|delta|api|apio|intern|guts|xs.*|toc|uniprops|diag|hist|modlib|call|embed|reapi|reguts|iol|interp|hack.*"
        r"|debguts|ebcdic|hpux|vms|os2|os390|os400|win32|solaris|cygwin|aix|android|bs2000|ce|cn|jp|ko|tw|dos|freebsd|haiku|hurd"
        r"|irix|linux|macos.*|netbsd|openbsd|plan9|qnx|riscos|symbian|synology|tru64|vos|amiga|artistic|gpl|book|community|doc"
        r"|util|source|git|policy|podspec|clib|mroapi|rehash|pragma|bug|gov|security)"
    )
    apart = set("AUTHOR AUTHORS VERSION NAME COPYRIGHT BUGS".split()) | {"AUTHOR AND COPYRIGHT", "SEE ALSO"}
    for path in sorted(root.glob("*.pod")):
        page = path.stem
        if others.fullmatch(page):
            continue
        sections: list[Section] = []
        for chunk in re.split(r"\n\s*\n", path.read_text(encoding="utf-8", errors="replace")):
            if not chunk or chunk[0].isspace():
                continue  # verbatim: code
            if heading := re.match(r"=(head\d|item)\s+(.*)", chunk, re.S):
                name = clean(plain_pod(heading[2].split("\nX<")[0]))
                kind = "question" if name.endswith("?") else "section"
                if heading[1] == "item":
                    kind = {"perlglossary": "term", "perlfunc": "function"}.get(page, "other")
                if kind == "function":
                    name = re.split(r"[\s(;]", name.strip())[0]
                    if sections and sections[-1].name == name and not sections[-1].paragraphs:
                        continue  # the same function with other arguments
                sections.append(Section(kind, name))
            elif not chunk.startswith("=") and sections:
                if len(text := clean(plain_pod(chunk))) > 30:
                    sections[-1].paragraphs.append(text)
        yield [section for section in sections if section.name.upper() not in apart]


def plain_pod(text: str) -> str:
    """Pod without its formatting codes: C<x> is x, L<text|target> is text, X<index> is nothing."""
    named = {
        "lt": "\x01",
        "gt": "\x02",
        "sol": "/",
        "verbar": "|",
    }  # placeholders: no angle bracket may appear before the end
    text = re.sub(r"E<(\w+)>", lambda m: named.get(m[1], ""), text)
    text = re.sub(
        r"\b([A-Z])<<+\s(.*?)\s>+>", lambda m: m[2].replace("<", "\x01").replace(">", "\x02"), text, flags=re.DOTALL
    )
    code = re.compile(r"([BCFILSXZ])<([^<>]*)>")
    while code.search(text):
        text = code.sub(_pod_code, text)
    return text.replace("\x01", "<").replace("\x02", ">")


def _pod_code(match: re.Match[str]) -> str:
    letter, content = match[1], match[2]
    if letter in "XZ":
        return ""
    if letter == "L" and not content.startswith("http"):
        shown, _, target = content.partition("|")
        return shown if target else content.replace("/", " ").strip()
    return content


SOURCES = {
    "debian": Source(
        "debian-handbook debian-policy debian-reference-en developers-reference",
        "GPL-2.0-or-later (the handbook also CC-BY-SA-3.0)",
        debian_books,
    ),
    "python": Source("python3-doc", "PSF-2.0", python_documentation),
    "perl": Source("perl-doc", "Artistic-1.0-Perl or GPL-1.0-or-later", perl_manual),
}


def collect(name: str) -> dict[str, list]:
    """The documents (strings) and topics (kind, name, short, long) of a source.

    Raises FileNotFoundError with the packages to install if this machine has none of the source.
    """
    source = SOURCES[name]
    documents: list[str] = []
    topics: dict[str, dict[str, str]] = {}
    for sections in source.read():
        lines: list[str] = []
        for section in sections:
            if prose := [text for text in section.paragraphs if not text.endswith(":")]:  # what came after was code
                lines += [section.name, *prose]
            short, full = shortened(section.paragraphs, *SHORT_ANSWER), shortened(section.paragraphs, *LONG_ANSWER)
            if section.kind != "other" and len(short) > 50 and 2 < len(section.name) < 90:
                topic = {"kind": section.kind, "name": section.name, "short": short, "long": full}
                topics.setdefault(section.name.lower(), topic)
        documents.append("\n\n".join(lines))
    if not topics:
        raise FileNotFoundError(f"{name} is not on this machine: apt-get install {source.packages}")
    return {"documents": [text for text in documents if len(text) > 400], "topics": list(topics.values())}
