"""Documents lead to what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    "/".join(path.relative_to(ROOT).parts)
    for top in ROOT.iterdir()
    if not top.name.startswith(".")
    for path in (top.rglob("*") if top.is_dir() else [top])
    if not {"node_modules", "__pycache__"} & {*path.parts}
]
DOCUMENTS = [name for name in FILES if name.endswith(".md")]
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"`([\w./-]+\.(?:py|proto|sh))`")
_DOCUMENT = re.compile(r"\bdocs/[\w./-]+\.md\b")
_COMMAND = re.compile(r"\bpython3? -m ([\w.]+)|\bfrom ([\w.]+) import (\w+)")


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#+ +(.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_of_a_document_lead_to_files_and_headings_that_exist(name):
    text = (ROOT / name).read_text()
    for link in _LINK.findall(text):
        if re.match(r"https?:|mailto:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / name).parent / target if target else ROOT / name
        assert path.exists(), f"{name}: {link}"
        assert not anchor or anchor in anchors(path.read_text()), f"{name}: {link}"


ENDS = {"/".join(parts[i:]) for file in FILES for parts in [file.split("/")] for i in range(len(parts))}
"""Files of the tree by their paths, and by the ends of these."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_a_document_names_exist(name):
    assert [file for file in _FILE.findall((ROOT / name).read_text()) if file not in ENDS] == []


def test_files_that_the_code_names_exist():
    texts = {name: (ROOT / name).read_text() for name in FILES if name.endswith((".py", ".proto"))}
    found = {name: [file for file in _FILE.findall(text) if file not in ENDS] for name, text in texts.items()}
    assert {name: files for name, files in found.items() if files} == {}


def modules(text: str) -> list[str]:
    """Modules of the tree that commands in a text run, or import from. A name that is imported counts as a module
    unless the file that it is imported from has it. Names in capitals stand for any."""
    found = []
    for run, module, name in _COMMAND.findall(text):
        path = (run or module).rstrip(".").replace(".", "/")
        source = ROOT / f"{path}.py"
        has_name = source.is_file() and re.search(rf"\b{name}\b", source.read_text())
        if (ROOT / path.partition("/")[0]).is_dir() and not path.rpartition("/")[2].isupper():
            found.append(path if run or has_name else f"{path}/{name}")
    return found


def test_modules_that_commands_in_documents_and_scripts_run_exist():
    kinds = (".md", ".sh", "Makefile", ".service")
    texts = {name: (ROOT / name).read_text() for name in FILES if name.endswith(kinds)}
    texts |= {name: "\n".join(_runs((ROOT / name).read_text())) for name in FILES if name.endswith(".py")}
    found = {
        name: [path for path in modules(text) if not (ROOT / path).is_dir() and f"{path}.py" not in FILES]
        for name, text in texts.items()
    }
    assert modules("python -m benchmarks.none, from loader.checkpoints import none") == [
        "benchmarks/none",
        "loader/checkpoints/none",
    ]
    assert {name: paths for name, paths in found.items() if paths} == {}


def _runs(text: str) -> list[str]:
    """Lines of Python's source that name a command; its imports are no commands."""
    return [line for line in text.split("\n") if "python -m " in line and "import" not in line]


def test_documents_that_any_file_names_exist():
    kinds = (".md", ".py", ".proto", ".sh", ".toml", ".yaml", ".service", ".socket", ".env")
    texts = {name: (ROOT / name).read_text() for name in FILES if name.endswith(kinds)}
    found = {name: [path for path in _DOCUMENT.findall(text) if path not in FILES] for name, text in texts.items()}
    assert {name: paths for name, paths in found.items() if paths} == {}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_has_no_marks_of_a_merge(name):
    assert re.findall(r"^(?:<{7} |={7}$|>{7} ).*", (ROOT / name).read_text(), flags=re.M) == []


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "docs/operate/settings.md"])
def test_prose_of_a_document_fits_into_120_columns(name):
    """Blocks of code, tables and single links may be longer; settings.md is generated."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / name).read_text(), flags=re.M | re.S)
    prose = [line for line in text.split("\n") if not re.match(r" {4}|\s*\||> .*\]\(", line)]
    assert [line for line in prose if len(line) > 120] == []


def test_comments_of_scripts_messages_and_configurations_fit_into_120_columns():
    kinds = (".sh", ".proto", ".toml", ".yaml", ".yml", ".service", ".socket", ".env", "Makefile")
    comments = {
        name: [line for line in (ROOT / name).read_text().split("\n") if re.match(r"\s*(#|//)", line)]
        for name in FILES
        if name.endswith(kinds)
    }
    assert {
        name: long for name, lines in comments.items() if (long := [line for line in lines if len(line) > 120])
    } == {}
