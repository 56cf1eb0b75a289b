"""What the simulator's own catalogue says of a model's shape, and what is refused of it."""

from dataclasses import replace

import pytest

from kv_kinds.layout import BEYOND_WINDOW_TOKENS, KvLayout, attention, latent, of_tokens, state, window
from sim.inputs.catalogue import SHAPES, CatalogueError, FolderModel, FolderQuestion, read


def models(tmp_path, *lines):
    path = tmp_path / "models.toml"
    path.write_text("\n".join(["[[model]]", 'name = "m"', *lines]))
    return read(path)


def shape(tmp_path, *lines):
    return models(tmp_path, *lines).find("m").shape


def test_mixture_has_its_active_weights_by_shape_or_by_itself(tmp_path):
    assert shape(tmp_path, 'shape = "30b-a3b"') == SHAPES["30b-a3b"]
    own = shape(tmp_path, "weights_bytes = 900", "kv_bytes_per_token = 8", "active_bytes = 300")
    assert (own.weights_bytes, own.active_bytes) == (900, 300)


def test_shape_has_the_kinds_of_kv_that_the_catalogue_names(tmp_path):
    kinds = ("window_bytes_per_token = 90", "window_tokens = 1024", "state_bytes = 4096")
    own = shape(tmp_path, "weights_bytes = 900", "kv_bytes_per_token = 8", *kinds)
    assert own.kv.kinds == (attention(8), window(90, 1024, BEYOND_WINDOW_TOKENS), state(4096))
    assert shape(tmp_path, 'shape = "8b"').kv == of_tokens(131_072)


@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        (
            ("window_bytes_per_token = 90", "window_tokens = 1024"),
            (window(90, 1024, BEYOND_WINDOW_TOKENS),),
        ),
        (("state_bytes = 4096",), (state(4096),)),
    ],
)
def test_shape_without_a_kind_that_keeps_every_token_needs_no_bytes_of_one(tmp_path, lines, kinds):
    assert shape(tmp_path, "weights_bytes = 900", *lines).kv.kinds == kinds


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("weights_bytes = 900", "weights_bytes without its KV: give it kv_bytes_per_token, window_bytes_per_token or"),
        ("kv_bytes_per_token = 8", "it needs a folder, a shape, or weights_bytes and its KV"),
    ],
)
def test_row_without_weights_or_without_kv_is_refused_with_what_to_write(tmp_path, line, why):
    with pytest.raises(CatalogueError, match=why):
        models(tmp_path, line)


MIXED = FolderModel(900, 300, 12, 0.25, KvLayout((latent(8), window(90, 64, 32), state(4096))), 8192)


def read_folder(tmp_path, *lines):
    """(the model, what was asked of the reader of folders) of a row with the folder `models/m`."""
    asked = []

    def folders(question):
        asked.append(question)
        return MIXED

    path = tmp_path / "models.toml"
    path.write_text("\n".join(["[[model]]", 'name = "m"', 'folder = "models/m"', *lines]))
    return read(path, folders=folders).find("m"), asked


def test_row_with_a_folder_has_what_the_folder_says_relative_to_the_catalogue(tmp_path):
    spec, asked = read_folder(tmp_path)
    assert asked == [FolderQuestion(tmp_path / "models/m", 1, 0, "", False)]
    kept = (spec.shape.weights_bytes, spec.shape.active_bytes, spec.shape.layers, spec.shape.expert_share)
    assert kept == (900, 300, 12, 0.25) and spec.context_tokens == 8192
    assert spec.shape.kv_bytes_per_token == 8
    assert [spec.shape.kv.bytes_of(tokens) for tokens in (1, 50, 1000)] == [
        MIXED.kv.bytes_of(tokens) for tokens in (1, 50, 1000)
    ]


def test_settings_of_a_row_go_to_the_reader_of_its_folder_or_replace_what_it_says(tmp_path):
    lines = ("devices = 2", "weights_bytes = 700", 'kv_dtype = "fp8"', "unverified = true")
    spec, asked = read_folder(tmp_path, *lines, "layers = 3", "active_bytes = 30", "context_tokens = 100")
    assert asked == [FolderQuestion(tmp_path / "models/m", 2, 700, "fp8", True)]
    assert (spec.parts, spec.shape.layers, spec.shape.active_bytes, spec.context_tokens) == (2, 3, 30, 100)


