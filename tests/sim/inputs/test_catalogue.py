"""What the simulator's own catalogue says of a model's shape, and what is refused of it."""

import pytest

from sim.inputs.catalogue import SHAPES, CatalogueError, read


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


def test_catalogue_with_more_active_weights_than_weights_is_refused(tmp_path):
    with pytest.raises(CatalogueError, match="active_bytes .* more than weights_bytes 1000"):
        models(tmp_path, 'shape = "gpt-oss-20b"', "weights_bytes = 1000")