def test_active_bytes_of_a_row_are_experts_also_where_its_folder_knows_of_none(tmp_path):
    path = tmp_path / "models.toml"
    path.write_text('[[model]]\nname = "m"\nfolder = "m"\nactive_bytes = 30\n')
    shape = read(path, folders=lambda question: replace(MIXED, expert_share=1.0)).find("m").shape
    assert (shape.active_bytes, shape.expert_share) == (30, 0.0)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('shape = "8b"', "shape beside folder, which says it"),
        ("state_bytes = 3", "state_bytes beside folder, which says it"),
        ("context_tokens = 9000", "context_tokens 9000 are more than the 8192 of .*models/m"),
        ('kv_dtype = "int8"', "kv_dtype is \"fp8\" or left out, not 'int8'"),
        ("unverified = 1", "unverified has to be true or false, not 1"),
    ],
)
def test_row_that_contradicts_its_folder_is_refused(tmp_path, line, why):
    with pytest.raises(CatalogueError, match=why):
        read_folder(tmp_path, line)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (('folder = "m"',), "folder is read by prismctl plan only: give it a shape, or weights_bytes and its KV"),
        (('shape = "8b"', 'kv_dtype = "fp8"'), "kv_dtype is for a row with a folder"),
        (('path = "m"',), "unknown path; .*; the path of the services' catalogue is folder here"),
    ],
)
def test_row_with_a_folder_where_none_is_read_is_refused_with_what_to_write(tmp_path, lines, why):
    with pytest.raises(CatalogueError, match=why):
        models(tmp_path, *lines)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("window_tokens = 1024", "window_bytes_per_token and window_tokens are given together"),
        ("window_bytes_per_token = 90", "window_bytes_per_token and window_tokens are given together"),
        ("state_bytes = 0", "state_bytes has to be a number above zero, not 0"),
    ],
)
def test_catalogue_with_half_a_kind_of_kv_is_refused(tmp_path, line, why):
    with pytest.raises(CatalogueError, match=why):
        models(tmp_path, 'shape = "8b"', line)


@pytest.mark.parametrize("names", [("*", "chat"), ("chat", "chat"), ("sg-*", "sg-large-*"), ("m[12]", "m[12]")])
def test_row_that_an_earlier_one_leaves_no_model_to_is_refused(tmp_path, names):
    path = tmp_path / "models.toml"
    path.write_text("".join(f'[[model]]\nname = "{name}"\nshape = "8b"\n' for name in names))
    with pytest.raises(CatalogueError, match=r"model 2 \(.*\): no model is left to it, as .* before it"):
        read(path)


@pytest.mark.parametrize("names", [("chat", "*"), ("sg-large-*", "sg-*"), ("m?", "m*"), ("[ab]", "*")])
def test_rows_that_each_have_a_model_are_taken(tmp_path, names):
    path = tmp_path / "models.toml"
    path.write_text("".join(f'[[model]]\nname = "{name}"\nshape = "8b"\n' for name in names))
    read(path)


def test_context_without_room_for_a_prompt_and_an_answer_is_refused(tmp_path):
    with pytest.raises(CatalogueError, match="context_tokens has to be 2 or more"):
        models(tmp_path, 'shape = "8b"', "context_tokens = 1")


def test_shape_of_gpt_oss_keeps_half_of_a_token_beyond_its_window(tmp_path):
    kv = shape(tmp_path, 'shape = "gpt-oss-20b"').kv
    assert kv.bytes_of(100) == 100 * 49_152
    assert kv.bytes_of(20_000) - kv.bytes_of(10_000) == 10_000 * 24_576
    assert shape(tmp_path, 'shape = "gpt-oss-20b"', "kv_bytes_per_token = 49152").kv.bytes_of(9_000) == 9_000 * 49_152


def test_catalogue_with_more_active_weights_than_weights_is_refused(tmp_path):
    with pytest.raises(CatalogueError, match="active_bytes .* more than weights_bytes 1000"):
        models(tmp_path, 'shape = "gpt-oss-20b"', "weights_bytes = 1000")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("model = [3]", "model 1: it is 3, not a table"),
        ('[[model]]\nname = "m"\nshape = ["8b"]', r"no shape \['8b'\]; there are 1b"),
        ('[[model]]\nname = "m"\nshape = "9b"', "no shape '9b'; there are 1b"),
    ],
)
def test_catalogue_with_a_value_of_another_kind_is_refused(tmp_path, text, why):
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(CatalogueError, match=why):
        read(path)
